"""Compile the layers of a published model for a target, to see that every kernel takes its shapes.

The program is the part of a step that a family decides: embedding, layers, head. Sampling is the
same for all families, and the presets' steps contain it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.execution import kv_cache
from jaxinfer.execution.compile import compiler_options
from jaxinfer.models import HF_FAMILIES
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.ragged import StepRows, ragged_batch
from jaxinfer.tools.compile_gate.target import Chip
from jaxinfer.tools.compile_gate.text import launches, parse_hlo

# A batch of decoding rows and part of a prompt.
NUM_TOKENS, NUM_ROWS = 64, 16
PAGE_SIZE, NUM_PAGES, TABLE_WIDTH = 64, 64, 16


@partial(jax.jit, static_argnames=("model",), donate_argnames=("pages",))
def forward(weights, pages, token_ids, q_start, kv_len, page_table, *, model):
    """Return the logits of the rows' last tokens, and the pages."""
    rows = StepRows(q_start, kv_len, page_table, jnp.zeros_like(kv_len), min_rope_len=kv_len)
    batch = ragged_batch(rows, NUM_TOKENS, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    decoder = model.merge(weights)
    hidden, pages = decoder(token_ids, batch, pages)
    return decoder.logits(hidden[jnp.maximum(q_start[1:] - 1, 0)]), pages


def check_structure(chip: Chip, structure: Mapping[str, Any]) -> dict[str, Any]:
    """Compile one small step of an entry of `[structures]` in the matrix."""
    config = {key: value for key, value in structure.items() if key != "like"}
    family = HF_FAMILIES[config["model_type"]]
    numerics = Numerics(np.dtype(jnp.bfloat16))
    model = FunctionalModel(family, family.config_from_hf(config, {}), numerics)
    with chip.in_use():
        pages = jax.eval_shape(
            lambda: kv_cache.allocate(
                model.config.cache, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=numerics.dtype
            )
        )
    weights = tuple(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in model.parameters)
    shapes = ((NUM_TOKENS,), (NUM_ROWS + 1,), (NUM_ROWS,), (NUM_ROWS, TABLE_WIDTH))
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    arguments = chip.abstract((weights, pages, *integers))
    compiled = chip.compile(forward, *arguments, options=compiler_options, model=model)
    return {
        "seconds": compiled.seconds,
        "cpu_seconds": compiled.cpu_seconds,
        "num_layers": model.config.num_layers,
        "temporaries": compiled.memory()["temporaries"],
        "launches": dataclasses.asdict(launches(parse_hlo(compiled.text))),
    }
