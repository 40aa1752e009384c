"""The fingerprint differs for models of the same shape, and is equal for copies."""

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


def fingerprint_of(path) -> str:
    return fingerprint.fingerprint(open_checkpoint(path))


def test_fingerprint_is_equal_for_copies_and_differs_for_other_weights(tmp_path):
    first = write_checkpoint(TINY, tmp_path / "first")
    copy = shutil.copytree(first, tmp_path / "copy")
    for other in ("README.md", "consolidated.safetensors"):  # these are not read
        (copy / other).write_text("files beside the weights do not count")
    tuned = write_checkpoint(dataclasses.replace(TINY, seed=1), tmp_path / "tuned")
    assert fingerprint_of(first) == fingerprint_of(copy) != fingerprint_of(tuned)
    assert fingerprint_of(demo_model_path()) not in (fingerprint_of(first), fingerprint_of(tuned))


def test_converted_checkpoint_has_the_fingerprint_of_its_source(tmp_path):
    source = open_checkpoint(write_checkpoint(TINY, tmp_path / "first"))
    model = functional_model(source, Numerics())
    write_converted(source, model, load_weights(source, model), tmp_path / "converted")
    assert fingerprint_of(tmp_path / "converted") == fingerprint_of(tmp_path / "first")


def test_fingerprint_samples_a_large_file_including_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "NUM_SAMPLES", 4)
    path = write_checkpoint(dataclasses.replace(TINY, num_shards=1), tmp_path) / "model.safetensors"
    raw = bytearray(path.read_bytes())
    assert len(raw) > 6 * SAMPLE_BYTES
    before = fingerprint_of(tmp_path)
    stride = (len(raw) - SAMPLE_BYTES) // 3
    # The first offset is between two samples.
    changes = {stride - 1: False, stride: True, len(raw) - 8: True}
    for offset, is_seen in changes.items():
        path.write_bytes(raw[:offset] + bytes([raw[offset] ^ 1]) + raw[offset + 1 :])
        assert (fingerprint_of(tmp_path) != before) == is_seen, offset


def test_unreadable_weights_file_is_refused_by_name(tmp_path):
    checkpoint = open_checkpoint(write_checkpoint(TINY, tmp_path))
    shard = next(iter(sorted(tmp_path.glob("*.safetensors"))))
    shard.unlink()
    shard.mkdir()
    with pytest.raises(CheckpointError, match=shard.name):
        fingerprint.fingerprint(checkpoint)
