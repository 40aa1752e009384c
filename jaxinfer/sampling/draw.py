"""Exact sampling from rows of logits: weights, truncation thresholds, the inverse distribution.

Weights are summed as integers because a row's result must not depend on its neighbours, and XLA
orders a float sum by the array's shape. Each probability weight is a fixed-point number (44
fractional bits, relative to the likeliest token), so any order of summation gives the same bits.

Nothing is sorted because sorting [8, 49152] takes 46 ms on a CPU with 2 cores. A threshold is found
among the few largest candidates or by bisecting the bits of a float32; every logit that is not
below it is kept.

`vocab_axes` names the mesh axes that shard V evenly (`vocabulary`). Then x is one device's shard;
arrays without V are replicated, and so is every result except weights. Because sums are exact, the
results are bitwise equal to those of one device. Some collectives run inside cond and while_loop:
their predicates depend on replicated values only, so every device takes the same branch.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Key, UInt32

from jaxinfer.sampling.vocabulary import (
    all_parts,
    global_ids,
    merge_first_largest,
    merge_largest,
    num_parts,
    vocab_size,
)
from jaxinfer.sharding.collectives import Axes, all_max, all_sum, rank

BLOCK = 128  # tokens whose weights are summed as one: 2**24 * 128 = 2**31 still fits 32 bits
NUM_CANDIDATES = 64  # largest logits examined before the whole row is searched for a threshold
NUM_LIMBS = 4  # a sum is uint32 [NUM_LIMBS, ...], 16 bits each once carried, lowest first
FRACTION_BITS = 44  # fractional bits of a weight
MAX_VOCAB_SIZE = 2**20  # this many weights of 1 fill the limbs


def first_largest(
    x: Float32[Array, "R V"], vocab_axes: Axes = ()
) -> tuple[Float32[Array, " R"], Int32[Array, " R"]]:
    """Return the largest entry of each row and the first token that has it.

    A row that contains NaN gives an unspecified token. If V is sharded, one collective is used.
    The search has two levels because XLA's argmax is scalar on CPU (24 ms for [64, 49152] on 2
    cores, against 0.4 ms here).
    """
    blocks = _blocks(x, -jnp.inf)
    block = jnp.argmax(jnp.max(blocks, axis=2), axis=1).astype(jnp.int32)
    inside = jnp.argmax(_take_block(blocks, block), axis=1).astype(jnp.int32)
    column = jnp.minimum(block * BLOCK + inside, x.shape[1] - 1)
    return merge_first_largest(jnp.max(x, axis=1), global_ids(column, x, vocab_axes), vocab_axes)


def argmax(x: Float32[Array, "R V"], vocab_axes: Axes = ()) -> Int32[Array, " R"]:
    """Return the token that `first_largest` finds."""
    return first_largest(x, vocab_axes)[1]


def uniform_bits(
    base_key: Key[Array, ""], seed: Int32[Array, " R"], position: Int32[Array, " R"]
) -> UInt32[Array, " R"]:
    """Return 32 random bits per row [R], which depend on (base key, seed, position) alone.

    `seed` contains the bits of a uint32.
    """

    def one(seed, position):
        key = jax.random.fold_in(jax.random.fold_in(base_key, seed), position)
        return jax.random.bits(key, (), jnp.uint32)

    return jax.vmap(one)(lax.bitcast_convert_type(seed, jnp.uint32), position)


def weights_of(
    x: Float32[Array, "R V"],
    temperature: Float32[Array, " R"],
    largest: Float32[Array, " R"] | None = None,
) -> Float32[Array, "R V"]:
    """Return exp((x - largest) / temperature) [R, V], at most 1: softmax without its denominator.

    `largest` is the largest logit of each row (None: computed from x); if V is sharded, it must be
    taken over the whole vocabulary.
    """
    largest = jnp.max(x, axis=1) if largest is None else largest
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    weights = jnp.minimum(jnp.exp((x - largest[:, None]) / temperature[:, None]), 1.0)
    # The barrier stores the weights once: two fusions that recompute them, one with a vectorized
    # and one with a scalar exp, might differ.
    return lax.optimization_barrier(weights)


def truncation_threshold(
    x: Float32[Array, "R V"],
    weights: Float32[Array, "R V"],
    top_k: Int32[Array, " R"],
    top_p: Float32[Array, " R"],
    vocab_axes: Axes = (),
) -> Float32[Array, " R"]:
    """Return the smallest logit that top_k (0: off) and then top_p (1: off) keep; -inf for all.

    `weights` are proportional to the probabilities. top_k keeps every logit with fewer than k
    larger ones. Of those, top_p keeps every logit whose larger ones have less than the share p of
    the weight, and always the largest. The threshold is nearly always among the NUM_CANDIDATES
    largest logits; otherwise the whole row is searched, with the same result.
    """
    values, columns = lax.top_k(x, min(NUM_CANDIDATES, x.shape[1]))
    beside = jnp.take_along_axis(weights, columns, axis=1)
    candidates = merge_largest(values, beside, NUM_CANDIDATES, vocab_axes)
    by_k = _top_k_threshold(x, candidates[0], top_k, vocab_axes)
    by_p = lambda: _top_p_threshold(x, weights, candidates, by_k, top_p, vocab_axes)
    return lax.cond(jnp.any(top_p < 1.0), lambda: jnp.maximum(by_k, by_p()), lambda: by_k)


def _top_k_threshold(x, values, top_k, vocab_axes):
    V, num_candidates = vocab_size(x, vocab_axes), values.shape[1]
    index = jnp.clip(top_k - 1, 0, num_candidates - 1)
    near = jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]
    is_far = (top_k > num_candidates) & (top_k < V)
    count = lambda value: jnp.sum(x > value[:, None], axis=1, dtype=jnp.int32)
    holds = lambda value: all_sum(count(value), vocab_axes) < top_k
    far = lax.cond(
        jnp.any(is_far), lambda: _smallest(holds, values[:, -1], is_far), lambda: values[:, -1]
    )
    is_off = (top_k <= 0) | (top_k >= V)
    return jnp.where(is_off, -jnp.inf, jnp.where(is_far, far, near))


def _top_p_threshold(x, weights, candidates, by_k, top_p, vocab_axes):
    values, candidate_weights = candidates
    V, num_candidates = vocab_size(x, vocab_axes), values.shape[1]
    kept = jnp.where(x >= by_k[:, None], weights, 0.0)
    target = _scale(_mass(kept, vocab_axes), _fraction_bits(top_p))
    is_on = top_p < 1.0

    # The candidates include weights that top_k removes. Those are smaller than every kept one, so
    # they add to no sum of a kept candidate.
    def is_cut(index):  # whether the candidates larger than the index-th have the share already
        value = jnp.take_along_axis(values, index[:, None].astype(jnp.int32), axis=1)
        return ~_less(_mass(jnp.where(values > value, candidate_weights, 0.0)), target)

    one, end = (jnp.full(x.shape[0], n, jnp.uint32) for n in (1, num_candidates))
    num_kept = _first_true(is_cut, jnp.where(is_on, one, end), end)
    last_kept = (num_kept - 1).astype(jnp.int32)[:, None]
    near = jnp.take_along_axis(values, last_kept, axis=1)[:, 0]

    last = values[:, -1]
    is_far = is_on & (near <= last) & (by_k < last) & (num_candidates < V)
    mass = lambda value: _mass(jnp.where(x > value[:, None], kept, 0.0), vocab_axes)
    holds = lambda value: _less(mass(value), target)
    far = lax.cond(jnp.any(is_far), lambda: _smallest(holds, last, is_far), lambda: last)
    return jnp.where(is_on, jnp.where(is_far, far, near), -jnp.inf)


def _smallest(holds, known, is_active):
    """Return the smallest float32 [R] for which `holds` is true, by bisection of its bit pattern.

    `holds` must be monotone (false below, true above) and true at `known`. The search takes at most
    32 rounds; inactive rows return `known` and need no round.
    """
    high = _to_order(known)
    low = jnp.where(is_active, _to_order(jnp.full_like(known, -jnp.inf)), high)
    return _from_order(_first_true(lambda order: holds(_from_order(order)), low, high))


def _first_true(predicate, low, high):
    """Return the smallest uint32 [R] in [low, high] at which a monotone predicate is true.

    If it is false everywhere below `high`, the result is `high`.
    """

    def halve(bounds):
        low, high = bounds
        middle = low + ((high - low) >> 1)
        is_true, is_open = predicate(middle), low < high
        return (
            jnp.where(is_open & ~is_true, middle + 1, low),
            jnp.where(is_open & is_true, middle, high),
        )

    return lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low, high))[1]


_SIGN = np.uint32(0x8000_0000)


def _to_order(value):
    """Map float32 to uint32 so that order is preserved, with -0 directly below 0."""
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def _from_order(order):
    bits = jnp.where(order >= _SIGN, order ^ _SIGN, ~order)
    return lax.bitcast_convert_type(bits, jnp.float32)


def invert(
    weights: Float32[Array, "R V"], uniform: UInt32[Array, " R"], vocab_axes: Axes = ()
) -> tuple[Int32[Array, " R"], Bool[Array, " R"]]:
    """Return the first token whose cumulative weight exceeds uniform / 2**32 of the total.

    The second result [R] is True for a row without any weight. If V is sharded, two collectives are
    used.
    """
    blocks = _blocks(weights, 0.0)
    per_block = _limb_sum(blocks)  # [NUM_LIMBS, R, V / BLOCK]
    own = jnp.sum(per_block, axis=2, dtype=jnp.uint32)
    lower, everything = _sums_of_parts(own, vocab_axes)
    total = _carry(everything)
    target = _scale(total, uniform)
    zero = jnp.zeros_like(uniform)

    def first(exceeds, size):
        """Return the first index at which the inclusive cumulative sum exceeds the target."""
        return _first_true(exceeds, zero, jnp.full_like(zero, size - 1)).astype(jnp.int32)

    def sum_below(index):
        is_below = jnp.arange(blocks.shape[1]) < index[:, None]
        return lower + jnp.sum(jnp.where(is_below, per_block, 0), axis=2, dtype=jnp.uint32)

    block = first(lambda i: _less(target, _carry(sum_below(i + 1))), blocks.shape[1])
    before, inside = sum_below(block), _take_block(blocks, block)

    def exceeds(index):
        upto = jnp.where(jnp.arange(BLOCK) <= index[:, None], inside, 0.0)
        return _less(target, _carry(before + _limb_sum(upto)))

    column = jnp.minimum(block * BLOCK + first(exceeds, BLOCK), weights.shape[1] - 1)
    token = global_ids(column, weights, vocab_axes)
    if vocab_axes:  # the target lies in exactly one shard, whose token is the result
        is_here = ~_less(target, _carry(lower)) & _less(target, _carry(lower + own))
        token = all_sum(jnp.where(is_here, token, 0), vocab_axes)
    return token, ~_less(jnp.zeros_like(total), total)


def log_normalizer(logits: Float32[Array, "R V"], vocab_axes: Axes = ()) -> Float32[Array, " R"]:
    """Return log sum exp of each row [R], computed from the exact sum of weights."""
    largest = all_max(jnp.max(logits, axis=1), vocab_axes)
    weights = weights_of(logits, jnp.ones(logits.shape[0], jnp.float32), largest)
    total = jnp.zeros(logits.shape[0], jnp.float32)
    for i, limb in enumerate(_mass(weights, vocab_axes)):
        total += limb.astype(jnp.float32) * 2.0 ** (16 * i - FRACTION_BITS)
    return largest + jnp.log(total)


# --- exact sums of weights ---


def _blocks(x, fill):
    """Pad and reshape [R, V] to [R, ceil(V / BLOCK), BLOCK]."""
    num_rows, vocab_size = x.shape
    num_blocks = -(-vocab_size // BLOCK)
    padded = jnp.pad(x, ((0, 0), (0, num_blocks * BLOCK - vocab_size)), constant_values=fill)
    return padded.reshape(num_rows, num_blocks, BLOCK)


def _take_block(blocks, block):
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _mass(weights, vocab_axes=()):
    """Return the sum of each row of weights [R, n] as carried limbs [NUM_LIMBS, R]."""
    own = jnp.sum(_limb_sum(_blocks(weights, 0.0)), axis=2, dtype=jnp.uint32)
    return _carry(all_sum(own, vocab_axes))


def _sums_of_parts(own, vocab_axes):
    """Return the sum of the limbs of all devices of lower rank, and of all devices, not carried."""
    if not vocab_axes:
        return jnp.zeros_like(own), own
    parts = all_parts(own, vocab_axes)  # [parts, NUM_LIMBS, R]
    is_lower = jnp.arange(num_parts(vocab_axes)) < rank(vocab_axes)
    lower = jnp.where(is_lower[:, None, None], parts, 0)
    return tuple(jnp.sum(x, axis=0, dtype=jnp.uint32) for x in (lower, parts))


def _limb_sum(weights):
    """Return the sum over the last axis of at most BLOCK weights in [0, 1], as limbs, not carried.

    A weight is high * 2**-24 + low * 2**-44, rounded down. One reduction sums the pairs because two
    would first store their [R, V] operands (on CPU 17.9 against 2.0 ms for [64, 49152]).
    """
    scaled = weights * 2.0**24
    whole = jnp.floor(scaled)
    pair = (whole.astype(jnp.int32), ((scaled - whole) * 2.0**20).astype(jnp.int32))
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])
    sums = lax.reduce(pair, (jnp.int32(0), jnp.int32(0)), add, (weights.ndim - 1,))
    high, low = (lax.bitcast_convert_type(part, jnp.uint32) for part in sums)  # high <= 2**31
    return jnp.stack(
        [
            low & 0xFFFF,
            (low >> 16) + ((high & 0xFFF) << 4),
            (high >> 12) & 0xFFFF,
            high >> 28,
        ]
    )


def _carry(limbs):
    """Return the same value with 16 bits in each limb except the last."""
    *lower, last = limbs
    carried, carry = [], jnp.zeros_like(last)
    for limb in lower:
        value = limb + carry
        carried.append(value & 0xFFFF)
        carry = value >> 16
    return jnp.stack([*carried, last + carry])


def _less(a, b):
    """Return whether a < b for carried limbs."""
    result = jnp.zeros(a.shape[1:], bool)
    for x, y in zip(a, b, strict=True):  # least significant first, so the last difference decides
        result = (x < y) | ((x == y) & result)
    return result


def _scale(total, fraction):
    """Return floor(total * fraction / 2**32) for carried limbs, by long multiplication."""
    columns = [jnp.zeros_like(fraction)] * (NUM_LIMBS + 2)
    for i, limb in enumerate(total):
        for j, part in enumerate((fraction & 0xFFFF, fraction >> 16)):
            product = limb * part
            columns[i + j] += product & 0xFFFF
            columns[i + j + 1] += product >> 16
    return _carry(columns)[2:]


def _fraction_bits(p):
    """Return floor(p * 2**32) as uint32 for p in [0, 1)."""
    scaled = p * 2.0**16
    high = jnp.floor(scaled)
    low = ((scaled - high) * 2.0**16).astype(jnp.int32)
    return lax.bitcast_convert_type((high.astype(jnp.int32) << 16) | low, jnp.uint32)
