"""Sampling of the next token of every row, on the device, inside the engine's jitted step.

The order of operations is that of vLLM 0.20's sampler, except that min_p comes last, as in
transformers (a mask and a bias commute, and so do masks):

 1. Logprobs are taken from the *raw* logits: log_softmax in float32 before any change below.
 2. logit_bias, then the masks: allowed_token_ids, bad_words, min_tokens (end-of-text and stop
    tokens). A masked logit is -inf.
 3. repetition penalty (prompt and output), frequency penalty, presence penalty (output).
 4. If a row has no finite logit left, its rules contradict each other: it continues with its raw
    logits under the allowed mask alone.
 5. temperature 0: the first largest logit. Otherwise logits / temperature, top_k, top_p (among
    what top_k kept, as a share of it), min_p (relative to the most probable token), and a draw.

top_k keeps every logit equal to the k-th largest, and top_p every one equal to the smallest it
keeps: ties are never cut. The draw inverts the cumulative distribution in vocabulary order at one
32-bit uniform number, keyed by fold_in(fold_in(base, seed), position) alone (`sampling_draw`).

A greedy row costs one argmax: every other feature runs under a `lax.cond` on whether some sampled
row uses it. No cond returns or updates slot state, so the donated state is updated in place.

With the vocabulary sharded over devices (`vocab_axes`), the devices exchange partial results, never
logits. A greedy step takes one gather of 8 bytes a row and part; masks and penalties add one sum; a
draw takes 3 collectives; top_k and top_p gather the 64 largest of each part, sum the weights, and
take one more sum for each round of a search beyond those; logprobs take 4.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Key

from jaxinfer.sampling.draw import (
    MAX_VOCAB_SIZE,
    argmax,
    first_largest,
    invert,
    log_normalizer,
    truncation_threshold,
    uniform_bits,
    weights_of,
)
from jaxinfer.sampling.params import MAX_LOGPROBS
from jaxinfer.sampling.slots import (
    ANY_TOKEN,
    EXTRAS,
    NO_TOKEN,
    Feature,
    FloatColumn,
    IntColumn,
    SlotExtras,
    SlotSampling,
    unpack_bits,
)
from jaxinfer.sampling.vocabulary import (
    columns_of,
    global_ids,
    is_true_of_all,
    merge_largest,
    own_columns,
    vocab_size,
)
from jaxinfer.sharding.collectives import Axes, all_max, rank


class SampleOutput(NamedTuple):
    """The result of one step: NO_TOKEN in rows that are not sampled, 0 where not requested."""

    tokens: jax.Array  # [R] int32
    logprobs: jax.Array  # [R] float32: of the chosen token
    top_ids: jax.Array  # [R, MAX_LOGPROBS] int32
    top_logprobs: jax.Array  # [R, MAX_LOGPROBS] float32, descending; equal ones by lower id


class _Rows(NamedTuple):
    """The slots' scalars, gathered to this step's rows; flags are 0 in rows not sampled."""

    slot: jax.Array  # [R]
    position: jax.Array  # [R]
    flags: jax.Array  # [R]
    ints: jax.Array  # [R, NUM_INTS]
    floats: jax.Array  # [R, NUM_FLOATS]

    def uses(self, feature: Feature) -> jax.Array:
        return (self.flags & int(feature)) != 0

    def any_uses(self, feature: Feature) -> jax.Array:
        return jnp.any(self.uses(feature))


def sample(
    logits: Float32[Array, "R V"],
    slots: SlotSampling,
    row_slot: Int32[Array, " R"],
    position: Int32[Array, " R"],
    is_sampled: Bool[Array, " R"],
    base_key: Key[Array, ""],
    row_tile: int | None = None,
    vocab_axes: Axes = (),
) -> tuple[SampleOutput, SlotSampling]:
    """Sample one token a row; return the tokens and the slots' state that counts them.

    `position` is the absolute position of the new token: the number of tokens known before it.
    Rows with `is_sampled` False may hold anything, NaN included: they get NO_TOKEN, and neither
    the state nor another row sees them. A sampled row with NaN logits gets some token of the
    vocabulary (which one is undefined: XLA's maximum ignores NaN on CPU).

    `row_tile` (static) bounds how many rows are worked on at once; it changes no result. None, all,
    suits accelerators. On CPU 8 keeps the temporaries in the cache and off fresh pages.

    `vocab_axes` (static): inside a `shard_map` that splits V over these mesh axes, each device
    passes its part of the logits, and of all else, slots included, the whole. The results are whole
    and the same on every device, with the bits of one device that has all the logits.
    """
    V = vocab_size(logits, vocab_axes)
    if V > MAX_VOCAB_SIZE:
        raise ValueError(f"a vocabulary of {V} exceeds the limit {MAX_VOCAB_SIZE}")
    ints = slots.ints[row_slot]
    flags = jnp.where(is_sampled, ints[:, IntColumn.FLAGS], 0)
    rows = _Rows(row_slot, position, flags, ints, slots.floats[row_slot])
    choose_tile = lambda x, some: _choose(x, some, slots.extras, base_key, vocab_axes)
    tokens = lax.cond(
        rows.any_uses(Feature.RANDOM | EXTRAS),
        lambda: _by_tile(choose_tile, row_tile, logits, rows),
        lambda: argmax(logits, vocab_axes),
    )
    report_tile = lambda x, some, chosen: _report(x, some, chosen, vocab_axes)
    report = lax.cond(
        rows.any_uses(Feature.LOGPROBS),
        lambda: _by_tile(report_tile, row_tile, logits, rows, tokens),
        lambda: _no_report(logits.shape[0]),
    )
    output = SampleOutput(jnp.where(is_sampled, tokens, NO_TOKEN), *report)
    return output, slots._replace(extras=_record(slots.extras, rows, tokens))


def top_logprobs(
    logits: Float32[Array, "M V"], target_ids: Int32[Array, " M"], vocab_axes: Axes = ()
) -> tuple[Float32[Array, " M"], Int32[Array, "M top"], Float32[Array, "M top"]]:
    """Log-probabilities of the targets, and the likeliest tokens with theirs (equal: lower id).

    Of the raw logits; V may be smaller than MAX_LOGPROBS: the rest is id NO_TOKEN at -inf.
    `vocab_axes` as in `sample`.
    """
    norm = log_normalizer(logits, vocab_axes)
    chosen = _logit_of(logits, target_ids, vocab_axes) - norm
    values, columns = lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    ids = global_ids(columns, logits, vocab_axes)
    values, ids = merge_largest(values, ids, MAX_LOGPROBS, vocab_axes)
    fill = ((0, 0), (0, MAX_LOGPROBS - values.shape[1]))
    return (
        chosen,
        jnp.pad(ids, fill, constant_values=NO_TOKEN),
        jnp.pad(values - norm[:, None], fill, constant_values=-jnp.inf),
    )


def _logit_of(logits, token_ids, vocab_axes):
    if not vocab_axes:
        return jnp.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0]
    column = columns_of(token_ids, logits, vocab_axes)[:, None]
    own = jnp.take_along_axis(logits, column, axis=1, mode="fill", fill_value=-jnp.inf)
    return all_max(own[:, 0], vocab_axes)


def _report(logits, rows: _Rows, tokens, vocab_axes):
    """Return `top_logprobs` for the rows that request logprobs, zeros for the others."""
    wanted = rows.uses(Feature.LOGPROBS)
    chosen, ids, values = top_logprobs(logits, tokens, vocab_axes)
    return (
        jnp.where(wanted, chosen, 0.0),
        jnp.where(wanted[:, None], ids, 0),
        jnp.where(wanted[:, None], values, 0.0),
    )


def _no_report(num_rows: int):
    return (
        jnp.zeros(num_rows, jnp.float32),
        jnp.zeros((num_rows, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((num_rows, MAX_LOGPROBS), jnp.float32),
    )


def _record(extras: SlotExtras, rows: _Rows, tokens) -> SlotExtras:
    """Count the new tokens and shift them into the recent ones, in the slots that need it."""
    num_slots = extras.output_counts.shape[0]
    counted = jnp.where(rows.uses(Feature.PENALTIES), rows.slot, num_slots)  # S: dropped
    shifted = jnp.where(rows.uses(Feature.BAD_WORDS), rows.slot, num_slots)
    recent = jnp.concatenate([extras.recent_tokens[rows.slot][:, 1:], tokens[:, None]], axis=1)
    return extras._replace(
        output_counts=extras.output_counts.at[counted, tokens].add(1, mode="drop"),
        recent_tokens=extras.recent_tokens.at[shifted].set(recent, mode="drop"),
    )


def _by_tile(function, row_tile: int | None, *per_row):
    """Apply function(*per_row) to equal tiles of at most `row_tile` rows, one after another."""
    num_rows = per_row[0].shape[0]
    limit = min(row_tile or num_rows, num_rows)
    tile = next(size for size in range(limit, 0, -1) if num_rows % size == 0)
    if tile == num_rows:
        return function(*per_row)
    split = lambda x: x.reshape(num_rows // tile, tile, *x.shape[1:])
    join = lambda x: x.reshape(num_rows, *x.shape[2:])
    results = lax.map(lambda tiled: function(*tiled), jax.tree.map(split, per_row))
    return jax.tree.map(join, results)


def _choose(logits, rows: _Rows, extras: SlotExtras, base_key, vocab_axes):
    edit = lambda: _edit(logits, rows, extras, vocab_axes)
    edited = lax.cond(rows.any_uses(EXTRAS), edit, lambda: logits)
    return lax.cond(
        rows.any_uses(Feature.RANDOM),
        lambda: _draw_rows(edited, rows, base_key, vocab_axes),
        lambda: argmax(edited, vocab_axes),
    )


def _draw_rows(x, rows: _Rows, base_key, vocab_axes):
    """Draw a token for random rows; take the largest logit's for others and rows without weight."""
    is_random = rows.uses(Feature.RANDOM)
    temperature = jnp.where(is_random, rows.floats[:, FloatColumn.TEMPERATURE], 1.0)
    largest, likeliest = first_largest(x, vocab_axes)
    weights = weights_of(x, temperature, largest)
    uniform = uniform_bits(base_key, rows.ints[:, IntColumn.SEED], rows.position)
    threshold = lax.cond(
        rows.any_uses(Feature.TOP_K | Feature.TOP_P),
        lambda: truncation_threshold(
            x,
            weights,
            jnp.where(rows.uses(Feature.TOP_K), rows.ints[:, IntColumn.TOP_K], 0),
            jnp.where(rows.uses(Feature.TOP_P), rows.floats[:, FloatColumn.TOP_P], 1.0),
            vocab_axes,
        ),
        lambda: jnp.full(x.shape[0], -jnp.inf, jnp.float32),
    )
    min_p = jnp.where(is_random, rows.floats[:, FloatColumn.MIN_P], 0.0)
    keep = (x >= threshold[:, None]) & (weights >= min_p[:, None])
    drawn, is_empty = invert(jnp.where(keep, weights, 0.0), uniform, vocab_axes)
    return jnp.where(is_random & ~is_empty, drawn, likeliest)


def _edit(raw, rows: _Rows, extras: SlotExtras, vocab_axes):
    """Return the logits [R, V] after steps 2 to 4 of this module's list."""

    def when(feature, edit, x):
        return lax.cond(rows.any_uses(feature), lambda: edit(x), lambda: x)

    def allow(x):
        allowed = _own_bits(extras.allowed_bits, rows, x, vocab_axes)
        return jnp.where(allowed | ~rows.uses(Feature.ALLOWED)[:, None], x, -jnp.inf)

    def hold_back(x):
        early = rows.uses(Feature.MIN_TOKENS) & (rows.position < rows.ints[:, IntColumn.MIN_LEN])
        held = _own_bits(extras.stop_bits, rows, x, vocab_axes)
        return jnp.where(held & early[:, None], -jnp.inf, x)

    x = when(Feature.BIAS, lambda x: _add_bias(x, rows, extras, vocab_axes), raw)
    x = when(Feature.ALLOWED, allow, x)
    x = when(Feature.BAD_WORDS, lambda x: _forbid_bad_words(x, rows, extras, vocab_axes), x)
    x = when(Feature.MIN_TOKENS, hold_back, x)
    x = when(Feature.PENALTIES, lambda x: _penalize(x, rows, extras, vocab_axes), x)
    is_dead = is_true_of_all(jnp.max(x, axis=1) == -jnp.inf, vocab_axes)
    revive = lambda: jnp.where(is_dead[:, None], when(Feature.ALLOWED, allow, raw), x)
    return lax.cond(jnp.any(is_dead), revive, lambda: x)


def _own_bits(words, rows: _Rows, x, vocab_axes):
    """Unpack the rows' bit sets from the slots' [S, w] into booleans of the shape of x."""
    n, num_words = x.shape[1], words.shape[1]
    if not vocab_axes:
        return unpack_bits(words[rows.slot], n)
    # As many words as n bits can touch: a TPU would store the bits of all V, a word each.
    count = min((n + 62) // 32, num_words)
    start = rank(vocab_axes) * n
    first = jnp.minimum(start // 32, num_words - count)
    own = lax.dynamic_slice_in_dim(words, first, count, 1)[rows.slot]
    return lax.dynamic_slice_in_dim(unpack_bits(own, 32 * count), start - 32 * first, n, 1)


def _add_bias(x, rows: _Rows, extras: SlotExtras, vocab_axes):
    # Ids of V and above, NO_BIAS among them, are dropped.
    columns = columns_of(extras.bias_ids[rows.slot], x, vocab_axes)
    columns = jnp.where(rows.uses(Feature.BIAS)[:, None], columns, x.shape[1])
    row = jnp.arange(x.shape[0])[:, None]
    return x.at[row, columns].add(extras.bias_values[rows.slot], mode="drop")


def _forbid_bad_words(x, rows: _Rows, extras: SlotExtras, vocab_axes):
    """Mask the last token of every bad word whose other tokens are the latest known ones."""
    words = extras.bad_words[rows.slot]  # [R, MAX_BAD_WORDS, MAX_BAD_WORD_LEN]
    prefix, last = words[..., :-1], words[..., -1]
    recent = extras.recent_tokens[rows.slot][:, None, :]
    matches = jnp.all((prefix == ANY_TOKEN) | (prefix == recent), axis=2) & (last != ANY_TOKEN)
    matches &= rows.uses(Feature.BAD_WORDS)[:, None]
    row = jnp.arange(x.shape[0])[:, None]
    columns = jnp.where(matches, columns_of(last, x, vocab_axes), x.shape[1])
    return x.at[row, columns].set(-jnp.inf, mode="drop")


def _penalize(x, rows: _Rows, extras: SlotExtras, vocab_axes):
    """Repetition as in CTRL (arXiv:1909.05858, section 4.1), except that a negative logit is
    multiplied, not divided. Frequency and presence as in OpenAI's API:
    logit - count * frequency - [count > 0] * presence.
    """
    column = lambda which: rows.floats[:, which][:, None]
    counts = own_columns(extras.output_counts, vocab_axes)[rows.slot]
    seen = (counts > 0) | _own_bits(extras.prompt_bits, rows, x, vocab_axes)
    repetition = column(FloatColumn.REPETITION)
    y = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
    y = y - column(FloatColumn.FREQUENCY) * counts
    y = y - jnp.where(counts > 0, column(FloatColumn.PRESENCE), 0.0)
    return jnp.where(rows.uses(Feature.PENALTIES)[:, None], y, x)
