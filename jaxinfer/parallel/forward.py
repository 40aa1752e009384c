"""The forward pass of a step where a mesh splits sequences (`seq`) or layers (`pipe`)."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from jaxinfer.execution.batch import StepShape
from jaxinfer.execution.forward import Forward, ForwardOutput, Pages, StepBatch
from jaxinfer.models.functional import Weights
from jaxinfer.parallel import pipeline
from jaxinfer.parallel.sharded_model import REPLICATED, ShardedModel, unstacked
from jaxinfer.sharding.zigzag import TokenSplit


def forward_for(model: ShardedModel, page_size: int) -> Forward:
    """The pass for the model's mesh. Raises `ConfigError` for pages that do not divide over it."""
    if model.num_stages > 1:
        return PipelineForward(model, page_size)
    if model.layout.axes("page_offset"):
        return SequenceForward(model, page_size)
    return Forward(model, page_size)


class SequenceForward(Forward):
    """Every sequence is split: a device computes its own tokens of a step (`sharding/zigzag.py`),
    or all of them if they are few."""

    def __call__(
        self, decoder: Any, token_ids: Int[Array, " T"], batch: StepBatch, pages: Pages, carry: Any
    ) -> ForwardOutput:
        return super().__call__(decoder, self.own_tokens(token_ids), batch, pages, carry)

    def last_hidden(self, output: ForwardOutput, index: Int[Array, " R"]) -> jax.Array:
        return self._split(output.batch.num_tokens).take(output.hidden, index)

    def own_tokens(self, x: jax.Array) -> jax.Array:
        return self._split(x.shape[0]).shard(x)

    def all_tokens(self, x: jax.Array, num_tokens: int) -> jax.Array:
        return self._split(num_tokens).gather(x)

    def _split(self, num_tokens: int) -> TokenSplit:
        return TokenSplit.of(self.model.layout, num_tokens)


class PipelineForward(SequenceForward):
    """Layers are split into stages, which work on a micro-batch each (`pipeline.py`). The batch
    that leaves is the one that entered `num_stages - 1` steps ago."""

    def __call__(
        self, decoder: Any, token_ids: Int[Array, " T"], batch: StepBatch, pages: Pages, carry: Any
    ) -> ForwardOutput:
        token_ids = self.own_tokens(token_ids)
        working, waiting = pipeline.advance(carry, batch)
        leaving = pipeline.last_batch(working)
        embedded = decoder.embedded(token_ids, self.ragged(batch, pages))
        hidden, pages = decoder.run(
            pipeline.stage_input(embedded, carry),
            self.ragged(pipeline.stage_batch(working), pages),
            pages,
        )
        carry = pipeline.InFlight(waiting, pipeline.send_to_next(hidden, carry))
        return ForwardOutput(leaving, hidden, pages, carry)

    def local_weights(self, weights: Weights) -> Weights:
        return unstacked(weights, self.model)

    def initial_carry(self, largest: StepShape, table_width: int) -> Any:
        local = self.model.local
        num_tokens = self._split(largest.num_tokens).num_local
        activations = jax.ShapeDtypeStruct(
            (1, num_tokens, local.config.model_dim), local.numerics.dtype
        )
        return pipeline.empty(self.model.num_stages, largest, table_width, activations)

    def carry_specs(self, carry: Any) -> Any:
        specs = jax.tree.map(lambda _: REPLICATED, carry)
        return specs._replace(activations=PartitionSpec("pipe", "seq"))

    def last_hidden(self, output: ForwardOutput, index: Int[Array, " R"]) -> jax.Array:
        found = super().last_hidden(output, index)
        return pipeline.from_last_stage(found, self.model.num_stages)

    def prompt_hidden(self, output: ForwardOutput) -> jax.Array:
        return pipeline.from_last_stage(output.hidden, self.model.num_stages)
