"""A request: its tokens, its progress, and the arithmetic of both. Pure Python.

A request has *known* tokens (prompt, output, and tokens sampled on the device but not yet read) and
*computed* tokens (their keys and values are in the cache, or will be by the time a later step
reads it). Every step, computed catches up with known. Nobody else subtracts these lengths.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end-of-text, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller gave it up


class TokenLogprobs(NamedTuple):
    """Log-probability of one token, and of the likeliest ones in its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability)


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

        self.output_token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}  # by position; none for position 0
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None  # the stop token that ended it, end-of-text included

        self.num_pending = 0  # tokens sampled by a step whose output is not yet read
        self.num_computed = 0
        self.num_shared = 0  # leading tokens in pages shared at admission: read, never written
        self.num_preemptions = 0
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
    def num_known(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending

    @property
    def num_to_compute(self) -> int:
        """Known tokens that get computed at all: the last token of a full request never is."""
        known = len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending
        return min(known, self.max_len - 1)

    @property
    def num_remaining(self) -> int:
        """Known tokens still to compute."""
        return self.num_to_compute - self.num_computed

    def samples_after(self, num_tokens: int) -> bool:
        """Whether computing `num_tokens` more yields a new token."""
        return self.num_computed + num_tokens == self.num_known < self.max_len

    def forget_pages(self) -> None:
        """Nothing is computed any more: its pages have been given back."""
        self.num_computed = self.num_shared = 0
        self.pages, self.page_keys = [], []

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known ids at positions [start, stop); fewer where they are still on the device."""
        P = len(self.prompt_token_ids)
        if stop <= P:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[max(start - P, 0) : stop - P]
