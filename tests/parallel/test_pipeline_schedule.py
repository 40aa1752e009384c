"""The schedule of micro-batches that enter a pipeline of S stages."""

from __future__ import annotations

import random
from collections import deque

import pytest

from jaxinfer.engine.request import FinishReason
from jaxinfer.engine.scheduler import Plan
from tests.support.scheduler_bench import Bench


class Pipeline(Bench):
    """A scheduler harness in which a plan is sampled S - 1 ticks after it enters."""

    def __init__(self, num_stages: int, **options):
        super().__init__(num_stages=num_stages, **options)
        self.in_flight: deque[Plan] = deque()

    def tick(self) -> Plan:
        plan = self.plan()
        self.check(plan)
        self.in_flight.append(plan)
        if len(self.in_flight) == self.scheduler.num_stages:
            self.commit(self.in_flight.popleft())
        return plan

    def check(self, plan: Plan) -> None:
        """Check that no row depends on a row in flight that is not sampled yet."""
        owners = {}
        for other in [*self.in_flight, plan]:
            for row in other.rows:
                owner = owners.setdefault(row.slot, row.request)
                assert owner is row.request, "a plan in flight writes to the slot"
        unsampled = [row for other in self.in_flight for row in other.rows if row.is_sampled]
        for row in plan.rows:
            for before in unsampled:
                assert before.request is not row.request, "its token is not sampled yet"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_decodes_are_spread_evenly_over_the_stages(num_stages):
    bench = Pipeline(num_stages, budget=256, rows=12)
    for _ in range(12):
        bench.add(4, max_tokens=60)
    for _ in range(4 * num_stages):
        bench.tick()
    sizes = [len(bench.tick().rows) for _ in range(6 * num_stages)]
    assert set(sizes) == {12 // num_stages}


def test_chunks_of_a_prompt_enter_at_consecutive_ticks():
    bench = Pipeline(4, budget=8, rows=2)
    bench.add(8 * 16, max_tokens=1)
    plans = [bench.tick() for _ in range(16)]
    assert [plan.num_tokens for plan in plans] == [8] * 16
    assert not bench.tick().rows  # the request waits for its token


def test_slot_is_reused_only_after_plans_in_flight_have_written_to_it():
    bench = Pipeline(4, rows=1)
    first = bench.add(4, max_tokens=8)
    bench.tick()
    bench.scheduler.finish(first, FinishReason.ABORT)
    second = bench.add(4)
    admitted = [bool(bench.tick().admitted) for _ in range(5)]
    assert True in admitted and admitted.index(True) >= 2
    assert second.slot == 0


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_schedule_is_valid_for_random_arrivals_and_aborts(num_stages, seed):
    """Run random arrivals and aborts with too few pages, and check every plan."""
    rng = random.Random(seed)
    bench = Pipeline(num_stages, num_pages=24, budget=12, rows=6)
    live = []
    for _ in range(150):
        if rng.random() < 0.3:
            live.append(bench.add(rng.randint(1, 40), max_tokens=rng.randint(1, 16)))
        live = [request for request in live if not request.is_finished]
        if live and rng.random() < 0.05:
            bench.scheduler.finish(rng.choice(live), FinishReason.ABORT)
        bench.tick()
    for _ in range(2000):
        if not bench.scheduler.has_requests:
            break
        bench.tick()
    assert not bench.scheduler.has_requests
    assert all(request.is_finished for request in live)
    assert bench.scheduler.num_preemptions > 0
