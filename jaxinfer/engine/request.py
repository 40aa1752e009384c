"""A request: its tokens, its progress, and the arithmetic of both. Pure Python.

A request has *known* tokens (the prompt, the output, and tokens sampled on the device that the host
has not read yet) and *computed* tokens (their keys and values are in the cache, or will be by the
time a later step reads it). Every step, computed catches up with known. Nothing else in the engine
subtracts these lengths:

    |-- prompt_len --|-- output_len -------------------|-- remain_len --|
    |-- computed_len ------|-- extend_len --|          known_len        max_len
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Container, Sequence
from typing import NamedTuple

from jaxinfer.sampling.params import SamplingParams


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end-of-text, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller cancelled it


class TokenLogprobs(NamedTuple):
    """The log-probability of one token, and those of the likeliest tokens in its place, best
    first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability)


class Rank(NamedTuple):
    """What a policy orders requests by."""

    priority: int = 0  # smaller is served first, under the priority policy
    arrival: int = 0  # a counter: the order of `Engine.add`


class SamplingInputs(NamedTuple):
    """What sampling needs besides the parameters: they, made concrete for one request."""

    seed: int = 0  # [0, 2**32)
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: Collection[int] = ()  # its own, and the model's end-of-text if that ends it


FIRST = Rank()
PLAIN = SamplingInputs()


@dataclasses.dataclass(slots=True)
class RequestLogprobs:
    """Log-probabilities that a request asked for."""

    output: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt: dict[int, TokenLogprobs] = dataclasses.field(
        default_factory=dict
    )  # by position, from 1


@dataclasses.dataclass(slots=True)
class CachedPrefix:
    """What the prefix cache knows about a request's pages."""

    root: bytes | None  # the start of its keys; None: it shares no pages
    keys: list[bytes] = dataclasses.field(default_factory=list)  # of its first full pages
    shared_len: int = 0  # leading tokens in pages shared at admission: read, never written
    hit_len: int | None = None  # prompt tokens it was spared when first admitted


def sample_ids(request_id: str, num_samples: int) -> list[str]:
    """The ids of a prompt's samples; the first has the prompt's own."""
    return [request_id if i == 0 else f"{request_id}#{i}" for i in range(num_samples)]


def new_id(number: int, taken: Container[str]) -> str:
    """An id for the `number`-th request, or for the next number whose id is not `taken`."""
    while f"request-{number}" in taken:
        number += 1
    return f"request-{number}"


class Request:
    """One sequence; `n` samples of a prompt are n requests.

    `max_len` is the length at which it ends: prompt and output together. Without a `cache_root` it
    shares no pages.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_len: int,
        sampling: SamplingInputs = PLAIN,
        rank: Rank = FIRST,
        cache_root: bytes | None = None,
    ):
        self.id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.params = params
        self.max_len = max_len
        self.sampling = sampling
        self.rank = rank

        self.output_token_ids: list[int] = []
        self.logprobs = RequestLogprobs()
        self.finish_reason: FinishReason | None = None
        self.started_at: float | None = None  # first admitted then, by the monotonic clock

        self.known_len = len(self.prompt_token_ids)
        self.computed_len = 0
        self.slot: int | None = None  # its row of the device state; None: it is not running
        self.pages: list[int] = []
        self.prefix = CachedPrefix(cache_root)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_len(self) -> int:
        """Sampled tokens, also those that the host has not read."""
        return self.known_len - len(self.prompt_token_ids)

    @property
    def max_output_len(self) -> int:
        return self.max_len - len(self.prompt_token_ids)

    @property
    def remain_len(self) -> int:
        """Tokens that may still be sampled."""
        return self.max_len - self.known_len

    @property
    def read_len(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def pending_len(self) -> int:
        """Tokens that a step has sampled and the host has not read."""
        return self.known_len - self.read_len

    @property
    def target_len(self) -> int:
        """Known tokens that get computed at all: the last token of a full request never is."""
        return min(self.known_len, self.max_len - 1)

    @property
    def extend_len(self) -> int:
        """Known tokens still to be computed."""
        known, last = self.known_len, self.max_len - 1  # this runs for every row of every step
        return (known if known < last else last) - self.computed_len

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_full(self) -> bool:
        """Whether the host has read all tokens that it may have."""
        return self.read_len >= self.max_len

    def ends_unsampled(self, computed_len: int) -> bool:
        """Whether nothing is left to compute behind so many tokens, of a step that samples none:
        with max_tokens 0."""
        return computed_len >= self.max_len - 1

    def extend(self, num_tokens: int) -> bool:
        """Count `num_tokens` more as computed by the step being planned. Returns whether that
        samples a new token."""
        self.computed_len += num_tokens
        is_sampled = self.computed_len == self.known_len < self.max_len
        if is_sampled:
            self.known_len += 1
        return is_sampled

    def skip(self, shared_len: int) -> None:
        """Count `shared_len` tokens in shared pages as computed, but at least the last known token
        not: it is computed for its logits."""
        self.prefix.shared_len = shared_len
        self.computed_len = min(shared_len, self.target_len - 1)

    def read(self, token_id: int) -> None:
        """Record the id of the oldest token that was sampled and not read."""
        self.output_token_ids.append(token_id)

    def drop_pending(self) -> None:
        """Forget what was sampled and not read; it will be sampled again."""
        self.known_len = self.read_len

    def forget_pages(self) -> None:
        """Nothing is computed any more: its pages have been released."""
        self.computed_len = self.prefix.shared_len = 0
        self.pages, self.prefix.keys = [], []

    def token_id(self, position: int, unknown: int) -> int:
        """The id at a position, or `unknown` if it is still on the device."""
        output, position = self.output_token_ids, position - len(self.prompt_token_ids)
        if position < 0:
            return self.prompt_token_ids[position]
        return output[position] if position < len(output) else unknown

    def token_ids(self, start: int, stop: int) -> list[int]:
        """The ids at positions [start, stop) that the host knows; the rest is on the device."""
        P = len(self.prompt_token_ids)
        if stop <= P:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[max(start - P, 0) : stop - P]
