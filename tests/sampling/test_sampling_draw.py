"""Draws use exact sums and exact kept sets, and follow a float64 reference distribution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jaxinfer.sampling import draw
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.sample import sample
from jaxinfer.sampling.slots import init_slots, pack_scalars, write_scalars

V = 300  # not a multiple of 32 or of the block of 128; more than the number of candidates
ROWS = 4096  # rows in one call, all for the same slot, which give draws at 4096 positions
KEY = jax.random.key(7)

# Each is compiled once for all tests, because the shapes never change.
STEP = jax.jit(sample)
INVERT = jax.jit(draw.invert)
WEIGHTS = jax.jit(draw.weights_of)
THRESHOLD = jax.jit(draw.truncation_threshold)


def kept_by_sorting(x, weights, top_k, top_p):
    """Compute the kept set of one row from its definition: sort, count, and sum in float64."""
    kept = np.ones(len(x), bool)
    if 0 < top_k < len(x):
        kept = x >= np.sort(x)[-top_k]
    if top_p < 1:
        mass = np.where(kept, weights.astype(np.float64), 0.0)
        larger = np.array([mass[x > value].sum() for value in x])
        kept &= (larger < np.float64(np.float32(top_p)) * mass.sum()) | (x == x.max())
    return kept


def reference_probs(logits, params: SamplingParams):
    """Compute the distribution of one row in float64, by sorting."""
    x = logits.astype(np.float64) / params.temperature
    weights = np.exp(x - x.max())
    kept = kept_by_sorting(x, weights, params.top_k, params.top_p)
    kept &= weights >= params.min_p
    probs = np.where(kept, weights, 0.0)
    return probs / probs.sum()


@functools.cache
def _one_slot():
    return init_slots(1, V)


def draw_many(logits, params: SamplingParams, *, seed=0, calls=5):
    """Draw tokens [calls * ROWS] from one row of logits, each at its own position."""
    ints, floats = pack_scalars(params, seed=seed, prompt_len=0)
    slots = write_scalars(_one_slot(), jnp.int32(0), jnp.asarray(ints), jnp.asarray(floats))
    rows = jnp.broadcast_to(jnp.asarray(logits), (ROWS, V))
    slot, is_sampled = jnp.zeros(ROWS, jnp.int32), jnp.ones(ROWS, bool)
    positions = np.arange(calls * ROWS, dtype=np.int32).reshape(calls, ROWS)
    outputs = [STEP(rows, slots, slot, jnp.asarray(p), is_sampled, KEY)[0] for p in positions]
    return np.concatenate([np.asarray(output.tokens) for output in outputs])


def p_value(tokens, probs):
    """Return the chi-square p-value of the counts, pooling tokens expected fewer than 10 times."""
    counts, expected = np.bincount(tokens, minlength=V), probs * len(tokens)
    rare = expected < 10
    pooled = lambda x: np.append(x[~rare], x[rare].sum())
    observed, wanted = pooled(counts), pooled(expected)
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    return 1.0 if len(wanted) == 1 else stats.chisquare(observed, wanted).pvalue


DISTRIBUTIONS = {
    "temperature 1": dict(),
    "hot": dict(temperature=2.5),
    "cold": dict(temperature=0.3),
    "top_k": dict(top_k=7),
    "top_k beyond the candidates": dict(top_k=120, temperature=3.0),
    "top_p": dict(top_p=0.7),
    "top_p beyond the candidates": dict(top_p=0.9, temperature=4.0),
    "min_p": dict(min_p=0.2),
    "top_k and top_p": dict(top_k=20, top_p=0.8),
    "far top_k and top_p": dict(top_k=200, top_p=0.95, temperature=4.0),
    "top_p and min_p": dict(top_p=0.9, min_p=0.05),
    "all": dict(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_reference_distribution(name):
    params = SamplingParams(**DISTRIBUTIONS[name])
    logits = np.random.default_rng(len(name)).normal(size=V).astype(np.float32) * 2
    probs = reference_probs(logits, params)
    tokens = draw_many(logits, params)
    assert not np.any(probs[tokens] == 0.0), "a token was drawn that is excluded"
    assert p_value(tokens, probs) > 1e-3


def test_chi_square_detects_a_wrong_distribution():
    logits = np.random.default_rng(0).normal(size=V).astype(np.float32) * 2
    tokens = draw_many(logits, SamplingParams(temperature=1.0))
    assert p_value(tokens, reference_probs(logits, SamplingParams(temperature=1.1))) < 1e-6


def test_draws_repeat_with_the_same_seed_and_differ_with_another():
    logits, params = np.zeros(V, np.float32), SamplingParams()
    first = draw_many(logits, params, seed=5, calls=1)
    assert np.array_equal(first, draw_many(logits, params, seed=5, calls=1))
    others = [draw_many(logits, params, seed=s, calls=1) for s in (6, 2**31 + 5, 2**32 - 1)]
    for other in others:  # independent draws are equal about once in V draws
        assert abs(np.mean(first == other) - 1 / V) < 0.01


def test_draws_at_adjacent_positions_are_independent():
    tokens = draw_many(np.zeros(V, np.float32), SamplingParams(), calls=1)
    assert abs(np.mean(tokens[1:] == tokens[:-1]) - 1 / V) < 0.01


def test_random_bits_are_keyed_by_base_key_seed_and_position():
    seed, position = np.array([3, 2**32 - 1], np.uint32), np.array([0, 9], np.int32)
    bits = draw.uniform_bits(KEY, jnp.asarray(seed.view(np.int32)), jnp.asarray(position))
    for row in range(2):
        key = jax.random.fold_in(jax.random.fold_in(KEY, seed[row]), position[row])
        assert bits[row] == jax.random.bits(key, (), jnp.uint32)


# Logits with few distinct values, so that most thresholds fall on ties; -inf is a masked token.
TIED = st.lists(st.sampled_from([-np.inf, -3.0, -0.0, 0.0, 0.5, 0.5000001, 2.0]), min_size=V)


@settings(max_examples=60, deadline=None)
@given(
    values=TIED.map(lambda x: x[:V]),
    noise=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 63, 64, 65, 150, V - 1, V, V + 1]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    temperature=st.sampled_from([0.05, 1.0, 20.0]),
)
def test_kept_set_equals_that_of_a_sort(values, noise, top_k, top_p, temperature):
    x = np.array(values, np.float32)
    x[0] = 2.5  # at least one finite logit
    x += noise * np.random.default_rng(1).normal(size=V).astype(np.float32)
    weights = np.asarray(WEIGHTS(jnp.asarray(x[None]), jnp.full(1, temperature, jnp.float32)))
    threshold = THRESHOLD(
        jnp.asarray(x[None]),
        jnp.asarray(weights),
        jnp.full(1, top_k, jnp.int32),
        jnp.full(1, top_p, jnp.float32),
    )
    kept = (x >= np.asarray(threshold)[0]) & (weights[0] > 0)
    expected = kept_by_sorting(x, weights[0], top_k, top_p) & (weights[0] > 0)
    assert np.array_equal(kept, expected)


def test_threshold_is_independent_of_a_row_that_needs_a_search():
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(3, V)).astype(np.float32))
    weights = WEIGHTS(x, jnp.asarray([1.0, 1.0, 5.0], jnp.float32))
    top_p = jnp.asarray([0.3, 0.5, 0.95], jnp.float32)
    together = THRESHOLD(x, weights, jnp.asarray([0, 5, 0], jnp.int32), top_p)
    assert together[2] < jnp.sort(x[2])[-draw.NUM_CANDIDATES], "the third row needs no search"
    for row, k in ((0, 0), (1, 5)):
        one = slice(row, row + 1)
        alone = THRESHOLD(x[one], weights[one], jnp.full(1, k, jnp.int32), top_p[one])
        assert alone[0] == together[row]


@settings(max_examples=60, deadline=None)
@given(
    exponents=st.lists(st.integers(-60, 0), min_size=1, max_size=V),
    uniform=st.one_of(st.sampled_from([0, 1, 2**31, 2**32 - 1]), st.integers(0, 2**32 - 1)),
)
def test_inverse_distribution_equals_integer_arithmetic(exponents, uniform):
    weights = np.zeros(V, np.float32)
    weights[-len(exponents) :] = np.ldexp(np.float32(1 - 2**-20), exponents)
    fixed = [int(float(w) * 2**draw.FRACTION_BITS) for w in weights]
    cumulative = np.cumsum(np.array(fixed, object))
    target = int(cumulative[-1]) * uniform >> 32
    expected = next((i for i, total in enumerate(cumulative) if total > target), None)
    token, is_empty = INVERT(jnp.asarray(weights[None]), jnp.full(1, uniform, jnp.uint32))
    assert bool(is_empty[0]) == (expected is None)
    if expected is not None:
        assert int(token[0]) == expected


def test_sums_do_not_overflow_at_the_largest_vocabulary_of_equal_logits():
    vocab_size = draw.MAX_VOCAB_SIZE
    weights = jnp.ones((1, vocab_size), jnp.float32)
    for uniform in (0, 2**31, 2**32 - 1):
        token, _ = INVERT(weights, jnp.full(1, uniform, jnp.uint32))
        assert int(token[0]) == vocab_size * uniform >> 32


def test_bit_patterns_have_the_order_of_their_floats():
    values = np.array([-np.inf, -3e38, -1.0, -1e-38, -0.0, 0.0, 1e-38, 1.0, np.inf], np.float32)
    order = np.asarray(draw._to_order(jnp.asarray(values)))
    assert np.all(np.diff(order.astype(np.int64)) > 0)
    assert np.array_equal(np.asarray(draw._from_order(jnp.asarray(order))), values)


def test_argmax_takes_the_first_largest():
    x = np.random.default_rng(0).integers(0, 4, (50, V)).astype(np.float32)
    x[4] = -np.inf
    assert np.array_equal(np.asarray(draw.argmax(jnp.asarray(x))), np.argmax(x, axis=1))
