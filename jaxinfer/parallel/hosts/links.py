"""Connections between processes, and the thread that watches them."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import logging

from jaxinfer.parallel.hosts.messages import Message, Op, frame, take_frames

EXIT_LOST = 70  # EX_SOFTWARE of sysexits.h: a supervisor should start all processes again
BEATS = 5  # a process says so often, in the time that would make it a lost one, that it is there
TELL_S = 0.5  # for the others to take the news of a loss
EXPLAIN_S = 2.0  # a collective that breaks has a reason, which the watch is about to tell
CLOSED = "its connection closed (it ended, or was killed)"
READ_BYTES = 2**18


class HostsError(Exception):
    """Processes that cannot work together, or no longer: which, why, and the way out."""


class Link:
    """A connection to a process. Whole messages are sent, from any thread."""

    def __init__(self, connection: socket.socket, process_id: int, address: str, timeout_s: float):
        # A plan must not wait until the one before it is acknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(timeout_s)
        self.connection = connection
        self.process_id = process_id
        self.name = f"process {process_id} ({address})"
        self.heard_at = time.monotonic()
        self.has_left = False  # it said BYE
        self.early: list[Message] = []  # came with the one that `receive` gave
        self._sending = threading.Lock()
        self._buffer = bytearray()

    def send(self, op: Op, payload: bytes = b"", *, waits: bool = True) -> None:
        """Raises `OSError` where it cannot be sent. Without `waits` it is left out while another
        thread sends."""
        if self._sending.acquire(blocking=waits):
            try:
                self.connection.sendall(frame(op, payload))
            finally:
                self._sending.release()

    def read(self) -> list[Message] | None:
        """What has come, maybe no whole message yet; None: the other side has closed. Raises
        `OSError`, or `ValueError` for what is no message."""
        received = self.connection.recv(READ_BYTES)
        if not received:
            return None
        self.heard_at = time.monotonic()
        self._buffer += received
        return take_frames(self._buffer, self.process_id)

    def receive(self, deadline: float) -> Message:
        """One message, before the watch begins; `OSError` or `ValueError` as `read`, `TimeoutError`
        where it is not whole by then."""
        while True:
            self.connection.settimeout(left_until(deadline))
            messages = self.read()
            if messages is None:
                raise ConnectionError("it closed the connection")
            if messages:
                self.early += messages[1:]
                return messages[0]


def left_until(deadline: float) -> float:
    """A timeout in seconds, for a wait of several; `TimeoutError` where nothing is left."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left


class Watch:
    """Reads all links in a thread: messages go to `inbox`, a process that is lost to `on_lost`.

    Lost is one whose connection closes or breaks without BYE, which says FAILED, or from which
    nothing has come for `silence_s`. The others are told first, then `on_lost(text)` is called,
    once, in the thread that noticed; by default it writes the text to stderr and ends the process
    with `EXIT_LOST`. A watch that stood still itself, with its process, blames nobody for it.
    """

    def __init__(self, links: Sequence[Link], silence_s: float):
        self.links = tuple(links)
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.on_lost: Callable[[str], None] = end_process
        self.failure: str | None = None
        self._silence_s = silence_s
        self._interval_s = min(1.0, silence_s / BEATS)
        self._beat_at = time.monotonic()
        self._is_closing = False
        self._losing = threading.Lock()
        self._has_failed = threading.Event()
        self._open = set(self.links)
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)

    def start(self) -> None:
        for link in self.links:
            link.connection.settimeout(self._silence_s)
            link.heard_at = time.monotonic()
        self._beat_at = time.monotonic()
        self._thread.start()

    def send(self, op: Op, payload: bytes = b"") -> None:
        """To all; `HostsError` where one is lost."""
        for link in self.links:
            try:
                link.send(op, payload)
            except OSError as error:
                self.lose(link, _why_unsent(error))
        self.check()

    def check(self) -> None:
        """Raise the `HostsError` of a process that is lost."""
        if self.failure is not None:
            raise HostsError(self.failure)

    def explain(self) -> None:
        """Return when a process is lost, or after `EXPLAIN_S`: for an error that this may be of."""
        self._has_failed.wait(EXPLAIN_S)

    def fail(self, text: str) -> None:
        """End all processes for a reason of this one; as a loss, but `on_lost` gets `text`."""
        self._end(text, None)

    def lose(self, link: Link, how: str) -> None:
        self._end(f"{link.name} is lost: {how}", link)

    def close(self, op: Op = Op.BYE, payload: bytes = b"", timeout_s: float = 2.0) -> None:
        """Say goodbye (or FAILED) and wait until the others have read it and left too."""
        self._is_closing = True
        for link in self.links:
            with contextlib.suppress(OSError):
                link.send(op, payload)
                link.connection.shutdown(socket.SHUT_WR)
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(timeout_s)
        for link in self.links:
            link.connection.close()

    def _run(self) -> None:
        next_beat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for link in self.links:
                selector.register(link.connection, selectors.EVENT_READ, link)
                self._take(link, link.early)
            while self._open:
                for key, _ in selector.select(max(0.0, next_beat - time.monotonic())):
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                        self._open.discard(key.data)
                if time.monotonic() >= next_beat:
                    self._beat()
                    next_beat = time.monotonic() + self._interval_s

    def _read(self, link: Link) -> bool:
        """Take what has come; False: nothing more will."""
        try:
            messages = link.read()
        except ConnectionResetError:
            messages = None
        except (OSError, ValueError) as error:
            self.lose(link, f"what came from it cannot be read ({error})")
            return False
        if messages is None:
            if not link.has_left and not self._is_closing:
                self.lose(link, CLOSED)
            return False
        self._take(link, messages)
        return True

    def _take(self, link: Link, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.op is Op.FAILED:
                text = message.payload.decode(errors="replace")
                self._end(f"{link.name} ended: {text}", link)
            elif message.op is not Op.BEAT:
                link.has_left |= message.op is Op.BYE
                self.inbox.put(message)

    def _beat(self) -> None:
        if self._is_closing:
            return
        now, since = time.monotonic(), self._beat_at
        if (stood_s := now - since - self._interval_s) > self._silence_s / 2:
            # What came meanwhile waits to be read: the clocks begin again.
            logging.warning(
                "this process stood still for %.1f s (was it stopped, or its machine?): the others "
                "may have given it up (silence_s is %g)",
                stood_s,
                self._silence_s,
            )
            for link in self._open:
                link.heard_at = now
        for link in self._open:
            if link.has_left:
                continue
            if (silence := now - link.heard_at) > self._silence_s:
                limit = f"silence_s is {self._silence_s:g}"
                self.lose(link, f"nothing has come from it for {silence:.1f} s ({limit})")
                continue
            try:
                link.send(Op.BEAT, waits=False)
            except OSError as error:
                self.lose(link, _why_unsent(error))
        self._beat_at = time.monotonic()  # a send that took long is no standing still

    def _end(self, text: str, about: Link | None) -> None:
        with self._losing:  # until the process ends: who else notices waits here
            if self.failure is not None or self._is_closing:
                return
            for link in self.links:
                if link is about or link.has_left:
                    continue
                with contextlib.suppress(OSError):
                    link.connection.settimeout(TELL_S)
                    link.send(Op.FAILED, text.encode(), waits=False)
            self.on_lost(text)
            self.failure = text
            self._has_failed.set()
        self.inbox.put(Message(Op.FAILED, b"", self.links[0].process_id))  # for who waits there


def _why_unsent(error: OSError) -> str:
    is_closed = isinstance(error, ConnectionError)  # noticed here before the watch reads it
    return CLOSED if is_closed else f"nothing can be sent to it ({error})"


def end_process(text: str) -> None:
    """Write a line to stderr and end the process, whatever its threads wait for."""
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"jaxinfer: {text}\n".encode())
    leave(EXIT_LOST)


def leave(code: int) -> NoReturn:
    """End the process now, but for what has been printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
