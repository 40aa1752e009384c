"""A product with a quantized weight: signature, formula, contract and checks.

For x [T, D] and a weight whose values, scales and zeros stand for w [D, F] (`quant_array.py`):

    out[t, f] = sum_d x[t, d] * w[d, f]
              = sum_j scales[j, f] * sum_(d of group j) x[t, d] * (values[d, f] - zeros[j, f])

Two kinds of product:

* Only the weight is quantized (`activation_dtype` None, x floating): values become numbers of x's
  dtype on the chip, next to the multipliers; memory moves the values only. Sums are float32.
* x is quantized too, token by token (as in LLM.int8, arXiv:2208.07339, without its outliers):
  x ~ x_scale * values. Products of int8 are summed in int32, those of float8 in float32; scales
  multiply the sums. int8 goes with weights of int8 and of 4 bits, float8 with weights of float8.

      x_scale[t] = max |x[t]| / largest      (127, or 448 of float8_e4m3fn; 1 for a token of zeros)
      values[t]  = x[t] / x_scale[t]         (int8: rounded half to even)
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from jaxinfer.kernels.dispatch import dispatch
from jaxinfer.kernels.kv_pages import QUANTIZED
from jaxinfer.kernels.quantized_matmul import gpu, reference, tpu, tpu_activations, xla
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray

BACKENDS = {
    "reference": reference.quantized_matmul,
    "xla": xla.quantized_matmul,
    "tpu": tpu.quantized_matmul,
    "gpu": gpu.quantized_matmul,
}
# XLA makes three kernels of quantizing, which read x twice: that takes as long as a decode's
# product with a small weight. So TPUs and GPUs have a kernel.
ACTIVATION_BACKENDS = {
    "reference": xla.quantize_activations,
    "xla": xla.quantize_activations,
    "tpu": tpu_activations.quantize_activations,
    "gpu": gpu.quantize_activations,
}

ActivationDtype = Literal["int8", "float8_e4m3fn"]


def quantized_matmul(
    x: Num[Array, "T D"],
    weight: QuantArray,
    *,
    activation_dtype: ActivationDtype | None = None,
    x_scale: Float[Array, "T 1"] | None = None,
    out_dtype: Any = None,
    backend: str | None = None,
) -> Float[Array, "T F"]:
    """Return x @ w for a quantized w; the formula is in the module's text.

    `activation_dtype` quantizes a floating x first; an x that is int8 or float8_e4m3fn already
    comes with its `x_scale`. The result is of `out_dtype`, by default of x's dtype, or of x_scale's
    where x came quantized. `backend` is that of the product; x is quantized by the best one for the
    platform. Raises `ValueError` for shapes and types that do not fit together.
    """
    weight.check()
    _check(x, weight, activation_dtype, x_scale)
    if out_dtype is None:
        out_dtype = x.dtype if x_scale is None else x_scale.dtype
    if activation_dtype is not None and x_scale is None:
        by = backend if backend in ("reference", "xla") else None
        x, x_scale = quantize_activations(x, activation_dtype, backend=by)
    return dispatch(
        "quantized_matmul",
        BACKENDS,
        backend,
        x,
        weight,
        x_scale=x_scale,
        out_dtype=jnp.dtype(out_dtype),
    )


def quantize_activations(
    x: Float[Array, "T D"], dtype: ActivationDtype, *, backend: str | None = None
) -> tuple[Num[Array, "T D"], Float[Array, "T 1"]]:
    """Return values of `dtype` and float32 scales; the formula is in the module's text."""
    return dispatch(
        "quantize_activations", ACTIVATION_BACKENDS, backend, x, jnp.dtype(dtype), QUANTIZED[dtype]
    )


def _check(x, weight: QuantArray, activation_dtype, x_scale) -> None:
    if weight.values.ndim != 2 or x.shape[1] != weight.num_rows:
        raise ValueError(
            f"x is {x.shape}, the weight {(*weight.values.shape[:-2], *_shape(weight))}; "
            f"x [T, D] takes a weight [D, F]"
        )
    name = jnp.dtype(x.dtype).name
    if (name in QUANTIZED) != (x_scale is not None):
        raise ValueError(
            f"x is {name} and x_scale {'missing' if x_scale is None else 'given'}; a scale goes "
            f"with an x of {' or '.join(QUANTIZED)}, and only with that"
        )
    if name not in QUANTIZED and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {name}; it must be floating, int8 or float8_e4m3fn")
    if x_scale is not None and x_scale.shape != (x.shape[0], 1):
        raise ValueError(f"x_scale has shape {x_scale.shape}; it must be {(x.shape[0], 1)}")
    if activation_dtype not in (None, *QUANTIZED):
        raise ValueError(
            f"activation_dtype is {activation_dtype!r}; it must be None, {', '.join(QUANTIZED)}"
        )
    if x_scale is not None and activation_dtype not in (None, name):
        raise ValueError(f"x is {name} already; activation_dtype {activation_dtype!r} differs")
    chosen = name if x_scale is not None else activation_dtype
    if chosen is not None and (chosen == "float8_e4m3fn") != weight.is_float:
        raise ValueError(
            f"activations of {chosen} do not go with values of {weight.values.dtype}: int8 goes "
            f"with int8 and 4 bits, float8_e4m3fn with float8_e4m3fn"
        )


def _shape(weight: QuantArray) -> tuple[int, int]:
    return weight.num_rows, weight.num_columns
