"""Calling a kernel's case: backends, more keywords, and options that are arrays."""

from __future__ import annotations

from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.dispatch import dispatch
from jaxinfer.kernels.triton_launch import TritonLaunch
from jaxinfer.tools import kernel_calls as calls
from jaxinfer.tools import kernel_cases

KERNEL = SimpleNamespace(arg_names=["x", "y"], __name__="_kernel")


def on_gpu(x, bias, *, scale, launch=None, tiling=None):
    if launch is None:
        raise NotImplementedError("no GPU here")
    [y] = launch(
        TritonLaunch(KERNEL, (tiling or 1,), (x,), (jax.ShapeDtypeStruct(x.shape, x.dtype),))
    )
    return y


BACKENDS = {"xla": lambda x, bias, *, scale: x * scale + bias, "gpu": on_gpu}


def scaled(x, *, bias, scale, backend=None):
    return dispatch("scaled", BACKENDS, backend, x, bias, scale=scale)


def case(**changes: Any) -> Any:
    spec = jax.ShapeDtypeStruct((4,), jnp.float32)
    values: dict[str, Any] = {"function": scaled, "options": {"bias": spec, "scale": 2.0}}
    values |= {"arguments": (spec,), "make": print, "bytes_moved": 1, "flops": 1, "tolerance": 1}
    return kernel_cases.Case(**(values | changes))


def test_array_options_are_split_from_static_ones():
    spec = jax.ShapeDtypeStruct((2,), jnp.int8)
    options = {"scale": 1.0, "bias": spec, "pair": (spec, None), "none": None, "mixed": (spec, 3)}
    dynamic, static = calls.split_options(options)
    assert set(dynamic) == {"bias", "pair"} and set(static) == {"scale", "none", "mixed"}
    call = jax.jit(calls.call_of(case(), "xla"))
    assert np.allclose(call((jnp.ones(4),), {"bias": jnp.ones(4)}), 3)


def test_recorded_launches_use_the_given_tiling():
    assert [launch.grid for launch in calls.record_launches(case(), "gpu", tiling=7)] == [(7,)]
    assert BACKENDS["gpu"] is on_gpu
    with pytest.raises(NotImplementedError, match="no GPU here"):
        calls.call_of(case(), "gpu")((jnp.ones(4),), {"bias": jnp.ones(4)})


def test_missing_backend_is_an_error():
    with (
        pytest.raises(ValueError, match="no backend 'hopper'"),
        calls.backend_with(case(), "hopper"),
    ):
        pass


def test_backend_table_is_found_behind_wrappers():
    wrapped: Any = wraps(scaled)(lambda x, **options: scaled(x, **options))
    assert calls.tables(case(function=partial(wrapped, scale=1.0))) == [BACKENDS]
    with pytest.raises(ValueError, match="no table named BACKENDS"):
        calls.tables(case(function=np.linalg.norm))


def test_platform_gets_its_own_and_neutral_backends():
    found = calls.backend_names(case(backends=("tpu", "gpu", "hopper", "xla")), "gpu")
    assert found == ["gpu", "hopper", "xla"]


def test_large_random_arrays_repeat_a_run_but_no_row():
    spec = jax.ShapeDtypeStruct((5, 2**20), jnp.bfloat16)
    x = kernel_cases.random_array(np.random.default_rng(0), spec)
    assert x.shape == spec.shape and x.dtype == spec.dtype
    assert not (x[0] == x[4]).all() and abs(float(x.astype(np.float32).std()) - 1) < 0.01
    whole = kernel_cases.random_array(
        np.random.default_rng(0), jax.ShapeDtypeStruct((99,), jnp.int8)
    )
    assert whole.dtype == np.int8 and whole.min() < -90 and whole.max() > 90
