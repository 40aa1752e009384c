"""Chips that this machine lacks: their abstract devices, and compilation for them."""

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

from jaxinfer.tools.compile_gate.matrix import ChipTarget
from jaxinfer.tools.compile_gate.text import first_reason

LOWERING_PLATFORMS = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program compiled by the target's compiler."""

    program: Any  # jax.stages.Compiled
    seconds: float  # wall time of compiling alone, without tracing and lowering
    cpu_seconds: float  # processor time of the same, all threads

    @property
    def text(self) -> str:
        return self.program.as_text()

    def memory(self) -> dict[str, int]:
        """Bytes on the device; `results` excludes those that reuse an argument's memory."""
        analysis = self.program.memory_analysis()
        return {
            "arguments": analysis.argument_size_in_bytes,
            "results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            "temporaries": analysis.temp_size_in_bytes,
            "code": analysis.generated_code_size_in_bytes,
        }


class Chip:
    """The devices of a target to compile for: one, or with `over` a mesh of them.

    Nothing is allocated and nothing runs. `on_compile` is called before each compile.
    """

    def __init__(self, target: ChipTarget, on_compile: Callable[[], None] = lambda: None):
        self.target = target
        self.on_compile = on_compile
        self.devices: list[Any] = _devices(target)
        self.mesh: Mesh | None = None

    def over(self, mesh: Mesh) -> Chip:
        """The same chip, whose programs run on all devices of `mesh`, a subset of its own."""
        other = copy.copy(self)
        other.mesh = mesh
        return other

    def alone(self) -> Chip:
        """The same chip, whose programs run on its first device."""
        other = copy.copy(self)
        other.devices, other.mesh = self.devices[:1], None
        return other

    @property
    def device(self) -> Any:
        return self.devices[0]

    @property
    def num_cores(self) -> int:
        """The number of TensorCores or multiprocessors."""
        name = "num_cores" if self.target.platform == "tpu" else "core_count"
        return getattr(self.device, name, None) or 1

    def abstract(self, tree: Any, shardings: Any = None) -> Any:
        """The shapes of `tree` as arguments on the chip, placed by `shardings`, a tree of the same
        structure, or replicated on every device."""
        if shardings is None:
            everywhere = SingleDeviceSharding(self.device)
            if self.mesh is not None:
                everywhere = NamedSharding(self.mesh, PartitionSpec())
            shardings = jax.tree.map(lambda a: everywhere, tree)
        place = lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where)
        return jax.tree.map(place, tree, shardings)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Trace for this chip: `jaxinfer.kernels.dispatch.platform` reads the abstract mesh."""
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
        """Compile a jitted function for arguments that `abstract` made. `options` returns the
        compiler's options; it is called while the chip is in use."""
        lowering = LOWERING_PLATFORMS[self.target.platform]
        with self.in_use():
            self.on_compile()
            lowered = function.trace(*args, **static).lower(lowering_platforms=(lowering,))
            started, cpu_started = time.perf_counter(), time.process_time()
            program = lowered.compile(compiler_options=options())
        seconds = time.perf_counter() - started
        return Compiled(program, seconds, time.process_time() - cpu_started)


def _devices(target: ChipTarget) -> list[Any]:
    """The devices of the target's topology, or the first one alone.

    Raises `ValueError`, with the compiler's message, for a topology that it does not accept.
    """
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
