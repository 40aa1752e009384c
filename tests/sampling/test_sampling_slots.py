"""The sampling state of slots: packing, resumption after a preemption, and in-place updates."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling.draw import MAX_VOCAB_SIZE
from jaxinfer.sampling.params import MAX_LOGIT_BIAS, SamplingParams
from jaxinfer.sampling.sample import sample
from jaxinfer.sampling.slots import (
    EXTRAS,
    Feature,
    _bit_set,
    features,
    init_slots,
    pack_extras,
    pack_scalars,
    unpack_bits,
    write_extras,
    write_scalars,
)
from tests.support.sampling_batch import EOS, KEY, PROMPT, Batch, R, V, greedy

FEATURES: list[tuple[dict[str, Any], Feature]] = [
    (dict(), Feature.RANDOM),
    (dict(temperature=0), Feature(0)),
    (dict(temperature=0, top_k=5, top_p=0.5), Feature(0)),
    (dict(top_k=5), Feature.RANDOM | Feature.TOP_K),
    (dict(top_k=-1, top_p=1.0), Feature.RANDOM),
    (dict(top_p=0.9), Feature.RANDOM | Feature.TOP_P),
    (dict(temperature=0, logit_bias={1: 1}), Feature.BIAS),
    (dict(temperature=0, logit_bias={}), Feature(0)),
    (dict(temperature=0, allowed_token_ids=[1]), Feature.ALLOWED),
    (dict(temperature=0, min_tokens=1), Feature.MIN_TOKENS),
    (dict(temperature=0, min_tokens=1, ignore_eos=True), Feature(0)),
    (dict(temperature=0, min_tokens=1, ignore_eos=True, stop_token_ids=[1]), Feature.MIN_TOKENS),
    (dict(temperature=0, presence_penalty=0.1), Feature.PENALTIES),
    (dict(temperature=0, frequency_penalty=0.1), Feature.PENALTIES),
    (dict(temperature=0, repetition_penalty=1.1), Feature.PENALTIES),
    (dict(temperature=0, logprobs=0), Feature.LOGPROBS),
]


@pytest.mark.parametrize(("fields", "expected"), FEATURES, ids=lambda value: str(value))
def test_features_follow_the_fields_and_extras_are_packed_only_if_used(fields, expected):
    params = SamplingParams(**fields)
    assert features(params, eos_token_ids=[EOS]) == expected
    extras = pack_extras(params, prompt_token_ids=PROMPT, eos_token_ids=[EOS], vocab_size=V)
    assert (extras is not None) == bool(expected & EXTRAS)


def test_bad_words_without_their_token_ids_are_refused():
    with pytest.raises(ValueError, match="were not tokenized"):
        pack_scalars(greedy(bad_words=["w"]), seed=0, prompt_len=1)
    assert features(greedy(bad_words=["w"]), bad_word_ids=[[1]]) == Feature.BAD_WORDS


def test_packing_refuses_values_beyond_the_device_state():
    params = greedy(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0))
    with pytest.raises(ValueError, match="the limit is"):
        pack_extras(params, prompt_token_ids=PROMPT, vocab_size=1000)
    with pytest.raises(ValueError, match=r"token ids \[300\] are outside"):
        pack_extras(greedy(allowed_token_ids=[300]), prompt_token_ids=PROMPT, vocab_size=V)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300])
def test_bit_sets_support_any_vocabulary_size(vocab_size):
    ids = sorted({0, vocab_size // 2, vocab_size - 1})
    words = _bit_set(ids, vocab_size)
    assert words.dtype == np.uint32 and words.shape == (-(-vocab_size // 32),)
    bits = np.asarray(unpack_bits(jnp.asarray(words[None]), vocab_size))
    assert bits.shape == (1, vocab_size)
    assert np.flatnonzero(bits[0]).tolist() == ids


@pytest.mark.parametrize("num_before", [0, 1, 12])
def test_preempted_request_continues_without_a_difference(num_before):
    words = [[5, 6], [1, 2, 3], [4] * 8]
    params = SamplingParams(
        temperature=0.7, presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.2,
        bad_words=["w"], min_tokens=3, logit_bias={4: 3.0},
    )  # fmt: skip
    logits = np.random.default_rng(8).normal(size=(40, 1, V)).astype(np.float32)
    logits[..., 50:53] += 8  # a few likely tokens, so that tokens repeat
    through, resumed = (Batch(params, bad_word_ids=words) for _ in range(2))
    for step in logits[:num_before]:
        through.step(step)
    resumed.outputs = [list(through.outputs[0])]
    resumed.admit(0, params, outputs=resumed.outputs[0])
    for old, new in zip(*map(jax.tree.leaves, (through.state, resumed.state)), strict=True):
        assert np.array_equal(old[0], new[0])
    for step in logits[num_before:]:
        through.step(step)
        resumed.step(step)
    assert through.outputs == resumed.outputs
    assert max(map(through.outputs[0][:12].count, range(50, 53))) > 2


def test_reused_slot_ignores_its_earlier_request():
    every = dict.fromkeys(range(V), -100.0)
    del every[9]
    batch = Batch(greedy(logit_bias=every, presence_penalty=2, bad_words=["w"]), bad_word_ids=[[3]])
    logits = np.zeros((1, V), np.float32)
    logits[0, 3] = 1.0
    assert batch.chosen(logits) == [9]
    batch.outputs = [[]]
    batch.admit(0, greedy())
    assert batch.chosen(logits) == [3]
    batch.outputs = [[]]
    batch.admit(0, greedy(presence_penalty=0.5))
    assert batch.chosen(logits) == [3]
    assert batch.state.extras.output_counts[0].sum() == 1


def test_write_beyond_the_slots_is_dropped():
    state = init_slots(2, V)
    ints, floats = map(jnp.asarray, pack_scalars(SamplingParams(), seed=1, prompt_len=1))
    written = jax.jit(write_scalars)(
        state, jnp.asarray([1, 2], jnp.int32), jnp.stack([ints] * 2), jnp.stack([floats] * 2)
    )
    assert not np.any(written.ints[0]) and np.array_equal(written.ints[1], ints)
    assert np.array_equal(written.floats[1], floats)


def test_vocabulary_too_large_for_exact_sums_is_refused():
    num_tokens = MAX_VOCAB_SIZE + 1
    state = jax.eval_shape(lambda: init_slots(1, num_tokens))
    logits = jax.ShapeDtypeStruct((1, num_tokens), jnp.float32)
    row = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=f"{num_tokens} exceeds the limit {MAX_VOCAB_SIZE}"):
        jax.eval_shape(lambda x, s: sample(x, s, row, row, row == 0, KEY), logits, state)


def test_donated_state_is_updated_in_place():
    """The counts are not copied, and the program needs little temporary memory."""
    state, slot, row = init_slots(4096, V), jnp.zeros(R, jnp.int32), jnp.zeros((R, V), jnp.float32)
    step = lambda state, *rest: sample(row, state, *rest)
    extras = pack_extras(
        greedy(min_tokens=1), prompt_token_ids=PROMPT, eos_token_ids=[EOS], vocab_size=V
    )
    for update, arguments in (
        (step, (slot, slot, jnp.ones(R, bool), KEY)),
        (write_extras, (jnp.int32(0), jax.tree.map(jnp.asarray, extras))),
    ):
        program = jax.jit(update, donate_argnums=0).lower(state, *arguments).compile()
        text, memory = program.as_text(), program.memory_analysis()
        assert text is not None and memory is not None
        assert "s32[4096,300]" in text
        assert not re.findall(r"= s32\[4096,300\]\S* copy\(", text)
        assert memory.temp_size_in_bytes < state.extras.output_counts.nbytes / 10
