"""What the writers of both endpoints share: JSON as bytes, with little work for each token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxinfer.serving.generation import Delta
from jaxinfer.serving.http.logprobs import TokenNames, prompt_logprobs
from jaxinfer.serving.stream import Stream

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
FINISH_REASONS = {None: "null", "stop": '"stop"', "length": '"length"', "abort": '"stop"'}


def usage(streams: Sequence[Stream]) -> dict[str, Any]:
    """Tokens of an answer's requests together."""
    num_prompt = sum(stream.usage.prompt_tokens for stream in streams)
    num_output = sum(stream.usage.output_tokens for stream in streams)
    num_cached = sum(stream.usage.cached_tokens for stream in streams)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class Envelope:
    """The part of every event and of the whole answer that does not change."""

    def __init__(self, response_id: str, kind: str, created: int, model: str):
        fields = {"id": response_id, "object": kind, "created": created, "model": model}
        self._opening = to_json(fields)[:-1] + ',"choices":['

    def event(self, choice: str, *, usage_field: str) -> bytes:
        """`usage_field` is empty, or `,"usage":...`."""
        return f"data: {self._opening}{choice}]{usage_field}}}\n\n".encode()

    def whole(self, choices: Sequence[str], streams: Sequence[Stream]) -> bytes:
        text = f'{self._opening}{",".join(choices)}],"usage":{to_json(usage(streams))}}}'
        return text.encode()


class PromptLogprobs:
    """The extra field `prompt_logprobs` of a choice, with its first token."""

    def __init__(self, num_top: int | None, names: TokenNames):
        self._num_top = num_top
        self._names = names

    def field(self, stream: Stream) -> str:
        """Empty, or `,"prompt_logprobs":[...]`."""
        if self._num_top is None:
            return ""
        entries = [
            None if entry is None else entry._replace(top=entry.top[: self._num_top])
            for entry in stream.prompt_logprobs or ()
        ]
        return f',"prompt_logprobs":{to_json(prompt_logprobs(entries, self._names))}'


def has_nothing_to_show(delta: Delta) -> bool:
    """A token that is part of a character, or of what may become a stop string."""
    return not delta.text and not delta.logprobs and delta.finish_reason is None
