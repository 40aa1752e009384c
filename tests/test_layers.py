"""The product that all models are made of."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.nn.layers import project
from jaxinfer.nn.rope import Dynamic, Llama3, Rope, Unscaled

DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_a_product_has_its_tokens_and_their_values(num_tokens, is_transposed, dtype):
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.standard_normal((num_tokens, 24)), dtype)
    weight = jnp.asarray(generator.standard_normal((24, 40)), dtype)
    given = weight.T if is_transposed else weight
    found = project(x, given, is_transposed=is_transposed, accumulate=jnp.dtype("float32"))
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    assert found.shape == (num_tokens, 40) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_contracted_together(dtype):
    x = jnp.ones((1, 3, 4), dtype)
    weight = jnp.ones((3, 4, 2, 5), dtype)
    assert np.array_equal(project(x, weight), np.full((1, 2, 5), 12))


@pytest.mark.parametrize(
    ("theta", "dim", "scaling", "named"),
    [
        (1e4, 16, Llama3(8.0, 4.0, 4.0, 64), "low_freq_factor is 4.0.*high_freq_factor"),
        (1e4, 2, Dynamic(2.0, 64), "2 dimensions"),
        (0.0, 16, Unscaled(), "theta is 0"),
    ],
)
def test_a_rotary_embedding_without_angles_is_refused(theta, dim, scaling, named):
    with pytest.raises(ValueError, match=named):
        Rope(theta, dim, scaling)
