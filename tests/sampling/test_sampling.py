"""The sampling step applies each request's parameters to its own row and to no other row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxinfer.sampling.params import MAX_LOGPROBS, SamplingParams
from jaxinfer.sampling.sample import top_logprobs
from jaxinfer.sampling.slots import NO_TOKEN
from tests.support.sampling_batch import EOS, KEY, PROMPT, STEP, Batch, R, V, greedy, ranked


def test_greedy_decoding_takes_the_first_of_equal_logits():
    assert Batch(greedy()).chosen(np.ones((1, V), np.float32)) == [0]
    assert Batch(greedy()).chosen(ranked(299, 4)) == [299]


def test_each_row_of_a_batch_uses_its_own_parameters():
    batch = Batch(greedy(), greedy(logit_bias={9: 50}), greedy(allowed_token_ids=[3]))
    assert batch.chosen(ranked(1, 2)) == [1, 9, 3]


def test_bias_is_added_to_its_tokens():
    batch = Batch(greedy(logit_bias={4: 1.5, 299: -100, 0: 0.5}))
    assert batch.chosen(ranked(299, 4)) == [4]
    logits = ranked(299, 8, 4)  # logits 3, 2, 1, and with the bias -97, 2, 2.5
    assert batch.chosen(logits) == [4]


def test_all_allowed_tokens_and_no_others_are_drawn():
    allowed = [0, 31, 32, 288, V - 1]
    batch = Batch(SamplingParams(allowed_token_ids=allowed))
    flat = np.zeros((1, V), np.float32)
    assert {batch.chosen(flat)[0] for _ in range(60)} == set(allowed)


def test_bad_word_of_one_token_is_never_chosen():
    batch = Batch(greedy(bad_words=["w"]), bad_word_ids=[[9], [299]])
    assert batch.chosen(ranked(299, 9, 4)) == [4]


def test_bad_word_of_many_tokens_is_never_completed():
    batch = Batch(greedy(bad_words=["w"]), bad_word_ids=[[9, 8], [1, 9, 3], list(range(20, 28))])
    assert batch.chosen(ranked(8)) == [8]
    assert batch.chosen(ranked(9)) == [9]
    assert batch.chosen(ranked(8, 3)) == [3]  # 9 8 is forbidden; 9 3 is not, without 1 before it
    assert [batch.chosen(ranked(token, 50))[0] for token in (1, 9, 3)] == [1, 9, 50]
    run = [batch.chosen(ranked(token, 50))[0] for token in range(20, 28)]
    assert run == [*range(20, 27), 50]


def test_bad_word_that_begins_in_the_prompt_is_never_completed():
    batch = Batch(greedy(bad_words=["w"]), bad_word_ids=[[*PROMPT, 9]])
    assert batch.chosen(ranked(9, 4)) == [4]


def test_min_tokens_forbids_end_of_text_and_stop_tokens():
    batch = Batch(greedy(min_tokens=2, stop_token_ids=[9]), greedy(min_tokens=2, ignore_eos=True))
    assert batch.chosen(ranked(EOS, 9, 4)) == [4, EOS]
    assert batch.chosen(ranked(9, EOS, 4)) == [4, 9]
    assert batch.chosen(ranked(EOS, 9, 4)) == [EOS, EOS]


def test_rules_that_forbid_every_token_fall_back_to_the_allowed_mask():
    rules: dict[str, Any] = dict(allowed_token_ids=[8, 9], bad_words=["w"], logit_bias={8: 100})
    greedy_one, random_one = greedy(**rules), SamplingParams(**rules)
    batch = Batch(greedy_one, random_one, greedy(), bad_word_ids=[[8], [9]])
    logits = ranked(4, 9, 8)
    logits[0, 8] = -30.0  # the raw logits choose 9, and not 8, which has a bias
    for _ in range(3):
        assert batch.chosen(logits) == [9, 9, 4]


def test_row_of_minus_infinity_yields_a_valid_token():
    batch = Batch(greedy(), SamplingParams(top_p=0.5), greedy(presence_penalty=1.0))
    assert all(0 <= token < V for token in batch.chosen(np.full((1, V), -np.inf, np.float32)))


def penalized(x, prompt, outputs, params: SamplingParams):
    """Apply the penalties to one row of logits, token by token, in float64."""
    x = x.astype(np.float64)
    for token in {*prompt, *outputs}:
        x[token] *= params.repetition_penalty if x[token] < 0 else 1 / params.repetition_penalty
    for token in set(outputs):
        x[token] -= outputs.count(token) * params.frequency_penalty + params.presence_penalty
    return x


PENALTIES: list[dict[str, Any]] = [
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
        logits[0, :12] += 0.6  # a few likely tokens, so that tokens repeat
        expected = [
            int(np.argmax(penalized(logits[0], PROMPT, batch.outputs[slot], params)))
            for slot, params in enumerate([*requests, greedy()])
        ]
        assert batch.chosen(logits) == expected
    assert max(map(len, map(set, batch.outputs))) > 3, "the penalties changed no token"


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
    # Every draw depends on the prompt alone: outputs only change the position, because the state is
    # reset before each step.
    batch, counts = Batch(*[params] * R), np.zeros(V)
    fresh = batch.state
    for step in range(500):
        batch.state, batch.outputs = fresh, [[0] * step for _ in range(R)]
        counts += np.bincount(batch.chosen(logits[None]), minlength=V)
    assert np.all((counts > 0) <= (probs > 0)), "a token was drawn that transformers excludes"
    assert np.sum(probs > 0) > 10
    expected = probs * counts.sum()
    likely = expected >= 10
    pooled = lambda x: np.append(x[likely], x[~likely].sum() + 1e-9)
    assert stats.chisquare(pooled(counts), pooled(expected)).pvalue > 1e-3


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


def test_logprobs_are_computed_from_the_raw_logits():
    logits = np.random.default_rng(4).normal(size=(1, V)).astype(np.float32) * 3
    fields: dict[str, Any] = dict(logit_bias={9: 100}, temperature=0.5)
    batch = Batch(
        SamplingParams(logprobs=5, **fields), SamplingParams(logprobs=0, **fields), greedy()
    )
    output = batch.step(logits)
    expected = log_softmax(logits)[0]
    assert [int(token) for token in output.tokens[:2]] == [9, 9]
    np.testing.assert_allclose(output.logprobs[:3], [expected[9], expected[9], 0.0], atol=1e-5)
    top = np.argsort(-expected)[:MAX_LOGPROBS]
    assert np.array_equal(output.top_ids[0], top)
    np.testing.assert_allclose(output.top_logprobs[0], expected[top], atol=1e-5)
    assert not np.any(output.top_ids[2:]) and not np.any(output.top_logprobs[2:])


def test_top_logprobs_support_prompts_and_small_vocabularies():
    logits = np.random.default_rng(5).normal(size=(6, 11)).astype(np.float32) * 8
    targets = np.array([0, 3, 10, 10, 5, 1], np.int32)
    chosen, ids, values = jax.jit(top_logprobs)(jnp.asarray(logits), jnp.asarray(targets))
    expected = np.stack([log_softmax(row[None])[0] for row in logits])
    np.testing.assert_allclose(chosen, expected[np.arange(6), targets], atol=1e-5)
    assert np.array_equal(ids[:, :11], np.argsort(-expected, axis=1))
    assert np.all(np.asarray(ids)[:, 11:] == NO_TOKEN) and np.all(np.isneginf(values[:, 11:]))


# Every feature, alone and in combination, in slots 0..R-1.
MIXED = [
    greedy(logprobs=20),
    SamplingParams(temperature=0.7, logprobs=3),
    SamplingParams(top_p=0.98, top_k=200, temperature=3.0),
    SamplingParams(top_p=0.5, logit_bias={3: 2.5, 7: -1.3}, logprobs=0),
    SamplingParams(min_p=0.1, repetition_penalty=1.23, frequency_penalty=0.137),
    greedy(presence_penalty=0.5, repetition_penalty=0.9, bad_words=["w"]),
    SamplingParams(allowed_token_ids=range(0, V, 3), min_tokens=9, logprobs=20),
    SamplingParams(top_p=0.9, presence_penalty=-0.3, frequency_penalty=0.1, top_k=5),
]


def test_row_has_the_same_bits_in_every_batch():
    vocab_size = 5003  # a prime, so every loop over it has a remainder
    batch = Batch(*MIXED, vocab_size=vocab_size, bad_word_ids=[[5], [7, 3]])
    logits = np.random.default_rng(6).normal(size=(R, vocab_size)).astype(np.float32) * 2.5
    batch.step(logits)  # so that counts are not all zero
    state, outputs = batch.state, [list(tokens) for tokens in batch.outputs]

    def bits(slots, **options):
        batch.state, batch.outputs = state, [list(tokens) for tokens in outputs]
        output = batch.step(logits[list(slots)], slots=slots, **options)
        rows = [[np.asarray(part)[row].tobytes() for part in output] for row in range(len(slots))]
        return dict(zip(slots, rows, strict=True))

    together = bits(range(R))
    assert bits([6, 0, 7, 2, 5, 1, 4, 3]) == together
    assert bits(range(R), row_tile=3) == together
    for slot in range(R):
        assert bits([slot])[slot] == together[slot], f"{MIXED[slot]} with padding"
        assert bits([slot], num_rows=1)[slot] == together[slot], f"{MIXED[slot]} alone"
    few = bits([4, 3], num_rows=3)
    assert few == {slot: together[slot] for slot in (4, 3)}


def test_rows_not_sampled_change_neither_state_nor_neighbours():
    batch = Batch(*MIXED, bad_word_ids=[[5]])
    before = batch.state
    logits = np.random.default_rng(7).normal(size=(R, V)).astype(np.float32)
    clean = batch.step(logits)
    logits[1::2] = np.nan
    is_sampled = jnp.arange(R) % 2 == 0
    slots, position = jnp.arange(R, dtype=jnp.int32), jnp.full(R, len(PROMPT), jnp.int32)
    output, after = STEP(jnp.asarray(logits), before, slots, position, is_sampled, KEY)
    for part, clean_part in zip(output, clean, strict=True):
        assert np.array_equal(part[::2], clean_part[::2])
    assert np.all(np.asarray(output.tokens)[1::2] == NO_TOKEN)
    assert not np.any(output.logprobs[1::2]) and not np.any(output.top_ids[1::2])
    for old, new, counted in zip(*map(jax.tree.leaves, (before, after, batch.state)), strict=True):
        assert np.array_equal(old[1::2], new[1::2])
        assert np.array_equal(new[::2], counted[::2])


def test_padding_row_with_the_index_of_an_active_slot_does_not_change_it():
    batch = Batch(greedy(presence_penalty=0.5, bad_words=["w"]), bad_word_ids=[[5, 6]])
    batch.step(ranked(9))  # every padding row points at slot 0
    assert int(batch.state.extras.output_counts.sum()) == 1
    assert batch.state.extras.recent_tokens[0].tolist()[-2:] == [PROMPT[-1], 9]
