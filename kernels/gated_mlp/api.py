"""The gated half of a feed-forward layer: signature, formula, contract and checks.

    out = act(x @ gate_up[0] + bias[0]) * (x @ gate_up[1] + bias[1])

(GLU variants, arXiv:2002.05202); the product that follows, `out @ down`, is an ordinary one.

The weight is [2, D, F]: gate, then up. Of the layouts that hold both in one array,

* [D, 2F] cannot be sharded over F: a device would get columns of the gate alone;
* [D, 2, F] lies on a TPU in tiles of 2 rows by 128 lanes, since a tile spans the last two axes,
  and no kernel can read whole tiles of either half; as [D, 2F] it is copied at every step
  (compiled for a v5e, D = 4096, F = 14336: 224 MiB of temporaries);
* [2, D, F] has neither fault: both halves are ordinary matrices, sharded by the last axis, and one
  product still reads them (two items of a batch). XLA for TPU, GPU and CPU copies nothing.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from jaxinfer.kernels.dispatch import dispatch
from jaxinfer.kernels.gated_mlp import gpu, reference, tpu, xla
from jaxinfer.kernels.gated_mlp.activations import ACTIVATIONS
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray

BACKENDS = {
    "reference": reference.gated_mlp,
    "xla": xla.gated_mlp,
    "tpu": tpu.gated_mlp,
    "gpu": gpu.gated_mlp,
}


def gated_mlp(
    x: Float[Array, "T D"],
    gate_up: Float[Array, "two in_dim F"] | QuantArray,
    *,
    activation: str,
    bias: Float[Array, "rows columns"] | None = None,
    backend: str | None = None,
) -> Float[Array, "T F"]:
    """Return `act(x @ gate) * (x @ up)`; formula and layout in the module's text.

    Sums, bias and activation are float32 (only `xla` rounds the sums to x's dtype before them,
    which keeps XLA's products fast everywhere), the result has x's dtype. `activation` is one of
    `ACTIVATIONS`; `bias` is [2, F]. A `QuantArray` of shape [2, D, F] is dequantized on the way to
    the product. Where the TPU kernel saves nothing (`tpu.saves_nothing`) it is used only by name.
    Raises `ValueError` for shapes that do not fit together or an unknown activation.
    """
    _check(x, gate_up, activation, bias)
    backends = BACKENDS
    if backend is None and tpu.saves_nothing(x, gate_up):
        backends = {name: BACKENDS[name] for name in BACKENDS if name != "tpu"}
    return dispatch("gated_mlp", backends, backend, x, gate_up, activation=activation, bias=bias)


def _check(x, gate_up, activation, bias) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}"
        )
    if isinstance(gate_up, QuantArray):
        gate_up.check()
        shape = (*gate_up.values.shape[:-2], gate_up.num_rows, gate_up.num_columns)
    else:
        shape = gate_up.shape
    if len(shape) != 3 or shape[0] != 2:
        raise ValueError(f"gate_up has shape {shape}; it must be (2, D, F): gate, then up")
    if shape[1] != x.shape[1]:
        raise ValueError(f"x has {x.shape[1]} columns, each half of gate_up {shape[1]} rows")
    if bias is not None and bias.shape != (2, shape[2]):
        raise ValueError(f"bias has shape {bias.shape}; it must be {(2, shape[2])}")
