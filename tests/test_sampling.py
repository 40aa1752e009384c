"""The sampling step: what each request asks is done, to its own row, and costs no other row."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling import sample, top_logprobs
from jaxinfer.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxinfer.sampling_slots import (
    NO_TOKEN,
    Feature,
    features,
    init_slots,
    pack_extras,
    pack_scalars,
    write_extras,
    write_scalars,
)

V, R = 300, 8  # V is no multiple of 32 or 128
EOS = 2
PROMPT = [5, 6, 7, 7]
KEY = jax.random.key(0)

STEP = jax.jit(sample, static_argnames="row_tile")  # one program a shape
WRITE = jax.jit(write_scalars)
WRITE_EXTRAS = jax.jit(write_extras)


class Batch:
    """Requests in slots 0.., one row each; slots and rows beyond them are padding."""

    def __init__(self, *requests: SamplingParams, vocab_size=V, num_slots=R, bad_word_ids=()):
        self.state, self.vocab_size = init_slots(num_slots, vocab_size), vocab_size
        self.bad_word_ids = bad_word_ids
        self.outputs = [[] for _ in requests]
        for slot, params in enumerate(requests):
            self.admit(slot, params)

    def admit(self, slot, params: SamplingParams, outputs=()):
        """Admit a request to a slot, again after a preemption if it has outputs."""
        asked = dict(
            eos_token_ids=[EOS], bad_word_ids=self.bad_word_ids if params.bad_words else ()
        )
        ints, floats = pack_scalars(params, seed=slot + 10, prompt_len=len(PROMPT), **asked)
        where = jnp.int32(slot)
        self.state = WRITE(self.state, where, jnp.asarray(ints), jnp.asarray(floats))
        extras = pack_extras(
            params,
            prompt_token_ids=PROMPT,
            output_token_ids=outputs,
            vocab_size=self.vocab_size,
            **asked,
        )
        if extras is not None:
            self.state = WRITE_EXTRAS(self.state, where, jax.tree.map(jnp.asarray, extras))

    def step(self, logits, slots=None, num_rows=R, **options):
        """Sample one token for each of `slots` from its row of logits; padding rows are NaN."""
        slots = list(range(len(self.outputs)) if slots is None else slots)
        rows = np.full((num_rows, self.vocab_size), np.nan, np.float32)
        rows[: len(slots)] = logits
        row_slot, position = np.zeros((2, num_rows), np.int32)
        row_slot[: len(slots)] = slots
        position[: len(slots)] = [len(PROMPT) + len(self.outputs[slot]) for slot in slots]
        is_sampled = jnp.arange(num_rows) < len(slots)
        arrays = map(jnp.asarray, (row_slot, position))
        output, self.state = STEP(
            jnp.asarray(rows), self.state, *arrays, is_sampled, KEY, **options
        )
        assert np.all(np.asarray(output.tokens)[len(slots) :] == NO_TOKEN)
        for slot, token in zip(slots, np.asarray(output.tokens).tolist(), strict=False):
            self.outputs[slot].append(token)
        return output

    def chosen(self, logits, **options) -> list[int]:
        return np.asarray(self.step(logits, **options).tokens)[: len(self.outputs)].tolist()


def greedy(**fields) -> SamplingParams:
    return SamplingParams(temperature=0, **fields)


def ranked(*tokens, vocab_size=V):
    """[1, V] logits whose order of preference begins with `tokens`."""
    logits = np.zeros((1, vocab_size), np.float32)
    logits[0, list(tokens)] = np.arange(len(tokens), 0, -1)
    return logits


def bytes_of(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_greedy_takes_the_first_of_equal_logits():
    assert Batch(greedy()).chosen(np.ones((1, V), np.float32)) == [0]
    assert Batch(greedy()).chosen(ranked(299, 4)) == [299]


def test_rows_of_one_batch_are_each_treated_as_they_asked():
    batch = Batch(greedy(), greedy(logit_bias={9: 50}), greedy(allowed_token_ids=[3]))
    assert batch.chosen(ranked(1, 2)) == [1, 9, 3]


def test_bias_is_added_to_its_tokens():
    batch = Batch(greedy(logit_bias={4: 1.5, 299: -100, 0: 0.5}))
    assert batch.chosen(ranked(299, 4)) == [4]
    with_three_left = ranked(299, 8, 4)  # 3, 2, 1: bias makes it -97, 2, 2.5
    assert batch.chosen(with_three_left) == [4]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 129])
def test_only_allowed_tokens_are_chosen_whatever_the_width_of_the_bit_set(vocab_size):
    allowed = sorted({0, vocab_size // 2, vocab_size - 1})
    batch = Batch(SamplingParams(allowed_token_ids=allowed), vocab_size=vocab_size, num_slots=1)
    flat = np.zeros((1, vocab_size), np.float32)
    drawn = {batch.chosen(flat, num_rows=1)[0] for _ in range(40)}
    assert drawn == set(allowed)


def test_a_bad_word_of_one_token_is_never_chosen():
    batch = Batch(greedy(bad_words=["w"]), bad_word_ids=[[9], [299]])
    assert batch.chosen(ranked(299, 9, 4)) == [4]


def test_a_bad_word_of_many_tokens_may_begin_but_not_end():
    batch = Batch(greedy(bad_words=["w"]), bad_word_ids=[[9, 8], [1, 9, 3], list(range(20, 28))])
    assert batch.chosen(ranked(8)) == [8]
    assert batch.chosen(ranked(9)) == [9]
    assert batch.chosen(ranked(8, 3)) == [3]  # 9 8 is forbidden; 1 9 3 did not begin with 1
    assert [batch.chosen(ranked(token, 50))[0] for token in (1, 9, 3)] == [1, 9, 50]
    run = [batch.chosen(ranked(token, 50))[0] for token in range(20, 28)]
    assert run == [*range(20, 27), 50]


def test_a_bad_word_may_not_be_completed_across_the_end_of_the_prompt():
    batch = Batch(greedy(bad_words=["w"]), bad_word_ids=[[*PROMPT, 9]])
    assert batch.chosen(ranked(9, 4)) == [4]


def test_min_tokens_holds_back_end_of_text_and_stop_tokens():
    batch = Batch(greedy(min_tokens=2, stop_token_ids=[9]), greedy(min_tokens=2, ignore_eos=True))
    assert batch.chosen(ranked(EOS, 9, 4)) == [4, EOS]
    assert batch.chosen(ranked(9, EOS, 4)) == [4, 9]
    assert batch.chosen(ranked(EOS, 9, 4)) == [EOS, EOS]


def test_rules_that_forbid_every_token_yield_to_the_allowed_mask():
    asked = dict(allowed_token_ids=[8, 9], bad_words=["w"], logit_bias={8: 100})
    greedy_one, random_one = greedy(**asked), SamplingParams(**asked)
    batch = Batch(greedy_one, random_one, greedy(), bad_word_ids=[[8], [9]])
    logits = ranked(4, 9, 8)
    logits[0, 8] = -30.0  # the raw logits decide: 9, not the biased 8
    for _ in range(3):
        assert batch.chosen(logits) == [9, 9, 4]


def test_a_row_of_only_minus_infinity_still_gives_a_token():
    batch = Batch(greedy(), SamplingParams(top_p=0.5), greedy(presence_penalty=1.0))
    assert all(0 <= token < V for token in batch.chosen(np.full((1, V), -np.inf, np.float32)))


def penalized(x, prompt, outputs, params: SamplingParams):
    """One row of float64 logits after the penalties, token by token."""
    x = x.astype(np.float64)
    for token in {*prompt, *outputs}:
        x[token] *= params.repetition_penalty if x[token] < 0 else 1 / params.repetition_penalty
    for token in set(outputs):
        x[token] -= outputs.count(token) * params.frequency_penalty + params.presence_penalty
    return x


PENALTIES = [
    dict(repetition_penalty=1.3),
    dict(repetition_penalty=0.8),
    dict(frequency_penalty=0.4),
    dict(frequency_penalty=-0.1),
    dict(presence_penalty=0.7),
    dict(presence_penalty=-0.2, frequency_penalty=0.3, repetition_penalty=1.1),
]


def test_penalties_equal_the_reference_over_a_generation():
    requests = [greedy(**fields) for fields in PENALTIES]
    batch, rng = Batch(*requests, greedy()), np.random.default_rng(0)
    for _ in range(60):
        logits = np.abs(rng.normal(size=(1, V))).astype(np.float32) * 0.2 - 0.1
        logits[0, :12] += 0.6  # few favourites, so that tokens repeat
        expected = [
            int(np.argmax(penalized(logits[0], PROMPT, batch.outputs[slot], params)))
            for slot, params in enumerate([*requests, greedy()])
        ]
        assert batch.chosen(logits) == expected
    assert max(map(len, map(set, batch.outputs))) > 3, "the penalties moved nothing"


@pytest.mark.parity
def test_repetition_penalty_and_truncation_equal_transformers():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    hf = pytest.importorskip("transformers", reason="transformers is not installed")
    params = SamplingParams(
        temperature=0.7, top_k=90, top_p=0.8, min_p=0.02, repetition_penalty=1.4
    )
    logits = np.random.default_rng(1).normal(size=V).astype(np.float32)
    logits[PROMPT] += 2
    scores = torch.tensor(logits)[None]
    for processor in (
        hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        hf.TemperatureLogitsWarper(params.temperature),
        hf.TopKLogitsWarper(params.top_k),
        hf.TopPLogitsWarper(params.top_p),
        hf.MinPLogitsWarper(params.min_p),
    ):
        scores = processor(torch.tensor([PROMPT]), scores)
    probs = torch.softmax(scores[0].double(), 0).numpy()
    # Every draw starts from the prompt: eight requests, admitted again before each step.
    batch, counts = Batch(*[params] * R), np.zeros(V)
    slots, fresh = range(R), batch.state
    for step in range(500):
        batch.state, batch.outputs = fresh, [[0] * step for _ in slots]
        counts += np.bincount(batch.chosen(logits[None]), minlength=V)
    assert np.all((counts > 0) <= (probs > 0)), "a token was drawn that transformers cuts off"
    likely = probs * counts.sum() >= 10
    assert np.abs(counts - probs * counts.sum())[likely].max() < 5 * np.sqrt(counts.max())
    assert set(np.flatnonzero(likely)) <= set(np.flatnonzero(counts))


@pytest.mark.parity
@pytest.mark.parametrize("penalty", [1.2, 0.7])
def test_penalized_greedy_generation_equals_transformers(penalty):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    hf = pytest.importorskip("transformers", reason="transformers is not installed")
    processors = [
        hf.RepetitionPenaltyLogitsProcessor(penalty),
        hf.NoBadWordsLogitsProcessor([[9], [7, 3], [1, 2, 4]], eos_token_id=[EOS]),
        hf.SequenceBiasLogitsProcessor({(11,): 0.3, (40,): -0.5}),
    ]
    params = greedy(repetition_penalty=penalty, bad_words=["w"], logit_bias={11: 0.3, 40: -0.5})
    batch = Batch(params, bad_word_ids=[[9], [7, 3], [1, 2, 4]])
    rng, known = np.random.default_rng(2), list(PROMPT)
    for _ in range(60):
        logits = rng.normal(size=(1, V)).astype(np.float32) * 0.3
        logits[0, :12] += 1.0
        scores = torch.tensor(logits)
        for processor in processors[2:] + processors[:2]:  # bias, penalty, masks
            scores = processor(torch.tensor([known]), scores)
        known.append(int(scores.argmax()))
        assert batch.chosen(logits) == known[-1:]


def log_softmax(x):
    x = x.astype(np.float64)
    return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1))


def test_logprobs_are_of_the_raw_logits():
    logits = np.random.default_rng(4).normal(size=(1, V)).astype(np.float32) * 3
    asked = dict(logit_bias={9: 100}, temperature=0.5)
    batch = Batch(
        SamplingParams(logprobs=5, **asked), SamplingParams(logprobs=0, **asked), greedy()
    )
    output = batch.step(logits)
    expected = log_softmax(logits)[0]
    assert [int(token) for token in output.tokens[:2]] == [9, 9]
    np.testing.assert_allclose(output.logprobs[:3], [expected[9], expected[9], 0.0], atol=1e-5)
    top = np.argsort(-expected)[:MAX_LOGPROBS]
    assert np.array_equal(output.top_ids[0], top)
    np.testing.assert_allclose(output.top_logprobs[0], expected[top], atol=1e-5)
    assert not np.any(output.top_ids[1:]) and not np.any(output.top_logprobs[1:])


def test_top_logprobs_serves_prompts_and_small_vocabularies():
    logits = np.random.default_rng(5).normal(size=(6, 11)).astype(np.float32) * 8
    targets = np.array([0, 3, 10, 10, 5, 1], np.int32)
    chosen, ids, values = jax.jit(top_logprobs)(jnp.asarray(logits), jnp.asarray(targets))
    expected = np.stack([log_softmax(row[None])[0] for row in logits])
    np.testing.assert_allclose(chosen, expected[np.arange(6), targets], atol=1e-5)
    assert np.array_equal(ids[:, :11], np.argsort(-expected, axis=1))
    assert np.all(np.asarray(ids)[:, 11:] == NO_TOKEN) and np.all(np.isneginf(values[:, 11:]))
