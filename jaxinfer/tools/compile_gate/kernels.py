"""Compile an operator's backend for a target at the shapes of a real model.

A Pallas or plain JAX backend is called by name through the operator's public function, and its
launches and memory are read from the compiled text. A Triton backend (`gpu`) is traced with a
recorder in place of its launcher, and each recorded kernel is compiled by Triton itself, whose
ptxas reports the registers and shared memory that it uses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from jaxinfer.kernels.triton_launch import TritonLaunch
from jaxinfer.tools.compile_gate.collectives import collectives
from jaxinfer.tools.compile_gate.matrix import ChipTarget
from jaxinfer.tools.compile_gate.target import Chip
from jaxinfer.tools.compile_gate.text import (
    KernelResources,
    launches,
    mosaic_vmem,
    parse_hlo,
    ptxas_resources,
)
from jaxinfer.tools.kernel_calls import call_of, record_launches, split_options
from jaxinfer.tools.kernel_cases import Case

TRITON_BACKENDS = ("gpu",)


def check_kernel(chip: Chip, triton: TritonCompiler | None, case: Case, backend: str) -> dict:
    """Compile one case and return its compile time, launches and on-chip resources.

    Raises what the compiler raises, and `NotImplementedError` where the backend declines.
    """
    if backend in TRITON_BACKENDS:
        assert triton is not None, "a GPU has a compiler of Triton kernels"
        return check_triton(chip, triton, case, backend)
    arrays, _ = split_options(case.options)
    compiled = chip.compile(
        jax.jit(call_of(case, backend)), *chip.abstract((case.arguments, arrays))
    )
    module = parse_hlo(compiled.text)
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


def check_triton(chip: Chip, triton: TritonCompiler, case: Case, backend: str) -> dict[str, Any]:
    """Compile each Triton kernel of a call to machine code and return what ptxas reports."""
    started, cpu_started = time.perf_counter(), processor_time()
    with chip.in_use():
        recorded = record_launches(case, backend)
    if not recorded:
        raise ValueError(f"the {backend} backend launched no Triton kernel")
    kernels = []
    for launch in recorded:
        chip.on_compile()
        kernels += triton.compile(launch)
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": processor_time() - cpu_started,
        "launches": {"straight": len(recorded), "loops": 0, "in_loops": 0},
        "kernels": [dataclasses.asdict(kernel) for kernel in kernels],
        "registers": max(kernel.registers for kernel in kernels),
        "shared": max(kernel.shared_bytes for kernel in kernels),
        "spills": sum(kernel.spill_bytes for kernel in kernels),
    }


def processor_time() -> float:
    """Seconds of all cores that this process and the ptxas that it ran have used so far."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


class TritonCompiler:
    """Compiles Triton kernels for one kind of GPU, each once, however many calls launch it."""

    def __init__(self, target: ChipTarget):
        # Triton is optional, and a type checker may not see it: it is imported by name.
        self.triton: Any = importlib.import_module("triton")
        gpu_target: Any = importlib.import_module("triton.backends.compiler").GPUTarget
        self.target = target
        self.gpu_target = gpu_target("cuda", target.compute_capability, 32)
        self.block_limit = int(target.gpu_field("shared_memory_per_block_optin"))
        self._done: dict[Any, list[KernelResources]] = {}
        # Importing jax-triton removes Triton's cache folder, and Triton does not compile without
        # one.
        self._cache = tempfile.TemporaryDirectory()
        self.triton.knobs.cache.dir = self._cache.name

    def compile(self, launch: TritonLaunch) -> list[KernelResources]:
        """Compile the kernel of one launch and return its resources.

        Shared memory is Triton's figure, since ptxas sees its static part only. Raises what Triton
        raises, and `ValueError` for more shared memory than a block can have, which Triton itself
        detects on a device only.
        """
        key = (
            launch.kernel,
            tuple(launch.signature.items()),
            tuple((name, repr(value)) for name, value in launch.all_constexprs.items()),
            (launch.num_warps, launch.num_stages),
        )
        if key not in self._done:
            self._done[key] = self._compile(launch)
        return self._done[key]

    def _compile(self, launch: TritonLaunch) -> list[KernelResources]:
        source = self.triton.compiler.ASTSource(
            fn=launch.kernel,
            signature=launch.signature,
            constexprs=launch.all_constexprs,
            attrs=launch.attributes,
        )
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        log = io.StringIO()
        with self.triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            self.triton.knobs.nvidia.dump_ptxas_log = True
            compiled: Any = self.triton.compile(source, target=self.gpu_target, options=options)
        if compiled.metadata.shared > self.block_limit:
            raise ValueError(
                f"{launch.kernel.__name__} takes {compiled.metadata.shared:,} bytes of shared "
                f"memory; a block has {self.block_limit:,}"
            )
        # A kernel that comes from Triton's cache on disk logs nothing.
        kernels = ptxas_resources(log.getvalue()) or self._assembled(compiled.asm["ptx"])
        return [dataclasses.replace(k, shared_bytes=compiled.metadata.shared) for k in kernels]

    def _assembled(self, ptx: str) -> list[KernelResources]:
        suffix = "a" if (self.target.compute_capability or 0) >= 90 else ""
        ptxas = Path(self.triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.ptx"
            source.write_text(ptx, encoding="utf-8")
            chip = f"--gpu-name=sm_{self.target.compute_capability}{suffix}"
            command = [ptxas, "-v", chip, source, "-o", Path(folder) / "kernel.cubin"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        return ptxas_resources(done.stderr + done.stdout)
