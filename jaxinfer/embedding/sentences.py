"""From a text to the token ids that an encoder gets; from pooled vectors to those handed out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxinfer.embedding.embedder import Embedder
from jaxinfer.engine.admission import InvalidRequestError

Text = str | Sequence[int]  # a text, or token ids as they are


def encode_text(
    embedder: Embedder, text: Text, *, prompt_name: str | None = None, truncate: bool = False
) -> list[int]:
    """Token ids of one text, with the checkpoint's prompt before it and special tokens around it.

    `prompt_name` None is the checkpoint's default prompt, where it has one; "" is none. Token ids
    are taken as they are, and no prompt is put before them. `truncate` cuts what the model does not
    hold: a text's last words, not its special tokens; of token ids the last ones. Raises
    `InvalidRequestError`; the length without `truncate` is the embedder's to check.
    """
    max_model_len = embedder.max_model_len
    if not isinstance(text, str):
        if prompt_name:
            raise InvalidRequestError(
                f"prompt_name is {prompt_name!r}, and a text was given as token ids; a prompt goes "
                "before a text alone",
                "prompt_name",
            )
        return list(text[:max_model_len] if truncate else text)
    prompt = prompt_of(embedder, prompt_name)
    if embedder.tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer; give token ids", "prompt")
    text = prompt + text
    if embedder.options.lower_case:
        text = text.lower()
    try:
        ids = embedder.tokenizer.encode(text)
        if truncate and len(ids) > max_model_len:
            bare = embedder.tokenizer.encode(text, add_special_tokens=False)
            return truncated(ids, bare, embedder.tokenizer.encode(""), max_model_len)
    except ValueError as error:
        raise InvalidRequestError(str(error), "prompt") from error
    return ids


def encode_texts(embedder: Embedder, texts: Sequence[Text], **named: Any) -> list[list[int]]:
    """`encode_text` of each, with its options; an error names the place of the text at fault."""
    all_ids = []
    for index, text in enumerate(texts):
        try:
            all_ids.append(encode_text(embedder, text, **named))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"text {index}: {error}", error.field) from error
    return all_ids


def prompt_of(embedder: Embedder, name: str | None) -> str:
    """What goes before a text for this name of a prompt; `InvalidRequestError` for an unknown."""
    options = embedder.options
    if name is None:
        name = options.default_prompt_name or ""
    if name and name not in options.prompts:
        known = ", ".join(map(repr, options.prompts)) or "none"
        raise InvalidRequestError(
            f"prompt_name is {name!r}; this checkpoint has {known}: put the words before the text "
            "yourself",
            "prompt_name",
        )
    return options.prompts.get(name, "")


def truncated(ids: list[int], bare: list[int], empty: list[int], max_model_len: int) -> list[int]:
    """`ids` without the last tokens of the text: `bare` are the text's own, `empty` those that an
    empty text has. The special tokens at the end stay as far as `max_model_len` has room."""
    num_special = len(ids) - len(bare)
    places = range(num_special + 1)
    start = next((i for i in places if ids[i : i + len(bare)] == bare), None)
    if start is not None:
        num_last = num_special - start
    else:  # words become other tokens beside special ones
        pairs = zip(reversed(ids), reversed(empty), strict=False)
        num_last = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    num_first = max(0, max_model_len - num_last)
    return ids[:num_first] + ids[len(ids) - min(num_last, max_model_len) :]


def check_dimensions(embedder: Embedder, dimensions: int | None) -> None:
    if dimensions is not None and not 1 <= dimensions <= embedder.dim:
        raise InvalidRequestError(
            f"dimensions is {dimensions}; this model's vectors have {embedder.dim}: give 1 to "
            f"{embedder.dim}, or leave it out",
            "dimensions",
        )


def finished(
    embedder: Embedder,
    vectors: Float[np.ndarray, "texts D"],
    *,
    normalize: bool | None = None,
    dimensions: int | None = None,
) -> Float[np.ndarray, "texts outputs"]:
    """Pooled vectors as they are handed out, float32: cut to their first `dimensions` (which means
    something for a model trained so, arXiv:2205.13147), then scaled to length 1 if `normalize`, or
    if that is None and the checkpoint says so. A vector of zeros stays one."""
    check_dimensions(embedder, dimensions)
    vectors = vectors[:, :dimensions]
    if embedder.options.normalize if normalize is None else normalize:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return vectors
