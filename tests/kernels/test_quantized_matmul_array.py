"""Quantized weights: conversion both ways, size, order in memory, refusals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.quantized_matmul.quant_array import (
    QuantArray,
    dequantize,
    pack,
    pack_rows_for,
    quantize,
    unpack,
)

KINDS = {
    "int8": {"bits": 8},
    "int8 zeros": {"bits": 8, "has_zeros": True},
    "int4": {"bits": 4},
    "int4 zeros": {"bits": 4, "has_zeros": True},
    "float8": {"bits": 8, "is_float": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def weights(*shape, seed=0):
    """Return weights with columns of very different size, one of zeros, one all positive."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3, shape[-1])
    w[..., 0] = 0
    w[..., 1] = abs(w[..., 1]) + 1
    return w.astype(np.float32)


def value(weight: QuantArray, d: int, f: int) -> float:
    """Compute the formula of `quant_array.py` for one weight."""
    if weight.bits == 4:
        half = weight.pack_rows // 2
        run, within = divmod(d, weight.pack_rows)
        byte = int(weight.values[run * half + within % half, f])
        q = byte >> 4 if within >= half else byte & 15
    else:
        q = float(weight.values[d, f])
    j = d // weight.group_size
    zero = weight.middle if weight.zeros is None else float(weight.zeros[j, f])
    return (q - zero) * float(weight.scales[j, f])


@every_kind
@pytest.mark.parametrize("group_size", [None, 8, 40])
def test_dequantize_matches_the_formula_and_stays_close(kind, group_size):
    w = weights(80, 6)
    weight = quantize(w, group_size=group_size, **KINDS[kind])
    weight.check()
    back = np.asarray(dequantize(weight))
    each = [[value(weight, d, f) for f in range(6)] for d in range(80)]
    np.testing.assert_allclose(back, each, rtol=1e-6)
    step = np.repeat(np.asarray(weight.scales), weight.group_size, axis=0)
    bound = abs(w) / 16 + step * 2.0**-9 if weight.is_float else step * 0.5
    has_zeros = weight.zeros is not None  # the zero is rounded too
    assert (abs(back - w) <= bound * (2 if has_zeros else 1) + 1e-6 * abs(w)).all()
    assert (back[:, 0] == 0).all()


@every_kind
def test_numpy_and_jax_quantize_equally(kind):
    w = weights(2, 64, 5)  # a leading axis: experts
    ours = quantize(w, group_size=16, **KINDS[kind])
    theirs = jax.jit(lambda w: quantize(w, group_size=16, **KINDS[kind]))(jnp.asarray(w))
    assert isinstance(ours.values, np.ndarray) and isinstance(theirs.values, jax.Array)
    # A compiler may divide by multiplying: a value halfway goes to one side or the other.
    near = np.asarray(ours.scales).max() * 1.01
    np.testing.assert_allclose(dequantize(ours), dequantize(theirs), atol=near)
    assert np.mean(np.asarray(ours.values) != np.asarray(theirs.values)) < 0.02
    alone = quantize(w[1], group_size=16, **KINDS[kind])
    assert np.array_equal(dequantize(ours)[1], dequantize(alone))


@every_kind
def test_quantize_uses_the_ends_of_the_range(kind):
    w = np.linspace(-3, 3, 512, dtype=np.float32)[:, None]
    weight = quantize(w, **KINDS[kind])
    values = np.asarray(weight.values).astype(np.float32)
    if weight.bits == 4:
        values = unpack(np.asarray(weight.values), weight.pack_rows)
    low, high = {
        "int8": (-127, 127),
        "int8 zeros": (-128, 127),
        "int4": (1, 15),
        "int4 zeros": (0, 15),
        "float8": (-448, 448),
    }[kind]
    assert (values.min(), values.max()) == (low, high)


@pytest.mark.parametrize(
    ("num_rows", "pack_rows"), [(4096, 256), (896, 128), (2880, 64), (256, 256), (6, 2), (2, 2)]
)
def test_unpack_inverts_pack(num_rows, pack_rows):
    assert pack_rows_for(num_rows) == pack_rows
    values = np.random.default_rng(0).integers(0, 16, (3, num_rows, 4), np.uint8)
    packed = pack(values, pack_rows)
    assert packed.shape == (3, num_rows // 2, 4)
    assert np.array_equal(unpack(packed, pack_rows), values)
    assert np.array_equal(unpack(jnp.asarray(packed), pack_rows), values)
    half = pack_rows // 2
    assert np.array_equal(packed[:, :half] & 15, values[:, :half])
    assert np.array_equal(packed[:, :half] >> 4, values[:, half:pack_rows])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"bits": 8}, 1 + 4 / 256),
        ({"bits": 4, "group_size": 128}, 0.5 + 4 / 128),
        ({"bits": 4, "group_size": 32, "has_zeros": True}, 0.5 + 8 / 32),
        ({"bits": 4, "group_size": 32, "scale_dtype": jnp.bfloat16}, 0.5 + 2 / 32),
    ],
)
def test_bytes_per_weight_matches_the_arrays(options, expected):
    weight = quantize(weights(256, 16), **options)
    assert weight.bytes_per_weight == expected
    assert sum(a.nbytes for a in jax.tree.leaves(weight)) == expected * 256 * 16


def test_quant_array_is_a_pytree_under_jit():
    weight = quantize(weights(64, 8), 4, 16, True)
    doubled = jax.jit(lambda w: jax.tree.map(lambda a: a, w))(weight)
    assert isinstance(doubled, QuantArray)
    assert (doubled.bits, doubled.group_size, doubled.pack_rows) == (4, 16, 64)
    assert np.array_equal(dequantize(doubled), dequantize(weight))
    assert (weight.num_rows, weight.num_columns, weight.num_groups) == (64, 8, 4)
    abstract = jax.eval_shape(lambda: weight)
    abstract.check()
    assert abstract.bytes_per_weight == weight.bytes_per_weight


def test_dequantize_to_narrow_types_rounds_once():
    weight = quantize(weights(64, 8), 8, 16)
    wide = dequantize(weight)
    assert np.array_equal(dequantize(weight, jnp.bfloat16), wide.astype(jnp.bfloat16))


REFUSED = {
    "group_size is 24": {"bits": 8, "group_size": 24},
    "group_size is 0": {"bits": 8, "group_size": 0},
    "bits is 3": {"bits": 3},
    "float8 has 8 bits": {"bits": 4, "is_float": True},
    "no zeros": {"bits": 8, "is_float": True, "has_zeros": True},
}


@pytest.mark.parametrize("message", REFUSED)
def test_unquantizable_weights_are_refused(message):
    with pytest.raises(ValueError, match=message):
        quantize(weights(64, 4), **REFUSED[message])


def test_odd_number_of_rows_cannot_be_packed():
    with pytest.raises(ValueError, match="D is 7"):
        quantize(weights(7, 4), 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "values of 5 bits are uint8"),
        ({"bits": 8}, "values of 8 bits are uint8"),
        ({"group_size": 24}, "group_size is 24"),
        ({"scales": np.ones((3, 4), np.float32)}, r"scales have shape \(3, 4\)"),
        ({"zeros": np.ones((4, 3), np.float32)}, r"zeros have shape \(4, 3\)"),
        ({"pack_rows": 0}, "pack_rows is 0"),
        ({"pack_rows": 48}, "pack_rows is 48"),
    ],
)
def test_fields_that_do_not_fit_are_refused(change, message):
    weight = quantize(weights(64, 4), 4, 16)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(weight, **change).check()


def test_float8_with_zeros_is_refused():
    weight = quantize(weights(64, 4), 8, 16, is_float=True)
    with pytest.raises(ValueError, match="float8 values have zeros"):
        dataclasses.replace(weight, zeros=weight.scales).check()
