"""The choice of a backend: order, forcing by name, one error with every reason, logging."""

import jax
import pytest
from absl import logging
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.kernels.dispatch import (
    PREFERENCE,
    NoBackendError,
    device_kind,
    dispatch,
    log_choice,
    platform,
    sibling_in,
)


def takes(name):
    return lambda *args, **kwargs: (name, args, kwargs)


def declines(why):
    def backend(*args, **kwargs):
        raise NotImplementedError(why)

    return backend


@pytest.fixture
def on_platform(monkeypatch):
    return lambda platform: monkeypatch.setattr(jax, "default_backend", lambda: platform)


@pytest.mark.parametrize(
    ("platform", "taker"), [("tpu", "tpu"), ("gpu", "hopper"), ("cpu", "xla"), ("metal", "xla")]
)
def test_platform_gets_its_best_backend(on_platform, platform, taker):
    on_platform(platform)
    backends = {name: takes(name) for name in ("reference", "xla", "gpu", "hopper", "tpu")}
    assert dispatch("op", backends, None, 1, b=2) == (taker, (1,), {"b": 2})


def traced_for(platform, device_kind):
    device = AbstractDevice(device_kind=device_kind, num_cores=1, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.parametrize(("target", "taker"), [("tpu", "tpu"), ("gpu", "hopper"), ("cpu", "xla")])
def test_program_for_another_chip_gets_its_backend(on_platform, target, taker):
    on_platform("cpu")
    backends = {name: takes(name) for name in ("xla", "gpu", "hopper", "tpu")}
    chosen = []

    @jax.jit
    def inner(x):
        chosen.append((dispatch("op", backends, None)[0], platform(), device_kind()))
        return x

    inner.trace(1.0)
    with traced_for(target, "a chip"):
        jax.jit(lambda x: inner(x) + 1).trace(1.0)
    inner.trace(1.0)  # cached, and still that of this machine
    own = ("xla", "cpu", jax.devices()[0].device_kind)
    assert chosen == [own, (taker, target, "a chip")]


def test_next_backend_is_tried_after_one_declines(on_platform):
    on_platform("gpu")
    backends = {"hopper": declines("no"), "gpu": takes("gpu"), "xla": takes("xla")}
    assert dispatch("op", backends, None)[0] == "gpu"


def test_backend_that_an_operator_lacks_is_skipped(on_platform):
    on_platform("tpu")
    assert dispatch("op", {"xla": takes("xla"), "reference": takes("reference")}, None)[0] == "xla"


def test_reference_is_never_chosen_by_default():
    assert all("reference" not in names for names in PREFERENCE.values())


def test_forced_backend_is_used_on_any_platform(on_platform):
    on_platform("tpu")
    backends = {"tpu": takes("tpu"), "reference": takes("reference")}
    assert dispatch("op", backends, "reference")[0] == "reference"


def test_forced_backend_that_declines_is_an_error(on_platform):
    on_platform("cpu")
    with pytest.raises(NoBackendError, match="gpu: needs sm_80") as caught:
        dispatch("op", {"gpu": declines("needs sm_80"), "xla": takes("xla")}, "gpu")
    assert "xla" not in str(caught.value)


def test_unknown_backend_error_lists_the_known_ones():
    with pytest.raises(ValueError, match="op has no backend 'cuda'; it has gpu, xla"):
        dispatch("op", {"xla": takes("xla"), "gpu": takes("gpu")}, "cuda")


def test_error_lists_every_reason_when_all_decline(on_platform):
    on_platform("gpu")
    backends = {
        "hopper": declines("not a Hopper"),
        "gpu": declines("head dim 7"),
        "xla": declines("x"),
    }
    with pytest.raises(NoBackendError) as caught:
        dispatch("op", backends, None)
    message = str(caught.value)
    for part in ("no backend of op", "hopper: not a Hopper", "gpu: head dim 7", "xla: x"):
        assert part in message


def test_other_errors_are_not_treated_as_declining(on_platform):
    on_platform("gpu")

    def broken(*args, **kwargs):
        raise ValueError("a real mistake")

    with pytest.raises(ValueError, match="a real mistake"):
        dispatch("op", {"gpu": broken, "xla": takes("xla")}, None)


@pytest.fixture
def logged(monkeypatch):
    lines = []
    monkeypatch.setattr(logging, "info", lambda text, *values: lines.append(text % values))
    log_choice.cache_clear()
    yield lines
    log_choice.cache_clear()


def test_taken_backend_is_logged_once_with_the_reasons_of_the_others(on_platform, logged):
    on_platform("gpu")
    backends = {"hopper": declines("not a Hopper"), "gpu": takes("gpu"), "xla": takes("xla")}
    for _ in range(3):  # as the layers of a program do
        dispatch("op", backends, None)
    dispatch("op", backends, "xla")
    assert logged == [
        "op: taken by gpu; declined by hopper: not a Hopper",
        "op: taken by xla",
    ]


@pytest.mark.parametrize(
    ("forced", "expected"), [(None, None), ("gpu", "gpu"), ("hopper", "gpu"), ("tpu", "tpu")]
)
def test_forced_name_stays_on_its_platform_in_another_operator(forced, expected):
    assert sibling_in({"xla": takes("xla"), "gpu": takes("gpu")}, forced) == expected
