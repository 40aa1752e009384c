"""Chips that are not here: their abstract devices, and compiling a program for them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from jaxinfer.tools.compile_gate.matrix import Target
from jaxinfer.tools.compile_gate.text import first_reason

LOWERING_PLATFORMS = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program as the target's compiler made it."""

    program: Any  # jax.stages.Compiled
    seconds: float  # compiling alone, without tracing and lowering
    cpu_seconds: float  # the same, of all threads: it does not depend on what else runs

    @property
    def text(self) -> str:
        return self.program.as_text()

    def memory(self) -> dict[str, int]:
        """Bytes on the device; `results` are those that do not lie in an argument's memory."""
        analysis = self.program.memory_analysis()
        return {
            "arguments": analysis.argument_size_in_bytes,
            "results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            "temporaries": analysis.temp_size_in_bytes,
            "code": analysis.generated_code_size_in_bytes,
        }


class Chip:
    """The devices of a target, to compile for: one, or with `over` a mesh of them. Nothing is
    allocated, nothing runs.

    `on_compile` is called before each compile.
    """

    def __init__(self, target: Target, on_compile: Callable[[], None] = lambda: None):
        self.target = target
        self.on_compile = on_compile
        self.devices: list[Any] = _devices(target)
        self.mesh: Mesh | None = None

    def over(self, mesh: Mesh) -> Chip:
        """The same chip, programs now being for all devices of `mesh`, which are some of its."""
        other = copy.copy(self)
        other.mesh = mesh
        return other

    def alone(self) -> Chip:
        """The same chip, programs now being for its first device."""
        other = copy.copy(self)
        other.devices, other.mesh = self.devices[:1], None
        return other

    @property
    def device(self) -> Any:
        return self.devices[0]

    @property
    def num_cores(self) -> int:
        """TensorCores, or multiprocessors."""
        name = "num_cores" if self.target.platform == "tpu" else "core_count"
        return getattr(self.device, name, None) or 1

    def abstract(self, tree: Any, shardings: Any = None) -> Any:
        """The shapes of `tree` as arguments that lie on the chip: by `shardings`, a tree like it,
        or whole on every device."""
        if shardings is None:
            everywhere = SingleDeviceSharding(self.device)
            if self.mesh is not None:
                everywhere = NamedSharding(self.mesh, PartitionSpec())
            shardings = jax.tree.map(lambda a: everywhere, tree)
        place = lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where)
        return jax.tree.map(place, tree, shardings)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Tracing inside is for this chip: `jaxinfer.kernels.dispatch.platform` says so."""
        if self.mesh is not None:
            mesh = self.mesh.abstract_mesh
        else:
            device = AbstractDevice(
                device_kind=self.device.device_kind,
                num_cores=self.num_cores,
                platform=self.device.platform,
            )
            mesh = AbstractMesh((1,), ("device",), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            yield

    def compile(
        self,
        function: Callable[..., Any],
        *args: Any,
        options: Callable[[], dict[str, Any]] = dict,
        **static: Any,
    ) -> Compiled:
        """Compile a jitted function for arguments that `abstract` made; `options` tells, while the
        chip is in use, what its compiler gets."""
        lowering = LOWERING_PLATFORMS[self.target.platform]
        with self.in_use():
            self.on_compile()
            lowered = function.trace(*args, **static).lower(lowering_platforms=(lowering,))
            started, cpu_started = time.perf_counter(), time.process_time()
            program = lowered.compile(compiler_options=options())
        seconds = time.perf_counter() - started
        return Compiled(program, seconds, time.process_time() - cpu_started)


def _devices(target: Target) -> list[Any]:
    """All of its topology's, or the first alone. `ValueError` for a topology that its compiler
    does not take, in its words."""
    if target.platform == "cpu":
        devices = jax.devices("cpu")
        if len(devices) < target.num_devices:
            raise ValueError(
                f"target {target.name}: this process has {len(devices)} CPU devices; set "
                f"jax_num_cpu_devices to {target.num_devices} before the first is used"
            )
    else:
        options: dict[str, Any] = {}
        name, platform = target.topology, "tpu"
        if target.platform == "gpu":
            options = {"topology": target.topology, "target_config": target.target_config}
            name, platform = target.chip, "cuda"
        try:
            devices = topologies.get_topology_desc(name, platform, **options).devices
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"target {target.name}: {first_reason(error)}") from error
    return list(devices[: target.num_devices])
