"""The config.json of published GPT-like models: their variants and numbers of parameters."""

import time

import pytest

from jaxinfer.models import HF_FAMILIES
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.models.gpt import GptConfig
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.rope import LinearScaling, Rope


def gpt2(n_layer: int, n_embd: int, n_head: int, **changes) -> dict:
    return {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": n_embd,
        "n_head": n_head,
        "n_layer": n_layer,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    } | changes


def pythia(num_layers: int, hidden_size: int, num_heads: int, vocab_size: int) -> dict:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": 4 * hidden_size,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": vocab_size,
    }


def opt(num_layers: int, hidden_size: int, num_heads: int, **changes) -> dict:
    return {
        "activation_dropout": 0.0,
        "activation_function": "relu",
        "architectures": ["OPTForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "do_layer_norm_before": True,
        "dropout": 0.1,
        "eos_token_id": 2,
        "ffn_dim": 4 * hidden_size,
        "hidden_size": hidden_size,
        "init_std": 0.02,
        "layerdrop": 0.0,
        "max_position_embeddings": 2048,
        "model_type": "opt",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "pad_token_id": 1,
        "prefix": "</s>",
        "vocab_size": 50272,
        "word_embed_proj_dim": hidden_size,
    } | changes


GPT_NEOX_20B = pythia(44, 6144, 64, 50432) | {
    "attention_probs_dropout_prob": 0,
    "hidden_act": "gelu_fast",
    "hidden_dropout_prob": 0,
}
del GPT_NEOX_20B["use_parallel_residual"]
BLOOM_560M = {
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["BloomForCausalLM"],
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "model_type": "bloom",
    "n_embed": 1024,
    "n_inner": None,
    "n_layer": 24,
    "num_attention_heads": 16,
    "offset_alibi": 100,
    "pad_token_id": 3,
    "pretraining_tp": 1,
    "seq_length": 2048,
    "skip_bias_add": True,
    "slow_but_exact": False,
    "vocab_size": 250880,
}
BLOOM_176B = {key: v for key, v in BLOOM_560M.items() if key not in ("n_embed", "seq_length")} | {
    "hidden_size": 14336,
    "n_layer": 70,
    "num_attention_heads": 112,
    "pretraining_tp": 4,
}
# The sizes in table 2.1 of arXiv:2005.14165, with GPT-2's vocabulary.
GPT3_175B = gpt2(96, 12288, 96, n_positions=2048, n_ctx=2048)

PUBLISHED = {
    "gpt2": (gpt2(12, 768, 12), 124_439_808),
    "gpt2-xl": (gpt2(48, 1600, 25), 1_557_611_200),
    "pythia-160m": (pythia(12, 768, 12, 50304), 162_322_944),
    "pythia-12b": (pythia(36, 5120, 40, 50688), 11_846_072_320),
    "gpt-neox-20b": (GPT_NEOX_20B, 20_554_567_680),
    "bloom-560m": (BLOOM_560M, 559_214_592),
    "bloom": (BLOOM_176B, 176_247_271_424),
    "opt-125m": (opt(12, 768, 12), 125_239_296),
    "opt-6.7b": (opt(32, 4096, 32), 6_658_473_984),
}


def read(config: dict) -> GptConfig:
    return HF_FAMILIES[config["model_type"]].config_from_hf(config, {})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_has_the_stated_number_of_parameters(name):
    config, num_parameters = PUBLISHED[name]
    model = FunctionalModel(HF_FAMILIES[config["model_type"]], read(config), Numerics())
    assert model.num_parameters == num_parameters


def test_gpt3_is_built_abstractly_in_seconds():
    started = time.process_time()
    model = FunctionalModel(HF_FAMILIES["gpt2"], read(GPT3_175B), Numerics())
    assert 174e9 < model.num_parameters < 176e9
    assert len(model.parameters) == 4 + 96 * 16
    assert time.process_time() - started < 20  # 2 s on an idle machine


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            gpt2(12, 768, 12),
            GptConfig(50257, 12, 768, 12, 3072, 1024, has_position_table=True),
        ),
        (
            GPT_NEOX_20B,
            GptConfig(
                50432,
                44,
                6144,
                64,
                24576,
                2048,
                residual="parallel",
                rope=Rope(10_000.0, 24),
                is_tied=False,
            ),
        ),
        (
            BLOOM_176B,
            GptConfig(250880, 70, 14336, 112, 57344, 2048, has_alibi=True, has_embedding_norm=True),
        ),
        (
            opt(12, 768, 12),
            GptConfig(
                50272,
                12,
                768,
                12,
                3072,
                2048,
                activation="relu",
                has_position_table=True,
                first_position=2,
            ),
        ),
    ],
    ids=["gpt2", "gpt-neox-20b", "bloom", "opt-125m"],
)
def test_published_config_is_read_with_its_variants(config, expected):
    assert read(config) == expected


def test_both_generations_of_rope_keys_are_read_alike():
    old = pythia(12, 768, 12, 50304) | {"rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {key: v for key, v in old.items() if key not in ("rope_scaling", "rotary_pct")}
    new["rope_parameters"] = {
        "rope_type": "linear",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    }
    assert read(old).rope == read(new).rope == Rope(10_000.0, 16, LinearScaling(4.0))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (gpt2(2, 32, 4, add_cross_attention=True), "add_cross_attention"),
        (gpt2(2, 32, 4, activation_function="quick_gelu"), "activation_function is 'quick_gelu'"),
        (gpt2(2, 30, 4), "model_dim 30 is not a multiple of 4 heads"),
        (gpt2(2, 32, 4, n_positions=0), "n_positions"),
        (gpt2(2, 32, 4, layer_norm_epsilon=0.0), "layer_norm_epsilon is 0"),
        (pythia(2, 24, 4, 100), "rope.dim is 1"),
        (BLOOM_560M | {"slow_but_exact": True}, "slow_but_exact"),
        (BLOOM_560M | {"n_inner": 1024}, "n_inner"),
        (opt(24, 1024, 16, do_layer_norm_before=False), "do_layer_norm_before"),
        (opt(24, 1024, 16, word_embed_proj_dim=512), "word_embed_proj_dim"),
        (opt(24, 1024, 16, enable_bias=False), "enable_bias"),
    ],
)
def test_unsupported_config_is_refused_by_name(config, named):
    with pytest.raises(ValueError, match=named):
        read(config)
