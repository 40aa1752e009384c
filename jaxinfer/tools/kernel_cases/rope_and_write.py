"""Rotary embedding and cache write at the heads of real models: a decode step of 64 rows over a
pool of 8192 tokens each, a prefill chunk of 2048 tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kernels.folding import rows_and_lanes
from jaxinfer.kernels.kv_pages import KVPages, NewTokens
from jaxinfer.kernels.rope_and_write import rope_and_write
from jaxinfer.tools.kernel_cases import GPU, TPU, Case, random_array, with_headlines

B = 128  # tokens a page


@dataclasses.dataclass(frozen=True)
class Heads:
    """One device's share of a model; `half` is the rotated half of a head, None without RoPE."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    half: int | None


LLAMA3_8B = Heads(32, 8, 128, 64)
LLAMA3_70B_8 = Heads(8, 1, 128, 64)  # Llama-3-70B over 8 devices
LLAMA32_1B = Heads(32, 8, 64, 32)
PHI2 = Heads(32, 32, 80, 16)  # two fifths of a head are rotated
GPT2 = Heads(12, 12, 64, None)


def write_case(
    heads: Heads,
    num_tokens: int,
    num_pages: int,
    cache_dtype: Any = jnp.bfloat16,
    *,
    is_folded: bool = False,
    targets: tuple[str, ...] = (*TPU, *GPU),
) -> Case:
    """A case in bfloat16. Up to 64 tokens are decodes of one row each; more are one row's chunk."""
    T, N, K, H = num_tokens, heads.num_heads, heads.num_kv_heads, heads.head_dim
    spec: Any = jax.ShapeDtypeStruct
    rows, lanes = rows_and_lanes(B, H) if is_folded else (B, H)
    stored = spec((num_pages, K, rows, lanes), cache_dtype)
    is_scaled = stored.dtype.itemsize == 1
    scales = spec((num_pages, K, B), jnp.float32) if is_scaled else None
    angles = None if heads.half is None else spec((T, heads.half), jnp.float32)
    tokens = (spec((T, N, H), jnp.bfloat16), *[spec((T, K, H), jnp.bfloat16)] * 2)
    ids = spec((T,), jnp.int32)
    pages = KVPages(stored, stored, scales, scales)
    q, k, v = tokens
    arguments = (q, NewTokens(k, v, ids, ids), None if angles is None else (angles, angles), pages)
    rotated_bytes = 0 if angles is None else T * (2 * 2 * N * H + 8 * angles.shape[1])
    written = 2 * T * K * (H * stored.dtype.itemsize + 4 * is_scaled)
    return Case(
        function=rope_and_write,
        arguments=arguments,
        options={},
        make=lambda rng: (_made(rng, arguments), {}),
        bytes_moved=rotated_bytes + 2 * 2 * T * K * H + written + 8 * T,
        flops=0,
        tolerance={"int8": 2e-2, "float8_e4m3fn": 4e-2}.get(stored.dtype.name, 1e-2),
        backends=("tpu",) if is_folded else ("tpu", "gpu"),
        targets=targets,
    )


def _made(rng: np.random.Generator, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    q, new, rotary, pages = arguments
    T, P = new.page.shape[0], pages.k.shape[0]
    if T <= 64:
        page, offset = rng.permutation(P)[:T], rng.integers(0, B, T)
    else:  # from the middle of a page
        position = np.arange(T) + B // 2
        page, offset = rng.permutation(P)[position // B], position % B
    angle = None if rotary is None else 100 * rng.random(rotary[0].shape, np.float32)
    ids: Any = page.astype(np.int32), offset.astype(np.int32)
    made: Any = [random_array(rng, x) for x in (q, new.k, new.v)]
    return (
        made[0],
        NewTokens(*made[1:], *ids),
        None if angle is None else (np.cos(angle), np.sin(angle)),
        jax.tree.map(lambda x: random_array(rng, x), pages),
    )


HEADLINES = (
    "llama3_8b decode",
    "llama3_8b prefill",
    "llama3_8b int8 decode",
    "llama3_70b/8 decode",
    "llama3_70b/8 prefill",
)


def cases() -> dict[str, Case]:
    """On TPUs the decodes and the folded prefill represent the rest, which XLA takes long to
    compile."""
    int8, float8 = jnp.int8, jnp.float8_e4m3fn
    on_gpu: dict[str, Any] = {"targets": GPU}
    folded: dict[str, Any] = {"is_folded": True, "targets": TPU}
    found = {
        "llama3_8b decode": write_case(LLAMA3_8B, 64, 4096),
        "llama3_8b prefill": write_case(LLAMA3_8B, 2048, 4096, **on_gpu),
        "llama3_8b int8 decode": write_case(LLAMA3_8B, 64, 4096, int8),
        "llama3_8b int8 prefill": write_case(LLAMA3_8B, 2048, 4096, int8, **on_gpu),
        "llama3_8b float8 prefill": write_case(LLAMA3_8B, 2048, 4096, float8, targets=("h100",)),
        "llama3_70b/8 decode": write_case(LLAMA3_70B_8, 64, 4096),
        "llama3_70b/8 prefill": write_case(LLAMA3_70B_8, 2048, 4096, **on_gpu),
        "llama3.2_1b prefill": write_case(LLAMA32_1B, 2048, 4096, **on_gpu),
        "llama3.2_1b folded prefill": write_case(LLAMA32_1B, 2048, 4096, **folded),
        "phi2 prefill": write_case(PHI2, 2048, 1024, **on_gpu),
        "gpt2 decode": write_case(GPT2, 64, 1024, **on_gpu),
    }
    return with_headlines(found, HEADLINES)


def tiny_cases() -> dict[str, Case]:
    heads = Heads(4, 2, 32, 16)
    return {
        "decode": write_case(heads, 3, 8, targets=GPU),
        "int8 decode": write_case(heads, 3, 8, jnp.int8, targets=GPU),
    }
