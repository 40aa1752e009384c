"""A request's tokens are independent of other requests, and no page is ever lost."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.nn.layers import Numerics
from tests.support import running

VARIANT = "gqa"
NUM_REQUESTS = 12

# Ways to run the same requests; the baseline runs each alone, without overlap or sharing.
MODES = {
    "sync": {"overlap": False},
    "overlap": {},
    "no_prefix_cache": {"cache": {"prefix_cache": False}},
    "pages_of_one_token": {"cache": {"page_size": 1, "num_pages": 512}},
    "tiny_pool": {"cache": {"num_pages": 14}},
    "tiny_pool_no_prefix_cache": {
        "cache": {"num_pages": 14, "prefix_cache": False},
        "overlap": False,
    },
    "chunks_of_1": {"scheduler": {"max_num_batched_tokens": 1}},
    "chunks_of_5": {"scheduler": {"max_num_batched_tokens": 5}},
    "chunks_of_11": {"scheduler": {"max_num_batched_tokens": 11}},
    "all_at_once": {"scheduler": {"max_num_batched_tokens": 128, "max_num_seqs": 16}},
    "two_rows": {"scheduler": {"max_num_seqs": 2}},
    "priority": {"scheduler": {"policy": "priority"}},
    "static": {"scheduler": {"policy": "static", "max_num_seqs": 3}},
}


def random_requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Make greedy and sampled requests that share prefixes and never use token 0."""
    rng = random.Random(seed)
    prefix = [rng.randrange(1, 272) for _ in range(40)]
    requests = []
    for i in range(NUM_REQUESTS):
        own = [rng.randrange(1, 272) for _ in range(rng.randint(1, 20))]
        prompt = prefix[: rng.choice([0, 8, 16, 24, 40])] + own
        kinds = [
            {"temperature": 0.0},
            {"temperature": 0.9, "seed": i},
            {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 100 + i},
            {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
            {"temperature": 0.8, "min_p": 0.02, "presence_penalty": 0.7, "seed": i},
            {"temperature": 0.0, "logit_bias": {5: 2.0}, "min_tokens": 4, "stop_token_ids": [9]},
        ]
        params = {**kinds[i % len(kinds)], "max_tokens": rng.randint(4, 24), "ignore_eos": True}
        params["logit_bias"] = {0: -100.0, **params.get("logit_bias", {})}
        requests.append((prompt, SamplingParams(**params)))
    return requests


def poison(engine) -> None:
    """Fill every page with NaN, so that reading an unwritten value is detected."""
    state = engine.runner.state
    poison_of = lambda a: jnp.full_like(a, 99 if a.dtype == jnp.int8 else jnp.nan)
    pages = jax.tree.map(poison_of, state.pages)
    engine.runner.state = state._replace(pages=pages)


def poisoned_weights(model, weights):
    """Return weights with a NaN embedding for token 0, which is the id of padding tokens."""
    spoil = lambda spec, w: w.at[0].set(jnp.nan) if spec.path == "embed.weight" else w
    return tuple(spoil(spec, w) for spec, w in zip(model.parameters, weights, strict=True))


def run_alone(model, weights, requests, options):
    engine = running.engine(model, weights, {"overlap": False, **options})
    results = []
    for prompt, params in requests:
        poison(engine)
        engine.clear_prefix_cache()
        [request] = engine.add(prompt, params)
        running.run(engine)
        results.append(request)
    return results


def run_staggered(model, weights, requests, options, seed=0):
    """Run all requests, each added at a random step, some after the first has finished."""
    engine = running.engine(model, weights, options)
    poison(engine)
    rng = random.Random(seed)
    todo, added = list(requests), []
    while todo or engine.has_requests:
        while todo and rng.random() < 0.4:
            prompt, params = todo.pop(0)
            priority = rng.randrange(3) if engine.config.scheduler.policy == "priority" else 0
            added += engine.add(prompt, params, priority=priority)
        engine.step()
    return added, engine


@pytest.fixture(scope="module")
def model_and_weights():
    model, weights = running.tiny(VARIANT)
    return model, poisoned_weights(model, weights)


@pytest.fixture(scope="module")
def alone(model_and_weights):
    model, weights = model_and_weights
    return {seed: run_alone(model, weights, random_requests(seed), {}) for seed in (1, 2)}


@pytest.mark.parametrize("mode", MODES)
def test_staggered_requests_equal_requests_alone(model_and_weights, alone, mode):
    """In float32 at these sizes, the arithmetic of a bucket changes bits but no token."""
    model, weights = model_and_weights
    for seed, expected in alone.items():
        requests = random_requests(seed)
        got, engine = run_staggered(model, weights, requests, MODES[mode], seed)
        assert running.tokens_of(got) == running.tokens_of(expected)
        assert engine.pool.num_owned == 0
        if mode.startswith("tiny_pool"):
            assert engine.scheduler.num_preemptions > 0
        if mode in ("overlap", "sync"):
            assert engine.scheduler.num_shared_tokens > 0


@pytest.mark.parametrize("mode", ["overlap", "tiny_pool", "chunks_of_5", "all_at_once"])
def test_batch_invariant_mode_is_bitwise_equal(mode):
    """Logprobs are the same floats too, in any batch and with any chunks."""
    model, weights = running.tiny(VARIANT, Numerics(batch_invariant=True))
    weights = poisoned_weights(model, weights)
    options = {"batch_invariant": True}
    requests = [
        (prompt, SamplingParams(temperature=p.temperature, seed=p.seed, logprobs=3, max_tokens=9))
        for prompt, p in random_requests(3)
    ]
    expected = run_alone(model, weights, requests, options)
    got, _ = run_staggered(model, weights, requests, {**MODES[mode], **options})
    assert [r.logprobs for r in got] == [r.logprobs for r in expected]


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("mode", ["overlap", "tiny_pool", "chunks_of_5"])
def test_quantized_cache_is_bitwise_equal(mode, dtype):
    """Each token is quantized on its own, so shared or recomputed pages have the same values."""
    model, weights = running.tiny(VARIANT, Numerics(batch_invariant=True))
    weights = poisoned_weights(model, weights)
    cache = {**MODES[mode].get("cache", {}), "dtype": dtype}
    options = {**MODES[mode], "batch_invariant": True, "cache": cache}
    requests = [
        (prompt, SamplingParams(temperature=p.temperature, seed=p.seed, logprobs=3, max_tokens=9))
        for prompt, p in random_requests(3)
    ]
    expected = run_alone(model, weights, requests, {**options, "cache": {"dtype": dtype}})
    got, engine = run_staggered(model, weights, requests, options)
    assert {pages.k.dtype.name for pages in engine.runner.state.pages} == {dtype}
    assert [r.logprobs for r in got] == [r.logprobs for r in expected]


def test_padding_and_unused_pages_do_not_affect_tokens(model_and_weights, alone):
    """Poisoned memory, as in the baseline, and clean memory give the same tokens."""
    model, weights = model_and_weights
    _, clean = running.tiny(VARIANT)
    engine = running.engine(model, clean, {"overlap": False})
    requests = []
    for prompt, params in random_requests(1):
        requests += engine.add(prompt, params)
    running.run(engine)
    assert running.tokens_of(requests) == running.tokens_of(alone[1])
    assert any(np.isnan(np.asarray(w)).any() for w in weights)


def test_aborts_do_not_affect_other_requests(model_and_weights, alone):
    """An abort frees pages at once, whether waiting, running, preempted or in flight."""
    model, weights = model_and_weights
    for seed in range(4):
        rng = random.Random(seed)
        engine = running.engine(model, weights, {"cache": {"num_pages": 16}})
        requests = random_requests(1)
        added = [engine.add(prompt, params)[0] for prompt, params in requests]
        victims = set(rng.sample(range(NUM_REQUESTS), 5))
        left = list(victims)
        while engine.has_requests:
            if left and rng.random() < 0.3:
                victim = added[left.pop()]
                was_finished = victim.is_finished
                assert engine.abort(victim.id) is not was_finished
                engine.scheduler.check()
            engine.step()
        assert engine.pool.num_owned == 0
        for i, request in enumerate(added):
            expected = alone[1][i].output_token_ids
            if request.finish_reason == "abort":
                assert i in victims
                assert request.output_token_ids == expected[: len(request.output_token_ids)]
            else:
                assert request.output_token_ids == expected


def test_full_prefix_hit_recomputes_one_token(model_and_weights):
    model, weights = model_and_weights
    engine = running.engine(model, weights)
    prompt = list(range(1, 33))  # four full pages
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    [first] = engine.add(prompt, params)
    running.run(engine)
    before = engine.scheduler.num_shared_tokens
    [second] = engine.add(prompt, params)
    engine.step()
    assert engine.stats.last_step.num_tokens == 1
    assert engine.scheduler.num_shared_tokens - before == 31
    running.run(engine)
    assert second.output_token_ids == first.output_token_ids


def test_salted_requests_share_no_pages(model_and_weights):
    model, weights = model_and_weights
    engine = running.engine(model, weights)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for salt in ("", "a", "b"):
        engine.add(list(range(1, 33)), params, cache_salt=salt)
        running.run(engine)
    assert engine.scheduler.num_shared_tokens == 0
    engine.add(list(range(1, 33)), params, cache_salt="a")
    running.run(engine)
    assert engine.scheduler.num_shared_tokens == 31


def test_warm_up_compiles_one_program_per_bucket(model_and_weights):
    """Only the number of tokens selects a program, not rows, lengths or parameters."""
    model, weights = model_and_weights
    engine = running.engine(model, weights, {"bucket_growth": 4})
    names = []
    engine.warm_up(names.append)
    assert engine.config.buckets == (1, 4, 16, 32)
    assert engine.runner.num_compiled == len(engine.config.buckets) + 2
    for prompt, params in random_requests(1) + random_requests(2):
        engine.add(prompt, params)
    running.run(engine)
    assert engine.runner.num_compiled == len(engine.config.buckets) + 2
    assert engine.runner.num_late_compiles == 0


def test_deleted_engine_frees_its_programs(model_and_weights):
    """If jit's caches kept them, a process would exhaust its memory maps after about 25 engines."""
    import gc
    import weakref

    model, weights = model_and_weights
    engine = running.engine(model, weights, {"bucket_growth": 32})
    engine.warm_up()
    executables = [weakref.ref(p._executable) for p in engine.runner._programs.values()]
    assert len(executables) == 4
    del engine
    gc.collect()
    assert [e() for e in executables] == [None] * 4


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("place", ["before the device", "after the device", "while reading"])
def test_interrupted_step_loses_no_request(model_and_weights, alone, monkeypatch, overlap, place):
    """After Ctrl-C or a device failure the next step continues, and the tokens are the same."""
    model, weights = model_and_weights
    engine = running.engine(model, weights, {"overlap": overlap})
    added = [engine.add(prompt, params)[0] for prompt, params in random_requests(1)]
    for _ in range(3):
        engine.step()
    name = {"while reading": "_accept"}.get(place)
    owner = engine._outputs if name else engine.runner
    name = name or "dispatch"
    original = getattr(owner, name)
    calls = []

    def interrupted(*args):
        calls.append(args)
        if place != "before the device":
            original(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert len(calls) == 1
    engine.scheduler.check()
    running.run(engine)
    assert running.tokens_of(added) == running.tokens_of(alone[1])
    assert engine.pool.num_owned == 0
