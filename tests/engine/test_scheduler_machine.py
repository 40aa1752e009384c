"""Requests arrive, run, finish and are aborted in any order; the invariants always hold.

The engine, the scheduler, the page pool and the packed batch are the real ones; the device is fake
(`fake_device.py`) and checks on every read that a row sees its own prefix and nothing else.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxinfer.config import from_mapping
from jaxinfer.engine.admission import InvalidRequestError
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import Update
from jaxinfer.engine.request import FinishReason, Request
from jaxinfer.sampling.params import SamplingParams
from tests.support.fake_device import (
    MAX_LEN,
    VOCAB_SIZE,
    expected_output,
    fake_engine,
    fake_logprob,
)

SETTINGS = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

CONFIGS = st.fixed_dictionaries(
    {
        "cache": st.fixed_dictionaries(
            {
                "page_size": st.sampled_from([1, 2, 4, 16]),
                "num_pages": st.integers(1, 14),
                "prefix_cache": st.sampled_from([True, True, True, False]),
            }
        ),
        "scheduler": st.fixed_dictionaries(
            {
                "policy": st.sampled_from(["first_come", "priority", "static"]),
                "max_num_batched_tokens": st.integers(1, 20),
                "max_num_seqs": st.integers(1, 6),
            }
        ),
        "overlap": st.booleans(),
        "bucket_growth": st.integers(2, 4),
    }
)

# Prompts that share prefixes: a few stems, cut anywhere, sometimes with an ending of their own.
STEMS = [[1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3], [1, 2, 3, 4, 1, 1, 1, 1, 1]]
PROMPTS = st.builds(
    lambda stem, cut, ending: (stem[:cut] + ending)[: MAX_LEN - 2] or [1],
    st.sampled_from(STEMS),
    st.integers(0, 18),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3),
)


class Asked(NamedTuple):
    """A request in flight, and the salt it came with."""

    request: Request
    stops: tuple[int, ...]


class Run:
    """An engine under test, with what every request in it must come to."""

    def __init__(self, config):
        self.engine: Engine = fake_engine(from_mapping(config))
        self.live: dict[str, Asked] = {}
        self.num_requests = 0
        self.num_tokens_asked = 0
        self.num_aborted_in_flight = 0  # with a sampled token still to be read
        self.num_aborted_preempted = 0

    @property
    def capacity(self) -> int:
        pool = self.engine.pool
        return pool.num_pages * pool.page_size + 1

    def add(self, prompt, params: SamplingParams, *, priority=0, salt="") -> None:
        name = f"r{self.num_requests}"
        self.num_requests += 1
        private = params.prompt_logprobs is not None
        if self.engine.config.scheduler.policy != "priority":
            priority = 0  # another is refused
        self.engine.runner.owners[name] = name if private else f"salt {salt}"  # type: ignore
        try:
            (request,) = self.engine.add(
                prompt, params, request_id=name, priority=priority, cache_salt=salt
            )
        except InvalidRequestError:
            least = 1 if params.max_tokens is None else params.max_tokens
            assert min(len(prompt) + least, MAX_LEN) > self.capacity
            return
        assert request.max_len <= min(self.capacity, MAX_LEN)
        self.num_tokens_asked += request.max_len
        self.live[name] = Asked(request, tuple(params.stop_token_ids))

    def step(self) -> None:
        for update in self.engine.step():
            self._take(update)

    def abort(self, name: str) -> None:
        if self.live[name].request.is_finished:  # nothing to compute: only its report is due
            assert not self.engine.abort(name)
            return
        asked = self.live.pop(name)
        self.num_aborted_in_flight += asked.request.pending_len > 0
        self.num_aborted_preempted += (
            asked.request.prefix.hit_len is not None and asked.request.slot is None
        )
        assert self.engine.abort(name) and not self.engine.abort(name)
        assert asked.request.finish_reason is FinishReason.ABORT
        output = asked.request.output_token_ids
        expected = expected_output(asked.request.prompt_token_ids, MAX_LEN, asked.stops)
        assert output == expected[: len(output)]

    def finish(self) -> None:
        """Everything ends, in a number of steps that the work bounds; nothing is left behind."""
        bound = 4 * self.num_tokens_asked + 50
        for _ in range(bound):
            if not self.engine.has_requests:
                break
            self.step()
            self.check()
        assert not self.live, f"{list(self.live)} not done after {bound} steps"
        assert not self.engine.has_requests and not self.engine.scheduler.has_requests
        pool = self.engine.pool
        assert pool.num_owned == 0 and pool.num_free + pool.num_cached == pool.num_pages

    def check(self) -> None:
        self.engine.scheduler.check()
        pool = self.engine.pool
        assert pool.num_free + pool.num_cached + pool.num_owned == pool.num_pages
        assert len(self.engine.scheduler.running) <= self.engine.runner.num_slots

    def _take(self, update: Update) -> None:
        request = update.request
        if request.finish_reason is FinishReason.ABORT:
            assert request.id not in self.live
            return
        assert request.id in self.live, "an update of a request that has ended"
        if update.finish_reason is None:
            assert len(update.token_ids) == 1
            return
        asked = self.live.pop(request.id)
        prompt = request.prompt_token_ids
        expected = expected_output(prompt, request.max_len, asked.stops)
        assert request.output_token_ids == expected
        stopped = bool(expected) and expected[-1] in asked.stops
        assert request.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        if request.params.prompt_logprobs is not None:
            found = {at: entry.logprob for at, entry in request.logprobs.prompt.items()}
            every = range(1, len(prompt))
            assert found == {at: fake_logprob(prompt[:at], prompt[at]) for at in every}


ASKS = st.builds(
    lambda max_tokens, stops, prompt_logprobs: SamplingParams(
        max_tokens=max_tokens,
        stop_token_ids=stops,
        prompt_logprobs=prompt_logprobs,
        temperature=0,
    ),
    st.none() | st.integers(0, 8),
    st.sampled_from([(), (), (0,), (3, 4)]),
    st.sampled_from([None, None, None, 0]),
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(config=CONFIGS)
    def start(self, config):
        self.run = Run(config)

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=3),
        params=ASKS,
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "other"]),
    )
    def add(self, prompts, params, priority, salt):
        for prompt in prompts:
            self.run.add(prompt, params, priority=priority, salt=salt)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.run.step()
            self.run.check()

    @rule(index=st.integers(0, 20))
    def abort(self, index):
        if names := sorted(self.run.live):
            self.run.abort(names[index % len(names)])

    @invariant()
    def laws_hold(self):
        if hasattr(self, "run"):
            self.run.check()

    def teardown(self):
        if hasattr(self, "run"):
            self.run.finish()


EngineMachine.TestCase.settings = SETTINGS
TestEngineMachine = EngineMachine.TestCase


def _random_run(seed: int) -> Run:
    """One random life of an engine, to the end."""
    rng = random.Random(seed)
    run = Run(
        {
            "cache": {
                "page_size": rng.choice([1, 2, 4, 16]),
                "num_pages": rng.randint(1, 14),
                "prefix_cache": rng.random() < 0.8,
            },
            "scheduler": {
                "policy": rng.choice(["first_come", "priority", "static"]),
                "max_num_batched_tokens": rng.randint(1, 20),
                "max_num_seqs": rng.randint(1, 6),
            },
            "overlap": rng.random() < 0.7,
        }
    )
    for _ in range(rng.randint(5, 80)):
        move = rng.random()
        if move < 0.25:
            for _ in range(rng.randint(1, 3)):
                _random_add(run, rng)
        elif move < 0.32 and run.live:
            run.abort(rng.choice(sorted(run.live)))
        else:
            run.step()
            run.check()
    run.finish()
    return run


def _random_add(run: Run, rng: random.Random) -> None:
    prompt = rng.choice(STEMS)[: rng.randint(0, 18)]
    prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 3))]
    params = SamplingParams(
        max_tokens=rng.choice([None, 0, 1, 2, 3, 5, 8]),
        stop_token_ids=rng.choice([(), (), (0,), (3, 4)]),
        prompt_logprobs=rng.choice([None, None, None, 0]),
        temperature=0,
    )
    salt = rng.choice(["", "", "other"])
    run.add(prompt[: MAX_LEN - 2] or [1], params, priority=rng.randint(0, 2), salt=salt)


def test_random_lives_keep_the_laws_and_meet_every_hardship():
    runs = [_random_run(seed) for seed in range(300)]
    schedulers = [run.engine.scheduler for run in runs]
    assert sum(scheduler.num_preemptions for scheduler in schedulers) > 50
    assert sum(scheduler.num_shared_tokens for scheduler in schedulers) > 500
    assert sum(run.num_aborted_in_flight for run in runs) > 20
    assert sum(run.num_aborted_preempted for run in runs) > 0


@pytest.mark.matrix
@pytest.mark.parametrize("policy", ["first_come", "priority", "static"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [2, 3, 7, 20])
def test_outputs_hold_when_requests_push_each_other_out(policy, overlap, budget):
    # Seven pages for six requests of up to six pages each.
    run = Run(
        {
            "cache": {"page_size": 2, "num_pages": 7},
            "scheduler": {"policy": policy, "max_num_batched_tokens": budget, "max_num_seqs": 6},
            "overlap": overlap,
        }
    )
    for i in range(6):
        params = SamplingParams(max_tokens=8, temperature=0)
        run.add([i % VOCAB_SIZE, 1, 2, 3], params, priority=5 - i)
    run.finish()
    assert run.engine.scheduler.num_preemptions > 0


@pytest.mark.matrix
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 2])
@pytest.mark.parametrize("budget", [1, 3, 4, 20])
def test_short_outputs_and_prompt_logprobs_survive_chunking(overlap, max_tokens, budget):
    run = Run(
        {
            "cache": {"page_size": 4, "num_pages": 14},
            "scheduler": {"max_num_batched_tokens": budget, "max_num_seqs": 3},
            "overlap": overlap,
        }
    )
    for prompt_logprobs in (None, 0, None):  # `Run` compares tokens and log-probabilities
        params = SamplingParams(
            max_tokens=max_tokens, prompt_logprobs=prompt_logprobs, temperature=0
        )
        run.add(STEMS[0][:13], params)
    run.finish()


@pytest.mark.matrix
@pytest.mark.parametrize("prompt_len", range(2, 14))
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_a_cached_prompt_without_output_costs_one_token(prompt_len, page_size):
    run = Run(
        {
            "cache": {"page_size": page_size, "num_pages": 64},
            "scheduler": {"max_num_batched_tokens": 20, "max_num_seqs": 3},
        }
    )
    run.add(STEMS[0][:14], SamplingParams(max_tokens=1, temperature=0))
    run.finish()
    run.add(STEMS[0][:2], SamplingParams(max_tokens=8, temperature=0))
    run.step()
    run.add(STEMS[0][:prompt_len], SamplingParams(max_tokens=0, temperature=0))
    run.finish()
    cached = min(prompt_len // page_size * page_size, prompt_len - 2)
    assert run.engine.scheduler.num_shared_tokens >= cached
