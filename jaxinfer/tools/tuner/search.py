"""Search the tilings of one case: compile them, rank them by the model, measure the best."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.tools.compile_gate.kernels import TritonCompiler
from jaxinfer.tools.compile_gate.matrix import ChipTarget, load_target
from jaxinfer.tools.compile_gate.target import Chip
from jaxinfer.tools.compile_gate.text import first_reason
from jaxinfer.tools.device_check import kernels
from jaxinfer.tools.device_check.conformance import relative_error
from jaxinfer.tools.device_check.timing import REPEATS, count_for, device_seconds
from jaxinfer.tools.kernel_calls import (
    backend_module,
    backend_with,
    call_of,
    record_launches,
    split_options,
)
from jaxinfer.tools.kernel_cases import Case
from jaxinfer.tools.tuner.model import Gpu, estimate

Job = dict[str, Any]
# The target with a device's limits, by a part of its name: an H200 is an H100 with more memory.
EQUIVALENT_TARGETS = {"A100": "a100", "H100": "h100", "H200": "h100"}


def search_space(job: Job, case: Case) -> tuple[str, list[Any]]:
    """Return the key of the case's tiling in the tuning files, and the tilings to try.

    Raises `NotImplementedError` where the backend has nothing to tune. Other errors come from the
    backend's functions, or from a case that should not be `is_tunable`.
    """
    module = backend_module(job["operator"], job["backend"])
    name = f"{job['operator']}/{job['backend']}"
    if not (hasattr(module, "candidates") and hasattr(module, "tiling_key")):
        raise NotImplementedError(f"{name} has no candidates")
    key = module.tiling_key(*case.arguments, **case.options)
    return key, list(module.candidates(*case.arguments, **case.options))


def fields_of(tiling: Any) -> Job | None:
    """A tiling as it is written to a file; None for the current one."""
    return None if tiling is None else dataclasses.asdict(tiling)


@contextlib.contextmanager
def traced_for(target: ChipTarget) -> Iterator[None]:
    """Trace for a GPU. Neither it nor its compiler is needed, only Triton."""
    device = AbstractDevice(
        device_kind=target.device_kind,
        num_cores=int(target.gpu_field("core_count")),
        platform="gpu",
    )
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        yield


@functools.cache
def _triton(name: str) -> TritonCompiler:
    return TritonCompiler(load_target(name))


@functools.cache
def _chip(name: str) -> Chip:
    return Chip(load_target(name))


def compile_tiling(job: Job, case: Case, tiling: Any, target: ChipTarget) -> Job:
    """Compile a tiling; return an estimate of a Triton kernel's time, or why it does not
    compile."""
    found: Job = {"tiling": fields_of(tiling)}
    keywords = {} if tiling is None else {"tiling": tiling}
    try:
        if job["backend"] != "gpu":
            arrays, _ = split_options(case.options)
            chip = _chip(target.name)
            with backend_with(case, job["backend"], **keywords):
                call = jax.jit(call_of(case, job["backend"]))
                chip.compile(call, *chip.abstract((case.arguments, arrays)))
            return found
        with traced_for(target):
            launches = record_launches(case, job["backend"], **keywords)
        resources = [_triton(target.name).compile(launch)[0] for launch in launches]
        if spills := sum(r.spill_bytes for r in resources):
            return found | {"reason": f"spills {spills:,} bytes"}
        gpu = Gpu.from_target(target)
        figure = estimate(gpu, launches, resources, case.bytes_moved, case.flops)
        return found | {"estimate": figure.seconds, "takes": dataclasses.asdict(figure)}
    except Exception as error:  # a tiling that does not compile is a result too
        return found | {"reason": first_reason(error)}


def rank_tilings(
    job: Job, case: Case, tilings: list[Any], target: ChipTarget
) -> list[tuple[Any, Job]]:
    """Compile the tilings and sort them: the model's best first, failures last. Tilings without an
    estimate keep the backend's own order."""
    found = [(tiling, compile_tiling(job, case, tiling, target)) for tiling in tilings]
    return sorted(found, key=lambda pair: ("reason" in pair[1], pair[1].get("estimate", 0.0)))


def tune(job: Job) -> Job:
    """Run a job of the tuner: the figure of every tiling, and of the current one (tiling None).

    With `target`, figures come from the compiler and the model alone. Otherwise `keep` tilings are
    measured on this machine's device and their results compared with the current one's. A rehearsal
    interprets the kernels.
    """
    case = kernels.case_of(job)
    key, tilings = search_space(job, case)
    if job["target"] is not None:
        target = load_target(job["target"])
        kind = target.device_kind
        if target.platform == "tpu":
            kind = _chip(target.name).device.device_kind
        order = rank_tilings(job, case, [None, *tilings], target)
        return {"key": key, "device": kind, "tried": [found for _, found in order]}
    kind = jax.devices()[0].device_kind
    like = next((name for part, name in EQUIVALENT_TARGETS.items() if part in kind), None)
    if job["backend"] == "gpu" and like is not None and not job["rehearse"]:
        order = rank_tilings(job, case, tilings, load_target(like))
    else:
        order = [(tiling, {"tiling": fields_of(tiling)}) for tiling in tilings]
    dropped = [found for _, found in order if "reason" in found]
    kept = [(tiling, found) for tiling, found in order if "reason" not in found]
    chosen = [(None, {"tiling": None}), *kept[: job["keep"]]]
    return {"key": key, "device": kind, "tried": _measured(job, case, chosen) + dropped}


def _measured(job: Job, case: Case, chosen: list[tuple[Any, Job]]) -> list[Job]:
    """Measure the chosen tilings; a tiling that fails gets a reason. The current one comes
    first."""
    arguments, arrays = kernels.real_arguments(case)
    backend, others = job["backend"], kernels.keywords(job)
    floor = case.bytes_moved / kernels.NOMINAL_BANDWIDTH + case.flops / kernels.NOMINAL_RATE
    count, repeats = (1, 0) if job["rehearse"] else (count_for(floor), REPEATS)
    current: list[Any] = []

    def timed(tiling: Any) -> Job:
        keywords = others if tiling is None else {**others, "tiling": tiling}
        with backend_with(case, backend, **keywords):
            call = call_of(case, backend)
            out = jax.block_until_ready(jax.jit(call)(arguments, arrays))
            if not current:
                current.append(out)
            error = relative_error(out, current[0], arguments)
            if not error <= case.tolerance:
                return {"reason": f"differs from the current tiling's result by {error:.1e}"}
            return {"seconds": device_seconds(call, arguments, arrays, count, repeats=repeats)}

    rows = []
    for tiling, found in chosen:
        try:
            rows.append(found | timed(tiling))
        except Exception as error:
            if tiling is None:  # nothing to compare with
                raise
            rows.append(found | {"reason": first_reason(error)})
    return rows
