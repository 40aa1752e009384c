"""Readers of config.json that the families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.kernels.gated_mlp.activations import ACTIVATIONS
from jaxinfer.nn.checks import positive_errors, whole_number_errors

# Readers make a list of the layers. The deepest published models have about 130; a file that claims
# 10^11 would exhaust memory before another check could refuse it.
MAX_LAYERS = 1_000
# Other names of activations.
ACTIVATION_ALIASES = {
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "swish": "silu",
}
FULL, SLIDING = "full_attention", "sliding_attention"


def get_int(
    config: Mapping[str, Any], *names: str, default: int | None = None, least: int = 1
) -> int:
    """Return the integer of at least `least` under the first of these names that is not null.

    Raises `ValueError` for anything else, and if all are null and there is no default.
    """
    for name in names:
        if config.get(name) is not None:
            if wrong := whole_number_errors({name: config[name]}, {name: least}):
                raise ValueError(wrong[0])
            return config[name]
    if default is None:
        raise ValueError(
            f"{' or '.join(names)} is None; config.json must state a whole number of at least "
            f"{least}"
        )
    return default


def require_ints(config: Mapping[str, Any], *names: str) -> list[int]:
    """Return the integers of at least 1 under these keys; raise `ValueError` naming all others."""
    values: dict[str, Any] = {name: config.get(name) for name in names}
    if wrong := whole_number_errors(values):
        raise ValueError(f"config.json is invalid: {'; '.join(wrong)}")
    return list(values.values())


def check_num_layers(name: str, count: int) -> int:
    """Return `count`; raise `ValueError` if it is above `MAX_LAYERS`."""
    if count > MAX_LAYERS:
        raise ValueError(f"{name} states {count:,} layers; the limit is {MAX_LAYERS:,}")
    return count


def get_float(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return the finite number above 0 under a key, or `default` if the key is missing.

    Raises `ValueError` for anything else, null included.
    """
    value = config.get(name, default)
    if wrong := positive_errors({name: value}):
        raise ValueError(wrong[0])
    return float(value)


def get_object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object under a key, empty if missing or null; raise `ValueError` otherwise."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}, a {type(value).__name__}; it must be an object")
    return value


def get_list(config: Mapping[str, Any], name: str, kind: type) -> list[Any] | None:
    """Return the list under a key, all items of one kind, or None if it is missing or null.

    Raises `ValueError` for another type.
    """
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is {value!r}, a {type(value).__name__}; it must be a list")
    if wrong := [item for item in value if not isinstance(item, kind)]:
        raise ValueError(f"{name} contains {wrong[0]!r}; all its items must be {kind.__name__}")
    return list(value)


def get_activation(config: Mapping[str, Any], *names: str, default: str = "silu") -> str:
    """Return the activation under the first of these keys that is set; raise `ValueError` for one
    that is not supported."""
    named = next((config[name] for name in names if config.get(name)), default)
    value = ACTIVATION_ALIASES.get(named, named) if isinstance(named, str) else ""
    if value not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ValueError(f"{names[0]} is {named!r}; the supported ones are {known}")
    return value


def refuse_unsupported(config: Mapping[str, Any], **supported: Any) -> None:
    """Raise `ValueError` for keys that are neither absent, null nor the `supported` value."""
    wrong = [
        f"{name} is {config[name]!r}; only {value!r} is supported"
        for name, value in supported.items()
        if config.get(name) not in (None, value)
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def decoder_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `DecoderConfig` that have the same key in most families.

    `layers` is not among them. Missing keys take `LlamaConfig`'s defaults, if it has any.
    """
    names = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads")
    vocab_size, num_layers, model_dim, num_heads = require_ints(config, *names)
    max_len = config.get("max_position_embeddings", 2048)
    if wrong := whole_number_errors({"max_position_embeddings": max_len}):
        raise ValueError(wrong[0])
    return {
        "vocab_size": vocab_size,
        "num_layers": check_num_layers("num_hidden_layers", num_layers),
        "model_dim": model_dim,
        "num_heads": num_heads,
        "num_kv_heads": get_int(config, "num_key_value_heads", default=num_heads),
        "head_dim": get_int(config, "head_dim", default=model_dim // max(num_heads, 1)),
        "max_len": max_len,
        "norm_eps": get_float(config, "rms_norm_eps", 1e-6),
        "activation": get_activation(config, "hidden_act", "hidden_activation"),
        "is_tied": bool(config.get("tie_word_embeddings", False)),
    }


def layer_windows(
    config: Mapping[str, Any],
    num_layers: int,
    window: int | None,
    slides: Callable[[int], bool] = lambda layer: True,
) -> list[int | None]:
    """Return each layer's window, or None: `window` in the sliding layers.

    `layer_types` names the sliding layers; without it the family's rule `slides` selects them.
    """
    kinds = get_list(config, "layer_types", str)
    if kinds is None:
        is_sliding = [window is not None and slides(layer) for layer in range(num_layers)]
    else:
        if unknown := sorted(set(kinds) - {FULL, SLIDING}):
            raise ValueError(
                f"layer_types has {unknown}; the supported types are {FULL} and {SLIDING}"
            )
        if len(kinds) != num_layers:
            raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
        is_sliding = [kind == SLIDING for kind in kinds]
    if any(is_sliding) and window is None:
        raise ValueError("layer_types has sliding layers, but sliding_window is null")
    return [window if is_sliding_layer else None for is_sliding_layer in is_sliding]
