"""The main loop of every process but the first: repeat the program calls of process 0."""

from __future__ import annotations

import collections
import os
import signal
import sys
from typing import Any

import jax

from jaxinfer.parallel.hosts.channel import HostsError
from jaxinfer.parallel.hosts.messages import Op
from jaxinfer.parallel.hosts.peers import Follower, Peers

# Process 0 starts a step before it reads the tokens of the previous one.
MAX_STEPS_IN_FLIGHT = 2


def follow(runner: Any, peers: Peers) -> None:
    """Repeat the calls of process 0 on a `jaxinfer.execution.runner.Runner` until it stops.

    Raises `HostsError` if the calls of the two processes differ, or if a call fails here.
    """
    assert isinstance(peers, Follower), "process 0 does not follow"
    outputs: collections.deque[Any] = collections.deque()
    try:
        for op, number, arrays in peers.calls():
            if op is Op.STEP:
                if len(outputs) == MAX_STEPS_IN_FLIGHT:  # raises the errors of the device
                    jax.block_until_ready(outputs.popleft())
                outputs.append(runner.run_step(number, *arrays))
            elif op is Op.ADMIT:
                runner.run_admit(*arrays)
            elif op is Op.EXTRAS:
                runner.run_extras(number, *arrays)
            else:
                runner.reset_state()
    except HostsError:
        raise
    except Exception as error:
        peers.monitor.wait_for_failure()
        raise HostsError(
            f"process {peers.process_id} failed in a call of process 0: {error}"
        ) from error


def wait_for_process_0(process_id: int) -> None:
    """Let this process outlive the first SIGTERM or SIGINT until process 0 stops.

    A job's launcher may signal all processes at once. The second signal ends this one immediately.
    """
    received: list[int] = []

    def on_signal(number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        if received:
            os._exit(128 + number)
        received.append(number)
        text = f"jaxinfer: {name}: process {process_id} ends when process 0 does; again to end now"
        print(text, file=sys.stderr, flush=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
