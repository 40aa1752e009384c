"""How processes meet: who is let in, and what is said to those who are not."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from jaxinfer import ConfigError
from jaxinfer.parallel.hosts import HostsConfig, HostsError, joining, start
from jaxinfer.parallel.hosts.joining import admit_all, knock, listen
from jaxinfer.parallel.hosts.links import Link, Watch
from jaxinfer.parallel.hosts.messages import Op, frame, pack_json

FACTS = {"jaxinfer": "0.1.0", "jax": "0.10.2"}


class Door(NamedTuple):
    """A process 0 that others knock at."""

    address: tuple[str, int]
    outcome: Callable[[], Any]


@pytest.fixture
def door() -> Iterator[Callable[..., Door]]:
    with ThreadPoolExecutor(1) as pool:
        listener = listen("127.0.0.1", 0)

        def make(num_processes: int, timeout_s: float = 5.0) -> Door:
            future = pool.submit(admit_all, listener, num_processes, b"k", FACTS, timeout_s)
            return Door(listener.getsockname()[:2], lambda: future.exception() or future.result())

        yield make
    listener.close()


def join_as(door: Door, process_id: int, num_processes: int, **changes) -> Link:
    options = {"key": b"k", "facts": FACTS, "timeout_s": 5.0, **changes}
    return knock(door.address, process_id, num_processes, **options)


def say_hello(door: Door, hello: bytes) -> socket.socket:
    """A process of ours that has proved itself, and says this."""
    connection = socket.create_connection(door.address, timeout=5.0)
    joining._prove_and_check(connection, b"k", time.monotonic() + 5.0)
    connection.sendall(frame(Op.HELLO, hello))
    return connection


def close(*links: Link) -> None:
    for link in links:
        link.connection.close()


def both(function: Callable[[], Any]) -> list[Any]:
    """What it gives, or raises, in two threads at once."""
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(function) for _ in range(2)]
        return [future.exception() or future.result() for future in futures]


def test_two_numbers_of_processes_are_refused_on_both_sides(door):
    opened = door(2)
    with pytest.raises(HostsError, match=r"num_processes is 2 in process 0 and 3 in process 1"):
        join_as(opened, 1, 3)
    assert "num_processes is 2 in process 0 and 3 in process 1" in str(opened.outcome())


def test_other_versions_are_refused_on_both_sides(door):
    opened = door(2)
    wanted = r"jax is 0\.10\.2 in process 0 and 0\.12\.0 in process 1"
    with pytest.raises(HostsError, match=wanted):
        join_as(opened, 1, 2, facts={**FACTS, "jax": "0.12.0"})
    assert "jax is 0.10.2 in process 0 and 0.12.0 in process 1" in str(opened.outcome())


def test_one_number_for_two_processes_is_refused_by_all(door):
    opened = door(4)
    errors = both(lambda: join_as(opened, 1, 4))
    for error in [*errors, opened.outcome()]:
        assert "process_id 1 was given to two processes, process 1 (127.0.0.1:" in str(error)


def test_a_process_that_nobody_awaits_is_refused(door):
    opened = door(2)
    with pytest.raises(HostsError, match="says it is process 5; besides 0 there are 1 to 1"):
        join_as(opened, 5, 2)
    assert isinstance(opened.outcome(), HostsError)


def test_a_stranger_and_one_with_another_key_are_turned_away_and_the_door_stays_open(door):
    opened = door(2)
    with socket.create_connection(opened.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n" + b"\r\n" * 60)
        began = time.monotonic()
        # At once, and it says how long it took.
        with pytest.raises(
            HostsError, match=r"did not get in within [0-3]\.\d s .*another channel key"
        ):
            join_as(opened, 1, 2, key=b"another")
        assert time.monotonic() - began < 4
        link = join_as(opened, 1, 2)
    [accepted] = opened.outcome()
    assert accepted.process_id == 1
    link.connection.close()
    accepted.connection.close()


def test_strangers_that_say_nothing_keep_nobody_out(door):
    opened = door(3)
    with contextlib.ExitStack() as strangers:
        for _ in range(4):
            strangers.enter_context(socket.create_connection(opened.address))
        began = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            links = list(pool.map(lambda i: join_as(opened, i, 3), (1, 2)))
        assert time.monotonic() - began < 4
        close(*links, *opened.outcome())


def test_a_stranger_has_no_longer_than_process_0_itself(door):
    opened = door(2, timeout_s=0.3)
    began = time.monotonic()
    with socket.create_connection(opened.address):
        assert "1 did not join" in str(opened.outcome())
    assert time.monotonic() - began < 4


def test_a_stranger_with_a_byte_now_and_then_is_turned_away(door, monkeypatch):
    monkeypatch.setattr(joining, "HANDSHAKE_S", 0.4)
    opened = door(2)
    began = time.monotonic()
    with socket.create_connection(opened.address, timeout=0.1) as stranger:
        assert len(stranger.recv(64)) == 32
        with contextlib.suppress(ConnectionError):
            while True:
                assert time.monotonic() - began < 4, "it is still listened to"
                stranger.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if not stranger.recv(1):
                        break
    close(join_as(opened, 1, 2), *opened.outcome())


def test_a_handshake_that_is_cut_off_is_tried_again(monkeypatch):
    monkeypatch.setattr(joining, "HANDSHAKE_S", 0.3)

    def open_late(listener: socket.socket) -> list[Link]:
        listener.settimeout(5.0)
        listener.accept()[0].close()
        silent, _ = listener.accept()
        with silent:
            return admit_all(listener, 2, b"k", FACTS, 5.0)

    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        future = pool.submit(open_late, listener)
        address = listener.getsockname()[:2]
        link = knock(address, 1, 2, key=b"k", facts=FACTS, timeout_s=8.0)
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
def test_a_hello_that_is_none_is_turned_away_and_the_door_stays_open(hello, door):
    opened = door(2)
    with say_hello(opened, hello) as stranger, contextlib.suppress(ConnectionError):
        assert stranger.recv(64) == b""
    close(join_as(opened, 1, 2), *opened.outcome())


def test_a_process_that_ended_while_others_are_awaited_may_come_again(door):
    opened = door(3)
    hello = pack_json({"process_id": 1, "num_processes": 3, "facts": FACTS})
    with say_hello(opened, hello):
        time.sleep(0.2)  # it is in
    with ThreadPoolExecutor(2) as pool:
        links = list(pool.map(lambda i: join_as(opened, i, 3), (1, 2)))
    accepted = opened.outcome()
    assert [link.process_id for link in accepted] == [1, 2]
    close(*links, *accepted)


def test_another_silence_is_refused_on_both_sides():
    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(2) as pool:
        address = listener.getsockname()[:2]
        futures = []
        for process_id, silence_s in enumerate((10.0, 2.5)):
            config = HostsConfig(silence_s=silence_s, join_timeout_s=5.0)
            given = listener if process_id == 0 else None
            futures.append(
                pool.submit(
                    start._join_channel, config, process_id, 2, address, b"k", listener=given
                )
            )
        for future in futures:
            wanted = r"silence_s is 10 in process 0 and 2\.5 in process 1"
            with pytest.raises(HostsError, match=wanted):
                future.result()


def test_one_that_proves_nothing_is_not_let_in_whatever_it_says(door):
    opened = door(2, timeout_s=1.0)
    with socket.create_connection(opened.address) as stranger:
        hello = {"process_id": 1, "num_processes": 2, "facts": FACTS}
        stranger.sendall(bytes(64) + frame(Op.HELLO, pack_json(hello)))
        assert "1 did not join" in str(opened.outcome())


def test_what_comes_with_the_answer_is_not_lost():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    theirs.sendall(frame(Op.START) + frame(Op.GO))
    link = Link(ours, 0, "here", 5.0)
    assert link.receive(time.monotonic() + 5.0).op is Op.START
    watch = Watch([link], 10.0)
    watch.start()
    assert watch.inbox.get(timeout=5.0).op is Op.GO
    watch.close(timeout_s=0.1)
    theirs.close()


def test_who_is_missing_is_named(door):
    opened = door(4, timeout_s=0.5)
    with pytest.raises(HostsError) as error:
        join_as(opened, 2, 4)
    missing = opened.outcome()
    assert "of 4 processes, 1, 3 did not join process 0 within 0.5 s" in str(missing)
    assert f"port {opened.address[1]}" in str(missing)
    assert "of 4 processes, 1, 3 did not join" in str(error.value)


def test_a_process_0_that_is_not_there_is_named_by_its_address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    text = rf"process 1 cannot reach process 0 at 127\.0\.0\.1:{port} after 0\.3 s .*firewall"
    with pytest.raises(HostsError, match=text):
        knock(("127.0.0.1", port), 1, 2, key=b"", facts=FACTS, timeout_s=0.3)
    assert time.monotonic() - began < 4


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HostsError, match=f"cannot listen on port {port} .*channel_port"):
            listen("127.0.0.1", port)


def test_bad_options_are_named(tmp_path):
    good = {"coordinator": "h:1234", "num_processes": 2, "process_id": 1}
    config = HostsConfig(**good)
    assert (config.coordinator_host, config.coordinator_port) == ("h", 1234)
    assert HostsConfig(**{**good, "coordinator": "[::1]:9"}).coordinator_host == "::1"
    for changes, text in (
        ({"process_id": 2}, r"process_id is 2 of 2 processes; they are numbered 0 to 1"),
        ({"coordinator": "h"}, r"coordinator is 'h'; it must be HOST:PORT"),
        ({"coordinator": "h:65535"}, "port 1 to 65534"),
        ({"num_processes": None}, "give all three, or none"),
        ({"silence_s": 0.0}, r"silence_s is 0\.0; it must be at least 0\.1"),
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
