"""Log-probabilities in OpenAI's two shapes: parallel lists, and a list of objects."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxinfer.engine.request import TokenLogprobs
from jaxinfer.serving.http import response_schema as schema
from jaxinfer.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # OpenAI's value for probability 0: JSON has no infinity


class TokenNames:
    """Converts token ids to the names and bytes that clients see."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token, special tokens written out; empty without a tokenizer."""
        if self._tokenizer is None:
            return b""
        return self._tokenizer.bytes_of(token_id, skip_special_tokens=False)

    def name(self, token_id: int) -> str:
        r"""The text of a token; `bytes:\xe2\x82` for a part of a character; else its id."""
        data = self.bytes_of(token_id)
        if not data:
            return f"token_id:{token_id}"
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Offsets:
    """Counts where in a choice's text each token begins, in characters."""

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._is_first = tokenizer is not None and tokenizer.first_differs
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def next(self, token_id: int) -> int:
        """The offset of the next token, which is `token_id`."""
        start = self._offset
        if self._tokenizer is not None:
            skips = self._skip_special_tokens
            data = self._tokenizer.bytes_of(token_id, skip_special_tokens=skips)
            if self._is_first and data:
                data, self._is_first = self._tokenizer.first_bytes_of(token_id), False
            self._offset += len(self._utf8.decode(data))
        return start


def clamp(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)  # NaN does not come from the engine


def completion_logprobs(
    entries: Sequence[tuple[int, TokenLogprobs | None]], names: TokenNames, offsets: Offsets
) -> schema.CompletionLogprobs:
    """The `logprobs` of a text completion, from tokens and their log-probabilities.

    The first token of a prompt has no log-probability: None.
    """
    tops: list[dict[str, float] | None] = []
    for _, entry in entries:
        if entry is None:
            tops.append(None)
            continue
        top = {names.name(i): clamp(logprob) for i, logprob in entry.top}
        top.setdefault(names.name(entry.token_id), clamp(entry.logprob))
        tops.append(top)
    return {
        "tokens": [names.name(token_id) for token_id, _ in entries],
        "token_logprobs": [None if e is None else clamp(e.logprob) for _, e in entries],
        "top_logprobs": tops,
        "text_offset": [offsets.next(token_id) for token_id, _ in entries],
    }


def chat_logprobs(entries: Sequence[TokenLogprobs], names: TokenNames) -> schema.ChatLogprobs:
    """The `logprobs` of a chat completion."""
    return {"content": [_chat_entry(entry, names) for entry in entries], "refusal": None}


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], names: TokenNames
) -> list[schema.ChatLogprob | None]:
    """The field `prompt_logprobs`: an entry for each prompt token, None for the first."""
    return [None if entry is None else _chat_entry(entry, names) for entry in entries]


def _chat_entry(entry: TokenLogprobs, names: TokenNames) -> schema.ChatLogprob:
    tops = [_token(i, logprob, names) for i, logprob in entry.top]
    return {**_token(entry.token_id, entry.logprob, names), "top_logprobs": tops}


def _token(token_id: int, logprob: float, names: TokenNames) -> schema.TokenLogprob:
    data = list(names.bytes_of(token_id))
    return {"token": names.name(token_id), "logprob": clamp(logprob), "bytes": data}
