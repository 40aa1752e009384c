"""Whether a backend agrees with the reference, on the device and at the shapes of real models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.tools.kernel_calls import call_of
from jaxinfer.tools.kernel_cases import Case


def reference_of(case: Case, arguments: Any, arrays: Any) -> tuple[Any, str]:
    """Compute the reference result in float32 with full-precision products; also return the name of
    the backend that computed it.

    The backend is the reference, or plain JAX where the reference exceeds the device's memory.
    """
    reasons = []
    for backend in ("reference", "xla"):
        try:
            with jax.default_matmul_precision("highest"):
                found = jax.jit(call_of(case, backend))(arguments, arrays)
                return jax.block_until_ready(found), backend
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            reasons.append(f"{backend}: {str(error).strip().splitlines()[0][:120]}")
    raise RuntimeError("no reference could be computed: " + "; ".join(reasons))


def relative_error(out: Any, ref: Any, arguments: Any) -> float:
    """The largest of ||out - ref|| / ||ref|| over the results, infinite where one is not finite.

    Where a result is an argument updated in place, its change counts, not the much larger rest: the
    norm of ref - argument replaces ||ref|| where it is smaller.
    """
    errors = [0.0]
    given = jax.tree.leaves(arguments)
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(ref), strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            raise ValueError(
                f"the result is {x.dtype}{x.shape}, the reference's {y.dtype}{y.shape}"
            )
        of_kind = [a for a in given if a.shape == y.shape and a.dtype == y.dtype]
        norms = [float(_norm(y))] + [float(_distance(y, a)) for a in of_kind]
        errors.append(float(_distance(x, y)) / max(min(norms), 1e-30))
    return max(errors) if all(e == e for e in errors) else float("inf")


@jax.jit
def _norm(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32).reshape(-1)
    return jnp.linalg.norm(jnp.where(jnp.isfinite(x), x, 0))


@jax.jit
def _distance(x: jax.Array, y: jax.Array) -> jax.Array:
    """The norm of x - y. Elements that are NaN or the same infinity in both count as equal: they
    are memory of no request."""
    x, y = x.astype(jnp.float32).reshape(-1), y.astype(jnp.float32).reshape(-1)
    is_same = (x == y) | (jnp.isnan(x) & jnp.isnan(y))
    return jnp.linalg.norm(jnp.where(is_same, 0, x - y))
