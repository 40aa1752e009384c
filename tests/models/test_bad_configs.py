"""Invalid configurations are refused by key and value, before weights or layers are built."""

from typing import Any

import jaxtyping
import numpy as np
import pytest

from jaxinfer.models import GGUF_FAMILIES, HF_FAMILIES
from jaxinfer.models.experts import GGUF_EXPERTS_ROWS
from jaxinfer.models.family import WeightTable
from jaxinfer.models.gguf_config import WATCHED_PREFIXES
from jaxinfer.models.gpt import GptConfig
from jaxinfer.nn.experts import RouterConfig
from jaxinfer.nn.rope import Rope, Yarn
from tests.support import families_encoders
from tests.support.family_groups import GROUPS


@pytest.fixture(scope="module", autouse=True)
def no_type_checks():
    """Turn off the shape checks that the tests add to the package, which would raise instead."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


CASES = {name: case for group in GROUPS.values() for name, case in group.items()}
CASES |= families_encoders.CASES
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"num_hidden_layers": 10**11}, "100,000,000,000 layers"),
    ("llama", {"rope_parameters": ["x"]}, "rope_parameters is .*, a list; it must be an object"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear', a str"),
    ("llama", {"rope_scaling": 5}, "rope_scaling is 5, a int"),
    ("llama", {"rope_theta": "1e4"}, "rope_theta is '1e4'"),
    ("llama", {"head_dim": "8"}, "head_dim is '8'"),
    ("llama", {"head_dim": 0}, "head_dim is 0"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps is None"),
    ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
    ("llama", {"rope_scaling": YARN | {"truncate": "no"}}, "truncate is 'no'; it must be true"),
    ("llama", {"rope_scaling": YARN | {"factor": 0}}, r"factor is 0\.0"),
    ("llama", {"rope_scaling": YARN | {"beta_fast": 0}}, r"beta_fast is 0\.0"),
    (
        "llama",
        {"rope_scaling": YARN | {"original_max_position_embeddings": 0}},
        "original_max_position_embeddings is 0",
    ),
    ("mistral3", {"text_config": "x"}, "text_config is 'x', a str"),
    ("mistral", {"layer_types": 5}, "layer_types is 5, a int; it must be a list"),
    ("mistral", {"layer_types": ["full_attention"]}, "^layer_types has 1 entries for 2 layers$"),
    ("gemma3", {"text_config": [1]}, r"text_config is \[1\], a list"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    ("gemma3_text", {"rope_parameters": {"full_attention": 5}}, "full_attention is 5, a int"),
    ("gemma3_text", {"rope_local_base_freq": 0}, "rope_local_base_freq is 0"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    ("gemma2", {"attn_logit_softcapping": 0.0}, r"attention_soft_cap is 0\.0"),
    ("gemma2", {"final_logit_softcapping": float("inf")}, "logits_soft_cap is inf"),
    ("phi3", {"rope_scaling": ["x"]}, "rope_scaling is .*, a list"),
    ("phi3", {"rope_parameters": {"type": "longrope"}}, "needs 'short_factor'"),
    ("olmo3", {"rope_theta": 0}, "rope_theta is 0"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
    ("smollm3", {"no_rope_layers": ["x", "y"]}, "no_rope_layers contains 'x'"),
    ("granite", {"logits_scaling": 0}, "logits_scaling is 0"),
    ("granite", {"attention_multiplier": None}, "attention_multiplier is None"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers is 'x'"),
    ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ("qwen2_moe", {"mlp_only_layers": "01"}, "mlp_only_layers is '01'"),
    ("mixtral", {"num_local_experts": 10**9}, "num_experts is 1,000,000,000"),
    ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit is None"),
    ("deepseek_v3", {"n_shared_experts": "x"}, "n_shared_experts is 'x'"),
    ("deepseek_v3", {"rope_scaling": ["x"]}, "rope_scaling is .*, a list"),
    ("gpt2", {"layer_norm_epsilon": "x"}, "layer_norm_epsilon is 'x'"),
    ("bert", {"layer_norm_eps": None}, "layer_norm_eps is None"),
]


def config_of_type(model_type: str) -> dict[str, Any]:
    """Return the config.json of a case of this model type, or Llama's with its name."""
    configs = (case.config_json for case in CASES.values())
    found = next((c for c in configs if c["model_type"] == model_type), None)
    config = found or CASES["llama"].config_json | {"model_type": model_type}
    return {key: value for key, value in config.items() if key not in ("rope_scaling",)}


@pytest.mark.parametrize(("model_type", "changes", "message"), BAD)
def test_unsupported_config_value_is_refused_by_key_and_value(model_type, changes, message):
    with pytest.raises(ValueError, match=message):
        HF_FAMILIES[model_type].config_from_hf(config_of_type(model_type) | changes, {})


def gguf_of(name: str) -> tuple[str, dict[str, Any]]:
    form = CASES[name].gguf
    assert form is not None
    return form.architecture, {f"{form.architecture}.{k}": v for k, v in form.metadata.items()}


class Tensor:
    shape = (160, 32)

    def read(self) -> np.ndarray:
        return np.ones(4)


TENSORS: dict[str, Any] = {"token_embd.weight": Tensor(), "position_embd.weight": Tensor()}


def read_gguf(name: str, changes: dict[str, Any], tensors: dict[str, Any] | None = None) -> Any:
    architecture, metadata = gguf_of(name)
    changed = metadata | {f"{architecture}.{key}": value for key, value in changes.items()}
    changed = {key: value for key, value in changed.items() if value is not None}
    read = GGUF_FAMILIES[architecture].config_from_gguf
    assert read is not None
    return read(changed, TENSORS | (tensors or {}))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"block_count": 10**11}, r"llama\.block_count states 100,000,000,000 layers"),
        ("llama", {"block_count": 0}, r"llama\.block_count is 0; it .* at least 1"),
        ("llama", {"attention.key_length": "8"}, r"llama\.attention\.key_length is '8'"),
        ("llama", {"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
        ("llama", {"rope.freq_base": 0.0}, r"llama\.rope\.freq_base is 0\.0"),
        ("qwen2", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ("llama", {"rope.scaling.yarn_attn_factor": 1.2}, "yarn_attn_factor is 1.2, but RoPE"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, r"attention_soft_cap is 0\.0"),
        ("deepseek_v3", {"leading_dense_block_count": -1}, "leading_dense_block_count is -1"),
        ("deepseek_v3", {"expert_gating_func": [2]}, r"expert_gating_func is \[2\]"),
        ("gpt2", {"attention.layer_norm_epsilon": "x"}, "layer_norm_epsilon is 'x'"),
        *[("llama", {f"{part}x": 1}, rf"sets llama\.{part}x") for part in WATCHED_PREFIXES],
    ],
)
def test_unsupported_gguf_key_is_refused_by_name(name, changes, message):
    with pytest.raises(ValueError, match=message.replace("..", ".")):
        read_gguf(name, changes)


JUNK: list[Any] = [None, "x", "1e4", -1, 0, 5, 0.5, True, [], ["x"], [1], [[]], {}, {"a": {}}]
JUNK += [10**11, float("nan"), float("inf")]


def paths(config: dict[str, Any], before: tuple[str, ...] = ()):
    for key, value in config.items():
        if key != "model_type":
            yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = path
    return config | {first: changed(config[first], tuple(rest), value) if rest else value}


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_any_value_of_any_key_is_read_or_raises_value_error(name):
    """The readers accept any value under each key of the case, or raise `ValueError`."""
    config = CASES[name].config_json
    read = HF_FAMILIES[config["model_type"]].config_from_hf
    for path in paths(config):
        for value in JUNK:
            try:
                read(changed(config, path, value), {})
            except ValueError as error:
                assert "could not convert" not in str(error)
    if (form := CASES[name].gguf) is not None:
        for key in form.metadata:
            for value in JUNK:
                try:
                    read_gguf(name, {key: value})
                except ValueError as error:
                    assert "could not convert" not in str(error)


def test_gguf_scale_of_zero_means_no_scale():
    names = ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")
    config = read_gguf("granite", dict.fromkeys(names, 0.0))
    assert (config.embedding_scale, config.residual_scale, config.logits_scale) == (1, 1, 1)
    assert config.attention_scale is None


@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor"])
def test_olmo3_temperature_is_read_from_either_key(key):
    """0.1 ln 8 + 1 is the default temperature; a file that states it does not apply it twice."""
    form = {"rope.scaling.factor": 8.0, "rope.scaling.attn_factor": None}
    config = read_gguf("olmo3", form | {f"rope.scaling.{key}": 1.2079441541679836})
    assert config.layers[-1].rope.scaling.attention_factor == 1.2079441541679836


def test_yarn_temperature_is_read_from_gguf_keys():
    factor = lambda **keys: (
        read_gguf("qwen2", {f"rope.scaling.{key}": value for key, value in keys.items()})
        .layers[0]
        .rope.scaling.attention_factor
    )
    usual = 0.1 * np.log(4) + 1
    assert factor() == factor(yarn_ext_factor=1.0) == usual
    assert factor(attn_factor=0.5) == 0.5 * usual
    assert factor(yarn_attn_factor=1.5) == 1.5


def test_biases_are_found_in_any_block():
    assert read_gguf("qwen2", {}, {"blk.1.attn_q.bias": Tensor()}).qkv_bias
    assert not read_gguf("qwen2", {}, {"blk.1.attn_q.biases": Tensor()}).qkv_bias


def test_neox_20b_has_the_tanh_gelu():
    """A GGUF file does not state the activation; config.json does ("gelu_fast")."""
    sizes = {"block_count": 44, "embedding_length": 6144, "attention.head_count": 64}
    assert read_gguf("gpt_neox", sizes).activation == "gelu_pytorch_tanh"
    assert read_gguf("gpt_neox", {}).activation == "gelu"


def test_expert_names_are_listed_only_if_the_first_exists():
    """A config may claim any number of experts."""
    table = WeightTable(GGUF_EXPERTS_ROWS)
    stored, _ = table.lookup("blocks.0.mlp.gate", (10**12, 8, 8), {"blk.0.ffn_gate_exps.weight"})
    assert stored == "blk.0.ffn_gate_exps.weight"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GptConfig("x", 1, 8, 2, 8, 8), "vocab_size is 'x'; it .* at least 1"),  # type: ignore[arg-type]
        (lambda: GptConfig(8, 1, 8, 2, 8, 8, first_position=-1), "first_position is -1.*least 0"),
        (lambda: GptConfig(8, 1, 8, 2, 8, 8, norm_eps=None), "norm_eps is None"),  # type: ignore[arg-type]
        (lambda: RouterConfig(10**9, 2), "num_experts is 1,000,000,000"),
        (lambda: RouterConfig(8, 2, scale=float("nan")), "scale is nan"),
        (lambda: Rope(1e4, 8, Yarn(True, 32)), "factor is True"),
    ],
)
def test_invalid_model_config_is_refused_with_its_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()
