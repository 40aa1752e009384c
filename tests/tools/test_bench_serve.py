"""The load client against a server that each test scripts."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable
from typing import Any

import pytest

from jaxinfer.tools.load_client import http, load, record, workload
from tests.support.fake_openai import Exchange, FakeServer, answers
from tests.support.paths import SCRIPTS

LoadJob, PromptMaker, Record = workload.LoadJob, workload.PromptMaker, record.Record


def run(coroutine: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await coroutine

    asyncio.run(bounded())


def client_of(server: FakeServer, api: str = "completions") -> Any:
    return http.HttpClient(server.url, api, model="fake")


async def one(client: Any, answer_in_s: float = 10.0) -> Any:
    """Send one request, close, and return the record."""
    result = await load.run_load(client, [LoadJob("a", 4, 0.0)], timeout_s=answer_in_s)
    await client.close()
    return result.records[0]


def test_tokens_are_timed_on_arrival():
    now = 0.0
    seen = Record(0, 0.0)

    async def answer(exchange: Exchange) -> None:
        nonlocal now
        exchange.start()
        exchange.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number, when in enumerate((0.5, 0.75, 1.5)):
            now = when
            exchange.event({"choices": [{"delta": {"content": "x"}}]})
            while len(seen.times) <= number:
                await asyncio.sleep(0.001)
        exchange.end(7, 5)

    async def main() -> None:
        async with FakeServer(answer) as server:
            client = client_of(server, "chat")
            await client.send(LoadJob("hello", 5), seen, lambda: now)
            await client.close()
            assert seen.times == [0.5, 0.75, 1.5]  # the role alone is no token
            assert seen.gaps_s == [0.25, 0.75] and seen.ttft_s == 0.5
            assert (seen.prompt_tokens, seen.output_tokens) == (7, 5)
            assert seen.token_s == pytest.approx(1.0 / 4)
            body = server.seen[0].body
            assert body["messages"] == [{"role": "user", "content": "hello"}]
            assert body["stream"] is True and body["max_tokens"] == 5

    run(main())


def test_sending_does_not_wait_for_answers():
    async def main() -> None:
        count = 20
        everybody = asyncio.Event()

        async def answer(exchange: Exchange) -> None:
            if len(server.seen) == count:
                everybody.set()
            await everybody.wait()  # nobody is answered before everybody has asked
            await answers("x")(exchange)

        async with FakeServer(answer) as server:
            client = client_of(server)
            jobs = [LoadJob("a", 1, 0.002 * i) for i in range(count)]
            result = await load.run_load(client, jobs, timeout_s=20)
            await client.close()
            assert len(result.answered) == count
            assert all(r.sent >= r.scheduled for r in result.records)
            last = max(r.sent for r in result.records)
            assert all(r.times[0] >= last for r in result.records)

    run(main())


def test_closed_loop_clients_send_one_request_at_a_time_on_kept_connections():
    async def main() -> None:
        under_way = most = 0

        async def answer(exchange: Exchange) -> None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.002)
            under_way -= 1
            await answers("x", "y")(exchange)

        async with FakeServer(answer) as server:
            client = client_of(server)
            jobs = [LoadJob("a", 2)] * 30
            await client.open(3)
            result = await load.run_load(client, jobs, timeout_s=20, clients=3)
            await client.close()
            assert len(result.answered) == 30 and most == 3
            assert server.num_connections == 3

    run(main())


def test_closed_idle_connection_is_reopened():
    async def answer(exchange: Exchange) -> None:
        await answers("x")(exchange)
        raise ConnectionResetError  # closes, without having said so

    async def main() -> None:
        async with FakeServer(answer) as server:
            client = client_of(server)
            result = await load.run_load(client, [LoadJob("a", 1)] * 5, timeout_s=20, clients=1)
            await client.close()
            assert [r.error for r in result.records] == [None] * 5

    run(main())


async def _refuse(exchange: Exchange) -> None:
    exchange.reply("429 Too Many Requests", '{"error": {"message": "full"}}', "Retry-After: 1\r\n")


async def _break_off(exchange: Exchange) -> None:
    exchange.start()
    exchange.text("x")
    exchange.cut()


async def _fail_in_stream(exchange: Exchange) -> None:
    exchange.start()
    exchange.event({"error": {"type": "server_error", "message": "the engine has stopped"}})
    exchange.event("[DONE]")
    exchange.finish()


async def _stop_short(exchange: Exchange) -> None:
    exchange.start()
    exchange.text("x")
    exchange.finish()


async def _talk_rubbish(exchange: Exchange) -> None:
    exchange.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")


async def _no_json(exchange: Exchange) -> None:
    exchange.start()
    exchange.event("{")


async def _no_stream(exchange: Exchange) -> None:
    exchange.reply("200 OK", '{"choices": []}', "Content-Type: application/json\r\n")


async def _say_nothing(exchange: Exchange) -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("answer", "error", "detail"),
    [
        (_refuse, "HTTP 429", "full"),
        (_break_off, "disconnected", ""),
        (_fail_in_stream, "in the stream: server_error", "the engine has stopped"),
        (_stop_short, "incomplete", "[DONE]"),
        (_talk_rubbish, "bad reply", ""),
        (_no_json, "bad reply", ""),
        (_no_stream, "no stream", "choices"),
        (_say_nothing, "timeout", "0.2 s"),
    ],
)
def test_errors_are_recorded_by_kind(answer, error, detail):
    async def main() -> None:
        async with FakeServer(answer) as server:
            result = await one(client_of(server), 0.2 if error == "timeout" else 10)
            assert result.error == error and detail in result.detail
            assert result.end >= result.sent

    run(main())


def test_missing_server_is_recorded():
    async def main() -> None:
        async with FakeServer(answers()) as server:
            client = client_of(server)
        assert (await one(client)).error == "disconnected"

    run(main())


def test_timeout_closes_the_connection():
    async def main() -> None:
        async with FakeServer(_say_nothing) as server:
            client = client_of(server)
            result = await load.run_load(client, [LoadJob("a", 1)] * 2, timeout_s=0.05, clients=1)
            assert [r.error for r in result.records] == ["timeout"] * 2
            assert server.num_connections == 2  # none with an answer still to come is used again
            await client.close()

    run(main())


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_replies_are_read_in_pieces_of_any_size(size):
    body = b": a comment\n\ndata: one\n\ndata: two\r\ndata:lines\r\n\r\nevent: x\ndata: [DONE]\n\n"
    chunks = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(p), p) for p in (body[:40], body[40:]))
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    data = head + chunks + b"0\r\nTrailer: x\r\n\r\n"

    async def main() -> None:
        events: list[bytes] = []

        class Transport(asyncio.Transport):
            def write(self, data: Any) -> None: ...
            def is_closing(self) -> bool:
                return False

        connection = http.Connection()
        connection.connection_made(Transport())
        reader = http.EventReader(events.append)
        exchange = connection.exchange(b"", lambda status, headers: reader.feed)
        task = asyncio.create_task(exchange)
        await asyncio.sleep(0)
        for start in range(0, len(data), size):
            assert not task.done()
            connection.data_received(data[start : start + size])
        await task
        assert events == [b"one", b"two\nlines", b"[DONE]"]
        assert connection.can_be_reused

    run(main())


def test_trace_is_sent_as_written(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"at": 0.02, "prompt_tokens": 5, "max_tokens": 7},
        {"at": 0.0, "prompt": "as it stands", "max_tokens": 2},
        {"at": 0.01, "prompt": [5, 6], "max_tokens": 3},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    jobs = workload.read_trace(path, PromptMaker(0))
    assert [job.at for job in jobs] == [0.0, 0.01, 0.02]
    assert [job.max_tokens for job in jobs] == [2, 3, 7]

    async def main() -> None:
        async with FakeServer(answers("x")) as server:
            client = client_of(server)
            result = await load.run_load(client, jobs, timeout_s=10)
            await client.close()
            assert [r.scheduled for r in result.records] == [0.0, 0.01, 0.02]
            assert all(r.sent >= r.scheduled for r in result.records)
            prompts = {e.body["max_tokens"]: e.body["prompt"] for e in server.seen}
            assert prompts[2] == "as it stands" and prompts[3] == [5, 6]
            assert len(prompts[7].split()) == 5

    run(main())


def test_client_processes_share_a_load():
    async def main() -> None:
        async with FakeServer(answers("x", "y")) as server:
            target = load.Endpoint("completions", server.url, "fake", "secret", {"top_k": 5})
            jobs = [LoadJob("a", 2 + i, 0.01 * i) for i in range(7)]
            result = await asyncio.to_thread(
                load.load_in_processes, target, jobs, timeout_s=10, processes=2
            )
            assert [r.index for r in result.records] == list(range(7))
            assert [r.scheduled for r in result.records] == [job.at for job in jobs]
            assert len(result.answered) == 7 and len(result.cpu_shares) == 2
            assert all(exchange.body["top_k"] == 5 for exchange in server.seen)
            assert sorted(e.body["max_tokens"] for e in server.seen) == list(range(2, 9))

    run(main())


def test_command_prints_writes_and_draws(tmp_path):
    async def answer(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            exchange.reply("200 OK", '{"data": [{"id": "first"}, {"id": "second"}]}')
        elif exchange.body["max_tokens"] == 3:
            await _refuse(exchange)
        else:
            await answers("x", "y")(exchange)

    async def main() -> None:
        lines = [{"at": 0.01 * i, "prompt_tokens": 4, "max_tokens": 2 + i % 2} for i in range(8)]
        (tmp_path / "trace").write_text("\n".join(map(json.dumps, lines)))
        flags = ["--arrivals=trace", f"--trace={tmp_path}/trace", "--warmup=1", "--ignore_eos"]
        flags += [f"--json={tmp_path}/out.json", f"--plot={tmp_path}/out.png"]
        async with FakeServer(answer) as server:
            process = await asyncio.create_subprocess_exec(
                *[sys.executable, f"{SCRIPTS}/bench_serve.py", f"--url={server.url}/v1", *flags],
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, error = await process.communicate()
            assert process.returncode == 0, error.decode()[-2000:]
            assert all(e.body["model"] == "first" for e in server.seen if e.body)
            assert all(e.body["ignore_eos"] for e in server.seen if e.body)
        assert "4 of 8 requests answered" in out.decode() and "error HTTP 429: 4" in out.decode()
        result = json.loads((tmp_path / "out.json").read_text())
        assert result["summary"]["errors"] == {"HTTP 429": 4} and len(result["records"]) == 8
        assert result["records"][0]["output_tokens"] == 2
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")

    run(main())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--case=fly"], "fly"),
        (["--url=http://x", "--grpc=y:1"], "--grpc"),
        (["--grpc=y:1", "--arrivals=trace"], "--trace"),
        (["--grpc=y:1", "--prompt_lens=zipf:2"], "zipf:2"),
        (["--url=http://x", "--model=m", "--api=chat", "--prompts=ids"], "--api=completions"),
    ],
)
def test_invalid_load_options_are_refused(flags, named):
    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, f"{SCRIPTS}/bench_serve.py", *flags],
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        assert process.returncode != 0 and named in out.decode()

    run(main())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--case=throughput", "--plot=x.png"], "--plot has no effect with --case"),
        (["--url=http://127.0.0.1:1", "--minutes=3"], "--minutes has no effect without --case"),
    ],
)
def test_ignored_option_is_refused(flags, named):
    command = [sys.executable, str(SCRIPTS / "bench_serve.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and named in done.stdout + done.stderr
