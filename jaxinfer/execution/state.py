"""What lives on the devices between steps, and how it lies on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.config import EngineConfig
from jaxinfer.execution import kv_cache
from jaxinfer.execution.batch import StepShape
from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.models.functional import Weights
from jaxinfer.nn.layers import Numerics
from jaxinfer.parallel.mesh_options import page_part_size
from jaxinfer.parallel.pipeline import InFlight, nothing_in_flight
from jaxinfer.parallel.sharded_model import NOTHING, ShardedModel
from jaxinfer.sampling.slots import SlotSampling, init_slots
from jaxinfer.sharding.zigzag import TokenSplit


class StateSizes(NamedTuple):
    """What an engine's state is made for."""

    page_size: int
    num_slots: int
    max_model_len: int
    cache_dtype: Any
    largest: StepShape

    @classmethod
    def of(cls, config: EngineConfig, numerics: Numerics, max_model_len: int) -> StateSizes:
        """Of an engine whose requests have `max_model_len` tokens at most."""
        page_size, num_slots = config.cache.page_size, config.scheduler.max_num_seqs
        name = config.cache.dtype
        dtype = numerics.dtype if name == "model" else jnp.dtype(name)
        largest = StepShape.of_bucket(config.buckets[-1], num_slots, page_size)
        return cls(page_size, num_slots, max_model_len, dtype, largest)

    @property
    def table_width(self) -> int:
        return -(-self.max_model_len // self.page_size)


class EngineState(NamedTuple):
    """Everything that lives on the device between steps, but the weights."""

    pages: tuple[KVPages, ...]  # one a layer
    last_token: jax.Array  # [S] int32: what each slot sampled last
    page_table: jax.Array  # [S, W] int32
    sampling: SlotSampling
    in_flight: InFlight | None = None  # of a pipeline


class Program:
    """What is static about an engine's programs. Hashes by identity: it is a jit key.

    `weights` are needed for how they lie on the mesh; shapes with shardings do. Of a page a device
    has `cells`, which take `page_bytes` over all layers. `ConfigError` for pages that do not divide
    so, or that the platform would copy at every step.
    """

    def __init__(
        self,
        model: ShardedModel,
        weights: Weights,
        *,
        sizes: StateSizes,
        sample_tile: int | None = None,
    ):
        self.model = model
        self.sizes = sizes
        self.sample_tile = sample_tile
        layout = model.layout
        self.cells = page_part_size(sizes.page_size, layout)
        kv_cache.check_layout(sizes.page_size, sizes.cache_dtype, layout.parts("cell"))
        self.page_bytes = kv_cache.page_bytes(
            model.cache, page_size=self.cells, dtype=sizes.cache_dtype
        )
        if model.mesh is not None:
            self.weight_specs = jax.tree.map(lambda a: a.sharding.spec, weights)
            self.state_specs = _state_specs(
                model, jax.eval_shape(lambda: initial_parts(self, num_pages=1))
            )

    def abstract_state(self, num_pages: int) -> EngineState:
        """The shapes of the whole state, and how it lies on the mesh."""
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
        """`function`, run by every device on its own parts."""
        mesh = self.model.mesh
        if mesh is None:
            return function
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    @property
    def specs(self) -> tuple[Any, Any]:
        """Of weights and state."""
        if self.model.mesh is None:
            return None, None
        return self.weight_specs, self.state_specs


def initial_parts(program: Program, num_pages: int) -> EngineState:
    """Zeroed pages and tables, every slot unused: what one device has of the state."""
    model, sizes = program.model, program.sizes
    config, S = model.local.config, model.num_stages
    in_flight = None
    if S > 1:
        num_tokens = TokenSplit.of(model.layout, sizes.largest.num_tokens).num_own
        in_flight = nothing_in_flight(
            S,
            sizes.largest,
            sizes.table_width,
            num_tokens,
            config.model_dim,
            model.local.numerics.dtype,
        )
    return EngineState(
        pages=kv_cache.allocate(
            model.cache, num_pages=num_pages, page_size=program.cells, dtype=sizes.cache_dtype
        ),
        last_token=jnp.zeros(sizes.num_slots, jnp.int32),
        page_table=jnp.zeros((sizes.num_slots, sizes.table_width), jnp.int32),
        sampling=init_slots(sizes.num_slots, config.vocab_size),
        in_flight=in_flight,
    )


def _state_specs(model: ShardedModel, parts: EngineState) -> EngineState:
    """How the state lies on the mesh: pages and activations by parts, all else the same on every
    device."""
    of_pages, of_scales = model.page_spec
    specs = jax.tree.map(lambda _: NOTHING, parts)
    kinds = (of_pages, of_pages, of_scales, of_scales)
    pages = []
    for layer in parts.pages:
        pairs = zip(layer, kinds, strict=True)
        layer_specs: list[Any] = [None if a is None else kind for a, kind in pairs]
        pages.append(KVPages(*layer_specs))
    in_flight = specs.in_flight
    if in_flight is not None:
        in_flight = in_flight._replace(activations=PartitionSpec("pipe", "seq"))
    return specs._replace(pages=tuple(pages), in_flight=in_flight)
