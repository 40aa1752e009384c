"""Tiny quantized models, loaded once for all tests of a file, and quantization of any weights."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.quantize import can_quantize, get_recipe, quantize_parameter
from jaxinfer.loading.splitting import place_whole
from jaxinfer.loading.targets import LoadTarget
from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.nn.layers import Numerics
from tests.support.quantized_checkpoints import TINY, write_quantized
from tests.support.tiny_checkpoints import token_sequences, write_checkpoint

IDS = token_sequences(TINY)[1]


def relative(out: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


@cache
def tiny_model(numerics: Numerics | None = None) -> FunctionalModel:
    """Return one model for all quantizations, so that shared programs are compiled once."""
    with TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(write_checkpoint(TINY, folder))
        return functional_model(checkpoint, numerics or Numerics())


@cache
def tiny_weights(name: str) -> tuple[Weights, Weights, Weights]:
    """Load a quantized checkpoint packed and dequantized, and its unquantized counterpart."""
    with TemporaryDirectory() as folder:
        quantized, plain = map(open_checkpoint, write_quantized(name, Path(folder)))
        model = tiny_model()
        return (
            load_weights(quantized, model, keep_packed=True),
            load_weights(quantized, model),
            load_weights(plain, model),
        )


def quantize_weights(
    model: FunctionalModel, weights: Weights, kind: str, *, with_embedding: bool = False
) -> Weights:
    """Quantize weights as `load_weights` does, and the embedding too if `with_embedding`.

    GGUF files have quantized embeddings, whose matmul takes unquantized activations.
    """
    recipe = get_recipe(kind)
    table_recipe = dataclasses.replace(recipe, activation_dtype=None)
    results = []
    for spec, weight in zip(model.parameters, weights, strict=True):
        array = np.asarray(weight)
        if can_quantize(spec, recipe):
            weight = quantize_parameter(spec, array, recipe)
        elif spec.packs == "table" and with_embedding:
            weight = quantize_parameter(spec, array.T, table_recipe)
        results.append(place_whole(LoadTarget(spec, (spec,)), lambda _, weight=weight: weight))
    return tuple(results)
