"""The choice of a backend: tried in order; one declines with `NotImplementedError("why")`.

When every backend declines, one error lists every reason. The backend that took a call, and why
those before it declined, is logged the first time that a program is traced with that outcome.

The platform is that of the mesh in use where the mesh names one, else this process's own. So a
program is traced for a chip that this machine lacks by JAX's own means, and jit, which caches
traces by mesh, does not mix it up with the program for this machine:

    device = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        jax.jit(f).trace(*abstract).lower(lowering_platforms=("tpu",))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging

# Backends by platform, best first. A name that an operator does not implement is skipped.
PREFERENCE: Mapping[str, tuple[str, ...]] = {
    "tpu": ("tpu", "xla"),
    "gpu": ("hopper", "gpu", "xla"),
    "cpu": ("xla",),
}

# The backend that serves an operator which lacks the one named, on the same platform.
SIBLINGS: Mapping[str, str] = {"hopper": "gpu"}


class NoBackendError(NotImplementedError):
    """No backend of an operator took the call; the message lists each one's reason."""


def platform() -> str:
    """Return the platform that is traced for: `cpu`, `gpu` or `tpu`."""
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """Return JAX's name of the chip that is traced for, such as `NVIDIA H100 80GB HBM3`."""
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.devices()[0] if device is None else device).device_kind


def preferred() -> tuple[str, ...]:
    """Return the backends of the platform that is traced for, best first."""
    return PREFERENCE.get(platform(), ("xla",))


def sibling_in(backends: Mapping[str, Any], backend: str | None) -> str | None:
    """Return the name to force in `backends` where another operator is forced to `backend`.

    That is the same name, or the platform's other backend if this operator lacks it (`SIBLINGS`);
    never another platform's, so that a forced backend that declines is an error.
    """
    if backend is None or backend in backends:
        return backend
    return SIBLINGS.get(backend, backend)


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
    reasons: list[str] = []
    for name in names:
        try:
            result = backends[name](*args, **kwargs)
        except NotImplementedError as why:
            reasons.append(f"{name}: {why}")
        else:
            log_choice(operator, name, tuple(reasons))
            return result
    raise NoBackendError(f"no backend of {operator} took the call:\n  " + "\n  ".join(reasons))


@functools.lru_cache(maxsize=1024)
def log_choice(operator: str, choice: str, reasons: tuple[str, ...]) -> None:
    """Log which backend took a call of an operator, and why the others declined.

    Only the first of equal calls is logged: every layer of every program makes one.
    """
    declined = f"; declined by {'; by '.join(reasons)}" if reasons else ""
    logging.info("%s: taken by %s%s", operator, choice, declined)
