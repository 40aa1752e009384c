"""The registry of model families: one row each, found by the name a checkpoint gives itself."""

from __future__ import annotations

from collections.abc import Mapping

from jaxinfer.models.family import Family
from jaxinfer.models.llama import LLAMA

# config.json's model_type, and GGUF's general.architecture.
HF_FAMILIES: Mapping[str, Family] = {"llama": LLAMA}
GGUF_FAMILIES: Mapping[str, Family] = {"llama": LLAMA}

__all__ = ["GGUF_FAMILIES", "HF_FAMILIES", "Family"]
