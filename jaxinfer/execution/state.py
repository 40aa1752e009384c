"""What lives on the devices between steps, and how it is laid out on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxinfer.config import EngineConfig
from jaxinfer.execution import kv_cache
from jaxinfer.execution.batch import StepShape
from jaxinfer.execution.forward import Forward
from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.models.functional import Weights
from jaxinfer.nn.layers import Numerics
from jaxinfer.parallel.sharded_model import REPLICATED
from jaxinfer.sampling.slots import SlotSampling, init_slots


class StateSizes(NamedTuple):
    """The sizes that an engine's state is allocated for."""

    page_size: int
    num_slots: int
    max_model_len: int
    cache_dtype: Any
    largest: StepShape

    @classmethod
    def of(cls, config: EngineConfig, numerics: Numerics, max_model_len: int) -> StateSizes:
        """The sizes for requests of at most `max_model_len` tokens."""
        page_size, num_slots = config.cache.page_size, config.scheduler.max_num_seqs
        name = config.cache.dtype
        dtype = numerics.dtype if name == "model" else jnp.dtype(name)
        largest = StepShape.of_bucket(config.buckets[-1], num_slots, page_size)
        return cls(page_size, num_slots, max_model_len, dtype, largest)

    @property
    def table_width(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_model_len // self.page_size)


class EngineState(NamedTuple):
    """Everything that lives on the device between steps, except the weights."""

    pages: tuple[KVPages, ...]  # one for each layer
    last_token: jax.Array  # [S] int32: the token that each slot sampled last
    page_table: jax.Array  # [S, W] int32
    sampling: SlotSampling
    carry: Any = None  # what the forward pass leaves for the next step (`Forward.initial_carry`)


class Program:
    """The static part of an engine's programs. It is a jit key, and hashes by identity.

    `weights` are needed for their shardings on the mesh; abstract ones will do. Raises
    `ConfigError` for a layout of pages that the platform would copy at every step.
    """

    def __init__(
        self,
        forward: Forward,
        weights: Weights,
        *,
        sizes: StateSizes,
        sample_tile: int | None = None,
    ):
        self.forward = forward
        self.model = model = forward.model
        self.sizes = sizes
        self.sample_tile = sample_tile
        kv_cache.check_layout(sizes.page_size, sizes.cache_dtype, model.layout.parts("page_offset"))
        # Bytes of one page over all layers, on one device.
        self.page_bytes = kv_cache.page_bytes(
            model.cache, page_size=forward.local_page_size, dtype=sizes.cache_dtype
        )
        if model.mesh is not None:
            self.weight_specs = jax.tree.map(lambda a: a.sharding.spec, weights)
            self.state_specs = _state_specs(
                forward, jax.eval_shape(lambda: initial_parts(self, num_pages=1))
            )

    def abstract_state(self, num_pages: int) -> EngineState:
        """The shapes of the whole state, with their shardings on the mesh."""
        make = self.on_mesh(lambda: initial_parts(self, num_pages), (), self.specs[1])
        shapes = jax.eval_shape(make)
        mesh = self.model.mesh
        if mesh is None:
            return shapes
        placed = lambda a, spec: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(mesh, spec)
        )
        return jax.tree.map(placed, shapes, self.state_specs)

    def on_mesh(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """`function`, to be run by every device on its own parts."""
        mesh = self.model.mesh
        if mesh is None:
            return function
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    @property
    def specs(self) -> tuple[Any, Any]:
        """The `PartitionSpec`s of weights and state; None on one device."""
        if self.model.mesh is None:
            return None, None
        return self.weight_specs, self.state_specs


def initial_parts(program: Program, num_pages: int) -> EngineState:
    """One device's part of the first state: zeroed pages and tables, every slot unused."""
    model, sizes = program.model, program.sizes
    return EngineState(
        pages=kv_cache.allocate(
            model.cache,
            num_pages=num_pages,
            page_size=program.forward.local_page_size,
            dtype=sizes.cache_dtype,
        ),
        last_token=jnp.zeros(sizes.num_slots, jnp.int32),
        page_table=jnp.zeros((sizes.num_slots, sizes.table_width), jnp.int32),
        sampling=init_slots(sizes.num_slots, model.local.config.vocab_size),
        carry=program.forward.initial_carry(sizes.largest, sizes.table_width),
    )


def _state_specs(forward: Forward, parts: EngineState) -> EngineState:
    """The `PartitionSpec` of each array: pages and the carry in parts, all else whole on every
    device."""
    page_spec, scale_spec = forward.model.page_spec
    specs = jax.tree.map(lambda _: REPLICATED, parts)
    kinds = (page_spec, page_spec, scale_spec, scale_spec)
    pages = []
    for layer in parts.pages:
        pairs = zip(layer, kinds, strict=True)
        layer_specs: list[Any] = [None if a is None else kind for a, kind in pairs]
        pages.append(KVPages(*layer_specs))
    return specs._replace(pages=tuple(pages), carry=forward.carry_specs(parts.carry))
