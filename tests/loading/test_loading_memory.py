"""Loading takes little host memory besides the weights, which on a CPU are host memory too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.tiny_checkpoints import TinyLlama, write_checkpoint

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux' /proc"),
    pytest.mark.once,
]

MEASURE = """
import jax, jax.numpy as jnp
from jaxinfer.loading import assign
from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.nn.layers import Numerics
import numpy as np, sys
import orbax.checkpoint

checkpoint = open_checkpoint(sys.argv[1])
model = functional_model(checkpoint, Numerics(np.dtype(jnp.dtype(sys.argv[2]))))
jnp.zeros(8).block_until_ready()  # exclude the memory of jax itself
# Not ru_maxrss, which a child process inherits from its parent.
status = lambda: open("/proc/self/status").read().splitlines()
peak = lambda: 1024 * next(int(x.split()[1]) for x in status() if x.startswith("VmHWM"))
before = peak()
options = dict([sys.argv[4].split("=")]) if sys.argv[4] else {}
assign.NUM_THREADS = 2  # on any machine
weights = load_weights(checkpoint, model, **options)
jax.block_until_ready(weights)
on_device = sum(w.nbytes for w in weights)
print((peak() - before - on_device) / int(sys.argv[3]), (peak() - before) / on_device)
"""
CONVERT = """
import jax.numpy as jnp
import numpy as np
import sys
from pathlib import Path
from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.orbax import write_converted
from jaxinfer.nn.layers import Numerics

checkpoint = open_checkpoint("demo")
model = functional_model(checkpoint, Numerics(np.dtype(jnp.bfloat16)))
write_converted(checkpoint, model, load_weights(checkpoint, model), Path(sys.argv[1]))
"""
# 42 million parameters, most of them in matrices of 4 million; 84 MB in four shards.
WIDE = TinyLlama(
    hidden_size=512, intermediate_size=8192, num_layers=3, dtype="bfloat16", num_shards=4
)


def run(script: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    return write_checkpoint(WIDE, tmp_path_factory.mktemp("wide") / "source")


def assert_memory(
    source: str | Path, dtype: str, largest_shard: int, option: str = "", max_shards: float = 1.2
) -> None:
    """Check that loading takes at most `max_shards` times the checkpoint's largest shard, besides
    the weights; `option` is an option of `load_weights`."""
    found = run(MEASURE, str(source), dtype, str(largest_shard), option)
    shards, total_weights = map(float, found.split())
    assert total_weights > 0.9, "nothing was measured"
    assert shards <= max_shards, f"{shards} shards besides the weights, {total_weights} in all"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gguf_file_loads_in_bounded_memory(dtype):
    assert_memory("demo", dtype, 98_362_432)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharded_safetensors_model_loads_in_bounded_memory(dtype, wide):
    assert_memory(wide, dtype, max(p.stat().st_size for p in wide.glob("*.safetensors")))


@pytest.mark.parametrize("option", ["keep_packed=1", "quantize=int8", "quantize=int4"])
def test_quantized_weights_load_in_bounded_memory(option, wide):
    if option.startswith("keep"):
        # Reading whole tensors instead of strips takes 0.69.
        assert_memory("demo", "bfloat16", 98_362_432, option, max_shards=0.5)
    else:
        # Gate and up of a layer are 0.8 shards, and two such parameters are quantized at once.
        largest_shard = max(p.stat().st_size for p in wide.glob("*.safetensors"))
        assert_memory(wide, "bfloat16", largest_shard, option, max_shards=2.4)


def test_converted_checkpoint_loads_in_bounded_memory(tmp_path):
    run(CONVERT, str(tmp_path / "converted"))
    files = (path for path in (tmp_path / "converted").rglob("*") if path.is_file())
    # The model must not be smaller, because TensorStore caches 100 MB of what it reads.
    assert_memory(tmp_path / "converted", "bfloat16", max(path.stat().st_size for path in files))
