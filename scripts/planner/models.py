"""Models by name: those of the compile gate's matrix, directories, config.json files, hub ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.loading import CheckpointError, open_checkpoint
from jaxinfer.loading.assign import functional_model
from jaxinfer.models import HF_FAMILIES
from jaxinfer.models.family import Family
from jaxinfer.nn.layers import Numerics


class Named(NamedTuple):
    """A model's family and its configuration, which is all that a plan needs."""

    name: str
    family: Family
    config: Any

    def with_layers(self, per_stage: int, num_stages: int = 1) -> Named:
        """The same model, of each stage's last so many layers: where layers differ they do at the
        start, as DeepSeek-V3's first three, which have no experts."""
        whole = self.config.num_layers // num_stages
        kept_of_each = range(whole - min(per_stage, whole), whole)
        kept = [stage * whole + i for stage in range(num_stages) for i in kept_of_each]
        changes: dict[str, Any] = {"num_layers": len(kept)}
        if hasattr(self.config, "layers"):
            changes["layers"] = tuple(self.config.layer(i) for i in kept)
        return self._replace(config=dataclasses.replace(self.config, **changes))


def from_table(name: str, table: Mapping[str, Any]) -> Named:
    """A model of the matrix: the keys of its config.json that change shapes or arithmetic."""
    keys = {key: value for key, value in table.items() if key != "like"}
    family = HF_FAMILIES[keys["model_type"]]
    return Named(name, family, family.config_from_hf(keys, {}))


def find_model(name: str, tables: Mapping[str, Mapping[str, Any]]) -> Named:
    """The model of that name among `tables`, or of a checkpoint: a directory (a config.json will
    do), a config.json, a .gguf file, a hub id. `ValueError` says what there is."""
    if name in tables:
        return from_table(name, tables[name])
    if not Path(name).exists() and "/" not in name:
        raise ValueError(
            f"no model {name!r}; there are {', '.join(tables)}, or give a Hugging Face directory, "
            "a config.json, a .gguf file or a hub id (organisation/name)"
        )
    try:
        model = functional_model(open_checkpoint(name, needs_weights=False), Numerics())
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    return Named(name, model.family, model.config)
