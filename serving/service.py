"""The service behind HTTP and gRPC: one model, its tokenizer and its engine loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxinfer import Embedder, EngineLike, InvalidRequestError, SamplingParams
from jaxinfer.build import NO_EMBEDDING, NO_GENERATION
from jaxinfer.embedding.embedder import EMBEDDING_PARAMS
from jaxinfer.embedding.sentences import (
    check_dimensions,
    encode_text,
    finalize_vectors,
    find_prompt,
)
from jaxinfer.engine.stats import EngineStats
from jaxinfer.loading.checkpoint import GenerationDefaults
from jaxinfer.sampling.params import SamplingParamsError
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.generation import (
    Chat,
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    Prompt,
)
from jaxinfer.serving.loop import EngineLoop, Stream
from jaxinfer.text.tokenizer import Tokenizer

MAX_PROMPT_LOGPROBS = 200_000  # entries a response; serializing one takes some 8 us
LONG_TEXT = 4096  # characters or tokens; longer texts are converted in another thread
TEXT_OVERHEAD = 64  # the fixed cost of a text, in characters
SUBMIT_BATCH = 64  # texts of one request to submit before the event loop runs others


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """The model's properties that clients see."""

    name: str
    vocab_size: int
    max_len: int  # tokens of prompt and output together
    num_parameters: int
    dtype: str  # of weights and activations
    has_chat_template: bool
    created: int  # time of loading, in seconds of the Unix epoch
    embedding_dim: int = 0  # length of an encoder's vectors; 0: the model generates


class Service:
    """Serves requests with texts or token ids by streams or vectors.

    Its methods are for the event loop's thread, and raise `ServiceError`.
    """

    def __init__(
        self,
        engine: EngineLike,
        loop: EngineLoop,
        *,
        generation: GenerationDefaults | None = None,
        model_name: str | None = None,
    ):
        self.loop = loop
        self.model = _model_info(engine, model_name)
        self._embedder = engine if isinstance(engine, Embedder) else None
        self._tokenizer = engine.tokenizer
        self._generation = generation or GenerationDefaults()
        self._long_encode = asyncio.Lock()

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            text = "this model has no tokenizer; send token ids"
            raise ServiceError(ErrorKind.INVALID, text, field="prompt")
        return self._tokenizer

    @property
    def stats(self) -> EngineStats:
        """The engine's counters as of the last step."""
        return self.loop.stats

    def params(self, fields: Mapping[str, Any]) -> SamplingParams:
        """The checkpoint's generation defaults, overridden by the fields that a client set."""
        try:
            return self._generation.sampling_params(**fields)
        except SamplingParamsError as error:
            raise ServiceError(ErrorKind.INVALID, str(error), field=error.field) from error

    def check_model(self, name: str) -> None:
        """Raise if a request names another model; an empty name means this one."""
        if name and name != self.model.name:
            text = f"there is no model {name!r}; this server has {self.model.name!r}"
            raise ServiceError(ErrorKind.NOT_FOUND, text, field="model")

    def check_can_generate(self) -> None:
        """Raise if the model is an encoder."""
        if self._embedder is not None:
            raise ServiceError(ErrorKind.WRONG_MODEL, NO_GENERATION)

    def check_can_embed(self) -> Embedder:
        """The embedder; raise if the model generates."""
        if self._embedder is None:
            raise ServiceError(ErrorKind.WRONG_MODEL, NO_EMBEDDING)
        return self._embedder

    async def generate(self, request: GenerationRequest) -> Stream:
        """Queue a request. A caller that does not read the stream to its end has to `cancel` it."""
        self.check_can_generate()
        submitted_at = time.monotonic()
        with self.loop.reserve(request.params.n):
            token_ids = await self.tokenize(request.prompt)
            self._check_prompt_logprobs(request.params, len(token_ids))
        return self.loop.submit(request, token_ids, submitted_at=submitted_at)

    async def embed(
        self, request: EmbeddingRequest, *, on_accepted: Callable[[], object] = lambda: None
    ) -> Embeddings:
        """The vectors of all inputs; raises the error of the first input that fails.

        Inputs of all waiting requests share batches. Cancelling the call cancels its inputs.
        `on_accepted` is called once all inputs are queued: earlier errors count as refusals.
        """
        embedder, submitted_at = self.check_can_embed(), time.monotonic()
        inputs, streams = request.inputs, []
        if not inputs:
            raise ServiceError(
                ErrorKind.INVALID, "input is empty; give at least one text", field="input"
            )
        try:
            with _input_errors(), self.loop.reserve(len(inputs)) as release_one:
                check_dimensions(embedder, request.dimensions)
                all_ids = await self._encode_inputs(embedder, request)
                self._check_waiting_tokens(all_ids)
                for index, token_ids in enumerate(all_ids):
                    if index and index % SUBMIT_BATCH == 0:
                        await asyncio.sleep(0)
                    one = _input_request(request, index)
                    release_one()
                    with _input_errors(index if len(inputs) > 1 else None):
                        streams.append(self.loop.submit(one, token_ids, submitted_at=submitted_at))
            on_accepted()
            vectors = [(await stream.collect()).samples[0].embedding for stream in streams]
        finally:
            for stream in streams:
                stream.cancel()
        pooled = np.stack([vector for vector in vectors if vector is not None])
        named = {"normalize": request.normalize, "dimensions": request.dimensions}
        return Embeddings(
            finalize_vectors(embedder, pooled, **named), [len(ids) for ids in all_ids]
        )

    async def _encode_inputs(
        self, embedder: Embedder, request: EmbeddingRequest
    ) -> list[list[int]]:
        def encode() -> list[list[int]]:
            named = {"prompt_name": request.prompt_name, "truncate": request.truncate}
            return [encode_text(embedder, text, **named) for text in request.inputs]

        around = TEXT_OVERHEAD + len(find_prompt(embedder, request.prompt_name))
        if sum(map(len, request.inputs)) + around * len(request.inputs) <= LONG_TEXT:
            return encode()
        async with self._long_encode:
            return await asyncio.to_thread(encode)

    def _check_waiting_tokens(self, all_ids: Sequence[Sequence[int]]) -> None:
        """Raise if several inputs could never wait together; a single one may have any size."""
        num_tokens, limit = sum(map(len, all_ids)), self.loop.limits.max_waiting_tokens
        if len(all_ids) > 1 and num_tokens > limit:
            raise ServiceError(
                ErrorKind.INVALID,
                f"the {len(all_ids)} inputs have {num_tokens} tokens together; this server lets "
                f"{limit} wait (serving.limits.max_waiting_tokens): send fewer at once",
                field="input",
            )

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text or a conversation; token ids are returned as they are."""
        if isinstance(prompt, Chat):
            messages = prompt.messages
            size = sum(len(str(m.get("content", ""))) for m in messages)
            size += TEXT_OVERHEAD * len(messages)
            return await self._encode(size, "messages", self.tokenizer.encode_chat, messages)
        if isinstance(prompt, str):
            encode = self.tokenizer.encode
            kwargs = {"add_special_tokens": add_special_tokens}
            return await self._encode(len(prompt), "prompt", encode, prompt, **kwargs)
        return list(prompt)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        self.check_length(token_ids, "token_ids")
        wrong = [i for i in token_ids if not 0 <= i < self.model.vocab_size]
        if wrong:
            raise ServiceError(
                ErrorKind.INVALID,
                f"token id {wrong[0]} is outside the vocabulary [0, {self.model.vocab_size})",
                field="token_ids",
            )
        decode = partial(self.tokenizer.decode, token_ids, skip_special_tokens=False)
        return decode() if len(token_ids) <= LONG_TEXT else await asyncio.to_thread(decode)

    def _check_prompt_logprobs(self, params: SamplingParams, prompt_len: int) -> None:
        """Raise if the prompt's log-probabilities would take seconds to serialize."""
        if params.prompt_logprobs is None:
            return
        num_entries = prompt_len * (params.prompt_logprobs + 1) * params.n
        if num_entries > MAX_PROMPT_LOGPROBS:
            raise ServiceError(
                ErrorKind.INVALID,
                f"prompt_logprobs={params.prompt_logprobs} of {prompt_len} tokens for n={params.n} "
                f"samples are {num_entries} entries; at most {MAX_PROMPT_LOGPROBS} are reported",
                field="prompt_logprobs",
            )

    def check_length(self, token_ids: Sequence[int], field: str) -> None:
        """Raise if there are more ids than the context holds, before each id is looked at."""
        if len(token_ids) > self.model.max_len:
            raise ServiceError(
                ErrorKind.INVALID,
                f"{field} has {len(token_ids)} token ids; the context holds {self.model.max_len}",
                field=field,
            )

    async def _encode(
        self, size: int, field: str, encode: Callable[..., list[int]], *args: Any, **kwargs: Any
    ) -> list[int]:
        try:
            if size <= LONG_TEXT:
                return encode(*args, **kwargs)
            # One at a time: the tokenizer holds Python's lock for parts of it.
            async with self._long_encode:
                return await asyncio.to_thread(encode, *args, **kwargs)
        except ValueError as error:
            raise ServiceError(ErrorKind.INVALID, f"{field}: {error}", field=field) from error


@contextlib.contextmanager
def _input_errors(index: int | None = None) -> Iterator[None]:
    """Name the input at fault, number `index`, in the errors of an embedding request."""
    where = "" if index is None else f"input {index}: "
    names = {"prompt": "input"}
    try:
        yield
    except InvalidRequestError as error:
        field = names.get(error.field or "", error.field)
        raise ServiceError(ErrorKind.INVALID, f"{where}{error}", field=field) from error
    except ServiceError as error:
        field = names.get(error.field or "", error.field)
        retry_after_s = error.retry_after_s
        text = f"{where}{error.message}"
        raise ServiceError(error.kind, text, field=field, retry_after_s=retry_after_s) from error


def _input_request(request: EmbeddingRequest, index: int) -> GenerationRequest:
    """The loop's request for one input of an embedding request."""
    request_id = request.request_id
    if request_id is not None and len(request.inputs) > 1:
        request_id = f"{request_id}.{index}"
    return GenerationRequest(
        request.inputs[index],
        EMBEDDING_PARAMS,
        request_id=request_id,
        timeout_s=request.timeout_s,
        protocol=request.protocol,
        user=request.user,
        operation="embeddings",
    )


def _model_info(engine: EngineLike, name: str | None) -> ModelInfo:
    config = engine.model.config
    return ModelInfo(
        name=name or engine.name or "model",
        vocab_size=config.vocab_size,
        max_len=engine.max_model_len,
        num_parameters=engine.model.num_parameters,
        dtype=str(engine.model.numerics.dtype),
        has_chat_template=engine.tokenizer is not None and engine.tokenizer.has_chat_template,
        created=int(time.time()),
        embedding_dim=engine.embedding_dim,
    )
