"""Compute attention with sequence parallelism on eight CPU devices; print the results as JSON.

Used by tests/parallel/test_ring.py.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_num_cpu_devices", 8)

from jaxinfer.kernels.attention_variant import AttentionVariant  # noqa: E402
from jaxinfer.kernels.kv_pages import KVPages  # noqa: E402
from jaxinfer.nn.attention import Attention, AttentionConfig  # noqa: E402
from jaxinfer.nn.cached_attention import attend_to_cache  # noqa: E402
from jaxinfer.nn.layers import Numerics  # noqa: E402
from jaxinfer.nn.ragged import StepRows, ragged_batch  # noqa: E402
from jaxinfer.sharding import zigzag  # noqa: E402
from jaxinfer.sharding.mesh import device_groups  # noqa: E402
from jaxinfer.sharding.rules import ONE_DEVICE, Layout  # noqa: E402
from tests.support import tiny_plans  # noqa: E402

P = jax.sharding.PartitionSpec
T, N, K, H, B, W, NUM_PAGES = 61, 4, 2, 16, 16, 8, 24
# (queries, tokens including cached ones): decodes, chunks, whole prompts, and an empty row.
MIXED = ((1, 33), (1, 1), (1, 100), (0, 0), (23, 64), (17, 17), (5, 90))
# No number of devices divides the 61 tokens of a step.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {
        "window": 19,
        "soft_cap": 3.0,
        "sinks": np.array([0.5, -1.0, 3.0, -8.0], np.float32),
        "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32),
    },
    "quantized": {"dtype": "int8"},
    "latents": {"value_dim": 12},
}


def tables(rows: tuple[tuple[int, int], ...], rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    queries, lengths = (np.array(x, np.int32) for x in zip(*rows, strict=True))
    q_start = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    pages = iter(rng.permutation(NUM_PAGES))
    table = np.full((len(rows), W), 0, np.int32)
    for r, length in enumerate(lengths):
        for index in range(-(-int(length) // B)):
            table[r, index] = next(pages)
    return q_start, lengths, table


def run(count: int, rows, *, is_replicated: bool, dtype="float32", **variant) -> list[Any]:
    """Run one layer's attention on `count` devices; return its output and the written pages."""
    zigzag.MAX_UNSPLIT_TOKENS = 10**9 if is_replicated else 0
    rng = np.random.default_rng(0)
    q_start, kv_len, table = tables(rows, rng)
    is_latent = "value_dim" in variant
    kv_heads = 1 if is_latent else K
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, k, v = draw(T, N, H), draw(T, kv_heads, H), draw(T, kv_heads, H)
    stored = rng.normal(size=(2, NUM_PAGES, kv_heads, B, H))
    scales: Any = (None, None)
    if dtype == "int8":
        stored = rng.integers(-127, 128, stored.shape)
        scales = tuple(jnp.asarray(rng.uniform(0.01, 0.02, stored.shape[1:4]), "f") for _ in "kv")
    k_pages, v_pages = (jnp.asarray(x, dtype) for x in stored)
    pages = KVPages(k_pages, None if is_latent else v_pages, *scales)
    angles = draw(T, H // 2) if not is_latent else None
    write_from = np.zeros(len(rows), np.int32)
    has_shared = kv_len[-1] > np.diff(q_start)[-1]
    if has_shared:  # only the last two tokens are stored, so its pages differ from k and v
        write_from[-1] = kv_len[-1] - 2
    layout = Layout.of({"seq": count}) if count > 1 else ONE_DEVICE
    numerics = Numerics(layout=layout)

    def step(q, k, v, angles, pages, arrays):
        rows = StepRows(*map(jnp.asarray, (q_start, kv_len, table, write_from, kv_len)))
        batch = ragged_batch(rows, T, page_size=B // count, num_pages=NUM_PAGES, layout=layout)
        shard = batch.split.shard
        rotary = None if angles is None else (jnp.cos(shard(angles)), jnp.sin(shard(angles)))
        values = None if is_latent else shard(v)
        variant = AttentionVariant(0.25, **arrays)
        out, pages = attend_to_cache(
            shard(q), shard(k), values, batch, pages, variant, numerics, rotary=rotary
        )
        last = jnp.maximum(jnp.asarray(q_start)[1:] - 1, 0)
        return batch.split.gather(out), batch.split.take(out, last), pages

    static = {name: x for name, x in variant.items() if not isinstance(x, np.ndarray)}
    arrays = {name: jnp.asarray(x) for name, x in variant.items() if name not in static}
    function = lambda q, k, v, angles, pages, arrays: step(
        q, k, v, angles, pages, {**arrays, **static}
    )
    if count > 1:
        [mesh] = device_groups({"seq": count}, jax.devices()[:count])
        page_specs = jax.tree.map(lambda x: P(None, None, "seq"), pages)
        function = jax.shard_map(
            function, mesh=mesh, in_specs=(P(), P(), P(), P(), page_specs, P()),
            out_specs=(P(), P(), page_specs), check_vma=False,
        )  # fmt: skip
    program = jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})
    out, last, pages = program(q, k, v, angles, pages, arrays)
    num_compared = int(q_start[-2] if has_shared else q_start[-1])
    ends = np.maximum(q_start[1:] - 1, 0)
    assert np.array_equal(np.asarray(out)[ends], np.asarray(last))
    return [np.asarray(x, np.float64) for x in (out[:num_compared], *jax.tree.leaves(pages))]


@lru_cache
def on_one_device(variant: str, rows: tuple[tuple[int, int], ...]) -> list[Any]:
    return run(1, rows, is_replicated=True, **VARIANTS[variant])


def error(count: int, variant: str = "plain", rows=MIXED, *, is_replicated: bool = False) -> float:
    """Return the largest relative difference from one device, in outputs and in pages."""
    many = run(count, rows, is_replicated=is_replicated, **VARIANTS[variant])
    assert all(np.isfinite(x).all() for x in many)
    pairs = zip(on_one_device(variant, rows), many, strict=True)
    return float(max(np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in pairs))


def temporaries(count: int, tokens: int) -> int:
    """Return the bytes of temporaries and arguments per device, for count x tokens."""
    zigzag.MAX_UNSPLIT_TOKENS = 0
    T, D, page = count * tokens, 64, 64
    layout = Layout.of({"seq": count}) if count > 1 else ONE_DEVICE
    attention = Attention(AttentionConfig(D, N, K, H), Numerics(layout=layout))
    num_pages = T // page

    def layer(x, pages):
        table, lengths = jnp.arange(num_pages)[None], jnp.array([T])
        rows = StepRows(jnp.array([0, T]), lengths, table, jnp.zeros(1, jnp.int32), lengths)
        batch = ragged_batch(rows, T, page_size=page // count, num_pages=num_pages, layout=layout)
        out, pages = attention.attend(*attention.project_in(x), None, batch, pages)
        return x + attention.project_out(out), pages

    split = P("seq")
    page_spec: Any = P(None, None, "seq")
    page_specs = KVPages(page_spec, page_spec)
    [mesh] = device_groups({"seq": count}, jax.devices()[:count])
    function = jax.shard_map(
        layer,
        mesh=mesh,
        in_specs=(split, page_specs),
        out_specs=(split, page_specs),
        check_vma=False,
    )
    pages: Any = jax.ShapeDtypeStruct((num_pages, K, page, H), jnp.float32)
    x = jax.ShapeDtypeStruct((T, D), jnp.float32)
    compiled = jax.jit(function, donate_argnums=(1,)).lower(x, KVPages(pages, pages)).compile()
    memory: Any = compiled.memory_analysis()
    return memory.temp_size_in_bytes + memory.argument_size_in_bytes


def step_temporaries(count: int, tokens: int) -> int:
    """Return the bytes of temporaries per device, for an engine step of count x tokens.

    The step includes the output head, sampling, and the logprobs of prompts.
    """
    zigzag.MAX_UNSPLIT_TOKENS = 0
    sizes = {"hidden_size": 512, "intermediate_size": 512, "vocab_size": 256, "head_dim": H}
    heads = {"num_attention_heads": N, "num_key_value_heads": K, "num_hidden_layers": 1}
    table = {"model_type": "llama", "max_position_embeddings": 8192} | sizes | heads
    config = {
        "mesh": {"seq": count},
        "dtype": "float32",
        "min_bucket": count * tokens,
        "scheduler": {"max_num_batched_tokens": count * tokens, "max_num_seqs": 2},
    }
    program = tiny_plans.on_cpus(count, table, config)
    return program.compile(count * tokens, 8).memory()["temporaries"]


def findings() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variant in VARIANTS:
        found[f"ring of 2, {variant}"] = error(2, variant)
    found["replicated on 2, all"] = error(2, "all", is_replicated=True)
    found["ring of 8, plain"] = error(8)
    found["replicated on 8, quantized"] = error(8, "quantized", is_replicated=True)
    found["ring of 4, nothing cached"] = error(4, rows=((20, 20), (30, 30)))
    found["bytes"] = {n: temporaries(n, 512) for n in (2, 4, 8)}
    found["bytes of a step"] = {n: step_temporaries(n, 512) for n in (4, 8)}
    found["bytes of twice the tokens"] = temporaries(4, 1024)
    return found


if __name__ == "__main__":
    print(json.dumps(findings()))
