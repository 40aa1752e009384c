"""Incremental detokenization and the search for stop strings.

Three small state machines, whose work is proportional to what is pushed, not to the text so far.
`IncrementalDetokenizer` turns ids into text at whole characters, `StopStringMatcher` holds back
text that may begin a stop string, and `TextStream` is the two in series.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text deltas of a growing sequence of tokens.

    The concatenation of all deltas, including that of `finish()`, equals `tokenizer.decode` of all
    pushed ids. A delta never ends inside a character: the bytes of an incomplete one (at most
    three) wait for the next token.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._texts = tokenizer.texts(skip_special_tokens=skip_special_tokens)
        self._is_first = tokenizer.first_differs
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Whether a token's text depends on what came before: the start, or half a character.
        self._needs_bytes = self._is_first

    def push(self, token_id: int) -> str:
        """Return the text completed by this token, often empty."""
        if not self._needs_bytes and 0 <= token_id < len(self._texts):
            text = self._texts[token_id]
            if text is not None:
                return text
        data = self._tokenizer.bytes_of(token_id, skip_special_tokens=self._skip_special_tokens)
        if self._is_first and data:
            data = self._tokenizer.first_bytes_of(token_id)
            self._is_first = False
        text = self._utf8.decode(data)
        self._needs_bytes = self._is_first or bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        """Return U+FFFD for an incomplete last character, else ""; then reset."""
        tail = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._is_first = self._needs_bytes = self._tokenizer.first_differs
        return tail


class TextDelta(NamedTuple):
    """Text to emit, and the stop string that ended the output with it, if any."""

    text: str
    stop: str | None = None


class StopStringMatcher:
    """Watches text for stop strings, however it is cut into pieces.

    Text that a stop string might begin with is held back until it is decided. The stop that is
    complete first wins; of several complete at the same character, the longest. The text before
    it is emitted, and the stop itself only if `include_in_output`; what follows is dropped.
    The search is an Aho-Corasick automaton (CACM 18, 1975): one transition a character, amortised,
    and the depth of its state is the number of characters to hold back.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        if isinstance(stops, str):
            raise ValueError(f"stop is the string {stops!r}; a list of strings is needed")
        if "" in stops:
            raise ValueError("a stop string is empty; at least one character is needed")
        self._include_in_output = include_in_output
        self._build(stops)
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def _build(self, stops: Sequence[str]) -> None:
        """Trie of the stops, then failure links breadth first."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            state = 0
            for depth, char in enumerate(stop, 1):
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._depth.append(depth)
                    self._match.append(None)
                state = self._next[state][char]
            self._match[state] = stop
        self._fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], char)
                # The longest stop that ends here: the trie's own, else the failure link's.
                self._match[child] = self._match[child] or self._match[self._fail[child]]
                queue.append(child)

    def _step(self, state: int, char: str) -> int:
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return self._next[state][char]

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to watch for."""
        return len(self._next) == 1

    @property
    def has_matched(self) -> bool:
        """Whether a stop string is complete: the output has ended."""
        return self._matched is not None

    def push(self, text: str) -> TextDelta:
        """Return the text that can be emitted now; `stop` is set if the output ends here.

        Raises `ValueError` after a stop string has matched: the output has ended.
        """
        if self._matched is not None:
            raise ValueError(f"text after the stop string {self._matched!r}: the output has ended")
        if self.is_idle:
            return TextDelta(text)
        for position, char in enumerate(text, 1):
            self._state = self._step(self._state, char)
            stop = self._match[self._state]
            if stop is not None:
                self._matched = stop
                seen = self._held + text[:position]
                self._held = ""
                return TextDelta(seen if self._include_in_output else seen[: -len(stop)], stop)
        seen = self._held + text
        certain = len(seen) - self._depth[self._state]
        self._held = seen[certain:]
        return TextDelta(seen[:certain])

    def finish(self) -> str:
        """Return the text still held back, once no more text follows."""
        held, self._held, self._state = self._held, "", 0
        return held


class TextStream:
    """Tokens in, text out at whole characters, ended by the first stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens
        )
        self._matcher = StopStringMatcher(stop, include_in_output=include_stop_str_in_output)
        self._watches = not self._matcher.is_idle

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string has ended the output."""
        return self._matcher.has_matched

    def push(self, token_id: int, *, is_watched: bool = True) -> TextDelta:
        """The text that became certain with this token.

        Text of tokens that are not watched passes without a look for stop strings (and none can
        begin in it); they must come before the first watched one.
        """
        text = self._detokenizer.push(token_id)
        return self._matcher.push(text) if self._watches and is_watched else TextDelta(text)

    def finish(self) -> TextDelta:
        """Return the text still held back, once the tokens have ended without a stop string."""
        delta = self._matcher.push(self._detokenizer.finish())
        if delta.stop is not None:
            return delta
        return TextDelta(delta.text + self._matcher.finish())
