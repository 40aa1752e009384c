"""Accessibility of the chat page (keyboard, phones, contrast), and its one static file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxinfer.serving
from tests.support.browser import Bench, Site, open_bench

PAGE = Path(jaxinfer.serving.__file__).parent / "page" / "index.html"
PHONE = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True}

# Text nodes that show, with colours; a background is the nearest one that is not transparent.
COLOURS = """() => {
  const solid = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
    return getComputedStyle(document.body).backgroundColor;
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const isField = node.matches("input, textarea");
    const isText = [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!(isText || isField) || !node.checkVisibility() || node.closest(".unseen")) continue;
    const style = getComputedStyle(node, isField ? "::placeholder" : null);
    found.push([node.id || node.className || node.tagName, style.color, solid(node)]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_bench() as bench:
        yield bench


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)` (WCAG 2.2)."""
    levels = [int(level) / 255 for level in re.findall(r"\d+", colour)[:3]]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in levels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_formula_is_that_of_wcag():
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgb(119, 119, 119)", "rgb(255, 255, 255)") == pytest.approx(4.48, abs=0.01)


async def fill(site: Site) -> None:
    """Show a conversation with every kind of element: code, a wide word, stats, an error."""
    pieces = ("# A title\n\nSome `code` in **bold** text, and\n```\n" + "wide " * 60 + "\n```\n",)
    await site.fakes_answer(*pieces, "long" * 60)
    await site.post("question" * 20)
    await site.done()
    await site.page.unroute("**/v1/chat/completions")
    await site.settings_by_script(temperature=-1)
    await site.post("Hello?")
    await site.done()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_contrast_suffices_in_light_and_dark(bench, scheme):
    async def main():
        async with bench.site(color_scheme=scheme) as site:
            await site.open()
            welcome = await site.page.evaluate(COLOURS)
            await fill(site)
            found = welcome + await site.page.evaluate(COLOURS)
            assert len(found) > 60
            weak = [(name, *pair) for name, *pair in found if contrast(*pair) < 4.5]
            assert not weak
            paper = await site.page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (luminance(paper) > 0.5) == (scheme == "light")

    bench.run(main())


@pytest.mark.browser
def test_page_fits_a_phone_without_horizontal_scrolling(bench):
    async def main():
        async with bench.site(**PHONE) as site:
            page = site.page
            await site.open()
            await page.locator("#pages-total", has_text="/").wait_for()
            await is_narrow(page, "html")
            await fill(site)
            await page.locator(".problem:visible").wait_for()
            for selector in ("html", "#scroller", "#figures dl", "header"):
                await is_narrow(page, selector)
            for button in await page.get_by_role("button").all():
                box = await button.bounding_box()
                assert box is None or min(box["width"], box["height"]) >= 32, "a finger's size"
            await page.locator("#open-settings").tap()
            await is_narrow(page, "#settings")
            await page.locator("#set-temperature").fill("0")
            await page.locator("#close-settings").tap()
            await site.settings_by_script(max_completion_tokens=3)
            await page.locator("#new-chat").tap()
            await site.prompt.fill("Hello?")
            await page.locator("#send").tap()
            await site.done()
            assert (await site.turns())[-1]["answer"]

    bench.run(main())


async def is_narrow(page: Any, selector: str) -> None:
    widths = "node => [node.scrollWidth, node.clientWidth]"
    scrolled, shown = await page.locator(selector).evaluate(widths)
    assert scrolled <= shown <= 360, selector


@pytest.mark.browser
def test_page_works_from_the_keyboard_alone(bench):
    async def main():
        async with bench.site() as site:
            page, keyboard = site.page, site.page.keyboard
            await site.open()
            await site.settings_by_script(temperature=0)
            await keyboard.type("First line")
            await keyboard.press("Shift+Enter")
            await keyboard.type("second")
            await keyboard.press("Home")
            assert await site.prompt.input_value() == "First line\nsecond"
            with bench.brake(0.03):
                await keyboard.press("Enter")
                await site.first_text()
                await keyboard.type("next")
                await keyboard.press("Enter")  # not while an answer comes
                await keyboard.press("Escape")
                await site.done()
                await site.pages_are_free()
            assert await page.locator(".question").inner_text() == "First line\nsecond"
            assert await site.prompt.input_value() == "next"

            stops = await tab_stops(page)
            names = {name for name, *_ in stops}
            assert {"skip", "new-chat", "open-settings", "scroller", "prompt", "send"} <= names
            assert {"system", "set-temperature", "set-stop", "set-seed", "reset", "key"} <= names
            assert not [stop for stop in stops if not stop[1]], "each has a name"
            assert not [stop for stop in stops if not stop[2]], "each shows that it has the focus"

            await page.locator("#set-temperature").focus()
            await keyboard.press("ArrowUp")
            assert float(await page.locator("#set-temperature").input_value()) == 0.05
            await page.locator("#new-chat").focus()
            await keyboard.press("Enter")
            assert await page.locator("article").count() == 0

    bench.run(main())


async def tab_stops(page: Any) -> list[list[Any]]:
    """Tab through the page: each element, its accessible name, whether its focus is visible."""
    look = """() => {
      const node = document.activeElement;
      const labels = [...(node.labels ?? [])].map((label) => label.textContent).join();
      const name = node.getAttribute("aria-label") || labels || node.textContent.trim();
      const box = getComputedStyle(node.id === "prompt" ? node.closest(".box") : node);
      const ring = box.outlineStyle !== "none" || box.boxShadow.startsWith("rgb");
      return [node === document.body ? "" : node.id || node.className, name, ring];
    }"""
    await page.locator(".skip").focus()
    stops = [await page.evaluate(look)]
    for _ in range(60):
        await page.keyboard.press("Tab")
        stop = await page.evaluate(look)
        if stop[0] in ("", stops[0][0]):  # out of the page, or around
            return stops
        stops.append(stop)
    raise AssertionError("Tab does not come around")


@pytest.mark.browser
def test_escape_closes_the_settings_without_stopping_the_stream(bench):
    async def main():
        async with bench.site(**PHONE) as site:
            await site.open()
            with bench.brake(0.03):
                await site.ask_for_much()
                await site.page.locator("#open-settings").tap()
                await site.page.keyboard.press("Escape")
                assert not await site.page.locator("#settings").is_visible()
                assert site.service.loop.num_streams == 1
                await site.page.keyboard.press("Escape")
                await site.pages_are_free()

    bench.run(main())


def test_page_is_one_file_that_its_policy_can_pin():
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("<style>") == text.count("<script>") == 1
    assert not re.search(r"<[^>]*\s(style|on\w+|src|srcset)\s*=", text), "nothing inline or outside"
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                 "new Function", "localStorage", "document.cookie"):  # fmt: skip
        assert sink not in text, sink


@pytest.mark.browser
def test_page_has_a_policy_that_allows_nothing_else(bench):
    async def main():
        async with bench.site() as site:
            response = await site.page.goto(site.url)
            policy = response.headers["content-security-policy"]
            rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";") if rule.strip())
            assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
            for name in ("script-src", "style-src"):
                assert re.fullmatch(r"'sha256-[\w+/=]+'", rules[name])
            assert rules["frame-ancestors"] == "'none'"
            text = await response.text()
            assert text == PAGE.read_text(encoding="utf-8")

    bench.run(main())
