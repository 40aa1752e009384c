"""Routing of requests to replicas, by integer arithmetic alone."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.parallel.routing import FIRST_GUESS, GENERATED_COST, RECENT, Router

REPLICAS = 8


class NewRequest(NamedTuple):
    """A request: prompt length, maximal output, and the prompt tokens that each replica caches."""

    prompt_len: int
    most_output: int = 0
    cached: tuple[int, ...] = (0,) * REPLICAS


NEW_REQUESTS = st.builds(
    NewRequest,
    st.integers(1, 5_000),
    st.integers(0, 2_000),
    st.lists(st.integers(0, 5_000), min_size=REPLICAS, max_size=REPLICAS).map(tuple),
)


def route(router: Router, request: Any, new: NewRequest, done: list[int] | None = None) -> int:
    """Route a request; return the chosen replica."""
    prompt_lens = [max(new.prompt_len - cached, 1) for cached in new.cached]
    replica = router.choose(prompt_lens, done or [0] * REPLICAS)
    router.take(request, replica, prompt_len=prompt_lens[replica], most_output=new.most_output)
    return replica


def loads(router: Router) -> list[int]:
    return router.loads([0] * REPLICAS)


def test_request_goes_to_the_replica_with_the_fewest_tokens_ahead():
    router = Router(REPLICAS)
    assert [route(router, i, NewRequest(100 - i)) for i in range(REPLICAS)] == list(range(REPLICAS))
    assert route(router, "a", NewRequest(10)) == 7  # the replica with the shortest request
    assert route(router, "b", NewRequest(10)) == 6
    assert loads(router) == [100, 99, 98, 97, 96, 95, 104, 103]


def test_cached_tokens_reduce_the_load_of_a_request():
    router = Router(REPLICAS)
    hit = (0, 0, 64) + (0,) * 5
    assert route(router, 0, NewRequest(100, cached=hit)) == 2
    assert loads(router)[2] == 36
    assert route(router, 1, NewRequest(100, cached=hit)) == 2  # 36 + 36, and 100 elsewhere
    assert route(router, 2, NewRequest(100, cached=hit)) == 0  # 72 + 36
    assert route(router, 3, NewRequest(64, cached=hit)) == 1  # one token is always computed: 72 + 1


def test_ties_go_to_the_fewest_requests_and_then_to_the_first_replica():
    router = Router(REPLICAS)
    for request in range(REPLICAS):
        route(router, request, NewRequest(10))
    router.end(3)
    router.end(5)
    router.take("a", 3, prompt_len=4, most_output=0)
    router.take("b", 3, prompt_len=6, most_output=0)
    router.take("c", 5, prompt_len=10, most_output=0)
    assert route(router, "d", NewRequest(1)) == 0
    for replica, request in ((0, "e"), (1, "f"), (2, "g"), (4, "h")):
        router.take(request, replica, prompt_len=5, most_output=0)
    router.end(6)
    router.end(7)
    router.take("i", 6, prompt_len=5, most_output=0)
    router.take("j", 6, prompt_len=5, most_output=0)
    router.take("k", 7, prompt_len=10, most_output=0)
    assert loads(router) == [16, 15, 15, 10, 15, 10, 10, 10]
    assert route(router, "l", NewRequest(1)) == 5  # of 3, 5, 6 and 7: the first with one request


def test_progress_of_running_requests_reduces_the_load():
    router = Router(REPLICAS)
    router.take("a", 0, prompt_len=100, most_output=10)
    cost = 100 + 10 * GENERATED_COST
    assert loads(router)[0] == cost
    left = lambda *progress: router.loads([router.done("a", *progress), *[0] * 7])[0]
    assert left(100, 0) == cost
    assert left(40, 0) == cost - 60
    assert left(1, 4) == 1 + 6 * GENERATED_COST
    assert left(1, 10) == left(1, 50) == 1 + GENERATED_COST  # at least one more
    assert left(150, 0) == cost + 50  # its pages were not found after all
    assert router.done("nobody's", 5, 5) == 0


def test_expected_output_length_follows_recent_requests():
    router = Router(1)
    assert router.expected_output(10) == 10
    assert router.expected_output(10**6) == FIRST_GUESS
    for i in range(4 * RECENT):
        router.take(i, 0, prompt_len=1, most_output=1000)
        router.end(i, 40)
    assert 40 <= router.expected_output(10**6) <= 42
    for i in range(4 * RECENT):
        router.take(i, 0, prompt_len=1, most_output=1000)
        router.end(i, 400)
    assert 390 <= router.expected_output(10**6) <= 400
    router.take("given up", 0, prompt_len=1, most_output=1000)
    router.end("given up")
    assert router.expected_output(10**6) >= 390


@given(st.lists(NEW_REQUESTS, max_size=60))
@settings(max_examples=100, deadline=None)
def test_replica_exceeds_the_mean_load_by_at_most_one_request(arrivals):
    router = Router(REPLICAS)
    for request, new in enumerate(arrivals):
        route(router, request, new)
    greatest = max(
        (a.prompt_len + GENERATED_COST * min(a.most_output, FIRST_GUESS) for a in arrivals),
        default=0,
    )
    assert max(loads(router)) <= sum(loads(router)) / REPLICAS + greatest


@given(st.lists(NEW_REQUESTS, max_size=40), st.data())
@settings(max_examples=100, deadline=None)
def test_finished_requests_leave_no_load(arrivals, data):
    router = Router(REPLICAS)
    placed = {request: route(router, request, new) for request, new in enumerate(arrivals)}
    assert all(router.replica_of(request) == replica for request, replica in placed.items())
    for request in data.draw(st.permutations(list(placed))):
        before = loads(router)
        router.end(request, data.draw(st.one_of(st.none(), st.integers(0, 2_000))))
        assert router.replica_of(request) is None
        changed = [i for i in range(REPLICAS) if loads(router)[i] != before[i]]
        assert changed in ([], [placed[request]])
    assert loads(router) == [0] * REPLICAS
    assert route(router, "the next", NewRequest(1)) == 0


def length(rng: random.Random, middle: float, spread: float) -> int:
    """Draw a length from 1 to 2,000, of which few are long."""
    return min(2_000, max(1, int(rng.lognormvariate(middle, spread))))


@pytest.mark.parametrize("seed", range(4))
def test_uneven_prompts_are_spread_evenly(seed):
    rng = random.Random(seed)
    arrivals = [NewRequest(length(rng, 4, 1.5), 8) for _ in range(1_000)]
    router, round_robin = Router(REPLICAS), [0] * REPLICAS
    for request, new in enumerate(arrivals):
        route(router, request, new)
        round_robin[request % REPLICAS] += new.prompt_len + 8 * GENERATED_COST
    mean = sum(round_robin) / REPLICAS
    assert max(loads(router)) < 1.07 * mean < max(round_robin)


class Running:
    """A request in the simulation below."""

    def __init__(self, arrival: int, prompt_len: int, output_len: int):
        self.arrival = arrival
        self.num_remaining = prompt_len
        self.output_len = output_len  # unknown to the router
        self.num_output = 0


def simulate(seed: int, *, round_robin: bool, num_steps: int = 1_000) -> list[int]:
    """Return the steps from arrival to end of each finished request.

    Replicas process 64 rows and 64 tokens per step; the traffic is close to their capacity.
    """
    rng = random.Random(seed)
    router = Router(REPLICAS)
    replicas: list[list[Running]] = [[] for _ in range(REPLICAS)]
    steps, num_added = [], 0
    for now in range(num_steps):
        while rng.random() < 0.69:
            request = Running(now, length(rng, 4, 1.5), length(rng, 3.5, 1.3))
            progress = [
                sum(router.done(r, r.num_remaining, r.num_output) for r in replica[:64])
                for replica in replicas
            ]
            chosen = router.choose([request.num_remaining] * REPLICAS, progress)
            if round_robin:
                chosen = num_added % REPLICAS
            router.take(request, chosen, prompt_len=request.num_remaining, most_output=2_000)
            replicas[chosen].append(request)
            num_added += 1
        for replica in replicas:
            for request in one_step(replica):
                replica.remove(request)
                router.end(request, request.num_output)
                steps.append(now - request.arrival)
    return steps


def one_step(replica: list[Running]) -> list[Running]:
    """Run decodes, then prompts within the token budget; return the finished requests."""
    budget = 64
    for request in replica[:64]:
        if not request.num_remaining and budget:
            request.num_output += 1
            budget -= 1
    for request in replica[:64]:
        taken = min(budget, request.num_remaining)
        budget -= taken
        request.num_remaining -= taken
        request.num_output += taken > 0 and not request.num_remaining
    return [r for r in replica[:64] if r.num_output >= r.output_len]


def test_routed_requests_take_fewer_steps_than_round_robin():
    """The measured ratios are 0.82 to 0.89, and 0.845 on average."""
    mean = lambda values: sum(values) / len(values)
    ratios = []
    for seed in range(8):
        routed, round_robin = simulate(seed, round_robin=False), simulate(seed, round_robin=True)
        assert len(routed) >= len(round_robin) > 1_000
        ratios.append(mean(routed) / mean(round_robin))
    assert max(ratios) < 0.9 and mean(ratios) < 0.85, ratios
    assert ratios[0] < 0.85
