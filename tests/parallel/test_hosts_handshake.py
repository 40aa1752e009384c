"""The handshake of processes: who is accepted, and the errors for those that are refused."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from jaxinfer import ConfigError
from jaxinfer.parallel.hosts import HostsConfig, HostsError, handshake, start
from jaxinfer.parallel.hosts.channel import Link, LinkMonitor
from jaxinfer.parallel.hosts.handshake import ProcessInfo, accept_all, connect, listen
from jaxinfer.parallel.hosts.messages import Op, encode_frame, pack_json

FACTS = {"jaxinfer": "0.1.0", "jax": "0.10.2"}


class Acceptor(NamedTuple):
    """A process 0 that accepts others in a thread."""

    address: tuple[str, int]
    outcome: Callable[[], Any]  # the result or error of `accept_all`


@pytest.fixture
def accept() -> Iterator[Callable[..., Acceptor]]:
    with ThreadPoolExecutor(1) as pool:
        listener = listen("127.0.0.1", 0)

        def start_accepting(num_processes: int, timeout_s: float = 5.0) -> Acceptor:
            future = pool.submit(accept_all, listener, num_processes, b"k", FACTS, timeout_s)
            outcome = lambda: future.exception() or future.result()
            return Acceptor(listener.getsockname()[:2], outcome)

        yield start_accepting
    listener.close()


def join_as(
    acceptor: Acceptor, process_id: int, num_processes: int, *, facts=FACTS, key: bytes = b"k"
) -> Link:
    info = ProcessInfo(process_id, num_processes, facts)
    return connect(acceptor.address, info, key=key, timeout_s=5.0)


def say_hello(acceptor: Acceptor, hello: bytes) -> socket.socket:
    """Authenticate and send this HELLO."""
    connection = socket.create_connection(acceptor.address, timeout=5.0)
    handshake._answer_and_verify(connection, b"k", time.monotonic() + 5.0)
    connection.sendall(encode_frame(Op.HELLO, hello))
    return connection


def close(*links: Link) -> None:
    for link in links:
        link.connection.close()


def call_twice(function: Callable[[], Any]) -> list[Any]:
    """Call it in two threads at once; return both results or errors."""
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(function) for _ in range(2)]
        return [future.exception() or future.result() for future in futures]


def test_other_number_of_processes_is_refused_on_both_sides(accept):
    acceptor = accept(2)
    with pytest.raises(HostsError, match=r"num_processes is 2 in process 0 and 3 in process 1"):
        join_as(acceptor, 1, 3)
    assert "num_processes is 2 in process 0 and 3 in process 1" in str(acceptor.outcome())


def test_other_versions_are_refused_on_both_sides(accept):
    acceptor = accept(2)
    wanted = r"jax is 0\.10\.2 in process 0 and 0\.12\.0 in process 1"
    with pytest.raises(HostsError, match=wanted):
        join_as(acceptor, 1, 2, facts={**FACTS, "jax": "0.12.0"})
    assert "jax is 0.10.2 in process 0 and 0.12.0 in process 1" in str(acceptor.outcome())


def test_duplicate_process_id_is_refused_by_all(accept):
    acceptor = accept(4)
    errors = call_twice(lambda: join_as(acceptor, 1, 4))
    for error in [*errors, acceptor.outcome()]:
        assert "process_id 1 was given to two processes, process 1 (127.0.0.1:" in str(error)


def test_process_id_out_of_range_is_refused(accept):
    acceptor = accept(2)
    with pytest.raises(HostsError, match="says it is process 5; besides 0 there are 1 to 1"):
        join_as(acceptor, 5, 2)
    assert isinstance(acceptor.outcome(), HostsError)


def test_strangers_and_wrong_keys_are_rejected_and_others_still_join(accept):
    acceptor = accept(2)
    with socket.create_connection(acceptor.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n" + b"\r\n" * 60)
        began = time.monotonic()
        # It is rejected immediately, and the error states the time that it took.
        with pytest.raises(
            HostsError, match=r"did not get in within [0-3]\.\d s .*another channel key"
        ):
            join_as(acceptor, 1, 2, key=b"another")
        assert time.monotonic() - began < 4
        link = join_as(acceptor, 1, 2)
    [accepted] = acceptor.outcome()
    assert accepted.process_id == 1
    link.connection.close()
    accepted.connection.close()


def test_silent_strangers_block_nobody(accept):
    acceptor = accept(3)
    with contextlib.ExitStack() as strangers:
        for _ in range(4):
            strangers.enter_context(socket.create_connection(acceptor.address))
        began = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            links = list(pool.map(lambda i: join_as(acceptor, i, 3), (1, 2)))
        assert time.monotonic() - began < 4
        close(*links, *acceptor.outcome())


def test_silent_stranger_does_not_extend_the_join_timeout(accept):
    acceptor = accept(2, timeout_s=0.3)
    began = time.monotonic()
    with socket.create_connection(acceptor.address):
        assert "1 did not join" in str(acceptor.outcome())
    assert time.monotonic() - began < 4


def test_slow_stranger_is_rejected_after_the_handshake_timeout(accept, monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.4)
    acceptor = accept(2)
    began = time.monotonic()
    with socket.create_connection(acceptor.address, timeout=0.1) as stranger:
        assert len(stranger.recv(64)) == 32
        with contextlib.suppress(ConnectionError):
            while True:
                assert time.monotonic() - began < 4, "the connection is still open"
                stranger.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if not stranger.recv(1):
                        break
    close(join_as(acceptor, 1, 2), *acceptor.outcome())


def test_handshake_that_is_cut_off_is_retried(monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)

    def accept_late(listener: socket.socket) -> list[Link]:
        listener.settimeout(5.0)
        listener.accept()[0].close()
        silent, _ = listener.accept()
        with silent:
            return accept_all(listener, 2, b"k", FACTS, 5.0)

    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        future = pool.submit(accept_late, listener)
        address = listener.getsockname()[:2]
        link = connect(address, ProcessInfo(1, 2, FACTS), key=b"k", timeout_s=8.0)
        close(link, *future.result())


@pytest.mark.parametrize(
    "hello",
    [
        b"[" * 200_000,
        pack_json({"process_id": True, "num_processes": 2, "facts": FACTS}),
        pack_json({"process_id": 1, "num_processes": 2, "facts": {**FACTS, "jax": [[]]}}),
        b"[1]",
    ],
    ids=["deep", "bool", "facts", "list"],
)
def test_malformed_hello_is_rejected_and_others_still_join(hello, accept):
    acceptor = accept(2)
    with say_hello(acceptor, hello) as stranger, contextlib.suppress(ConnectionError):
        assert stranger.recv(64) == b""
    close(join_as(acceptor, 1, 2), *acceptor.outcome())


def test_process_that_ended_may_join_again(accept):
    acceptor = accept(3)
    hello = pack_json({"process_id": 1, "num_processes": 3, "facts": FACTS})
    with say_hello(acceptor, hello):
        time.sleep(0.2)  # until it has joined
    with ThreadPoolExecutor(2) as pool:
        links = list(pool.map(lambda i: join_as(acceptor, i, 3), (1, 2)))
    accepted = acceptor.outcome()
    assert [link.process_id for link in accepted] == [1, 2]
    close(*links, *accepted)


def test_other_heartbeat_timeout_is_refused_on_both_sides():
    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(2) as pool:
        address = listener.getsockname()[:2]
        futures = []
        for process_id, heartbeat_timeout_s in enumerate((10.0, 2.5)):
            config = HostsConfig(heartbeat_timeout_s=heartbeat_timeout_s, join_timeout_s=5.0)
            given = listener if process_id == 0 else None
            options = {"address": address, "key": b"k", "listener": given}
            futures.append(pool.submit(start._join_channel, config, process_id, 2, **options))
        for future in futures:
            wanted = r"heartbeat_timeout_s is 10 in process 0 and 2\.5 in process 1"
            with pytest.raises(HostsError, match=wanted):
                future.result()


def test_hello_without_authentication_is_rejected(accept):
    acceptor = accept(2, timeout_s=1.0)
    with socket.create_connection(acceptor.address) as stranger:
        hello = {"process_id": 1, "num_processes": 2, "facts": FACTS}
        stranger.sendall(bytes(64) + encode_frame(Op.HELLO, pack_json(hello)))
        assert "1 did not join" in str(acceptor.outcome())


def test_message_that_arrives_with_the_answer_is_kept():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    theirs.sendall(encode_frame(Op.START) + encode_frame(Op.GO))
    link = Link(ours, 0, "here", 5.0)
    assert link.receive(time.monotonic() + 5.0).op is Op.START
    monitor = LinkMonitor([link], 10.0)
    monitor.start()
    assert monitor.inbox.get(timeout=5.0).op is Op.GO
    monitor.close(timeout_s=0.1)
    theirs.close()


def test_missing_processes_are_named(accept):
    acceptor = accept(4, timeout_s=0.5)
    with pytest.raises(HostsError) as error:
        join_as(acceptor, 2, 4)
    missing = acceptor.outcome()
    assert "of 4 processes, 1, 3 did not join process 0 within 0.5 s" in str(missing)
    assert f"port {acceptor.address[1]}" in str(missing)
    assert "of 4 processes, 1, 3 did not join" in str(error.value)


def test_unreachable_process_0_is_named_by_its_address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    text = rf"process 1 cannot reach process 0 at 127\.0\.0\.1:{port} after 0\.3 s .*firewall"
    with pytest.raises(HostsError, match=text):
        connect(("127.0.0.1", port), ProcessInfo(1, 2, FACTS), key=b"", timeout_s=0.3)
    assert time.monotonic() - began < 4


def test_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HostsError, match=f"cannot listen on port {port} .*channel_port"):
            listen("127.0.0.1", port)


def test_invalid_options_are_named(tmp_path):
    good = {"coordinator": "h:1234", "num_processes": 2, "process_id": 1}
    config = HostsConfig(**good)
    assert (config.coordinator_host, config.coordinator_port) == ("h", 1234)
    assert HostsConfig(**{**good, "coordinator": "[::1]:9"}).coordinator_host == "::1"
    for changes, text in (
        ({"process_id": 2}, r"process_id is 2 of 2 processes; they are numbered 0 to 1"),
        ({"coordinator": "h"}, r"coordinator is 'h'; it must be HOST:PORT"),
        ({"coordinator": "h:65535"}, "port 1 to 65534"),
        ({"num_processes": None}, "give all three, or none"),
        ({"heartbeat_timeout_s": 0.0}, r"heartbeat_timeout_s is 0\.0; it must be at least 0\.1"),
    ):
        with pytest.raises(ConfigError, match=text):
            HostsConfig(**{**good, **changes})
    empty = tmp_path / "key"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match="key' is empty"):
        HostsConfig(**good, channel_key_file=str(empty)).channel_key()
    with pytest.raises(ConfigError, match="channel_key_file"):
        HostsConfig(**good, channel_key_file=str(tmp_path / "none")).channel_key()
    with pytest.raises(ConfigError, match="channel_key_file goes with coordinator"):
        HostsConfig(channel_key_file=str(empty))
