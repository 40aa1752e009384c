"""Tiny random Llama checkpoints in the Hugging Face layout, made offline from a seed.

A checkpoint is a folder with `config.json`, `generation_config.json`, safetensors,
`tokenizer.json` and `tokenizer_config.json`, about 150 kB in all. Its bytes are the same on every
machine and with every version of NumPy: weights are computed from raw PCG64 words (a stream that
NumPy guarantees) with exact float32 arithmetic, and the safetensors file is written here. So logits
recorded by `tests/references/make_references.py` stay valid on machines without PyTorch;
`weights_sha256` checks that.

The forward pass of Llama is in `reference_llama.py`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
MERGES = ("t h", "th e", "i n", "a n", "e r", "o n", "Ġ the", "r e", "Ġ a", "in g", "an d", "Ġ and")
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256 + len(MERGES)
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@dataclass(frozen=True)
class TinyLlama:
    """A checkpoint: its sizes, its storage, and its rotary keys in `config.json`.

    `rope` is merged into `config.json`, so that both forms in use are covered: the old
    `rope_theta` with `rope_scaling`, and the new `rope_parameters`. A `head_dim` or `num_kv_heads`
    of None leaves the key out, as the oldest configs do. `sequence_lens` are the lengths of the
    token sequences whose logits are recorded.
    """

    num_heads: int = 4
    num_kv_heads: int | None = 2
    head_dim: int | None = None
    hidden_size: int = 32
    intermediate_size: int = 48
    num_layers: int = 2
    max_positions: int = 128
    rms_norm_eps: float = 1e-5
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"
    num_shards: int = 1
    seed: int = 0
    sequence_lens: tuple[int, ...] = (20, 50)
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_theta": 10000.0})

    @property
    def head_size(self) -> int:
        """Head dimension H, stated or derived."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of KV heads K, stated or equal to the query heads."""
        return self.num_kv_heads or self.num_heads


def _old(kind: str, theta: float = 10000.0, **scaling: Any) -> dict[str, Any]:
    """Return the rotary keys as written before transformers 5: `rope_theta` and `rope_scaling`."""
    return {"rope_theta": theta, "rope_scaling": {"type": kind, **scaling}}


def _new(kind: str, theta: float = 10000.0, **scaling: Any) -> dict[str, Any]:
    """Return the rotary keys as transformers 5 writes them: all in `rope_parameters`."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **scaling}}


def _wide(rope: dict[str, Any], lens: tuple[int, ...] = (24, 64), max_positions: int = 128):
    """Return a checkpoint with H = 16: a scaling treats its eight frequencies differently."""
    return TinyLlama(
        num_heads=2, num_kv_heads=1, rope=rope, sequence_lens=lens, max_positions=max_positions
    )


_SHORT = [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0]
_LONG = [1.0, 1.5, 2.0, 3.0, 3.5, 4.0, 5.0, 6.0]
_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Lengths below, at and above the 32 positions at which these scalings change the frequencies.
_AROUND_32 = (20, 32, 33, 64)

VARIANTS: dict[str, TinyLlama] = {
    # Head layouts, optional parts, storage.
    "mha": TinyLlama(num_kv_heads=None, rope={"rope_theta": 10000.0, "rope_scaling": None}),
    "gqa": TinyLlama(num_layers=3, seed=1),
    "mqa": TinyLlama(num_kv_heads=1, seed=2),
    "tied": TinyLlama(tied=True, seed=3),
    "attention_bias": TinyLlama(attention_bias=True, seed=4),
    "mlp_bias": TinyLlama(mlp_bias=True, seed=5),
    "all_biases_tied_mqa": TinyLlama(
        num_kv_heads=1, attention_bias=True, mlp_bias=True, tied=True, seed=6
    ),
    "head_dim": TinyLlama(head_dim=16, seed=7),
    "large_eps": TinyLlama(rms_norm_eps=1e-2, seed=8),
    "bfloat16": TinyLlama(dtype="bfloat16", seed=9),
    "float16": TinyLlama(dtype="float16", seed=10),
    "sharded": TinyLlama(num_shards=3, seed=11),
    # Rotary embeddings.
    "rope_default_new": _wide(_new("default", theta=500.0)),
    "rope_linear_old": _wide(_old("linear", factor=4.0)),
    "rope_linear_new": _wide(_new("linear", theta=1000.0, factor=2.5)),
    "rope_dynamic_old": _wide(_old("dynamic", factor=2.0), _AROUND_32, 32),
    "rope_dynamic_new": _wide(_new("dynamic", theta=1000.0, factor=4.0), _AROUND_32, 32),
    "rope_yarn_old": _wide(_old("yarn", factor=4.0, original_max_position_embeddings=32)),
    "rope_yarn_new": _wide(
        _new("yarn", theta=500.0, factor=4.0, original_max_position_embeddings=32)
    ),
    "rope_yarn_attention_factor": _wide(
        _new("yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.3)
    ),
    "rope_yarn_mscale": _wide(
        _new(
            "yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.2
        )
    ),
    "rope_yarn_betas_untruncated": _wide(
        _new(
            "yarn",
            theta=100.0,
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=4.0,
            beta_slow=0.5,
            truncate=False,
        )
    ),
    "rope_yarn_factor_from_lengths": _wide(
        _new("yarn", factor=None, original_max_position_embeddings=32)
    ),
    "rope_yarn_original_from_max": _wide(_old("yarn", factor=4.0), max_positions=64),
    "rope_longrope_old": _wide(
        _old(
            "longrope",
            factor=4.0,
            original_max_position_embeddings=32,
            short_factor=_SHORT,
            long_factor=_LONG,
        ),
        _AROUND_32,
    ),
    "rope_longrope_attention_factor": _wide(
        _new(
            "longrope",
            attention_factor=1.2,
            original_max_position_embeddings=32,
            short_factor=_SHORT,
            long_factor=_LONG,
        ),
        _AROUND_32,
    ),
    # The length outside the dictionary takes precedence, and gives the factor (128 / 32).
    "rope_longrope_outer_length": _wide(
        {
            **_old(
                "longrope",
                original_max_position_embeddings=64,
                short_factor=_SHORT,
                long_factor=_LONG,
            ),
            "original_max_position_embeddings": 32,
        },
        _AROUND_32,
    ),
    "rope_llama3_old": _wide(_old("llama3", original_max_position_embeddings=64, **_LLAMA3)),
    "rope_llama3_new": _wide(
        _new("llama3", theta=5000.0, original_max_position_embeddings=32, **_LLAMA3)
    ),
    "rope_proportional": _wide(_new("proportional", partial_rotary_factor=0.5, factor=2.0)),
}


def config_json(variant: TinyLlama) -> dict[str, Any]:
    """Return the content of `config.json`."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": variant.hidden_size,
        "intermediate_size": variant.intermediate_size,
        "num_hidden_layers": variant.num_layers,
        "num_attention_heads": variant.num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": variant.max_positions,
        "rms_norm_eps": variant.rms_norm_eps,
        "tie_word_embeddings": variant.tied,
        "attention_bias": variant.attention_bias,
        "mlp_bias": variant.mlp_bias,
        "unk_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "torch_dtype": variant.dtype,
    }
    if variant.num_kv_heads is not None:
        config["num_key_value_heads"] = variant.num_kv_heads
    if variant.head_dim is not None:
        config["head_dim"] = variant.head_dim
    return config | variant.rope


def tensor_scales(variant: TinyLlama) -> dict[str, tuple[tuple[int, ...], float, float]]:
    """Return each tensor's shape, mean and half width, in file order; [out, in] as in PyTorch.

    The widths give query-key scores a spread of about two, so that a wrong rotation, mask or scale
    changes the logits by far more than rounding does.
    """
    d, f, h = variant.hidden_size, variant.intermediate_size, variant.head_size
    q, kv = variant.num_heads * h, variant.kv_heads * h
    tensors: dict[str, tuple[tuple[int, ...], float, float]] = {}

    def linear(name: str, out: int, inner: int, gain: float, bias: bool) -> None:
        tensors[f"{name}.weight"] = ((out, inner), 0.0, gain * (3 / inner) ** 0.5)
        if bias:
            tensors[f"{name}.bias"] = ((out,), 0.0, 0.5)

    tensors["model.embed_tokens.weight"] = ((VOCAB_SIZE, d), 0.0, 1.0)
    for i in range(variant.num_layers):
        block = f"model.layers.{i}"
        tensors[f"{block}.input_layernorm.weight"] = ((d,), 1.0, 0.4)
        linear(f"{block}.self_attn.q_proj", q, d, 1.4, variant.attention_bias)
        linear(f"{block}.self_attn.k_proj", kv, d, 1.4, variant.attention_bias)
        linear(f"{block}.self_attn.v_proj", kv, d, 1.0, variant.attention_bias)
        linear(f"{block}.self_attn.o_proj", d, q, 1.0, variant.attention_bias)
        tensors[f"{block}.post_attention_layernorm.weight"] = ((d,), 1.0, 0.4)
        linear(f"{block}.mlp.gate_proj", f, d, 1.2, variant.mlp_bias)
        linear(f"{block}.mlp.up_proj", f, d, 1.2, variant.mlp_bias)
        linear(f"{block}.mlp.down_proj", d, f, 1.0, variant.mlp_bias)
    tensors["model.norm.weight"] = ((d,), 1.0, 0.4)
    if not variant.tied:
        linear("lm_head", VOCAB_SIZE, d, 1.5, False)
    return tensors


def weights(variant: TinyLlama) -> dict[str, np.ndarray]:
    """Make the tensors by name, in the stored dtype: uniform, the same bytes on every machine."""
    words = np.random.PCG64(variant.seed)
    dtype = np.dtype(getattr(ml_dtypes, variant.dtype, variant.dtype))
    tensors = {}
    for name, (shape, mean, half_width) in tensor_scales(variant).items():
        raw = words.random_raw(int(np.prod(shape)))
        # The 24 high bits make an exact float32 in [-1, 1); two correctly rounded steps follow.
        unit = ((raw >> np.uint64(40)).astype(np.float32) - 2.0**23) * np.float32(2.0**-23)
        values = unit * np.float32(half_width) + np.float32(mean)
        tensors[name] = values.astype(dtype).reshape(shape)
    return tensors


def weights_sha256(tensors: dict[str, np.ndarray]) -> str:
    """Return a digest of names, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for name, array in tensors.items():
        digest.update(f"{name} {array.shape} {array.dtype.name}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def token_sequences(variant: TinyLlama) -> list[list[int]]:
    """Make random token ids, one list for each of `sequence_lens`, without special tokens."""
    words = np.random.PCG64(1000 + variant.seed)
    low = len(SPECIAL_TOKENS)
    return [
        [low + int(raw >> np.uint64(32)) % (VOCAB_SIZE - low) for raw in words.random_raw(n)]
        for n in variant.sequence_lens
    ]


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file (header length, JSON header, data) in the given order."""
    kinds = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
    kinds |= {"uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": kinds[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(array.tobytes())


def _write_weights(directory: Path, tensors: dict[str, np.ndarray], num_shards: int) -> None:
    """Write one file, or `num_shards` files with the index that says which tensor is where."""
    if num_shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return
    where: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        names = list(tensors)[shard::num_shards]
        write_safetensors(directory / file, {name: tensors[name] for name in names})
        where |= dict.fromkeys(names, file)
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def byte_level_tokenizer() -> Tokenizer:
    """Make a byte-level BPE tokenizer: 4 special tokens, 256 bytes and 12 merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (merge.split() for merge in MERGES)]
    words = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def write_checkpoint(variant: str | TinyLlama, directory: str | Path) -> Path:
    """Write a checkpoint (a name in `VARIANTS`, or any `TinyLlama`) into `directory`; return it."""
    tiny = VARIANTS[variant] if isinstance(variant, str) else variant
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, weights(tiny), tiny.num_shards)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    files = {
        "config.json": config_json(tiny),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "model_max_length": tiny.max_positions,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return folder
