"""The source files of the project as syntax trees, for tests of its rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT

# Folder -> the name that its modules are imported by. Scripts and tests are run, not imported.
PACKAGES = {
    "jaxinfer": "jaxinfer",
    "kernels": "jaxinfer.kernels",
    "sharding": "jaxinfer.sharding",
    "serving": "jaxinfer.serving",
    "configs": "jaxinfer.configs",
}
FOLDERS = (*PACKAGES, "scripts", "tests")


class Imported(NamedTuple):
    """`import module` or `from module import name`."""

    module: str
    name: str | None
    line: int

    def is_below(self, *packages: str) -> bool:
        full = self.module if self.name is None else f"{self.module}.{self.name}"
        return any(
            target == package or target.startswith(package + ".")
            for package in packages
            for target in (self.module, full)
        )


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[Imported]:
    """Everything a file imports, wherever in it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Imported(alias.name, None, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{label(path)}:{node.lineno} imports relatively"
            for alias in node.names:
                yield Imported(node.module or "", alias.name, node.lineno)


def uses(path: Path, *dotted: str) -> list[str]:
    """Lines where `module.name` is named, or imported by `from module import name`."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in dotted:
            found.append(f"{label(path)}:{node.lineno}")
    for imported in imports(path):
        if f"{imported.module}.{imported.name}" in dotted:
            found.append(f"{label(path)}:{imported.line}")
    return found


def module_name(path: Path) -> str:
    """The dotted name that a file below one of `PACKAGES` is imported by."""
    top, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[top], *(part for part in rest if part != "__init__")])


@cache
def import_graph() -> dict[str, frozenset[str]]:
    """For each module of the product, those of the product that it names in an import.

    An import of `a.b.c` names `a.b.c` alone: that Python runs `a/__init__.py` first is left out.
    """
    modules = {module_name(path): path for path in sources(*PACKAGES)}
    graph = {}
    for name, path in modules.items():
        found = set()
        for imported in imports(path):
            full = f"{imported.module}.{imported.name}"
            target = full if full in modules else imported.module
            if target in modules and target != name:
                found.add(target)
        graph[name] = frozenset(found)
    return graph
