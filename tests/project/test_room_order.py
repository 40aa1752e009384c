"""The rooms of the code base in order: each imports only those below it, without a circle.

An import inside a function or under `TYPE_CHECKING` counts like any other.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.sources import import_graph

# From the bottom up. A module belongs to the room with the longest matching name. A room may import
# itself and every room above it in this list.
ROOMS: dict[str, tuple[str, ...]] = {
    "basics": ("jaxinfer.environment", "jaxinfer.options", "jaxinfer.version"),
    "kernels": ("jaxinfer.kernels",),
    "sharding": ("jaxinfer.sharding",),
    "text": ("jaxinfer.text",),
    "sampling parameters": ("jaxinfer.sampling.params",),
    "config": ("jaxinfer.config",),
    "layers": ("jaxinfer.nn",),
    "models": ("jaxinfer.models",),
    "hosts": ("jaxinfer.parallel.hosts",),
    "sharded model": ("jaxinfer.parallel.sharded_model", "jaxinfer.parallel.mesh_options"),
    "loading": ("jaxinfer.loading",),
    "scheduling": (
        "jaxinfer.engine.admission",
        "jaxinfer.engine.pages",
        "jaxinfer.engine.policies",
        "jaxinfer.engine.request",
        "jaxinfer.engine.scheduler",
        "jaxinfer.engine.stats",
    ),
    "sampling": ("jaxinfer.sampling",),
    "execution": ("jaxinfer.execution",),
    "split forward pass": ("jaxinfer.parallel.forward", "jaxinfer.parallel.pipeline"),
    "engine": ("jaxinfer.engine",),
    "replicas": ("jaxinfer.parallel",),
    "embedding": ("jaxinfer.embedding",),
    "build": ("jaxinfer.build", "jaxinfer.llm"),
    "package": ("jaxinfer",),
    "serving": ("jaxinfer.serving",),
    "tools": ("jaxinfer.tools",),
    "command": ("jaxinfer.cli", "jaxinfer.__main__"),
}


def room_of(module: str) -> str:
    """The room of the longest name that `module` is below."""
    found = {
        name: room
        for room, names in ROOMS.items()
        for name in names
        if module == name or module.startswith(name + ".")
    }
    return found[max(found, key=len)]


def test_modules_form_no_circle():
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' <- '.join(error.args[1])}")


def test_rooms_import_only_the_rooms_below_them():
    order = list(ROOMS)
    wrong = [
        f"{module} ({room_of(module)}) imports {target} ({room_of(target)})"
        for module, targets in import_graph().items()
        for target in targets
        if order.index(room_of(target)) > order.index(room_of(module))
    ]
    assert not wrong


def test_every_room_has_modules():
    assert {room_of(module) for module in import_graph()} == set(ROOMS)


def test_the_config_imports_no_attention_backend():
    graph = import_graph()
    reached, todo = set(), ["jaxinfer.config"]
    while todo:
        module = todo.pop()
        if module not in reached:
            reached.add(module)
            todo += graph[module]
    assert not [m for m in reached if m.startswith("jaxinfer.kernels.paged_attention")]
