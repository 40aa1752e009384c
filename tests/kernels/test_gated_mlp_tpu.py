"""The TPU kernels of gated and grouped products: tilings, fetches, and what is not read."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as emulator
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.gated_mlp import tpu as gated
from jaxinfer.kernels.gated_mlp.reference import gated_mlp
from jaxinfer.kernels.grouped_matmul import tpu as grouped
from jaxinfer.kernels.grouped_matmul.reference import grouped_matmul
from jaxinfer.kernels.grouped_matmul.tpu_items import work_list
from jaxinfer.kernels.grouped_matmul.tpu_weights import rows_for
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray, quantize
from tests.support.gated_cases import EMULATOR, assert_close

RACES = pltpu.InterpretParams(detect_races=True)


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def test_gated_kernel_fetches_do_not_race():
    x, weight = normal(40, 256), normal(2, 256, 200, seed=1)
    options: dict[str, Any] = {"activation": "silu", "bias": None}
    out = gated.gated_mlp(
        x, weight, **options, interpret=RACES, tiling=gated.TpuGatedTiling(16, 128, 128)
    )
    assert_close(np.asarray(out), np.asarray(gated_mlp(x, weight, **options), "d"), 1e-5)
    races: Any = emulator.races
    assert not races.races_found


def test_grouped_kernel_fetches_do_not_race():
    x, weights, sizes = normal(40, 256), normal(3, 256, 200, seed=1), jnp.array([5, 0, 30])
    out = grouped.grouped_matmul(
        x, weights, sizes, interpret=RACES, tiling=grouped.TpuGroupedTiling(16, 128, 128)
    )
    ref = np.asarray(grouped_matmul(x, weights, sizes), "d")
    assert_close(np.asarray(out)[:35], ref[:35], 1e-5)
    races: Any = emulator.races
    assert not races.races_found


@pytest.mark.parametrize("tiling", [(16, 512, 384), (48, 128, 128), (32, 256, 256)], ids=str)
def test_tilings_match_the_formula(tiling):
    x, weight = normal(70, 512), normal(2, 512, 300, seed=1)
    options: dict[str, Any] = {"activation": "relu", "bias": normal(2, 300)}
    out = gated.gated_mlp(
        x, weight, **options, interpret=EMULATOR, tiling=gated.TpuGatedTiling(*tiling)
    )
    assert_close(np.asarray(out), np.asarray(gated_mlp(x, weight, **options), "d"), 1e-5)
    sizes = jnp.array([33, 37])
    out = grouped.grouped_matmul(
        x, weight, sizes, interpret=EMULATOR, tiling=grouped.TpuGroupedTiling(*tiling)
    )
    assert_close(np.asarray(out), np.asarray(grouped_matmul(x, weight, sizes), "d"), 1e-5)


@pytest.mark.parametrize(
    ("sizes", "items"),
    [
        # (tile, group, rows) of 6 tiles of 8 rows
        ([8, 8, 8, 8, 8, 8], [(i, i, 8) for i in range(6)]),
        ([3, 0, 7, 0], [(0, 0, 3), (0, 2, 7), (1, 2, 7), *((i, 2, 0) for i in range(2, 6))]),
        ([0, 0, 48, 0], [(i, 2, 48) for i in range(6)]),
        ([0, 0], [(i, 0, 0) for i in range(6)]),
        ([41, 7], [*((i, 0, 41) for i in range(6)), (5, 1, 7)]),
    ],
)
def test_work_list_has_an_item_for_each_tile_of_a_group(sizes, items):
    found = work_list(jnp.array(sizes), 48, 8, EMULATOR)
    assert found.tile.shape == (6 + len(sizes),)
    rows = np.asarray(found.end - found.first)
    listed = list(zip(found.tile.tolist(), found.group.tolist(), rows.tolist(), strict=True))
    assert listed[: len(items)] == items
    assert all(item == (5, items[-1][1], 0) for item in listed[len(items) :])


def test_weight_tiles_end_at_storage_boundaries():
    plain = lambda D: jax.ShapeDtypeStruct((2, D, 256), jnp.bfloat16)
    assert rows_for(plain(4096), 2048) == 2048
    assert rows_for(plain(3584), 2048) == 1792
    assert rows_for(plain(576), 512) == 576  # no multiple of 128 divides it: whole
    grouped_by_128 = QuantArray(
        jax.ShapeDtypeStruct((2, 2048, 256), jnp.uint8),
        jax.ShapeDtypeStruct((2, 32, 256), jnp.float32),
        None,
        bits=4,
        group_size=128,
        pack_rows=256,
    )
    assert rows_for(grouped_by_128, 2048) == 2048  # 8 rows of 16 scales
    assert rows_for(grouped_by_128, 1000) == 4096


GATED = partial(gated.gated_mlp, activation="silu", bias=None)


@pytest.mark.parametrize(
    ("dtype", "weight", "reason"),
    [
        (jnp.float16, normal(2, 128, 128), "Mosaic loads no float16"),
        (jnp.float32, normal(2, 128, 128, dtype=jnp.float16), "Mosaic loads no float16"),
        (jnp.float32, quantize(normal(2, 128, 128), 8, 4), "groups of 4 rows"),
        (jnp.float32, quantize(normal(2, 8, 128), 4), "bytes hold rows 4 apart"),
        (jnp.float32, normal(2, 19997, 128), r"tiles of [0-9.]+ MiB; VMEM has room for 48"),
    ],
)
def test_tpu_declines_with_the_reason(dtype, weight, reason):
    D = weight.num_rows if isinstance(weight, QuantArray) else weight.shape[1]
    x = jnp.zeros((640, D), dtype)
    with pytest.raises(NotImplementedError, match=reason):
        GATED(x, weight)
    with pytest.raises(NotImplementedError, match=reason):
        grouped.grouped_matmul(x, weight, jnp.array([1, 2]))


@pytest.mark.parametrize("tiling_type", [gated.TpuGatedTiling, grouped.TpuGroupedTiling])
def test_invalid_tilings_are_refused(tiling_type):
    with pytest.raises(ValueError, match="tokens 8 is no multiple of 16"):
        tiling_type(8, 128, 128)
    tiling = tiling_type(16, 96, 128)
    with pytest.raises(ValueError, match="tiles of 96 rows do not cover D = 128"):
        if tiling_type is gated.TpuGatedTiling:
            GATED(normal(2, 128), normal(2, 128, 128), tiling=tiling)
        else:
            grouped.grouped_matmul(
                normal(2, 128), normal(2, 128, 128), jnp.array([1, 1]), tiling=tiling
            )
