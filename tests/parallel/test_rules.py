"""The rules that map logical axes to devices, their errors, and the sharded model they yield."""

from __future__ import annotations

from typing import Any

import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jaxinfer.config import CacheConfig, EngineConfig, MeshConfig, from_mapping
from jaxinfer.models import HF_FAMILIES
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.nn.layers import Numerics
from jaxinfer.options import ConfigError
from jaxinfer.parallel.mesh_options import check_overlap, layout_of
from jaxinfer.parallel.sharded_model import ShardedModel, sharded_for
from jaxinfer.sharding import products
from jaxinfer.sharding.mesh import STEP_AXES, MeshError, device_groups, divisors
from jaxinfer.sharding.rules import ONE_DEVICE, Layout
from tests.support import mesh_bench


def sharded(model: FunctionalModel, **sizes: int) -> ShardedModel:
    layout = Layout.of(sizes)
    mesh: Any = AbstractMesh(tuple(size for _, size in layout.sizes), STEP_AXES)
    return ShardedModel(model, layout, mesh)


def model_of(model_type: str, num_layers: int = 4, **changes: Any) -> FunctionalModel:
    family = HF_FAMILIES[model_type]
    config = mesh_bench.COMMON | {"num_hidden_layers": num_layers} | changes
    return FunctionalModel(family, family.config_from_hf(config, {}), Numerics())


def test_axes_of_size_one_do_not_shard():
    layout = Layout.of({"tensor": 4})
    assert layout.axes("heads") == ("tensor",)
    assert layout.axes("experts") == ()
    assert ONE_DEVICE.axes("heads") == ()
    assert layout.spec(("model", "ffn")) == PartitionSpec(None, ("tensor",))


def test_vocabulary_is_also_sharded_over_stages():
    layout = Layout.of({"pipe": 2, "expert": 2, "tensor": 2})
    assert layout.axes("vocab") == ("pipe", "expert", "tensor")
    assert layout.parts("vocab") == 8


def test_two_dimensions_over_one_axis_are_refused():
    with pytest.raises(MeshError, match="split over tensor twice, by heads and by ffn"):
        Layout.of({"tensor": 2}).spec(("heads", "ffn"))


def test_axis_without_a_rule_is_refused_with_the_known_axes():
    with pytest.raises(MeshError, match=r"'colour'; there are .*heads"):
        Layout.of({"tensor": 2}).axes("colour")


def test_indivisible_dimension_is_refused_with_possible_sizes():
    layout = Layout.of({"tensor": 4})
    with pytest.raises(MeshError) as refused:
        layout.local((18, 30), ("model", "ffn"), "the MLP")
    text = str(refused.value)
    assert "the MLP: ffn is 30, which tensor 4 does not divide" in text
    assert "1, 2, 3, 5, 6, 10, 15, 30" in text and "mesh.whole = ['ffn']" in text


def test_only_known_axes_can_be_kept_whole():
    layout = Layout.of({"tensor": 4}, whole=frozenset({"ffn"}))
    assert layout.local((30,), ("ffn",)) == (30,)
    with pytest.raises(MeshError, match=r"whole names stage; it can name vocab"):
        Layout.of({"pipe": 2}, whole=frozenset({"stage"}))


def test_mesh_that_does_not_match_the_devices_is_refused():
    with pytest.raises(MeshError, match=r"8 devices \(pipe 2 x tensor 4\), but there are 6"):
        device_groups({"pipe": 2, "tensor": 4}, [object()] * 6)


def test_layout_follows_the_mesh_config():
    mesh = MeshConfig(data=2, tensor=4, all_reduce="int8", whole=("vocab",))
    assert mesh.num_devices == 8
    layout = layout_of(mesh)
    assert (layout.num_devices, layout.all_reduce, layout.axes("vocab")) == (4, "int8", ())
    assert layout_of(MeshConfig(data=4)) == ONE_DEVICE
    with pytest.raises(ConfigError, match=r"mesh\.tensor is 0"):
        from_mapping({"mesh": {"tensor": 0}})


@pytest.mark.parametrize(
    ("parts", "expected"), [(1, 2), (2, 2), (4, 4), (8, 8), (3, 6), (6, 6), (12, 12)]
)
def test_kv_heads_are_repeated_if_shards_outnumber_them(parts, expected):
    """With 2 KV heads for 12 heads, each run of a shard's heads with one KV head gets a copy."""
    if 12 % parts:
        return
    model = model_of("llama", num_attention_heads=12, hidden_size=48, intermediate_size=48,
                     vocab_size=96)  # fmt: skip
    found = sharded(model, tensor=parts)
    assert found.local.config.num_kv_heads == expected
    assert found.cache.num_kv_heads == expected // parts
    by_path = {spec.path: spec for spec in found.parameters}
    assert by_path["blocks.0.attention.k.weight"].dims[1] == expected


def test_latent_pages_are_replicated():
    found = sharded(mesh_bench.model_of("deepseek_v3", 2), tensor=8)
    assert found.cache.num_kv_heads == 1
    assert found.page_spec[0] == PartitionSpec(None, None, None, None)


def test_stages_stack_layers():
    found = sharded(model_of("llama", 6, vocab_size=144), pipe=3)
    by_path = dict(zip([p.path for p in found.parameters], found.sources, strict=True))
    assert by_path["blocks.1.mlp.down.weight"].paths == tuple(
        f"blocks.{i}.mlp.down.weight" for i in (1, 3, 5)
    )
    spec = next(p for p in found.parameters if p.path == "blocks.1.mlp.down.weight")
    assert spec.dims[0] == 3 and spec.axes[0] == "stage"


def test_layers_that_stages_do_not_divide_are_refused():
    with pytest.raises(MeshError, match=r"6 layers, which pipe 4 .*possible sizes: 1, 2, 3, 6"):
        sharded(model_of("llama", 6), pipe=4)


@pytest.mark.parametrize("n", [1, 2, 36, 49, 50257])
def test_divisors_are_complete(n):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_stages_with_different_layers_are_refused():
    windows = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 3}
    model = model_of("gemma2", 6, head_dim=8, vocab_size=144, **windows)
    with pytest.raises(
        MeshError, match=r"layer 3 is stacked with layer 0, .* possible sizes: 1, 3$"
    ):
        sharded(model, pipe=2)
    assert sharded(model, pipe=3).num_stages == 3


def test_indivisible_model_is_refused_before_weights_are_loaded():
    model = model_of("llama", vocab_size=161)
    with pytest.raises(ConfigError, match="devices"):
        sharded_for(model, EngineConfig(mesh=MeshConfig(tensor=4096)))
    with pytest.raises(MeshError, match="vocab is 161"):
        sharded(model, tensor=2)
    with pytest.raises(ConfigError, match=r"mesh.data is 2: an engine is one replica"):
        sharded_for(model, EngineConfig(mesh=MeshConfig(data=2)))


def test_batch_invariant_model_sums_in_order_without_split_sequences():
    model = model_of("llama")
    for mesh in ({"tensor": 8, "overlap": True}, {"expert": 2, "tensor": 2}, {"pipe": 4}):
        from_mapping({"mesh": mesh, "batch_invariant": True})
    numerics = Numerics(batch_invariant=True)
    invariant = FunctionalModel(model.family, model.config, numerics)
    assert sharded(invariant, tensor=4).local.numerics.layout.sums_in_order
    assert not sharded(model, tensor=4).local.numerics.layout.sums_in_order
    with pytest.raises(ConfigError, match=r"batch_invariant is true and mesh\.seq 2"):
        from_mapping({"mesh": {"seq": 2}, "batch_invariant": True})


def test_mesh_with_too_few_or_too_many_devices_is_refused_with_advice():
    few, many = [object()] * 2, [object()] * 8
    with pytest.raises(MeshError, match=r"has 4 devices \(tensor 4\), but there are 2: .*cpu_dev"):
        device_groups({"tensor": 4}, few)
    with pytest.raises(MeshError, match=r"but there are 8: .* must be 8, .*mesh\.data.*hide them"):
        device_groups({"tensor": 4}, many)


def test_heads_and_kv_heads_must_be_kept_whole_together():
    with pytest.raises(MeshError, match=r"mesh.whole = \['heads', 'kv_heads'\]"):
        Layout.of({"tensor": 2}).local((9,), ("heads",))


def test_indivisible_pages_are_refused_before_weights_are_loaded():
    config = EngineConfig(mesh=MeshConfig(seq=8), cache=CacheConfig(page_size=4))
    with pytest.raises(ConfigError, match=r"cache.page_size is 4, which mesh.seq 8 does not"):
        sharded_for(model_of("llama"), config)


@pytest.mark.parametrize(
    ("options", "platform", "words"),
    [
        ({"quantize": "int8"}, "cpu", "of int8 weights.*1024 tokens over 2.*has 512: set sched"),
        (
            {},
            "gpu",
            "on a GPU.*1024 tokens over 2.*has 512: set scheduler.max_num_batched_tokens to 1024",
        ),
        ({"quantize": "int8", "batch_invariant": True}, "cpu", "never with batch_invariant"),
        ({}, "cpu", None),
        ({"quantize": "int8", "scheduler": {"max_num_batched_tokens": 1024}}, "cpu", None),
    ],
)
def test_overlap_without_effect_is_refused(monkeypatch, options, platform, words):
    monkeypatch.setattr(products, "platform", lambda: platform)
    config = from_mapping({"mesh": {"tensor": 2, "overlap": True}, **options})
    if words is None:
        check_overlap(config, layout_of(config.mesh))
    else:
        with pytest.raises(MeshError, match=words):
            check_overlap(config, layout_of(config.mesh))


def test_overlap_with_quantized_activations_is_refused():
    with pytest.raises(ConfigError, match=r"mesh.overlap is true and quantize 'int8_w8a8'"):
        from_mapping({"mesh": {"tensor": 2, "overlap": True}, "quantize": "int8_w8a8"})


def test_mesh_options_are_checked_without_sharding():
    with pytest.raises(MeshError, match="whole names colours"):
        layout_of(MeshConfig(whole=("colours",)))
    with pytest.raises(MeshError, match="choose one of the two"):
        layout_of(MeshConfig(data=2, all_reduce="int8", overlap=True))
    with pytest.raises(MeshError, match=r"all_reduce = 'int8' is about the sums .* both 1"):
        layout_of(MeshConfig(data=2, pipe=2, all_reduce="int8"))
    with pytest.raises(MeshError, match="overlap = true is about the sums"):
        layout_of(MeshConfig(overlap=True))
