"""Triton launches: described as data, then run by a launcher.

A GPU backend describes each kernel that it launches as a `TritonLaunch` and hands it to a
`Launcher`, which returns the outputs:

    jax_triton    in a program for a GPU (the default)
    interpret     on a CPU, by Triton's interpreter (tests, rehearsals), in a jit or outside
    Recorder      records launches without running them, for a compiler without a device

so that one description serves the device, the tests and the compile gate. This module imports
neither triton nor jax-triton until a kernel is launched: both are optional, and the latter cannot
be imported on a machine without CUDA.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kernels.dispatch import device_kind
from jaxinfer.kernels.triton_interpreter import patched_interpreter

# Compute capabilities by a part of the device's name, for programs traced for a GPU that is not
# here; a device in use reports its own.  https://developer.nvidia.com/cuda-gpus
CAPABILITIES: Mapping[str, int] = {"A100": 80, "H100": 90, "H200": 90}
FLOAT8_CAPABILITY = 89  # Ada; Triton refuses to convert to float8_e4m3fn for those before

_POINTERS = {
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
    "int8": "*i8",
    "uint8": "*u8",
    "int32": "*i32",
    "uint32": "*u32",
    "bool": "*i1",
}


@dataclasses.dataclass(frozen=True)
class TritonLaunch:
    """One launch. The kernel's parameters are, in order: `inputs`, then `outputs`, then constexprs.

    `inputs` are arrays (pointers in the kernel) or Python ints and floats (i32 and fp32 scalars).
    `aliases` maps an input's index to that of the output that is the same memory. Raises
    `ValueError` for an int past 32 bits, and where numbers of parameters differ.
    """

    kernel: Any  # a function under triton.jit
    grid: tuple[int, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    constexprs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    aliases: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        names = [name for name in self.kernel.arg_names if name not in self.constexprs]
        given = len(self.inputs) + len(self.outputs)
        if len(names) != given or not set(self.constexprs) <= set(self.kernel.arg_names):
            raise ValueError(
                f"{self.kernel.__name__} takes {', '.join(self.kernel.arg_names)}; it was given "
                f"{given} inputs and outputs beside {', '.join(self.constexprs) or 'no constexprs'}"
            )
        too_wide = [x for x in self.inputs if _is_int(x) and not -(2**31) <= x < 2**31]
        if too_wide:
            raise ValueError(f"{self.kernel.__name__}: {too_wide[0]} is no int32; give an array")

    @property
    def all_constexprs(self) -> dict[str, Any]:
        """`constexprs` and the scalars that are 1, which Triton compiles in as constants too."""
        ones = {
            name: 1
            for name, x in zip(self.kernel.arg_names, self.inputs, strict=False)
            if is_scalar(x) and x == 1
        }
        return {**self.constexprs, **ones}

    @property
    def signature(self) -> dict[str, str]:
        """Parameter -> its Triton type, as `triton.compiler.ASTSource` takes it."""
        values = (*self.inputs, *self.outputs)
        types = dict(zip(self.kernel.arg_names, map(_type_of, values), strict=False))
        types |= dict.fromkeys(self.all_constexprs, "constexpr")
        return {name: types[name] for name in self.kernel.arg_names}

    @property
    def attributes(self) -> dict[tuple[int], list[list[Any]]]:
        """What the compiler may assume: arrays start at multiples of 16 bytes."""
        values = enumerate((*self.inputs, *self.outputs))
        return {(i,): [["tt.divisibility", 16]] for i, x in values if not is_scalar(x)}


Launcher = Callable[[TritonLaunch], tuple[jax.Array, ...]]


def require_triton() -> None:
    """Raise `NotImplementedError`, so that a backend declines, where Triton is not installed."""
    try:
        import triton  # noqa: F401
    except ImportError:
        raise NotImplementedError(
            "Triton is not installed: pip install 'jaxinfer[triton]'"
        ) from None


def is_scalar(x: Any) -> bool:
    """Return whether a launch's input is a number, not an array."""
    return isinstance(x, bool | int | float)


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _type_of(x: Any) -> str:
    if is_scalar(x):
        return "fp32" if isinstance(x, float) else "i32"
    name = jnp.dtype(x.dtype).name
    if name not in _POINTERS:
        raise NotImplementedError(f"Triton kernels here take no {name} arrays")
    return _POINTERS[name]


def compute_capability() -> int | None:
    """Return the compute capability of the GPU that is traced for; None: the driver reports it."""
    if jax.sharding.get_abstract_mesh().abstract_device is None:
        return None
    kind = device_kind()
    found = [value for name, value in CAPABILITIES.items() if name in kind]
    if not found:
        raise NotImplementedError(f"the compute capability of {kind!r} is not known here")
    return found[0]


def capability_in_use() -> int | None:
    """Return the compute capability of the GPU that is traced for or in use, 90 for 9.0.

    None where there is no such number: on a CPU, which interprets, and on AMD's chips, which report
    "gfx942".
    """
    found = compute_capability()
    if found is not None:
        return found
    text = str(getattr(jax.devices()[0], "compute_capability", ""))
    numbers = re.fullmatch(r"(\d+)\.(\d+)", text)
    return None if numbers is None else 10 * int(numbers[1]) + int(numbers[2])


def require_float8() -> None:
    """Raise `NotImplementedError`, so that a backend declines, for a GPU known to lack float8."""
    capability = capability_in_use()
    if capability is not None and capability < FLOAT8_CAPABILITY:
        raise NotImplementedError(
            f"sm_{capability} has no float8_e4m3fn; sm_{FLOAT8_CAPABILITY} and later do"
        )


def check_schedule(num_warps: int, num_stages: int) -> None:
    """Raise `ValueError` for numbers that no kernel can be compiled with."""
    if num_warps < 1 or num_warps & (num_warps - 1):
        raise ValueError(f"num_warps is {num_warps}; it must be a power of two of at least 1")
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; it must be at least 1")


def jax_triton(launch: TritonLaunch) -> tuple[jax.Array, ...]:
    """Add the launch to the program being traced for a GPU.

    Raises `NotImplementedError`, so that the backend declines, where jax-triton is not installed.
    """
    try:  # imported by name: the package is optional, and a type checker may not see it
        triton_call: Any = importlib.import_module("jax_triton").triton_call
    except ImportError as error:
        raise NotImplementedError(
            f"jax-triton cannot be imported ({error}): pip install 'jaxinfer[triton]'"
        ) from error
    # jax-triton takes a float for fp64, cannot pass a bool, and counts aliased inputs by arrays.
    inputs = [_as_32_bits(x) for x in launch.inputs]
    place = {index: place for place, index in enumerate(_array_places(launch))}
    return tuple(
        triton_call(
            *inputs,
            kernel=launch.kernel,
            out_shape=launch.outputs,
            grid=launch.grid,
            name=launch.kernel.__name__.strip("_"),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            compute_capability=compute_capability(),
            input_output_aliases={place[i]: out for i, out in launch.aliases.items()},
            **launch.constexprs,
        )
    )


def _as_32_bits(x: Any) -> Any:
    if isinstance(x, bool):
        return int(x)
    return np.float32(x) if isinstance(x, float) else x


def _array_places(launch: TritonLaunch) -> list[int]:
    return [i for i, x in enumerate(launch.inputs) if not is_scalar(x)]


def interpret(launch: TritonLaunch) -> tuple[jax.Array, ...]:
    """Run the launch by Triton's interpreter on CPU tensors; memory that the kernel does not write
    is NaN, or the lowest integer.

    Needs PyTorch, and `TRITON_INTERPRET=1` in the environment before the kernel's module is first
    imported; raises `RuntimeError` without the latter.
    """
    if type(launch.kernel).__name__ != "InterpretedFunction":
        raise RuntimeError(
            f"{launch.kernel.__name__} is compiled for a GPU; set TRITON_INTERPRET=1 in the "
            "environment before its module is imported"
        )
    is_array = [not is_scalar(x) for x in launch.inputs]

    def run(*arrays: Any) -> tuple[np.ndarray, ...]:
        given = iter(arrays)
        inputs = [
            to_torch(np.array(next(given))) if array else x
            for x, array in zip(launch.inputs, is_array, strict=True)
        ]
        outputs = [to_torch(_poison(spec)) for spec in launch.outputs]
        for source, target in launch.aliases.items():
            outputs[target] = inputs[source]
        with patched_interpreter():
            launch.kernel[launch.grid](*inputs, *outputs, **launch.constexprs)
        return tuple(_from_torch(x, spec) for x, spec in zip(outputs, launch.outputs, strict=True))

    arrays = [x for x, array in zip(launch.inputs, is_array, strict=True) if array]
    specs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in launch.outputs)
    return jax.pure_callback(run, specs, *arrays)


class Recorder:
    """Records the launches of a call traced by `jax.eval_shape` and returns zeros for their
    outputs."""

    def __init__(self) -> None:
        self.launches: list[TritonLaunch] = []

    def __call__(self, launch: TritonLaunch) -> tuple[jax.Array, ...]:
        self.launches.append(launch)
        return tuple(jnp.zeros(spec.shape, spec.dtype) for spec in launch.outputs)


def _poison(spec: jax.ShapeDtypeStruct) -> np.ndarray:
    dtype = jnp.dtype(spec.dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return np.full(spec.shape, np.nan, dtype)
    return np.full(spec.shape, 0 if dtype.kind == "b" else jnp.iinfo(dtype).min, dtype)


def to_torch(x: np.ndarray) -> Any:
    """Return a tensor on the CPU, converted by bytes: PyTorch takes none of NumPy's additional
    types."""
    torch: Any = importlib.import_module("torch")
    raw = torch.from_numpy(np.ascontiguousarray(x).reshape(-1).view(np.uint8).copy())
    return raw.view(getattr(torch, x.dtype.name)).reshape(x.shape)


def _from_torch(x: Any, spec: jax.ShapeDtypeStruct) -> np.ndarray:
    torch: Any = importlib.import_module("torch")
    raw = x.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw.view(jnp.dtype(spec.dtype)).reshape(spec.shape)
