"""Residual sum and norm: signatures, formula, contract and checks.

A block of a model adds what it computed to the residual stream, and the next block begins with a
norm of the sum. As separate operators the sum is written and read again; here each number is read
once and written once, and the result may be the int8 or float8 numbers that the next product takes.

For a token of D numbers, in float32:

    sum    = x + residual                                       (rounded once to x's type)
    rms    = sum / sqrt(mean(sum^2) + eps)                      (RMSNorm, arXiv:1910.07467)
    normed = round(rms) * weight                                (as Llama: rounded before it)
    normed = round(rms * (offset + weight))    if offset        (as Gemma, whose weights are w - 1)
    normed = round((sum - mean) / sqrt(var + eps) * weight + bias)   (LayerNorm, arXiv:1607.06450)

Quantized, a token's `normed` is `values * scale` with scale = max |normed| / largest (127 of int8,
448 of float8_e4m3fn); int8 rounds to nearest even; a token of zeros has scale 1.
"""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float

from jaxinfer.kernels.add_norm import gpu, reference, tpu, xla
from jaxinfer.kernels.add_norm.options import NormOptions
from jaxinfer.kernels.dispatch import device_kind, dispatch, platform
from jaxinfer.kernels.kv_pages import QUANTIZED

BACKENDS = {
    "reference": reference.add_norm,
    "xla": xla.add_norm,
    "tpu": tpu.add_norm,
    "gpu": gpu.add_norm,
}

# More tokens are a prefill chunk, whose products on a GPU take sum and norm in (docs/fusion.md).
MOST_IN_A_DECODE = 512
FUSE_LESS = ("TPU7x",)  # TPUs whose compiler does not join an RMSNorm with the products around it

Normed = jax.Array | tuple[jax.Array, jax.Array]


def add_rms_norm(
    x: Float[Array, "T D"],
    residual: Float[Array, "T D"] | None,
    weight: Float[Array, " D"],
    *,
    eps: float,
    offset: float = 0.0,
    quantize: str | None = None,
    backend: str | None = None,
) -> tuple[Normed, Float[Array, "T D"]]:
    """Return RMSNorm of `x + residual`, and that sum; formula in the module's text.

    `normed` has x's type; with `quantize` ("int8" or "float8_e4m3fn") it is a pair of values [T, D]
    of that type and float32 scales [T, 1]. Without a residual the sum is x itself. A kernel that
    does worse than XLA is used only when `backend` names it. Raises `ValueError` for shapes and
    types that do not fit together.
    """
    _check(x, residual, {"weight": weight}, eps, quantize)
    options = NormOptions(eps, offset, is_centred=False, quantize=quantize)
    backends = _worthwhile(x, is_centred=False, quantize=quantize) if backend is None else BACKENDS
    return dispatch("add_norm", backends, backend, x, residual, weight, None, options)


def add_layer_norm(
    x: Float[Array, "T D"],
    residual: Float[Array, "T D"] | None,
    weight: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    *,
    eps: float,
    quantize: str | None = None,
    backend: str | None = None,
) -> tuple[Normed, Float[Array, "T D"]]:
    """Return LayerNorm of `x + residual`, and that sum; the contract is that of `add_rms_norm`."""
    _check(x, residual, {"weight": weight, "bias": bias}, eps, quantize)
    options = NormOptions(eps, 0.0, is_centred=True, quantize=quantize)
    backends = _worthwhile(x, is_centred=True, quantize=quantize) if backend is None else BACKENDS
    return dispatch("add_norm", backends, backend, x, residual, weight, bias, options)


def _worthwhile(x, *, is_centred: bool, quantize: str | None) -> dict[str, Any]:
    """Return the backends without the kernels that are worse than what XLA fuses by itself.

    Those are used only by name (docs/fusion.md). In a decode step on a GPU the bytes are equal, and
    the kernel is used because it saves launches: every few layers XLA writes the sum in one of its
    own.
    """
    left_out = ()
    if quantize is None and x.shape[0] > MOST_IN_A_DECODE:
        left_out = ("gpu",)
    if quantize is None and not is_centred and platform() == "tpu":
        left_out = () if device_kind() in FUSE_LESS else ("tpu",)
    return {name: BACKENDS[name] for name in BACKENDS if name not in left_out}


def _check(x, residual, parameters: dict[str, Any], eps: float, quantize: str | None) -> None:
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"residual is {residual.dtype} {residual.shape}; x is {x.dtype} {x.shape}: cast one"
        )
    for name, array in parameters.items():
        if array is not None and array.shape != x.shape[1:]:
            raise ValueError(f"{name} has shape {array.shape}; it must be {x.shape[1:]}")
    if eps < 0:
        raise ValueError(f"eps is {eps}; it must be 0 or more")
    if quantize is not None and quantize not in QUANTIZED:
        raise ValueError(f"quantize is {quantize!r}; it must be None or one of {[*QUANTIZED]}")
