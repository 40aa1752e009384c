"""The planner's options, and its plans of quantized checkpoints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.demo import demo_model_path
from jaxinfer.loading.orbax import write_converted
from jaxinfer.nn.layers import Numerics
from jaxinfer.options import ConfigError
from tests.support.quantized_checkpoints import write_quantized
from tests.support.tiny_checkpoints import TinyLlama, write_checkpoint
from tests.support.tiny_plans import (
    GPT2,
    LLAMA,
    QUANTIZED,
    UNREAD,
    chip,
    compile_steps,
    models,
    options,
)


@pytest.mark.parametrize(("stored", "recipe"), [(None, None), ({}, None), *QUANTIZED])
def test_quantized_checkpoint_is_planned_as_stored_by_default(tmp_path, stored, recipe):
    keys = LLAMA if stored is None else LLAMA | {"quantization_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    model = models.find_model(str(tmp_path), {})
    assert options.engine_config(model, options.PlanRequest()).quantize == recipe
    assert options.engine_config(model, options.PlanRequest(quant="none")).quantize is None
    assert (
        options.engine_config(model, options.PlanRequest(), "cpu").quantize is None
    )  # dequantized
    asked = options.PlanRequest(quant="int4" if recipe == "int8" else "int8")
    if recipe is None:
        assert options.engine_config(model, asked).quantize == "int8"
        return
    with pytest.raises(ValueError, match=f"stay as they are .planned as {recipe}"):
        options.engine_config(model, asked)
    freed = dataclasses.replace(asked, overrides=["weights=dequantized"])
    assert options.engine_config(model, freed).quantize == asked.quant


@pytest.mark.parametrize(("stored", "reason"), UNREAD)
def test_refused_weights_need_an_explicit_quantization(tmp_path, stored, reason):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": stored}))
    model = models.find_model(str(tmp_path), {})
    with pytest.raises(ValueError, match=f"{reason}.*--quant=none plans it dequantized"):
        options.engine_config(model, options.PlanRequest())
    assert options.engine_config(model, options.PlanRequest(quant="none")).quantize is None
    told = options.PlanRequest(overrides=["quantize=int4"])
    assert options.engine_config(model, told).quantize == "int4"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (
            {"context": 64, "overrides": ["max_model_len=32"]},
            "--context=64 and --set max_model_len=32",
        ),
        ({"quant": "int8", "overrides": ["quantize=none"]}, "--quant=int8 and --set quantize="),
        ({"rows": 2, "overrides": ["scheduler.max_num_seqs=3"]}, "--rows=2 and --set"),
        ({"mesh": "tensor=2", "overrides": ["mesh.data=2"]}, "'tensor=2' and --set mesh.data"),
        ({"is_search": True, "overrides": ["mesh.tensor=2"]}, "leave out --set mesh.tensor"),
        ({"is_search": True, "mesh": "tensor=2"}, "leave out --mesh, or --search"),
        ({"chunk": 10**10}, r"--chunk .* 10,000,000,000; plans take at most 1,048,576"),
        ({"overrides": ["scheduler.max_num_seqs=100000"]}, "--rows .* plans take at most 65,536"),
    ],
)
def test_options_without_effect_or_bound_are_refused(asked, reason):
    with pytest.raises(ValueError, match=reason):
        options.engine_config(models.model_from_table("tiny", LLAMA), options.PlanRequest(**asked))


def test_search_keeps_a_set_quantization_but_not_the_presets_mesh():
    model = models.model_from_table("tiny", LLAMA)
    for kinds, asked in (
        (("int4",), options.PlanRequest(overrides=["quantize=int4"])),
        ((None,), options.PlanRequest(quant="none")),
        (options.SEARCHED, options.PlanRequest("llama31_70b_v5e16", context=64, is_search=True)),
        (("int8",), options.PlanRequest("deepseek_v3_v5p16", context=64, is_search=True)),
        (
            (None,),
            options.PlanRequest("deepseek_v3_v5p16", quant="none", context=64, is_search=True),
        ),
    ):
        config = options.engine_config(model, asked)
        assert options.searched_quantizations(asked, config) == kinds
    stored = model._replace(stored=models.StoredForm("gptq", "int4", ""))
    config = options.engine_config(stored, options.PlanRequest())
    assert options.searched_quantizations(options.PlanRequest(), config) == ("int4",)


def test_set_length_is_the_context():
    model = models.model_from_table("tiny", LLAMA)
    asked = options.PlanRequest(overrides=["max_model_len=48"])
    assert options.plan_context(model, options.engine_config(model, asked), asked) == 48


def test_length_beyond_the_model_is_treated_as_by_the_engine(monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: said.append(text % values))
    model, asked = (
        models.model_from_table("tiny", LLAMA),
        options.PlanRequest(overrides=["max_model_len=2048"]),
    )
    config = options.engine_config(model, asked)
    assert options.plan_context(model, config, asked) == 2048
    step = compile_steps.StepProgram(chip(monkeypatch, "v5e"), model, config)
    assert step.max_model_len == 2048 == 64 * step.program.sizes.table_width
    assert said == ["max_model_len is 2048, past the 512 positions that the model was made for"]
    with pytest.raises(ConfigError, match="max_model_len is 2048; this model has a table of 512"):
        options.engine_config(models.model_from_table("tiny", GPT2), asked)


def test_dtype_is_the_engines_on_the_platform():
    model = models.model_from_table("tiny", LLAMA)
    for overrides, platform, dtype in (
        ((), "cpu", "float32"), ((), "gpu", "bfloat16"), (("dtype=auto",), "tpu", "bfloat16"),
        (("dtype=bfloat16",), "cpu", "bfloat16"),
    ):  # fmt: skip
        asked = options.PlanRequest(overrides=overrides)
        assert options.engine_config(model, asked, platform).dtype == dtype


def test_gguf_file_is_planned_by_its_bytes():
    model = models.find_model(str(demo_model_path()), {})
    assert model.stored == models.StoredForm("gguf", "int4")
    assert models.find_model("demo", {}).config == model.config
    assert options.engine_config(model, options.PlanRequest()).quantize == "int4"


def convert(source: Path, folder: Path, kind: str | None, *, keep_packed: bool) -> Path:
    checkpoint = open_checkpoint(source)
    model = functional_model(checkpoint, Numerics(np.dtype(jnp.bfloat16)))
    weights = load_weights(checkpoint, model, keep_packed=keep_packed, quantize=kind)
    write_converted(checkpoint, model, weights, folder, quantization=kind)
    return folder


def test_converted_checkpoint_is_planned_by_its_manifest(tmp_path):
    plain = write_checkpoint(TinyLlama(num_layers=1), tmp_path / "plain")
    awq, _ = write_quantized("awq", tmp_path)
    for source, kind, keep_packed, recipe in (
        (plain, None, True, None), (plain, "int8", True, "int8"),
        (plain, "float8_w8a8", True, "float8_w8a8"),
        (awq, None, True, "int4"), (awq, None, False, None),
    ):  # fmt: skip
        folder = tmp_path / f"{source.name}-{kind}-{keep_packed}"
        stored = models.find_model(
            str(convert(source, folder, kind, keep_packed=keep_packed)), {}
        ).stored
        assert stored == (recipe and models.StoredForm("converted", recipe)), folder.name
