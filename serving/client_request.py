"""The requests of a client: options, prompts, keys and certificates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import grpc

from jaxinfer.serving.grpc_messages import set_field, write_chat, write_params
from jaxinfer.serving.protos.jaxinfer.v1 import inference_pb2 as pb

Messages = Sequence[Mapping[str, str]]  # {"role": ..., "content": ...}


class Options(TypedDict, total=False):
    """The options of a request; others have the defaults of the checkpoint or the server."""

    model: str
    request_id: str
    priority: int
    cache_salt: str
    user: str
    timeout_s: float  # instead of the client's
    # The fields of SamplingParams.
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str]
    min_tokens: int
    max_tokens: int | None  # None: until the context is full
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    n: int
    logprobs: int | None
    prompt_logprobs: int | None


class EmbedOptions(TypedDict, total=False):
    """The options of a request to embed; `LLM.embed` explains the first four."""

    normalize: bool | None
    dimensions: int | None
    prompt_name: str | None
    truncate: bool
    model: str
    request_id: str
    user: str
    timeout_s: float  # instead of the client's


@dataclasses.dataclass(frozen=True)
class ClientTls:
    """PEM files for an encrypted connection."""

    root: str | Path | None = None  # the authority of the server's certificate; None: gRPC's list
    certificate: str | Path | None = None  # with `key`: the client's own, for mutual TLS
    key: str | Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together; give both")
        return grpc.ssl_channel_credentials(
            root_certificates=_bytes_of(self.root),
            private_key=_bytes_of(self.key),
            certificate_chain=_bytes_of(self.certificate),
        )


def _bytes_of(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def generate_request(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Messages | None,
    options: Mapping[str, Any],
) -> pb.GenerateRequest:
    """The message for one prompt, given in one of its three forms, with `Options`."""
    if sum(given is not None for given in (prompt, token_ids, messages)) != 1:
        raise TypeError("give one of prompt, token_ids and messages")
    params = dict(options)
    names = ("model", "request_id", "priority", "cache_salt", "user")
    named = {name: params.pop(name) for name in names if name in params}
    request = pb.GenerateRequest(params=write_params(params))
    for name, value in named.items():
        set_field(request, name, value)
    if prompt is not None:
        set_field(request, "text", prompt)
    elif token_ids is not None:
        set_field(request, "token_ids", token_ids)
    elif messages is not None:
        request.chat.CopyFrom(write_chat(messages))
    return request


def embed_request(
    inputs: str | Sequence[str | Sequence[int]],
    options: Mapping[str, Any],
) -> pb.EmbedRequest:
    """The message for one text, or for several texts and lists of token ids."""
    request = pb.EmbedRequest()
    for text in [inputs] if isinstance(inputs, str) else inputs:
        field = "text" if isinstance(text, str) else "token_ids"
        set_field(request.input.add(), field, text)
    unknown = options.keys() - EmbedOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options {', '.join(sorted(unknown))}")
    for name, value in options.items():
        if value is not None:
            set_field(request, name, value)
    return request


def tokenize_request(
    text: str | None, messages: Messages | None, add_special_tokens: bool | None
) -> pb.TokenizeRequest:
    """The message for a text or for messages."""
    if (text is None) == (messages is None):
        raise TypeError("give one of text and messages")
    request = pb.TokenizeRequest()
    if add_special_tokens is not None:
        request.add_special_tokens = add_special_tokens
    if text is not None:
        set_field(request, "text", text)
    elif messages is not None:
        request.chat.CopyFrom(write_chat(messages))
    return request


def metadata_for(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of all calls."""
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)
