"""Products, linear layers and RoPE's checks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.nn.layers import Linear, Numerics, project
from jaxinfer.nn.rope import DynamicNtk, Llama3, Rope, Unscaled

DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_project_equals_a_float64_product(num_tokens, is_transposed, dtype):
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.standard_normal((num_tokens, 24)), dtype)
    weight = jnp.asarray(generator.standard_normal((24, 40)), dtype)
    given = weight.T if is_transposed else weight
    found = project(x, given, is_transposed=is_transposed, accumulate=jnp.dtype("float32"))
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    assert found.shape == (num_tokens, 40) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_inputs", "matrix"), [(1, (3, 40)), (2, (12, 10))])
def test_linear_stores_its_weight_as_a_matrix(num_inputs, matrix, dtype):
    dims, axes = (3, 4, 2, 5), ("heads", "head_dim", "model", "ffn")
    layer = Linear(dims, axes, Numerics(jnp.dtype(dtype)), num_inputs=num_inputs, has_bias=True)
    inputs, outputs = dims[:num_inputs], dims[num_inputs:]
    assert layer.weight[...].shape == matrix and layer.bias is not None
    weight = np.random.default_rng(0).standard_normal(dims)
    layer.weight[...] = jnp.asarray(weight.reshape(matrix), dtype)
    layer.bias[...] = jnp.ones(outputs, dtype)
    found = layer(jnp.ones((7, *inputs), dtype), accumulate=jnp.dtype("float32"))
    expected = weight.sum(axis=tuple(range(num_inputs))) + 1
    np.testing.assert_allclose(found, np.broadcast_to(expected, (7, *outputs)), 2e-2, 5e-2)


@pytest.mark.parametrize(
    ("theta", "dim", "scaling", "named"),
    [
        (1e4, 16, Llama3(8.0, 4.0, 4.0, 64), "low_freq_factor is 4.0.*high_freq_factor"),
        (1e4, 2, DynamicNtk(2.0, 64), "2 dimensions"),
        (0.0, 16, Unscaled(), "theta is 0"),
    ],
)
def test_invalid_rope_is_refused(theta, dim, scaling, named):
    with pytest.raises(ValueError, match=named):
        Rope(theta, dim, scaling)
