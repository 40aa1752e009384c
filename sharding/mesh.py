"""The mesh: devices in five axes, from the slowest links to the fastest.

data     replicas of the engine, which share nothing (`jaxinfer.parallel.replicas`)
pipe     stages of the layers; activations handed over once a step
seq      parts of a sequence: its pages, and the tokens of a prompt; rings of keys and values
expert   experts of a mixture; heads and hidden units of the other layers too
tensor   heads, hidden units and the vocabulary; two sums over it a layer
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
STEP_AXES = AXES[1:]  # those of one engine's mesh


class MeshError(ValueError):
    """A mesh or a model that does not fit the devices: what, and what would."""


def spelled(sizes: Mapping[str, int]) -> str:
    """As "pipe 2 x tensor 8": the axes longer than 1."""
    return " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1)


def divisors(n: int) -> list[int]:
    """Those of n > 0, smallest first."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def would_do(sizes: Sequence[int]) -> str:
    """For a `MeshError`: the sizes of an axis to choose from; of many the first 24."""
    return f"sizes that would do: {', '.join(map(str, sizes[:24]))}"


def device_groups(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> list[Mesh]:
    """One mesh of `STEP_AXES` for each replica of `data`, over the devices of all processes (or
    those given). Raises `MeshError` where their number is not the product of `sizes`.

    `tensor` varies fastest, over neighbours: on a TPU along the links of its torus, elsewhere in
    the devices' own order, in which those of one host stand together.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    needed = math.prod(shape)
    if needed > len(devices) or (needed < len(devices) and needed > 1):
        axes = dict(zip(AXES, shape, strict=True))
        there = f"the mesh has {needed} devices ({spelled(axes)}), but there are {len(devices)}"
        if needed > len(devices):
            raise MeshError(
                f"{there}: the product of {', '.join(AXES)} must be {len(devices)}; a CPU can be "
                f"taken for {needed} devices (--cpu_devices)"
            )
        raise MeshError(
            f"{there}: the product of {', '.join(AXES)} must be {len(devices)}, or 1 for one "
            "device alone. Further replicas (mesh.data) use the others; to leave them out, hide "
            "them (CUDA_VISIBLE_DEVICES, TPU_VISIBLE_DEVICES, a smaller --cpu_devices)"
        )
    grid = _grid(shape, devices[:needed])
    types = (AxisType.Auto,) * len(STEP_AXES)
    return [Mesh(replica, STEP_AXES, axis_types=types) for replica in grid]


def _grid(shape: tuple[int, ...], devices: list[Any]) -> np.ndarray:
    if devices[0].platform == "tpu" and len(devices) > 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.array(devices).reshape(shape)
