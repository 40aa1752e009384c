"""An operator's backend, compiled for a target at the shapes of a real model.

A Pallas or plain JAX backend is called through the operator's front door with its name, and what
the target's compiler made of it is read from the compiled text. A Triton backend (`gpu`) is
compiled by Triton itself, since jax-triton asks a driver for the device while it lowers: its module
has `triton_launches(*arguments, **options)`, which takes what the front door takes, with
`jax.ShapeDtypeStruct` for arrays, and returns a `TritonLaunch`-like object for each kernel it would
launch: `kernel` (the `triton.jit` function), `signature`, `constexprs`, `num_warps`, `num_stages`.
"""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from compile_matrix import Target
from compile_target import Chip
from compile_text import collectives, launches, mosaic_vmem, parse, ptxas_resources

from jaxinfer.kernels.paged_attention import paged_attention
from jaxinfer.kernels.paged_attention.folding import LANES

TRITON_BACKENDS = ("gpu",)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an operator: its front door, abstract arguments, options."""

    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    options: dict[str, Any]


def paged_attention_case(
    layout: dict[str, Any], page_size: int, batch: dict[str, int], is_folded: bool
) -> Case:
    """bfloat16 queries and pages; a pool that holds every row at its longest."""
    N, K, H = layout["num_heads"], layout["num_kv_heads"], layout["head_dim"]
    R, T = batch["rows"], batch["tokens"]
    W = -(-batch["max_len"] // page_size)
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    lanes = -(-H // LANES) * LANES if is_folded else H
    pages = bf16(R * W, K, page_size // (lanes // H), lanes)
    variant = {name: layout[name] for name in ("window", "soft_cap") if name in layout}
    return Case(
        paged_attention,
        (bf16(T, N, H), pages, pages, i32(R + 1), i32(R), i32(R, W)),
        {"scale": H**-0.5, **variant},
    )


CASES: dict[str, Callable[..., Case]] = {"paged_attention": paged_attention_case}


def check_kernel(chip: Chip, operator: str, backend: str, case: Case) -> dict[str, Any]:
    """Compile one case; seconds, launches and what it takes of the chip.

    Raises what the compiler raises, and `NotImplementedError` where the backend declines.
    """
    if backend in TRITON_BACKENDS:
        return check_triton(chip.target, operator, backend, case)
    function = jax.jit(lambda *arrays: case.function(*arrays, backend=backend, **case.options))
    compiled = chip.compile(function, *chip.abstract(case.arguments))
    module = parse(compiled.text)
    result: dict[str, Any] = {
        "seconds": compiled.seconds,
        "cpu_seconds": compiled.cpu_seconds,
        "launches": dataclasses.asdict(launches(module)),
        "temporaries": compiled.memory()["temporaries"],
        "collectives": collectives(module),
    }
    if vmem := mosaic_vmem(module):
        result["vmem"] = max(vmem)
    return result


def check_triton(target: Target, operator: str, backend: str, case: Case) -> dict[str, Any]:
    """Compile each Triton kernel of a call to machine code and ask ptxas what it takes."""
    module = importlib.import_module(f"jaxinfer.kernels.{operator}.{backend}")
    started, cpu_started = time.perf_counter(), time.process_time()
    kernels = [
        resources
        for launch in module.triton_launches(*case.arguments, **case.options)
        for resources in compile_triton(target, launch)
    ]
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "launches": {"straight": len(kernels), "loops": 0, "in_loops": 0},
        "kernels": [dataclasses.asdict(kernel) for kernel in kernels],
        "registers": max(kernel.registers for kernel in kernels),
        "shared": max(kernel.shared_bytes for kernel in kernels),
        "spills": sum(kernel.spill_bytes for kernel in kernels),
    }


def compile_triton(target: Target, launch: Any) -> list[Any]:
    """`Resources` of one Triton launch. Shared memory is Triton's own figure: it is dynamic, and
    ptxas sees the static part alone."""
    # By name: Triton is no package that jaxinfer needs, and a type checker may not see it.
    triton: Any = importlib.import_module("triton")
    gpu_target: Any = importlib.import_module("triton.backends.compiler").GPUTarget
    compiled: Any = triton.compile(
        triton.compiler.ASTSource(
            fn=launch.kernel, signature=launch.signature, constexprs=launch.constexprs
        ),
        target=gpu_target("cuda", target.compute_capability, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )
    suffix = "a" if target.compute_capability == 90 else ""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"], encoding="utf-8")
        chip = f"--gpu-name=sm_{target.compute_capability}{suffix}"
        command = [ptxas, "-v", chip, source, "-o", Path(folder) / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [
        dataclasses.replace(kernel, shared_bytes=compiled.metadata.shared)
        for kernel in ptxas_resources(done.stderr + done.stdout)
    ]
