"""What processes of one engine tell each other, and how one's death is noticed; tried by threads.
Whole processes are in tests/parallel/test_hosts.py.
"""

from __future__ import annotations

import signal
import socket
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from absl import logging

from jaxinfer import Engine
from jaxinfer.parallel.hosts import ALONE, HostsError, follow
from jaxinfer.parallel.hosts.joining import admit_all, knock, listen
from jaxinfer.parallel.hosts.links import Link, Watch
from jaxinfer.parallel.hosts.messages import (
    MAX_FRAME_BYTES,
    Message,
    Op,
    frame,
    pack_call,
    take_frames,
    unpack_call,
)
from jaxinfer.parallel.hosts.peers import Follower, Leader

FACTS = {"jaxinfer": "0.1.0", "jax": "0.10.2"}
PLAN = np.arange(512, dtype=np.int32)  # 2 KiB, as of a decode step


class Member(NamedTuple):
    peers: Any
    losses: list[str]  # what `on_lost` got


class FakeRunner:
    """Notes the calls made."""

    def __init__(self, peers: Any):
        self.peers = peers
        self.calls: list[tuple[Any, ...]] = []

    def run_step(self, bucket: int, packed: np.ndarray) -> np.ndarray:
        with self.peers.call(Op.STEP, bucket, packed):
            self.calls.append((bucket, packed.tolist()))
        return packed

    def run_admit(self, packed: np.ndarray) -> None:
        with self.peers.call(Op.ADMIT, 0, packed):
            self.calls.append(("admit", packed.tolist()))

    def run_extras(self, slot: int, *extras: np.ndarray) -> None:
        with self.peers.call(Op.EXTRAS, slot, *extras):
            self.calls.append(("extras", slot, [(a.dtype.name, a.shape, a.sum()) for a in extras]))

    def reset_state(self) -> None:
        with self.peers.call(Op.RESET, 0):
            self.calls.append(("reset",))


def meet(num_processes: int = 2, *, check_steps: int = 4, silence_s: float = 10.0) -> list[Member]:
    """All processes, as threads of this one would see them; process 0 first."""
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()[:2]
    with ThreadPoolExecutor(num_processes) as pool, listener:
        leading = pool.submit(admit_all, listener, num_processes, b"k", FACTS, 10.0)
        joining = [
            pool.submit(knock, address, i, num_processes, key=b"k", facts=FACTS, timeout_s=10.0)
            for i in range(1, num_processes)
        ]
        all_links = [leading.result(), *[[future.result()] for future in joining]]
    members = []
    for i, links in enumerate(all_links):
        watch, losses = Watch(links, silence_s), []
        watch.on_lost = losses.append
        watch.start()
        kind = Follower if i else Leader
        members.append(Member(kind(watch, i, num_processes, check_steps), losses))
    return members


@pytest.fixture
def group() -> Iterator[Callable[..., list[Member]]]:
    made: list[Member] = []

    def make(*args, **options) -> list[Member]:
        made.extend(members := meet(*args, **options))
        return members

    yield make
    for member in made:
        member.peers.watch.close(timeout_s=0.1)


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """What each gives, or the error that it raises; all run at the same time."""
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(function) for function in functions]
        return [future.exception() or future.result() for future in futures]


def until(condition: Callable[[], Any], seconds: float = 5.0) -> float:
    """Waits for it; how long."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it did not come"
        time.sleep(0.005)
    return time.monotonic() - start


def test_a_call_arrives_as_it_was_sent():
    arrays = [
        PLAN,
        np.zeros((0, 3), np.float32),
        np.array(7, np.uint32),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([True, False]),
    ]
    stream = bytearray(frame(Op.STEP, pack_call(-3, arrays)) + frame(Op.BEAT) + b"\x05")
    call, beat = take_frames(stream, 1)
    assert (beat.op, beat.process_id, stream) == (Op.BEAT, 1, b"\x05")
    op, number, received = unpack_call(call)
    assert (op, number, len(received)) == (Op.STEP, -3, len(arrays))
    for sent, got in zip(arrays, received, strict=True):
        assert got.dtype == sent.dtype and got.flags.aligned and got.flags.owndata
        np.testing.assert_array_equal(got, sent)


def test_steps_are_counted_beyond_32_bits():
    check = Message(Op.CHECK, pack_call(2**31 + 5, [PLAN]), 0)
    assert unpack_call(check).number == 2**31 + 5


@pytest.mark.parametrize("head", [frame(Op.BEAT)[:4] + b"\xff", b"\0\0\0\0\1", b"GET / HT"])
def test_what_is_no_frame_is_refused(head):
    with pytest.raises(ValueError, match="a frame of"):
        take_frames(bytearray(head), 1)
    assert int.from_bytes(b"GET ", "little") > MAX_FRAME_BYTES


def test_an_array_of_objects_cannot_come_in():
    payload = pack_call(0, [np.zeros(1, np.int64)]).replace(b"<i8", b"|O\0")
    with pytest.raises((ValueError, TypeError)):
        unpack_call(Message(Op.STEP, payload, 0))


def test_the_others_make_the_same_calls(group):
    members = group(3, check_steps=2)
    runners = [FakeRunner(member.peers) for member in members]

    def lead() -> None:
        runner = runners[0]
        runner.run_admit(PLAN)
        runner.run_extras(3, np.ones((2, 3), np.float32), np.arange(5, dtype=np.uint32))
        for bucket in (1, 2, 4, 8, 16):
            runner.run_step(bucket, PLAN[: bucket * 2])
        runner.reset_state()
        runner.run_step(1, PLAN)
        members[0].peers.stop()

    jobs = [lambda i=i: follow(runners[i], members[i].peers) for i in (1, 2)]
    assert at_once(lead, *jobs) == [None, None, None]
    assert len(runners[0].calls) == 9
    assert runners[1].calls == runners[2].calls == runners[0].calls
    assert not any(member.losses for member in members)


def test_a_plan_arrives_at_once(group):
    leader, follower = group()
    sent, took = [], []

    def lead() -> None:
        for _ in range(200):
            sent.append(time.perf_counter())
            with leader.peers.call(Op.STEP, 8, PLAN):
                time.sleep(0.001)
        leader.peers.stop()

    def repeat() -> None:
        for at, call in enumerate(follower.peers.calls()):
            took.append(time.perf_counter() - sent[at])
            with follower.peers.call(*call[:2], *call.arrays):
                pass

    assert at_once(lead, repeat) == [None, None]
    print(f"a plan of {PLAN.nbytes} bytes took {statistics.median(took) * 1e6:.0f} us")
    assert statistics.median(took) < 20e-3  # measured: 0.2 ms, on a busy machine longer


@pytest.mark.parametrize("what", ["bytes", "lost", "bucket"])
def test_calls_that_differ_are_noticed_at_the_next_check(what, group):
    leader, follower = group(check_steps=4)
    ran = FakeRunner(follower.peers)

    def lead() -> None:
        for _ in range(4):
            with leader.peers.call(Op.STEP, 8, PLAN):
                pass

    def repeat() -> None:
        for at, (_, number, arrays) in enumerate(follower.peers.calls()):
            if at == 2 and what == "lost":
                continue
            if at == 2 and what == "bytes":
                arrays[0][17] += 1
            ran.run_step(16 if at == 2 and what == "bucket" else number, *arrays)

    done, error = at_once(lead, repeat)
    assert done is None and isinstance(error, HostsError)
    step = 3 if what == "lost" else 4
    assert "process 1 is out of step with process 0: after step 4 of process 0" in str(error)
    assert f"here, after step {step}" in str(error)
    follower.peers.fail(error)
    until(lambda: leader.losses)
    assert leader.losses[0].startswith("process 1 (127.0.0.1:")
    assert "ended: HostsError: process 1 is out of step" in leader.losses[0]


def test_pages_are_the_least_of_all(group):
    members = group(3)
    agree = lambda member, n: lambda: member.peers.agree({"a": "1"}, n)
    jobs = [agree(member, n) for member, n in zip(members, (90, 70, 80), strict=True)]
    assert at_once(*jobs) == [70, 70, 70]
    assert at_once(*[member.peers.ready for member in members]) == [None] * 3
    assert ALONE.agree({"a": "1"}, 5) == 5


def test_what_the_processes_do_not_agree_on_is_named_by_all_of_them(group):
    members = group(3)
    facts = [{"config.mesh.tensor": n, "max_model_len": "64"} for n in ("8", "8", "4")]
    jobs = [lambda m=m, f=f: m.peers.agree(f, 5) for m, f in zip(members, facts, strict=True)]
    for error in at_once(*jobs):
        assert isinstance(error, HostsError)
        assert "config.mesh.tensor is 8 in process 0 and 4 in process 2" in str(error)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_closed_connection_ends_the_others_at_once(lost, group):
    members = group(3)
    for link in members[lost].peers.watch.links:  # as the kernel does for a process that is killed
        link.connection.shutdown(socket.SHUT_RDWR)
    for i, member in enumerate(members):
        if i != lost:
            assert until(lambda m=member: m.losses) < 2
    watched = members[1 - lost]
    assert f"process {lost} (127.0.0.1:" in watched.losses[0]
    assert "is lost: its connection closed" in watched.losses[0]
    # Those that only process 0 is connected with learn from it who was lost.
    assert f"process {lost} (127.0.0.1:" in members[2].losses[0]
    with (
        pytest.raises(HostsError, match=f"process {lost} .* is lost"),
        watched.peers.call(Op.STEP, 1),
    ):
        pass
    with pytest.raises(HostsError, match="is lost"):
        watched.peers.ready()


@pytest.mark.parametrize("is_silent", [True, False])
def test_silence_is_a_loss_and_a_beat_is_none(is_silent, group, monkeypatch):
    leader, follower = group(silence_s=0.5)
    if is_silent:
        monkeypatch.setattr(follower.peers.watch, "_beat", lambda: None)
        assert 0.3 < until(lambda: leader.losses) < 3
        assert "nothing has come from it for 0." in leader.losses[0]
        assert "(silence_s is 0.5)" in leader.losses[0]
    else:
        time.sleep(1.2)
        assert not leader.losses and not follower.losses


def test_a_watch_that_stood_still_blames_nobody_for_it(group, monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: warnings.append(text % values))
    leader, follower = group(silence_s=0.5)
    watch = leader.peers.watch
    read, stops = watch._read, [1.5]

    def stopped(link: Link) -> bool:
        has_more = read(link)
        if stops:
            time.sleep(stops.pop())  # as by SIGSTOP
        return has_more

    monkeypatch.setattr(watch, "_read", stopped)
    monkeypatch.setattr(follower.peers.watch, "_silence_s", 60.0)
    until(lambda: warnings)
    time.sleep(0.7)
    assert not leader.losses and not follower.losses
    assert "this process stood still for 1." in warnings[0] and "silence_s is 0.5" in warnings[0]
    assert len(warnings) == 1


@pytest.mark.parametrize("error", [HostsError("process 1 is lost"), RuntimeError("gloo")])
def test_an_engine_that_lost_a_process_says_that_alone(error):
    """No error of the recovery after that of the step, whichever notices the loss."""
    recovered: list[bool] = []

    def recover() -> None:
        recovered.append(True)
        raise HostsError("process 1 is lost")

    engine: Any = SimpleNamespace(_recover=recover)
    with (
        pytest.raises(HostsError, match="process 1 is lost") as caught,
        Engine._recovering(engine),
    ):
        raise error
    printed = "".join(traceback.format_exception(caught.value))
    assert "During handling of the above exception" not in printed
    assert recovered == ([] if isinstance(error, HostsError) else [True])


def test_a_goodbye_is_no_loss(group):
    leader, follower = group()
    done = at_once(
        lambda: (leader.peers.stop(), leader.peers.close()),
        lambda: (follow(FakeRunner(follower.peers), follower.peers), follower.peers.close()),
    )
    assert done == [(None, None)] * 2
    assert not leader.losses and not follower.losses


def test_an_error_of_one_is_told_to_all(group):
    members = group(3)
    members[1].peers.fail(ValueError("layer 3 is missing"))
    until(lambda: members[0].losses and members[2].losses)
    assert "process 1 (127.0.0.1:" in members[0].losses[0]
    assert "ended: ValueError: layer 3 is missing" in members[0].losses[0]
    assert "ended: ValueError: layer 3 is missing" in members[2].losses[0]


def test_a_collective_that_breaks_is_laid_to_the_one_who_left(group):
    leader, follower = group()
    [link] = follower.peers.watch.links
    with pytest.raises(RuntimeError, match="gloo"), leader.peers.call(Op.STEP, 1, PLAN):
        threading.Timer(0.2, link.connection.shutdown, (socket.SHUT_RDWR,)).start()
        raise RuntimeError("gloo: connection reset by peer")
    assert "process 1 (127.0.0.1:" in leader.losses[0] and len(leader.losses) == 1
    assert "is lost: its connection closed" in leader.losses[0]


def test_a_connection_is_closed_whoever_notices_it(group, monkeypatch):
    leader, _ = group()

    def broken(*args, **options) -> None:
        raise BrokenPipeError("Broken pipe")

    monkeypatch.setattr(leader.peers.watch.links[0], "send", broken)
    with pytest.raises(HostsError, match="is lost: its connection closed"):
        leader.peers.stop()


def test_a_call_that_process_0_breaks_off_ends_all(group, monkeypatch):
    monkeypatch.setattr("jaxinfer.parallel.hosts.links.EXPLAIN_S", 0.0)
    leader, follower = group()
    with pytest.raises(MemoryError), leader.peers.call(Op.STEP, 1, PLAN):
        raise MemoryError("a page too many")
    assert "process 0 failed in a call that the others make" in leader.losses[0]
    until(lambda: follower.losses)


def test_ctrl_c_waits_for_the_end_of_a_call(group):
    leader, follower = group()
    with pytest.raises(KeyboardInterrupt), leader.peers.call(Op.STEP, 1, PLAN):
        signal.raise_signal(signal.SIGINT)
        made = True
    assert made and not leader.losses
    [call] = [next(follower.peers.calls())]
    assert call.number == 1


def test_an_error_of_a_device_names_the_process(group, monkeypatch):
    monkeypatch.setattr("jaxinfer.parallel.hosts.links.EXPLAIN_S", 0.0)
    leader, follower = group()
    runner = FakeRunner(follower.peers)

    def fail(bucket: int, packed: np.ndarray) -> None:
        raise RuntimeError("out of memory")

    runner.run_step = fail  # type: ignore[method-assign]
    with leader.peers.call(Op.STEP, 1, PLAN):
        pass
    with pytest.raises(HostsError, match="process 1 failed in a call of process 0: out of memory"):
        follow(runner, follower.peers)
