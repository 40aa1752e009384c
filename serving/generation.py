"""What goes into the service and what comes out of it, whichever door it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.engine.request import FinishReason, TokenLogprobs
from jaxinfer.sampling.params import SamplingParams

# The roles that clients may name, and what chat templates call them.
CHAT_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation, to be put through the model's chat template."""

    messages: Sequence[Mapping[str, Any]]


# More numbers are not written in the event loop: as text, 65,536 take some 25 ms.
LARGE_ARRAY = 65_536
Prompt = str | Sequence[int] | Chat  # text, token ids, or a conversation


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """One prompt. `params` is what `Service.params` makes of the fields that the client set."""

    prompt: Prompt
    params: SamplingParams
    request_id: str | None = None  # None: the service makes one
    priority: int = 0  # smaller is served first; needs scheduler.policy=priority
    cache_salt: str = ""  # requests with different salts share no cached pages
    timeout_s: float | None = None  # seconds from now until it is given up; None: the server's
    protocol: str = ""  # "http" or "grpc": for logs and metrics
    user: str = ""  # for the log: whom the client names as its user, or the name of its key
    operation: str = "text_completion"  # for traces, in their words


@dataclasses.dataclass(frozen=True)
class EmbeddingRequest:
    """Texts, or lists of token ids, to embed; see `LLM.embed` for what the fields mean."""

    inputs: Sequence[str | Sequence[int]]
    normalize: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate: bool = False
    request_id: str | None = None
    timeout_s: float | None = None
    protocol: str = ""
    user: str = ""


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """The vectors of a request's inputs, in order, and how many tokens each of them has."""

    vectors: np.ndarray  # float32 [inputs, dimensions]
    num_tokens: list[int]

    @property
    def is_large(self) -> bool:
        """Whether a door has to write it in another thread, vector by vector."""
        return self.vectors.size > LARGE_ARRAY


class Delta(NamedTuple):
    """What a request brought since the delta before, for one of its `n` samples."""

    index: int
    text: str  # whole characters, never part of a stop string
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # one a token where `params.logprobs` asks, else empty
    finish_reason: FinishReason | None  # set in a sample's last delta
    embedding: np.ndarray | None = None  # of an encoder: float32 [D], as pooled

    @classmethod
    def joined(cls, deltas: Sequence[Delta]) -> Delta:
        """Deltas of one sample that follow each other, as one."""
        if len(deltas) == 1:
            return deltas[0]
        return cls(
            deltas[0].index,
            "".join([delta.text for delta in deltas]),
            [token_id for delta in deltas for token_id in delta.token_ids],
            [entry for delta in deltas for entry in delta.logprobs],
            deltas[-1].finish_reason,
            deltas[-1].embedding,  # it comes with the end
        )


@dataclasses.dataclass
class Usage:
    """Tokens of a request so far; output counts all samples."""

    prompt_tokens: int
    cached_tokens: int = 0  # of the prompt: found in the prefix cache
    output_tokens: int = 0


@dataclasses.dataclass
class Timing:
    """Seconds since the service took the request; None: not yet, or never."""

    queue_s: float | None = None  # until the scheduler first admitted it
    first_token_s: float | None = None
    total_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """A whole answer: `Stream.collect`."""

    samples: list[Delta]  # one a sample, complete, by index
    prompt_logprobs: list[TokenLogprobs | None] | None  # by position, where asked for
    usage: Usage
    timing: Timing
