"""SamplingParams: what is accepted is normal, what is not is refused by name, all at once."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from jaxinfer.sampling.params import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    FrozenMapping,
    SamplingParams,
)

NAN, INF = float("nan"), float("inf")

REFUSED = {
    "temperature": [-0.1, 1e-9, 1e7, NAN, INF, True, "1", None],
    "top_k": [-2, 2**31, 1.0, True, None],
    "top_p": [0.0, -0.5, 1.5, NAN, False],
    "min_p": [-0.01, 1.01, NAN],
    "seed": [-1, 2**32, 1.5, True],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, INF],
    "repetition_penalty": [0.0, -1.0, INF, 1e-9],
    "logit_bias": [{1: 101}, {1: -100.5}, {-1: 0}, {"1": 0}, {1: NAN}, {True: 1}, [1, 2], {1.5: 1}],
    "allowed_token_ids": [[], [-1], [1.5], "12", [True], {1: 2}, 3, [2**31]],
    "bad_words": ["word", [""], [1], None],
    "min_tokens": [-1, 1.5, None],
    "max_tokens": [-1, 2.0, True],
    "stop": [[""], "", [1], None, b"x"],
    "stop_token_ids": [[-1], ["a"], None, "1"],
    "ignore_eos": [1, None, "yes"],
    "include_stop_str_in_output": [0],
    "skip_special_tokens": [None],
    "n": [0, 129, 1.0],
    "logprobs": [-1, 21, True, 1.0],
    "prompt_logprobs": [-1, 21],
}


def build(**fields) -> SamplingParams:
    return SamplingParams(**fields)


def test_every_field_is_checked():
    assert set(REFUSED) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values]
)
def test_a_bad_value_is_refused_with_its_field_and_value(name, value):
    with pytest.raises(ValueError, match="must be") as caught:
        build(**{name: value})
    assert f"{name}={value!r} must be" in str(caught.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ValueError, match="must be") as caught:
        build(temperature=-1, top_p=2.0, seed="x", min_tokens=9, max_tokens=3)
    for part in ("temperature=-1", "[0, 4294967295]", "(0, 1]", "min_tokens=9 must be at most"):
        assert part in str(caught.value)


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(ValueError, match="min_tokens=5 must be at most max_tokens=4"):
        build(min_tokens=5, max_tokens=4)
    assert build(min_tokens=5, max_tokens=5).min_tokens == 5
    assert build(min_tokens=5, max_tokens=None).max_tokens is None


def test_the_limits_themselves_are_accepted():
    params = build(
        temperature=0, top_k=-1, top_p=1, min_p=1, seed=2**32 - 1, presence_penalty=-2,
        frequency_penalty=2, logit_bias={0: 100, 7: -100}, max_tokens=0, n=128, logprobs=0,
        prompt_logprobs=20,
    )  # fmt: skip
    assert params.max_tokens == 0
    assert params.is_greedy and not build().is_greedy


def test_values_are_stored_in_normal_form():
    params = build(
        temperature=Fraction(1, 2), top_k=np.int64(3), stop="end", stop_token_ids=iter([1, 2]),
        allowed_token_ids=np.array([4, 5]), bad_words=["a", "b"], logit_bias={np.int32(3): 1},
    )  # fmt: skip
    assert type(params.temperature) is float and type(params.top_k) is int
    assert params.stop == ("end",) and params.stop_token_ids == (1, 2)
    assert params.allowed_token_ids == (4, 5) and params.bad_words == ("a", "b")
    assert params.logit_bias == {3: 1.0}
    assert all(type(key) is int for key in params.logit_bias or ())


def test_an_object_is_immutable_hashable_and_copies_equal():
    bias = {3: 1.0}
    params = build(stop=["x"], logit_bias=bias)
    bias[3] = 9.0
    assert params.logit_bias == {3: 1.0}
    assert hash(params) == hash(build(stop="x", logit_bias={3: 1}))
    for twin in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params)):
        assert twin == params and hash(twin) == hash(params)
    assert dataclasses.replace(params, top_k=5).logit_bias == {3: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        params.logit_bias[3] = 0.0  # pyright: ignore
    assert repr(FrozenMapping([(1, 2.0)])) == "{1: 2.0}"


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="temprature"):
        build(temprature=1.0)


def test_ids_outside_the_vocabulary_are_named_with_its_size():
    params = build(logit_bias={5: 1, 10: 1}, allowed_token_ids=[3, 11], stop_token_ids=[9, 12])
    params.check(13)
    with pytest.raises(ValueError, match="vocabulary") as caught:
        params.check(10, [[3, 14]])
    text = str(caught.value)
    for name, ids in (
        ("logit_bias", [10]),
        ("allowed_token_ids", [11]),
        ("stop_token_ids", [12]),
        ("bad_words", [14]),
    ):
        assert f"{name}: token ids {ids} are outside the vocabulary [0, 10)" in text


def test_what_exceeds_the_device_state_is_refused():
    build(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)).check(1000)
    with pytest.raises(ValueError, match=f"{MAX_LOGIT_BIAS + 1} entries; the limit is"):
        build(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)).check(1000)
    words = build(bad_words=["w"])
    words.check(1000, [[1] * MAX_BAD_WORD_LEN] * MAX_BAD_WORDS)
    with pytest.raises(ValueError, match=f"needs {MAX_BAD_WORDS + 1} token sequences"):
        words.check(1000, [[1]] * (MAX_BAD_WORDS + 1))
    with pytest.raises(ValueError, match=f"{MAX_BAD_WORD_LEN + 1} tokens long"):
        words.check(1000, [[1] * (MAX_BAD_WORD_LEN + 1)])
    with pytest.raises(ValueError, match="0 tokens long"):
        words.check(1000, [[]])


def test_the_file_imports_no_array_library():
    path = sys.modules[SamplingParams.__module__].__file__
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); "
        "print(sorted({'jax', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
