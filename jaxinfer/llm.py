"""`LLM`: a model on this machine, for scripts and notebooks.

llm = LLM("demo")
[answer] = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=32))
print(answer.outputs[0].text)

An encoder embeds instead: `LLM("path/of/bge").embed(["one text", "another"])` is an array, a row a
text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from jaxinfer.build import NO_EMBEDDING, NO_GENERATION, load_model
from jaxinfer.config import EngineConfig
from jaxinfer.embedding.embedder import Embedder
from jaxinfer.embedding.sentences import Text, check_dimensions, encode_texts, finalize_vectors
from jaxinfer.engine.admission import InvalidRequestError
from jaxinfer.engine.protocol import EngineLike
from jaxinfer.engine.request import FinishReason, Request, TokenLogprobs
from jaxinfer.parallel.hosts.peers import ALONE, Peers
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]  # text, or token ids
Message = Mapping[str, Any]  # {"role": ..., "content": ...}


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sample of a prompt."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None  # one a token, where asked for


@dataclasses.dataclass(frozen=True)
class Output:
    """What became of one prompt: `n` samples of it."""

    prompt: str | None  # None where the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[Completion]
    # By position where asked for; None at position 0, which nothing precedes.
    prompt_logprobs: list[TokenLogprobs | None] | None


class LLM:
    """A loaded model with its engine; see the module's text.

    `model` and `peers` as for `load_model`. Prompts of one call run together, whatever their
    number; calls must come from one thread at a time. An encoder has `embed` alone, any other model
    all but that: what a model has not raises `InvalidRequestError`.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        config: EngineConfig | None = None,
        *,
        show_progress: bool = True,
        on_loaded: Callable[[Any], None] = lambda engine: None,
        peers: Peers = ALONE,
    ):
        self.show_progress = show_progress
        self._model, self.generation = load_model(
            model, config, show_progress=show_progress, on_loaded=on_loaded, peers=peers
        )
        # New text by request id, for calls under way: streams may take turns.
        self._texts: dict[str, str] = {}

    @property
    def engine(self) -> EngineLike:
        if not self._model.can_generate:
            raise InvalidRequestError(NO_GENERATION)
        return self._model

    @property
    def embedder(self) -> Embedder:
        if not isinstance(self._model, Embedder):
            raise InvalidRequestError(NO_EMBEDDING)
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        if self._model.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer; give prompts as token ids")
        return self._model.tokenizer

    def default_params(self, **changes: Any) -> SamplingParams:
        """The checkpoint's own generation defaults where it has any, then `changes`."""
        return self.generation.sampling_params(**changes)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Complete every prompt; one output a prompt, in order.

        `params`: for all, or one a prompt. If one prompt is refused (`InvalidRequestError`, which
        names its place in the list), nothing is left running.
        """
        prompts = _as_list(prompts)
        all_params = self._params_for(params, len(prompts))
        groups: list[list[Request]] = []
        try:
            for i, (prompt, its_params) in enumerate(zip(prompts, all_params, strict=True)):
                try:
                    groups.append(self._add(prompt, its_params))
                except InvalidRequestError as error:
                    raise InvalidRequestError(f"prompt {i}: {error}") from error
            self._run([request for group in groups for request in group])
            return [
                _output(prompt, group, self._texts)
                for prompt, group in zip(prompts, groups, strict=True)
            ]
        finally:
            self._forget([request for group in groups for request in group])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Answer one conversation or several, through the model's chat template."""
        if isinstance(messages, Mapping):
            raise ValueError(f"messages is one message, {messages!r}; put it into a list")
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if one else list(messages)
        prompts = [self.tokenizer.encode_chat(c) for c in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Text of one completion as it arrives; leaving the loop early ends the request."""
        params = params or self.default_params()
        if params.n != 1:
            raise InvalidRequestError(f"n is {params.n}; a stream carries one sample")
        [request] = self._add(prompt, params)
        try:
            while True:
                is_last = request.is_finished
                text, self._texts[request.id] = self._texts[request.id], ""
                if text:
                    yield text
                elif is_last:
                    return
                else:
                    self._step()
        finally:
            self._forget([request])

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
    ) -> Float[np.ndarray, "texts outputs"]:
        """The vectors of texts, or of lists of token ids: float32, a row a text, in order.

        Pooled as the checkpoint says (the mean of the tokens where it does not), then cut to the
        first `dimensions` numbers, then scaled to length 1 if `normalize` (None: as the checkpoint
        says). `prompt_name` puts one of the checkpoint's prompts before each text, as E5's "query";
        None is its default prompt, "" none. A text that is too long is refused, or with `truncate`
        loses its last words. All texts or none: `InvalidRequestError` says which is at fault.
        """
        embedder = self.embedder
        check_dimensions(embedder, dimensions)
        all_ids = encode_texts(
            embedder, _as_list(texts), prompt_name=prompt_name, truncate=truncate
        )
        with tqdm(
            total=len(all_ids),
            desc="embedding",
            disable=not self.show_progress,
            dynamic_ncols=True,
        ) as bar:
            vectors = embedder.embed(all_ids, on_progress=bar.update)
        return finalize_vectors(embedder, vectors, normalize=normalize, dimensions=dimensions)

    def _add(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        requests = self.engine.add(token_ids, params)
        self._texts.update((request.id, "") for request in requests)
        return requests

    def _step(self) -> int:
        """One step of the engine; the number of new tokens for calls under way."""
        num_tokens = 0
        for update in self.engine.step():
            if update.request.id in self._texts:
                self._texts[update.request.id] += update.text
                num_tokens += len(update.token_ids)
        return num_tokens

    def _forget(self, requests: Sequence[Request]) -> None:
        """Abort those that still run, and drop their texts."""
        for request in requests:
            self.engine.abort(request.id)
            self._texts.pop(request.id, None)

    def _params_for(self, params: Any, num_prompts: int) -> list[SamplingParams]:
        if params is None:
            params = self.default_params()
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        if len(params) != num_prompts:
            raise ValueError(f"{len(params)} sampling parameters for {num_prompts} prompts")
        return list(params)

    def _run(self, requests: Sequence[Request]) -> None:
        """Step until all of them have ended."""
        with tqdm(
            total=len(requests),
            desc="generating",
            disable=not self.show_progress,
            dynamic_ncols=True,
        ) as bar:
            num_tokens = 0
            while not all(request.is_finished for request in requests):
                num_tokens += self._step()
                bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
                bar.update(sum(request.is_finished for request in requests) - bar.n)


def _as_list(prompts: Any) -> list[Any]:
    """A text or a list of token ids is one prompt; anything else a list of them."""
    is_one = isinstance(prompts, str | bytes) or (
        len(prompts) > 0 and isinstance(prompts[0], int | np.integer)
    )
    return [prompts] if is_one else list(prompts)


def _output(prompt: Prompt, group: Sequence[Request], texts: Mapping[str, str]) -> Output:
    first = group[0]
    completions = []
    for index, request in enumerate(group):
        assert request.finish_reason is not None
        wants_logprobs = request.params.logprobs is not None
        completions.append(
            Completion(
                index,
                request.output_token_ids,
                texts[request.id],
                request.finish_reason,
                request.logprobs.output if wants_logprobs else None,
            )
        )
    prompt_logprobs = None
    if first.params.prompt_logprobs is not None:
        prompt_logprobs = [first.logprobs.prompt.get(i) for i in range(first.prompt_len)]
    text = prompt if isinstance(prompt, str) else None
    return Output(text, first.prompt_token_ids, completions, prompt_logprobs)
