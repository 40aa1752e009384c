"""From the tokens of a step to updates: each request's new token and text, and whether it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxinfer.engine.logprobs import StepLogprobs
from jaxinfer.engine.request import FinishReason, Request
from jaxinfer.engine.scheduler import Plan, Scheduler
from jaxinfer.engine.stats import StepCounters
from jaxinfer.execution.step import StepOutput
from jaxinfer.text.detokenizer import TextStream
from jaxinfer.text.tokenizer import Tokenizer


class Update(NamedTuple):
    """What one step brought to a request."""

    request: Request
    token_ids: list[int]  # new ones
    text: str  # new text: whole characters, never part of a stop string
    finish_reason: FinishReason | None
    embedding: np.ndarray | None = None  # from an `Embedder`: float32 [D]


class OutputProcessor:
    """Holds the requests that have not ended, and ends them as their tokens say.

    Updates are kept until `take_updates`, so an exception on the way loses none. Without a
    tokenizer they have no text.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None, counters: StepCounters):
        self.requests: dict[str, Request] = {}
        self.updates: list[Update] = []
        self._counters = counters
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._streams: dict[str, TextStream] = {}

    def add(self, request: Request) -> None:
        self.requests[request.id] = request
        if self._tokenizer is not None:
            self._streams[request.id] = TextStream(
                self._tokenizer,
                stop=request.params.stop,
                include_stop_str_in_output=request.params.include_stop_str_in_output,
                skip_special_tokens=request.params.skip_special_tokens,
            )

    def process(self, plan: Plan, output: StepOutput, tokens: Sequence[int]) -> None:
        """Give each row of a step its token; `tokens` are those sampled, one for each row."""
        logprobs = StepLogprobs(output)
        page_size = self._scheduler.pool.page_size
        first = 0  # the row's first token in the step
        for i, row in enumerate(plan.rows):
            request, num_tokens, is_sampled = row.request, row.num_tokens, row.is_sampled
            if request.finish_reason is None:
                if request.params.prompt_logprobs is not None:
                    logprobs.add_prompt(row, first)
                # A decode fills a page every `page_size` tokens only.
                if num_tokens > 1 or (row.start + 1) % page_size <= 1 or not is_sampled:
                    self._scheduler.register_pages(request)
                if is_sampled:
                    self._accept(request, tokens[i], logprobs, i)
                elif request.ends_unsampled(row.end):
                    self._scheduler.finish(request, FinishReason.LENGTH)
                    self.end(request)
            first += num_tokens

    def take_updates(self) -> list[Update]:
        """Return the updates since the last call."""
        updates, self.updates = self.updates, []
        return updates

    def end(self, request: Request, token_ids: Sequence[int] = (), text: str = "") -> None:
        """Forget a finished request; its update has the text that was held back for a stop
        string."""
        del self.requests[request.id]
        stream = self._streams.pop(request.id, None)
        if stream is not None and not stream.has_stopped:
            text += stream.finish().text
        self.updates.append(Update(request, list(token_ids), text, request.finish_reason))

    def _accept(self, request: Request, token_id: int, logprobs: StepLogprobs, row: int) -> None:
        """Add a token to a request, and end the request if the token, the text or the length says
        so."""
        params = request.params
        request.read(token_id)
        self._counters.num_generated += 1
        if params.logprobs is not None:
            logprobs.add_output(request, row)
        may_stop = len(request.output_token_ids) >= params.min_tokens
        stream = self._streams.get(request.id)
        text, stop = "", None
        if stream is not None:
            text, stop = stream.push(token_id, is_watched=may_stop)
        if stop is not None or (may_stop and token_id in request.sampling.stop_token_ids):
            self._scheduler.finish(request, FinishReason.STOP)
        elif request.is_full:
            self._scheduler.finish(request, FinishReason.LENGTH)
        else:
            self.updates.append(Update(request, [token_id], text, None))
            return
        self.end(request, [token_id], text)
