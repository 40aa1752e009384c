"""Tokenization: text to token ids and back.

The `tokenizers` or the `sentencepiece` library encodes. Decoding is implemented here so that a
stream decoded token by token equals the text decoded at once: every token has fixed bytes, and
possibly different ones as the first token of a text (a SentencePiece token drops its leading space
there, and no space precedes a WordPiece token). The text is the concatenated bytes decoded as
UTF-8, with U+FFFD for invalid bytes. This equals the result of `tokenizers` with one exception: its
byte-fallback decoder replaces every byte of a run that contains an invalid byte, whereas this one
replaces only the invalid bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from jaxinfer.text.chat_template import ChatTemplate


class Encoding(Protocol):
    """The result of encoding a text."""

    @property
    def ids(self) -> list[int]: ...


class Backend(Protocol):
    """The library that encodes: `tokenizers.Tokenizer`, or a class with the same methods."""

    def encode(self, sequence: str, /, *, add_special_tokens: bool = True) -> Encoding: ...

    def token_to_id(self, token: str, /) -> int | None: ...

    def id_to_token(self, id: int, /) -> str | None: ...


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a vocabulary."""

    ids: Iterable[int] = ()
    eos_ids: Iterable[int] = ()
    bos_id: int | None = None
    prefix_ids: Sequence[int] = ()  # before each text that is encoded with special tokens
    suffix_ids: Sequence[int] = ()  # after it
    named: Mapping[str, str] = dataclasses.field(default_factory=dict)  # for chat templates


class Tokenizer:
    """A model's tokenizer, with its special tokens and its chat template.

    `token_bytes[i]` are the bytes of token i, empty if the vocabulary has no such token.
    `first_bytes[i]` are its bytes as the first token of a text, if they differ. The first token is
    the first one whose `token_bytes` are not empty; skipped special tokens do not count.
    If special tokens are added, `prefix_ids` and `suffix_ids` surround each encoded text, in
    addition to the tokens that the backend's own post-processor adds.
    """

    def __init__(
        self,
        backend: Backend,
        token_bytes: Sequence[bytes],
        *,
        first_bytes: Mapping[int, bytes] | None = None,
        special: SpecialTokens | None = None,
        chat_template: str | None = None,
    ) -> None:
        special = special or SpecialTokens()
        self._backend = backend
        self._token_bytes = tuple(token_bytes)
        self._first_bytes = dict(first_bytes or {})
        self.special_token_ids = frozenset(special.ids)
        self.eos_token_ids = tuple(special.eos_ids)
        self.bos_token_id = special.bos_id
        self._prefix_ids = list(special.prefix_ids)
        self._suffix_ids = list(special.suffix_ids)
        self._chat_template = None if chat_template is None else ChatTemplate(chat_template)
        self._named_special_tokens = dict(special.named)

    @property
    def vocab_size(self) -> int:
        """The largest token id plus one; a model's embedding may be padded beyond it."""
        return len(self._token_bytes)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens written in it become those tokens.

        `add_special_tokens` adds the tokens that the model expects around a text, such as BOS.
        Bytes without a token in the vocabulary are dropped, as in the reference tokenizers. Raises
        `ValueError` for a lone surrogate, which UTF-8 cannot represent.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds a lone surrogate {text[error.start]!r} at character "
                f"{error.start}; it must be valid Unicode"
            ) from error
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._prefix_ids + ids + self._suffix_ids if add_special_tokens else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; ids beyond the vocabulary (embedding padding) are empty.

        Raises `ValueError` for a negative id.
        """
        parts: list[bytes] = []
        is_first = self.first_differs
        for token_id in ids:
            data = self.bytes_of(token_id, skip_special_tokens=skip_special_tokens)
            if is_first and data:
                data, is_first = self.first_bytes_of(token_id), False
            parts.append(data)
        return b"".join(parts).decode("utf-8", "replace")

    def bytes_of(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """Return the bytes of a token that is not the first of a text."""
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative; ids are 0 to {self.vocab_size - 1}")
        if token_id >= len(self._token_bytes):
            return b""
        if skip_special_tokens and token_id in self.special_token_ids:
            return b""
        return self._token_bytes[token_id]

    @property
    def first_differs(self) -> bool:
        """Whether some token has different bytes as the first token of a text."""
        return bool(self._first_bytes)

    def first_bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of the first token of a text, which `bytes_of` must not make empty."""
        return self._first_bytes.get(token_id, self._token_bytes[token_id])

    def texts(self, *, skip_special_tokens: bool = True) -> Sequence[str | None]:
        """Return the text of every token that is not the first of a text.

        An entry is None if the token's bytes are not whole characters. The list is cached.
        """
        return self._texts if skip_special_tokens else self._texts_with_special

    @cached_property
    def _texts(self) -> list[str | None]:
        special = self.special_token_ids
        return ["" if i in special else text for i, text in enumerate(self._texts_with_special)]

    @cached_property
    def _texts_with_special(self) -> list[str | None]:
        return [_whole_characters(data) for data in self._token_bytes]

    def id_to_token(self, token_id: int) -> str | None:
        """Return the name of a token in the vocabulary, or `None` if there is no such token."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """Return the id of the token with this name in the vocabulary, or `None`."""
        return self._backend.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt that the model's chat template renders from `messages`.

        Raises `ValueError` if the model has no template, or if rendering fails because of the
        template or the messages.
        """
        if self._chat_template is None:
            raise ValueError(
                "this model has no chat template (a base model?); pass a prompt instead of messages"
            )
        return self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self._named_special_tokens,
            **variables,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Return the token ids of the rendered prompt; the template writes the special tokens."""
        prompt = self.apply_chat_template(messages, **variables)
        return self.encode(prompt, add_special_tokens=False)


def _whole_characters(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
