"""Compare sampling on sharded logits with one device.

Every call of the one-device program is recorded, then repeated on eight CPU devices with sharded
logits. The results are compared bit by bit on every device; a summary is printed as JSON, for
tests/parallel/test_sampling_split.py.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxinfer.execution import compilation_cache
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.sample import sample, top_logprobs
from tests.support import sampling_batch
from tests.support.sampling_batch import KEY, Batch, R, greedy

V = 2648  # 8 * 331: shards of odd size, and more than the candidates of all shards
SMALL = 16  # fewer tokens than logprobs report, and two on each of eight devices
ONE = jax.jit(sample)
ONE_TOP = jax.jit(top_logprobs)


class Split(NamedTuple):
    """A mesh, and the axes of it that split the vocabulary."""

    mesh: dict[str, int]
    vocab_axes: tuple[str, ...]

    @property
    def parts(self) -> int:
        return int(np.prod([self.mesh[axis] for axis in self.vocab_axes]))

    @property
    def devices(self) -> Mesh:
        shape = tuple(self.mesh.values())
        grid = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        return Mesh(grid, tuple(self.mesh), axis_types=(AxisType.Auto,) * len(shape))


SPLITS = {
    "2": Split({"tensor": 2}, ("tensor",)),
    # The mesh has another axis, and the axes are not in its order.
    "4 over two axes": Split({"tensor": 2, "seq": 2, "expert": 2}, ("expert", "tensor")),
    "8": Split({"tensor": 8}, ("tensor",)),
}


class Call(NamedTuple):
    """A call on one device, and its result."""

    case: str
    arguments: tuple[Any, ...]
    result: Any


def on_parts(function: Callable, split: Split, num_arguments: int) -> Callable:
    """Compile function(logits, *others) for sharded logits; the results have a device axis."""

    def body(*arguments):
        return jax.tree.map(lambda x: x[None], function(*arguments, vocab_axes=split.vocab_axes))

    specs = (PartitionSpec(None, split.vocab_axes), *(PartitionSpec(),) * (num_arguments - 1))
    return jax.jit(
        jax.shard_map(
            body,
            mesh=split.devices,
            in_specs=specs,
            out_specs=PartitionSpec(tuple(split.mesh)),
            check_vma=False,
        )
    )


def sample_parts(logits, slots, row_slot, position, is_sampled, **options):
    return sample(logits, slots, row_slot, position, is_sampled, KEY, **options)


# --- the calls to compare ---

BAD = [[5], [7, 3], [330], [331, 332]]
RANDOM = [
    SamplingParams(),
    SamplingParams(temperature=0.4, logprobs=20),
    SamplingParams(top_k=7),
    SamplingParams(top_k=300, temperature=4.0, logprobs=0),
    SamplingParams(top_p=0.6),
    SamplingParams(top_p=0.97, temperature=6.0),
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=900, top_p=0.9, min_p=0.001, temperature=5.0),
]
EXTRA = [
    greedy(logit_bias={0: 3.0, 330: 4.5, 331: 4.25, V - 1: 4.5, 9: -100}, logprobs=3),
    SamplingParams(allowed_token_ids=[1, 32, 330, 331, 662, 1000, V - 1], top_p=0.8),
    greedy(bad_words=["w"]),
    greedy(min_tokens=2, stop_token_ids=[9, 331, V - 1]),
    greedy(repetition_penalty=1.3, frequency_penalty=1.137, logprobs=20),
    SamplingParams(presence_penalty=-0.3, frequency_penalty=0.1, top_k=70, temperature=2.0),
    SamplingParams(allowed_token_ids=[8, 2000], bad_words=["w"], logit_bias={8: 100}),
    SamplingParams(min_p=0.01, repetition_penalty=0.9, bad_words=["w"], temperature=0.7),
]
FEW = [
    greedy(logprobs=20),
    SamplingParams(top_k=9, temperature=3.0),
    SamplingParams(top_p=0.8, logprobs=20),
    SamplingParams(allowed_token_ids=[0, 15], repetition_penalty=1.2),
    greedy(min_tokens=3, stop_token_ids=[6, 7]),  # all tokens of one of eight devices
]


def normal(seed: int, vocab_size: int = V) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(R, vocab_size)).astype(np.float32) * 2.5
    logits[:, 326:336] += 6  # likely tokens on both sides of a shard boundary, which thus repeat
    return logits


def tied(seed: int) -> np.ndarray:
    """Return logits with few values, so that the largest occur in many shards; some are -0."""
    values = np.array([-2, -1, -0.0, 0.0, 1, 2], np.float32)
    return np.random.default_rng(seed).choice(values, size=(R, V))


def batches() -> Iterator[tuple[str, Batch, list[np.ndarray]]]:
    """Yield names, batches of requests, and the logits of a few steps of each."""
    masked = normal(3)
    masked[:2], masked[2:4, 331:], masked[4] = -np.inf, -np.inf, 0.0
    again = normal(5)
    again[:, V - 7 : V - 2] += 9  # chosen at first, until penalties prevent it
    yield "greedy", Batch(*[greedy()] * R, vocab_size=V), [normal(0), tied(0), masked]
    yield "greedy logprobs", Batch(*[greedy(logprobs=20)] * R, vocab_size=V), [normal(1), tied(1)]
    yield "random", Batch(*RANDOM, vocab_size=V), [normal(2), tied(2), masked, normal(4)]
    forbids = Batch(*EXTRA, vocab_size=V, bad_word_ids=[*BAD, [8], [2000]])
    yield "extras", forbids, [again, again, again, tied(6), masked]
    sliver = Batch(*RANDOM[:5], vocab_size=V)
    yield "padding rows full of NaN", sliver, [normal(8)[:5], normal(9)[:5]]


def record() -> tuple[list[Call], list[Call]]:
    """Record the calls of `sample` with V tokens, and those with few tokens."""
    calls: list[Call] = []

    def recorded(case, logits, slots, row_slot, position, is_sampled, key):
        arguments = (logits, slots, row_slot, position, is_sampled)
        calls.append(Call(case, arguments, ONE(*arguments, key)))
        return calls[-1].result

    for case, batch, steps in batches():
        sampling_batch.STEP = functools.partial(recorded, case)
        for logits in steps:
            batch.step(logits)
    num_large = len(calls)
    sampling_batch.STEP = functools.partial(recorded, "few tokens")
    few = Batch(*FEW, vocab_size=SMALL)
    for seed in range(2):
        logits = normal(seed, SMALL)[: len(FEW)]
        logits[-1, 6] = 9.0
        few.step(logits)
    calls.append(_not_sampled(calls[2 * num_large // 3]))
    return [*calls[:num_large], calls.pop()], calls[num_large:]


def _not_sampled(call: Call) -> Call:
    """Repeat the call with every other row NaN and not sampled."""
    logits, slots, row_slot, position, _ = call.arguments
    is_sampled = jnp.arange(R) % 2 == 0
    logits = jnp.where(is_sampled[:, None], logits, jnp.nan)
    arguments = (logits, slots, row_slot, position, is_sampled)
    return Call("rows not sampled", arguments, ONE(*arguments, KEY))


def record_top() -> list[Call]:
    targets = jnp.asarray([0, 330, 331, 661, 662, 1323, 1324, V - 1], jnp.int32)
    arrays = [(jnp.asarray(x), targets) for x in (normal(20), tied(21))]
    return [Call("prompt logprobs", x, ONE_TOP(*x)) for x in arrays]


# --- the comparison ---


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def differing(calls: list[Call], program: Callable, split: Split) -> dict[str, list[int]]:
    """Return, for each case, the numbers of results (leaves) that differ on any device."""
    shardings = [NamedSharding(split.devices, PartitionSpec(None, split.vocab_axes))]
    found: dict[str, set[int]] = {}
    for call in calls:
        logits, *others = call.arguments
        everywhere = program(
            jax.device_put(logits, shardings[0]),
            *jax.device_put(others, NamedSharding(split.devices, PartitionSpec())),
        )
        expected = bits(call.result)
        wrong = found.setdefault(call.case, set())
        for device in range(split.devices.size):
            got = bits(jax.tree.map(lambda x, device=device: np.asarray(x)[device], everywhere))
            pairs = zip(expected, got, strict=True)
            wrong.update(i for i, (one, part) in enumerate(pairs) if one != part)
    return {case: sorted(wrong) for case, wrong in found.items()}


COLLECTIVE = re.compile(
    r"= (\S.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def collectives(text: str) -> list[tuple[str, list[int]]]:
    """Return the name and result shape of every collective in a compiled program."""
    return [
        (name, [int(n) for n in dims.split(",") if n])
        for result, name in COLLECTIVE.findall(text)
        for dims in re.findall(r"\[([\d,]*)\]", result)
    ]


def without_features(text: str) -> str:
    """Return the part of a compiled program that runs if every predicate of a `cond` is false."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) \([^\n]*\{$(.*?)^\}", text, re.M | re.S))
    called = re.compile(
        r"(?:false_computation|body|to_apply|calls)=%?([\w.-]+)|branch_computations=\{%?([\w.-]+)"
    )

    def below(name: str) -> str:
        body = bodies[name]
        return body + "".join(below(a or b) for a, b in called.findall(body))

    [entry] = re.findall(r"^ENTRY %?([\w.-]+) ", text, re.M)
    return below(entry)


def findings() -> dict[str, Any]:
    large, few, top = *record(), record_top()
    jobs = [
        (name, function, calls)
        for name in SPLITS
        for function, calls in ((sample_parts, large), (top_logprobs, top))
    ]
    jobs.append(("8", sample_parts, few))

    def compiled(name: str, function: Callable, calls: list[Call]) -> Any:
        arguments = calls[0].arguments
        return on_parts(function, SPLITS[name], len(arguments)).lower(*arguments).compile()

    with ThreadPoolExecutor(2) as pool:
        programs = list(pool.map(lambda job: compiled(*job), jobs))
    found: dict[str, Any] = {name: {"differs": {}, "collectives": []} for name in SPLITS}
    for (name, _, calls), program in zip(jobs, programs, strict=True):
        found[name]["differs"] |= differing(calls, program, SPLITS[name])
        if calls is not few:
            found[name]["collectives"].append(collectives(program.as_text()))
    one = ONE.lower(*large[0].arguments, KEY).compile().as_text()
    assert one is not None
    return {
        "splits": found,
        "greedy": collectives(without_features(programs[0].as_text())),
        "one": collectives(one),
        "vocab_size": V,
    }


if __name__ == "__main__":
    compilation_cache.enable()
    print(json.dumps(findings()))
