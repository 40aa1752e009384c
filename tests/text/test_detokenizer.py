"""Streamed text equals decoded text, in whole characters, and contains no stop strings."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.text.detokenizer import (
    IncrementalDetokenizer,
    StopStringMatcher,
    TextDelta,
    TextStream,
)
from jaxinfer.text.tokenizer import Tokenizer
from tests.support import gguf_files as files

EMOJI = "😀👨‍👩‍👧‍👦🇩🇪é世"
TEXTS = ["", "a", "naïve " + EMOJI, EMOJI * 3, " leading", "日本語のテキスト", "the end.\n\n"]


@pytest.fixture(scope="module")
def piece_tokenizer(tmp_path_factory) -> Tokenizer:
    return files.small_tokenizer(tmp_path_factory.mktemp("piece"), "piece")


def deltas(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def part_ids() -> st.SearchStrategy[int]:
    """Ids that are parts of characters, so that random sequences are not mostly plain words."""
    return st.sampled_from(files.demo_tokenizer().encode(EMOJI * 2 + "日本語のテキスト한국어"))


DEMO_IDS = st.lists(
    st.one_of(st.deferred(part_ids), st.integers(0, 20), st.integers(0, 50_000)), max_size=30
)


@settings(max_examples=400, deadline=None)
@given(ids=DEMO_IDS, skip=st.booleans())
def test_deltas_add_up_to_the_decoded_text_on_smollm2(ids, skip):
    tokenizer = files.demo_tokenizer()
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas(tokenizer, ids, skip_special_tokens=skip)) == expected


PIECE_IDS = st.lists(
    st.one_of(
        st.integers(0, len(files.PIECE_TOKENS) + 2),
        st.sampled_from([3 + byte for byte in EMOJI.encode()]),
        st.just(files.PIECE_TOKENS.index("▁")),
    ),
    max_size=30,
)


@settings(max_examples=400, deadline=None)
@given(ids=PIECE_IDS, skip=st.booleans())
def test_deltas_add_up_to_the_decoded_text_with_byte_fallback_and_stripped_space(
    ids, skip, piece_tokenizer
):
    expected = piece_tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas(piece_tokenizer, ids, skip_special_tokens=skip)) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_delta_never_ends_inside_a_character(text, piece_tokenizer):
    for tokenizer in (files.demo_tokenizer(), piece_tokenizer):
        ids = tokenizer.encode(text)
        parts = deltas(tokenizer, ids)
        assert "\ufffd" not in "".join(parts)
        assert parts[-1] == ""
        assert "".join(parts) == text


def test_characters_appear_with_the_token_that_completes_them(piece_tokenizer):
    ids = [3 + byte for byte in "世é".encode()]
    assert deltas(piece_tokenizer, ids) == ["", "", "世", "", "é", ""]


def test_incomplete_tail_is_flushed_like_decode(piece_tokenizer):
    ids = [3 + byte for byte in "世".encode()[:2]]
    assert deltas(piece_tokenizer, ids) == ["", "", "\ufffd"]
    assert piece_tokenizer.decode(ids) == "\ufffd"


def test_detokenizer_restarts_after_finish(piece_tokenizer):
    detokenizer = IncrementalDetokenizer(piece_tokenizer)
    hello = piece_tokenizer.token_to_id("▁hello")
    for _ in range(2):
        assert detokenizer.push(hello) == "hello"
        assert detokenizer.push(hello) == " hello"
        detokenizer.push(3 + 0xE4)
        assert detokenizer.finish() == "\ufffd"


def test_each_token_is_looked_up_once(piece_tokenizer, monkeypatch):
    looked_up: list[int] = []
    bytes_of = Tokenizer.bytes_of

    def counting(self: Tokenizer, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        looked_up.append(token_id)
        return bytes_of(self, token_id, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "bytes_of", counting)
    ids = [3 + byte for byte in ("世" * 100).encode()]
    deltas(piece_tokenizer, ids)
    assert looked_up == ids


# Stop strings


def expected_output(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Find the stop string that is complete first and, among those, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def chunked(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[left:right] for left, right in itertools.pairwise(edges)]


AB = st.text("ab", min_size=1, max_size=5)


@settings(max_examples=600, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(AB, max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
def test_output_ends_at_the_first_stop_for_any_chunks(text, stops, cuts, include):
    expected, stop = expected_output(text, stops, include)
    matcher = StopStringMatcher(stops, include_in_output=include)
    output, seen, found = "", "", None
    for chunk in chunked(text, cuts):
        delta = matcher.push(chunk)
        output += delta.text
        seen += chunk
        assert expected.startswith(output)
        if delta.stop is not None:
            found = delta.stop
            break
        # Only a prefix of a stop string may be withheld.
        withheld = seen[len(output) :]
        assert not withheld or any(s.startswith(withheld) and s != withheld for s in stops)
    if found is None:
        output += matcher.finish()
    assert (output, found) == (expected, stop)


def test_stop_is_in_the_output_only_on_request():
    assert StopStringMatcher(["STOP"]).push("a STOP b") == TextDelta("a ", "STOP")
    included = StopStringMatcher(["STOP"], include_in_output=True)
    assert included.push("a ST") == TextDelta("a ")
    assert included.push("OP b") == TextDelta("STOP", "STOP")


def test_text_after_a_stop_is_refused():
    matcher = StopStringMatcher(["x"])
    matcher.push("x")
    with pytest.raises(ValueError, match="the output has ended"):
        matcher.push("y")


@pytest.mark.parametrize("stops", ["abc", [""], ["a", ""]])
def test_invalid_stops_are_refused(stops):
    with pytest.raises(ValueError, match="string"):
        StopStringMatcher(stops)


def test_search_is_linear_on_text_that_almost_matches():
    matcher = StopStringMatcher(["a" * 2000 + "b"])
    started = time.perf_counter()
    for _ in range(200):
        matcher.push("a" * 1000)
    # 200,000 characters take one transition each; naive comparison would take 400 million steps.
    assert time.perf_counter() - started < 5
    assert len(matcher.finish()) == 2000


@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [([], "hello world", None), (["o w"], "hell", "o w"), (["ld!"], "hello world", None)],
)
def test_stream_stops_across_tokens_and_flushes_withheld_text(stop, text, found, piece_tokenizer):
    stream = TextStream(piece_tokenizer, stop=stop)
    output, matched = "", None
    for token_id in piece_tokenizer.encode("hello world"):
        delta = stream.push(token_id)
        output += delta.text
        matched = delta.stop
        if matched:
            break
    if matched is None:
        output += stream.finish().text
    assert (output, matched) == (text, found)


def test_stop_completed_by_the_flushed_tail_is_found(piece_tokenizer):
    stream = TextStream(piece_tokenizer, stop=["\ufffd"], include_stop_str_in_output=True)
    assert stream.push(3 + 0xE4) == TextDelta("")
    assert stream.finish() == TextDelta("\ufffd", "\ufffd")


def test_special_tokens_are_in_the_stream_on_request(piece_tokenizer):
    stream = TextStream(piece_tokenizer, stop=["</s>"], skip_special_tokens=False)
    assert stream.push(2) == TextDelta("", "</s>")
    assert TextStream(piece_tokenizer, stop=["</s>"]).push(2) == TextDelta("")
