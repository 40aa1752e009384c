"""The TPU kernel of products with quantized weights: races, tilings, chips that multiply no narrow
types, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as emulator
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.kernels.quantized_matmul import quantize, quantized_matmul, tpu
from jaxinfer.kernels.quantized_matmul.tpu import TpuQuantizedTiling
from tests.support.quantized_cases import EMULATED, check, make_case, program_of

pytestmark = pytest.mark.conformance

FEW, MANY = TpuQuantizedTiling(32, 128, 128), TpuQuantizedTiling(64, 128, 256)


@pytest.fixture
def emulate(monkeypatch):
    """Set the emulator's switches and the tiling of the tests' TPU backend."""

    def choose(tiling: TpuQuantizedTiling | None = None, **switches: Any) -> None:
        program_of("tpu").clear_cache()
        backend = partial(
            tpu.quantized_matmul, interpret=pltpu.InterpretParams(**switches), tiling=tiling
        )
        monkeypatch.setitem(EMULATED, "tpu", backend)

    yield choose
    program_of("tpu").clear_cache()


def test_tiles_do_not_race(emulate):
    emulate(FEW, detect_races=True, num_cores_or_threads=2)
    check(make_case("int4 zeros", T=40, D=512, F=200, group_size=128), "tpu")
    races: Any = emulator.races
    assert not races.races_found


@pytest.mark.matrix
# Few tokens: a group's scale is applied to its sums. Many: to its weights, once for all tokens.
@pytest.mark.parametrize("tiling", [FEW, MANY], ids=str)
@pytest.mark.parametrize("weights", ["int8", "int4 zeros"])
def test_tilings_match_the_formula(emulate, tiling, weights):
    emulate(tiling)
    x_dtype, group_size = ("bfloat16", 32) if weights == "int8" else ("float32", 128)
    check(make_case(weights, T=70, D=512, F=130, group_size=group_size, x_dtype=x_dtype), "tpu")


@pytest.mark.parametrize("group_size", [128, 512])
def test_int8_sums_within_and_across_groups_are_exact(emulate, group_size):
    emulate(MANY)
    check(make_case("int4", T=33, D=512, F=130, group_size=group_size, x_dtype="int8"), "tpu")


@pytest.mark.parametrize(("weights", "x_dtype"), [("int4", "int8"), ("float8", "float8_e4m3fn")])
def test_unsupported_type_is_multiplied_as_bfloat16(weights, x_dtype):
    """The result is exact: both operands fit bfloat16, and the sums of their products fit
    float32."""
    case = make_case(weights, group_size=32, x_dtype=x_dtype)
    assert tpu._operand(x_dtype) == "bfloat16"
    check(case, "tpu")
    text = str(_traced("TPU v4", case.x, case.weight, x_scale=case.x_scale))
    assert "bf16[5,128]" in text


@pytest.mark.parametrize(
    ("kind", "dtype", "operand"),
    [
        ("TPU v4", "int8", "bfloat16"),
        ("TPU v5 lite", "int8", "int8"),
        ("TPU v5", "float8_e4m3fn", "bfloat16"),
        ("TPU v6 lite", "int8", "int8"),
        ("TPU7x", "int8", "bfloat16"),
        ("TPU7x", "float8_e4m3fn", "float8_e4m3fn"),
        ("TPU7x", "bfloat16", "bfloat16"),
    ],
)
def test_operand_type_of_each_chip(kind, dtype, operand):
    with jax.sharding.use_abstract_mesh(_mesh(kind)):
        assert tpu._operand(dtype) == operand


@pytest.mark.parametrize(
    ("D", "group_size", "row_tile", "rows"),
    [
        (4096, 128, 1024, 1024),
        (14336, 14336, 1024, 1024),
        (3584, 128, 1024, 512),  # 7 x 512, by whole packs of 256 rows
        (2880, 32, 1024, 2880),  # no multiple of 128 divides it
        (4096, 2048, 4096, 4096),
    ],
)
def test_row_tile_has_whole_packs_and_groups(D, group_size, row_tile, rows):
    weight = jax.eval_shape(
        lambda w: quantize(w, 4, group_size), jax.ShapeDtypeStruct((D, 256), jnp.float32)
    )
    x = jax.ShapeDtypeStruct((8, D), jnp.bfloat16)
    assert tpu._tiles(TpuQuantizedTiling(32, 128, row_tile), x, weight) == (8, 128, rows)


def test_candidates_fit():
    x = jax.ShapeDtypeStruct((2048, 4096), jnp.bfloat16)
    weight = jax.eval_shape(
        lambda w: quantize(w, 4, 128, True), jax.ShapeDtypeStruct((4096, 6144), jnp.float32)
    )
    tilings = tpu.candidates(x, weight, activation_dtype=None)
    assert tpu.heuristic(x, weight) in tilings and len(tilings) > 10
    assert tpu.tiling_key(x, weight) == "T=2048 D=4096 F=6144 int4/128 zeros bfloat16"


DECLINED: dict[str, dict[str, Any]] = {
    "float16": {"x_dtype": "float16"},
    "groups of 16 rows": {"group_size": 16},
    "VMEM has room for": {"D": 97 * 1000},  # no multiple of 128 divides it
}


@pytest.mark.parametrize("reason", DECLINED)
def test_tpu_declines_with_the_reason(reason):
    options = {"D": 128, "group_size": None, "x_dtype": "float32", **DECLINED[reason]}
    x = jax.ShapeDtypeStruct((5, options["D"]), options["x_dtype"])
    weight = jax.eval_shape(
        lambda w: quantize(w, 8, options["group_size"]),
        jax.ShapeDtypeStruct((options["D"], 512), jnp.float32),
    )
    with pytest.raises(NotImplementedError, match=reason):
        _traced("TPU v5", x, weight)


@pytest.mark.parametrize("fields", [(8, 128, 128), (32, 100, 128), (32, 128, 64)])
def test_invalid_tilings_are_refused(fields):
    with pytest.raises(ValueError, match="must be a multiple of"):
        TpuQuantizedTiling(*fields)


def _mesh(kind: str) -> AbstractMesh:
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    return AbstractMesh((1,), ("device",), abstract_device=device)


def _traced(kind: str, x: Any, weight: Any, **options: Any) -> Any:
    """Return the call by the TPU backend, traced for a chip."""
    abstract = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    arguments = jax.tree.map(abstract, (x, weight, options))
    with jax.sharding.use_abstract_mesh(_mesh(kind)):
        call = lambda x, weight, options: quantized_matmul(x, weight, backend="tpu", **options)
        return jax.make_jaxpr(call)(*arguments)
