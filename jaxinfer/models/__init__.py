"""The registry of model families, by the name that a checkpoint states."""

from __future__ import annotations

from collections.abc import Mapping

from jaxinfer.models.bert import BERT
from jaxinfer.models.bloom import BLOOM
from jaxinfer.models.deepseek import DEEPSEEK
from jaxinfer.models.family import Family
from jaxinfer.models.gemma import GEMMA, GEMMA2, GEMMA3
from jaxinfer.models.gpt2 import GPT2
from jaxinfer.models.gpt_neox import GPT_NEOX
from jaxinfer.models.gpt_oss import GPT_OSS
from jaxinfer.models.granite import GRANITE
from jaxinfer.models.llama import LLAMA
from jaxinfer.models.mistral import MISTRAL, MISTRAL_WITH_IMAGES
from jaxinfer.models.mixtral import MIXTRAL
from jaxinfer.models.olmo import OLMO2, OLMO3
from jaxinfer.models.opt import OPT
from jaxinfer.models.phi import PHI3
from jaxinfer.models.qwen import QWEN2, QWEN3
from jaxinfer.models.qwen_moe import QWEN2_MOE, QWEN3_MOE
from jaxinfer.models.smollm import SMOLLM3

# config.json's model_type, and GGUF's general.architecture.
HF_FAMILIES: Mapping[str, Family] = {
    "bert": BERT,
    "bloom": BLOOM,
    "camembert": BERT,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "gpt_oss": GPT_OSS,
    "granite": GRANITE,
    "llama": LLAMA,
    "ministral": MISTRAL,
    "mistral": MISTRAL,
    "mistral3": MISTRAL_WITH_IMAGES,
    "mixtral": MIXTRAL,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "opt": OPT,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "roberta": BERT,
    "smollm3": SMOLLM3,
    "xlm-roberta": BERT,
}
GGUF_FAMILIES: Mapping[str, Family] = {
    "bert": BERT,
    "bloom": BLOOM,
    "deepseek2": DEEPSEEK,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gpt-oss": GPT_OSS,
    "gpt2": GPT2,
    "gptneox": GPT_NEOX,
    "granite": GRANITE,
    "llama": LLAMA,
    "olmo2": OLMO2,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen2moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3moe": QWEN3_MOE,
    "smollm3": SMOLLM3,
}

__all__ = ["GGUF_FAMILIES", "HF_FAMILIES", "Family"]
