"""Placement of a parameter on its device: memory order, copies, and finite values."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.loading import CheckpointError, open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.checkpoint import aligned_empty, is_aligned
from jaxinfer.loading.placement import Piece, copy_checked, place
from jaxinfer.loading.targets import LoadTarget
from jaxinfer.models.functional import ParameterSpec
from jaxinfer.nn.layers import Numerics
from tests.support.family_bench import make_tensors, recorded, write_huggingface
from tests.support.family_groups import GROUPS

FLOAT32 = np.dtype(np.float32)


def target(shape: tuple[int, ...], dtype: Any) -> LoadTarget:
    spec = ParameterSpec("w", shape, dtype, shape, ("model",) * len(shape))
    return LoadTarget(spec, (spec,))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shape", [(130, 70), (3, 130, 70), (5,), ()])
def test_copy_keeps_values_in_any_memory_order(dtype, shape):
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(np.float32) % 100
    for view in (values, values.T, values.swapaxes(0, -1) if values.ndim else values):
        buffer = aligned_empty(view.shape, np.dtype(dtype))
        assert is_aligned(buffer)
        copy_checked(buffer, view, "w")
        np.testing.assert_array_equal(buffer.astype(np.float32), view)


def test_file_view_is_copied_and_new_array_is_kept():
    fresh = aligned_empty((4, 4), FLOAT32)
    fresh[:] = 1
    [kept] = [place(target((4, 4), FLOAT32), [Piece("w", (), lambda: fresh)])]
    mapped = fresh.copy()
    mapped.flags.writeable = False
    copied = place(target((4, 4), FLOAT32), [Piece("w", (), lambda: mapped)])
    assert kept.unsafe_buffer_pointer() == fresh.ctypes.data
    assert copied.unsafe_buffer_pointer() != mapped.ctypes.data


def test_two_tensors_of_one_parameter_are_refused_by_name(tmp_path):
    """Files may store GPT-2's tensors with or without the prefix `transformer.`, but not both."""
    case = GROUPS["gpt"]["gpt2"]
    tensors = make_tensors(recorded("gpt")["gpt2"]["shapes"], case.seed)
    bare = next(name for name in tensors if name.removeprefix("transformer.") == "wte.weight")
    other = "wte.weight" if bare != "wte.weight" else "transformer.wte.weight"
    tensors[other] = tensors[bare].copy()
    checkpoint = open_checkpoint(write_huggingface(case, tensors, tmp_path))
    with pytest.raises(CheckpointError, match=r"wte\.weight and .*wte\.weight belong to the same"):
        load_weights(checkpoint, functional_model(checkpoint, Numerics()))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("is_kept", [True, False])
def test_non_finite_values_are_refused_by_name(bad, is_kept):
    dtype = np.dtype(np.float16) if bad == 1e30 else FLOAT32
    values = aligned_empty((2, 2), FLOAT32)
    values[:] = [[1, bad], [1, 1]]
    values.flags.writeable = is_kept
    with pytest.raises(CheckpointError, match="w holds 1 values that are NaN or infinite as float"):
        place(target((2, 2), dtype), [Piece("w", (), lambda: values)])
