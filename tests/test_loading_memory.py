"""Loading a model takes little more host memory than the model."""

import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import jax.numpy as jnp
from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.nn.layers import Numerics
import numpy as np, sys

checkpoint = open_checkpoint("demo")
model = functional_model(checkpoint, Numerics(np.dtype(jnp.dtype(sys.argv[1]))))
jnp.zeros(8).block_until_ready()  # jax itself is no part of the figure
# Not ru_maxrss: a child process starts with its parent's.
status = lambda: open("/proc/self/status").read().splitlines()
peak = lambda: 1024 * next(int(x.split()[1]) for x in status() if x.startswith("VmHWM"))
before = peak()
weights = load_weights(checkpoint, model)
[w.block_until_ready() for w in weights]
print((peak() - before) / sum(w.nbytes for w in weights))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_host_memory_stays_under_1_3_times_the_weights(dtype):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, dtype],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert 0.9 < float(done.stdout) < 1.3, done.stdout
