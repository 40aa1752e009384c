"""The cache's layout on the device: pages as they are, or folded for a TPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer import SamplingParams
from jaxinfer.execution import kv_cache
from jaxinfer.kernels.folding import fold_of, rows_and_lanes
from jaxinfer.nn.ragged import CacheShape
from jaxinfer.options import ConfigError
from tests.support import running


@pytest.mark.parametrize("head_dim", [8, 16, 48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("page_size", [1, 8, 16, 64, 100])
def test_a_folded_page_holds_its_tokens_in_whole_rows_of_lanes(page_size, head_dim):
    rows, lanes = rows_and_lanes(page_size, head_dim)
    if (rows, lanes) == (page_size, head_dim):
        assert head_dim % 128 == 0 or page_size % (128 // head_dim) != 0
    else:
        assert lanes % 128 == 0 and fold_of(lanes, head_dim) * rows == page_size


def test_pages_are_folded_for_a_tpu_alone():
    plain = kv_cache.page_layout(64, 64)
    device = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        assert kv_cache.page_layout(64, 64) == (32, 128)
        assert kv_cache.page_layout(64, 128) == (64, 128)
        padded = kv_cache.page_bytes(CacheShape(1, 1, 96), page_size=64, dtype=jnp.dtype("float32"))
        assert padded == 2 * 64 * 128 * 4, "padding counts"
    assert plain == (64, 64)


def test_an_engine_over_folded_pages_yields_the_same_tokens(monkeypatch):
    model, weights = running.tiny("gqa")
    prompts = [list(range(5, 5 + n)) for n in (1, 9, 30, 17)]

    def tokens():
        engine = running.engine(model, weights, {"cache": {"page_size": 16, "num_pages": 40}})
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        requests = [engine.add(prompt, params)[0] for prompt in prompts]
        running.run(engine)
        return running.tokens_of(requests), engine.runner.state.pages[0].k.shape

    plain, plain_shape = tokens()
    monkeypatch.setattr(kv_cache, "page_layout", rows_and_lanes)
    folded, folded_shape = tokens()
    assert folded == plain
    assert plain_shape[2:] == (16, 8) and folded_shape[2:] == (1, 128)


@pytest.mark.parametrize(("page_size", "dtype"), [(64, "int8"), (192, "float8_e4m3fn")])
def test_quantized_pages_that_a_tpu_would_copy_are_refused(monkeypatch, page_size, dtype):
    kv_cache.check_layout(page_size, jnp.dtype(dtype))
    monkeypatch.setattr(kv_cache, "platform", lambda: "tpu")
    kv_cache.check_layout(page_size, jnp.dtype("bfloat16"))
    kv_cache.check_layout(256, jnp.dtype(dtype))
    with pytest.raises(ConfigError, match=f"{dtype} and cache.page_size {page_size}.* 128"):
        kv_cache.check_layout(page_size, jnp.dtype(dtype))
    kv_cache.check_layout(512, jnp.dtype(dtype), 4)
    with pytest.raises(ConfigError, match=r"256, over mesh.seq 4: .* multiple of 512"):
        kv_cache.check_layout(256, jnp.dtype(dtype), 4)
