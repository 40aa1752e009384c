"""Choosing a backend: tried in order; one declines with `NotImplementedError("why")`.

A front door that finds no taker raises one error that lists every reason, so that an operator
never falls back in silence to something the caller did not ask for.
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
        platform = jax.default_backend()
        names = tuple(n for n in PREFERENCE.get(platform, ("xla",)) if n in backends)
    reasons = []
    for name in names:
        try:
            return backends[name](*args, **kwargs)
        except NotImplementedError as why:
            reasons.append(f"{name}: {why}")
    raise NoBackendError(f"no backend of {operator} took the call:\n  " + "\n  ".join(reasons))
