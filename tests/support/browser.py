"""The chat page in a real browser: Debian's Chromium, driven by Playwright, on the real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import Engine
from jaxinfer.serving.auth import ApiKeys
from jaxinfer.serving.config import LimitsConfig, ServingConfig
from jaxinfer.serving.health import Health, State
from jaxinfer.serving.http.app import build_app
from jaxinfer.serving.http.server import build_http_server
from jaxinfer.serving.metrics import Metrics
from jaxinfer.serving.service import Service
from tests.support.tiny_server import Brake, tiny_engine, tiny_service

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",  # tests may run as root, where Chromium's sandbox does not work
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_S = 60.0  # on a busy machine


class Site:
    """One server, and one tab that looks at it."""

    def __init__(self, service: Service, page: Any, url: str):
        self.service = service
        engine = service.loop.engine
        assert isinstance(engine, Engine)
        self.pool = engine.pool
        self.page = page
        self.url = url
        self.complaints: list[str] = []  # of the browser: broken rules of the page, exceptions
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._on_console)
        self.answer = page.locator(".answer").last
        self.prompt = page.locator("#prompt")

    def _on_console(self, message: Any) -> None:
        is_refusal = message.text.startswith("Failed to load resource")  # a status of 400 and up
        if message.type in ("error", "warning") and not is_refusal:
            self.complaints.append(message.text)

    async def open(self) -> None:
        await self.page.goto(self.url)

    async def settings(self, **values: object) -> None:
        """Type into the settings, which stand open beside the conversation."""
        for name, value in values.items():
            await self.page.locator(f"#set-{name}").fill(str(value))

    async def settings_by_script(self, **values: object) -> None:
        """The same where they are out of sight: on a phone they are a sheet."""
        put = "(node, value) => { node.value = value; node.dispatchEvent(new Event('input')); }"
        for name, value in values.items():
            await self.page.locator(f"#set-{name}").evaluate(put, str(value))

    async def post(self, text: str) -> None:
        await self.prompt.fill(text)
        await self.prompt.press("Enter")

    async def ask_for_much(self) -> None:
        """A question whose likeliest answer is long; returns when some of it is there."""
        await self.settings_by_script(temperature=0, max_completion_tokens="")
        await self.post("Tell me everything.")
        await self.first_text()

    async def first_text(self) -> None:
        """Wait until some of the answer is there."""
        await self.page.locator(".answer p, .answer pre").last.wait_for()

    async def done(self) -> None:
        await self.page.locator("#send").wait_for()

    async def pages_are_free(self) -> None:
        while self.pool.num_owned or self.service.loop.num_streams:
            await asyncio.sleep(0.005)

    async def turns(self) -> list[dict[str, Any]]:
        """What the page keeps of the conversation: question, answer, end, figures."""
        return json.loads(await self.page.evaluate("sessionStorage.getItem('jaxinfer.turns')"))

    async def fakes(self, path: str, body: str, status: int = 200, **headers: str) -> None:
        """Let the browser find this at `path`, whatever the server says."""
        kind = headers.pop("content_type", "application/json")

        async def answer(route: Any) -> None:
            await route.fulfill(status=status, body=body, content_type=kind, headers=headers)

        await self.page.route(f"**{path}", answer)

    async def fakes_answer(self, *pieces: str, end: str = "data: [DONE]\n\n") -> None:
        """A model that says this, whatever it is asked."""
        chunks = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end
        await self.fakes("/v1/chat/completions", body, content_type="text/event-stream")


class Bench:
    """One event loop, engine and Chromium for the tests of a module."""

    def __init__(self, runner: asyncio.Runner):
        self._runner = runner
        self.engine = tiny_engine()[0]
        self.browser: Any = None

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(3 * WAIT_S):
                await coroutine

        self._runner.run(bounded())

    @contextlib.contextmanager
    def brake(self, seconds: float = 0.0) -> Iterator[Brake]:
        brake = Brake(self.engine, seconds)
        try:
            yield brake
        finally:
            brake.release()
            del self.engine.step  # the instance's own: the class's is back

    @contextlib.asynccontextmanager
    async def site(
        self, *, keys: ApiKeys | None = None, limits: LimitsConfig | None = None, **options: Any
    ) -> AsyncIterator[Site]:
        """A server and a fresh browser profile; `options` are the profile's: viewport, colours."""
        config = ServingConfig(http_port=0, grpc_port=None, limits=limits or LimitsConfig())
        health = Health()
        metrics = Metrics(health)
        options.setdefault("viewport", {"width": 1280, "height": 800})
        async with tiny_service(self.engine, limits, observers=(metrics.observer,)) as service:
            metrics.watch(service.loop, service.model.name)
            app = build_app(service, config, keys, health, metrics)
            server = build_http_server(app, config)
            port = await server.start()
            health.set(State.SERVING)
            context = await self.browser.new_context(**options)
            context.set_default_timeout(WAIT_S * 1000)
            try:
                site = Site(service, await context.new_page(), f"http://127.0.0.1:{port}/")
                yield site
            finally:
                await context.close()
                await server.stop(1.0)
        assert not site.complaints


@contextlib.contextmanager
def open_bench() -> Iterator[Bench]:
    """A bench, or a skip that says what is missing."""
    playwright = pytest.importorskip("playwright.async_api", exc_type=ImportError)
    if not CHROMIUM.is_file():
        pytest.skip(f"no {CHROMIUM}; on Debian: apt-get install chromium")

    with asyncio.Runner() as runner:
        bench = Bench(runner)

        async def start() -> Any:
            driver = await playwright.async_playwright().start()
            launch = driver.chromium.launch
            bench.browser = await launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
            return driver

        async def stop(driver: Any) -> None:
            await bench.browser.close()
            await driver.stop()

        driver = runner.run(start())
        try:
            yield bench
        finally:
            runner.run(stop(driver))
