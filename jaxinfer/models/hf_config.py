"""Reading a config.json: what most decoders' configurations say alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.kernels.gated_mlp.activations import ACTIVATIONS

# Other spellings of activations.
SPELLINGS = {
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "swish": "silu",
}
FULL, SLIDING = "full_attention", "sliding_attention"


def need(config: Mapping[str, Any], *names: str) -> list[int]:
    """The whole numbers of these keys; `ValueError` names all that are missing."""
    missing = [name for name in names if type(config.get(name)) is not int]
    if missing:
        raise ValueError(f"config.json lacks a whole number for {', '.join(missing)}")
    return [config[name] for name in names]


def activation(config: Mapping[str, Any], *names: str, default: str = "silu") -> str:
    """The first of these keys that says anything; `ValueError` for a function not known."""
    named = next((config[name] for name in names if config.get(name)), default)
    value = SPELLINGS.get(named, named) if isinstance(named, str) else ""
    if value not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ValueError(f"{names[0]} is {named!r}; this build has {known}")
    return value


def refuse(config: Mapping[str, Any], **wanted: Any) -> None:
    """`ValueError` for keys that ask for what is not built: neither absent, null nor `wanted`."""
    wrong = [
        f"{name} is {config[name]!r}, and this build knows {value!r} alone"
        for name, value in wanted.items()
        if config.get(name) not in (None, value)
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def decoder_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `DecoderConfig` that have the same key in nearly all families: all but `layers`
    and what is particular to one. Missing keys take `LlamaConfig`'s defaults where it has any."""
    vocab_size, num_layers, model_dim, num_heads = need(
        config, "vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads"
    )
    return {
        "vocab_size": vocab_size,
        "num_layers": num_layers,
        "model_dim": model_dim,
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or model_dim // max(num_heads, 1),
        "max_len": config.get("max_position_embeddings", 2048),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": activation(config, "hidden_act", "hidden_activation"),
        "is_tied": bool(config.get("tie_word_embeddings", False)),
    }


def layer_windows(
    config: Mapping[str, Any],
    num_layers: int,
    window: int | None,
    slides: Callable[[int], bool] = lambda layer: True,
) -> list[int | None]:
    """Every layer's window: `window` in those that `layer_types` calls sliding, or, where the file
    has no such list, in those that the family's rule `slides` names."""
    kinds = config.get("layer_types")
    if kinds is None:
        is_sliding = [window is not None and slides(layer) for layer in range(num_layers)]
    else:
        unknown = sorted({str(kind) for kind in kinds} - {FULL, SLIDING})
        if unknown or len(kinds) != num_layers:
            raise ValueError(
                f"layer_types has {len(kinds)} entries for {num_layers} layers, and of kinds that "
                f"this build does not know: {unknown}; it knows {FULL} and {SLIDING}"
            )
        is_sliding = [kind == SLIDING for kind in kinds]
    if any(is_sliding) and window is None:
        raise ValueError("layer_types has sliding layers, but sliding_window is null")
    return [window if slides_here else None for slides_here in is_sliding]
