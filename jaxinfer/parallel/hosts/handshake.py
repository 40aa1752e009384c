"""The handshake of the channel: process 0 listens, the others connect and authenticate.

process 0   -> challenge: 32 random bytes
other       -> HMAC(key, "joins" + challenge), and a challenge of its own
process 0   -> HMAC(key, "leads" + challenge); zeros if the other's HMAC was wrong
other       -> HELLO: its number, the number of processes, its versions
process 0   -> START when all have joined, or FAILED with the reason, to every process

The first four messages are one handshake, which may take `HANDSHAKE_S`. Process 0 runs each
handshake in its own thread, so a stranger that sends nothing blocks nobody.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from absl import logging

from jaxinfer.parallel.hosts.channel import NOTIFY_S, HostsError, Link, remaining_s
from jaxinfer.parallel.hosts.messages import Message, Op, pack_json, unpack_json

CHALLENGE_BYTES = 32
HANDSHAKE_S = 5.0  # time limit for a handshake
MAX_HANDSHAKES = 64  # at once; further connections wait for one of them to finish
RETRY_S = 0.1
POLL_S = 0.02
REJECTED = bytes(CHALLENGE_BYTES)  # sent in place of an HMAC
Facts = Mapping[str, str]


class ProcessInfo(NamedTuple):
    """What all processes compare before they start."""

    process_id: int
    num_processes: int
    facts: Facts


class JoinRequest(NamedTuple):
    """An authenticated process and the contents of its HELLO."""

    link: Link
    num_processes: int
    facts: Facts


def listen(host: str, port: int) -> socket.socket:
    """Listen on `host` if it is a loopback address, else on all addresses of this machine.

    The address by which other machines reach this one need not be one of its own (NAT). Port 0
    takes any free port. Raises `HostsError` if the port is in use.
    """
    try:
        if _is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise HostsError(
            f"process 0 cannot listen on port {port} ({error.strerror or error}): is another "
            "process 0 running here? Give all processes another channel_port"
        ) from error


def accept_all(
    listener: socket.socket, num_processes: int, key: bytes, facts: Facts, timeout_s: float
) -> list[Link]:
    """Return the connections of processes 1 to `num_processes` - 1, in this order.

    Raises `HostsError` if the facts of a process differ, or if some are missing after `timeout_s`;
    all processes that have joined receive the reason. Strangers are rejected with a warning.
    """
    links: dict[int, Link] = {}
    deadline = time.monotonic() + timeout_s
    acceptor = _Acceptor(listener, key)
    try:
        while len(links) < num_processes - 1:
            request = acceptor.next(deadline)
            _drop_closed(links)
            if request is None:
                raise _missing(listener, links, num_processes, timeout_s)
            _check(request, num_processes, facts, links)
            links[request.link.process_id] = request.link
    except HostsError as error:
        for link in links.values():
            _refuse(link, str(error))
        grace_end = time.monotonic() + NOTIFY_S
        while (request := acceptor.next(grace_end)) is not None:  # those still in a handshake
            _refuse(request.link, str(error))
        raise
    finally:
        acceptor.close()
    in_order = [links[i] for i in range(1, num_processes)]
    for link in in_order:
        with contextlib.suppress(OSError):  # the monitor will report it
            link.send(Op.START)
    return in_order


def connect(address: tuple[str, int], info: ProcessInfo, *, key: bytes, timeout_s: float) -> Link:
    """Connect to process 0 and return when all processes have joined.

    Raises `HostsError` if process 0 cannot be reached within `timeout_s`, refuses this process, or
    has another key. A handshake that is cut off is tried again.
    """
    process_id = info.process_id
    start = time.monotonic()
    try:
        link = _authenticated_link(address, process_id, key, timeout_s, start + timeout_s)
    except (OSError, ValueError) as error:
        raise HostsError(
            f"process {process_id} reached {address[0]}:{address[1]} but did not get in within "
            f"{time.monotonic() - start:.1f} s ({error}): see what process 0 says; are the "
            "channel's key, this process's number and that of all processes right, and is there "
            "process 0 of this program?"
        ) from error
    try:
        link.send(Op.HELLO, pack_json({**info._asdict(), "facts": dict(info.facts)}))
        # Process 0 waits as long, counted from its own start, and then names the missing ones.
        answer = link.receive(time.monotonic() + timeout_s + NOTIFY_S)
    except (OSError, ValueError) as error:
        link.connection.close()
        raise HostsError(
            f"process {process_id} joined {link.name}, which did not confirm that all processes "
            f"have joined ({error}): did process 0 end? Start all processes again"
        ) from error
    if answer.op is not Op.START:
        link.connection.close()
        raise HostsError(f"{link.name} refused: {answer.payload.decode(errors='replace')}")
    return link


def _authenticated_link(
    address: tuple[str, int], process_id: int, key: bytes, timeout_s: float, deadline: float
) -> Link:
    """Connect to process 0 and check its HMAC.

    Raises `ValueError` for a wrong HMAC, `OSError` if its handshakes were cut off, and `HostsError`
    if nothing answers at the address.
    """
    host, port = address
    while True:
        connection = None
        try:
            left = max(0.01, deadline - time.monotonic())
            connection = socket.create_connection(address, timeout=left)
            link = Link(connection, 0, f"{host}:{port}", HANDSHAKE_S)
            _answer_and_verify(connection, key, min(deadline, time.monotonic() + HANDSHAKE_S))
            connection.settimeout(HANDSHAKE_S)
            return link
        except (OSError, ValueError) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, ValueError):
                raise
            if time.monotonic() + RETRY_S <= deadline:
                time.sleep(RETRY_S)
                continue
            if connection is not None:
                raise
            raise HostsError(
                f"process {process_id} cannot reach process 0 at {host}:{port} after "
                f"{timeout_s:g} s ({error.strerror or error}): is process 0 started, is the "
                f"coordinator's address right, and does a firewall let port {port} and the "
                "coordinator's through?"
            ) from error


def differences(ours: Facts, theirs: Facts, name: str) -> list[str]:
    """Describe each fact that differs, with both values."""
    none = "nothing"
    return [
        f"{fact} is {ours.get(fact, none)} in process 0 and {theirs.get(fact, none)} in {name}"
        for fact in {**ours, **theirs}
        if ours.get(fact) != theirs.get(fact)
    ]


class _Acceptor:
    """Accepts connections to `listener` and runs their handshakes, each in a thread."""

    def __init__(self, listener: socket.socket, key: bytes):
        self._listener = listener
        self._key = key
        self._requests: queue.SimpleQueue[JoinRequest] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: set[socket.socket] = set()  # their handshakes are in progress
        self._is_closed = False

    def next(self, deadline: float) -> JoinRequest | None:
        """Return the next process that finishes its handshake; None after the deadline."""
        while (left := deadline - time.monotonic()) > 0:
            wait_s = min(POLL_S, left)
            is_full = len(self._pending) >= MAX_HANDSHAKES
            with contextlib.suppress(queue.Empty):
                return self._requests.get(is_full, wait_s)
            if is_full:
                continue
            self._listener.settimeout(wait_s)
            try:
                connection, address = self._listener.accept()
            except (TimeoutError, ConnectionError):
                continue
            self._pending.add(connection)
            thread = threading.Thread(
                target=self._handshake,
                args=(connection, _format_address(address)),
                name="handshake",
                daemon=True,
            )
            thread.start()
        return None

    def close(self) -> None:
        """Cut off the handshakes in progress and close the connections that were not taken."""
        with self._lock:
            self._is_closed = True
            for connection in self._pending:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            while not self._requests.empty():
                self._requests.get().link.connection.close()

    def _handshake(self, connection: socket.socket, address: str) -> None:
        request = None
        try:
            deadline = time.monotonic() + HANDSHAKE_S
            link = Link(connection, -1, address, HANDSHAKE_S)
            _challenge_and_answer(connection, self._key, deadline)
            request = _read_hello(link, address, link.receive(deadline))
            connection.settimeout(HANDSHAKE_S)
        except (OSError, ValueError) as error:
            if not self._is_closed:
                logging.warning(
                    "%s connected to the hosts' channel and was rejected: %s", address, error
                )
        with self._lock:
            self._pending.discard(connection)
            if request is None or self._is_closed:
                connection.close()
            else:
                self._requests.put(request)


def _check(
    request: JoinRequest, num_processes: int, facts: Facts, links: Mapping[int, Link]
) -> None:
    """Refuse a process that does not match the others, and raise `HostsError` with the reason."""
    link, total, theirs = request
    number = link.process_id
    problems = differences(facts, theirs, link.name)
    if total != num_processes:
        problems.append(f"num_processes is {num_processes} in process 0 and {total} in {link.name}")
    elif not 1 <= number < num_processes:
        problems.append(
            f"{link.name} says it is process {number}; besides 0 there are 1 to {num_processes - 1}"
        )
    elif number in links:
        problems.append(
            f"process_id {number} was given to two processes, {links[number].name} and "
            f"{link.name}: give each its own, 0 to {num_processes - 1}"
        )
    if problems:
        error = HostsError("; ".join(problems))
        _refuse(link, str(error))
        raise error


def _drop_closed(links: dict[int, Link]) -> None:
    """Drop processes that ended while the rest is awaited; they may join again."""
    for number, link in list(links.items()):
        link.connection.settimeout(0.0)
        try:
            has_closed = not link.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            has_closed = False
        except OSError:
            has_closed = True
        link.connection.settimeout(HANDSHAKE_S)
        if has_closed:
            logging.warning("%s joined and then ended; waiting for it to join again", link.name)
            links.pop(number).connection.close()


def _read_hello(link: Link, address: str, message: Message) -> JoinRequest:
    if message.op is not Op.HELLO:
        raise ValueError(f"it sent {message.op.name} where HELLO was expected")
    value = unpack_json(message.payload)
    if not isinstance(value, dict):
        raise ValueError("its HELLO is not a JSON object")
    number, total, facts = (value.get(k) for k in ProcessInfo._fields)
    # Not isinstance: True is an int too.
    if type(number) is not int or type(total) is not int or not isinstance(facts, dict):
        raise ValueError("its HELLO lacks process_id, num_processes or facts")
    if not all(isinstance(fact, str) for fact in facts.values()):
        raise ValueError("its HELLO has facts that are not strings")
    link.process_id, link.name = number, f"process {number} ({address})"
    return JoinRequest(link, total, facts)


def _refuse(link: Link, text: str) -> None:
    with contextlib.suppress(OSError):
        link.send(Op.FAILED, text.encode())
    link.connection.close()


def _missing(
    listener: socket.socket, links: Mapping[int, Link], num_processes: int, timeout_s: float
) -> HostsError:
    absent = [str(i) for i in range(1, num_processes) if i not in links]
    port = listener.getsockname()[1]
    return HostsError(
        f"of {num_processes} processes, {', '.join(absent)} did not join process 0 within "
        f"{timeout_s:g} s: start them with the same coordinator and number of processes, and see "
        f"that they reach port {port} of this machine"
    )


def _challenge_and_answer(connection: socket.socket, key: bytes, deadline: float) -> None:
    """Authenticate the other side, then this one; the part of process 0."""
    challenge = os.urandom(CHALLENGE_BYTES)
    connection.sendall(challenge)
    answer = _receive_exactly(connection, 2 * CHALLENGE_BYTES, deadline)
    is_right = hmac.compare_digest(answer[:CHALLENGE_BYTES], _hmac(key, b"joins", challenge))
    connection.sendall(_hmac(key, b"leads", answer[CHALLENGE_BYTES:]) if is_right else REJECTED)
    if not is_right:
        raise ValueError("it has another channel key, or does not run this program")


def _answer_and_verify(connection: socket.socket, key: bytes, deadline: float) -> None:
    """Authenticate this side, then process 0; the part of the other processes."""
    theirs, ours = (
        _receive_exactly(connection, CHALLENGE_BYTES, deadline),
        os.urandom(CHALLENGE_BYTES),
    )
    connection.sendall(_hmac(key, b"joins", theirs) + ours)
    answer = _receive_exactly(connection, CHALLENGE_BYTES, deadline)
    if not hmac.compare_digest(answer, _hmac(key, b"leads", ours)):
        raise ValueError("it has another channel key, or does not run this program")


def _hmac(key: bytes, role: bytes, challenge: bytes) -> bytes:
    return hmac.digest(b"jaxinfer hosts" + key, role + challenge, hashlib.sha256)


def _receive_exactly(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < num_bytes:
        connection.settimeout(remaining_s(deadline))
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise ConnectionError("it closed the connection")
        received += part
    return received


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _format_address(address: tuple) -> str:
    host, port = address[:2]
    host = host.removeprefix("::ffff:")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
