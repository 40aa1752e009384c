"""From a text to the token ids that an encoder gets; from pooled vectors to those handed out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jaxinfer.admission import InvalidRequestError
from jaxinfer.embedding.embedder import Embedder

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
    options, max_len = embedder.options, embedder.max_len
    if not isinstance(text, str):
        if prompt_name:
            raise InvalidRequestError(
                f"prompt_name is {prompt_name!r}, and a text was given as token ids; a prompt goes "
                "before a text alone",
                "prompt_name",
            )
        return list(text[:max_len] if truncate else text)
    if prompt_name is None:
        prompt_name = options.default_prompt_name or ""
    if prompt_name and prompt_name not in options.prompts:
        known = ", ".join(map(repr, options.prompts)) or "none"
        raise InvalidRequestError(
            f"prompt_name is {prompt_name!r}; this checkpoint has {known}: put the words before "
            "the text yourself",
            "prompt_name",
        )
    if embedder.tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer; give token ids", "prompt")
    text = options.prompts.get(prompt_name, "") + text
    if options.lower_case:
        text = text.lower()
    try:
        ids = embedder.tokenizer.encode(text)
        if truncate and len(ids) > max_len:
            bare = embedder.tokenizer.encode(text, add_special_tokens=False)
            return _truncated(ids, bare, max_len)
    except ValueError as error:
        raise InvalidRequestError(str(error), "prompt") from error
    return ids


def _truncated(ids: list[int], bare: list[int], max_len: int) -> list[int]:
    """`ids` without the last tokens of the text, whose own are `bare`."""
    num_special = len(ids) - len(bare)
    places = range(num_special + 1)
    start = next((i for i in places if ids[i : i + len(bare)] == bare), None)
    if start is None or num_special >= max_len:
        return ids[:max_len]
    end = start + len(bare)
    return ids[:start] + bare[: max_len - num_special] + ids[end:]


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
