"""Hashes of the source code that a compiled program depends on.

A module depends on what it imports, directly or not. Its code is hashed as a syntax tree without
comments, layout, docstrings, the texts of errors and imports for type checkers, so that rewording
changes no hash.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HASH_CHARACTERS = 16

# Installed from folders of their own, which the folder of `jaxinfer` need not hold.
PACKAGES = ("jaxinfer", "jaxinfer.kernels", "jaxinfer.sharding")

# Modules that decide no compiled program although a step's modules import them: not followed.
IGNORED = (
    "jaxinfer.engine",
    "jaxinfer.loading",
    "jaxinfer.parallel.hosts",
    "jaxinfer.text",
    "jaxinfer.tools.compile_gate.matrix",  # what is read from its TOML files is hashed as data
)
# Parts of ignored packages that do: the forms and shardings of weights.
FOLLOWED = (
    "jaxinfer.loading.placement",
    "jaxinfer.loading.quantize",
    "jaxinfer.loading.splitting",
    "jaxinfer.loading.targets",
)


def digest(value: Any) -> str:
    """A hash of a value that JSON can hold."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]


def installed_modules() -> dict[str, Path]:
    """Every module of the installed package, by its name."""
    found = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations is not None, package
        folder = Path(spec.submodule_search_locations[0])
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


class SourceTree:
    """Modules by name, with hashes of what each depends on."""

    def __init__(self, modules: Mapping[str, Path]):
        self._modules = modules
        self._parsed = functools.cache(self._parse)
        self._digests: dict[tuple[str, ...], str] = {}

    def below(self, package: str) -> list[str]:
        """The modules of a package, itself among them."""
        return sorted(m for m in self._modules if m == package or m.startswith(f"{package}."))

    def closure(self, roots: Sequence[str]) -> set[str]:
        """The roots and every module that they import, directly or not.

        Raises `ValueError` for a root that does not exist.
        """
        if missing := [name for name in roots if name not in self._modules]:
            raise ValueError(f"no module {', '.join(missing)} to hash")
        found: set[str] = set()
        left = list(roots)
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                imported = self._parsed(name)[1]
                left += [m for m in imported if m in self._modules and not _is_ignored(m)]
        return found

    def digest(self, roots: Sequence[str]) -> str:
        """A hash of the code of `closure(roots)`."""
        key = tuple(roots)
        if key not in self._digests:
            modules = sorted(self.closure(roots))
            self._digests[key] = digest([[name, self._parsed(name)[0]] for name in modules])
        return self._digests[key]

    def _parse(self, name: str) -> tuple[str, list[str]]:
        """A module's normalised code and the names it imports."""
        tree = parse_code(self._modules[name].read_text("utf-8"))
        return dump(tree), list(imported_names(tree))


def _is_ignored(module: str) -> bool:
    def lies_in(packages: Sequence[str]) -> bool:
        return any(module == p or module.startswith(f"{p}.") for p in packages)

    return lies_in(IGNORED) and not lies_in(FOLLOWED)


def parse_code(source: str) -> ast.Module:
    """The syntax tree without what no program depends on."""
    tree = ast.parse(source)
    return _Normaliser().visit(tree)


class _Normaliser(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Remove docstrings, of attributes too."""
        value = node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return None
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """Keep the class of an error, not its text."""
        if isinstance(node.exc, ast.Call):
            node.exc = node.exc.func
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        node.msg = None
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> Any:
        """Remove what is imported for type checkers alone."""
        test = node.test
        name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
        if name == "TYPE_CHECKING":
            return [self.visit(statement) for statement in node.orelse]
        return self.generic_visit(node)


def dump(node: Any) -> str:
    """A tree as text that is the same for every version of Python: absent fields are left out."""
    if isinstance(node, ast.AST):
        fields = [
            f"{name}={dump(value)}"
            for name, value in ast.iter_fields(node)
            if value is not None and value != []
        ]
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(dump, node))}]"
    return repr(node)


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Names that may be modules, of imports anywhere in a module: `a.b` and `a.b.c` of
    `from a.b import c`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
