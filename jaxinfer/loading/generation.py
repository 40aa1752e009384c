"""Read the generation settings of a Hugging Face directory.

For each key, `generation_config.json` takes precedence over `config.json`; `null` counts as absent.
A value of the wrong type or out of range is a problem of the checkpoint. Keys that would change the
output but are not supported are named in one warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from absl import logging

from jaxinfer.loading.checkpoint import GenerationDefaults
from jaxinfer.sampling.params import SamplingParamsError

# Unsupported keys of transformers' generation settings that change the output, each with the values
# that have no effect.
UNSUPPORTED_KEYS: Mapping[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "top_h": (1,),
    "typical_p": (1,),
    "watermarking_config": (),
}
NUMBER = ((int, float), "a number")
WHOLE = ((int,), "a whole number")


class _Sources:
    """Reads keys from the two files and appends invalid values to `problems`."""

    def __init__(
        self, generation: Mapping[str, Any], config: Mapping[str, Any], problems: list[str]
    ):
        self.files = (("generation_config.json", generation), ("config.json", config))
        self.problems = problems

    def read(self, key: str, kinds: tuple[type, ...], expected: str) -> Any:
        for name, source in self.files:
            value = source.get(key)
            if value is None:
                continue
            if type(value) in kinds:
                return float(value) if float in kinds else value
            self.problems.append(f"{name}: {key} is {value!r}, {expected} is needed")
        return None

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.read(key, (int, list), "a token id or a list of them")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        wrong = [item for item in ids if type(item) is not int or item < 0]
        self.problems += [f"{key} is {item!r}, a token id is needed" for item in wrong]
        return () if wrong else tuple(dict.fromkeys(ids))

    def token_id(self, key: str) -> int | None:
        value = self.read(key, (int,), "a token id")
        if value is not None and value < 0:
            self.problems.append(f"{key} is {value!r}, a token id is needed")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.read(key, (str, list), "a text or a list of them")
        return (value,) if isinstance(value, str) else tuple(value or ())


def generation_defaults(
    where: Any, generation: Mapping[str, Any], config: Mapping[str, Any], problems: list[str]
) -> GenerationDefaults:
    """Read the generation defaults of a checkpoint; invalid values are added to `problems`."""
    sources = _Sources(generation, config, problems)
    num_problems = len(problems)
    defaults = GenerationDefaults(
        eos_token_ids=sources.token_ids("eos_token_id"),
        bos_token_id=sources.token_id("bos_token_id"),
        do_sample=sources.read("do_sample", (bool,), "true or false"),
        temperature=sources.read("temperature", *NUMBER),
        top_k=sources.read("top_k", *WHOLE),
        top_p=sources.read("top_p", *NUMBER),
        min_p=sources.read("min_p", *NUMBER),
        repetition_penalty=sources.read("repetition_penalty", *NUMBER),
        max_new_tokens=sources.read("max_new_tokens", *WHOLE),
        stop_strings=sources.texts("stop_strings"),
    )
    if len(problems) > num_problems:
        return GenerationDefaults()
    try:
        defaults.sampling_params()
    except SamplingParamsError as error:
        problems.append(f"generation_config.json, config.json: {error}")
    if unread := unsupported_settings(generation, config):
        logging.warning(
            "%s sets %s, which is not supported: output can differ from that of transformers",
            where,
            ", ".join(f"{key}={value!r}" for key, value in unread.items()),
        )
    return defaults


def unsupported_settings(
    generation: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that would change the output but are not supported."""
    unread: dict[str, Any] = {}
    for source in (config, generation):
        for key, neutral in UNSUPPORTED_KEYS.items():
            value = source.get(key)
            if value is not None:
                unread[key] = value
                if value in neutral:
                    del unread[key]
    # A bound on prompt and output together. transformers wrote its default of 20 to many files.
    length, longest = generation.get("max_length"), config.get("max_position_embeddings")
    is_bound = type(length) is int and type(longest) is int and length < longest
    if is_bound and length != 20 and generation.get("max_new_tokens") is None:
        unread["max_length"] = length
    return unread
