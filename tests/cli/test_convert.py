"""`jaxinfer convert`: the converted folder runs by itself, and invalid output is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from jaxinfer import LLM, CheckpointError, SamplingParams
from jaxinfer.config import from_mapping
from jaxinfer.kernels.quantized_matmul import QuantArray
from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.output import check_output, replace_folder
from jaxinfer.nn.layers import Numerics
from tests.support.tiny_checkpoints import TinyLlama, write_checkpoint

COMMAND = (sys.executable, "-m", "jaxinfer", "convert")


def convert(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *flags],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_checkpoint(TinyLlama(num_layers=1), tmp_path_factory.mktemp("source") / "tiny")


def test_converted_model_generates_and_is_not_overwritten_by_default(source, tmp_path):
    out = tmp_path / "out"
    done = convert(f"--model={source}", f"--output={out}", "--dtype=float32")
    assert done.returncode == 0, done.stderr
    assert "4.00 bytes each" in done.stdout
    options = {
        "max_model_len": 64,
        "warm_up": False,
        "cache": {"page_size": 16, "num_pages": 8},
        "scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 1},
    }
    llm = LLM(out, from_mapping(options), show_progress=False)
    assert llm.engine.name == "tiny"
    [output] = llm.generate(["the sky"], SamplingParams(temperature=0, max_tokens=8))
    assert output.outputs[0].token_ids and output.prompt_token_ids
    again = convert(f"--model={source}", f"--output={out}")
    assert again.returncode == 2 and "pass --overwrite" in again.stderr
    onto_itself = convert(f"--model={out}", f"--output={out}", "--overwrite")
    assert onto_itself.returncode == 2 and "is the source" in onto_itself.stderr
    assert (out / "jaxinfer.json").is_file()


def test_convert_quantizes_and_overwrites(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    done = convert(f"--model={source}", f"--output={out}", "--quantize=int8", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert "bytes each; quantized: 7 of 11 arrays" in done.stdout
    assert json.loads((out / "jaxinfer.json").read_text())["quantization"] == "int8"
    checkpoint = open_checkpoint(out)
    model = functional_model(checkpoint, Numerics())
    load = partial(load_weights, keep_packed=True)
    weights = dict(zip((p.path for p in model.parameters), load(checkpoint, model), strict=True))
    assert isinstance(weights["blocks.0.attention.q.weight"], QuantArray)


@pytest.mark.parametrize("output", ["source", "source/below", "."])
def test_output_folder_that_overlaps_the_source_is_refused(tmp_path, output):
    (tmp_path / "source").mkdir()
    with pytest.raises(CheckpointError, match="is the source"):
        check_output(tmp_path / "source", tmp_path / output, overwrite=True)
    check_output(tmp_path / "source", tmp_path / "source2", overwrite=False)


@pytest.mark.parametrize("failing", [0, 1])
def test_failed_replacement_keeps_the_old_folder(tmp_path, monkeypatch, failing):
    new, old = tmp_path / "new", tmp_path / "out"
    for folder in (new, old):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    replace, calls = os.replace, []

    def fail_once(*paths):
        calls.append(paths)
        if len(calls) == failing + 1:
            raise OSError("no room")
        replace(*paths)

    monkeypatch.setattr(os, "replace", fail_once)
    with pytest.raises(OSError, match="no room"):
        replace_folder(new, old, tmp_path / "aside")
    assert (old / "name").read_text() == "out"
    replace_folder(new, old, tmp_path / "aside")
    assert (old / "name").read_text() == "new"


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_interrupted_conversion_leaves_no_output_folder(tmp_path):
    wide = TinyLlama(num_layers=4, hidden_size=256, intermediate_size=16_384)
    source = write_checkpoint(wide, tmp_path / "wide")
    command = [*COMMAND, f"--model={source}", f"--output={tmp_path / 'out'}"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while process.poll() is None and not list(tmp_path.glob(".out.partial-*")):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
    assert process.returncode != 0, "it finished before it was interrupted"
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out.partial-*"))
