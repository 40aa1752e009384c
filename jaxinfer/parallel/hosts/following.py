"""What every process but the first does: make the calls that process 0 makes."""

from __future__ import annotations

import collections
import os
import signal
import sys
from typing import Any

import jax

from jaxinfer.parallel.hosts.links import HostsError
from jaxinfer.parallel.hosts.messages import Op
from jaxinfer.parallel.hosts.peers import Follower, Peers

UNDER_WAY = 2  # steps: process 0 starts the next one before it reads the last one's tokens


def follow(runner: Any, peers: Peers) -> None:
    """Make the calls of process 0 on a `jaxinfer.execution.runner.Runner`; returns when process 0
    stops.

    `HostsError` where its calls are not those made here. An error of a device ends all processes.
    """
    assert isinstance(peers, Follower), "process 0 leads"
    outputs: collections.deque[Any] = collections.deque()
    try:
        for op, number, arrays in peers.calls():
            if op is Op.STEP:
                if len(outputs) == UNDER_WAY:  # an error of the device comes up here
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
        peers.watch.explain()
        raise HostsError(
            f"process {peers.process_id} failed in a call of process 0: {error}"
        ) from error


def wait_for_process_0(process_id: int) -> None:
    """On SIGTERM and Ctrl-C, which all processes of a job may get, go on until process 0 stops; on
    the second one end at once."""
    seen: list[int] = []

    def on_signal(number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        if seen:
            os._exit(128 + number)
        seen.append(number)
        text = f"jaxinfer: {name}: process {process_id} ends when process 0 does; again to end now"
        print(text, file=sys.stderr, flush=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
