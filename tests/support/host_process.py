"""One process of a group of two with four CPU devices each; see tests/parallel/test_hosts.py.

python -m tests.support.host_process '{"hosts": {...}, "meshes": [...], "folders": [...]}'

Process 0 prints its results, one line of JSON each, then READY, and works until it is killed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxinfer import LLM, ConfigError, Engine, SamplingParams
from jaxinfer.config import from_mapping
from jaxinfer.parallel.hosts import HostsConfig, HostsError, Peers, follow, join
from jaxinfer.parallel.hosts.follower import wait_for_process_0
from jaxinfer.parallel.hosts.messages import Op
from jaxinfer.sharding import zigzag

NUM_PROMPTS = 5


def emit(found: Any) -> None:
    print(json.dumps(found), flush=True)


def config_for(mesh: dict[str, int], **changes: Any) -> Any:
    """Return options with few pages, so that requests are preempted, and one bucket."""
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 4, **changes}
    cache = {"page_size": 4, "num_pages": 18}
    return from_mapping({"mesh": mesh, "cache": cache, "scheduler": sizes, "min_bucket": 16})


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Return prompts with a common prefix; greedy, seeded, and with penalties."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.8, "top_k": 20, "seed": 4, "repetition_penalty": 1.3},
    ]
    return [
        (
            [7, 11, 13, 17, 19, 23, *range(30, 30 + 3 * i)],
            SamplingParams(max_tokens=14, ignore_eos=True, **kinds[i % len(kinds)]),
        )
        for i in range(NUM_PROMPTS)
    ]


def runner_of(llm: LLM) -> Any:
    assert isinstance(llm.engine, Engine)
    return llm.engine.runner


def generate_tokens(llm: LLM) -> list[list[int]]:
    prompts, params = zip(*requests(), strict=True)
    outputs = llm.generate(list(prompts), list(params))
    return [output.outputs[0].token_ids for output in outputs]


def compare_tokens(peers: Peers, folder: str, meshes: list[dict[str, int]]) -> LLM:
    """Print the tokens of each mesh; return the model on the last mesh."""
    for mesh in meshes:
        if mesh is not meshes[0]:
            peers.stop()
        llm = LLM(folder, config_for(mesh), show_progress=False, peers=peers)
        if peers.is_leader:
            split = zigzag.TokenSplit.of(runner_of(llm).model.layout, llm.engine.config.buckets[-1])
            found = {"mesh": mesh, "tokens": generate_tokens(llm), "ring": split.count}
            emit({**found, "preemptions": llm.engine.stats.num_preemptions})
        elif mesh is not meshes[-1]:
            follow(runner_of(llm), peers)
    return llm


def report_refusals(peers: Peers, folders: list[str]) -> None:
    """Print the errors for a mesh that leaves devices out, and for differing options and models."""
    rows, other = 4 + peers.process_id, folders[peers.process_id]
    cases: list[tuple[str, dict[str, int], dict[str, int]]] = [
        (folders[0], {"tensor": 4}, {}),
        (folders[0], {"tensor": 8}, {"max_num_seqs": rows}),
        (other, {"tensor": 8}, {}),
    ]
    for folder, mesh, changes in cases:
        try:
            LLM(folder, config_for(mesh, **changes), show_progress=False, peers=peers)
        except (ConfigError, HostsError) as error:
            emit({"refused": str(error)})


def run_tokens(peers: Peers, folders: list[str], meshes: list[dict[str, int]]) -> None:
    report_refusals(peers, folders)
    llm = compare_tokens(peers, folders[0], meshes)
    if peers.is_leader:
        print("READY", flush=True)
        while True:
            generate_tokens(llm)
    follow(runner_of(llm), peers)


class SumRunner:
    """A runner whose only program is a sum over all devices."""

    def __init__(self, peers: Peers):
        self.peers = peers
        devices = jax.device_count()
        mesh = jax.make_mesh((devices,), ("all",), axis_types=(AxisType.Auto,))
        split, whole = PartitionSpec("all"), PartitionSpec()
        add = lambda parts, x: jax.lax.psum(parts.sum() * x, "all")
        program = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=(split, whole), out_specs=whole))
        parts = np.arange(devices, dtype=np.int32)
        place = lambda index: parts[index]
        self.parts = jax.make_array_from_callback((devices,), NamedSharding(mesh, split), place)
        self.program = program.lower(self.parts, np.zeros(1, np.int32)).compile()

    def run_step(self, bucket: int, packed: np.ndarray) -> jax.Array:
        with self.peers.call(Op.STEP, bucket, packed):
            return self.program(self.parts, packed)


def run_sums(peers: Peers, num_steps: int, fault: str) -> None:
    """Make `num_steps` sums, or sums without end if it is negative.

    `fault` "wrong": process 1 takes another bucket once. "raises": process 0 ends by an uncaught
    error.
    """
    runner = SumRunner(peers)
    peers.wait_until_ready()
    if peers.is_leader:
        step = 0
        while step != num_steps:
            total = np.asarray(runner.run_step(1, np.array([step], np.int32)))
            assert total.tolist() == [28 * step], "the sum over eight devices"
            step += 1
            if step == 20 and fault == "raises":
                raise ZeroDivisionError("on purpose")
            if step == 8:
                print("READY", flush=True)
                time.sleep(0.5)  # lets the test read this line before anything else happens
        peers.stop()
        emit({"sums": step})
        return
    if fault == "wrong":
        run_step = runner.run_step
        other = lambda bucket, packed: run_step(bucket + int(packed[0] == 20), packed)
        runner.run_step = other  # type: ignore[method-assign]
    wait_for_process_0(peers.process_id)
    follow(runner, peers)
    emit({"stopped": True})


def main(job: dict[str, Any]) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    zigzag.MAX_UNSPLIT_TOKENS = 4  # steps of 16 tokens are split, so that the ring is tested
    config = HostsConfig(**job["hosts"])
    peers = join(dataclasses.replace(config, check_steps=8, join_timeout_s=60.0))
    try:
        if "meshes" in job:
            run_tokens(peers, job["folders"], job["meshes"])
        else:
            run_sums(peers, job["num_steps"], job["fault"])
    except HostsError as error:
        print(f"jaxinfer: {error}", file=sys.stderr, flush=True)
        peers.abandon(error)
    peers.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
