"""Compute sums on eight CPU devices and print the results as JSON.

Used by tests/parallel/test_collectives.py.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.kernels.quantized_matmul import QuantArray
from jaxinfer.nn.layers import Linear, Numerics
from jaxinfer.nn.quantized import QuantWeight
from jaxinfer.sampling.params import MAX_LOGPROBS
from jaxinfer.sharding import compressed, products
from jaxinfer.sharding.rules import Layout
from jaxinfer.tools.compile_gate import collectives as counts
from jaxinfer.tools.compile_gate.text import parse_hlo
from tests.support import tiny_plans

AXES = ("expert", "tensor")  # with 2 and n / 2 devices


class Found:
    """The results of a function on n devices, [n, ...], and the collectives of its program."""

    def __init__(self, n: int, function: Any, specs: Any, *arrays: Any):
        mesh = Mesh(np.array(jax.devices()[:n]).reshape(2, n // 2), AXES)
        run = jax.shard_map(
            lambda *parts: function(*parts)[None],
            mesh=mesh,
            in_specs=specs,
            out_specs=PartitionSpec(AXES),
            check_vma=False,
        )
        place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
        placed = tuple(map(place, arrays, specs))
        program = jax.jit(run).lower(*placed).compile()
        results = np.asarray(program(*placed)).astype(np.float64)
        self.result = results[0]
        self.is_same = all(np.array_equal(self.result, r, equal_nan=True) for r in results)
        self.module = parse_hlo(program.as_text() or "")
        self.collectives = counts.collectives(self.module)

    @property
    def counted(self) -> dict[str, int]:
        return {kind: found["count"] for kind, found in self.collectives.items()}


def relative(out: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(out - reference) / np.linalg.norm(reference))


def summed(n: int, x: np.ndarray, dtype: Any = jnp.float32) -> Found:
    add = lambda part: compressed.compressed_sum(part[0].astype(dtype), AXES)
    return Found(n, add, (PartitionSpec(AXES),), x)


def compressed_sums() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found = {}
    for name, n, shape, dtype, spread in (
        ("2", 2, (16, 4096), jnp.float32, 0),
        ("4", 4, (16, 4096), jnp.float32, 0),
        ("8", 8, (16, 4096), jnp.float32, 0),
        ("bfloat16", 8, (16, 4096), jnp.bfloat16, 0),
        ("padded", 8, (3, 1500), jnp.float32, 2),  # 188 numbers per part, in two blocks of 94
    ):
        x = rng.normal(size=(n, *shape)) * np.exp(spread * rng.normal(size=(n, 1, shape[1])))
        x = np.asarray(jnp.asarray(x, dtype)).astype(np.float64)
        one = summed(n, np.asarray(x, np.float32), dtype)
        found[name] = {
            "is_same": one.is_same,
            "error": relative(one.result, x.sum(axis=0)),
            "share_of_bound": worst_of_bound(one.result - x.sum(axis=0), x, n),
            "link_bytes": counts.link_bytes(one.module),
            "sent_bytes": compressed.sent_bytes(*shape, n),
            "counted": one.counted,
        }
    return found


def exact_sum() -> int:
    """Return the bytes that a device sends for an exact sum of case "8" of `compressed_sums`."""
    x = np.zeros((8, 16, 4096), np.float32)
    add = lambda part: products.all_sum(part[0], AXES)
    return counts.link_bytes(Found(8, add, (PartitionSpec(AXES),), x).module)


def worst_of_bound(error: np.ndarray, x: np.ndarray, n: int) -> float:
    """Return the largest error as a share of its bound.

    The bound is 1/126 of the sum of the largest magnitudes that the devices have in the block.
    """
    D = x.shape[-1]
    num_blocks, block = compressed._blocks(D, n)
    pad = n * num_blocks * block - D
    blocks = np.pad(np.abs(x), ((0, 0), (0, 0), (0, pad))).reshape(n, x.shape[1], -1, block)
    bound = blocks.max(axis=-1).sum(axis=0) / 126
    return float((np.abs(error) / np.repeat(bound, block, axis=-1)[:, :D]).max())


def special_values() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(8, 3, 300)).astype(np.float32)
    x[:, 2] = 0
    together = summed(8, x)
    broken = x.copy()
    broken[5, 1, 7] = np.nan
    broken[3, 1, 295] = np.inf
    result = summed(8, broken).result
    return {
        "zeros": bool((together.result[2] == 0).all()),
        "is_independent": bool(np.array_equal(summed(8, x[:, 1:2]).result[0], together.result[1])),
        "hides_non_finite": bool(np.isfinite(result[1, [7, 295]]).any()),
        "spreads_non_finite": bool((~np.isfinite(result[[0, 2]])).any()),
    }


def overlapped() -> dict[str, Any]:
    """Compare overlapped products with float64, and count their collectives."""
    rng = np.random.default_rng(2)
    plain = lambda x, weight: x @ weight
    opaque = lambda x, weight: (x @ weight["values"]) * weight["scale"]
    specs = (PartitionSpec(None, AXES), PartitionSpec(AXES, None))
    found = {}
    for T, F, n in ((1, 48, 8), (13, 48, 8), (16, 48, 2)):
        x = rng.normal(size=(T, 64)).astype(np.float32)
        weight = rng.normal(size=(64, F)).astype(np.float32)
        exact = x.astype(np.float64) @ weight.astype(np.float64)
        wrapped = lambda x, w: products.product_by_tokens(
            opaque, x, {"values": w, "scale": jnp.float32(1)}, AXES
        )
        for name, function in {
            "outputs": lambda x, w: products.product_by_outputs(plain, x, w, AXES),
            "tokens": wrapped,
        }.items():
            one = Found(n, function, specs, x, weight)
            found[f"{name} {T} {n}"] = {
                "is_same": one.is_same,
                "error": relative(one.result, exact),
                "counted": one.counted,
            }
    return found


def choices() -> dict[str, dict[str, int]]:
    """Count the collectives that `overlapped_product` uses for a weight and a number of tokens."""
    whole = lambda x, weight: x @ weight["values"]
    plain = lambda x, weight: x @ weight
    specs = (PartitionSpec(None, AXES), PartitionSpec(AXES, None))
    split = lambda x, w: products.overlapped_product(plain, x, w, AXES)
    uncut = lambda x, w: products.overlapped_product(whole, x, {"values": w}, AXES)
    in_order = lambda x, w: products.overlapped_product(
        whole, x, {"values": w}, AXES, in_order=True
    )
    many = 2 * products.MIN_TOKENS_PER_PART
    given = {
        "array": (2, split, 4, 6),
        "outputs that do not divide": (2, split, 4, 7),
        "no array": (2, uncut, 4, 6),
        "no array, many tokens": (2, uncut, many, 6),
        "no array, many tokens, in order": (4, in_order, 2 * many, 6),
    }
    return {
        name: Found(n, run, specs, np.ones((T, 4), np.float32), np.ones((4, F), np.float32)).counted
        for name, (n, run, T, F) in given.items()
    }


def linears() -> dict[str, Any]:
    """Compare a layer with sharded inputs and a bias with one device, for every kind of sum."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(5, 16, 32)).astype(np.float32)
    weight = rng.normal(size=(512, 256)).astype(np.float32)
    bias = rng.normal(size=256).astype(np.float32)
    exact = x.reshape(5, -1).astype(np.float64) @ weight + bias
    found = {}
    for name, options in {
        "exact": {},
        "int8": {"all_reduce": "int8"},
        "overlap": {"overlaps": True},
        "in order": {},
        "overlap in order": {"overlaps": True},
    }.items():
        layout = Layout.of({"expert": 2, "tensor": 4}, **options)
        numerics = Numerics(batch_invariant=name.endswith("in order"), layout=layout)
        run = partial(linear, numerics)
        specs = (PartitionSpec(None, AXES), PartitionSpec(AXES, None), PartitionSpec())
        one = Found(8, run, specs, x, weight, bias)
        found[name] = {
            "is_same": one.is_same,
            "error": relative(one.result, exact),
            "counted": one.counted,
        }
    return found


def quantized_tokens() -> dict[str, Any]:
    """Compare a layer that quantizes its sharded tokens with one device."""
    rng = np.random.default_rng(4)
    spread = np.exp(2 * rng.normal(size=(16, 32)))  # shards of a token have different maxima
    x = (rng.normal(size=(5, 16, 32)) * spread).astype(np.float32)
    x[3] = 0
    values = rng.integers(-127, 128, size=(512, 256)).astype(np.int8)
    scales = rng.uniform(0.5, 2, size=(1, 256)).astype(np.float32)
    bias = np.zeros(256, np.float32)

    def run(layout: Layout, x: jax.Array, values: jax.Array, scales: jax.Array, bias: jax.Array):
        array = QuantArray(values, scales, None, 8, values.shape[0])
        return linear(Numerics(layout=layout), x, QuantWeight(array, None, None, "int8"), bias)

    alone = np.asarray(run(Layout(), *map(jnp.asarray, (x, values, scales, bias))))
    specs = (PartitionSpec(None, AXES), PartitionSpec(AXES, None), PartitionSpec(), PartitionSpec())
    found = {}
    for overlaps in (False, True):
        layout = Layout.of({"expert": 2, "tensor": 4}, overlaps=overlaps)
        one = Found(8, partial(run, layout), specs, x, values, scales, bias)
        found[str(overlaps)] = {"is_same": one.is_same, "error": relative(one.result, alone)}
    return found


def linear(numerics: Numerics, x: jax.Array, weight: Any, bias: jax.Array) -> jax.Array:
    dims, axes = (16, 32, 256), ("heads", "head_dim", "model")
    layer = Linear(dims, axes, numerics, num_inputs=2, has_bias=True)
    graph, state = nnx.split(layer)
    given = {"weight": weight, "bias": bias}
    state = jax.tree.map_with_path(lambda path, _: given[path[0].key], state)
    return nnx.merge(graph, state)(x)


def layers() -> dict[str, Any]:
    """Return the collectives of an engine step with tensor=8.

    They are listed for each layer, by the operation name in the compiled program, and counted if
    they are as large as the sum of a layer.
    """
    keys = {"model_type": "llama", "hidden_size": 96, "intermediate_size": 128, "vocab_size": 4096}
    keys |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = {
        "mesh": {"tensor": 8},
        "dtype": "float32",
        "cache": {"page_size": 16},
        "scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 4},
        "min_bucket": 32,
    }
    whole = tiny_plans.on_cpus(8, keys, config)
    T, D = 32, 96
    found = counts.find_collectives(parse_hlo(whole.compile(T, 8).text))
    in_layer = lambda i: (one for one in found if f"block_{i}/" in one.op_name)
    return {
        "per_layer": [[(one.kind, one.bytes) for one in in_layer(i)] for i in range(2)],
        "sum_bytes": T * D * 4,
        "large": Counter(one.kind for one in found if one.bytes == T * D * 4),
        "largest": max(one.bytes for one in found),
        # For prompt logprobs, each device sends its likeliest tokens for every position.
        "candidate_bytes": T * 8 * MAX_LOGPROBS * (4 + 4),
        "head_bytes_per_device": 96 * 4096 * 4 // 8,
    }


if __name__ == "__main__":
    checks = (
        compressed_sums,
        exact_sum,
        special_values,
        overlapped,
        choices,
        linears,
        quantized_tokens,
        layers,
    )
    print(json.dumps({check.__name__: check() for check in checks}))
