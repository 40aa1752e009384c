"""The runner's view of the other processes: agreement before the start, and announced calls."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from jaxinfer.parallel.hosts.channel import EXIT_LOST, HostsError, LinkMonitor, exit_now
from jaxinfer.parallel.hosts.handshake import Facts, differences
from jaxinfer.parallel.hosts.messages import (
    CALLS,
    Call,
    Message,
    Op,
    pack_call,
    pack_json,
    unpack_call,
    unpack_json,
)


class Peers:
    """The interface, and its implementation for a single process, which does nothing."""

    process_id = 0
    num_processes = 1

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which plans."""
        return self.process_id == 0

    def agree_on_pages(self, facts: Facts, num_pages: int) -> int:
        """Return the smallest `num_pages` of all processes.

        Raises `HostsError`, naming the differences, unless all processes pass the same `facts`.
        """
        return num_pages

    def wait_until_ready(self) -> None:
        """Wait until every process has called this; process 0 takes no request before."""

    def call(
        self, op: Op, number: int, *arrays: np.ndarray
    ) -> contextlib.AbstractContextManager[None]:
        """Announce a program call with these arrays; the body of the context makes it."""
        return contextlib.nullcontext()

    def raise_if_lost(self) -> None:
        """Raise `HostsError` if a process is lost; waits briefly for the news of it.

        Call it after an error that a lost process may have caused.
        """

    def stop(self) -> None:
        """Tell the other processes that the engine of process 0 makes no more calls."""

    def on_lost(self, action: Callable[[str], None]) -> None:
        """Set what happens when a process is lost or fails.

        `action` receives one line of text and runs in another thread. By default the line is
        printed and this process exits with `EXIT_LOST`.
        """

    def close(self) -> None:
        """Leave in good order."""

    def fail(self, error: BaseException) -> None:
        """Leave because of `error`; the other processes end and report it."""

    def abandon(self, error: BaseException, code: int = EXIT_LOST) -> None:
        """Call `fail`, then exit with `code` at once; returns if there are no other processes.

        An orderly exit would block: jax waits for the other processes.
        """


ALONE = Peers()


class _ConnectedPeers(Peers):
    """One of several processes. `monitor` has been started."""

    def __init__(self, monitor: LinkMonitor, process_id: int, num_processes: int, check_steps: int):
        self.monitor = monitor
        self.process_id = process_id
        self.num_processes = num_processes
        self._check_steps = check_steps
        self._has_left = False
        self._hash = hashlib.blake2b(digest_size=16)
        self._num_steps = 0

    def on_lost(self, action: Callable[[str], None]) -> None:
        self.monitor.on_lost = action

    def raise_if_lost(self) -> None:
        self.monitor.wait_for_failure()
        self.monitor.check()

    def close(self) -> None:
        self._has_left = True
        self.monitor.close()

    def fail(self, error: BaseException) -> None:
        self._has_left = True
        text = f"{type(error).__name__}: {error}"
        self.monitor.close(Op.FAILED, text.encode(), timeout_s=0.5)

    def abandon(self, error: BaseException, code: int = EXIT_LOST) -> None:
        self.fail(error)
        exit_now(code)

    def at_exit(self) -> None:
        """Fail if this process ends without `close`, for example by an uncaught error.

        Otherwise jax would wait for the other processes, which wait for a call.
        """
        if not self._has_left:
            error = getattr(sys, "last_value", None) or HostsError("it ended without Peers.close")
            self.abandon(error, 1)

    def _update_hash(self, op: Op, payload: bytes) -> None:
        """Add a call to the hash over all calls."""
        self._hash.update(bytes([op]))
        self._hash.update(payload)
        self._num_steps += op is Op.STEP

    def _next(self) -> Message:
        """Wait for the next message; raises `HostsError` if a process is lost meanwhile."""
        message = self.monitor.inbox.get()
        self.monitor.check()
        return message

    def _expect(self, op: Op) -> Message:
        message = self._next()
        if message.op is Op.BYE:
            raise HostsError(f"process {message.process_id} has left; start all processes again")
        if message.op is Op.STOP:
            raise HostsError("process 0 stopped before all were ready; start all processes again")
        if message.op is not op:
            raise HostsError(
                f"process {message.process_id} is at {message.op.name}, this one at {op.name}: all "
                "have to load the same models, in the same order"
            )
        return message


class Leader(_ConnectedPeers):
    """Process 0."""

    def agree_on_pages(self, facts: Facts, num_pages: int) -> int:
        ours = {**facts, "check_steps": str(self._check_steps)}
        problems, smallest = [], num_pages
        for message in self._collect(Op.AGREE):
            theirs = unpack_json(message.payload)
            name = f"process {message.process_id}"
            problems += differences(ours, theirs["facts"], name)
            smallest = min(smallest, theirs["num_pages"])
        answer = {"problems": problems, "num_pages": smallest}
        self.monitor.send(Op.AGREED, pack_json(answer))
        if problems:
            _raise_disagreement(problems)
        return smallest

    def wait_until_ready(self) -> None:
        self._collect(Op.READY)
        self.monitor.send(Op.GO)

    @contextlib.contextmanager
    def call(self, op: Op, number: int, *arrays: np.ndarray) -> Iterator[None]:
        payload = pack_call(number, arrays)
        with _defer_sigint():
            self._update_hash(op, payload)
            self.monitor.send(op, payload)
            try:
                yield
            except BaseException as error:
                # The others make the call too and then wait for this process, so all must end. If
                # one of them is lost, that is the cause to report.
                self.monitor.wait_for_failure()
                self.monitor.fail(f"process 0 failed in a call that the others make: {error!r}")
                raise
            if op is Op.STEP and self._num_steps % self._check_steps == 0:
                self.monitor.send(Op.CHECK, pack_call(self._num_steps, [_digest(self._hash)]))

    def stop(self) -> None:
        self.monitor.send(Op.STOP)

    def _collect(self, op: Op) -> list[Message]:
        """Return one message from each other process, by process number."""
        messages: dict[int, Message] = {}
        while len(messages) < self.num_processes - 1:
            message = self._expect(op)
            messages[message.process_id] = message
        return [messages[i] for i in sorted(messages)]


class Follower(_ConnectedPeers):
    """Any process but the first."""

    def agree_on_pages(self, facts: Facts, num_pages: int) -> int:
        ours = {**facts, "check_steps": str(self._check_steps)}
        self.monitor.send(Op.AGREE, pack_json({"facts": ours, "num_pages": num_pages}))
        answer = unpack_json(self._expect(Op.AGREED).payload)
        if answer["problems"]:
            _raise_disagreement(answer["problems"])
        return answer["num_pages"]

    def wait_until_ready(self) -> None:
        self.monitor.send(Op.READY)
        self._expect(Op.GO)

    @contextlib.contextmanager
    def call(self, op: Op, number: int, *arrays: np.ndarray) -> Iterator[None]:
        self.monitor.check()
        self._update_hash(op, pack_call(number, arrays))
        yield

    def calls(self) -> Iterator[Call]:
        """Yield the calls of process 0 until it stops.

        The caller makes each one, inside `call`, before it takes the next. Raises `HostsError` if
        the calls made here differ from those of process 0.
        """
        while True:
            message = self._next()
            if message.op in (Op.STOP, Op.BYE):
                return
            if message.op is Op.CHECK:
                self._compare(unpack_call(message))
            elif message.op in CALLS:
                yield unpack_call(message)
            else:
                raise HostsError(f"process 0 is at {message.op.name}: it has started another model")

    def _compare(self, check: Call) -> None:
        ours, theirs = _digest(self._hash), check.arrays[0]
        if check.number != self._num_steps or not np.array_equal(ours, theirs):
            raise HostsError(
                f"process {self.process_id} is out of step with process 0: after step "
                f"{check.number} of process 0 the hash of all calls is "
                f"{theirs.tobytes().hex()[:12]} there and {ours.tobytes().hex()[:12]} here, after "
                f"step {self._num_steps}; it was the same {self._check_steps} steps before. Start "
                "all processes again"
            )


@contextlib.contextmanager
def _defer_sigint() -> Iterator[None]:
    """Defer Ctrl-C to the end of the body: all processes make a call, or none does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *event: deferred.append(event))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if deferred and callable(handler):
        handler(*deferred[0])


def _raise_disagreement(problems: list[str]) -> NoReturn:
    text = "; ".join(problems[:8])
    more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
    raise HostsError(
        f"the processes do not agree: {text}{more}. Start all with the same model and options"
    )


def _digest(running: hashlib.blake2b) -> np.ndarray:
    return np.frombuffer(running.copy().digest(), np.uint8)
