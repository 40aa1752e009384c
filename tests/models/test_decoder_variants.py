"""Batch invariance of a decoder's variants, and LongRoPE's recomputation in any schedule."""

import functools
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from jaxinfer import SamplingParams
from jaxinfer.nn.layers import Numerics
from tests.support import running
from tests.support.families_dense import CASES
from tests.support.family_bench import make_tensors, recorded, write_huggingface

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@functools.cache
def _loaded(name: str, *, batch_invariant: bool = False):
    case = CASES[name]
    tensors = make_tensors(recorded("dense")[name]["shapes"], case.seed, case.norm_mean)
    with TemporaryDirectory() as folder:
        numerics = Numerics(batch_invariant=batch_invariant)
        return running.load(write_huggingface(case, tensors, Path(folder)), numerics)


def _run(engine, prompts, params):
    requests = [engine.add(prompt, params)[0] for prompt in prompts]
    running.run(engine)
    assert engine.pool.num_owned == 0
    return requests


@pytest.mark.parametrize("name", ["gemma3", "granite"])
def test_batch_invariant_bits_do_not_depend_on_the_batch(name):
    """Among the variants are post-norms, norms of q and k, windows, and multipliers, which a
    compiler may fuse with a sum."""
    model, weights = _loaded(name, batch_invariant=True)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
    prompts = [*CASES[name].sequences(), CASES[name].sequences()[1][:7]]
    engine = running.engine(model, weights, {"batch_invariant": True})
    together = _run(engine, prompts, params)
    engine.clear_prefix_cache()
    for prompt, request in zip(prompts, together, strict=True):
        [alone] = _run(engine, [prompt], params)
        assert alone.logprobs.output == request.logprobs.output


@pytest.fixture(scope="module")
def restarted():
    """Return prompts that end just below the 32 tokens at which a sequence is recomputed, and the
    tokens that follow each of them alone."""
    model, weights = _loaded("phi3")
    tokens = CASES["phi3"].sequences()[1]
    prompts = [tokens[: 31 - i] for i in range(4)] + [tokens[3:15]]
    engine = running.engine(model, weights, {"overlap": False})
    alone = [_run(engine, [prompt], GREEDY)[0] for prompt in prompts]
    assert engine.scheduler.num_preemptions == len(prompts)
    return prompts, running.tokens_of(alone)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [
        {
            "overlap": False,
            "scheduler": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        },  # in chunks, few at a time
        {"cache": {"num_pages": 14}},  # with preemptions
    ],
)
def test_longrope_recomputation_is_equal_in_any_schedule(restarted, options):
    prompts, expected = restarted
    engine = running.engine(*_loaded("phi3"), options)
    assert running.tokens_of(_run(engine, prompts, GREEDY)) == expected
    assert engine.scheduler.num_preemptions >= len(prompts)
