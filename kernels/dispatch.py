"""Choosing a backend: tried in order; one declines with `NotImplementedError("why")`.

A front door that finds no taker raises one error that lists every reason, so that an operator
never falls back in silence to something the caller did not ask for.

The platform is that of the mesh in use where the mesh says one, else this process's own. So a
program is traced for a chip that this machine lacks by JAX's own means, and jit, whose traces are
kept by mesh, does not mix it up with the program for this machine:

    device = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        jax.jit(f).trace(*abstract).lower(lowering_platforms=("tpu",))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

# Backends by platform, best first. A name without an implementation in an operator is passed over.
PREFERENCE: Mapping[str, tuple[str, ...]] = {
    "tpu": ("tpu", "xla"),
    "gpu": ("hopper", "gpu", "xla"),
    "cpu": ("xla",),
}


class NoBackendError(NotImplementedError):
    """No backend of an operator took the call; the message lists each one's reason."""


def platform() -> str:
    """What is being traced for: `cpu`, `gpu` or `tpu`."""
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """The chip that is being traced for, by JAX's name for it, as `NVIDIA H100 80GB HBM3`."""
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.devices()[0] if device is None else device).device_kind


def preferred() -> tuple[str, ...]:
    """Backends for what is being traced for, best first."""
    return PREFERENCE.get(platform(), ("xla",))


def dispatch(
    operator: str,
    backends: Mapping[str, Callable[..., Any]],
    backend: str | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the first backend of `operator` that accepts the arguments, or the one named `backend`.

    Raises `ValueError` for a name that `backends` lacks and `NoBackendError` when all decline.
    """
    if backend is not None:
        if backend not in backends:
            raise ValueError(
                f"{operator} has no backend {backend!r}; it has {', '.join(sorted(backends))}"
            )
        names: tuple[str, ...] = (backend,)
    else:
        names = tuple(name for name in preferred() if name in backends)
    reasons = []
    for name in names:
        try:
            return backends[name](*args, **kwargs)
        except NotImplementedError as why:
            reasons.append(f"{name}: {why}")
    raise NoBackendError(f"no backend of {operator} took the call:\n  " + "\n  ".join(reasons))
