"""The gated half of a feed-forward layer at the sizes of real models: one token, a decode step of
64 and a prefill chunk of 2048."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.kernels.gated_mlp import gated_mlp
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray, pack_rows_for
from jaxinfer.tools.kernel_cases import Case, random_array, with_headlines

HEADLINES = (
    "llama-3-8b decode",
    "llama-3-8b prefill",
    "llama-3-8b decode int8",
    "llama-3-70b over 8 decode",
    "llama-3-70b over 8 prefill",
)


def cases() -> dict[str, Case]:
    found = {
        "llama-3-8b one token": _case(1, 4096, 14336),
        "llama-3-8b decode": _case(64, 4096, 14336),
        "llama-3-8b prefill": _case(2048, 4096, 14336),
        "llama-3-70b over 8 decode": _case(64, 8192, 3584),
        "llama-3-70b over 8 prefill": _case(2048, 8192, 3584),
        "gemma-2-9b decode": _case(64, 3584, 14336, activation="gelu_pytorch_tanh"),
        "llama-3-8b decode, gelu and bias": _case(
            64, 4096, 14336, activation="gelu", has_bias=True
        ),
        "llama-3-8b decode int8": _case(64, 4096, 14336, bits=8),
        "llama-3-8b prefill int8": _case(2048, 4096, 14336, bits=8),
        "llama-3-8b one token int4": _case(1, 4096, 14336, bits=4, group_size=128),
        "llama-3-8b prefill int4": _case(2048, 4096, 14336, bits=4, group_size=128),
    }
    return with_headlines(found, HEADLINES)


def tiny_cases() -> dict[str, Case]:
    return {
        "plain": _case(3, 128, 96),
        "int8": _case(18, 128, 48, bits=8),
        "int4": _case(2, 256, 32, bits=4, group_size=64),
    }


def _case(
    T: int,
    D: int,
    F: int,
    *,
    activation: str = "silu",
    has_bias: bool = False,
    bits: int = 16,
    group_size: int | None = None,
) -> Case:
    """A case in bfloat16, except for the weights' values and their float32 scales."""
    x = jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
    weight = weight_spec((2, D, F), bits, group_size)
    bias = jax.ShapeDtypeStruct((2, F), jnp.bfloat16) if has_bias else None
    return Case(
        function=gated_mlp,
        arguments=(x, weight),
        options={"activation": activation, "bias": bias},
        make=partial(_make, x, weight, activation, bias),
        bytes_moved=2 * T * (D + F) + weight_bytes(weight) + 4 * F * has_bias,
        flops=4 * T * D * F,
        tolerance=1e-2,
        peer=_peer if bits == 16 else None,
    )


def weight_spec(shape: tuple[int, int, int], bits: int, group_size: int | None) -> Any:
    """A bfloat16 spec, or a `QuantArray` without zeros; `group_size` None means a scale per
    column."""
    E, D, F = shape
    if bits == 16:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    group_size = group_size or D
    stored = (E, D // 2, F) if bits == 4 else shape
    values = jax.ShapeDtypeStruct(stored, jnp.uint8 if bits == 4 else jnp.int8)
    scales = jax.ShapeDtypeStruct((E, D // group_size, F), jnp.float32)
    return QuantArray(values, scales, None, bits, group_size, pack_rows_for(D) if bits == 4 else 0)


def weight_bytes(weight: Any) -> int:
    leaves = jax.tree.leaves(weight)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def random_weight(rng, weight: Any) -> Any:
    """Draw a weight whose products are about as large as the inputs."""
    if not isinstance(weight, QuantArray):
        return random_array(rng, weight, weight.shape[1] ** -0.5)
    spread = 4.6 if weight.bits == 4 else 73.0  # standard deviation of integers over the range
    scales = 1 + random_array(rng, weight.scales, 0.1)
    return QuantArray(
        random_array(rng, weight.values),
        (scales / (spread * weight.num_rows**0.5)).astype("f"),
        None,
        weight.bits,
        weight.group_size,
        weight.pack_rows,
    )


def _make(x, weight, activation, bias, rng):
    options = {"activation": activation, "bias": None if bias is None else random_array(rng, bias)}
    return (random_array(rng, x), random_weight(rng, weight)), options


def _peer(x, weight, *, activation, bias):
    """PyTorch's product with gate and up side by side, then its activation."""
    import torch

    both = torch.cat((weight[0], weight[1]), dim=1)
    act = {
        "silu": torch.nn.functional.silu,
        "relu": torch.nn.functional.relu,
        "gelu": torch.nn.functional.gelu,
        "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    }[activation]
    of_both = None if bias is None else bias.reshape(-1)

    def run():
        product = x @ both if of_both is None else torch.addmm(of_both, x, both)
        gate, up = product.chunk(2, dim=1)
        return act(gate) * up

    return run
