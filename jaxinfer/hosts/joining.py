"""How the processes meet: process 0 listens, the others knock until it opens.

process 0   -> 32 random bytes
other       -> HMAC(key, "joins" + those), 32 random bytes of its own
process 0   -> HMAC(key, "leads" + those)
other       -> HELLO: its number, how many there are to be, its versions
process 0   -> START when all are there, or FAILED: why not, to everybody
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import socket
import time
from collections.abc import Mapping

from absl import logging

from jaxinfer.hosts.links import HostsError, Link
from jaxinfer.hosts.messages import Message, Op, pack_json, unpack_json

RANDOM_BYTES = 32
HANDSHAKE_S = 5.0  # for one that connects to say who it is
RETRY_S = 0.1
Facts = Mapping[str, str]


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
    try:
        while len(links) < num_processes - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, address = listener.accept()
            except TimeoutError:
                raise _missing(listener, links, num_processes, timeout_s) from None
            link = _admit(connection, _name(address), num_processes, key, facts, links)
            if link is not None:
                links[link.process_id] = link
    except HostsError as error:
        for link in links.values():
            _refuse(link, str(error))
        raise
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
    within `timeout_s`, refuses this process, or has another key."""
    host, port = address
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            left = max(0.01, deadline - time.monotonic())
            connection = socket.create_connection((host, port), timeout=left)
            break
        except OSError as error:
            if time.monotonic() + RETRY_S > deadline:
                raise HostsError(
                    f"process {process_id} cannot reach process 0 at {host}:{port} after "
                    f"{timeout_s:g} s ({error.strerror or error}): is process 0 started, is the "
                    f"coordinator's address right, and does a firewall let port {port} and the "
                    "coordinator's through?"
                ) from error
            time.sleep(RETRY_S)
    link = Link(connection, 0, f"{host}:{port}", HANDSHAKE_S)
    try:
        _prove_and_check(connection, key)
        hello = {"process_id": process_id, "num_processes": num_processes, "facts": dict(facts)}
        link.send(Op.HELLO, pack_json(hello))
        answer = link.receive(deadline)
    except (OSError, ValueError) as error:
        connection.close()
        raise HostsError(
            f"process {process_id} reached {host}:{port} but did not get in within {timeout_s:g} s "
            f"({error}): see what process 0 says; are the channel's key, this process's number and "
            "that of all processes right, and is there process 0 of this program?"
        ) from error
    if answer.op is not Op.START:
        connection.close()
        raise HostsError(f"{link.name} refused: {answer.payload.decode(errors='replace')}")
    return link


def differences(ours: Facts, theirs: Facts, name: str) -> list[str]:
    """Each fact that is not the same, with both values."""
    gone = "nothing"
    return [
        f"{fact} is {ours.get(fact, gone)} in process 0 and {theirs.get(fact, gone)} in {name}"
        for fact in {**ours, **theirs}
        if ours.get(fact) != theirs.get(fact)
    ]


def _admit(
    connection: socket.socket,
    address: str,
    num_processes: int,
    key: bytes,
    facts: Facts,
    links: Mapping[int, Link],
) -> Link | None:
    link = Link(connection, -1, address, HANDSHAKE_S)
    try:
        _ask_and_prove(connection, key)
        message = link.receive(time.monotonic() + HANDSHAKE_S)
        number, total, theirs = _read_hello(message)
    except (OSError, ValueError) as error:
        logging.warning(
            "%s connected to the hosts' channel and was turned away: %s", address, error
        )
        connection.close()
        return None
    link.process_id, link.name = number, f"process {number} ({address})"
    problems = differences(facts, theirs, link.name)
    if total != num_processes:
        problems.append(f"num_processes is {num_processes} in process 0 and {total} in {link.name}")
    elif not 1 <= number < num_processes:
        problems.append(
            f"{address} says it is process {number}; besides 0 there are 1 to {num_processes - 1}"
        )
    elif number in links:
        problems.append(
            f"process_id {number} was given to two processes, {links[number].name} and {address}: "
            f"give each its own, 0 to {num_processes - 1}"
        )
    if problems:
        error = HostsError("; ".join(problems))
        _refuse(link, str(error))
        raise error
    return link


def _read_hello(message: Message) -> tuple[int, int, Facts]:
    value = unpack_json(message.payload)
    if message.op is not Op.HELLO or not isinstance(value, dict):
        raise ValueError(f"{message.op.name} where HELLO was expected")
    number, total, facts = (value.get(k) for k in ("process_id", "num_processes", "facts"))
    if not isinstance(number, int) or not isinstance(total, int) or not isinstance(facts, dict):
        raise ValueError("a HELLO without its numbers")
    return number, total, facts


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


def _ask_and_prove(connection: socket.socket, key: bytes) -> None:
    asked = os.urandom(RANDOM_BYTES)
    connection.sendall(asked)
    answer = _exactly(connection, 2 * RANDOM_BYTES)
    if not hmac.compare_digest(answer[:RANDOM_BYTES], _proof(key, b"joins", asked)):
        raise ValueError("it has another channel key, or is no process of this program")
    connection.sendall(_proof(key, b"leads", answer[RANDOM_BYTES:]))


def _prove_and_check(connection: socket.socket, key: bytes) -> None:
    asked, own = _exactly(connection, RANDOM_BYTES), os.urandom(RANDOM_BYTES)
    connection.sendall(_proof(key, b"joins", asked) + own)
    answer = _exactly(connection, RANDOM_BYTES)
    if not hmac.compare_digest(answer, _proof(key, b"leads", own)):
        raise ValueError("it has another channel key, or is no process of this program")


def _proof(key: bytes, role: bytes, asked: bytes) -> bytes:
    return hmac.digest(b"jaxinfer hosts" + key, role + asked, hashlib.sha256)


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
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
