"""Flash attention at the shapes of real models: whole prompts, an encoder, windows, masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kernels.flash_attention import (
    AttentionMask,
    AttentionVariant,
    ColumnIntervals,
    block_mask,
    flash_attention,
)
from jaxinfer.tools.kernel_cases import Arguments, Case, random_array, with_headlines

DOCUMENT = 512  # tokens a document of the packed case


def prefix_lm(row, head, q_position, k_position):
    """Everyone sees the first 1024 tokens (PaliGemma's prefix), and what is before."""
    return (k_position <= q_position) | (k_position < 1024)


def distance_bias(score, row, head, q_position, k_position):
    """A score that falls with the logarithm of the distance (KERPLE, arXiv:2205.09921)."""
    distance = jnp.abs(q_position - k_position).astype(jnp.float32)
    return score - 0.5 * jnp.log(1.0 + 0.25 * distance)


HEADLINES = (
    "llama3_8b prefill 2048",
    "llama3_70b/8 prefill 2048",
)


def cases() -> dict[str, Case]:
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    prompt = {"causal": True, "scale": 128**-0.5}
    mask = partial(block_mask, prefix_lm, 4096, 4096)
    abstract_mask = jax.eval_shape(mask)
    hidden = ColumnIntervals(_i32(1, 1, 8192), _i32(1, 1, 8192))
    found = {
        "llama3_8b prefill 2048": _case((1, 2048, 2048, 32, 8, 128), 0.5, peer=_peer, **prompt),
        "llama3_70b/8 prefill 2048": _case((1, 2048, 2048, 8, 1, 128), 0.5, peer=_peer, **prompt),
        "llama3_8b ring chunk 2048 of 8192": _case(
            (1, 2048, 2048, 32, 8, 128), 1.0, scale=128**-0.5, return_lse=True, kv_len=_i32(1)
        ),
        "llama3_8b prefill 1024 float32": _case(
            (1, 1024, 1024, 32, 8, 128), 0.5, dtype=jnp.float32, tolerance=1e-5, **prompt
        ),
        "bert_base 8 x 512": _case((8, 512, 512, 12, 12, 64), 0.7, scale=64**-0.5, kv_len=_i32(8)),
        "gemma2_9b window 4096 of 8192": _case(
            (1, 8192, 8192, 16, 8, 256), 0.375, scale=256**-0.5, causal=True, window=4096,
            soft_cap=50.0,
        ),
        "gpt_oss_20b sinks, window 128": _case(
            (1, 4096, 4096, 64, 8, 64), 128 / 4096, scale=64**-0.5, causal=True, window=128,
            sinks=f32(64),
        ),
        "bloom_1b7 alibi": _case(
            (1, 2048, 2048, 16, 16, 128), 0.5, alibi_slopes=f32(16), **prompt
        ),
        "phi2 head 80": _case((1, 2048, 2048, 32, 32, 80), 0.5, causal=True, scale=80**-0.5),
        "deepseek head 192": _case((1, 2048, 2048, 16, 16, 192), 0.5, causal=True, scale=192**-0.5),
        "prefix mask_mod": _case(
            (1, 4096, 4096, 32, 8, 128), 0.53, scale=128**-0.5, mask_mod=prefix_lm,
            block_mask=abstract_mask, values={"block_mask": mask},
        ),
        "score_mod": _case((1, 2048, 2048, 32, 8, 128), 0.5, score_mod=distance_bias, **prompt),
        "packed documents 8192": _case(
            (1, 8192, 8192, 32, 8, 128), 0.5 * DOCUMENT / 8192, hidden=hidden, **prompt,
            values={"hidden": _documents},
        ),
    }  # fmt: skip
    return with_headlines(found, HEADLINES)


def _case(
    sizes: tuple[int, ...],  # R, T, S, N, K, H
    share: float,  # of all pairs (query, key) that are seen
    *,
    dtype: Any = jnp.bfloat16,
    tolerance: float = 1e-2,
    peer: Callable[..., Callable[[], Any]] | None = None,
    values: dict[str, Callable[[], Any]] | None = None,
    backends: tuple[str, ...] = ("tpu", "gpu"),
    **options: Any,
) -> Case:
    R, T, S, N, K, H = sizes
    spec = lambda length, heads: jax.ShapeDtypeStruct((R, length, heads, H), dtype)
    arrays = (spec(T, N), spec(S, K), spec(S, K))
    item = jnp.dtype(dtype).itemsize
    call = _arguments(arrays, options)
    static = {name: options[name] for name in ("score_mod", "return_lse") if name in options}
    return Case(
        function=flash_attention,
        arguments=call,
        options=static,
        make=lambda rng: (_arguments(*_made(arrays, options, values or {}, rng)), static),
        bytes_moved=R * H * item * (2 * T * N + 2 * S * K)
        + (4 * R * T * N if options.get("return_lse") else 0),
        flops=int(4 * R * N * T * S * H * share),
        tolerance=tolerance,
        backends=backends,
        peer=peer,
    )


def _arguments(arrays: Arguments, options: dict[str, Any]) -> Arguments:
    """Return the arguments of `flash_attention`: the options go into their groups."""
    variant, mask = (
        group(**{f.name: options[f.name] for f in dataclasses.fields(group) if f.name in options})
        for group in (AttentionVariant, AttentionMask)
    )
    return *arrays, variant, mask


def _made(
    arguments: Arguments,
    options: dict[str, Any],
    values: dict[str, Callable[[], Any]],
    rng: np.random.Generator,
) -> tuple[Arguments, dict[str, Any]]:
    """Return normal numbers; row r's length is the largest for r = 0, then less."""
    real = {**options, **{name: jax.tree.map(np.asarray, f()) for name, f in values.items()}}
    if "kv_len" in options:
        R, S = arguments[1].shape[:2]
        real["kv_len"] = (S - S * np.arange(R) * 3 // (5 * R)).astype(np.int32)
    if "sinks" in options:
        real["sinks"] = random_array(rng, options["sinks"])
    if "alibi_slopes" in options:
        N = options["alibi_slopes"].shape[0]
        real["alibi_slopes"] = (2.0 ** (-8 * (1 + np.arange(N)) / N)).astype(np.float32)
    return tuple(random_array(rng, spec) for spec in arguments), real


def _documents() -> ColumnIntervals:
    """A key is hidden from the queries behind its document."""
    s = np.arange(8192, dtype=np.int32)
    end = (s // DOCUMENT + 1) * DOCUMENT
    return ColumnIntervals(end[None, None], np.full_like(end, 8192)[None, None])


def _peer(
    q: Any, k: Any, v: Any, variant: AttentionVariant, mask: AttentionMask
) -> Callable[[], Any]:
    """PyTorch's `scaled_dot_product_attention`, causal, on the same numbers laid out by heads."""
    import torch.nn.functional as F

    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return lambda: F.scaled_dot_product_attention(
        q, k, v, is_causal=mask.causal, scale=variant.scale, enable_gqa=True
    )


def tiny_cases() -> dict[str, Case]:
    mask = partial(block_mask, prefix_lm, 32, 48, q_block=16, k_block=16, q_offset=16)
    tiny: dict[str, Any] = {"backends": ("gpu",), "dtype": jnp.float32, "tolerance": 1e-5}
    return {
        "causal": _case((1, 32, 32, 4, 2, 16), 0.5, scale=0.25, causal=True, peer=_peer, **tiny),
        "length": _case((2, 16, 32, 2, 2, 64), 0.7, scale=0.1, kv_len=_i32(2), **tiny),
        "block mask": _case(
            (1, 32, 48, 2, 1, 16), 0.5, scale=0.25, mask_mod=prefix_lm, q_offset=16,
            block_mask=jax.eval_shape(mask), values={"block_mask": mask}, **tiny,
        ),
    }  # fmt: skip


def _i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
