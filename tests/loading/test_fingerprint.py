"""The fingerprint tells models of one shape apart, and copies not."""

import dataclasses
import shutil

import pytest

from jaxinfer.loading import CheckpointError, fingerprint, open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.demo import demo_model_path
from jaxinfer.loading.fingerprint import SAMPLE_BYTES
from jaxinfer.loading.orbax import write_converted
from jaxinfer.nn.layers import Numerics
from tests.support.tiny_checkpoints import TinyLlama, write_checkpoint

TINY = TinyLlama(num_shards=2)


def of(path) -> str:
    return fingerprint.fingerprint(open_checkpoint(path))


def test_copies_have_one_and_models_of_other_numbers_another(tmp_path):
    first = write_checkpoint(TINY, tmp_path / "first")
    copy = shutil.copytree(first, tmp_path / "copy")
    for other in ("README.md", "consolidated.safetensors"):  # which are not read
        (copy / other).write_text("files beside the weights do not count")
    tuned = write_checkpoint(dataclasses.replace(TINY, seed=1), tmp_path / "tuned")
    assert of(first) == of(copy) != of(tuned)
    assert of(demo_model_path()) not in (of(first), of(tuned))


def test_a_converted_model_has_that_of_its_source(tmp_path):
    source = open_checkpoint(write_checkpoint(TINY, tmp_path / "first"))
    model = functional_model(source, Numerics())
    write_converted(source, model, load_weights(source, model), tmp_path / "converted")
    assert of(tmp_path / "converted") == of(tmp_path / "first")


def test_of_a_large_file_a_few_samples_are_read_the_last_bytes_among_them(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "NUM_SAMPLES", 4)
    path = write_checkpoint(dataclasses.replace(TINY, num_shards=1), tmp_path) / "model.safetensors"
    raw = bytearray(path.read_bytes())
    assert len(raw) > 6 * SAMPLE_BYTES
    before = of(tmp_path)
    stride = (len(raw) - SAMPLE_BYTES) // 3
    changes = {stride - 1: False, stride: True, len(raw) - 8: True}  # the first lies between two
    for place, is_seen in changes.items():
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        assert (of(tmp_path) != before) == is_seen, place


def test_a_file_that_is_gone_is_named(tmp_path):
    checkpoint = open_checkpoint(write_checkpoint(TINY, tmp_path))
    shard = next(iter(sorted(tmp_path.glob("*.safetensors"))))
    shard.unlink()
    shard.mkdir()
    with pytest.raises(CheckpointError, match=shard.name):
        fingerprint.fingerprint(checkpoint)
