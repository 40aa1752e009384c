"""Law 7: one device and eight give the same tokens, on every mesh that applies, in every family.

Those meshes run in which each axis, and each pair of axes that go together, occurs;
`--all-meshes=llama` runs all of one family, `--all-meshes=all` all of all.
"""

from __future__ import annotations

import pytest

from tests.support import mesh_bench
from tests.support.child_process import findings
from tests.support.paths import SUPPORT

CHILD = SUPPORT / "mesh_child.py"
EVERY_AXIS = "mixtral"  # the family that all axes split
HALVES = (0, 1)  # of a family's meshes, for two processes
CHOSEN = (
    {"tensor": 8},
    {"pipe": 4, "tensor": 2},
    {"seq": 4, "tensor": 2},
    {"pipe": 2, "seq": 2, "tensor": 2},
    {"data": 2, "pipe": 2, "tensor": 2},
    {"data": 2, "seq": 4},
)
CHOSEN_WITH_EXPERTS = (
    {"expert": 8},
    {"expert": 4, "tensor": 2},
    {"pipe": 2, "expert": 2, "tensor": 2},
    {"seq": 2, "expert": 2, "tensor": 2},
    {"data": 2, "expert": 4},
)


def meshes_to_run(family: str, *, run_all: bool) -> list[dict[str, int]]:
    if run_all:
        return list(mesh_bench.meshes(family))
    return [*CHOSEN, *(CHOSEN_WITH_EXPERTS if family in mesh_bench.WITH_EXPERTS else ())]


@pytest.mark.long
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family == EVERY_AXIS else pytest.mark.once)
        for family in mesh_bench.FAMILIES
    ],
)
def test_tokens_do_not_depend_on_the_mesh(family, half, request):
    run_all = request.config.getoption("--all-meshes") in ("all", family)
    meshes = meshes_to_run(family, run_all=run_all)
    meshes.sort(key=mesh_bench.layers_for)  # one run on one device for each number of layers
    size = -(-len(meshes) // len(HALVES))
    texts = [mesh_bench.spelled(mesh) for mesh in meshes[half * size : (half + 1) * size]]
    found = findings(CHILD, family, *texts, timeout_s=1800)
    assert found.keys() == set(texts)
    wrong = {
        mesh: (run["mesh"]["tokens"], run["alone"]["tokens"])
        for mesh, run in found.items()
        if run["mesh"]["tokens"] != run["alone"]["tokens"]
    }
    assert not wrong
    for text, run in found.items():  # else less is tested than is said
        assert run["alone"]["preemptions"] and run["alone"]["shared"] and run["mesh"]["shared"]
        assert bool(run["mesh"]["passes"]) == ("seq" in text), f"{text}: round the ring"
        # A replica has as many pages as one device, and fewer requests: they may all fit.
        assert run["mesh"]["preemptions"] or "data" in text, text


def test_all_meshes_of_eight_devices_are_35_and_20():
    counts = {family: len(list(mesh_bench.meshes(family))) for family in mesh_bench.FAMILIES}
    assert counts == {"llama": 20, "gpt_neox": 20, "mixtral": 35, "deepseek_v3": 35}


@pytest.mark.parametrize("family", mesh_bench.FAMILIES)
def test_chosen_meshes_are_among_them(family):
    every = list(mesh_bench.meshes(family))
    assert all(mesh in every for mesh in meshes_to_run(family, run_all=False))
