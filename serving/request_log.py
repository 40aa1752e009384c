"""The request log: one line of JSON for every request that has ended, on the logger `LOGGER`.

    {"time": "2026-11-29T12:00:00.000Z", "id": "http-7", "protocol": "http", "user": "ada",
     "prompt_tokens": 12, "cached_tokens": 0, "output_tokens": 40, "n": 1,
     "finish_reasons": ["stop"], "queue_s": 0.001, "first_token_s": 0.021, "total_s": 0.4,
     "params": {"temperature": 0.0}}

The line of a failed request also has `error` (the kind) and `message`. `params` has the parameters
that differ from `SamplingParams()`; of texts and lists it has only their number (`num_stop`), since
they are the client's data. With `log_prompts` there are `prompt` and `outputs` (a text for each
sample), truncated to `MAX_TEXT` characters each. JSON escapes whatever a client sends, so that the
line is one line of printable ASCII. A request that was refused before it had a stream has no line:
the metrics count it.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
from collections.abc import Mapping
from typing import Any, TextIO

from jaxinfer import SamplingParams
from jaxinfer.serving.config import ServingConfig
from jaxinfer.serving.generation import Chat, Delta, Prompt
from jaxinfer.serving.observer import Observer
from jaxinfer.serving.stream import Stream

LOGGER = "jaxinfer.requests"
MAX_TEXT = 4096  # characters of a prompt, or of a sample's output
MAX_NAME = 256  # characters of an id, a user's name or a message, which clients choose
DEFAULTS = SamplingParams()


def request_log_observer(config: ServingConfig) -> Observer:
    """Logs each request when it ends, at INFO, on the standard library's logger `LOGGER`."""
    log = _RequestLog(log_prompts=config.log_prompts)
    return Observer(on_delta=log.on_delta, on_end=log.on_end)


def write_request_log(out: TextIO) -> None:
    """Write the lines to `out`, without a prefix, and nowhere else."""
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


@dataclasses.dataclass
class _Sample:
    finish_reason: str | None = None
    text: str = ""


class _RequestLog:
    def __init__(self, *, log_prompts: bool):
        self._log_prompts = log_prompts
        self._samples: dict[Stream, dict[int, _Sample]] = {}
        self._logger = logging.getLogger(LOGGER)

    def on_delta(self, stream: Stream, delta: Delta) -> None:
        if delta.finish_reason is None and not self._log_prompts:
            return
        sample = self._samples.setdefault(stream, {}).setdefault(delta.index, _Sample())
        if self._log_prompts and len(sample.text) <= MAX_TEXT:
            sample.text += delta.text  # one delta past the limit: `_truncate` then marks the cut
        if delta.finish_reason is not None:
            sample.finish_reason = str(delta.finish_reason)

    def on_end(self, stream: Stream) -> None:
        samples = self._samples.pop(stream, {})
        if self._logger.isEnabledFor(logging.INFO):
            self._logger.info("%s", _json_line(self._entry(stream, samples)))

    def _entry(self, stream: Stream, samples: Mapping[int, _Sample]) -> dict[str, Any]:
        request, usage, timing = stream.request, stream.usage, stream.timing
        now = datetime.datetime.now(datetime.UTC)
        entry: dict[str, Any] = {
            "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "id": _truncate(stream.id, MAX_NAME),
            "protocol": request.protocol,
            "user": _truncate(request.user, MAX_NAME),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
            "n": request.params.n,
            "finish_reasons": [samples[i].finish_reason for i in sorted(samples)],
        }
        if stream.error is not None:
            entry["error"] = stream.error.kind.name.lower()
            entry["message"] = _truncate(stream.error.message, MAX_NAME)
        for name in ("queue_s", "first_token_s", "total_s"):
            seconds = getattr(timing, name)
            entry[name] = None if seconds is None else round(seconds, 6)
        entry["params"] = short_params(request.params)
        if self._log_prompts:
            entry["prompt"] = _prompt_text(request.prompt)
            entry["outputs"] = [_truncate(samples[i].text, MAX_TEXT) for i in sorted(samples)]
        return entry


def short_params(params: SamplingParams) -> dict[str, float | None]:
    """The parameters that differ from the defaults; of a text or a list only its length."""
    short: dict[str, float | None] = {}
    for field in dataclasses.fields(SamplingParams):
        value = getattr(params, field.name)
        if field.name == "n" or value == getattr(DEFAULTS, field.name):
            continue
        if value is None or isinstance(value, int | float):
            short[field.name] = value
        else:
            short[f"num_{field.name}"] = len(value)
    return short


def _prompt_text(prompt: Prompt) -> str:
    """The prompt, a conversation or token ids as JSON, truncated to `MAX_TEXT` characters."""
    if isinstance(prompt, str):
        return _truncate(prompt, MAX_TEXT)
    if isinstance(prompt, Chat):
        return _truncate(
            json.dumps(list(prompt.messages), ensure_ascii=False, default=str), MAX_TEXT
        )
    return _truncate(json.dumps(list(prompt[:MAX_TEXT]), separators=(",", ":")), MAX_TEXT)


def _truncate(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _json_line(entry: Mapping[str, Any]) -> str:
    # DEL is the one control character that JSON does not escape.
    return json.dumps(entry).replace("\x7f", "\\u007f")
