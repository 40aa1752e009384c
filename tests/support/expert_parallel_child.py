"""Compute experts on eight CPU devices and print the results as JSON.

Used by tests/parallel/test_expert_parallel.py: `python tests/support/expert_parallel_child.py`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

jax.config.update("jax_num_cpu_devices", 8)

from jaxinfer.execution import compilation_cache  # noqa: E402  (devices are configured first)
from jaxinfer.kernels.quantized_matmul import quantize  # noqa: E402
from jaxinfer.models.family import Family, WeightTable  # noqa: E402
from jaxinfer.models.functional import FunctionalModel  # noqa: E402
from jaxinfer.nn.experts import ClampedSwiGLU, Experts, ExpertsConfig, RouterConfig  # noqa: E402
from jaxinfer.nn.layers import Numerics  # noqa: E402
from jaxinfer.nn.tokenwise import tokenwise  # noqa: E402
from jaxinfer.sharding.experts import combine, dispatch  # noqa: E402
from jaxinfer.sharding.mesh import STEP_AXES, device_groups  # noqa: E402
from jaxinfer.sharding.rules import Layout  # noqa: E402

D, E, F = 16, 16, 16
BOTH = {"expert": 4, "tensor": 2}
PLAIN = Numerics()
DEEPSEEK_ROUTER = RouterConfig(
    E,
    5,
    "sigmoid",
    renormalize=True,
    scale=2.5,
    has_selection_bias=True,
    num_groups=4,
    groups_per_token=2,
    group_score="best_two",
)
MODELS = {
    "mixtral": ExpertsConfig(RouterConfig(E, 2, renormalize=True), F),
    "qwen": ExpertsConfig(RouterConfig(E, 4), F, shared_ffn_dim=24, has_shared_gate=True),
    "deepseek": ExpertsConfig(DEEPSEEK_ROUTER, F, shared_ffn_dim=16),
    "gpt-oss": ExpertsConfig(
        RouterConfig(E, 2, renormalize=True, has_bias=True), F, ClampedSwiGLU(1.702, 1.5), bias=True
    ),
}
# Each mesh with its number of tokens; 1 and 5 are not multiples of `expert`.
MESHES = {
    "expert=8": ({"expert": 8}, 1),
    "expert=4 tensor=2": (BOTH, 5),
    "expert=2 tensor=4": ({"expert": 2, "tensor": 4}, 16),
    "tensor=8": ({"tensor": 8}, 5),
}
COLLECTIVE = re.compile(r" (all-to-all|all-gather|all-reduce|collective-permute)(?:-start)?\(")
REPLICATED, STACKED = PartitionSpec(), PartitionSpec(STEP_AXES)


def functional(config: ExpertsConfig, numerics: Numerics) -> FunctionalModel:
    family = Family(
        name="experts",
        models="",
        build=lambda config, numerics: Experts(D, config, numerics),
        config_from_hf=lambda *_: config,
        hf_weights=lambda _: WeightTable(()),
    )
    return FunctionalModel(family, config, numerics)


def random_weights(config: ExpertsConfig) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    specs = functional(config, PLAIN).parameters
    return [rng.normal(0, 0.5, spec.shape).astype(spec.dtype) for spec in specs]


def dispatching(is_on: bool) -> Any:
    """Make layers that are traced in this context dispatch, or else select."""
    return mock.patch("jaxinfer.nn.experts.should_dispatch", lambda *_: is_on)


def on_each(sizes: dict[str, int], function: Callable[..., Any], in_specs: Any, *args: Any) -> Any:
    """Run `function` on a mesh; return the concatenated results and the compiled text."""
    [mesh] = device_groups(sizes)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=STACKED, check_vma=False
    )
    compiled = jax.jit(mapped).lower(*args).compile()
    return compiled(*args), compiled.as_text()


class Layers:
    """Layers of experts that can be computed on one device and on a mesh."""

    def __init__(
        self,
        configs: Sequence[ExpertsConfig],
        numerics: Numerics = PLAIN,
        packed: Callable[[str, np.ndarray], Any] = lambda path, weight: weight,
    ):
        self.configs, self.numerics = configs, numerics
        self.weights = [
            [
                packed(spec.path, weight)
                for spec, weight in zip(
                    functional(config, numerics).parameters, random_weights(config), strict=True
                )
            ]
            for config in configs
        ]

    def on_one(self, xs: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Return the output of each layer for each x."""
        run = jax.jit(lambda weights, xs: self._called(self.numerics, weights, xs))
        return jax.tree.map(np.asarray, run(self.weights, xs))

    def on_mesh(
        self, sizes: dict[str, int], xs: Sequence[np.ndarray], **options: Any
    ) -> tuple[list[list[np.ndarray]], Counter[str]]:
        """Return the outputs of all devices, [8, T, D], and the collectives of the program."""
        layout = Layout.of(sizes, **options)
        numerics = dataclasses.replace(self.numerics, layout=layout)
        specs = [
            [layout.spec(spec.array_axes) for spec in functional(config, numerics).parameters]
            for config in self.configs
        ]
        run = lambda weights, xs: self._called(numerics, weights, xs)
        out, text = on_each(sizes, run, (specs, REPLICATED), self.weights, xs)
        found = jax.tree.map(lambda x: np.asarray(x).reshape(8, -1, D), out)
        return found, Counter(COLLECTIVE.findall(text))

    def _called(self, numerics: Numerics, weights: Any, xs: Any) -> list[list[jax.Array]]:
        modules = [
            functional(config, numerics).merge(tuple(own))
            for config, own in zip(self.configs, weights, strict=True)
        ]
        return [[tokenwise(numerics, module, x) for x in xs] for module in modules]


def compared(expected: Any, found: Any) -> dict[str, Any]:
    """Return the largest relative error of any device, and whether all have the same bits."""
    pairs = list(zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True))
    away = [np.linalg.norm(x - y, axis=-1) / np.linalg.norm(x, axis=-1) for x, y in pairs]
    return {
        "error": max(float(a.max()) for a in away),
        "same": all((y == y[0]).all() for _, y in pairs),
    }


def tokens(T: int) -> np.ndarray:
    return np.random.default_rng(T).normal(size=(T, D)).astype(np.float32)


def models() -> dict[str, Any]:
    """Compare every model, mesh and form with one device."""
    layers, x = Layers(list(MODELS.values())), tokens(16)
    expected, found = [out for [out] in layers.on_one([x])], {}
    for mesh, (sizes, T) in MESHES.items():
        for form in ("select", "dispatch") if "expert" in sizes else ("select",):
            with dispatching(form == "dispatch"):
                results, _ = layers.on_mesh(sizes, [x[:T]])
            of_models = zip(MODELS, expected, results, strict=True)
            found[f"{mesh} {form}"] = {
                name: compared(whole[:T], out) for name, whole, [out] in of_models
            }
    return found


def shared() -> dict[str, Any]:
    """Count the collectives of one layer with shared experts."""
    layers, found = Layers([MODELS["qwen"]]), {}
    for form in ("select", "dispatch"):
        with dispatching(form == "dispatch"):
            _, found[form] = layers.on_mesh(BOTH, [tokens(5)])
    return found


def quantized() -> dict[str, Any]:
    """Compare experts quantized to 8 bits, in groups of 4 rows so that hidden units can shard."""
    packs = ("gate", "up", "down")
    packed = lambda path, weight: quantize(weight, 8, 4) if path in packs else weight
    layers, xs, found = Layers([MODELS["mixtral"]], packed=packed), [tokens(5)], {}
    expected = layers.on_one(xs)
    for form in ("select", "dispatch"):
        with dispatching(form == "dispatch"):
            out, collectives = layers.on_mesh(BOTH, xs)
        found[form] = compared(expected, out) | {"collectives": collectives}
    return found


def batch_invariant() -> dict[str, Any]:
    """Check that the batch-invariant mode gives a token the same bits in any order of tokens."""
    layers = Layers([MODELS["gpt-oss"]], Numerics(batch_invariant=True))
    x, found = tokens(20), {}
    order = np.random.default_rng(5).permutation(20)
    [[expected]] = layers.on_one([x])
    for form in ("select", "dispatch"):
        with dispatching(form == "dispatch"):
            [[plain, permuted]], collectives = layers.on_mesh(BOTH, [x, x[order]])
        found[form] = compared(expected, plain) | {"all-reduces": collectives["all-reduce"]}
        found[form]["is_independent"] = bool((plain[:, order] == permuted).all())
    return found


def compressed() -> dict[str, Any]:
    layers, xs, found = Layers([MODELS["mixtral"]]), [tokens(5)], {}
    expected = layers.on_one(xs)
    for form in ("select", "dispatch"):
        with dispatching(form == "dispatch"):
            found[form] = compared(expected, layers.on_mesh(BOTH, xs, all_reduce="int8")[0])
    return found


def ragged_by_gathering(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """Implement the contract of `lax.ragged_all_to_all` by all-gather, for CPUs, which lack it."""
    gather = lambda x: lax.all_gather(x, axis_name)
    rows, at, to, sizes = map(gather, (operand, input_offsets, output_offsets, send_sizes))
    rank, place = lax.axis_index(axis_name), jnp.arange(len(output))
    for i in range(len(rows)):
        within = place - to[i, rank]
        is_from_i = (within >= 0) & (within < sizes[i, rank])
        # A device that expects a wrong number of rows receives none, so the error is visible.
        is_from_i &= sizes[i, rank] == recv_sizes[i]
        output = jnp.where(is_from_i[:, None], rows[i][at[i, rank] + within], output)
    return output


def routings(e: int, T: int, k: int) -> dict[str, np.ndarray]:
    """Return experts [e, T, k], distinct for each token.

    The cases are random experts, as many as possible on one device, some devices without rows, and
    different experts for each device.
    """
    rng = np.random.default_rng(6)
    drawn = np.stack([rng.permutation(E)[:k] for _ in range(e * T)]).reshape(e, T, k)
    one = np.broadcast_to([5, 4, 11], (e, T, k))  # a device has two experts; 4 and 5 share one
    few = np.stack([rng.permutation(4)[:k] for _ in range(e * T)]).reshape(e, T, k)
    unequal = (2 * np.arange(e)[:, None, None] + np.arange(k)) % E + np.zeros((e, T, k), int)
    cases = {"random": drawn, "one device": one, "few devices": few, "unequal": unequal}
    return {name: np.ascontiguousarray(x.astype(np.int32)) for name, x in cases.items()}


def dispatch_and_combine() -> dict[str, Any]:
    """Test `dispatch` and `combine` alone, padded and ragged; a row is (token, expert)."""
    e, T, k = 8, 6, 3
    x = np.arange(1, e * T + 1, dtype=np.float32)[:, None]

    def there_and_back(x, experts):
        rows, plan = dispatch(x, experts, E, ("expert",))
        first = lax.axis_index("expert") * len(rows.sizes)
        expert = first + jnp.repeat(
            jnp.arange(len(rows.sizes)), rows.sizes, total_repeat_length=len(rows.rows)
        )
        out = jnp.concatenate([rows.rows, expert[:, None].astype(x.dtype)], axis=1)
        is_real = jnp.arange(len(out))[:, None] < rows.sizes.sum()
        out = jnp.where(is_real, out, jnp.nan)
        return out[None], rows.sizes, combine(out, plan, k, ("expert",))

    cases, found = routings(e, T, k), {}
    ragged = mock.patch("jax.lax.ragged_all_to_all", ragged_by_gathering)
    for form, where in (("padded", "cpu"), ("ragged", "gpu")):
        with ragged, mock.patch("jaxinfer.sharding.experts.platform", lambda where=where: where):
            all_cases = lambda x, cases: {n: there_and_back(x, c) for n, c in cases.items()}
            flat = {name: case.reshape(e * T, k) for name, case in cases.items()}
            out, _ = on_each({"expert": e}, all_cases, (STACKED, STACKED), x, flat)
        found[form] = {name: arrivals(x, flat[name], out[name]) for name in cases}
    return found


def arrivals(x: np.ndarray, experts: np.ndarray, out: Any) -> dict[str, bool]:
    arrived, sizes, back = map(np.asarray, out)
    expected = [sorted(x[(experts == i).any(axis=1), 0].tolist()) for i in range(E)]
    got: list[list[float]] = []
    for device, own in enumerate(sizes.reshape(8, -1)):
        starts = np.cumsum(own)[:-1]
        got += [sorted(p[:, 0].tolist()) for p in np.split(arrived[device][: own.sum()], starts)]
    place = np.stack([np.broadcast_to(x, experts.shape), experts], axis=-1)
    return {"once": got == expected, "back": bool((back == place).all())}


if __name__ == "__main__":
    compilation_cache.enable()
    findings: dict[str, Any] = {"batch_invariant": batch_invariant()}  # optimized as in serving
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in a third of the time
    checks = (models, shared, quantized, compressed, dispatch_and_combine)
    print(json.dumps(findings | {check.__name__: check() for check in checks}))
