"""The checks that a request must pass before the engine queues it. They change nothing."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from jaxinfer.models.functional import FunctionalModel
from jaxinfer.options import ConfigError
from jaxinfer.sampling.params import SamplingParams, SamplingParamsError
from jaxinfer.text.tokenizer import Tokenizer


class InvalidRequestError(ValueError):
    """A request refused at admission; the message names the value, the limit and the way out.

    `field` is the one field at fault, if there is one: "prompt", "priority", or a field of
    `SamplingParams`.
    """

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message)
        self.field = field


class Admissible(NamedTuple):
    """What the checks found out about a valid request."""

    max_len: int  # prompt and output together
    bad_word_ids: tuple[tuple[int, ...], ...]


class Limits(NamedTuple):
    """The sizes of an engine, which decide what it must refuse."""

    vocab_size: int
    max_len: int  # tokens of the context
    num_pages: int
    page_size: int
    tokenizer: Tokenizer | None

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Admissible:
        """Raise `InvalidRequestError` for a request that the engine cannot serve."""
        if isinstance(prompt_token_ids, str | bytes):
            raise InvalidRequestError("the prompt must be token ids; LLM takes text", "prompt")
        prompt_len = len(prompt_token_ids)
        if not prompt_len:
            raise InvalidRequestError("the prompt is empty; it needs at least one token", "prompt")
        room = self.max_len - prompt_len
        if room < (0 if params.max_tokens == 0 else 1):
            raise InvalidRequestError(
                f"the prompt has {prompt_len} tokens; the context holds {self.max_len} and the "
                "output needs at least one: shorten the prompt or raise max_model_len",
                "prompt",
            )
        self._check_ids(prompt_token_ids)
        max_len = prompt_len + min(room, room if params.max_tokens is None else params.max_tokens)
        max_len = self._fit_pool(prompt_len, max_len, params)
        bad_word_ids = self._bad_word_ids(params)
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError(
                "stop strings need a tokenizer, and this engine has none; use stop_token_ids",
                "stop",
            )
        try:
            params.check(self.vocab_size, bad_word_ids)
        except SamplingParamsError as error:
            raise InvalidRequestError(str(error), error.field) from error
        return Admissible(max_len, bad_word_ids)

    def _check_ids(self, prompt_token_ids: Sequence[int]) -> None:
        for position, token_id in enumerate(prompt_token_ids):
            is_int = isinstance(token_id, int | np.integer) and not isinstance(token_id, bool)
            if not is_int or not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"prompt token {token_id!r} at position {position} is outside the vocabulary "
                    f"[0, {self.vocab_size})",
                    "prompt",
                )

    def _fit_pool(self, prompt_len: int, max_len: int, params: SamplingParams) -> int:
        """Return `max_len`, cut to what the pool holds if `max_tokens` is unset; else refuse it."""
        capacity = self.num_pages * self.page_size + 1  # the last token is never cached
        if max_len <= capacity:
            return max_len
        if params.max_tokens is None and prompt_len < capacity:
            return capacity
        raise InvalidRequestError(
            f"the request may grow to {max_len} tokens ({prompt_len} of the prompt); the cache "
            f"holds {capacity} ({self.num_pages} pages of {self.page_size}): lower "
            "max_tokens, shorten the prompt or raise cache.num_pages",
            "max_tokens",
        )

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return each word's token ids, at the start of a text and after a space."""
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            raise InvalidRequestError(
                "bad_words need a tokenizer, and this engine has none", "bad_words"
            )
        sequences = {}
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                try:
                    ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
                except ValueError as error:
                    raise InvalidRequestError(f"bad_words: {error}", "bad_words") from error
                if not ids:
                    raise InvalidRequestError(
                        f"bad_words: {word!r} has no tokens; leave it out", "bad_words"
                    )
                sequences[ids] = None
        return tuple(sequences)


def resolve_max_model_len(requested: int | None, model: FunctionalModel) -> int:
    """Return the tokens of a context: the requested number, or the model's if that is None.

    Raises `ConfigError` past the end of a table of positions. Computed positions may be longer than
    the model was made for; a warning says so.
    """
    model_len = model.config.max_len
    if requested is not None and requested > model_len:
        if getattr(model.config, "has_position_table", False):
            raise ConfigError(
                f"max_model_len is {requested}; this model has a table of {model_len} positions, "
                "and no more: lower it or leave it out"
            )
        text = "max_model_len is %d, past the %d positions that the model was made for"
        logging.warning(text, requested, model_len)
    return requested or model_len


def check_priority(priority: int, policy: str) -> None:
    """Raise `InvalidRequestError` for a priority that the scheduler's policy does not use."""
    if not isinstance(priority, int):
        raise InvalidRequestError(
            f"priority is {priority!r}; it must be a whole number", "priority"
        )
    if priority and policy != "priority":
        raise InvalidRequestError(
            f"priority is {priority}, which the policy {policy} does not know; set "
            "scheduler.policy=priority",
            "priority",
        )


def check_ids(request_ids: Iterable[str], in_use: Container[str]) -> None:
    """Raise `InvalidRequestError` for a request id that is in use."""
    for request_id in request_ids:
        if request_id in in_use:
            raise InvalidRequestError(
                f"request id {request_id!r} is in use; choose another", "request_id"
            )
