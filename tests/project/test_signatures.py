"""How many parameters a function may have, by syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FOLDERS = ("jaxinfer", "kernels", "sharding", "serving", "scripts", "tests")
MAX_PARAMETERS = 8


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """All but `self` and `cls`; `*args` and `**options` count as one each."""
    given = function.args
    names = [x.arg for x in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    stars = [x for x in (given.vararg, given.kwarg) if x is not None]
    return len([name for name in names if name not in ("self", "cls")]) + len(stars)


def is_kernel_body(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """What Pallas or Triton traces: its parameters are the memory that the kernel works on."""
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return path.name.endswith("_kernel.py") or "triton.jit" in decorators


def too_many(path: Path) -> list[str]:
    return [
        f"{path.name}:{function.lineno} {function.name}: {num_parameters(function)} parameters"
        for function in functions(path.read_text(encoding="utf-8"))
        if num_parameters(function) > MAX_PARAMETERS and not is_kernel_body(path, function)
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_take_at_most_eight_parameters(folder):
    generated = ROOT / "serving" / "protos"  # gRPC's generator decides its signatures
    paths = [p for p in sorted((ROOT / folder).rglob("*.py")) if generated not in p.parents]
    assert not [line for path in paths for line in too_many(path)]


def test_the_check_counts_every_kind_of_parameter(tmp_path):
    names = ", ".join("abcdefg")
    path = tmp_path / "module.py"
    path.write_text(f"class A:\n def f(self, {names}, *rest, **options): ...\n")
    assert too_many(path) == ["module.py:2 f: 9 parameters"]
    path.write_text(f"def f({names}, *, h): ...\n")
    assert not too_many(path)
    path.write_text(f"@triton.jit\ndef f({names}, h, i): ...\n")
    assert not too_many(path)
