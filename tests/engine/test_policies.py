"""Policies: the order of service, and when a waiting request may join."""

import pytest

from jaxinfer.engine.policies import POLICIES, FirstCome, Policy, Priority, Static
from jaxinfer.engine.request import Rank, Request
from jaxinfer.sampling.params import SamplingParams


def request(arrival: int, priority: int = 0) -> Request:
    return Request(str(arrival), [1], SamplingParams(), max_len=4, rank=Rank(priority, arrival))


@pytest.mark.parametrize("name", POLICIES)
def test_every_registered_policy_does_what_the_scheduler_asks(name):
    policy: Policy = POLICIES[name](2)
    assert policy.may_admit(0) is True
    policy.admitted()
    policy.planned(0)
    keys = [policy.order(request(arrival, priority=arrival % 2)) for arrival in range(6)]
    assert len(set(keys)) == 6, "a tie would make preemption arbitrary"


def test_first_come_ignores_priority():
    order = FirstCome(4).order
    assert sorted([request(2, 0), request(0, 9), request(1, 5)], key=order)[0].rank.arrival == 0


def test_priority_serves_the_smaller_number_then_the_earlier():
    requests = [request(0, 1), request(1, 0), request(2, 0), request(3, -1)]
    assert [r.rank.arrival for r in sorted(requests, key=Priority(4).order)] == [3, 1, 2, 0]


@pytest.mark.parametrize("name", ["first_come", "priority"])
def test_continuous_batching_lets_anyone_join_at_any_time(name):
    policy = POLICIES[name](1)
    for num_running in (0, 1, 5):
        policy.admitted()
        policy.planned(0)
        assert policy.may_admit(num_running)


def test_a_static_batch_closes_when_it_is_full():
    policy = Static(2)
    for num_running in (0, 1):
        assert policy.may_admit(num_running)
        policy.admitted()
        policy.planned(3)
    assert not policy.may_admit(2)
    assert not policy.may_admit(1)  # one has ended; its place stays empty
    assert policy.may_admit(0)


def test_a_static_batch_closes_when_nobody_waits():
    policy = Static(4)
    assert policy.may_admit(0)
    policy.admitted()
    policy.planned(0)
    assert not policy.may_admit(1)
    assert policy.may_admit(0)
