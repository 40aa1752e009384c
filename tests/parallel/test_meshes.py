"""Eight devices generate the same tokens as one, on every applicable mesh and for every family.

`make test` runs the meshes of `FIRST`, which use every axis; CI adds a tenth of the 110 meshes of
all families, and `--matrix=all` runs them all.
"""

from __future__ import annotations

import pytest

from tests.support import matrix, mesh_bench
from tests.support.child_process import findings
from tests.support.paths import SUPPORT

CHILD = SUPPORT / "mesh_child.py"
EVERY_AXIS = "mixtral"  # the family that every axis shards
FIRST: dict[str, tuple[dict[str, int], ...]] = {
    "llama": ({"tensor": 8},),
    "gpt_neox": ({"seq": 4, "tensor": 2},),
    "mixtral": (
        {"expert": 4, "tensor": 2},
        {"pipe": 2, "seq": 2, "tensor": 2},
        {"data": 2, "pipe": 2, "tensor": 2},
    ),
    "deepseek_v3": ({"pipe": 2, "expert": 2, "tensor": 2},),
}


def meshes_to_run(family: str, choice: str) -> list[dict[str, int]]:
    """Return the meshes of a family that `--matrix=choice` selects."""
    return [
        mesh
        for mesh in mesh_bench.meshes(family)
        if choice == matrix.ALL
        or mesh in FIRST[family]
        or (
            choice != matrix.FIRST
            and matrix.is_in_share(f"{family}:{mesh_bench.format_mesh(mesh)}", choice)
        )
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family == EVERY_AXIS else pytest.mark.once)
        for family in mesh_bench.FAMILIES
    ],
)
def test_tokens_are_independent_of_the_mesh(family, request):
    meshes = meshes_to_run(family, request.config.getoption("--matrix"))
    meshes.sort(key=mesh_bench.layers_for)  # one device runs once per number of layers
    texts = [mesh_bench.format_mesh(mesh) for mesh in meshes]
    found = findings(CHILD, family, *texts, timeout_s=1800)
    assert found.keys() == set(texts)
    wrong = {
        mesh: (run["mesh"]["tokens"], run["alone"]["tokens"])
        for mesh, run in found.items()
        if run["mesh"]["tokens"] != run["alone"]["tokens"]
    }
    assert not wrong
    for text, run in found.items():  # the features under test must occur
        assert run["alone"]["preemptions"] and run["alone"]["shared"] and run["mesh"]["shared"]
        assert bool(run["mesh"]["passes"]) == ("seq" in text), f"{text}: ring attention"
        # A replica has as many pages as one device but fewer requests, so all may fit.
        assert run["mesh"]["preemptions"] or "data" in text, text


def test_families_have_35_or_20_meshes_of_eight_devices():
    counts = {family: len(list(mesh_bench.meshes(family))) for family in mesh_bench.FAMILIES}
    assert counts == {"llama": 20, "gpt_neox": 20, "mixtral": 35, "deepseek_v3": 35}


def test_every_axis_occurs_in_a_mesh_that_always_runs():
    first = [mesh for meshes in FIRST.values() for mesh in meshes]
    assert {axis for mesh in first for axis in mesh} == {"data", "pipe", "seq", "expert", "tensor"}
    for family, meshes in FIRST.items():
        every = list(mesh_bench.meshes(family))
        assert all(mesh in every for mesh in meshes)
        assert meshes_to_run(family, matrix.ALL) == every
        assert [mesh for mesh in every if mesh in meshes] == meshes_to_run(family, matrix.FIRST)
