"""The planner: its flags, what it makes of a compiler's figures, the search, and one real run.

The compilers of chips are not needed: the chips here have names of devices, and a compiler that
answers from a table. `make compile-check` compiles the presets.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from jaxinfer.config import EngineConfig, MeshConfig
from jaxinfer.sharding.mesh import MeshError
from jaxinfer.tools.planner import plans, report
from jaxinfer.tools.planner import search as search_module
from tests.support.tiny_plans import (
    EIGHT_LAYERS,
    KIB,
    LLAMA,
    MIXTRAL,
    Answers,
    answers_to,
    chip,
    compile_matrix,
    compile_steps,
    models,
    on_four_chips,
    options,
    program,
    run,
    small,
)

load_target = compile_matrix.load_target


@pytest.mark.parametrize(
    ("name", "topology", "devices"),
    [
        ("v5e", "v5e:2x2", 1),
        ("v5e:1", "v5e:2x2", 1),
        ("v5e:4x4", "v5e:4x4", 16),
        ("v5p:2x2x4", "v5p:2x2x4", 16),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 8),  # two devices a chip
        ("h100:8", "1x1x8", 8),
        ("h100:2x8", "1x2x8", 16),
        ("cpu:4", "4", 4),
    ],
)
def test_a_target_is_a_chip_and_a_topology(name, topology, devices):
    target = load_target(name)
    assert (target.name, target.topology, target.num_devices) == (name, topology, devices)
    assert target.limit_bytes == load_target(target.chip).limit_bytes


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("v9:2x2", r"no target 'v9'; there are a100, .*v6e"),
        ("v5e:4", "a topology is like 2x2"),
        ("v5p:4x4", "a topology is like 2x2x1"),
        ("v5e:0x4", "a topology is like 2x2"),
        ("v5e:4 x 4", "a topology is like 2x2"),
        ("h100:1x2x8", r"a topology is like 8 or 2x8 \(hosts x GPUs\)"),
        ("cpu:2x2", "a topology is like 8"),
        ("cpu:99999999", "99,999,999 devices; plans for cpu are of at most 64"),
        ("cpu:" + "9" * 5000, r"9\.\.\.', 5,004 characters; it is a chip and its topology"),
    ],
)
def test_invalid_target_error_shows_valid_ones(name, reason):
    with pytest.raises(ValueError, match=reason):
        options.parse_target(name)


def test_mesh_is_parsed_and_errors_list_the_axes():
    assert options.parse_mesh("pipe=2, tensor=8") == {"pipe": 2, "tensor": 8}
    assert options.parse_mesh("") == {}
    for wrong in ("tensr=8", "tensor", "tensor=0", "tensor=two", "8", "tensor=" + "9" * 5000):
        with pytest.raises(ValueError, match="axes being data, pipe, seq, expert, tensor"):
            options.parse_mesh(wrong)
    with pytest.raises(ValueError, match="tensor=2 and tensor=1; name an axis once"):
        options.parse_mesh("tensor=2,tensor=1")


def test_unknown_quantization_error_lists_known_ones():
    assert (
        options.parse_quantization("none") is None and options.parse_quantization("int8") == "int8"
    )
    with pytest.raises(ValueError, match="no quantization 'int3'; there are none, int8, int4"):
        options.parse_quantization("int3")


def test_model_is_found_in_the_matrix_or_a_checkpoint(tmp_path):
    tables = compile_matrix.load_matrix()["models"]
    assert models.find_model("llama31_70b", tables).config.num_layers == 80
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for place in (tmp_path, tmp_path / "config.json"):
        assert models.find_model(str(place), tables).config.num_layers == 4
    with pytest.raises(ValueError, match=r"no model 'llama9'; there are .*llama31_70b.* hub id"):
        models.find_model("llama9", tables)
    (tmp_path / "config.json").write_text('{"model_type": "walrus"}')
    with pytest.raises(ValueError, match="walrus"):
        models.find_model(str(tmp_path), tables)


def test_last_layers_represent_the_others():
    tables = compile_matrix.load_matrix()["models"]
    whole = models.find_model("deepseek_v3", tables)
    assert whole.config.layer(0).experts is None and whole.config.layer(60).experts is not None
    part = whole.with_layers(2).config
    assert part.num_layers == 2 and all(part.layer(i).experts is not None for i in range(2))


def test_flags_change_a_preset():
    model = models.find_model("llama31_70b", compile_matrix.load_matrix()["models"])
    preset = options.engine_config(model, options.PlanRequest("llama31_70b_v5e16"))
    assert preset.mesh == MeshConfig(tensor=16) and preset.max_model_len == 32768
    asked = options.PlanRequest(
        "llama31_70b_v5e16", "pipe=2,tensor=8", "int8", 4096, overrides=["seed=1"]
    )
    changed = options.engine_config(model, asked)
    assert changed.mesh == MeshConfig(pipe=2, tensor=8) and changed.quantize == "int8"
    assert (changed.max_model_len, changed.seed, changed.scheduler) == (4096, 1, preset.scheduler)
    bare = options.engine_config(model, options.PlanRequest())
    assert (bare.max_model_len, bare.dtype, bare.scheduler.max_num_seqs) == (8192, "bfloat16", 64)
    for context in (1, 200_000):
        with pytest.raises(ValueError, match="llama31_70b takes 2 to 131,072 tokens"):
            options.engine_config(model, options.PlanRequest(context=context))


def test_mesh_mismatch_error_suggests_sizes(monkeypatch):
    with pytest.raises(MeshError, match=r"the mesh has 8 devices .* there are 4"):
        program(monkeypatch, "v5e:2x2", LLAMA, mesh="tensor=8")
    with pytest.raises(MeshError, match=r"4 layers, which pipe 8 does not divide; .* 1, 2, 4"):
        program(monkeypatch, "v5e:2x4", LLAMA, mesh="pipe=8")


@pytest.fixture
def compiler(monkeypatch) -> Answers:
    answers = Answers()
    monkeypatch.setattr(
        compile_steps.StepProgram, "compile", lambda step, *args: answers(step, *args)
    )
    return answers


def test_plan_has_the_compilers_memory_and_all_layers_sums(monkeypatch, compiler, capsys):
    step = program(monkeypatch, "v5e:2x2", EIGHT_LAYERS, mesh="tensor=4")
    plan: Any = plans.make_plan(step, 128, is_whole=True)
    assert plan.fits and plan.layers_compiled == 8 and plan.rows == 4
    assert plan.tokens_cached == 512 == 64 * plan.num_pages  # all that 4 rows can use
    assert plan.memory["temporaries"] == KIB and plan.memory["other_state"] == KIB
    assert (8, 32, plan.num_pages) in compiler.asked  # the largest step, whole, with all its pages
    assert {(layers, bucket) for layers, bucket, _ in compiler.asked} == {
        (4, 32), (8, 32), (2, 4), (4, 4),
    }  # fmt: skip
    for figures in (plan.decode, plan.prefill):
        assert figures.traffic.by_kind["all-reduce"]["count"] == 2 * 8 + 1
    assert (plan.decode.load.rows, plan.prefill.load.new, plan.prefill.load.rows) == (4, 32, 1)
    assert plan.decode.tokens_per_second == pytest.approx(4 / plan.decode.bound.seconds)
    text = report.as_text(step, 128, plan)
    assert "tensor=4" in text and "all 8 layers compiled" in text and "17 all-reduce" in text
    assert "as many as requests can fill, 512 tokens" in text and "replica" not in text
    links = plan.decode.bound.links * 1e3
    assert f"max(weights + cache, products), and about {links:,.3f} ms of links; most" in text
    said = capsys.readouterr().err
    assert said.count("compiling the largest step of tiny, 8 layers, 32 tokens (tensor=4") == 1
    assert said.count("compiling the decode step") == 2
    assert json.loads(json.dumps(report.as_json(step, 128, plan)))["decode"]["bound"]["seconds"]


def test_few_layers_are_extrapolated(monkeypatch, compiler):
    step = program(monkeypatch, "v5e:2x2", EIGHT_LAYERS, mesh="tensor=4")
    whole = plans.make_plan(step, 128, is_whole=True)
    part = plans.make_plan(step, 128, is_whole=False)
    assert dataclasses.replace(part, layers_compiled=8) == whole and part.layers_compiled == 4


def test_pipeline_splits_rows_and_replicas_add_up(monkeypatch, compiler):
    step = program(monkeypatch, "v5e:2x4", EIGHT_LAYERS, mesh="data=2,pipe=2,tensor=2")
    plan: Any = plans.make_plan(step, 128, is_whole=False)
    assert plan.rows == 4 and plan.decode.load.rows == 2
    assert plan.decode.tokens_per_second == pytest.approx(2 * 2 / plan.decode.bound.seconds)
    assert plan.decode.traffic.by_kind["all-reduce"]["count"] == 2 * 4 + 1
    text, found = report.as_text(step, 128, plan), report.as_json(step, 128, plan)
    assert "one of 2 micro-batches" in text and "4 at once in each of 2 replicas" in text
    assert "tokens/s of 2 replicas together" in text and found["replicas"] == 2
    of_one = found["decode"]["tokens_per_second_a_replica"]
    assert found["decode"]["tokens_per_second"] == pytest.approx(2 * of_one)


def test_compiler_refusal_is_the_reason(monkeypatch, compiler):
    step = program(monkeypatch, "v5e:2x2", EIGHT_LAYERS, mesh="tensor=4")
    compiler.refuses_layers = 8
    plan: Any = plans.make_plan(step, 128, is_whole=True)
    assert not plan.fits and plan.reason == "RESOURCE_EXHAUSTED: Used 17.74G of 15.75G hbm"
    assert "does not fit: RESOURCE_EXHAUSTED" in report.as_text(step, 128, plan)


def test_weights_that_leave_no_page_are_compiled_whole(monkeypatch, compiler):
    step = program(monkeypatch, "v5e:2x2", EIGHT_LAYERS, mesh="tensor=4")
    small(step, step.weight_bytes + KIB)
    plan: Any = plans.make_plan(step, 128, is_whole=True)
    assert plan.reason == "by the compiler's account a device needs 0.00 GB, and has 0.00 GB"
    small(step, step.weight_bytes + 2 * KIB + step.page_bytes)
    plan: Any = plans.make_plan(step, 128, is_whole=True)
    assert (
        "a tenth of the rest is reserved, and what remains holds no page of 64 tokens"
        in plan.reason
    )
    small(step, step.weight_bytes + KIB)
    compiler.refuses_layers = 8
    assert "17.74G" in plans.make_plan(step, 128, is_whole=False).reason


def test_too_large_weights_are_refused_with_suggestions(monkeypatch, compiler):
    model = models.find_model("llama31_70b", compile_matrix.load_matrix()["models"])
    asked = options.PlanRequest(context=8192)
    place = chip(monkeypatch, "h100:8")
    step = compile_steps.StepProgram(place, model, options.engine_config(model, asked))
    plan: Any = plans.make_plan(step, 8192, is_whole=False)
    assert compiler.asked == [] and not plan.fits
    text = report.as_text(step, 8192, plan)
    assert "one device of its 8, bfloat16" in text and "--mesh=tensor=8, --quant=" in text
    assert "does not fit: weights of 141.11 GB a device, which has 63.7" in text
    assert "--search for what fits" in text and "a shorter" not in text
    compiler.refuses_layers = 80
    assert "17.74G" in plans.make_plan(step, 8192, is_whole=True).reason


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({}, "try --mesh=tensor=8, --quant"),
        ({"num_attention_heads": 4}, "try --mesh=pipe=2,tensor=4, --quant"),
        ({"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
         "try --mesh=data=2,pipe=4, --quant"),
        ({"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3,
          "num_hidden_layers": 3}, "try --quant=int8 or int4, --search for what"),
    ],
)  # fmt: skip
def test_suggested_mesh_divides_the_model(monkeypatch, changes, way):
    assert report.suggest_fix(program(monkeypatch, "v5e:2x4", LLAMA | changes)).startswith(way)


def test_overlap_without_sums_is_refused(monkeypatch):
    model = models.model_from_table("tiny", LLAMA)
    asked = options.PlanRequest(mesh="tensor=4", context=128, overrides=["mesh.overlap=true"])
    config = options.engine_config(model, asked)
    place = chip(monkeypatch, "v5e:2x2")
    assert plans.step_program(place, model, config).model.layout.overlaps
    place.devices = [dataclasses.replace(d, platform="gpu") for d in place.devices]
    for refused, more in ((plans.step_program, ()), (search_module.estimate_candidate, (128,))):
        with pytest.raises(MeshError, match=r"on a GPU .* steps of 2048 tokens over 4 devices"):
            refused(place, model, config, *more)


def test_plan_states_the_source_of_its_pages(monkeypatch, compiler):
    step = program(monkeypatch, "v5e:2x2", EIGHT_LAYERS, mesh="tensor=4")
    small(step, step.weight_bytes + 2 * KIB + 6 * step.page_bytes)
    assert plans.make_plan(step, 128, is_whole=False).pages_from.startswith("90 % of what weights")
    step = program(monkeypatch, "v5e", LLAMA, overrides=["cache.num_pages=4"])
    assert plans.make_plan(step, 128, is_whole=False).pages_from == "cache.num_pages"


def test_pool_below_one_request_does_not_fit(monkeypatch, compiler):
    step = program(monkeypatch, "v5e:2x2", EIGHT_LAYERS, mesh="tensor=4")
    small(step, step.weight_bytes + 2 * KIB + 2 * step.page_bytes)
    plan: Any = plans.make_plan(step, 128, is_whole=False)
    assert not plan.fits and plan.tokens_cached == 64
    assert "a request of 128 tokens" in plan.reason and "room for 64" in plan.reason


def test_search_tries_every_mesh():
    found = list(search_module.meshes(4, MeshConfig()))
    assert len(found) == len(set(found)) == 1 + 4 + 10  # 1, 2 and 4 devices a replica, four axes
    assert all(mesh.num_devices == 4 for mesh in found)


@pytest.fixture(scope="module")
def listed() -> tuple[Any, Any, Any]:
    """A model that fits one chip quantized only, and what the search lists of it."""
    place, model, config = on_four_chips(EIGHT_LAYERS, 700 * KIB)
    return place, model, search_module.candidates(place, model, config, (None, "int8"), 128)


def test_search_sorts_by_devices_then_speed(listed):
    place, model, found = listed
    order = [(c.num_devices, -c.tokens_per_second) for c in found]
    assert order == sorted(order)
    for c in found:
        assert c.replicas * c.num_devices == 4
        assert c.tokens_per_second == pytest.approx(c.replicas * c.tokens_per_second_a_replica)
    kinds = {(c.num_devices, c.config.quantize) for c in found}
    assert (1, "int8") in kinds and (1, None) not in kinds and (2, None) in kinds
    assert all(c.config.mesh.expert == 1 for c in found), "it has no experts"
    assert all(c.weight_bytes < 700 * KIB for c in found)
    assert all((c.decode.links > 0) == (c.num_devices > 1) for c in found), "seq sends too"
    exact = compile_steps.StepProgram(place, model, found[-1].config)
    assert found[-1].weight_bytes == exact.weight_bytes


def test_search_splits_experts():
    four_chips: Any = on_four_chips(MIXTRAL, 2**30)
    more: Any = (None,), 128
    found = search_module.candidates(*four_chips, *more)
    assert {c.config.mesh.expert for c in found} == {1, 2, 4}


def test_search_compiles_the_cheapest_until_some_fit(listed, compiler, monkeypatch):
    place, model, by_arithmetic = listed
    monkeypatch.setattr(search_module, "candidates", lambda *args: list(by_arithmetic))
    compiler.temporaries = 200 * KIB
    found: Any = search_module.search(place, model, EngineConfig(), (), 128, num_compiled=2)
    asked = [c for c in found if c.plan is not None]
    assert asked == found[: len(asked)] and [c.plan.fits for c in asked].count(True) == 2
    assert not asked[0].plan.fits and asked[-1].plan.fits, "of one device none fits so"
    text = report.search_text(place, model, 128, found)
    head, line = (text.splitlines()[at].split() for at in (1, 2))
    assert head[:3] == ["devices", "replicas", "mesh"] and line[:2] == ["1", "4"]
    assert "compiled" in text and "does not fit: " in text and "by arithmetic" in text
    assert len(json.loads(json.dumps(report.search_json(found)))) == len(found)
    assert "no mesh of these devices holds it" in report.search_text(place, model, 128, [])


def test_a_plan_for_two_cpu_devices_from_end_to_end(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1}))
    out = tmp_path / "plan.json"
    done = run(
        f"--model={tmp_path}", "--target=cpu:2", "--mesh=tensor=2", "--context=64", "--rows=2",
        "--chunk=2", f"--json={out}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all 1 layers compiled" in done.stdout and "decode step: 2 rows" in done.stdout
    found = json.loads(out.read_text("utf-8"))
    assert found["fits"] and found["tokens_cached"] == 128 and found["rows"] == 2
    assert found["decode"]["traffic"]["by_kind"]["all-reduce"]["count"] >= 2
    assert found["memory"]["temporaries"] > 0


WRONG = {
    "--set=attention_backend=hopper": "'hopper', which runs only steps with prefill chunks",
    "--flagfile={overlapped}": "mesh.overlap is true, but products of int8 weights are made in",
    "--flagfile={declined}": "no backend of rope_and_write took the call: tpu: Mosaic",
    "--mesh=tensr=16": "--mesh has 'tensr=16'",
    "--compiled=0": "--compiled=0",
    "--nosuch": "Unknown command line flag 'nosuch'",
    "--model=": "--model and --target are needed",
    "--model=/nonexist/x": "is not a file, a directory or a hub id",
    "--json=/nonexist/a.json": "is in no directory",
    "--json=/": "is a directory",
    "--model={encoder}": "is an encoder (bert): plans are of models that generate",
    "--model={large}": "the sizes are beyond what can be planned",
}


def test_wrong_options_are_one_line_and_exit_code_2(tmp_path):
    bert = LLAMA | {"model_type": "bert", "type_vocab_size": 2, "hidden_act": "gelu"}
    places = {"encoder": bert, "large": LLAMA | {"vocab_size": 10**16}}
    for name, keys in places.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(keys))
    given = ("tiny", "declined", "overlapped")
    paths = {name: tmp_path / f"{name}.json" for name in (*places, *given)}
    paths["tiny"].write_text(json.dumps(LLAMA))
    declined = f"--model={paths['tiny']}\n--set=attention_backend=tpu\n--set=dtype=float16\n"
    paths["declined"].write_text(declined)
    overlapped = "--nosearch\n--mesh=tensor=2\n--quant=int8\n--chunk=64\n--set=mesh.overlap=true\n"
    paths["overlapped"].write_text(f"--model={paths['tiny']}\n{overlapped}")
    flags = [flag.format(**paths) for flag in WRONG]
    for (code, said), flag, reason in zip(answers_to(flags), flags, WRONG.values(), strict=True):
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        assert code == 2 and len(lines) == 1 and reason in lines[0], (flag, said)
        assert ("compiling" in said) == ("declined" in flag), (flag, said)
