"""Measure how long loading weights takes: one model as GGUF, as safetensors, and converted.

    jaxinfer bench loading --dtype=float32 --repeats=5

The demo model is first written in the other two formats as `--dtype`, so that only the GGUF file's
quantized numbers need conversion. Every measurement runs in its own process; the formats alternate.
Files are in the page cache, so this measures the work of reading, not the disk's speed. `weights`
is the time from opening the checkpoint until all arrays exist; `process` the time from the start of
Python, including imports; `CPU` the processor time of all threads for the weights, which depends
least on other load. Figures are medians, with the best in parentheses.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from safetensors.flax import save_file

from jaxinfer import load_config
from jaxinfer.execution.numerics import numerics_for
from jaxinfer.loading import Checkpoint, open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.orbax import write_converted
from jaxinfer.models.functional import FunctionalModel, Weights

FLAGS = flags.FLAGS
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "number type of the weights on the device"
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "processes a format", lower_bound=1)
_SOURCE = flags.DEFINE_string("source", None, "measure this checkpoint once, and print JSON")


def model_of(source: str) -> tuple[Checkpoint, FunctionalModel]:
    checkpoint = open_checkpoint(source)
    numerics = numerics_for(load_config(overrides=[f"dtype={_DTYPE.value}"]))
    return checkpoint, functional_model(checkpoint, numerics)


def measure_once(source: str) -> None:
    """Load the weights in this process, and print the seconds and bytes."""
    jax.device_put(np.zeros(1)).block_until_ready()  # do not time the device's start
    start, cpu_start = time.perf_counter(), time.process_time()
    checkpoint, model = model_of(source)
    weights = jax.block_until_ready(load_weights(checkpoint, model))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    print(json.dumps({"weights": seconds, "cpu": cpu, "num_bytes": num_bytes}))


def measure(source: str) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "jaxinfer.tools.bench.loading",
        f"--source={source}",
        f"--dtype={_DTYPE.value}",
    ]
    start = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout) | {"process": time.perf_counter() - start}


def write_huggingface(
    checkpoint: Checkpoint, model: FunctionalModel, weights: Weights, folder: Path
) -> None:
    """Write the demo model's parameters as a Hugging Face directory."""
    table = model.family.hf_weights(model.config)
    tensors: dict[str, Any] = {}
    for spec, weight in zip(model.parameters, weights, strict=True):
        names, transform = table.lookup(spec.path, spec.dims)
        is_whole = isinstance(names, str)
        for i, name in enumerate([names] if isinstance(names, str) else names):
            part: Any = weight if is_whole else weight[i]
            stored = transform.stored_shape(spec.dims if is_whole else spec.dims[1:])
            turned = part.reshape(stored[::-1]).T if transform.is_matrix else part.reshape(stored)
            tensors[name] = turned
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    key = lambda name: checkpoint.metadata[f"llama.{name}"]
    config = {
        "model_type": "llama",
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": key("attention.head_count"),
        "num_key_value_heads": key("attention.head_count_kv"),
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_theta": key("rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in checkpoint.tensors,
    }
    (folder / "config.json").write_text(json.dumps(config))


def size_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def report(name: str, path: Path, runs: Sequence[dict[str, float]]) -> str:
    def text(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f})"

    rates = [run["num_bytes"] / run["weights"] / 1e9 for run in runs]
    rate = f"{statistics.median(rates):.2f} ({max(rates):.2f})"
    weights = text([run["weights"] for run in runs])
    cpu, process = (text([run[key] for run in runs]) for key in ("cpu", "process"))
    return f"| {name} | {size_of(path) / 1e6:,.0f} | {weights} | {rate} | {cpu} | {process} |"


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # jax reports each platform it does not find
    if _SOURCE.value is not None:
        measure_once(_SOURCE.value)
        return
    with tempfile.TemporaryDirectory(prefix="bench-loading-") as temporary:
        folder = Path(temporary)
        checkpoint, model = model_of("demo")
        weights = load_weights(checkpoint, model)
        write_huggingface(checkpoint, model, weights, folder / "safetensors")
        write_converted(checkpoint, model, weights, folder / "converted")
        sources = {
            f"GGUF ({checkpoint.tensors['blk.0.ffn_up.weight'].dtype})": checkpoint.path,
            f"safetensors ({_DTYPE.value})": folder / "safetensors",
            f"converted ({_DTYPE.value})": folder / "converted",
        }
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
        for path in sources.values():
            measure(str(path))  # the page cache is warm from here on
        for _ in range(_REPEATS.value):
            for name, path in sources.items():
                runs[name].append(measure(str(path)))
        load = os.getloadavg()[0]
        print(f"{checkpoint.name} as {_DTYPE.value}, {model.num_bytes / 1e6:,.0f} MB on the device")
        print(
            f"jax {jax.__version__}, {os.cpu_count()} cores, load average {load:.1f} at the end\n"
        )
        print("| from | MB on disk | weights, s | GB/s | CPU, s | process, s |")
        print("| --- | --- | --- | --- | --- | --- |")
        for name, path in sources.items():
            print(report(name, path, runs[name]))


if __name__ == "__main__":
    app.run(main)
