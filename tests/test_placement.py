"""A parameter on its devices: equal to the whole one, each device with its own slice, read once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from family_bench import make_tensors, recorded, write_huggingface
from family_groups import GROUPS

from jaxinfer.loading import CheckpointError, open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.checkpoint import aligned_empty, is_aligned
from jaxinfer.loading.placement import Piece, copy_finite, place
from jaxinfer.nn.layers import Numerics

FLOAT32 = np.dtype(np.float32)
SCRIPT = Path(__file__).parent / "eight_devices.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """What a process with eight devices found; see tests/eight_devices.py."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("eight"))],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_eight_devices_hold_the_weights_of_one(found):
    assert found["loaded"] == {"equal": True, "cut": found["num_arrays"]}


def test_stacked_tensors_are_cut_between_them_and_replicas_are_whole(found):
    assert found["stacked"] and found["r"]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux' /proc")
@pytest.mark.parametrize("name", ["mapped", "mapped_transposed"])
def test_a_device_touches_its_own_rows_of_the_file(name, found):
    # Of eight parts; a system maps a file's pages in runs, so somewhat more than its own.
    assert 1 <= found[name] < 2


def test_random_weights_are_the_same_however_they_are_cut(found):
    assert found["random"]["equal"]


@pytest.mark.parametrize("name", ["restored", "quantized", "packed"])
def test_restored_and_quantized_weights_are_cut_alike(name, found):
    assert found[name]["equal"]
    assert found[name]["cut"] >= found["num_arrays"] - 1


def test_each_part_of_a_converted_checkpoint_is_read_once(found):
    assert 1 <= found["bytes_read"] < 1.5  # 8 if each device read the whole


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shape", [(130, 70), (3, 130, 70), (5,), ()])
def test_copying_keeps_the_values_in_any_order(dtype, shape):
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(np.float32) % 100
    for turned in (values, values.T, values.swapaxes(0, -1) if values.ndim else values):
        buffer = aligned_empty(turned.shape, np.dtype(dtype))
        assert is_aligned(buffer)
        copy_finite(buffer, turned, "w")
        np.testing.assert_array_equal(buffer.astype(np.float32), turned)


def test_a_view_of_a_file_is_copied_and_a_new_array_is_kept():
    fresh = aligned_empty((4, 4), FLOAT32)
    fresh[:] = 1
    [kept] = [place((4, 4), FLOAT32, [Piece("w", None, lambda: fresh)])]
    mapped = fresh.copy()
    mapped.flags.writeable = False
    copied = place((4, 4), FLOAT32, [Piece("w", None, lambda: mapped)])
    assert kept.unsafe_buffer_pointer() == fresh.ctypes.data
    assert copied.unsafe_buffer_pointer() != mapped.ctypes.data


def test_two_tensors_of_one_parameter_are_both_named(tmp_path):
    """Files may store GPT-2 with the prefix `transformer.` or without; not with both."""
    case = GROUPS["gpt"]["gpt2"]
    tensors = make_tensors(recorded("gpt")["gpt2"]["shapes"], case.seed)
    bare = next(name for name in tensors if name.removeprefix("transformer.") == "wte.weight")
    other = "wte.weight" if bare != "wte.weight" else "transformer.wte.weight"
    tensors[other] = tensors[bare].copy()
    checkpoint = open_checkpoint(write_huggingface(case, tensors, tmp_path))
    with pytest.raises(CheckpointError, match=r"wte\.weight and .*wte\.weight are both the same"):
        load_weights(checkpoint, functional_model(checkpoint, Numerics()))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("is_kept", [True, False])
def test_what_is_not_finite_is_refused_by_name(bad, is_kept):
    dtype = np.dtype(np.float16) if bad == 1e30 else FLOAT32
    values = aligned_empty((2, 2), FLOAT32)
    values[:] = [[1, bad], [1, 1]]
    values.flags.writeable = is_kept
    with pytest.raises(CheckpointError, match="w holds 1 values that are NaN or infinite as float"):
        place((2, 2), dtype, [Piece("w", None, lambda: values)])
