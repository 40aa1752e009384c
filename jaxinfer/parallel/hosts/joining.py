"""How the processes meet: process 0 listens, the others knock until it opens.

process 0   -> 32 random bytes
other       -> HMAC(key, "joins" + those), 32 random bytes of its own
process 0   -> HMAC(key, "leads" + those); zeros where the other's was wrong
other       -> HELLO: its number, how many there are to be, its versions
process 0   -> START when all are there, or FAILED: why not, to everybody

The first four are a handshake. It has `HANDSHAKE_S` in all, and process 0 has many beside each
other, in a thread each: a stranger that says nothing keeps nobody out.
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

from jaxinfer.parallel.hosts.links import TELL_S, HostsError, Link, left_until
from jaxinfer.parallel.hosts.messages import Message, Op, pack_json, unpack_json

RANDOM_BYTES = 32
HANDSHAKE_S = 5.0  # for one that connects to say who it is
MAX_HANDSHAKES = 64  # beside each other; who comes then waits for the first to be through
RETRY_S = 0.1
POLL_S = 0.02
WRONG = bytes(RANDOM_BYTES)  # in place of a proof
Facts = Mapping[str, str]


class Arrival(NamedTuple):
    """A process that has proved itself, and what it says."""

    link: Link
    num_processes: int
    facts: Facts


def listen(host: str, port: int) -> socket.socket:
    """On this machine alone if `host` is a loopback address, else on all its addresses: that by
    which others reach it need not be one of its own. Port 0: any free one."""
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


def admit_all(
    listener: socket.socket, num_processes: int, key: bytes, facts: Facts, timeout_s: float
) -> list[Link]:
    """The connections of processes 1 to `num_processes` - 1, in this order, all of which have the
    same `facts`. `HostsError` for one that does not fit, which everybody who is there is told, and
    where some are missing after `timeout_s`. Strangers are turned away, with a warning."""
    links: dict[int, Link] = {}
    deadline = time.monotonic() + timeout_s
    door = _Door(listener, key)
    try:
        while len(links) < num_processes - 1:
            arrival = door.next(deadline)
            _forget_closed(links)
            if arrival is None:
                raise _missing(listener, links, num_processes, timeout_s)
            _check(arrival, num_processes, facts, links)
            links[arrival.link.process_id] = arrival.link
    except HostsError as error:
        for link in links.values():
            _refuse(link, str(error))
        until = time.monotonic() + TELL_S
        while (arrival := door.next(until)) is not None:  # those on their way
            _refuse(arrival.link, str(error))
        raise
    finally:
        door.close()
    in_order = [links[i] for i in range(1, num_processes)]
    for link in in_order:
        with contextlib.suppress(OSError):  # the watch will say so
            link.send(Op.START)
    return in_order


def knock(
    address: tuple[str, int],
    process_id: int,
    num_processes: int,
    *,
    key: bytes,
    facts: Facts,
    timeout_s: float,
) -> Link:
    """A connection to process 0, once all have joined. `HostsError` where it cannot be reached
    within `timeout_s`, refuses this process, or has another key. A handshake that is cut off is
    tried again."""
    start = time.monotonic()
    try:
        link = _reach(address, process_id, key, timeout_s, start + timeout_s)
    except (OSError, ValueError) as error:
        raise HostsError(
            f"process {process_id} reached {address[0]}:{address[1]} but did not get in within "
            f"{time.monotonic() - start:.1f} s ({error}): see what process 0 says; are the "
            "channel's key, this process's number and that of all processes right, and is there "
            "process 0 of this program?"
        ) from error
    try:
        hello = {"process_id": process_id, "num_processes": num_processes, "facts": dict(facts)}
        link.send(Op.HELLO, pack_json(hello))
        # Process 0 waits as long, from its own start, and says who is missing.
        answer = link.receive(time.monotonic() + timeout_s + TELL_S)
    except (OSError, ValueError) as error:
        link.connection.close()
        raise HostsError(
            f"process {process_id} joined {link.name} and did not hear that all are there "
            f"({error}): did process 0 end? Start all processes again"
        ) from error
    if answer.op is not Op.START:
        link.connection.close()
        raise HostsError(f"{link.name} refused: {answer.payload.decode(errors='replace')}")
    return link


def _reach(
    address: tuple[str, int], process_id: int, key: bytes, timeout_s: float, deadline: float
) -> Link:
    """A connection to process 0, which has proved itself. `ValueError` for a wrong proof, `OSError`
    where its handshakes were cut off, `HostsError` where there is none."""
    host, port = address
    while True:
        connection = None
        try:
            left = max(0.01, deadline - time.monotonic())
            connection = socket.create_connection(address, timeout=left)
            link = Link(connection, 0, f"{host}:{port}", HANDSHAKE_S)
            _prove_and_check(connection, key, min(deadline, time.monotonic() + HANDSHAKE_S))
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
    """Each fact that is not the same, with both values."""
    gone = "nothing"
    return [
        f"{fact} is {ours.get(fact, gone)} in process 0 and {theirs.get(fact, gone)} in {name}"
        for fact in {**ours, **theirs}
        if ours.get(fact) != theirs.get(fact)
    ]


class _Door:
    """Who connects to `listener` and proves itself, in the order in which they are through."""

    def __init__(self, listener: socket.socket, key: bytes):
        self._listener = listener
        self._key = key
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._greeted: set[socket.socket] = set()  # their handshakes are under way
        self._is_closed = False

    def next(self, until: float) -> Arrival | None:
        """None: nobody by then."""
        while (left := until - time.monotonic()) > 0:
            wait_s = min(POLL_S, left)
            is_full = len(self._greeted) >= MAX_HANDSHAKES
            with contextlib.suppress(queue.Empty):
                return self._arrivals.get(is_full, wait_s)
            if is_full:
                continue
            self._listener.settimeout(wait_s)
            try:
                connection, address = self._listener.accept()
            except (TimeoutError, ConnectionError):
                continue
            self._greeted.add(connection)
            greeting = threading.Thread(
                target=self._greet, args=(connection, _name(address)), name="greeting", daemon=True
            )
            greeting.start()
        return None

    def close(self) -> None:
        """Break off what is under way."""
        with self._lock:
            self._is_closed = True
            for connection in self._greeted:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            while not self._arrivals.empty():
                self._arrivals.get().link.connection.close()

    def _greet(self, connection: socket.socket, address: str) -> None:
        arrival = None
        try:
            deadline = time.monotonic() + HANDSHAKE_S
            link = Link(connection, -1, address, HANDSHAKE_S)
            _ask_and_prove(connection, self._key, deadline)
            arrival = _read_hello(link, address, link.receive(deadline))
            connection.settimeout(HANDSHAKE_S)
        except (OSError, ValueError) as error:
            if not self._is_closed:
                logging.warning(
                    "%s connected to the hosts' channel and was turned away: %s", address, error
                )
        with self._lock:
            self._greeted.discard(connection)
            if arrival is None or self._is_closed:
                connection.close()
            else:
                self._arrivals.put(arrival)


def _check(arrival: Arrival, num_processes: int, facts: Facts, links: Mapping[int, Link]) -> None:
    """Refuse one that does not fit those who are there, and raise why."""
    link, total, theirs = arrival
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


def _forget_closed(links: dict[int, Link]) -> None:
    """Those that ended while the rest is awaited: they may come again."""
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
            logging.warning("%s joined and has ended; it is awaited again", link.name)
            links.pop(number).connection.close()


def _read_hello(link: Link, address: str, message: Message) -> Arrival:
    if message.op is not Op.HELLO:
        raise ValueError(f"{message.op.name} where HELLO was expected")
    value = unpack_json(message.payload)
    if not isinstance(value, dict):
        raise ValueError("a HELLO without its numbers")
    number, total, facts = (value.get(k) for k in ("process_id", "num_processes", "facts"))
    if type(number) is not int or type(total) is not int or not isinstance(facts, dict):
        raise ValueError("a HELLO without its numbers")  # True is an int too, by isinstance
    if not all(isinstance(fact, str) for fact in facts.values()):
        raise ValueError("a HELLO with facts that are no texts")
    link.process_id, link.name = number, f"process {number} ({address})"
    return Arrival(link, total, facts)


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


def _ask_and_prove(connection: socket.socket, key: bytes, deadline: float) -> None:
    asked = os.urandom(RANDOM_BYTES)
    connection.sendall(asked)
    answer = _exactly(connection, 2 * RANDOM_BYTES, deadline)
    is_right = hmac.compare_digest(answer[:RANDOM_BYTES], _proof(key, b"joins", asked))
    connection.sendall(_proof(key, b"leads", answer[RANDOM_BYTES:]) if is_right else WRONG)
    if not is_right:
        raise ValueError("it has another channel key, or is no process of this program")


def _prove_and_check(connection: socket.socket, key: bytes, deadline: float) -> None:
    asked, own = _exactly(connection, RANDOM_BYTES, deadline), os.urandom(RANDOM_BYTES)
    connection.sendall(_proof(key, b"joins", asked) + own)
    answer = _exactly(connection, RANDOM_BYTES, deadline)
    if not hmac.compare_digest(answer, _proof(key, b"leads", own)):
        raise ValueError("it has another channel key, or is no process of this program")


def _proof(key: bytes, role: bytes, asked: bytes) -> bytes:
    return hmac.digest(b"jaxinfer hosts" + key, role + asked, hashlib.sha256)


def _exactly(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < num_bytes:
        connection.settimeout(left_until(deadline))
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


def _name(address: tuple) -> str:
    host, port = address[:2]
    host = host.removeprefix("::ffff:")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
