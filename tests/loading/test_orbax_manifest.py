"""A damaged manifest of a converted checkpoint is refused before its arrays are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.loading import CheckpointError, open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.orbax import write_converted
from jaxinfer.nn.layers import Numerics
from tests.support.tiny_checkpoints import write_checkpoint

PATH = "blocks.0.mlp.down.weight"


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    checkpoint = open_checkpoint(write_checkpoint("mqa", folder / "source"))
    model = functional_model(checkpoint, Numerics())
    write_converted(checkpoint, model, load_weights(checkpoint, model), folder / "output")
    return folder / "output"


def as_quantized(**changes: Any) -> dict[str, Any]:
    """Make the manifest entry of `PATH` [48, 32] as int8, with `changes` to its fields."""
    array = lambda dtype, *shape: {"dtype": dtype, "shape": list(shape)}
    fields = {
        "values": array("int8", 48, 32),
        "scales": array("float32", 1, 32),
        "zeros": None,
        "bits": 8,
        "group_size": 48,
        "pack_rows": 0,
    }
    return {"class": "QuantArray", "fields": fields | changes}


DAMAGED_ENTRIES = {
    "a string": ("float32", "not a parameter"),
    "a list of fields": ({"class": "QuantArray", "fields": [1]}, "AttributeError"),
    "an unknown class": ({"class": "int", "fields": {}}, "KeyError"),
    "no values": (as_quantized(values=None), "AttributeError"),
    "another shape": (
        as_quantized(
            values={"dtype": "int8", "shape": [48, 16]},
            scales={"dtype": "float32", "shape": [1, 16]},
        ),
        "has shape [48, 16]; expected [48, 32]",
    ),
    "scales that do not fit": (as_quantized(group_size=24), "scales have shape"),
    "scales of whole numbers": (as_quantized(scales={"dtype": "int8", "shape": [1, 32]}), "int8"),
    "whole numbers": ({"dtype": "int32", "shape": [48, 32]}, "it is int32"),
    "another number of bits": (as_quantized(bits=6), "values of 6 bits are"),
    "an order of another length": (
        {
            "class": "QuantWeight",
            "fields": {"weight": as_quantized(), "order": {"dtype": "int32", "shape": [7]}},
        },
        "order is int32 (7,)",
    ),
}


@pytest.mark.parametrize("name", DAMAGED_ENTRIES)
def test_damaged_manifest_entry_is_refused_by_name(name, converted):
    entry, message = DAMAGED_ENTRIES[name]
    manifest = json.loads((converted / "jaxinfer.json").read_text())
    assert manifest["parameters"][PATH]["shape"] == [48, 32]
    damaged = manifest | {"parameters": manifest["parameters"] | {PATH: entry}}
    (converted / "jaxinfer.json").write_text(json.dumps(damaged))
    checkpoint = open_checkpoint(converted)
    with pytest.raises(CheckpointError) as caught:
        load_weights(checkpoint, functional_model(checkpoint, Numerics()))
    (converted / "jaxinfer.json").write_text(json.dumps(manifest))
    for part in (PATH, message, "jaxinfer convert"):
        assert part in str(caught.value)
