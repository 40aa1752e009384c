"""Run a kernel's case on the device: its agreement with the reference, its time, PyTorch's time.

`check`, `measure`, `peer`, `device` and `ceilings` are the kinds of jobs that the worker runs.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinfer.kernels.triton_launch import interpret, to_torch
from jaxinfer.tools import kernel_cases
from jaxinfer.tools.device_check.conformance import reference_of, relative_error
from jaxinfer.tools.device_check.timing import count_for, device_seconds
from jaxinfer.tools.kernel_calls import backend_with, call_of, split_options
from jaxinfer.tools.kernel_cases import Case

Job = dict[str, Any]
NOMINAL_BANDWIDTH, NOMINAL_RATE = 3e12, 5e14  # only to choose the number of calls in a program


def case_of(job: Job) -> Case:
    """The case that a job names."""
    return kernel_cases.load(job["operator"], tiny=job["rehearse"])[job["case"]]


def keywords(job: Job) -> dict[str, Any]:
    """More keywords for the backend: in a rehearsal, Triton's interpreter."""
    is_interpreted = job["rehearse"] and job["backend"] == "gpu"
    return {"launch": interpret} if is_interpreted else {}


def real_arguments(case: Case) -> tuple[Any, dict[str, Any]]:
    """Put the case's arguments, and its options that are arrays, on the device."""
    arguments, options = case.make(np.random.default_rng(0))
    return jax.device_put((arguments, split_options(options)[0]))


@functools.lru_cache(maxsize=1)
def _arguments_of(operator: str, name: str, rehearse: bool) -> tuple[Any, dict[str, Any]]:
    """A case's arguments, made once for its check and its timing because they take gigabytes."""
    return real_arguments(kernel_cases.load(operator, tiny=rehearse)[name])


def check(job: Job) -> dict[str, Any]:
    """Compare a backend with the reference. Raises `NotImplementedError` if the backend
    declines."""
    case = case_of(job)
    arguments, arrays = _arguments_of(job["operator"], job["case"], job["rehearse"])
    with backend_with(case, job["backend"], **keywords(job)):
        out = jax.block_until_ready(jax.jit(call_of(case, job["backend"]))(arguments, arrays))
    ref, against = reference_of(case, arguments, arrays)
    error = relative_error(out, ref, arguments)
    return {"error": error, "agrees": error <= case.tolerance, "against": against}


def measure(job: Job) -> dict[str, Any]:
    """Time a backend's call. A rehearsal runs each program once, and its seconds mean nothing."""
    case = case_of(job)
    arguments, arrays = _arguments_of(job["operator"], job["case"], job["rehearse"])
    floor = case.bytes_moved / NOMINAL_BANDWIDTH + case.flops / NOMINAL_RATE
    with backend_with(case, job["backend"], **keywords(job)):
        call = call_of(case, job["backend"])
        if job["rehearse"]:
            count, seconds = 1, device_seconds(call, arguments, arrays, 1, repeats=0)
        else:
            count = count_for(floor)
            seconds = device_seconds(call, arguments, arrays, count)
    return {"seconds": seconds, "calls": count}


def peer(job: Job) -> dict[str, Any]:
    """Time PyTorch's call by CUDA events, as a CUDA graph where it can be captured.

    Raises `NotImplementedError` where PyTorch is missing or the case has no peer.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise NotImplementedError("PyTorch is not installed") from None
    case = case_of(job)
    if case.peer is None:
        raise NotImplementedError("PyTorch has no such operator")
    place = "cpu" if job["rehearse"] else "cuda"
    arguments, options = case.make(np.random.default_rng(0))
    tensor = lambda x: to_torch(x).to(place) if isinstance(x, np.ndarray) else x
    arguments, options = jax.tree.map(tensor, (arguments, options))
    run = case.peer(*arguments, **options)
    if job["rehearse"]:
        return {"seconds": _clocked(run, 3), "how": "clock"}
    return _with_events(torch, run)


def _clocked(run: Callable[[], Any], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - started) / count


def _with_events(torch: Any, run: Callable[[], Any]) -> dict[str, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    how, graph = "graph", torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(10):
                run()
        replay, calls = graph.replay, 10
    except RuntimeError:
        how, replay, calls = "calls", run, 1
    replay()
    torch.cuda.synchronize()
    once = _event_seconds(torch, replay, 1)
    count = max(3, min(200, int(0.03 / max(once, 1e-5))))
    taken = [_event_seconds(torch, replay, count) for _ in range(5)]
    return {"seconds": statistics.median(taken) / calls, "how": how}


def _event_seconds(torch: Any, run: Callable[[], Any], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / count


def device(job: Job) -> dict[str, Any]:
    """Describe this machine's device; a rehearsal treats the CPU as a GPU.

    Raises `NotImplementedError` where there is only a CPU.
    """
    found = jax.devices()[0]
    if found.platform == "cpu" and not job["rehearse"]:
        raise NotImplementedError("this machine has no GPU or TPU that JAX can use")
    return {"device": found.device_kind, "platform": "gpu" if job["rehearse"] else found.platform}


def ceilings(job: Job) -> dict[str, Any]:
    """Measure the device's rates: bytes/s of a copy, read and written, and FLOP/s of bfloat16
    products.

    The numbers are random, since products of zeros run faster. Declines on a CPU.
    """
    name = device(job)["device"]
    size = 2**16 if job["rehearse"] else 2**30  # numbers: 4 GiB, far beyond any L2
    N = 128 if job["rehearse"] else 8192
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (size,), "float32")
    count = 3 if job["rehearse"] else 10
    copy = device_seconds(lambda a, _: (a[0] + 1,), (x,), {}, count)
    del x
    square = partial(jax.random.normal, shape=(N, N), dtype="bfloat16")
    a, b = square(keys[1]), square(keys[2]) / N**0.5
    product = device_seconds(lambda a, _: (a[0] @ a[1],), (a, b.astype(a.dtype)), {}, count)
    return {
        "device": name,
        "bandwidth": 2 * 4 * size / max(copy, 1e-12),
        "matrix_rate": 2 * N**3 / max(product, 1e-12),
    }
