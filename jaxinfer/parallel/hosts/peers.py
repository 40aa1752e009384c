"""The other processes, as the runner sees them: what they agree on, and each call announced."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from jaxinfer.parallel.hosts.joining import Facts, differences
from jaxinfer.parallel.hosts.links import EXIT_LOST, HostsError, Watch, leave
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
    """One process, which needs nobody: what `Leader` and `Follower` do more is in them."""

    process_id = 0
    num_processes = 1

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which plans."""
        return self.process_id == 0

    def agree(self, facts: Facts, num_pages: int) -> int:
        """The smallest `num_pages` of all processes, if all have the same `facts`; `HostsError`
        names those that differ."""
        return num_pages

    def ready(self) -> None:
        """Returns when all are: process 0 takes no request before."""

    def call(
        self, op: Op, number: int, *arrays: np.ndarray
    ) -> contextlib.AbstractContextManager[None]:
        """Around the call of a program with these arrays, which the others are to make too."""
        return contextlib.nullcontext()

    def explain(self) -> None:
        """After an error that may be of a lost process: `HostsError` if it is."""

    def stop(self) -> None:
        """Process 0 has no more calls to its engine."""

    def on_lost(self, action: Callable[[str], None]) -> None:
        """What to do, in a thread of its own, when a process is lost or fails; it gets a line that
        says so. By default that is printed, and this process ends with `EXIT_LOST`."""

    def close(self) -> None:
        """Leave, and all is well."""

    def fail(self, error: BaseException) -> None:
        """Leave because of `error`: the others end, and say so."""

    def abandon(self, error: BaseException, code: int = EXIT_LOST) -> None:
        """`fail`, then end the process with `code`: in an orderly end jax would wait for the
        others. Returns where there are none."""


ALONE = Peers()


class _Joined(Peers):
    """One of several. `watch` has been started."""

    def __init__(self, watch: Watch, process_id: int, num_processes: int, check_steps: int):
        self.watch = watch
        self.process_id = process_id
        self.num_processes = num_processes
        self._check_steps = check_steps
        self._has_left = False
        self._hash = hashlib.blake2b(digest_size=16)
        self._num_steps = 0

    def on_lost(self, action: Callable[[str], None]) -> None:
        self.watch.on_lost = action

    def explain(self) -> None:
        self.watch.explain()
        self.watch.check()

    def close(self) -> None:
        self._has_left = True
        self.watch.close()

    def fail(self, error: BaseException) -> None:
        self._has_left = True
        text = f"{type(error).__name__}: {error}"
        self.watch.close(Op.FAILED, text.encode(), timeout_s=0.5)

    def abandon(self, error: BaseException, code: int = EXIT_LOST) -> None:
        self.fail(error)
        leave(code)

    def at_exit(self) -> None:
        """For a process that ends without `close`, as by an error that nobody caught: jax would
        wait for the others first, and they for a call."""
        if not self._has_left:
            error = getattr(sys, "last_value", None) or HostsError("it ended without Peers.close")
            self.abandon(error, 1)

    def _note(self, op: Op, payload: bytes) -> None:
        """Add a call to the hash over all of them."""
        self._hash.update(bytes([op]))
        self._hash.update(payload)
        self._num_steps += op is Op.STEP

    def _next(self) -> Message:
        """What another process has sent. Waits as long as all are alive."""
        message = self.watch.inbox.get()
        self.watch.check()
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


class Leader(_Joined):
    """Process 0."""

    def agree(self, facts: Facts, num_pages: int) -> int:
        mine = {**facts, "check_steps": str(self._check_steps)}
        problems, least = [], num_pages
        for message in self._one_from_each(Op.AGREE):
            theirs = unpack_json(message.payload)
            name = f"process {message.process_id}"
            problems += differences(mine, theirs["facts"], name)
            least = min(least, theirs["num_pages"])
        answer = {"problems": problems, "num_pages": least}
        self.watch.send(Op.AGREED, pack_json(answer))
        if problems:
            _differ(problems)
        return least

    def ready(self) -> None:
        self._one_from_each(Op.READY)
        self.watch.send(Op.GO)

    @contextlib.contextmanager
    def call(self, op: Op, number: int, *arrays: np.ndarray) -> Iterator[None]:
        payload = pack_call(number, arrays)
        with _uninterrupted():
            self._note(op, payload)
            self.watch.send(op, payload)
            try:
                yield
            except BaseException as error:
                # The others have made the call, or will, and then wait for this process. Where one
                # of them is gone, that is what is said.
                self.watch.explain()
                self.watch.fail(f"process 0 failed in a call that the others make: {error!r}")
                raise
            if op is Op.STEP and self._num_steps % self._check_steps == 0:
                self.watch.send(Op.CHECK, pack_call(self._num_steps, [_digest(self._hash)]))

    def stop(self) -> None:
        self.watch.send(Op.STOP)

    def _one_from_each(self, op: Op) -> list[Message]:
        messages: dict[int, Message] = {}
        while len(messages) < self.num_processes - 1:
            message = self._expect(op)
            messages[message.process_id] = message
        return [messages[i] for i in sorted(messages)]


class Follower(_Joined):
    """Any other process."""

    def agree(self, facts: Facts, num_pages: int) -> int:
        mine = {**facts, "check_steps": str(self._check_steps)}
        self.watch.send(Op.AGREE, pack_json({"facts": mine, "num_pages": num_pages}))
        answer = unpack_json(self._expect(Op.AGREED).payload)
        if answer["problems"]:
            _differ(answer["problems"])
        return answer["num_pages"]

    def ready(self) -> None:
        self.watch.send(Op.READY)
        self._expect(Op.GO)

    @contextlib.contextmanager
    def call(self, op: Op, number: int, *arrays: np.ndarray) -> Iterator[None]:
        self.watch.check()
        self._note(op, pack_call(number, arrays))
        yield

    def calls(self) -> Iterator[Call]:
        """What process 0 calls, until it stops; each is to be made, inside `call`, before the next
        is asked for. `HostsError` where its calls are not the ones made here."""
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
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the end: a call is made by all processes or by none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *event: waiting.append(event))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if waiting and callable(handler):
        handler(*waiting[0])


def _differ(problems: list[str]) -> NoReturn:
    text = "; ".join(problems[:8])
    more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
    raise HostsError(
        f"the processes do not agree: {text}{more}. Start all with the same model and options"
    )


def _digest(running: hashlib.blake2b) -> np.ndarray:
    return np.frombuffer(running.copy().digest(), np.uint8)
