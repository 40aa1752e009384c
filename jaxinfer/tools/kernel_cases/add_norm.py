"""Residual sum and norm at the widths of real models: a decode step of 64 tokens, a prefill chunk
of 2048."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.kernels.add_norm import add_layer_norm, add_rms_norm
from jaxinfer.tools.kernel_cases import GPU, TPU, Case, random_array, with_headlines

HEADLINES = (
    "llama-3-8b decode",
    "llama-3-8b prefill",
    "llama-3-8b decode int8",
    "llama-3-8b prefill float8",
    "llama-3-70b decode",
    "llama-3-70b prefill",
)


def cases() -> dict[str, Case]:
    found = {
        "llama-3-8b decode": _case(64, 4096),
        "llama-3-8b prefill": _case(2048, 4096),
        "llama-3-8b decode int8": _case(64, 4096, quantize="int8"),
        "llama-3-8b prefill int8": _case(2048, 4096, quantize="int8"),
        "llama-3-8b prefill float8": _case(2048, 4096, quantize="float8_e4m3fn"),
        "llama-3-70b decode": _case(64, 8192),
        "llama-3-70b prefill": _case(2048, 8192),
        "llama-3-8b first norm": _case(2048, 4096, has_residual=False),
        "gemma-2-9b prefill": _case(2048, 3584, offset=1.0),
        "gpt-2 decode": _case(64, 768, is_centred=True),
        "gpt-2 prefill": _case(2048, 768, is_centred=True),
        "gpt-2 prefill int8": _case(2048, 768, is_centred=True, quantize="int8"),
    }
    return with_headlines(found, HEADLINES)


def tiny_cases() -> dict[str, Case]:
    return {
        "rms": _case(3, 96),
        "rms int8": _case(3, 96, quantize="int8"),
        "layer": _case(3, 96, is_centred=True),
    }


def _case(
    T: int, D: int, *, has_residual: bool = True, is_centred: bool = False, **options: Any
) -> Case:
    """A case in bfloat16, with weights around 1."""
    tokens = jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
    of_model = jax.ShapeDtypeStruct((D,), jnp.bfloat16)
    arguments = (tokens, tokens if has_residual else None, of_model)
    if is_centred:
        arguments += (of_model,)
    quantize = options.get("quantize")
    written = jnp.dtype(quantize or tokens.dtype).itemsize + (2 if has_residual else 0)
    read = 4 if has_residual else 2
    return Case(
        function=add_layer_norm if is_centred else add_rms_norm,
        arguments=arguments,
        options={"eps": 1e-5, **options},
        make=partial(_make, arguments, {"eps": 1e-5, **options}),
        bytes_moved=T * D * (read + written) + 2 * D * len(arguments[2:]) + 4 * T * bool(quantize),
        flops=0,
        tolerance=4e-2 if quantize == "float8_e4m3fn" else 2e-2 if quantize else 1e-2,
        # An A100 has no float8, and leaves the call to XLA.
        targets=(*TPU, *(GPU if quantize != "float8_e4m3fn" else ("h100",))),
        peer=None if quantize else _layer_peer if is_centred else _rms_peer,
    )


def _make(arguments, options, rng):
    x, residual, *of_model = arguments
    arrays = [
        random_array(rng, x),
        None if residual is None else random_array(rng, residual),
        *((1 + random_array(rng, spec, 0.1)).astype(spec.dtype) for spec in of_model),
    ]
    return tuple(arrays), dict(options)


def _rms_peer(x, residual, weight, *, eps, offset=0.0):
    """PyTorch's sum, then its fused norm."""
    import torch

    factor = weight + offset

    def run():
        total = x if residual is None else x + residual
        return torch.nn.functional.rms_norm(total, factor.shape, factor, eps), total

    return run


def _layer_peer(x, residual, weight, bias, *, eps):
    """PyTorch's sum, then its fused LayerNorm."""
    import torch

    def run():
        total = x if residual is None else x + residual
        return torch.nn.functional.layer_norm(total, weight.shape, weight, bias, eps), total

    return run
