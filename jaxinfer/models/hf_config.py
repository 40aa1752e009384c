"""Reading a config.json: what most decoders' configurations say alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.kernels.gated_mlp.activations import ACTIVATIONS
from jaxinfer.nn.checks import positive_errors, whole_number_errors

# Readers make a list of the layers. The deepest published models have some 130 of them; a file that
# claims 10^11 would take all memory before anything else could be found wrong with it.
MAX_LAYERS = 1_000
# Other spellings of activations.
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
    """The whole number of at least `least` under the first of these names that is not null.

    `ValueError` for anything else, and, without a default, where none is.
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
    """The whole numbers of at least 1 of these keys; `ValueError` names all that are none."""
    values: dict[str, Any] = {name: config.get(name) for name in names}
    if wrong := whole_number_errors(values):
        raise ValueError(f"config.json does not say what it must: {'; '.join(wrong)}")
    return list(values.values())


def check_num_layers(name: str, count: int) -> int:
    """`count`; `ValueError` where it is above what is read."""
    if count > MAX_LAYERS:
        raise ValueError(f"{name} claims {count:,} layers; this build reads up to {MAX_LAYERS:,}")
    return count


def get_float(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """The finite number above 0 of a key; `default` where it is missing. `ValueError` for anything
    else, a null among it."""
    value = config.get(name, default)
    if wrong := positive_errors({name: value}):
        raise ValueError(wrong[0])
    return float(value)


def get_object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object of a key, empty where it is missing or null; `ValueError` for another type."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}, a {type(value).__name__}; it must be an object")
    return value


def get_list(config: Mapping[str, Any], name: str, kind: type) -> list[Any] | None:
    """The list of a key, all of one kind; None where it is missing or null. `ValueError` for
    another type."""
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is {value!r}, a {type(value).__name__}; it must be a list")
    if wrong := [item for item in value if not isinstance(item, kind)]:
        raise ValueError(f"{name} holds {wrong[0]!r}; all of it must be {kind.__name__}")
    return list(value)


def get_activation(config: Mapping[str, Any], *names: str, default: str = "silu") -> str:
    """The first of these keys that says anything; `ValueError` for a function not known."""
    named = next((config[name] for name in names if config.get(name)), default)
    value = ACTIVATION_ALIASES.get(named, named) if isinstance(named, str) else ""
    if value not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ValueError(f"{names[0]} is {named!r}; this build has {known}")
    return value


def refuse_unsupported(config: Mapping[str, Any], **wanted: Any) -> None:
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
    """Every layer's window: `window` in those that `layer_types` calls sliding, or, where the file
    has no such list, in those that the family's rule `slides` names."""
    kinds = get_list(config, "layer_types", str)
    if kinds is None:
        is_sliding = [window is not None and slides(layer) for layer in range(num_layers)]
    else:
        if unknown := sorted(set(kinds) - {FULL, SLIDING}):
            raise ValueError(
                f"layer_types has kinds that this build does not know: {unknown}; it knows {FULL} "
                f"and {SLIDING}"
            )
        if len(kinds) != num_layers:
            raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
        is_sliding = [kind == SLIDING for kind in kinds]
    if any(is_sliding) and window is None:
        raise ValueError("layer_types has sliding layers, but sliding_window is null")
    return [window if slides_here else None for slides_here in is_sliding]
