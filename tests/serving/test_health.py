"""Health: the states of the server, and what probes read from them."""

from __future__ import annotations

import pytest

from jaxinfer.serving.health import Health, State


@pytest.mark.parametrize(
    ("state", "is_live", "is_ready"),
    [
        (State.STARTING, True, False),
        (State.SERVING, True, True),
        (State.DRAINING, True, False),
        (State.DEAD, False, False),
    ],
)
def test_only_serving_is_ready_and_only_dead_is_not_live(state, is_live, is_ready):
    health = Health()
    health.set(state)
    assert (health.state, health.is_live, health.is_ready) == (state, is_live, is_ready)


def test_subscribers_are_called_once_a_change():
    health, heard = Health(), []
    health.subscribe(heard.append)
    for state in (State.STARTING, State.SERVING, State.SERVING, State.DRAINING, State.DEAD):
        health.set(state)
    assert heard == [State.SERVING, State.DRAINING, State.DEAD]


def test_health_state_never_moves_back():
    health, heard = Health(), []
    health.subscribe(heard.append)
    health.set(State.DRAINING)  # told to stop while it loaded
    health.set(State.SERVING)  # the load is done
    assert health.state is State.DRAINING and not health.is_ready
    health.set(State.DEAD)
    health.set(State.DRAINING)
    assert not health.is_live and heard == [State.DRAINING, State.DEAD]


def test_failing_subscriber_does_not_affect_the_others():
    health, heard = Health(), []

    def fail(state):
        raise RuntimeError("no news for me")

    health.subscribe(fail)
    health.subscribe(heard.append)
    health.set(State.SERVING)
    assert health.is_ready and heard == [State.SERVING]
