"""The TPU kernel of the cache write: runs, races, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as emulator
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.rope_and_write import BACKENDS, tpu
from jaxinfer.kernels.rope_and_write.tpu import TpuWritePlan
from tests.kernels.test_rope_and_write import Shape, check, make_case

pytestmark = pytest.mark.conformance


def test_fetches_do_not_race_with_writes():
    params = pltpu.InterpretParams(detect_races=True)
    shape = Shape(dtype="bfloat16", cache_dtype="bfloat16", num_heads=2, num_kv_heads=1)
    with mock.patch.dict(BACKENDS, {"tpu": partial(tpu.rope_and_write, interpret=params)}):
        check(make_case(shape, [(3, 5, 1), (1, 0, 32), (6, 17, 9)], num_tokens=48), "tpu")
    races: Any = emulator.races
    assert not races.races_found


@pytest.mark.parametrize(
    ("page", "offset", "expected"),
    [
        # Groups of 4 tokens; pages from 9 on are not stored. (page, group, first, end)
        ([2, 2, 2], [2, 3, 4], [(2, 0, 0, 2), (2, 1, 2, 3)]),
        ([9, 9, 5, 5, 9], [0, 1, 6, 7, 0], [(5, 1, 2, 4)]),
        ([9, 9], [0, 0], [(0, 0, 0, 0)]),
        ([1, 3, 3, 9, 4], [7, 0, 1, 0, 0], [(1, 1, 0, 1), (3, 0, 1, 3), (4, 0, 4, 5)]),
        ([8], [7], [(8, 1, 0, 1)]),
    ],
)
def test_runs_are_the_stored_tokens_of_a_group(page, offset, expected):
    plan = TpuWritePlan(head_dim=64, fold=2, page_rows=4, group=2)
    runs, num_runs = tpu._runs(plan, jnp.asarray(page), jnp.asarray(offset), 9)
    fields = [np.asarray(x)[: int(num_runs)].tolist() for x in runs[:4]]
    assert list(zip(*fields, strict=True)) == expected
    assert all((np.asarray(x) >= 0).all() for x in runs), "empty runs too point at something"


def test_float16_pages_are_declined():
    case = make_case(Shape(cache_dtype="float16"), [(0, 0, 1)], num_tokens=1)
    with pytest.raises(NotImplementedError, match="Mosaic loads no float16"):
        tpu.rope_and_write(*case)
