"""The types of requests to the service and of their results, independent of the protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.engine.request import FinishReason, TokenLogprobs
from jaxinfer.sampling.params import SamplingParams

# The roles that clients may use, and their names in chat templates.
CHAT_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation, to be rendered by the model's chat template."""

    messages: Sequence[Mapping[str, Any]]


# Larger arrays are not serialized in the event loop: 65,536 numbers take some 25 ms as text.
LARGE_ARRAY = 65_536
Prompt = str | Sequence[int] | Chat  # text, token ids, or a conversation


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """A request to generate from one prompt. `params` come from `Service.params`."""

    prompt: Prompt
    params: SamplingParams
    request_id: str | None = None  # None: the loop chooses one
    priority: int = 0  # smaller is served first; needs scheduler.policy=priority
    cache_salt: str = ""  # requests with different salts share no cached pages
    timeout_s: float | None = None  # deadline from submission; None: the server's
    protocol: str = ""  # "http" or "grpc", for logs and metrics
    user: str = ""  # for the log: the user that the client names, or the name of its key
    operation: str = "text_completion"  # for traces: OpenTelemetry's name of it


@dataclasses.dataclass(frozen=True)
class EmbeddingRequest:
    """A request to embed texts, or lists of token ids; `LLM.embed` explains the fields."""

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
    """The vectors of a request's inputs, in order, and the token count of each input."""

    vectors: np.ndarray  # float32 [inputs, dimensions]
    num_tokens: list[int]

    @property
    def is_large(self) -> bool:
        """Whether it is to be serialized in another thread, vector by vector."""
        return self.vectors.size > LARGE_ARRAY


class Delta(NamedTuple):
    """The new output of one of a request's `n` samples since its previous delta."""

    index: int
    text: str  # whole characters, never part of a stop string
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # one a token if `params.logprobs` is set, else empty
    finish_reason: FinishReason | None  # set in a sample's last delta
    embedding: np.ndarray | None = None  # an encoder's: float32 [D], as pooled

    @classmethod
    def joined(cls, deltas: Sequence[Delta]) -> Delta:
        """Consecutive deltas of one sample, joined."""
        if len(deltas) == 1:
            return deltas[0]
        return cls(
            deltas[0].index,
            "".join([delta.text for delta in deltas]),
            [token_id for delta in deltas for token_id in delta.token_ids],
            [entry for delta in deltas for entry in delta.logprobs],
            deltas[-1].finish_reason,
            deltas[-1].embedding,  # it is in the last delta
        )


@dataclasses.dataclass
class Usage:
    """Token counts of a request so far; the output is that of all samples."""

    prompt_tokens: int
    cached_tokens: int = 0  # of the prompt: found in the prefix cache
    output_tokens: int = 0


@dataclasses.dataclass
class Timing:
    """Seconds since the service received the request; None: not yet, or never."""

    queue_s: float | None = None  # until the scheduler first admitted it
    first_token_s: float | None = None
    total_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """The complete output of a request; see `Stream.collect`."""

    samples: list[Delta]  # complete, one a sample, by index
    prompt_logprobs: list[TokenLogprobs | None] | None  # by position; None: not requested
    usage: Usage
    timing: Timing
