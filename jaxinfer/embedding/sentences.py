"""Encode texts to an encoder's token ids, and turn its pooled vectors into the results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxinfer.embedding.embedder import Embedder
from jaxinfer.engine.admission import InvalidRequestError

Text = str | Sequence[int]  # a string, or token ids that are used unchanged


def encode_text(
    embedder: Embedder, text: Text, *, prompt_name: str | None = None, truncate: bool = False
) -> list[int]:
    """Encode one text, with the checkpoint's prompt before it and special tokens around it.

    `prompt_name` None selects the checkpoint's default prompt if it has one; "" selects none. A
    text given as token ids is used unchanged, without a prompt. `truncate` shortens a text to the
    model's maximum length: a string loses its last words but keeps its special tokens, token ids
    lose the last ones. Raises `InvalidRequestError`. Without `truncate` the embedder checks the
    length.
    """
    max_model_len = embedder.max_model_len
    if not isinstance(text, str):
        if prompt_name:
            raise InvalidRequestError(
                f"prompt_name is {prompt_name!r}, but the text was given as token ids; pass the "
                "text as a string, or leave prompt_name out",
                "prompt_name",
            )
        return list(text[:max_model_len] if truncate else text)
    prompt = find_prompt(embedder, prompt_name)
    if embedder.tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer; give token ids", "prompt")
    text = prompt + text
    if embedder.options.lower_case:
        text = text.lower()
    try:
        ids = embedder.tokenizer.encode(text)
        if truncate and len(ids) > max_model_len:
            bare = embedder.tokenizer.encode(text, add_special_tokens=False)
            return truncate_token_ids(ids, bare, embedder.tokenizer.encode(""), max_model_len)
    except ValueError as error:
        raise InvalidRequestError(str(error), "prompt") from error
    return ids


def encode_texts(embedder: Embedder, texts: Sequence[Text], **options: Any) -> list[list[int]]:
    """Call `encode_text` for each text; an error names the index of the text that caused it."""
    all_ids = []
    for index, text in enumerate(texts):
        try:
            all_ids.append(encode_text(embedder, text, **options))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"text {index}: {error}", error.field) from error
    return all_ids


def find_prompt(embedder: Embedder, name: str | None) -> str:
    """Return the prompt of this name; raise `InvalidRequestError` if there is none."""
    options = embedder.options
    if name is None:
        name = options.default_prompt_name or ""
    if name and name not in options.prompts:
        known = ", ".join(map(repr, options.prompts)) or "none"
        raise InvalidRequestError(
            f"prompt_name is {name!r}; this checkpoint has {known}: use one of those, or prepend "
            "the prompt to the text yourself",
            "prompt_name",
        )
    return options.prompts.get(name, "")


def truncate_token_ids(
    ids: list[int], bare: list[int], empty: list[int], max_model_len: int
) -> list[int]:
    """Shorten `ids` to `max_model_len` by dropping the text's last tokens.

    `bare` are the ids of the text without special tokens, `empty` the ids of an empty text with
    them. The special tokens at the end are kept as far as `max_model_len` has room.
    """
    num_special = len(ids) - len(bare)
    offsets = range(num_special + 1)
    start = next((i for i in offsets if ids[i : i + len(bare)] == bare), None)
    if start is not None:
        num_last = num_special - start
    else:  # words can be tokenized differently next to special tokens
        pairs = zip(reversed(ids), reversed(empty), strict=False)
        num_last = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    num_first = max(0, max_model_len - num_last)
    return ids[:num_first] + ids[len(ids) - min(num_last, max_model_len) :]


def check_dimensions(embedder: Embedder, dimensions: int | None) -> None:
    """Raise `InvalidRequestError` unless the vectors have at least `dimensions` numbers."""
    if dimensions is not None and not 1 <= dimensions <= embedder.embedding_dim:
        raise InvalidRequestError(
            f"dimensions is {dimensions}; this model's vectors have {embedder.embedding_dim}: "
            f"give 1 to {embedder.embedding_dim}, or leave it out",
            "dimensions",
        )


def finalize_vectors(
    embedder: Embedder,
    vectors: Float[np.ndarray, "texts D"],
    *,
    normalize: bool | None = None,
    dimensions: int | None = None,
) -> Float[np.ndarray, "texts outputs"]:
    """Return the result vectors, float32: truncate pooled vectors, then normalize them.

    Only the first `dimensions` numbers are kept, which is useful for a model trained for it
    (Matryoshka representation learning, arXiv:2205.13147). Vectors are scaled to length 1 if
    `normalize` is True, or if it is None and the checkpoint says so. A vector of zeros stays zero.
    """
    check_dimensions(embedder, dimensions)
    vectors = vectors[:, :dimensions]
    if embedder.options.normalize if normalize is None else normalize:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return vectors
