"""The rules of the source: what may be imported, where jit belongs, how long a file may be.

The order of the rooms is in `test_room_order.py`.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.sources import FOLDERS, PACKAGES, Imported, imports, label, sources, tree, uses

# Integers and text only: these are tested, and understood, without arrays.
ARRAY_FREE = (
    "jaxinfer/engine/pages.py",
    "jaxinfer/engine/policies.py",
    "jaxinfer/engine/request.py",
    "jaxinfer/parallel/routing.py",
    "jaxinfer/sampling/params.py",
    "jaxinfer/engine/scheduler.py",
)
# What `serving` may know of the engine.
ENGINE_SURFACE = {
    "jaxinfer",
    "jaxinfer.config",
    "jaxinfer.embedding.embedder",
    "jaxinfer.engine.outputs",
    "jaxinfer.execution.host_tuning",
    "jaxinfer.parallel.hosts",
    "jaxinfer.llm",
    "jaxinfer.loading.checkpoint",
    "jaxinfer.build",
    "jaxinfer.options",
    "jaxinfer.parallel.replicas",
    "jaxinfer.engine.request",
    "jaxinfer.sampling.params",
    "jaxinfer.embedding.sentences",
    "jaxinfer.engine.stats",
    "jaxinfer.text.tokenizer",
    "jaxinfer.text.chat_template",
    "jaxinfer.serving",
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def offenders(folders: tuple[str, ...], is_wrong) -> list[str]:
    return wrong_imports(sources(*folders), is_wrong)


def wrong_imports(paths: list[Path], is_wrong) -> list[str]:
    return [
        f"{label(path)}:{imported.line} imports {imported.module} ({imported.name})"
        for path in paths
        for imported in imports(path)
        if is_wrong(imported)
    ]


def test_there_is_something_to_check():
    assert len(sources("jaxinfer")) > 20 and len(sources("kernels")) >= 4
    assert all((ROOT / path).is_file() for path in ARRAY_FREE)


def test_the_packages_map_their_folders():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for folder, name in PACKAGES.items():
        if sources(folder):
            assert setup["package-dir"].get(name) == folder, name
    expected = {
        ".".join([PACKAGES[top], *path.parent.relative_to(ROOT / top).parts])
        for top in PACKAGES
        for path in sources(top)
        if path.name == "__init__.py"
    }
    assert set(setup["packages"]) == expected, "every package is in the wheel"


def test_the_product_imports_no_script_or_test():
    above = ("scripts", "tests", "pytest", "hypothesis")
    assert not offenders(tuple(PACKAGES), lambda imported: imported.is_below(*above))


def test_serving_sees_the_engine_by_its_surface_alone():
    def is_wrong(imported: Imported) -> bool:
        if not imported.is_below("jaxinfer"):
            return imported.is_below("scripts", "tests")
        if imported.is_below("jaxinfer.serving"):
            return False
        full = f"{imported.module}.{imported.name}"
        is_module = (ROOT / (full.replace(".", "/") + ".py")).is_file()
        return (full if is_module else imported.module) not in ENGINE_SURFACE

    assert not offenders(("serving",), is_wrong)


def test_nobody_imports_a_top_level_name_that_is_a_folder_of_ours():
    ours = ("kernels", "sharding", "serving", "configs", "scripts")
    assert not offenders(FOLDERS, lambda imported: imported.is_below(*ours))


@pytest.mark.parametrize("name", ARRAY_FREE)
def test_scheduling_is_plain_python(name):
    allowed = {path.removesuffix(".py").replace("/", ".") for path in ARRAY_FREE}
    for imported in imports(ROOT / name):
        top = imported.module.partition(".")[0]
        assert top in sys.stdlib_module_names or imported.module in allowed, imported


def test_the_packed_batch_is_built_without_jax():
    assert not any(
        i.is_below("jax", "jaxlib", "flax") for i in imports(ROOT / "jaxinfer/execution/batch.py")
    )


def runtime_sources() -> list[Path]:
    """The product without its tools and its command, which run on a developer's machine too."""
    apart = ("jaxinfer/tools/", "jaxinfer/cli/")
    return [path for path in sources(*PACKAGES) if not label(path).startswith(apart)]


def test_the_product_imports_what_it_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"]]
    for extra in ("tpu", "triton", "serve", "tracing"):
        declared += extras.get(extra, [])
    names = {
        requirement.split(">")[0].split("[")[0].strip().lower().replace("-", "_")
        for requirement in declared
    }
    renamed = {
        "absl": "absl_py",
        "google": "protobuf",
        "grpc": "grpcio",
        "grpc_health": "grpcio_health_checking",
        "grpc_reflection": "grpcio_reflection",
        "opentelemetry": "opentelemetry_sdk",
        "orbax": "orbax_checkpoint",
    }

    def is_wrong(imported: Imported) -> bool:
        top = imported.module.partition(".")[0]
        is_known = top in sys.stdlib_module_names or top == "jaxinfer"
        return not is_known and renamed.get(top, top) not in names

    assert not wrong_imports(runtime_sources(), is_wrong)


def test_nothing_is_unpickled():
    loaders = ("pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch")
    assert not wrong_imports(runtime_sources(), lambda i: i.is_below(*loaders))
    assert not [
        use
        for path in sources(*PACKAGES)
        for use in uses(path, "np.load", "numpy.load", "numpy.fromfile")
    ]


def test_the_environment_is_read_in_one_place():
    readers = {
        use.partition(":")[0]
        for path in runtime_sources()
        for use in uses(path, "os.environ", "os.getenv", "os.putenv", "os.environb")
    }
    assert readers <= {"jaxinfer/environment.py"}


def test_programs_are_made_in_the_step_alone():
    users = {
        use.partition(":")[0]
        for path in runtime_sources()
        if label(path).startswith("jaxinfer/")
        for use in uses(
            path, "jax.jit", "nnx.jit", "flax.nnx.jit", "jax.pmap", "jax.experimental.pjit"
        )
    }
    # An encoder's whole step is the embedder's. The decoder's is part of a program: it lets equal
    # layers share one trace. Random weights are drawn in parts, which a constraint inside a program
    # alone can ask for. Compiling asks XLA what it knows by a program that does nothing.
    assert users == {
        "jaxinfer/execution/programs.py",
        "jaxinfer/execution/compile.py",
        "jaxinfer/embedding/embedder.py",
        "jaxinfer/models/decoder.py",
        "jaxinfer/loading/random.py",
    }


def test_jit_is_applied_once_a_program_and_at_module_level():
    for path in runtime_sources():
        inside = [
            f"{label(path)}:{node.lineno}"
            for function in ast.walk(tree(path))
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for node in ast.walk(ast.Module(list(_body(function)), []))
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.jit"
        ]
        assert not inside, "a jit made in a call compiles in every call"


def _body(function: ast.AST) -> list[ast.stmt]:
    body = getattr(function, "body", [])
    return body if isinstance(body, list) else [ast.Expr(body)]


def test_no_function_rebinds_a_global():
    assert not [
        f"{label(path)}:{node.lineno}"
        for path in sources(*FOLDERS)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Global)
    ]


def test_files_and_functions_stay_short():
    long = []
    for path in sources(*FOLDERS):
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_FILE_LINES:
            long.append(f"{label(path)}: {num_lines} lines")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                num_lines = (node.end_lineno or first) - first + 1
                if num_lines > MAX_FUNCTION_LINES:
                    long.append(f"{label(path)}:{node.lineno} {node.name}: {num_lines} lines")
    assert not long


def test_every_file_of_the_product_says_what_it_is():
    for path in sources("jaxinfer", "kernels", "sharding", "serving", "scripts"):
        if path.read_text(encoding="utf-8").strip():
            assert ast.get_docstring(tree(path)), f"{label(path)} has no docstring"


def test_nothing_is_left_to_do_in_the_source():
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    for path in sources(*FOLDERS):
        text = path.read_text(encoding="utf-8")
        assert not any(mark in text for mark in marks), label(path)


def test_the_check_itself_sees_offences(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(
        "import os\nfrom jax import jit\nfrom jaxinfer import engine\nos.environ['A']\n"
    )
    found = list(imports(path))
    assert found[1] == Imported("jax", "jit", 2)
    assert found[2].is_below("jaxinfer.engine") and found[2].is_below("jaxinfer")
    assert not found[2].is_below("jaxinfer.eng")
