"""The tuner and the kernels' cases: every searched case has tilings under its key."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.tools import kernel_calls, kernel_cases
from jaxinfer.tools.tuner import search
from jaxinfer.tools.tuner import tune as tune_kernels


def test_only_tunable_cases_are_searched(monkeypatch):
    tune_kernels.FLAGS(["tune_kernels.py"])
    found, broken = tune_kernels.tuning_jobs(["paged_attention", "quantized_matmul"], "tpu")
    names = {(row["operator"], row["case"]) for row in found}
    assert ("paged_attention", "llama3_8b decode") in names and not broken
    assert not any("update" in name or "activations" in name for _, name in names)


# Chips by backend; where a backend is not in it, nothing is tuned.
CHIPS = {
    "tpu": [("tpu", kind) for kind in ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x")],
    "gpu": [("gpu", "NVIDIA A100-SXM4-80GB"), ("gpu", "NVIDIA H100 80GB HBM3")],
    "hopper": [("gpu", "NVIDIA H100 80GB HBM3")],
}
UNTUNED = [("rope_and_write", "tpu")]


@pytest.mark.parametrize("operator", kernel_cases.operators())
def test_every_tunable_case_has_tilings_under_its_key(operator, monkeypatch):
    pytest.importorskip("triton")
    reached: dict[str, bool] = {}  # whether a backend took any case
    for is_tiny in (False, True):
        for name, case in kernel_cases.load(operator, tiny=is_tiny).items():
            wanted = {"gpu"} if is_tiny else CHIPS.keys()  # a rehearsal has no TPU
            tuned = [b for b in case.backends if b in wanted and (operator, b) not in UNTUNED]
            for backend in tuned if case.is_tunable else []:
                for platform, kind in CHIPS[backend]:
                    with traced_for(platform, kind):
                        key, tilings = search.search_space(
                            {"operator": operator, "backend": backend}, case
                        )
                        asked = looked_up(operator, backend, case, monkeypatch)
                    reached[backend] = reached.get(backend, False) or asked is not None
                    place = f"{operator}/{backend} {name} on {kind}"
                    assert tilings and all(map(dataclasses.is_dataclass, tilings)), place
                    assert asked in ((f"{operator}/{backend}", key), None), place
    assert reached and all(reached.values()), reached


class Asked(Exception):
    """A backend looked for a tiling."""


def looked_up(operator: str, backend: str, case: Any, monkeypatch) -> Any:
    """The operator and key of a call's tiling; None where the backend declines."""

    def ask(heuristic, *place):
        raise Asked(place)

    for name, module in list(sys.modules.items()):
        if name.startswith(f"jaxinfer.kernels.{operator}.") and hasattr(module, "tuned"):
            monkeypatch.setattr(module, "tuned", ask)
    arrays, _ = kernel_calls.split_options(case.options)
    try:
        jax.eval_shape(kernel_calls.call_of(case, backend), case.arguments, arrays)
    except Asked as asked:
        return asked.args[0]
    except NotImplementedError:
        return None
    raise AssertionError(f"{operator}/{backend} has tilings and looks for none")


@contextlib.contextmanager
def traced_for(platform: str, kind: str):
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        yield
