"""The device mesh: five axes, from the slowest links to the fastest.

data     replicas of the engine, which share nothing (`jaxinfer.parallel.replicas`)
pipe     pipeline stages; each hands its activations to the next
seq      sequence parallelism: pages and prompts are split; keys and values travel round a ring
expert   the experts of a mixture; also heads and hidden units of the other layers
tensor   heads, hidden units and the vocabulary; two all-reduces a layer
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES: tuple[str, ...] = ("data", "pipe", "seq", "expert", "tensor")
STEP_AXES = AXES[1:]  # the axes of one engine's mesh


class MeshError(ValueError):
    """A mesh or a model does not fit the devices; says what does not, and what would."""


def format_mesh(sizes: Mapping[str, int]) -> str:
    """Format the axes longer than 1, such as "pipe 2 x tensor 8"."""
    return " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1)


def divisors(n: int) -> list[int]:
    """Return the divisors of n > 0 in ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def suggest_sizes(sizes: Sequence[int]) -> str:
    """Format the possible sizes of an axis for a `MeshError`; at most the first 24."""
    return f"possible sizes: {', '.join(map(str, sizes[:24]))}"


def device_groups(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> list[Mesh]:
    """Return one mesh of `STEP_AXES` for each replica of `data`.

    The meshes cover `devices`, by default those of all processes. Raises `MeshError` if their
    number is not the product of `sizes`. `tensor` varies fastest, over neighbouring devices: on a
    TPU along the links of its torus, elsewhere in the order of `jax.devices()`, in which the
    devices of one host are adjacent.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    needed = math.prod(shape)
    if needed > len(devices) or (needed < len(devices) and needed > 1):
        axes = dict(zip(AXES, shape, strict=True))
        there = f"the mesh has {needed} devices ({format_mesh(axes)}), but there are {len(devices)}"
        if needed > len(devices):
            raise MeshError(
                f"{there}: the product of {', '.join(AXES)} must be {len(devices)}; a CPU can "
                f"stand in for {needed} devices (--cpu_devices={needed})"
            )
        raise MeshError(
            f"{there}: the product of {', '.join(AXES)} must be {len(devices)}, or 1 for a single "
            "device. Further replicas (mesh.data) use the others; to leave devices out, hide "
            "them (CUDA_VISIBLE_DEVICES, TPU_VISIBLE_DEVICES, a smaller --cpu_devices)"
        )
    grid = _grid(shape, devices[:needed])
    types = (AxisType.Auto,) * len(STEP_AXES)
    return [Mesh(replica, STEP_AXES, axis_types=types) for replica in grid]


def _grid(shape: tuple[int, ...], devices: list[Any]) -> np.ndarray:
    if devices[0].platform == "tpu" and len(devices) > 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.array(devices).reshape(shape)
