"""Defaults and refusals of the dense families' configurations, and text models within others."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxinfer.loading.checkpoint import CheckpointError
from jaxinfer.models import GGUF_FAMILIES, HF_FAMILIES
from tests.support import running
from tests.support.families_dense import CASES
from tests.support.family_bench import make_tensors, recorded, write_huggingface


def gguf(architecture: str, layers: int, dim: int, heads: int, **more: Any) -> dict[str, Any]:
    """Return the key-values of a GGUF file."""
    values = {
        "vocab_size": 1000,
        "context_length": 8192,
        "embedding_length": dim,
        "feed_forward_length": 4 * dim,
        "block_count": layers,
        "attention.head_count": heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    return {f"{architecture}.{name}": value for name, value in values.items()}


def read_gguf(architecture: str, metadata: dict[str, Any]) -> Any:
    read = GGUF_FAMILIES[architecture].config_from_gguf
    assert read is not None
    return read(metadata, {})


@pytest.mark.parametrize(
    ("metadata", "scale"),
    [
        (gguf("gemma2", 46, 4608, 32, attention__key_length=128), 1 / 12),
        (gguf("gemma2", 42, 3584, 16, attention__key_length=256), None),
        (gguf("gemma3", 62, 5376, 32, attention__key_length=128), 168**-0.5),
    ],
)
def test_gemma_27b_gguf_scales_scores_by_its_width(metadata, scale):
    """The files do not state the scale."""
    architecture = next(iter(metadata)).partition(".")[0]
    assert read_gguf(architecture, metadata).attention_scale == scale


def test_missing_gguf_keys_take_the_published_values():
    gemma2 = read_gguf("gemma2", gguf("gemma2", 26, 2304, 8))
    assert [layer.window for layer in gemma2.layers] == [4096, None]
    assert (gemma2.attention_soft_cap, gemma2.logits_soft_cap) == (50.0, 30.0)
    gemma3 = read_gguf("gemma3", gguf("gemma3", 26, 1152, 4, attention__sliding_window=512))
    assert [layer.window for layer in gemma3.layers] == [512] * 5 + [None]
    assert gemma3.layers[0].rope.theta == 10_000.0
    smollm = read_gguf("smollm3", gguf("smollm3", 36, 2048, 16))
    assert [layer.rope is None for layer in smollm.layers] == [False, False, False, True]
    phi = read_gguf("phi3", gguf("phi3", 40, 5120, 40, attention__sliding_window=0))
    assert phi.layers[0].window is None


BASE = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mistral", "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2},
            "sliding_window is null",
        ),
        ({"model_type": "qwen2", "dual_chunk_attention_config": {}}, "dual_chunk_attention_config"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "1 entries for 2 layers"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (
            {"model_type": "gemma3", "text_config": {"final_logit_softcapping": 30.0}},
            "final_logit_softcapping",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}},
            "rope_parameters has",
        ),
        (
            {"model_type": "qwen3", "rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "differ by layer",
        ),
        ({"model_type": "mistral3", "text_config": {"model_type": "mamba"}}, "mamba"),
    ],
)
def test_unsupported_config_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        HF_FAMILIES[config["model_type"]].config_from_hf(BASE | config, {})


def test_text_model_of_a_mistral_with_images_is_a_mistral(tmp_path):
    """Both prefixes of transformers for the text model are read; image tensors are ignored."""
    case = CASES["mistral"]
    tensors = make_tensors(recorded("dense")["mistral"]["shapes"], case.seed)
    folder = write_huggingface(case, tensors, tmp_path / "plain")
    tokens = case.sequences()[1]
    expected = running.all_logits(*running.load(folder), tokens)
    wrapped = dataclasses.replace(
        case, config={"model_type": "mistral3", "text_config": case.config_json}
    )
    new = lambda name: name.replace("model.", "model.language_model.", 1)
    for number, rename in enumerate((lambda name: f"language_model.{name}", new)):
        renamed = {rename(name): values for name, values in tensors.items()}
        renamed["vision_tower.patch_conv.weight"] = np.zeros((2, 2), np.float32)
        folder = write_huggingface(wrapped, renamed, tmp_path / str(number))
        assert (running.all_logits(*running.load(folder), tokens) == expected).all()
    renamed["language_model.surplus"] = np.zeros(2, np.float32)
    folder = write_huggingface(wrapped, renamed, tmp_path / "surplus")
    with pytest.raises(CheckpointError, match=r"language_model\.surplus"):
        running.load(folder)


SIZES = {
    "vocab_size": 300_000,
    "hidden_size": 512,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
LATENT |= {"n_routed_experts": 16, "num_key_value_heads": 32}
MORE_SIZES: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 8, "n_head": 32},
    "deepseek_v2": EXPERTS | LATENT,
    "deepseek_v3": EXPERTS | LATENT,
    "gpt2": {"n_embd": 512, "n_layer": 8, "n_head": 32},
    "gpt_oss": EXPERTS | {"num_local_experts": 8},
    "mixtral": EXPERTS | {"num_local_experts": 8},
    "opt": {"word_embed_proj_dim": 512},
    "qwen2_moe": {"num_experts": 8, **EXPERTS, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24},  # 8 experts per token by default
}
WRAPPED = {"gemma3", "mistral3"}


@pytest.mark.parity
@pytest.mark.parametrize("model_type", sorted(HF_FAMILIES.keys() - WRAPPED))
def test_config_of_sizes_alone_takes_the_reference_defaults(model_type):
    """The longer config.json that transformers writes for the same model is read alike."""
    auto = pytest.importorskip(
        "transformers.models.auto.configuration_auto", reason="transformers is not installed"
    )
    sizes = SIZES | MORE_SIZES.get(model_type, {})
    if model_type in ("bloom", "gpt2"):  # they have other keys
        sizes = {k: v for k, v in sizes.items() if not k.startswith(("num_", "intermediate"))}
    read = HF_FAMILIES[model_type].config_from_hf
    in_full = auto.CONFIG_MAPPING[model_type](**sizes).to_dict()
    assert len(in_full) > len(sizes) + 10
    assert read({"model_type": model_type} | sizes, {}) == read(in_full, {})
