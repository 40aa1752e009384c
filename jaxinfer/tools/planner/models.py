"""Find models by name: the compile gate's matrix, directories, config.json files, hub ids."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.loading import DEMO, Checkpoint, CheckpointError, open_checkpoint
from jaxinfer.loading.assign import functional_model
from jaxinfer.loading.checkpoint import MANIFEST_FILE, read_json_object
from jaxinfer.loading.manifest import check_parameters
from jaxinfer.loading.quantized.scheme import merge_quantized_layers
from jaxinfer.models import HF_FAMILIES
from jaxinfer.models.family import Family
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.quantized import Quantized, QuantPair, QuantWeight

# A GGUF file with at most so many bytes a weight is nearer to int4's 0.53 than to int8's 1.0.
MAX_INT4_BYTES = 0.8


class StoredForm(NamedTuple):
    """How a checkpoint's matrices are quantized: the name of its method, and the engine's recipe of
    about the same size; or `refusal`, why the engine does not read them and what to do."""

    method: str
    recipe: str | None
    refusal: str = ""


class NamedModel(NamedTuple):
    """A model's name, family and configuration, which is all that a plan needs; `stored` is set for
    a quantized checkpoint."""

    name: str
    family: Family
    config: Any
    stored: StoredForm | None = None

    def with_layers(self, per_stage: int, num_stages: int = 1) -> NamedModel:
        """The same model cut to the last `per_stage` layers of each stage. Layers that differ are
        the first ones: DeepSeek-V3's first three have no experts."""
        whole = self.config.num_layers // num_stages
        kept_of_each = range(whole - min(per_stage, whole), whole)
        kept = [stage * whole + i for stage in range(num_stages) for i in kept_of_each]
        changes: dict[str, Any] = {"num_layers": len(kept)}
        if hasattr(self.config, "layers"):
            changes["layers"] = tuple(self.config.layer(i) for i in kept)
        return self._replace(config=dataclasses.replace(self.config, **changes))


def model_from_table(name: str, table: Mapping[str, Any]) -> NamedModel:
    """Build a model of the matrix from the keys of its config.json that change shapes or
    arithmetic."""
    keys = {key: value for key, value in table.items() if key != "like"}
    family = HF_FAMILIES[keys["model_type"]]
    return NamedModel(name, family, family.config_from_hf(keys, {}))


def find_model(name: str, tables: Mapping[str, Mapping[str, Any]]) -> NamedModel:
    """Find a model among `tables`, or read a checkpoint's configuration: a directory (config.json
    suffices), a config.json, a .gguf file, a hub id, or "demo".

    Raises `ValueError`, which lists the known names.
    """
    if name in tables:
        return model_from_table(name, tables[name])
    if name != DEMO and not Path(name).exists() and "/" not in name:
        raise ValueError(
            f"no model {name!r}; there are {', '.join(tables)}, {DEMO}; or give a Hugging Face "
            "directory, a config.json, a .gguf file or a hub id (organisation/name)"
        )
    try:
        checkpoint = open_checkpoint(name, needs_weights=False)
        model = functional_model(checkpoint, Numerics())
        stored = stored_form(checkpoint, model)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    if not hasattr(model.config, "cache"):
        raise ValueError(
            f"{name} is an encoder ({model.family.name}): plans are of models that generate"
        )
    return NamedModel(name, model.family, model.config, stored)


def stored_form(checkpoint: Checkpoint, model: FunctionalModel) -> StoredForm | None:
    """Read how a checkpoint is quantized: from the parameters of a converted checkpoint, the
    tensors of a .gguf file, or config.json's `quantization_config`. None: its weights are plain
    numbers."""
    if checkpoint.restore is not None:
        return _converted(checkpoint, model)
    if checkpoint.format == "gguf":
        packed = [tensor for tensor in checkpoint.tensors.values() if tensor.is_packable]
        if not packed:
            return None
        num_weights = sum(math.prod(tensor.shape) for tensor in packed)
        is_int4 = sum(tensor.nbytes for tensor in packed) <= MAX_INT4_BYTES * num_weights
        return StoredForm("gguf", "int4" if is_int4 else "int8")
    config = checkpoint.metadata.get("quantization_config")
    if not config:  # as the engine reads it
        return None
    problems: list[str] = []
    merge_quantized_layers(checkpoint.path, {}, config, problems)
    if problems:
        return StoredForm("unread", None, "; ".join(problems))
    match config:
        case {"quant_method": ("awq" | "gptq") as method}:
            bits = config.get("bits", config.get("w_bit", 4))
            return StoredForm(method, "int4" if bits == 4 else "int8")
        case {"quant_method": "mxfp4"}:  # multiplied as int8
            return StoredForm("mxfp4", "int8")
        case {"quant_method": "fp8"}:
            return StoredForm("fp8", "float8")
        case {"quant_method": "compressed-tensors", "config_groups": {**groups}}:
            return StoredForm("compressed-tensors", _recipe_of(next(iter(groups.values()))))
    method = config["quant_method"]
    return StoredForm(method, None, f"plans do not know how many bytes weights of {method} take")


def _converted(checkpoint: Checkpoint, model: FunctionalModel) -> StoredForm | None:
    """Read a converted checkpoint's quantization from its manifest; the recipe is that of most
    weights. The original may have been quantized otherwise."""
    manifest = checkpoint.path / MANIFEST_FILE
    num_weights, quantize_activations = Counter[str](), set[str]()
    for spec, entry in check_parameters(manifest, read_json_object(manifest)["parameters"], model):
        if not isinstance(entry, Quantized):
            continue
        weight = entry.gate if isinstance(entry, QuantPair) else entry
        is_w8a8 = False
        if isinstance(weight, QuantWeight):
            is_w8a8, weight = weight.activation_dtype is not None, weight.weight
        kind = "int4" if weight.bits == 4 else "float8" if weight.is_float else "int8"
        num_weights[kind] += math.prod(spec.shape)
        if is_w8a8 and weight.bits == 8:
            quantize_activations.add(kind)
    if not num_weights:
        return None
    [(recipe, _)] = num_weights.most_common(1)
    return StoredForm("converted", f"{recipe}_w8a8" if recipe in quantize_activations else recipe)


def _recipe_of(group: Mapping[str, Any]) -> str:
    """The recipe of a group of compressed-tensors; the first group covers most layers."""
    weights = group.get("weights") or {}
    if weights.get("num_bits") == 4:
        return "int4"
    kind = "float8" if weights.get("type") == "float" else "int8"
    return f"{kind}_w8a8" if group.get("input_activations") else kind
