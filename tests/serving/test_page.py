"""The chat page in a real Chromium: typing, streaming, stopping, reloading."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from jaxinfer.serving.auth import ApiKeys
from jaxinfer.serving.config import LimitsConfig
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.generation import Chat, GenerationRequest
from tests.support.browser import Bench, Site, open_bench

pytestmark = pytest.mark.browser

KEY = "a-key-of-some-length"


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_bench() as bench:
        yield bench


async def whole_answer(site: Site, question: str, **fields: Any) -> str:
    """The server's text for the same conversation, without the page."""
    chat = Chat([{"role": "user", "content": question}])
    request = GenerationRequest(chat, site.service.params(fields))
    return (await (await site.service.generate(request)).collect()).samples[0].text


def test_page_shows_tokens_as_they_arrive_up_to_the_whole_text(bench):
    async def main():
        async with bench.site() as site:
            whole = await whole_answer(site, "Hello?", temperature=0, max_tokens=24)
            await site.open()
            await site.settings(temperature=0, max_completion_tokens=24)
            await site.page.evaluate(
                """() => {
                  window.seen = [];
                  const text = () => document.querySelector(".answer").textContent;
                  const look = () => window.seen.push(text());
                  const to = { childList: true, subtree: true, characterData: true };
                  new MutationObserver(look).observe(document.querySelector("#turns"), to);
                }"""
            )
            with bench.brake(0.03):
                await site.prompt.press_sequentially("Hello?")
                await site.page.keyboard.press("Enter")
                await site.done()
            seen = await site.page.evaluate("window.seen")
            texts = [text for text, _ in itertools.groupby(seen)]
            assert len(texts) >= 8, "shown as it comes"
            lengths = [len(text) for text in texts]
            assert lengths == sorted(lengths)
            [turn] = await site.turns()
            assert turn["answer"] == whole
            spoken = await site.page.locator("#spoken").text_content()
            assert spoken == whole, "who listens hears all of it, once"
            figures = await site.page.locator(".figures").text_content()
            for part in ("first token", "tokens/s", "24 tokens"):
                assert part in figures
            assert "about" not in figures

    bench.run(main())


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_button_keeps_the_text_and_frees_pages(bench, how):
    async def main():
        async with bench.site() as site:
            await site.open()
            with bench.brake(0.03):
                await site.ask_for_much()
                assert site.pool.num_owned > 0
                if how == "button":
                    await site.page.locator("#stop").click()
                else:
                    await site.page.keyboard.press("Escape")
                await site.pages_are_free()
            await site.done()
            assert await site.page.locator(".note").text_content() == "Stopped."
            [turn] = await site.turns()
            assert turn["answer"]
            assert await site.prompt.evaluate("node => node === document.activeElement")
            await site.settings(max_completion_tokens=3)
            await site.post("And now?")
            await site.done()
            assert (await site.turns())[1]["answer"]

    bench.run(main())


def test_reload_cancels_the_request_and_keeps_the_conversation(bench):
    async def main():
        async with bench.site() as site:
            await site.open()
            await site.settings(top_k=40, stop="###\\n")
            await site.page.locator("#system").fill("Be brief.")
            with bench.brake(0.03):
                await site.ask_for_much()
                await site.page.reload()
                await site.pages_are_free()
            assert await site.page.locator(".question").text_content() == "Tell me everything."
            assert await site.page.locator(".answer").text_content()
            assert "page was left" in await site.page.locator(".note").text_content()
            assert await site.page.locator("#set-top_k").input_value() == "40"
            assert await site.page.locator("#set-stop").input_value() == "###\\n"
            assert await site.page.locator("#system").input_value() == "Be brief."

    bench.run(main())


def test_closed_tab_frees_pages(bench):
    async def main():
        async with bench.site() as site:
            await site.open()
            with bench.brake(0.03):
                await site.ask_for_much()
                await site.page.close()
                await site.pages_are_free()

    bench.run(main())


def test_page_sends_the_conversation_and_the_changed_settings(bench):
    async def main():
        async with bench.site() as site:
            bodies: list[Any] = []
            site.page.on("request", lambda r: bodies.append(r.post_data_json or {}))
            await site.open()
            await site.settings(max_completion_tokens=4)
            await site.post("One")
            await site.done()
            await site.page.locator("#system").fill("Be brief.")
            await site.settings(
                temperature=0.5, top_p=0.9, top_k=7, min_p=0.05, seed=3, stop="###\n\\n\\n",
                presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1,
            )  # fmt: skip
            await site.post("Two")
            await site.done()
            first, second = [body for body in bodies if "messages" in body]
            assert first == {
                "model": "tiny",
                "messages": [{"role": "user", "content": "One"}],
                "stream": True,
                "stream_options": {"include_usage": True},
                "max_completion_tokens": 4,
            }
            answer = (await site.turns())[0]["answer"]
            assert second.pop("messages") == [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "One"},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": "Two"},
            ]
            del second["model"], second["stream"], second["stream_options"]
            assert second == {
                "max_completion_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 7,
                "min_p": 0.05, "seed": 3, "stop": ["###", "\n\n"], "presence_penalty": 0.5,
                "frequency_penalty": -0.5, "repetition_penalty": 1.1,
            }  # fmt: skip
            assert (await site.turns())[1]["end"].get("problem") is None

    bench.run(main())


def test_page_stats_follow_the_server_while_visible(bench):
    async def main():
        async with bench.site() as site:
            polls: list[Any] = []
            site.page.on("request", lambda r: polls.append(r) if "/v1/stats" in r.url else None)
            await site.open()
            total = f" / {bench.engine.stats.num_pages}"
            await site.page.locator("#pages-total", has_text=total).wait_for()
            assert await site.page.locator("#model-name").text_content() == "tiny"
            with bench.brake(0.03) as brake:
                await site.ask_for_much()
                brake.hold()
                await site.page.locator("#running", has_text="1").wait_for()
                assert int(await site.page.locator("#pages").text_content()) > 0
                brake.release()
                await site.page.keyboard.press("Escape")
                await site.page.locator("#running", has_text="0").wait_for()
            await site.page.evaluate(
                """() => {
                  Object.defineProperty(document, "visibilityState", { get: () => "hidden" });
                  document.dispatchEvent(new Event("visibilitychange"));
                }"""
            )
            num_polls = len(polls)
            assert num_polls >= 3
            await asyncio.sleep(1.5)
            assert len(polls) == num_polls, "nobody looks: nothing is asked"

    bench.run(main())


MARKUP = (
    'Look: <img src=x onerror="window.broken = 1">',
    "\n\n<script>window.broken = 2</script>",
    "\n```html\n<iframe srcdoc='<script>parent.broken = 3</script>'></iframe>\n```\n",
    '**<b onclick="window.broken = 4">bold</b>** and `<svg onload="window.broken = 5">`',
)


def test_page_never_renders_text_as_markup(bench):
    async def main():
        async with bench.site() as site:
            page = site.page
            image = '<img src=x onerror="window.broken = 6">'
            models = {"data": [{"id": image}]}
            await site.fakes("/v1/models", json.dumps(models))
            await site.fakes_answer(*MARKUP)
            await site.open()
            await site.post(image)
            await site.done()
            await page.reload()  # drawn again from what was kept
            await page.locator("#model-name", has_text=image).wait_for()
            assert await page.locator(".question").text_content() == image
            shown = await page.locator(".answer").text_content()
            for piece in MARKUP:
                for line in piece.replace("**", "").replace("`", "").split("\n"):
                    assert line in shown or line == "html"
            await page.unroute("**/v1/chat/completions")
            error = {"message": image, "type": "invalid_request_error", "param": None}
            await site.fakes("/v1/chat/completions", json.dumps({"error": error}), 400)
            await site.post("And errors?")
            await site.done()
            assert image in await page.locator(".problem:visible").text_content()
            assert await page.evaluate("window.broken") is None
            strange = page.locator("main :is(img, script, iframe, b, a, [onclick], [onerror])")
            assert await strange.count() == 0
            kinds = await page.locator(".answer pre code, .answer strong, .answer p code").count()
            assert kinds == 3, "code and bold are shown as such"

    bench.run(main())


async def problem_of(site: Site) -> str:
    await site.post("Hello?")
    await site.done()
    return await site.page.locator(".problem:visible").last.inner_text()


def test_page_asks_for_a_key_and_keeps_it_in_the_tab(bench, tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"ada:{KEY}\n")
    path.chmod(0o600)

    async def main():
        async with bench.site(keys=ApiKeys.from_file(str(path))) as site:
            page = site.page
            await site.open()
            await page.locator("#model-name", has_text="API key needed").wait_for()
            assert "asks for an API key" in await page.locator("#notice").inner_text()
            assert "asks for an API key" in await problem_of(site)
            await page.locator(".problem:visible").get_by_role("button", name="Enter").click()
            await page.keyboard.type("a-wrong-key-of-some-length")
            await page.keyboard.press("Enter")
            assert "does not know this API key" in await problem_of(site)
            await page.locator("#key").fill(KEY)
            await page.locator("#key").press("Enter")
            await page.locator("#model-name", has_text="tiny").wait_for()
            await site.settings(max_completion_tokens=3)
            await page.get_by_role("button", name="Try again").click()
            await site.done()
            assert (await site.turns())[-1]["answer"]
            kept = await page.evaluate("({...sessionStorage})")
            assert [name for name, value in kept.items() if KEY in value] == ["jaxinfer.key"]
            assert await page.evaluate("localStorage.length + document.cookie.length") == 0
            assert KEY not in page.url

    bench.run(main())


def test_page_explains_refusals_in_words(bench):
    async def main():
        async with bench.site(limits=LimitsConfig(max_waiting=0)) as site:
            await site.open()
            with bench.brake() as brake:
                brake.hold()
                fields = {"n": 4, "temperature": 1.0, "max_tokens": 4}
                request = GenerationRequest("full", site.service.params(fields))
                stream = await site.service.generate(request)
                assert "busy" in await problem_of(site)
                again = site.page.get_by_role("button", name="Try again")
                assert await again.is_disabled() and " s" in await again.inner_text()
                brake.release()
                await stream.collect()
            await site.settings(max_completion_tokens=3)
            await again.click()  # waits until it may
            await site.done()
            assert (await site.turns())[-1]["answer"]

            await site.settings(temperature=-1)
            assert "temperature" in await problem_of(site)
            field = site.page.locator("#set-temperature")
            assert await field.get_attribute("aria-invalid") == "true"
            await site.settings(temperature="")

            site.service.loop.is_draining = True
            assert "shutting down" in await problem_of(site)
            site.service.loop.is_draining = False
            bodies: list[Any] = []
            site.page.on("request", lambda r: bodies.append(r.post_data_json or {}))
            await site.page.get_by_role("button", name="Try again").click()
            await site.done()
            [sent] = [body for body in bodies if "messages" in body]
            roles = [message["role"] for message in sent["messages"]]
            assert roles == ["user", "assistant", "user"], "what was refused is no part of it"

    bench.run(main())


def test_page_reports_a_broken_stream_and_keeps_the_text(bench):
    async def main():
        async with bench.site() as site:
            page = site.page
            await site.open()
            with bench.brake(0.03):
                await site.ask_for_much()
                [stream] = site.service.loop._streams.values()
                error = ServiceError(ErrorKind.UNAVAILABLE, "the lights went out")
                site.service.loop.end(stream, error)
                await site.done()
            text = await page.locator(".problem:visible").inner_text()
            assert "broke off" in text and "the lights went out" in text
            assert (await site.turns())[0]["answer"]

            await site.fakes_answer("Half an", end="")
            assert "connection was lost" in await problem_of(site)
            assert await site.answer.text_content() == "Half an"
            await page.route("**/v1/chat/completions", lambda route: route.abort())
            assert "cannot be reached" in await problem_of(site)

    bench.run(main())


def test_new_chat_can_be_undone(bench):
    async def main():
        async with bench.site() as site:
            await site.fakes_answer("Well, ", "hello.")
            await site.open()
            await site.page.get_by_role("button", name="Why is the sky blue?").click()
            await site.done()
            await site.page.locator("#new-chat").click()
            assert await site.page.locator("article").count() == 0
            assert await site.page.locator("#welcome").is_visible()
            await site.page.get_by_role("button", name="Undo").click()
            assert await site.answer.text_content() == "Well, hello."

    bench.run(main())
