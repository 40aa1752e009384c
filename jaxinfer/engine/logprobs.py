"""Log-probabilities of a step, from the device to the requests that asked for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxinfer.engine.request import Request, TokenLogprobs
from jaxinfer.engine.scheduler import Row
from jaxinfer.execution.step import StepOutput


class StepLogprobs:
    """The log-probabilities of a step, read from the device when a row first needs them."""

    def __init__(self, output: StepOutput):
        self._output = output
        self._sampled: tuple[np.ndarray, ...] | None = None
        self._prompt: tuple[np.ndarray, ...] | None = None

    def add_output(self, request: Request, row: int) -> None:
        """Give the request the entry of the token that its row, number `row`, sampled."""
        if self._sampled is None:
            self._sampled = tuple(map(np.asarray, self._output.sampled))
        tokens, *arrays = self._sampled
        count = request.params.logprobs or 0
        request.logprobs.output.append(_entry(int(tokens[row]), arrays, row, count))

    def add_prompt(self, row: Row, first: int) -> None:
        """Give the row's request the entries of its prompt tokens; `first` is the row's first token
        in the step."""
        if self._prompt is None:
            self._prompt = tuple(map(np.asarray, self._output.prompt))
        request = row.request
        count = request.params.prompt_logprobs or 0
        for position in range(row.start, min(row.end, request.prompt_len - 1)):
            token_id = request.prompt_token_ids[position + 1]
            entry = _entry(token_id, self._prompt, first + position - row.start, count)
            request.logprobs.prompt[position + 1] = entry


def _entry(token_id: int, arrays: Sequence[np.ndarray], index: int, count: int) -> TokenLogprobs:
    logprobs, top_ids, top_logprobs = arrays
    ids, values = top_ids[index, :count].tolist(), top_logprobs[index, :count].tolist()
    top = tuple((i, v) for i, v in zip(ids, values, strict=True) if i >= 0)
    return TokenLogprobs(token_id, float(logprobs[index]), top)
