"""Connections between processes, and the thread that monitors them."""

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

from jaxinfer.parallel.hosts.messages import Message, Op, decode_frames, encode_frame

EXIT_LOST = 70  # EX_SOFTWARE of sysexits.h: a supervisor should start all processes again
HEARTBEATS_PER_TIMEOUT = 5
NOTIFY_S = 0.5  # time limit for telling another process of a failure
# A collective that breaks may do so because a process was lost, which the monitor reports later.
FAILURE_REPORT_S = 2.0
CLOSED = "its connection closed (it ended, or was killed)"
READ_BYTES = 2**18


class HostsError(Exception):
    """Processes cannot work together, or no longer can; names them, the reason and the remedy."""


class Link:
    """A connection to one process. Any thread may send; messages are not interleaved."""

    def __init__(self, connection: socket.socket, process_id: int, address: str, timeout_s: float):
        # A plan must not wait until the previous one is acknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(timeout_s)
        self.connection = connection
        self.process_id = process_id
        self.name = f"process {process_id} ({address})"
        self.last_received = time.monotonic()
        self.has_left = False  # it sent BYE
        self.unread: list[Message] = []  # received together with the result of `receive`
        self._send_lock = threading.Lock()
        self._buffer = bytearray()

    def send(self, op: Op, payload: bytes = b"", *, blocking: bool = True) -> None:
        """Send one message; raises `OSError` on failure.

        With `blocking` False the message is dropped if another thread is sending.
        """
        if self._send_lock.acquire(blocking=blocking):
            try:
                self.connection.sendall(encode_frame(op, payload))
            finally:
                self._send_lock.release()

    def read(self) -> list[Message] | None:
        """Return the messages completed by the next read, maybe none; None at the end of stream.

        Raises `OSError`, or `ValueError` for bytes that are no message.
        """
        received = self.connection.recv(READ_BYTES)
        if not received:
            return None
        self.last_received = time.monotonic()
        self._buffer += received
        return decode_frames(self._buffer, self.process_id)

    def receive(self, deadline: float) -> Message:
        """Return one message; used before the monitor starts.

        Raises `OSError` or `ValueError` as `read` does, and `TimeoutError` after the deadline.
        """
        while True:
            self.connection.settimeout(remaining_s(deadline))
            messages = self.read()
            if messages is None:
                raise ConnectionError("it closed the connection")
            if messages:
                self.unread += messages[1:]
                return messages[0]


def remaining_s(deadline: float) -> float:
    """Return the seconds left until `deadline`; raises `TimeoutError` if none are."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left


class LinkMonitor:
    """Reads all links in one thread; puts messages into `inbox` and detects lost processes.

    A process is lost when its connection closes or breaks without BYE, when it sends FAILED, or
    when nothing has arrived from it for `heartbeat_timeout_s`. The monitor then tells the other
    processes and calls `on_lost(text)` once, in the thread that noticed; by default that writes the
    text to stderr and exits with `EXIT_LOST`. If this process itself was suspended, the monitor
    does not count that time as silence of the others.
    """

    def __init__(self, links: Sequence[Link], heartbeat_timeout_s: float):
        self.links = tuple(links)
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.on_lost: Callable[[str], None] = end_process
        self.failure: str | None = None
        self._timeout_s = heartbeat_timeout_s
        self._interval_s = min(1.0, heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT)
        self._last_heartbeat = time.monotonic()
        self._is_closing = False
        self._failure_lock = threading.Lock()
        self._has_failed = threading.Event()
        self._open = set(self.links)
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)

    def start(self) -> None:
        for link in self.links:
            link.connection.settimeout(self._timeout_s)
            link.last_received = time.monotonic()
        self._last_heartbeat = time.monotonic()
        self._thread.start()

    def send(self, op: Op, payload: bytes = b"") -> None:
        """Send a message to all processes; raises `HostsError` if one is lost."""
        for link in self.links:
            try:
                link.send(op, payload)
            except OSError as error:
                self.report_lost(link, _describe_send_error(error))
        self.check()

    def check(self) -> None:
        """Raise `HostsError` if a process is lost."""
        if self.failure is not None:
            raise HostsError(self.failure)

    def wait_for_failure(self) -> None:
        """Wait for a lost process, at most `FAILURE_REPORT_S`.

        Call it after an error that a lost process may have caused.
        """
        self._has_failed.wait(FAILURE_REPORT_S)

    def fail(self, text: str) -> None:
        """End all processes because of an error in this one; `on_lost` receives `text`."""
        self._report_failure(text, None)

    def report_lost(self, link: Link, reason: str) -> None:
        self._report_failure(f"{link.name} is lost: {reason}", link)

    def close(self, op: Op = Op.BYE, payload: bytes = b"", timeout_s: float = 2.0) -> None:
        """Send BYE or FAILED, and wait until the other processes have read it and left too."""
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
        next_heartbeat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for link in self.links:
                selector.register(link.connection, selectors.EVENT_READ, link)
                self._handle(link, link.unread)
            while self._open:
                for key, _ in selector.select(max(0.0, next_heartbeat - time.monotonic())):
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                        self._open.discard(key.data)
                if time.monotonic() >= next_heartbeat:
                    self._send_heartbeats()
                    next_heartbeat = time.monotonic() + self._interval_s

    def _read(self, link: Link) -> bool:
        """Read and handle what has arrived; return whether the link is still open."""
        try:
            messages = link.read()
        except ConnectionResetError:
            messages = None
        except (OSError, ValueError) as error:
            self.report_lost(link, f"what came from it cannot be read ({error})")
            return False
        if messages is None:
            if not link.has_left and not self._is_closing:
                self.report_lost(link, CLOSED)
            return False
        self._handle(link, messages)
        return True

    def _handle(self, link: Link, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.op is Op.FAILED:
                text = message.payload.decode(errors="replace")
                self._report_failure(f"{link.name} ended: {text}", link)
            elif message.op is not Op.HEARTBEAT:
                link.has_left |= message.op is Op.BYE
                self.inbox.put(message)

    def _send_heartbeats(self) -> None:
        if self._is_closing:
            return
        now = time.monotonic()
        stalled_s = now - self._last_heartbeat - self._interval_s
        if stalled_s > self._timeout_s / 2:
            # Messages that arrived meanwhile have not been read yet: restart the clocks.
            logging.warning(
                "this process stood still for %.1f s (was it or its machine suspended?): the "
                "others may have taken it for lost (heartbeat_timeout_s is %g)",
                stalled_s,
                self._timeout_s,
            )
            for link in self._open:
                link.last_received = now
        for link in self._open:
            if link.has_left:
                continue
            if (silence := now - link.last_received) > self._timeout_s:
                limit = f"heartbeat_timeout_s is {self._timeout_s:g}"
                self.report_lost(link, f"nothing has come from it for {silence:.1f} s ({limit})")
                continue
            try:
                link.send(Op.HEARTBEAT, blocking=False)
            except OSError as error:
                self.report_lost(link, _describe_send_error(error))
        self._last_heartbeat = time.monotonic()  # time spent sending does not count as a stall

    def _report_failure(self, text: str, culprit: Link | None) -> None:
        with self._failure_lock:  # a thread that notices later waits here for the process to end
            if self.failure is not None or self._is_closing:
                return
            for link in self.links:
                if link is culprit or link.has_left:
                    continue
                with contextlib.suppress(OSError):
                    link.connection.settimeout(NOTIFY_S)
                    link.send(Op.FAILED, text.encode(), blocking=False)
            self.on_lost(text)
            self.failure = text
            self._has_failed.set()
        # Wake a thread that waits for a message.
        self.inbox.put(Message(Op.FAILED, b"", self.links[0].process_id))


def _describe_send_error(error: OSError) -> str:
    is_closed = isinstance(error, ConnectionError)  # found here before the monitor reads it
    return CLOSED if is_closed else f"nothing can be sent to it ({error})"


def end_process(text: str) -> None:
    """Write a line to stderr and end the process, whatever its threads are blocked in."""
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"jaxinfer: {text}\n".encode())
    exit_now(EXIT_LOST)


def exit_now(code: int) -> NoReturn:
    """Flush stdout and stderr and end the process without any other cleanup."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
