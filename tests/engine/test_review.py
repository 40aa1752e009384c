"""Claims of files and callers that once broke an engine, or made it wait for ever."""

import json
from pathlib import Path

import pytest

from jaxinfer import CheckpointError, EngineConfig, InvalidRequestError, SamplingParams
from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.assign import functional_model
from jaxinfer.nn.layers import Numerics
from tests.support import running
from tests.support.tiny_checkpoints import write_checkpoint

GREEDY = {"temperature": 0, "max_tokens": 3, "ignore_eos": False}
LONGROPE = {"type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0] * 4}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 10**9}, "1,000,000,000 layers"),
        ({"max_position_embeddings": None}, "None"),
        ({"max_position_embeddings": 128.0}, r"128\.0"),
        ({"head_dim": 8.0}, r"8\.0"),
        ({"rope_theta": 0}, "theta is 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, r"factor is 0\.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": -2.0}}, r"factor is -2\.0"),
        ({"rope_scaling": LONGROPE}, "RoPE's short_factor has 1 numbers; it needs 4"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused_before_it_is_built(tmp_path, changes, named):
    folder = Path(write_checkpoint("mha", tmp_path))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=named):
        functional_model(open_checkpoint(folder), Numerics())


def test_an_end_of_text_id_past_the_embedding_breaks_no_request():
    engine = running.engine(*running.tiny("mha"), eos_token_ids=[10**6])
    assert not engine.eos_token_ids
    [request] = engine.add([1, 2, 3], SamplingParams(**GREEDY, min_tokens=2))
    running.run(engine)
    assert len(request.output_token_ids) == 3


def test_a_priority_that_cannot_be_ordered_leaves_nothing_behind():
    engine = running.engine(*running.tiny("mha"), {"scheduler": {"policy": "priority"}})
    engine.add([1, 2, 3], SamplingParams(**GREEDY))
    with pytest.raises(InvalidRequestError, match="priority is 'high'"):
        engine.add([1, 2, 3], SamplingParams(**GREEDY), priority="high")  # type: ignore[arg-type]
    assert engine.num_requests == 1


@pytest.mark.parametrize("min_bucket", [1, 16, 20, 100])
def test_buckets_of_the_invariant_mode_are_whole_tiles(min_bucket):
    config = EngineConfig(batch_invariant=True, min_bucket=min_bucket)
    assert all(bucket % 16 == 0 for bucket in config.buckets)
    assert config.buckets[0] >= min_bucket
