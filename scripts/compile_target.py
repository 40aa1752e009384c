"""A chip that is not here: its abstract device, and compiling a program for it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from compile_matrix import Target
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding


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
    """One device of a target, to compile for. Nothing is allocated, nothing runs.

    `on_compile` is called before each compile.
    """

    def __init__(self, target: Target, on_compile: Callable[[], None] = lambda: None):
        self.target = target
        self.on_compile = on_compile
        if target.platform == "tpu":
            topology = topologies.get_topology_desc(target.topology, "tpu")
        else:
            topology = topologies.get_topology_desc(
                target.name,
                "cuda",
                topology=target.topology,
                target_config=target.target_config,
            )
        self.device: Any = topology.devices[0]

    @property
    def num_cores(self) -> int:
        """TensorCores, or multiprocessors."""
        name = "num_cores" if self.target.platform == "tpu" else "core_count"
        return getattr(self.device, name, None) or 1

    def abstract(self, tree: Any) -> Any:
        """The shapes of `tree` as arguments that lie on the chip."""
        sharding = SingleDeviceSharding(self.device)
        place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        return jax.tree.map(place, tree)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Tracing inside is for this chip: `jaxinfer.kernels.dispatch.platform` says so."""
        device = AbstractDevice(
            device_kind=self.device.device_kind,
            num_cores=self.num_cores,
            platform=self.device.platform,
        )
        with jax.sharding.use_abstract_mesh(
            AbstractMesh((1,), ("device",), abstract_device=device)
        ):
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
        lowering = "tpu" if self.target.platform == "tpu" else "cuda"
        with self.in_use():
            self.on_compile()
            lowered = function.trace(*args, **static).lower(lowering_platforms=(lowering,))
            started, cpu_started = time.perf_counter(), time.process_time()
            program = lowered.compile(compiler_options=options())
        seconds = time.perf_counter() - started
        return Compiled(program, seconds, time.process_time() - cpu_started)
