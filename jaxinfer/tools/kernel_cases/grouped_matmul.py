"""Products of a mixture of experts at the sizes of real models: a decode step of 64 tokens and a
prefill chunk of 2048, each token in as many groups as it has experts."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kernels.grouped_matmul import grouped_matmul
from jaxinfer.tools.kernel_cases import Case, random_array, with_headlines
from jaxinfer.tools.kernel_cases.gated_mlp import random_weight, weight_bytes, weight_spec

MIXTRAL = {"E": 8, "D": 4096, "F": 14336}  # 8x7B: 2 experts a token
QWEN = {"E": 128, "D": 2048, "F": 768}  # Qwen3-30B-A3B: 8 experts a token


HEADLINES = (
    "mixtral-8x7b up decode",
    "mixtral-8x7b up prefill",
    "mixtral-8x7b down decode",
    "mixtral-8x7b up decode int8",
)


def cases() -> dict[str, Case]:
    found = {
        "mixtral-8x7b up decode": _case(64 * 2, **MIXTRAL),
        "mixtral-8x7b up prefill": _case(2048 * 2, **MIXTRAL),
        "mixtral-8x7b down decode": _case(64 * 2, E=8, D=14336, F=4096),
        "mixtral-8x7b up decode int8": _case(64 * 2, **MIXTRAL, bits=8),
        "mixtral-8x7b up prefill int8": _case(2048 * 2, **MIXTRAL, bits=8),
        "qwen3-30b-a3b up one token": _case(8, **QWEN),
        "qwen3-30b-a3b up decode": _case(64 * 8, **QWEN),
        "qwen3-30b-a3b up prefill": _case(2048 * 8, **QWEN),
        "qwen3-30b-a3b down decode": _case(64 * 8, E=128, D=768, F=2048),
        "qwen3-30b-a3b up decode int8": _case(64 * 8, **QWEN, bits=8),
        "qwen3-30b-a3b up prefill int8": _case(2048 * 8, **QWEN, bits=8),
        "qwen3-30b-a3b up decode int4": _case(64 * 8, **QWEN, bits=4, group_size=128),
    }
    return with_headlines(found, HEADLINES)


def tiny_cases() -> dict[str, Case]:
    return {
        "plain": _case(20, E=3, D=64, F=48),
        "int8": _case(18, E=4, D=64, F=32, bits=8),
        "int4": _case(10, E=2, D=128, F=32, bits=4, group_size=32),
    }


def _case(T: int, *, E: int, D: int, F: int, bits: int = 16, group_size: int | None = None) -> Case:
    """A case in bfloat16, except for the weights' values and scales; rows are assigned to groups
    uniformly."""
    x = jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
    weight = weight_spec((E, D, F), bits, group_size)
    sizes = jax.ShapeDtypeStruct((E,), jnp.int32)
    share_used = 1 - (1 - 1 / E) ** T  # share of the experts in use, on average
    return Case(
        function=grouped_matmul,
        arguments=(x, weight, sizes),
        options={},
        make=partial(_make, x, weight, sizes),
        bytes_moved=2 * T * (D + F) + round(share_used * weight_bytes(weight)) + 4 * E,
        flops=2 * T * D * F,
        tolerance=1e-2,
        peer=_peer if bits == 16 else None,
    )


def _make(x, weight, sizes, rng):
    (E,) = sizes.shape
    counts = rng.multinomial(x.shape[0], np.full(E, 1 / E)).astype(np.int32)
    return (random_array(rng, x), random_weight(rng, weight), counts), {}


def _peer(x, weight, sizes):
    """PyTorch's product of each group that has rows, with sizes known in advance."""
    import torch

    ends = [0, *np.cumsum(sizes.tolist()).tolist()]
    groups = [
        (weight[e], slice(first, end))
        for e, (first, end) in enumerate(itertools.pairwise(ends))
        if first < end
    ]
    out = torch.zeros((x.shape[0], weight.shape[2]), dtype=x.dtype, device=x.device)

    def run():
        for matrix, rows in groups:
            torch.matmul(x[rows], matrix, out=out[rows])
        return out

    return run
