"""A request: its tokens, its progress, and the arithmetic of both. Pure Python.

A request has *known* tokens (prompt, output, and tokens sampled on the device but not yet read) and
*computed* tokens (their keys and values are in the cache, or will be by the time a later step
reads it). Every step, computed catches up with known. Nobody else subtracts these lengths.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Container, Sequence
from typing import NamedTuple

from jaxinfer.sampling.params import SamplingParams


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end-of-text, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller gave it up


class TokenLogprobs(NamedTuple):
    """Log-probability of one token, and of the likeliest ones in its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability)


def sample_ids(request_id: str, num_samples: int) -> list[str]:
    """The ids of a prompt's samples; the first has the prompt's own."""
    return [request_id if i == 0 else f"{request_id}#{i}" for i in range(num_samples)]


def new_id(number: int, taken: Container[str]) -> str:
    """An id for a request without one: of its `number`, or the next that is not `taken`."""
    while f"request-{number}" in taken:
        number += 1
    return f"request-{number}"


class Request:
    """One sequence. `n` samples of a prompt are n requests.

    `max_len` is the length at which it ends: prompt and output together.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_len: int,
        seed: int,
        arrival: int,
        priority: int = 0,
        cache_root: bytes | None = None,
        bad_word_ids: Sequence[Sequence[int]] = (),
        stop_token_ids: Collection[int] = (),
    ):
        self.id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.params = params
        self.max_len = max_len
        self.seed = seed
        self.arrival = arrival  # a counter: the order of `Engine.add`
        self.priority = priority  # smaller is served first, under the priority policy
        self.cache_root = cache_root  # start of its prefix-cache keys; None: it shares nothing
        self.bad_word_ids = tuple(tuple(word) for word in bad_word_ids)
        self.stop_token_ids = stop_token_ids  # its own and the model's end-of-text, if they end it

        self.output_token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}  # by position; none for position 0
        self.finish_reason: FinishReason | None = None

        self.started_at: float | None = None  # when it was first admitted, by the monotonic clock
        self.num_cached = 0  # prompt tokens that the prefix cache spared when it was first admitted

        self.rope_len = self.prompt_len  # the least that its tokens' rope length is (`nn/rope.py`)
        self.num_known = len(self.prompt_token_ids)
        self.num_pending = 0  # of the known: sampled by a step whose output is not yet read
        self.num_computed = 0
        self.num_shared = 0  # leading tokens in pages shared at admission: read, never written
        self.num_preemptions = 0
        self.ready_at = 0  # of a pipeline: the step that may take its next token
        self.slot: int | None = None  # its row of the device state; None: not running
        self.pages: list[int] = []
        self.page_keys: list[bytes] = []  # prefix-cache keys of its first full pages

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_read(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_to_compute(self) -> int:
        """Known tokens that get computed at all: the last token of a full request never is."""
        return min(self.num_known, self.max_len - 1)

    @property
    def num_remaining(self) -> int:
        """Known tokens still to compute."""
        known, most = self.num_known, self.max_len - 1  # this runs for every row of every step
        return (known if known < most else most) - self.num_computed

    def plan(self, num_tokens: int) -> bool:
        """Count `num_tokens` more as computed, by the step being planned; whether that yields a new
        token."""
        self.num_computed += num_tokens
        is_sampled = self.num_computed == self.num_known < self.max_len
        if is_sampled:
            self.num_pending += 1
            self.num_known += 1
        return is_sampled

    def read(self, token_id: int) -> None:
        """The oldest pending token has become known to the host."""
        self.num_pending -= 1
        self.output_token_ids.append(token_id)

    def drop_pending(self) -> None:
        """What was sampled and not read is lost; it will be sampled again."""
        self.num_known -= self.num_pending
        self.num_pending = 0

    def forget_pages(self) -> None:
        """Nothing is computed any more: its pages have been given back."""
        self.num_computed = self.num_shared = 0
        self.pages, self.page_keys = [], []

    def token_id(self, position: int, unknown: int) -> int:
        """The id at a position, `unknown` where it is still on the device."""
        output, position = self.output_token_ids, position - len(self.prompt_token_ids)
        if position < 0:
            return self.prompt_token_ids[position]
        return output[position] if position < len(output) else unknown

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known ids at positions [start, stop); fewer where they are still on the device."""
        P = len(self.prompt_token_ids)
        if stop <= P:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[max(start - P, 0) : stop - P]
