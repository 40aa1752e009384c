"""The channel between the processes of one engine, and the detection of lost ones.

The processes are threads here; tests/parallel/test_hosts.py runs real ones.
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
from typing import Any, NamedTuple

import numpy as np
import pytest
from absl import logging

from jaxinfer.engine.recovery import recovering
from jaxinfer.parallel.hosts import ALONE, HostsError, follow, messages
from jaxinfer.parallel.hosts.channel import Link, LinkMonitor
from jaxinfer.parallel.hosts.handshake import ProcessInfo, accept_all, connect, listen
from jaxinfer.parallel.hosts.messages import Message, Op, decode_frames, encode_frame
from jaxinfer.parallel.hosts.peers import Follower, Leader

FACTS = {"jaxinfer": "0.1.0", "jax": "0.10.2"}
PLAN = np.arange(512, dtype=np.int32)  # 2 KiB, the size of a decode step's plan


class Member(NamedTuple):
    peers: Any
    losses: list[str]  # the texts passed to `on_lost`


class FakeRunner:
    """Records the calls made."""

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


def connect_group(
    num_processes: int = 2, *, check_steps: int = 4, heartbeat_timeout_s: float = 10.0
) -> list[Member]:
    """Connect the members of a group over loopback; process 0 first."""
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()[:2]
    with ThreadPoolExecutor(num_processes) as pool, listener:
        leading = pool.submit(accept_all, listener, num_processes, b"k", FACTS, 10.0)
        infos = [ProcessInfo(i, num_processes, FACTS) for i in range(1, num_processes)]
        joining = [pool.submit(connect, address, info, key=b"k", timeout_s=10.0) for info in infos]
        all_links = [leading.result(), *[[future.result()] for future in joining]]
    members = []
    for i, links in enumerate(all_links):
        monitor, losses = LinkMonitor(links, heartbeat_timeout_s), []
        monitor.on_lost = losses.append
        monitor.start()
        cls = Follower if i else Leader
        members.append(Member(cls(monitor, i, num_processes, check_steps), losses))
    return members


@pytest.fixture
def group() -> Iterator[Callable[..., list[Member]]]:
    made: list[Member] = []

    def make(*args, **options) -> list[Member]:
        made.extend(members := connect_group(*args, **options))
        return members

    yield make
    for member in made:
        member.peers.monitor.close(timeout_s=0.1)


def run_together(*functions: Callable[[], Any]) -> list[Any]:
    """Run all functions at the same time; return the result or error of each."""
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(function) for function in functions]
        return [future.exception() or future.result() for future in futures]


def wait_for(condition: Callable[[], Any], seconds: float = 5.0) -> float:
    """Wait until the condition is true; return the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "the condition did not become true"
        time.sleep(0.005)
    return time.monotonic() - start


def test_call_round_trips_through_frames():
    arrays = [
        PLAN,
        np.zeros((0, 3), np.float32),
        np.array(7, np.uint32),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([True, False]),
    ]
    stream = bytearray(
        encode_frame(Op.STEP, messages.pack_call(-3, arrays)) + encode_frame(Op.HEARTBEAT) + b"\x05"
    )
    call, heartbeat = decode_frames(stream, 1)
    assert (heartbeat.op, heartbeat.process_id, stream) == (Op.HEARTBEAT, 1, b"\x05")
    op, number, received = messages.unpack_call(call)
    assert (op, number, len(received)) == (Op.STEP, -3, len(arrays))
    for sent, got in zip(arrays, received, strict=True):
        assert got.dtype == sent.dtype and got.flags.aligned and got.flags.owndata
        np.testing.assert_array_equal(got, sent)


def test_step_number_exceeds_32_bits():
    check = Message(Op.CHECK, messages.pack_call(2**31 + 5, [PLAN]), 0)
    assert messages.unpack_call(check).number == 2**31 + 5


@pytest.mark.parametrize(
    "head", [encode_frame(Op.HEARTBEAT)[:4] + b"\xff", b"\0\0\0\0\1", b"GET / HT"]
)
def test_invalid_frame_is_refused(head):
    with pytest.raises(ValueError, match="a frame of"):
        decode_frames(bytearray(head), 1)
    assert int.from_bytes(b"GET ", "little") > messages.MAX_FRAME_BYTES


def test_array_of_objects_is_refused():
    payload = messages.pack_call(0, [np.zeros(1, np.int64)]).replace(b"<i8", b"|O\0")
    with pytest.raises((ValueError, TypeError)):
        messages.unpack_call(Message(Op.STEP, payload, 0))


def test_followers_repeat_the_calls_of_process_0(group):
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
    assert run_together(lead, *jobs) == [None, None, None]
    assert len(runners[0].calls) == 9
    assert runners[1].calls == runners[2].calls == runners[0].calls
    assert not any(member.losses for member in members)


def test_plan_arrives_within_milliseconds(group):
    leader, follower = group()
    sent, took = [], []

    def lead() -> None:
        for _ in range(200):
            sent.append(time.perf_counter())
            with leader.peers.call(Op.STEP, 8, PLAN):
                time.sleep(0.001)
        leader.peers.stop()

    def repeat() -> None:
        for i, call in enumerate(follower.peers.calls()):
            took.append(time.perf_counter() - sent[i])
            with follower.peers.call(*call[:2], *call.arrays):
                pass

    assert run_together(lead, repeat) == [None, None]
    print(f"a plan of {PLAN.nbytes} bytes took {statistics.median(took) * 1e6:.0f} us")
    assert statistics.median(took) < 20e-3  # measured: 0.2 ms, on a busy machine longer


@pytest.mark.parametrize("what", ["bytes", "lost", "bucket"])
def test_differing_call_is_detected_at_the_next_check(what, group):
    leader, follower = group(check_steps=4)
    runner = FakeRunner(follower.peers)

    def lead() -> None:
        for _ in range(4):
            with leader.peers.call(Op.STEP, 8, PLAN):
                pass

    def repeat() -> None:
        for i, (_, number, arrays) in enumerate(follower.peers.calls()):
            if i == 2 and what == "lost":
                continue
            if i == 2 and what == "bytes":
                arrays[0][17] += 1
            runner.run_step(16 if i == 2 and what == "bucket" else number, *arrays)

    done, error = run_together(lead, repeat)
    assert done is None and isinstance(error, HostsError)
    step = 3 if what == "lost" else 4
    assert "process 1 is out of step with process 0: after step 4 of process 0" in str(error)
    assert f"here, after step {step}" in str(error)
    follower.peers.fail(error)
    wait_for(lambda: leader.losses)
    assert leader.losses[0].startswith("process 1 (127.0.0.1:")
    assert "ended: HostsError: process 1 is out of step" in leader.losses[0]


def test_page_count_is_the_smallest_of_all_processes(group):
    members = group(3)
    agree = lambda member, n: lambda: member.peers.agree_on_pages({"a": "1"}, n)
    jobs = [agree(member, n) for member, n in zip(members, (90, 70, 80), strict=True)]
    assert run_together(*jobs) == [70, 70, 70]
    assert run_together(*[member.peers.wait_until_ready for member in members]) == [None] * 3
    assert ALONE.agree_on_pages({"a": "1"}, 5) == 5


def test_differing_fact_is_named_by_all_processes(group):
    members = group(3)
    facts = [{"config.mesh.tensor": n, "max_model_len": "64"} for n in ("8", "8", "4")]
    jobs = [
        lambda m=m, f=f: m.peers.agree_on_pages(f, 5) for m, f in zip(members, facts, strict=True)
    ]
    for error in run_together(*jobs):
        assert isinstance(error, HostsError)
        assert "config.mesh.tensor is 8 in process 0 and 4 in process 2" in str(error)


@pytest.mark.parametrize("lost", [0, 1])
def test_closed_connection_ends_the_other_processes(lost, group):
    members = group(3)
    for link in members[lost].peers.monitor.links:  # as for a killed process
        link.connection.shutdown(socket.SHUT_RDWR)
    for i, member in enumerate(members):
        if i != lost:
            assert wait_for(lambda m=member: m.losses) < 2
    neighbor = members[1 - lost]
    assert f"process {lost} (127.0.0.1:" in neighbor.losses[0]
    assert "is lost: its connection closed" in neighbor.losses[0]
    # Process 2 is connected to process 0 alone, which tells it.
    assert f"process {lost} (127.0.0.1:" in members[2].losses[0]
    with (
        pytest.raises(HostsError, match=f"process {lost} .* is lost"),
        neighbor.peers.call(Op.STEP, 1),
    ):
        pass
    with pytest.raises(HostsError, match="is lost"):
        neighbor.peers.wait_until_ready()


@pytest.mark.parametrize("is_silent", [True, False])
def test_silent_process_is_lost_unless_it_sends_heartbeats(is_silent, group, monkeypatch):
    leader, follower = group(heartbeat_timeout_s=0.5)
    if is_silent:
        monkeypatch.setattr(follower.peers.monitor, "_send_heartbeats", lambda: None)
        assert 0.3 < wait_for(lambda: leader.losses) < 3
        assert "nothing has come from it for 0." in leader.losses[0]
        assert "(heartbeat_timeout_s is 0.5)" in leader.losses[0]
    else:
        time.sleep(1.2)
        assert not leader.losses and not follower.losses


def test_suspended_monitor_reports_no_loss(group, monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: warnings.append(text % values))
    leader, follower = group(heartbeat_timeout_s=0.5)
    monitor = leader.peers.monitor
    read, pauses = monitor._read, [1.5]

    def paused_read(link: Link) -> bool:
        has_more = read(link)
        if pauses:
            time.sleep(pauses.pop())  # like SIGSTOP
        return has_more

    monkeypatch.setattr(monitor, "_read", paused_read)
    monkeypatch.setattr(follower.peers.monitor, "_timeout_s", 60.0)
    wait_for(lambda: warnings)
    time.sleep(0.7)
    assert not leader.losses and not follower.losses
    assert (
        "this process stood still for 1." in warnings[0]
        and "heartbeat_timeout_s is 0.5" in warnings[0]
    )
    assert len(warnings) == 1


@pytest.mark.parametrize("error", [HostsError("process 1 is lost"), RuntimeError("gloo")])
def test_engine_reports_only_the_lost_process(error):
    """No further error follows it, whether the step or the recovery notices the loss."""
    recovered: list[bool] = []

    def recover() -> None:
        recovered.append(True)
        raise HostsError("process 1 is lost")

    with (
        pytest.raises(HostsError, match="process 1 is lost") as caught,
        recovering(recover),
    ):
        raise error
    printed = "".join(traceback.format_exception(caught.value))
    assert "During handling of the above exception" not in printed
    assert recovered == ([] if isinstance(error, HostsError) else [True])


def test_orderly_close_is_no_loss(group):
    leader, follower = group()
    done = run_together(
        lambda: (leader.peers.stop(), leader.peers.close()),
        lambda: (follow(FakeRunner(follower.peers), follower.peers), follower.peers.close()),
    )
    assert done == [(None, None)] * 2
    assert not leader.losses and not follower.losses


def test_error_of_one_process_reaches_all(group):
    members = group(3)
    members[1].peers.fail(ValueError("layer 3 is missing"))
    wait_for(lambda: members[0].losses and members[2].losses)
    assert "process 1 (127.0.0.1:" in members[0].losses[0]
    assert "ended: ValueError: layer 3 is missing" in members[0].losses[0]
    assert "ended: ValueError: layer 3 is missing" in members[2].losses[0]


def test_broken_collective_is_attributed_to_the_lost_process(group):
    leader, follower = group()
    [link] = follower.peers.monitor.links
    with pytest.raises(RuntimeError, match="gloo"), leader.peers.call(Op.STEP, 1, PLAN):
        threading.Timer(0.2, link.connection.shutdown, (socket.SHUT_RDWR,)).start()
        raise RuntimeError("gloo: connection reset by peer")
    assert "process 1 (127.0.0.1:" in leader.losses[0] and len(leader.losses) == 1
    assert "is lost: its connection closed" in leader.losses[0]


def test_closed_connection_is_reported_by_a_failing_send(group, monkeypatch):
    leader, _ = group()

    def broken(*args, **options) -> None:
        raise BrokenPipeError("Broken pipe")

    monkeypatch.setattr(leader.peers.monitor.links[0], "send", broken)
    with pytest.raises(HostsError, match="is lost: its connection closed"):
        leader.peers.stop()


def test_failed_call_in_process_0_ends_all(group, monkeypatch):
    monkeypatch.setattr("jaxinfer.parallel.hosts.channel.FAILURE_REPORT_S", 0.0)
    leader, follower = group()
    with pytest.raises(MemoryError), leader.peers.call(Op.STEP, 1, PLAN):
        raise MemoryError("a page too many")
    assert "process 0 failed in a call that the others make" in leader.losses[0]
    wait_for(lambda: follower.losses)


def test_ctrl_c_is_deferred_to_the_end_of_a_call(group):
    leader, follower = group()
    with pytest.raises(KeyboardInterrupt), leader.peers.call(Op.STEP, 1, PLAN):
        signal.raise_signal(signal.SIGINT)
        made = True
    assert made and not leader.losses
    [call] = [next(follower.peers.calls())]
    assert call.number == 1


def test_device_error_names_the_process(group, monkeypatch):
    monkeypatch.setattr("jaxinfer.parallel.hosts.channel.FAILURE_REPORT_S", 0.0)
    leader, follower = group()
    runner = FakeRunner(follower.peers)

    def fail(bucket: int, packed: np.ndarray) -> None:
        raise RuntimeError("out of memory")

    runner.run_step = fail  # type: ignore[method-assign]
    with leader.peers.call(Op.STEP, 1, PLAN):
        pass
    with pytest.raises(HostsError, match="process 1 failed in a call of process 0: out of memory"):
        follow(runner, follower.peers)
