"""Configuration: every field reachable, every problem named, all of them at once."""

from __future__ import annotations

import dataclasses
import itertools
import re
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxinfer
from jaxinfer.cli.commands import COMMANDS
from jaxinfer.config import (
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    from_mapping,
    load_config,
    load_preset,
    preset_names,
)
from jaxinfer.execution.numerics import numerics_for
from jaxinfer.options import ConfigError, merge, parse_overrides
from tests.support.paths import ROOT

CONFIGS = ROOT / "configs"

# Of every key: texts that are accepted, with their values, and texts that are not.
GOOD: dict[str, dict[str, Any]] = {
    "cache.page_size": {"1": 1, "256": 256},
    "cache.num_pages": {"1": 1, "none": None},
    "cache.memory_bytes": {"1_000_000": 1_000_000, "None": None},
    "cache.memory_fraction": {"0.5": 0.5, "1": 1, "0": 0, "none": None},
    "cache.prefix_cache": {"true": True, "false": False},
    "cache.dtype": {"model": "model", "float32": "float32", '"bfloat16"': "bfloat16"},
    "scheduler.policy": {"static": "static", "priority": "priority"},
    "scheduler.max_num_batched_tokens": {"1": 1, "8192": 8192},
    "scheduler.max_num_seqs": {"1": 1, "300": 300},
    "mesh.data": {"2": 2},
    "mesh.pipe": {"1": 1, "4": 4},
    "mesh.seq": {"2": 2},
    "mesh.expert": {"8": 8},
    "mesh.tensor": {"16": 16},
    "mesh.whole": {"['vocab']": ("vocab",), "[]": ()},
    "mesh.all_reduce": {"int8": "int8"},
    "mesh.overlap": {"true": True},
    "dtype": {"auto": "auto", "float16": "float16"},
    "load_format": {"auto": "auto", "random": "random"},
    "weights": {"auto": "auto", "packed": "packed", "dequantized": "dequantized"},
    "quantize": {"int8": "int8", "float8_w8a8": "float8_w8a8", "none": None},
    "max_model_len": {"2": 2, "none": None},
    "seed": {"0": 0, "7": 7},
    "overlap": {"false": False},
    "batch_invariant": {"true": True},
    "min_bucket": {"1": 1, "512": 512},
    "bucket_growth": {"2": 2, "8": 8},
    "warm_up": {"false": False},
    "check_every_step": {"true": True},
    "attention_backend": {"xla": "xla", "none": None},
}
BAD: dict[str, list[str]] = {
    "cache.page_size": ["0", "-1", "1.5", "none", "true", "many", "[1]"],
    "cache.num_pages": ["0", "1.0", "true"],
    "cache.memory_bytes": ["0", "1e9", "2GiB"],
    "cache.memory_fraction": ["-0.1", "1.01", "nan", "inf", "true", "half"],
    "cache.prefix_cache": ["1", "yes", "none"],
    "cache.dtype": ["int4", "auto", "1", "none"],
    "scheduler.policy": ["fifo", "none", "[1, 2]"],
    "scheduler.max_num_batched_tokens": ["0", "none", "many"],
    "scheduler.max_num_seqs": ["0", "false"],
    "mesh.data": ["0", "none"],
    "mesh.pipe": ["-2", "1.5"],
    "mesh.seq": ["0", "true"],
    "mesh.expert": ["0", "all"],
    "mesh.tensor": ["0", "none"],
    "mesh.whole": ["vocab", "1"],
    "mesh.all_reduce": ["int4", "none"],
    "mesh.overlap": ["1"],
    "dtype": ["float64", "model", "none"],
    "load_format": ["gguf", "none", "1"],
    "weights": ["int8", "none", "true"],
    "quantize": ["int3", "8", "true", "auto"],
    "max_model_len": ["1", "0", "1.0"],
    "seed": ["-1", "nan", "none"],
    "overlap": ["0", "no"],
    "batch_invariant": ["maybe"],
    "min_bucket": ["0", "none", "small"],
    "bucket_growth": ["1", "1.5"],
    "warm_up": ["2"],
    "check_every_step": ["none"],
    "attention_backend": ["1", "true", "[]"],
}


def leaves(config_class: type = EngineConfig, prefix: str = "") -> list[str]:
    """The path of every option."""
    paths: list[str] = []
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(hints[field.name]):
            paths += leaves(hints[field.name], f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            paths.append(prefix + field.name)
    return paths


def value_at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def test_every_option_is_covered_here_and_they_are_few():
    assert set(GOOD) == set(BAD) == set(leaves())
    assert len(leaves()) <= 33


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [(path, text, value) for path, texts in GOOD.items() for text, value in texts.items()],
)
def test_an_override_reaches_its_field(path, text, value):
    found = value_at(load_config(overrides=[f"{path}={text}"]), path)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("path", "text"), [(path, text) for path, texts in BAD.items() for text in texts]
)
def test_a_bad_value_is_refused_by_key_and_value(path, text):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[f"{path}={text}"])
    message = str(caught.value)
    assert message.startswith(f"{path} is ") and "must be" in message
    bare = text.strip("'\"").removesuffix(".0")
    assert re.search(re.escape(bare), message, re.IGNORECASE) or text == "1e9"


def test_all_problems_are_reported_at_once():
    values = {
        "cache": {"page_size": 0, "pages": 3, "memory_fraction": 2.0},
        "scheduler": {"policy": "fifo", "max_row": 1},
        "seed": -1,
        "overlap": "yes",
        "min_bucket": 513,
        "verbose": True,
    }
    with pytest.raises(ConfigError) as caught:
        from_mapping(values)
    message = str(caught.value)
    for part in (
        "cache.page_size is 0; it must be at least 1",
        "unknown key cache.pages",
        "cache.memory_fraction is 2.0; it must be at most 1",
        "scheduler.policy is 'fifo'; it must be one of first_come, priority, static",
        "unknown key scheduler.max_row",
        "seed is -1; it must be at least 0",
        "overlap is 'yes'; it must be true or false",
        "min_bucket is 513; it must be at most scheduler.max_num_batched_tokens (512)",
        "unknown key verbose",
    ):
        assert part in message, part


def test_an_unknown_key_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown key cache\.size .*cache\.page_size"):
        load_config(overrides=["cache.size=3"])
    with pytest.raises(ConfigError, match=r"unknown key max_tokens .*scheduler"):
        load_config(overrides=["max_tokens=3"])


@pytest.mark.parametrize("value", ["5", "text", "[1]", "none"])
def test_a_table_takes_no_plain_value(value):
    with pytest.raises(ConfigError, match=r"cache is .*; it is a table of keys"):
        load_config(overrides=[f"cache={value}"])


def test_a_key_below_a_plain_value_is_refused():
    with pytest.raises(ConfigError):
        load_config(overrides=["seed.low=3"])
    with pytest.raises(ConfigError, match="seed is no table of keys"):
        load_config(overrides=["seed=3", "seed.low=3"])


@pytest.mark.parametrize("override", ["seed", "", "=3", "seed 3"])
def test_an_override_without_an_equals_sign_or_a_key_is_refused(override):
    with pytest.raises(ConfigError, match=r"not of the form key\.path=value"):
        load_config(overrides=[override])


@pytest.mark.parametrize("override", [" seed = 3 ", "seed=3"])
def test_spaces_around_an_override_do_not_matter(override):
    assert load_config(overrides=[override]).seed == 3


def test_the_last_override_wins():
    config = load_config(overrides=["seed=1", "cache.page_size=8", "seed=2", "cache.page_size=4"])
    assert (config.seed, config.cache.page_size) == (2, 4)


def test_a_value_may_hold_an_equals_sign():
    assert parse_overrides(["attention_backend=a=b"]) == {"attention_backend": "a=b"}


def test_python_objects_are_checked_like_files():
    with pytest.raises(ConfigError, match=r"cache\.page_size is 0; it must be at least 1"):
        EngineConfig(cache=CacheConfig(page_size=0))
    with pytest.raises(ConfigError, match=r"cache is .* it must be a CacheConfig"):
        EngineConfig(cache={"page_size": 16})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="scheduler is None"):
        EngineConfig(scheduler=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [EngineConfig(), CacheConfig(), SchedulerConfig()])
def test_a_config_is_frozen_and_a_change_is_a_new_one(config):
    name = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, None)
    assert dataclasses.replace(config) == config and hash(dataclasses.replace(config)) is not None


def test_replace_checks_again():
    with pytest.raises(ConfigError, match="seed is -5"):
        dataclasses.replace(EngineConfig(), seed=-5)


@given(max_tokens=st.integers(1, 10_000), growth=st.integers(2, 9), share=st.floats(0, 1))
def test_buckets_rise_to_the_budget_and_hold_every_step(max_tokens, growth, share):
    min_bucket = max(1, int(max_tokens * share))
    config = from_mapping(
        {
            "scheduler": {"max_num_batched_tokens": max_tokens},
            "min_bucket": min_bucket,
            "bucket_growth": growth,
        }
    )
    buckets = config.buckets
    assert buckets[0] == min_bucket and buckets[-1] == max_tokens
    assert list(buckets) == sorted(set(buckets))
    assert all(b <= growth * a for a, b in itertools.pairwise(buckets))


@pytest.mark.parametrize("min_bucket", [1, 16, 20, 100])
def test_buckets_of_the_batch_invariant_mode_are_whole_tiles(min_bucket):
    config = EngineConfig(batch_invariant=True, min_bucket=min_bucket)
    assert all(bucket % 16 == 0 for bucket in config.buckets)
    assert config.buckets[0] >= min_bucket


def test_merge_goes_down_into_tables_and_later_layers_win():
    low = {"seed": 1, "cache": {"page_size": 8, "num_pages": 2}, "scheduler": {"max_num_seqs": 1}}
    high = {"cache": {"page_size": 16}, "seed": 3, "scheduler": 4}
    assert merge(low, high) == {
        "seed": 3,
        "cache": {"page_size": 16, "num_pages": 2},
        "scheduler": 4,
    }
    assert low["cache"] == {"page_size": 8, "num_pages": 2}, "layers are left as they were"
    assert merge() == {}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_preset_loads_and_opens_with_the_command_that_runs_it(path):
    assert path.stem in preset_names()
    config = load_config(path.stem)
    assert config == load_config(str(path)) == from_mapping(load_preset(path.stem))
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line)
    text = "\n".join(comment)
    assert len(comment) >= 2 and re.search(r"\bmake \w+|jaxinfer \w+ --", text), text
    for command in re.findall(r"^#   jaxinfer ([a-z -]+?) --", text, re.M):
        assert command in COMMANDS, f"{path.name} names jaxinfer {command}"
    assert re.search("hardware", text, re.IGNORECASE), "and the hardware it is meant for"


def test_presets_ship_with_the_package():
    assert preset_names() == sorted(path.stem for path in CONFIGS.glob("*.toml"))
    assert "demo" in preset_names()


def test_overrides_win_over_a_preset():
    assert load_config("demo", ["scheduler.max_num_seqs=3"]).scheduler.max_num_seqs == 3
    assert load_config("demo", ["scheduler.max_num_seqs=3"]).cache == load_config("demo").cache


@pytest.mark.parametrize("name", ["nothing", "nothing.toml", "../configs", ""])
def test_a_missing_preset_is_answered_with_the_names_there_are(name):
    with pytest.raises(ConfigError, match=r"presets: .*demo.*path of a \.toml file"):
        load_preset(name)


@pytest.mark.parametrize(
    "content", [b"seed = ", b"[cache", b"seed = 1\nseed = 2", b"\xff\xfe", b"a = [1"]
)
def test_a_damaged_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML"):
        load_config(str(path))


def test_a_file_of_your_own_is_checked_like_the_rest(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("seed = 5\n[cache]\npage_size = 8\nprefix = true\n")
    with pytest.raises(ConfigError, match=r"unknown key cache\.prefix"):
        load_config(str(path))
    path.write_text("seed = 5\n[cache]\npage_size = 8\n")
    assert load_config(str(path)).cache.page_size == 8


def test_the_package_exports_what_a_user_of_configs_needs():
    for name in ("EngineConfig", "CacheConfig", "SchedulerConfig", "ConfigError", "load_config"):
        assert name in jaxinfer.__all__


def test_a_backend_that_takes_some_steps_alone_is_refused_as_the_only_one():
    with pytest.raises(ConfigError, match="'hopper', which runs only steps with prefill chunks"):
        numerics_for(EngineConfig(attention_backend="hopper"))
