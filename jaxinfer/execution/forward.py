"""The forward pass of a step: from token ids to hidden states.

`Forward` is the pass of one device that holds the whole model, or of a mesh whose devices hold
parts of its layers (tensor and expert parallelism): the collectives of those are inside the layers.
`parallel/forward.py` wraps it where sequences or the layers themselves are split.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from jaxinfer.execution.batch import StepInputs, StepShape
from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.models.functional import Weights
from jaxinfer.nn.ragged import RaggedBatch, StepRows, ragged_batch
from jaxinfer.parallel.mesh_options import page_part_size
from jaxinfer.parallel.sharded_model import ShardedModel

Pages = tuple[KVPages, ...]  # one for each layer


class StepBatch(NamedTuple):
    """What the host said about the R rows and T tokens of a step, and where the rows' pages are."""

    q_start: Int[Array, " R1"]
    kv_len: Int[Array, " R"]
    row_slot: Int[Array, " R"]
    is_sampled: Int[Array, " R"]
    write_from: Int[Array, " R"]
    min_rope_len: Int[Array, " R"]
    page_table: Int[Array, "R W"]
    target_ids: Int[Array, " T"]
    wants_prompt_logprobs: Int[Array, " one"]

    @classmethod
    def of(cls, inputs: StepInputs, page_table: Int[Array, "S W"]) -> StepBatch:
        given = {name: getattr(inputs, name) for name in cls._fields if name != "page_table"}
        return cls(page_table=page_table[inputs.row_slot], **given)

    @property
    def num_tokens(self) -> int:
        return self.target_ids.shape[0]

    @property
    def rows(self) -> StepRows:
        return StepRows(*(getattr(self, name) for name in StepRows._fields))


class ForwardOutput(NamedTuple):
    """What a pass hands to sampling, and what it leaves for the next step."""

    batch: StepBatch  # whose tokens the hidden states belong to
    hidden: Float[Array, "T D"]  # behind the last layer
    pages: Pages
    carry: Any = None  # `EngineState.carry` of the next step


class Forward:
    """Runs the decoder over the tokens of a step. Part of a jit key: it hashes by identity."""

    def __init__(self, model: ShardedModel, page_size: int):
        self.model = model
        # Tokens of each page that one device stores.
        self.local_page_size = page_part_size(page_size, model.layout)

    def __call__(
        self, decoder: Any, token_ids: Int[Array, " T"], batch: StepBatch, pages: Pages, carry: Any
    ) -> ForwardOutput:
        hidden, pages = decoder(token_ids, self.ragged(batch, pages), pages)
        return ForwardOutput(batch, hidden, pages)

    def ragged(self, batch: StepBatch, pages: Pages) -> RaggedBatch:
        """What the layers are told about the batch."""
        return ragged_batch(
            batch.rows,
            batch.num_tokens,
            page_size=self.local_page_size,
            num_pages=pages[0].k.shape[0],
            layout=self.model.layout,
        )

    def local_weights(self, weights: Weights) -> Weights:
        """The weights of `model.local`, from one device's parts of the model's weights."""
        return weights

    def initial_carry(self, largest: StepShape, table_width: int) -> Any:
        """What the first step gets as `carry`; None: a step leaves nothing to the next one."""
        return None

    def carry_specs(self, carry: Any) -> Any:
        """A `PartitionSpec` for each array of a carry."""
        return None

    def last_hidden(self, output: ForwardOutput, index: Int[Array, " R"]) -> jax.Array:
        """The hidden states [R, D] of tokens `index`, on every device."""
        return output.hidden[index]

    def prompt_hidden(self, output: ForwardOutput) -> jax.Array:
        """The hidden states [T, D] whose logits this device computes for prompts."""
        return output.hidden

    def own_tokens(self, x: jax.Array) -> jax.Array:
        """This device's part of an array [T, ...] over the tokens of a step."""
        return x

    def all_tokens(self, x: jax.Array, num_tokens: int) -> jax.Array:
        """The array [T, ...] of which `x` is this device's part, on every device."""
        return x
