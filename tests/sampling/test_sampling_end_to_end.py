"""Every sampling parameter takes effect in the engine, per request and in mixed batches."""

import dataclasses

import numpy as np
import pytest

from jaxinfer import InvalidRequestError, SamplingParams
from jaxinfer.loading import open_checkpoint
from tests.support import running
from tests.support.paths import ROOT
from tests.support.tiny_checkpoints import write_checkpoint

PACKAGE = ROOT / "jaxinfer"
PROMPT = [10, 20, 30, 40, 50]
ENGINES: dict = {}  # keyed by (has a tokenizer, end-of-text ids)


def test_every_field_is_read_by_code_beyond_its_own_class():
    """A field that no code reads would be accepted and ignored."""
    folders = ("engine", "execution", "sampling")
    files = [path for name in folders for path in (PACKAGE / name).glob("*.py")]
    code = "\n".join(
        path.read_text("utf-8") for path in [*files, PACKAGE / "llm.py"] if path.name != "params.py"
    )
    unread = [
        field.name
        for field in dataclasses.fields(SamplingParams)
        if f"params.{field.name}" not in code
    ]
    assert unread == []


@pytest.fixture(scope="module")
def model_and_weights():
    return running.tiny("gqa")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_checkpoint(write_checkpoint("gqa", tmp_path_factory.mktemp("gqa"))).tokenizer()


def generate(model_and_weights, fields, prompt=PROMPT, tokenizer=None, eos=()):
    """Run one request; tests share engines, because earlier requests do not affect a result."""
    key = (tokenizer is not None, tuple(eos))
    if key not in ENGINES:
        ENGINES[key] = running.engine(*model_and_weights, tokenizer=tokenizer, eos_token_ids=eos)
    engine = ENGINES[key]
    requests = engine.add(prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **fields}))
    updates = running.run(engine)
    text = "".join(u.text for u in updates if u.request is requests[0])
    return requests, text


def tokens(model_and_weights, fields, **named):
    return generate(model_and_weights, fields, **named)[0][0].output_token_ids


@pytest.fixture(scope="module")
def greedy(model_and_weights):
    return tokens(model_and_weights, {"ignore_eos": True})


def test_each_parameter_changes_the_tokens(model_and_weights, greedy):
    first = greedy[0]
    changes = {
        "temperature": {"temperature": 1.5, "seed": 3},
        "logit_bias": {"logit_bias": {first: -100.0}},
        "allowed_token_ids": {"allowed_token_ids": [7, 8, 9]},
        "repetition_penalty": {"repetition_penalty": 3.0, "logit_bias": {50: 5.0}},
        "presence_penalty": {"presence_penalty": 2.0, "logit_bias": {first: 3.0}},
        "frequency_penalty": {"frequency_penalty": 2.0, "logit_bias": {first: 3.0}},
    }
    for name, fields in changes.items():
        plain = {k: v for k, v in fields.items() if k != name and k != "seed"}
        got = tokens(model_and_weights, {"max_tokens": 8, **fields})
        assert got != tokens(model_and_weights, plain), name
    assert set(tokens(model_and_weights, changes["allowed_token_ids"])) <= {7, 8, 9}


def test_truncation_to_one_token_is_greedy(model_and_weights, greedy):
    for fields in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        got = tokens(model_and_weights, {"temperature": 1.0, "seed": 5, **fields})
        assert got == greedy, fields


def test_tokens_repeat_with_the_same_seed_and_differ_with_another(model_and_weights):
    a, b, c = (tokens(model_and_weights, {"temperature": 1.0, "seed": seed}) for seed in (1, 1, 2))
    assert a == b != c


def test_requests_without_a_seed_depend_on_the_engine_seed(model_and_weights):
    model, weights = model_and_weights

    def run(seed):
        engine = running.engine(model, weights, {"seed": seed})
        requests = [engine.add(PROMPT, SamplingParams(max_tokens=8))[0] for _ in range(2)]
        running.run(engine)
        return running.tokens_of(requests)

    assert run(0) == run(0)
    assert run(0) != run(1)
    assert run(0)[0] != run(0)[1]


def test_n_samples_differ_and_the_first_equals_that_of_n_1(model_and_weights):
    fields = {"temperature": 1.0, "seed": 11, "n": 4}
    requests, _ = generate(model_and_weights, fields)
    assert len({tuple(r.output_token_ids) for r in requests}) == 4
    assert requests[0].output_token_ids == tokens(model_and_weights, {**fields, "n": 1})


def test_stop_tokens_and_eos_end_a_request_unless_forbidden(model_and_weights, greedy):
    third = greedy[2]
    at = greedy.index(third) + 1
    requests, _ = generate(model_and_weights, {"stop_token_ids": [third]})
    assert requests[0].output_token_ids == greedy[:at]
    assert requests[0].finish_reason == "stop"
    assert tokens(model_and_weights, {}, eos=[third]) == greedy[:at]
    assert tokens(model_and_weights, {"ignore_eos": True}, eos=[third]) == greedy
    late = tokens(model_and_weights, {"min_tokens": 6, "stop_token_ids": [third]})
    assert len(late) >= 6 and third not in late[:5]


def test_logprobs_equal_those_of_the_raw_logits(model_and_weights, greedy):
    model, weights = model_and_weights
    logits = running.all_logits(model, weights, PROMPT + greedy).astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for count in (0, 1, 5, 20):
        requests, _ = generate(model_and_weights, {"logprobs": count, "ignore_eos": True})
        assert len(requests[0].logprobs.output) == len(greedy)
        for i, entry in enumerate(requests[0].logprobs.output):
            row = logp[len(PROMPT) - 1 + i]
            assert entry.token_id == greedy[i]
            assert abs(entry.logprob - row[greedy[i]]) < 1e-4
            assert len(entry.top) == count
            best = np.argsort(-row, kind="stable")[:count]
            assert [token for token, _ in entry.top] == best.tolist()
            np.testing.assert_allclose([p for _, p in entry.top], row[best], atol=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("budget", [2, 32])
def test_prompt_logprobs_cover_the_whole_prompt_with_any_chunk_size(
    model_and_weights, max_tokens, budget
):
    model, weights = model_and_weights
    prompt = list(range(40, 60))
    logits = running.all_logits(model, weights, prompt).astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    engine = running.engine(model, weights, {"scheduler": {"max_num_batched_tokens": budget}})
    params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=2)
    for _ in range(2):  # the second would hit the prefix cache if prompt logprobs allowed it
        [request] = engine.add(prompt, params)
        running.run(engine)
        assert sorted(request.logprobs.prompt) == list(range(1, len(prompt)))
        for position, entry in request.logprobs.prompt.items():
            assert entry.token_id == prompt[position]
            assert abs(entry.logprob - logp[position - 1][prompt[position]]) < 1e-4
            assert len(entry.top) == 2
        assert len(request.output_token_ids) == max_tokens


def test_bad_words_never_appear(model_and_weights, tokenizer):
    fields = {"temperature": 1.0, "seed": 4, "max_tokens": 60, "ignore_eos": True}
    _, text = generate(model_and_weights, fields, tokenizer=tokenizer)
    word = next(c for c in text if c.isascii() and c.isalnum())
    _, text = generate(model_and_weights, {**fields, "bad_words": [word]}, tokenizer=tokenizer)
    assert word not in text


def test_stop_string_ends_the_text_before_it(model_and_weights, tokenizer):
    fields = {"temperature": 1.0, "seed": 4, "max_tokens": 60, "ignore_eos": True}
    _, text = generate(model_and_weights, fields, tokenizer=tokenizer)
    stop = text[20:23]
    at = text.index(stop)
    requests, cut = generate(model_and_weights, {**fields, "stop": stop}, tokenizer=tokenizer)
    assert cut == text[:at] and requests[0].finish_reason == "stop"
    including = {**fields, "stop": [stop, "never"], "include_stop_str_in_output": True}
    assert generate(model_and_weights, including, tokenizer=tokenizer)[1] == text[:at] + stop
    late = {**fields, "stop": stop, "min_tokens": 60}
    assert generate(model_and_weights, late, tokenizer=tokenizer)[1] == text


def test_special_tokens_are_in_the_text_only_on_request(model_and_weights, tokenizer):
    fields = {"allowed_token_ids": [2], "max_tokens": 3, "ignore_eos": True}
    assert generate(model_and_weights, fields, tokenizer=tokenizer)[1] == ""
    shown = {**fields, "skip_special_tokens": False}
    assert generate(model_and_weights, shown, tokenizer=tokenizer)[1] == "</s>" * 3


def test_deltas_join_to_the_decoded_text(model_and_weights, tokenizer):
    fields = {"temperature": 1.0, "seed": 9, "max_tokens": 80, "ignore_eos": True}
    [request], text = generate(model_and_weights, fields, tokenizer=tokenizer)
    assert text == tokenizer.decode(request.output_token_ids)


def test_too_many_bad_words_are_refused(model_and_weights, tokenizer):
    with pytest.raises(InvalidRequestError, match="bad_words"):
        generate(
            model_and_weights,
            {"bad_words": list("abcdefghijklmnopqrstuvwxyz")},
            tokenizer=tokenizer,
        )
