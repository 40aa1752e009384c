"""What a tiling of a Triton kernel should cost on a GPU, from what its compiler says it takes.

For a launch of g blocks of w warps with r registers a thread and s bytes of shared memory:

    resident = blocks that share a multiprocessor: the least of what its registers (given out by
               warp, 256 at a time), its shared memory (1 KiB of each block is the system's), its
               2,048 threads and its 32 blocks have room for
    waves    = g / (multiprocessors * resident), rounded up: the last one may be nearly empty
    spread   = multiprocessors * resident * waves / g, at least 1: time over that of a full chip
    flight   = bytes on their way to a multiprocessor: its blocks' shared memory, which holds the
               stages being loaded, or where there is less 16 bytes a thread
    hidden   = min(1, flight / (bandwidth * latency / multiprocessors)): Little's law; below 1 the
               memory waits for requests

A call takes max(bytes / (bandwidth * hidden), FLOPs / rate) * spread of its largest launch, by
blocks, then what its launches write for each other, there and back, and a launch's cost for each.
The bytes and FLOPs are the case's, those of a perfect kernel: work done twice, bank conflicts,
instructions are not in it. It ranks tilings; a device measures them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp

from jaxinfer.kernels.triton_launch import TritonLaunch
from jaxinfer.tools.compile_gate.matrix import ChipTarget
from jaxinfer.tools.compile_gate.text import KernelResources

LATENCY = 7e-7  # seconds from a load to its data, under load: 600 to 800 ns on these chips
LAUNCH_SECONDS = 2e-6  # between two kernels of one program
# Dense bfloat16 FLOP a clock and multiprocessor (NVIDIA's A100 and H100 white papers).
MATRIX_FLOPS = {80: 2048, 90: 4096}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the model knows of a chip."""

    multiprocessors: int
    registers: int  # of a multiprocessor
    shared_bytes: int  # of a multiprocessor
    threads: int  # of a multiprocessor
    bandwidth: float  # bytes/s
    matrix_rate: float  # FLOP/s

    @classmethod
    def of_target(cls, target: ChipTarget) -> Gpu:
        """From the target's file."""
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
    """Of a call with one tiling."""

    seconds: float
    resident: int  # blocks a multiprocessor, of the largest launch
    waves: int
    registers: int
    shared_bytes: int


def resident_blocks(gpu: Gpu, resources: KernelResources, num_warps: int) -> int:
    """Blocks that share a multiprocessor; 0 if not even one fits."""
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
    """The model's figure for a call; `ValueError` for one whose block no multiprocessor holds."""
    pairs = list(zip(launches, resources, strict=True))
    main, taken = max(pairs, key=lambda pair: math.prod(pair[0].grid))
    resident = resident_blocks(gpu, taken, main.num_warps)
    if resident < 1:
        raise ValueError(f"{main.kernel.__name__}: a multiprocessor cannot hold one of its blocks")
    blocks = max(1, math.prod(main.grid))
    waves = -(-blocks // (gpu.multiprocessors * resident))
    # Fewer blocks than multiprocessors leave the others idle; beyond that a part-filled one works
    # as fast as its blocks let it, which `hidden` holds.
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
    """Of what a launch writes for the next, arrays brought up to date in place aside."""
    in_place = set(launch.aliases.values())
    return sum(
        math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize
        for i, spec in enumerate(launch.outputs)
        if i not in in_place
    )
