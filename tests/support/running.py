"""Running models in tests: logits of a whole sequence, engines over tiny checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import EngineConfig, from_mapping
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import Update
from jaxinfer.engine.request import Request
from jaxinfer.execution import kv_cache
from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.ragged import StepRows, ragged_batch
from jaxinfer.options import merge
from tests.support.tiny_checkpoints import write_checkpoint

PAGE_SIZE = 16


def load(source: str | Path, numerics: Numerics | None = None) -> tuple[FunctionalModel, Weights]:
    checkpoint = open_checkpoint(source)
    model = functional_model(checkpoint, numerics or Numerics())
    return model, load_weights(checkpoint, model)


@lru_cache(maxsize=4)
def tiny(variant: str, numerics: Numerics | None = None) -> tuple[FunctionalModel, Weights]:
    """The tiny checkpoint of that name, loaded through the real files."""
    with TemporaryDirectory() as folder:
        return load(write_checkpoint(variant, folder), numerics)


@partial(jax.jit, static_argnames=("model",))
def _all_logits(weights, token_ids, prompt_len, *, model):
    T = token_ids.shape[0]
    num_pages = T // PAGE_SIZE
    pages = kv_cache.allocate(
        model.config.cache, num_pages=num_pages, page_size=PAGE_SIZE, dtype=model.numerics.dtype
    )
    rows = StepRows(
        jnp.asarray([0, T], jnp.int32),
        kv_len=jnp.asarray([T], jnp.int32),
        page_table=jnp.arange(num_pages, dtype=jnp.int32)[None],
        write_from=jnp.zeros(1, jnp.int32),
        min_rope_len=prompt_len[None],
    )
    batch = ragged_batch(rows, T, page_size=PAGE_SIZE, num_pages=num_pages)
    decoder = model.merge(weights)
    hidden, _ = decoder(token_ids, batch, pages)
    return decoder.logits(hidden)


def all_logits(model: FunctionalModel, weights: Weights, token_ids: Sequence[int]) -> np.ndarray:
    """[T, V] logits after every token of one sequence, computed in one step.

    Tokens are appended up to a power of two, for fewer programs: they come later, so nothing asked
    for can see them.
    """
    T = len(token_ids)
    padded = np.zeros(max(64, 1 << (T - 1).bit_length()), np.int32)
    padded[:T] = token_ids
    return np.asarray(_all_logits(weights, padded, np.int32(T), model=model))[:T]


def engine(
    model: FunctionalModel, weights: Weights, options: Mapping[str, Any] | None = None, **named: Any
) -> Engine:
    """Make an engine with a small cache that checks its invariants after every step."""
    small = {
        "max_model_len": 96,
        "warm_up": False,
        "bucket_growth": 32,  # two programs an engine: compiling is what these tests wait for
        "check_every_step": True,
        "cache": {"page_size": 8, "num_pages": 64},
        "scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 8},
    }
    config: EngineConfig = from_mapping(merge(small, options or {}))
    return Engine(model, weights, config, **named)


def run(engine: Engine, max_steps: int = 5_000) -> list[Update]:
    """Step until nothing is left; all updates in order."""
    updates: list[Update] = []
    for _ in range(max_steps):
        if not engine.has_requests:
            return updates
        updates += engine.step()
    raise AssertionError(f"not done after {max_steps} steps")


def tokens_of(requests: Sequence[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]
