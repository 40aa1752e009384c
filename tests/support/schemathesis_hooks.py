"""For schemathesis: relations between fields that JSON Schema cannot state, or not readably.

The server refuses what breaks them; the tests of the endpoints try each one.
"""

from __future__ import annotations

from typing import Any

import schemathesis

MAX_PROMPT = 250  # bytes; the context of that server holds 256 tokens
MAX_BAD_WORD = 7  # bytes, each a token of the tiny model; the eighth is a space before them


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Whether the fields of the body fit each other."""
    body = case.body
    if not isinstance(body, dict):
        return True
    n, best_of = body.get("n"), body.get("best_of")
    old, new = body.get("max_tokens"), body.get("max_completion_tokens")
    longest: Any = new if old is None else old
    least: Any = body.get("min_tokens")
    conflicts = [
        best_of is not None and best_of != (1 if n is None else n),
        body.get("top_logprobs") is not None and body.get("logprobs") is not True,
        old is not None and new is not None and old != new,
        _is_number(least) and _is_number(longest) and least > longest,
        _is_number(least) and longest is None and least > 16,
        body.get("stream_options") is not None and body.get("stream") is not True,
        bool(body.get("priority")),  # another policy of the scheduler has it
        _is_number(body.get("timeout_s")) and body["timeout_s"] < 10,  # its end is a 408
        any(len(str(token_id)) > 2 for token_id in _items(body.get("logit_bias"))),
        any(_len(word) > MAX_BAD_WORD for word in _items(body.get("bad_words"))),
        _prompt_len(body) > MAX_PROMPT,
        bool(body.get("request_id")),  # two at once with the same one are refused
    ]
    return not any(conflicts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _items(value: Any) -> Any:
    return value if isinstance(value, list | dict) else ()


def _prompt_len(body: dict[str, Any]) -> int:
    """Bytes of the longest prompt: texts may be longer than the context, in tokens."""
    prompt, messages = body.get("prompt"), _items(body.get("messages"))
    total = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = [p.get("text") if isinstance(p, dict) else p for p in _items(content)]
        total += 16 + sum(map(_len, [content, *parts]))
    return max([total, _len(prompt), *map(_len, _items(prompt))])


def _len(text: Any) -> int:
    return len(text.encode("utf-8", "replace")) if isinstance(text, str) else 0
