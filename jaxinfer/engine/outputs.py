"""Log-probabilities of a step, from the device to the requests that asked for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxinfer.engine.request import Request, TokenLogprobs
from jaxinfer.engine.scheduler import Row
from jaxinfer.execution.step import StepOutput


class Reports:
    """Log-probabilities of a step, fetched from the device when the first row asks."""

    def __init__(self, output: StepOutput):
        self._output = output
        self._sampled: tuple[np.ndarray, ...] | None = None
        self._prompt: tuple[np.ndarray, ...] | None = None

    def add_logprobs(self, request: Request, row: int) -> None:
        if self._sampled is None:
            self._sampled = tuple(map(np.asarray, self._output.sampled))
        tokens, *report = self._sampled
        count = request.params.logprobs or 0
        request.logprobs.append(_entry(int(tokens[row]), report, row, count))

    def add_prompt_logprobs(self, row: Row, at: int) -> None:
        """`at` is where the row's tokens begin in the step."""
        if self._prompt is None:
            self._prompt = tuple(map(np.asarray, self._output.prompt))
        request = row.request
        count = request.params.prompt_logprobs or 0
        end = min(row.start + row.num_tokens, request.prompt_len - 1)
        for position in range(row.start, end):
            token_id = request.prompt_token_ids[position + 1]
            entry = _entry(token_id, self._prompt, at + position - row.start, count)
            request.prompt_logprobs[position + 1] = entry


def _entry(token_id: int, report: Sequence[np.ndarray], index: int, count: int) -> TokenLogprobs:
    logprobs, top_ids, top_logprobs = report
    ids, values = top_ids[index, :count].tolist(), top_logprobs[index, :count].tolist()
    top = tuple((i, v) for i, v in zip(ids, values, strict=True) if i >= 0)
    return TokenLogprobs(token_id, float(logprobs[index]), top)
