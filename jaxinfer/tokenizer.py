"""Text to token ids and back.

Encoding is the `tokenizers` library's. Decoding is a definition of our own, so that a stream can
be decoded token by token and come out equal: every token stands for fixed bytes, and text is the
UTF-8 reading of their concatenation, U+FFFD for what is not UTF-8. Where all bytes are valid
that is what `tokenizers` gives, save for two details: its byte-fallback decoder replaces every byte
of a run that holds a stray one, this one only the stray bytes; its Metaspace decoder drops all
spaces of the first token, this one a single leading space.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from jaxinfer.chat_template import ChatTemplate


class Tokenizer:
    """One model's tokenizer, with its special tokens and its chat template.

    `token_bytes[i]` are the bytes of token i, empty where the vocabulary has a hole.
    `strips_leading_space`: decoding drops one space at the very beginning of the text (vocabularies
    of SentencePiece prepend one). `prefix_ids` and `suffix_ids` go around each encoded text
    with special tokens, beside what the backend's own post-processor adds.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        token_bytes: Sequence[bytes],
        *,
        special_token_ids: Iterable[int] = (),
        eos_token_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        strips_leading_space: bool = False,
        chat_template: str | None = None,
        named_special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._token_bytes = tuple(token_bytes)
        self.special_token_ids = frozenset(special_token_ids)
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.strips_leading_space = strips_leading_space
        self._prefix_ids = list(prefix_ids)
        self._suffix_ids = list(suffix_ids)
        self._chat_template = None if chat_template is None else ChatTemplate(chat_template)
        self._named_special_tokens = dict(named_special_tokens or {})

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; a model's embedding may be padded beyond it."""
        return len(self._token_bytes)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it become those tokens.

        `add_special_tokens` adds what the model expects around a text, such as BOS. Bytes that
        the vocabulary has no token for vanish, as they do in the reference tokenizers. `ValueError`
        for a lone surrogate, which no UTF-8 text holds.
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
        """The text of `ids`; ids beyond the vocabulary (padding of the embedding) are empty.

        `ValueError` for a negative id.
        """
        data = b"".join(self.bytes_of(i, skip_special_tokens=skip_special_tokens) for i in ids)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def bytes_of(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes that one token adds to the text, before any leading space is stripped."""
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative; ids are 0 to {self.vocab_size - 1}")
        if token_id >= len(self._token_bytes):
            return b""
        if skip_special_tokens and token_id in self.special_token_ids:
            return b""
        return self._token_bytes[token_id]

    def texts(self, *, skip_special_tokens: bool = True) -> Sequence[str | None]:
        """Every token's text, before any leading space is stripped; None where its bytes are not
        whole characters. Made once."""
        return self._texts if skip_special_tokens else self._texts_with_special

    @cached_property
    def _texts(self) -> list[str | None]:
        special = self.special_token_ids
        return ["" if i in special else text for i, text in enumerate(self._texts_with_special)]

    @cached_property
    def _texts_with_special(self) -> list[str | None]:
        return [_whole_characters(data) for data in self._token_bytes]

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, `None` if there is no such token."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling, `None` if there is none."""
        return self._backend.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt that the model's chat template makes of `messages`.

        `ValueError` if the model has no template, or the template or the messages are at fault.
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
        """Token ids of the templated messages; the template writes the special tokens itself."""
        prompt = self.apply_chat_template(messages, **variables)
        return self.encode(prompt, add_special_tokens=False)


def _whole_characters(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
