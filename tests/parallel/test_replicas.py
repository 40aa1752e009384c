"""Several engines as one: the tokens of one engine, whatever the number of replicas.

The engines are real ones over devices without arrays (`fake_device.py`), whose time is counted, not
spent. Real devices are in `replicas_child.py`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jaxinfer import FinishReason, InvalidRequestError, SamplingParams
from jaxinfer.config import from_mapping
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import Update
from jaxinfer.options import merge
from jaxinfer.parallel.replicas import Replicas
from tests.support.child_process import findings
from tests.support.fake_device import MAX_LEN, VOCAB_SIZE, expected_output, fake_engine
from tests.support.paths import SUPPORT

CHILD = SUPPORT / "replicas_child.py"
GREEDY = SamplingParams(temperature=0, max_tokens=6)
SIZES = {
    "cache": {"page_size": 2, "num_pages": 40},
    "scheduler": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "check_every_step": True,
}
# Of an engine that its replicas do not have: what each has for itself.
OWN = {"pool", "runner", "scheduler", "cache_root", "begin_step", "end_step", "num_awaited"}
OWN |= {"counters"}  # `stats` has the sums


class Owners(dict):
    """All requests may read each other's pages."""

    def __missing__(self, request_id: str) -> str:
        return "all"


class Tokens:
    """A step's tokens, on the device until `done_at`."""

    def __init__(self, values: np.ndarray, clock: Clock, done_at: float):
        self.values, self.clock, self.done_at = values, clock, done_at

    def is_ready(self) -> bool:
        return self.clock.now >= self.done_at

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self.clock.now = max(self.clock.now, self.done_at)
        return self.values


class Clock:
    """Seconds that steps take: the host's, and each device's by the number of tokens."""

    def __init__(self, host_s: float = 1.0, device_s: Callable[[int], float] = lambda tokens: 10.0):
        self.now, self.host_s, self.device_s = 0.0, host_s, device_s

    def count(self, engine: Engine) -> None:
        """Let this engine's steps take time."""
        dispatch, free_at = engine.runner.dispatch, 0.0

        def dispatched(plan: Any) -> Any:
            nonlocal free_at
            self.now += self.host_s
            free_at = max(self.now, free_at) + self.device_s(plan.num_tokens)
            plan, output = dispatch(plan)
            sampled: Any = output.sampled
            sampled.tokens = Tokens(sampled.tokens, self, free_at)
            return plan, output

        engine.runner.dispatch = dispatched  # type: ignore[method-assign]


def replicas(number: int, options=None, clock: Clock | None = None) -> Replicas:
    engines = [an_engine(options) for _ in range(number)]
    clock = clock or Clock()
    for engine in engines:
        clock.count(engine)
    return Replicas(engines)


def an_engine(options=None) -> Engine:
    engine = fake_engine(from_mapping(merge(SIZES, options or {})))
    runner: Any = engine.runner
    runner.owners = Owners()
    runner.num_compiled = runner.num_late_compiles = 0
    runner.reset_state = lambda: None  # its cells are written anew
    return engine


def run(engine: Replicas | Engine, max_steps: int = 5_000) -> list[Update]:
    updates: list[Update] = []
    for _ in range(max_steps):
        if not engine.has_requests:
            return updates
        updates += engine.step()
    raise AssertionError("not done")


def asks(seed: int, number: int = 24) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share prefixes, with and without a seed, of one sample and of three."""
    rng = random.Random(seed)
    stem = [rng.randrange(VOCAB_SIZE) for _ in range(12)]
    found = []
    for i in range(number):
        prompt = stem[: rng.randint(0, 12)] + [rng.randrange(VOCAB_SIZE) for _ in range(4)]
        seed_of_its_own = None if i % 3 else i
        num_samples = 1 if i % 4 else 3
        params = SamplingParams(max_tokens=rng.randint(0, 8), seed=seed_of_its_own, n=num_samples)
        found.append((prompt, params))
    return found


def add_staggered(engine: Replicas | Engine, requests: Sequence[Any], seed: int = 0) -> list[Any]:
    """Each at a random step; to the end."""
    rng, added, todo = random.Random(seed), [], list(requests)
    while todo or engine.has_requests:
        while todo and rng.random() < 0.5:
            added += engine.add(*todo.pop(0))
        engine.step()
    return added


def assert_is_idle(engine: Replicas) -> None:
    assert not engine.has_requests and engine.num_requests == 0
    assert engine.loads == [0] * len(engine.replicas)
    for replica in engine.replicas:
        replica.scheduler.check()
        assert replica.pool.num_owned == 0


def test_replicas_have_the_surface_of_an_engine():
    public = lambda thing: {name for name in dir(thing) if not name.startswith("_")}
    assert public(an_engine()) - public(replicas(2)) == OWN
    assert public(replicas(2)) - public(an_engine()) == {"loads"}


@pytest.mark.matrix(by="number")
@pytest.mark.parametrize("number", [1, 2, 4, 8])
@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"cache": {"num_pages": 14}}])
def test_requests_are_those_of_one_engine_whatever_the_number_of_replicas(number, options):
    alone = an_engine({**options, "overlap": False, "seed": 7})
    expected = add_staggered(alone, asks(number), seed=1)
    engine = replicas(number, {**options, "seed": 7})
    got = add_staggered(engine, asks(number), seed=2)
    assert [(r.id, r.sampling.seed) for r in got] == [(r.id, r.sampling.seed) for r in expected]
    assert [r.output_token_ids for r in got] == [r.output_token_ids for r in expected]
    assert_is_idle(engine)
    if number > 1:
        assert all(replica.stats.num_generated > 0 for replica in engine.replicas[:2])
    assert engine.stats.num_generated == engine.stats.num_generated == alone.stats.num_generated


def test_a_refused_request_takes_no_seed_and_leaves_no_trace():
    engine, other = replicas(2), replicas(2)
    for wrong in ([], [VOCAB_SIZE], ["one"], [1] * 100):
        with pytest.raises(InvalidRequestError):
            engine.add(wrong, SamplingParams())  # type: ignore[list-item]
    with pytest.raises(InvalidRequestError, match="priority"):
        engine.add([1], SamplingParams(), priority=3)
    assert_is_idle(engine)
    assert engine.add([1])[0].sampling.seed == other.add([1])[0].sampling.seed


def test_an_id_in_use_on_any_replica_is_refused():
    engine = replicas(2)
    engine.add([1, 2], GREEDY, request_id="a")
    engine.add([1, 2], dataclasses.replace(GREEDY, n=2), request_id="b")
    for name in ("a", "b", "b#1"):
        with pytest.raises(InvalidRequestError, match=f"{name}' is in use"):
            engine.add([3], GREEDY, request_id=name)
    with pytest.raises(InvalidRequestError, match="a' is in use"):
        engine.add([3], dataclasses.replace(GREEDY, n=2), request_id="a")
    assert engine.num_requests == 3
    assert engine.abort("a")
    [again] = engine.add([3], GREEDY, request_id="a")  # at once, before its end has been told
    run(engine)
    assert again.output_token_ids == expected_output([3], again.max_len, ())
    assert_is_idle(engine)


def test_samples_of_a_prompt_share_a_replica():
    engine = replicas(3)
    engine.add([1] * 10, GREEDY)
    engine.add([2, 3, 4], dataclasses.replace(GREEDY, n=4))
    assert sorted(e.num_requests for e in engine.replicas) == [0, 1, 4]


def test_a_request_follows_its_prefix_until_others_have_less_ahead():
    engine = replicas(2)
    prompt = [1, 2, 3, 4, 0, 1, 2, 3]
    engine.add([4, 4], GREEDY)
    engine.add(prompt, GREEDY)
    run(engine)
    short = SamplingParams(temperature=0, max_tokens=1)
    for expected in (1, 1, 0):  # 1 of 9 tokens to compute there; then 2 more than all 9
        engine.add([*prompt, 1], dataclasses.replace(short, n=1))
        assert [e.num_requests for e in engine.replicas][expected] > 0, expected
    engine.clear_prefix_cache()
    run(engine)
    assert_is_idle(engine)


@pytest.mark.parametrize(("num_samples", "expected"), [(1, 0), (2, 1)])
def test_a_hit_counts_for_each_sample(num_samples, expected):
    engine = replicas(2)
    prompt = [1, 2, 3, 4, 0, 1, 2, 3]
    engine.add([4, 4], GREEDY)
    engine.add(prompt, GREEDY)
    run(engine)
    engine._router.take("another", 1, prompt_len=12, most_output=0)
    engine.add([*prompt, 1], SamplingParams(max_tokens=1, n=num_samples))  # 9 each, or 1 each
    assert engine.replicas[expected].num_requests == num_samples


def test_an_aborted_request_leaves_no_trace():
    engine = replicas(2)
    names = [engine.add([1, 2, 3], GREEDY)[0].id for _ in range(6)]
    engine.step()
    engine.step()
    before = engine.loads
    assert all(load > 0 for load in before)
    assert engine.abort(names[0]) and not engine.abort(names[0]) and not engine.abort("nobody")
    assert engine.loads[0] < before[0] and engine.loads[1] == before[1]
    for name in names[1:]:
        engine.abort(name)
    assert engine.loads == [0, 0] and engine.num_requests == 0
    updates = run(engine)
    assert sorted(u.request.id for u in updates if u.finish_reason == FinishReason.ABORT) == names
    assert_is_idle(engine)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_replica_that_fails_costs_no_other_an_update(failing, error, monkeypatch):
    engine = replicas(3)
    added = [engine.add([i, 1, 2], GREEDY)[0] for i in range(3)]
    updates = engine.step() + engine.step()
    runner = engine.replicas[failing].runner
    dispatch = runner.dispatch

    def fails(plan: Any) -> Any:
        dispatch(plan)
        raise error("lost")

    monkeypatch.setattr(runner, "dispatch", fails)
    with pytest.raises(error, match="lost"):
        for _ in range(10):
            updates += engine.step()
    monkeypatch.setattr(runner, "dispatch", dispatch)
    updates += run(engine)
    for request in added:
        expected = expected_output(request.prompt_token_ids, request.max_len, ())
        told = [i for u in updates if u.request is request for i in u.token_ids]
        assert told == request.output_token_ids == expected
    assert_is_idle(engine)


def test_several_failures_are_told_together(monkeypatch):
    engine = replicas(2)
    for _ in range(2):
        engine.add([1, 2], GREEDY)

    def fails(plan: Any) -> Any:
        raise RuntimeError("lost")

    for replica in engine.replicas:
        monkeypatch.setattr(replica.runner, "dispatch", fails)
    with pytest.raises(ExceptionGroup) as caught:
        engine.step()
    assert len(caught.value.exceptions) == 2


def test_the_smallest_pool_limits_all():
    engines = [an_engine({"cache": {"num_pages": n}}) for n in (40, 4)]
    engine = Replicas(engines)
    limit = MAX_LEN - 4  # more than four pages of two tokens
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match="4 pages of 2"):
            engine.add([1, 2], SamplingParams(max_tokens=limit))
    lengths = {engine.add([1, 2], SamplingParams(max_tokens=None))[0].max_len for _ in range(4)}
    assert lengths == {9}  # wherever they went


def test_figures_are_sums_and_the_last_step_is_the_round():
    engine = replicas(2)
    for i in range(5):
        engine.add([1, 2, 3, i], GREEDY)
    engine.step()
    stats, each = engine.stats, [e.stats for e in engine.replicas]
    assert stats.num_running == sum(s.num_running for s in each) == 5 - stats.num_waiting
    assert stats.num_pages == 80 and stats.num_steps == 2
    assert stats.last_step.num_rows == sum(s.last_step.num_rows for s in each) > 2
    assert stats.last_step.num_tokens == sum(s.last_step.num_tokens for s in each)
    assert len(engine.replicas) == len(each)
    assert engine.replicas[0].replicas == engine.replicas[:1]


@pytest.mark.parametrize(
    ("host_s", "overlap", "expected"),
    [(1.0, True, 10.0), (4.0, True, 16.0), (1.0, False, 11.0)],
)
def test_devices_compute_while_the_host_serves_the_others(host_s, overlap, expected):
    clock = Clock(host_s)
    engine = replicas(4, {"overlap": overlap}, clock)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for _ in range(4):
        engine.add([1, 2], params)
    run(engine)
    assert [e.stats.num_generated for e in engine.replicas] == [20] * 4
    assert clock.now / 20 == pytest.approx(expected, rel=0.15)  # of 4 * 10 one after the other


def test_a_long_step_of_one_replica_holds_up_no_other():
    """While the first computes chunks of 8 tokens, 20 s each, the second's tokens take 1 s."""
    clock = Clock(0.1, lambda num_tokens: 20.0 if num_tokens == 8 else 1.0)
    first, second = replicas(2, clock=clock).replicas
    engine = Replicas([first, second])
    for i in range(4):
        first.add([i] * 20, SamplingParams(temperature=0, max_tokens=1))
    second.add([1], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    while second.has_requests:
        engine.step()
    assert first.has_requests
    assert clock.now < 30  # in rounds of both it would be 20 a token
    run(engine)
    assert clock.now == pytest.approx(10 * 20, rel=0.1)  # and its own devices never waited


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """What a process with four devices found, by mesh; see replicas_child.py."""
    return findings(CHILD, str(tmp_path_factory.mktemp("replicas")))


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [("data 4", [[0], [1], [2], [3]]), ("data 2, tensor 2", [[0, 1], [2, 3]])],
)
def test_a_loaded_model_answers_alike_on_every_mesh(found, mesh, devices):
    alone, here = found["alone"], found[mesh]
    assert here["devices"] == devices
    assert here["tokens"] == alone["tokens"] and here["texts"] == alone["texts"]
    assert all(here["generated"]) and sum(here["generated"]) == sum(alone["generated"])
    assert here["shared"] > 0 and here["owned"] == 0
    assert not any(here["loads"])
