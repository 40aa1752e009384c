"""Products with the quantized weights of Llama-3-8B, and of Llama-3-70B over 8 devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kernels.quantized_matmul import (
    QuantArray,
    dequantize,
    quantize,
    quantize_activations,
    quantized_matmul,
)
from jaxinfer.tools.kernel_cases import GPU, TPU, Arguments, Case, random_array, with_headlines

INT8: dict[str, Any] = {"bits": 8}
INT4: dict[str, Any] = {"bits": 4, "group_size": 128}
FLOAT8: dict[str, Any] = {"bits": 8, "is_float": True}

# D, F of a layer's products.
QKV_8B = (4096, 6144)
OUT_8B = (4096, 4096)
GATE_UP_8B = (4096, 28672)
DOWN_8B = (14336, 4096)
GATE_UP_70B_8 = (8192, 7168)
DOWN_70B_8 = (3584, 8192)


HEADLINES = (
    "llama-3-8b qkv decode int8",
    "llama-3-8b gate-up prefill int8",
    "llama-3-8b gate-up decode w8a8",
    "llama-3-8b qkv prefill w8a8",
    "llama-3-70b/8 gate-up decode float8",
    "llama-3-70b/8 gate-up prefill float8 x float8",
)


def cases() -> dict[str, Case]:
    found = {
        "llama-3-8b qkv decode int8": _case(16, QKV_8B, INT8),
        "llama-3-8b gate-up prefill int8": _case(2048, GATE_UP_8B, INT8),
        "llama-3-8b out decode of one int4": _case(1, OUT_8B, INT4),
        "llama-3-8b down decode int4 zeros": _case(64, DOWN_8B, {**INT4, "has_zeros": True}),
        "llama-3-8b gate-up prefill int4 zeros": _case(
            2048, GATE_UP_8B, {**INT4, "has_zeros": True}
        ),
        "llama-3-8b gate-up decode w8a8": _case(64, GATE_UP_8B, INT8, "int8"),
        "llama-3-8b qkv prefill w8a8": _case(2048, QKV_8B, INT8, "int8"),
        "llama-3-8b down prefill w4a8": _case(2048, DOWN_8B, INT4, "int8"),
        "llama-3-70b/8 gate-up decode float8": _case(64, GATE_UP_70B_8, FLOAT8),
        "llama-3-70b/8 gate-up prefill float8 x float8": _case(
            2048, GATE_UP_70B_8, FLOAT8, "float8_e4m3fn"
        ),
        "llama-3-70b/8 down decode int4": _case(16, DOWN_70B_8, INT4),
        "llama-3-8b activations decode int8": _activations(64, 14336, "int8"),
        "llama-3-8b activations prefill float8": _activations(2048, 4096, "float8_e4m3fn"),
    }
    return with_headlines(found, HEADLINES)


def tiny_cases() -> dict[str, Case]:
    """The variants at sizes that an emulator runs quickly."""
    return {
        "int8": _case(5, (128, 136), INT8),
        "int4 zeros": _case(5, (256, 136), {**INT4, "has_zeros": True}),
        "w8a8": _case(5, (128, 136), INT8, "int8"),
        "float8": _case(5, (128, 136), FLOAT8),
    }


def _case(
    T: int,
    shape: tuple[int, int],
    weights: dict[str, Any],
    activation_dtype: str | None = None,
) -> Case:
    """A case with bfloat16 tokens; quantizing them is part of the call."""
    D, F = shape
    x = jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
    whole = jax.ShapeDtypeStruct(shape, jnp.float32)
    weight = jax.eval_shape(partial(quantize, **weights), whole)
    options: dict[str, Any] = {"activation_dtype": activation_dtype}
    return Case(
        function=quantized_matmul,
        arguments=(x, weight),
        options=options,
        make=partial(_make, x, whole, weights, options),
        bytes_moved=int(2 * T * (D + F) + D * F * weight.bytes_per_weight),
        flops=2 * T * D * F,
        # The reference gets x as quantized as the backend does: rounding to bfloat16 is left.
        tolerance=1e-2,
        peer=_peer_of(weights, activation_dtype),
    )


def _activations(T: int, D: int, dtype: str) -> Case:
    """A case that only quantizes tokens."""
    x = jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
    is_float = dtype == "float8_e4m3fn"
    return Case(
        function=quantize_activations,
        arguments=(x,),
        options={"dtype": dtype},
        make=lambda rng: ((random_array(rng, x),), {"dtype": dtype}),
        bytes_moved=T * (3 * D + 4),
        flops=0,
        tolerance=4e-2 if is_float else 2e-2,
        is_tunable=False,
        # float8 where chips have it; others leave it to XLA.
        targets=("tpu7x", "h100") if is_float else (*TPU, *GPU),
    )


def _make(
    x: jax.ShapeDtypeStruct,
    whole: jax.ShapeDtypeStruct,
    weights: dict[str, Any],
    options: dict[str, Any],
    rng: np.random.Generator,
) -> tuple[Arguments, dict[str, Any]]:
    w = random_array(rng, whole, whole.shape[0] ** -0.5)
    return (random_array(rng, x), quantize(w, **weights)), dict(options)


def _peer_of(
    weights: dict[str, Any], activation_dtype: str | None
) -> Callable[..., Callable[[], Any]]:
    if activation_dtype == "float8_e4m3fn":
        return _float8_peer
    if activation_dtype == "int8" and weights["bits"] == 8:
        return _int8_peer
    return _bfloat16_peer


def _bfloat16_peer(x: Any, weight: QuantArray, **options: Any) -> Callable[[], Any]:
    """PyTorch has no product of these types: bfloat16 x times the weight as bfloat16, made before.

    It moves two bytes a weight where the kernel moves one or half of one.
    """
    import torch  # type: ignore[import-not-found]

    arrays = [None if a is None else a.cpu() for a in (weight.values, weight.scales, weight.zeros)]
    numbers = [None if a is None else _to_numpy(a) for a in arrays]
    values, scales, zeros = numbers
    same = QuantArray(values, scales, zeros, weight.bits, weight.group_size, weight.pack_rows)
    w = torch.from_numpy(np.array(dequantize(same))).to(x.device, torch.bfloat16)
    return lambda: x @ w


def _to_numpy(a: Any) -> np.ndarray:
    """Convert to NumPy; float8 goes by its bytes, since NumPy lacks the type."""
    import torch  # type: ignore[import-not-found]

    if a.dtype == torch.float8_e4m3fn:
        return a.view(torch.uint8).numpy().view(jnp.float8_e4m3fn)
    return a.numpy()


def _int8_peer(x: Any, weight: QuantArray, **options: Any) -> Callable[[], Any]:
    """torch._int_mm, with x quantized before it and the sums scaled after, as the kernel does."""
    import torch  # type: ignore[import-not-found]

    multiply = torch._int_mm  # type: ignore[attr-defined]
    w = weight.values.t().contiguous().t()  # by columns, as cuBLAS wants int8

    def run() -> Any:
        scale = x.abs().amax(dim=1, keepdim=True).float() / 127
        values = (x / scale).round().to(torch.int8)
        return (multiply(values, w) * scale * weight.scales).to(x.dtype)

    return run


def _float8_peer(x: Any, weight: QuantArray, **options: Any) -> Callable[[], Any]:
    """torch._scaled_mm, with x quantized before it, as the kernel does."""
    import torch  # type: ignore[import-not-found]

    multiply = torch._scaled_mm  # type: ignore[attr-defined]
    w = weight.values.t().contiguous().t()
    scales = weight.scales.float().contiguous()

    def run() -> Any:
        scale = x.abs().amax(dim=1, keepdim=True).float() / 448
        values = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return multiply(
            values, w, scale_a=scale, scale_b=scales, out_dtype=x.dtype, use_fast_accum=False
        )

    return run
