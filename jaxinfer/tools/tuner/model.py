"""A cost model of Triton tilings on a GPU, from the resources that the compiler reports.

For a launch of g blocks of w warps with r registers a thread and s bytes of shared memory:

    resident = blocks that share a multiprocessor: the minimum over its registers (allocated by
               warp, 256 at a time), its shared memory (the system takes 1 KiB of each block), its
               2,048 threads and its 32 blocks
    waves    = g / (multiprocessors * resident), rounded up: the last one may be nearly empty
    spread   = multiprocessors * resident * waves / g, at least 1: time relative to a full chip
    flight   = bytes in flight to a multiprocessor: its blocks' shared memory, which holds the
               stages being loaded, or 16 bytes a thread if that is more
    hidden   = min(1, flight / (bandwidth * latency / multiprocessors)): Little's law; below 1 the
               memory waits for requests

A call takes max(bytes / (bandwidth * hidden), FLOPs / rate) * spread of its launch with the most
blocks, plus the traffic of intermediate results between its launches, written and read, plus a
fixed cost for each launch. Bytes and FLOPs are the case's, those of a perfect kernel: the model
ignores repeated work, bank conflicts and instructions. It ranks tilings; a device measures them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp

from jaxinfer.kernels.triton_launch import TritonLaunch
from jaxinfer.tools.compile_gate.matrix import ChipTarget
from jaxinfer.tools.compile_gate.text import KernelResources

LATENCY = 7e-7  # seconds of a load from a busy memory: 600 to 800 ns on these chips
LAUNCH_SECONDS = 2e-6  # between two kernels in one program
# Dense bfloat16 FLOP per clock and multiprocessor (NVIDIA's A100 and H100 white papers).
MATRIX_FLOPS = {80: 2048, 90: 4096}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The parameters of a chip in the model."""

    multiprocessors: int
    registers: int  # per multiprocessor
    shared_bytes: int  # per multiprocessor
    threads: int  # per multiprocessor
    bandwidth: float  # bytes/s
    matrix_rate: float  # FLOP/s

    @classmethod
    def from_target(cls, target: ChipTarget) -> Gpu:
        """Read the parameters from the target's file."""
        cores, clock = target.gpu_field("core_count"), target.gpu_field("clock_rate_ghz") * 1e9
        return cls(
            multiprocessors=int(cores),
            registers=int(target.gpu_field("registers_per_core_limit")),
            shared_bytes=int(target.gpu_field("shared_memory_per_core")),
            threads=int(target.gpu_field("threads_per_core_limit")),
            bandwidth=target.gpu_field("memory_bandwidth"),
            matrix_rate=cores * clock * MATRIX_FLOPS[target.compute_capability or 80],
        )


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimate for a call with one tiling."""

    seconds: float
    resident: int  # blocks per multiprocessor in the largest launch
    waves: int
    registers: int
    shared_bytes: int


def resident_blocks(gpu: Gpu, resources: KernelResources, num_warps: int) -> int:
    """The number of blocks that share a multiprocessor; 0 if none fits."""
    of_warp = -(-resources.registers * 32 // 256) * 256
    limits = (
        gpu.registers // max(1, of_warp * num_warps),
        gpu.shared_bytes // (resources.shared_bytes + 1024),
        gpu.threads // (32 * num_warps),
        32,
    )
    return min(limits)


def estimate(
    gpu: Gpu,
    launches: Sequence[TritonLaunch],
    resources: Sequence[KernelResources],
    bytes_moved: int,
    flops: int,
) -> Estimate:
    """Estimate a call. Raises `ValueError` where no multiprocessor can hold one of its blocks."""
    pairs = list(zip(launches, resources, strict=True))
    main, taken = max(pairs, key=lambda pair: math.prod(pair[0].grid))
    resident = resident_blocks(gpu, taken, main.num_warps)
    if resident < 1:
        raise ValueError(f"{main.kernel.__name__}: a multiprocessor cannot hold one of its blocks")
    blocks = max(1, math.prod(main.grid))
    waves = -(-blocks // (gpu.multiprocessors * resident))
    # Fewer blocks than multiprocessors leave some idle. A partly filled multiprocessor runs as fast
    # as its blocks allow, which `hidden` accounts for.
    places = gpu.multiprocessors * (resident if waves > 1 else -(-blocks // gpu.multiprocessors))
    spread = max(1.0, places * waves / blocks)
    threads = 32 * main.num_warps
    flight = min(resident, -(-blocks // gpu.multiprocessors)) * max(
        taken.shared_bytes, 16 * threads
    )
    hidden = min(1.0, flight / (gpu.bandwidth * LATENCY / gpu.multiprocessors))
    memory = bytes_moved / (gpu.bandwidth * hidden)
    between = sum(_bytes(launch) for launch in launches[:-1])
    seconds = max(memory, flops / gpu.matrix_rate) * spread
    seconds += 2 * between / gpu.bandwidth + LAUNCH_SECONDS * len(launches)
    return Estimate(seconds, resident, waves, taken.registers, taken.shared_bytes)


def _bytes(launch: TritonLaunch) -> int:
    """The bytes that a launch writes for the next, without arrays that are updated in place."""
    in_place = set(launch.aliases.values())
    return sum(
        math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize
        for i, spec in enumerate(launch.outputs)
        if i not in in_place
    )
