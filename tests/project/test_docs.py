"""What the documents tell a reader to run runs: every bash and python block, and the notebooks."""

import os
import re
import subprocess
import sys

import nbformat
import pytest

from jaxinfer.cli.commands import find_command
from tests.support.paths import ROOT

DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# Blocks whose commands set up or run the whole suite: not from inside it. What stands behind each
# `make` target is run by CI, or by the test named here.
NOT_HERE = {
    "make test": "the suite itself",
    "make serve": "test_serve_process.py runs the subcommand, and serving.md's example",
    "make run": "test_make_targets_name_what_exists, and test_smollm2.py runs the subcommand",
    "make .venv/.dev": "the environment that this test runs in",
    "make bench": "minutes of measuring; test_bench.py runs its cases in small",
    "jaxinfer bench offline": "the same",
}


def blocks(language: str) -> list:
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [
        pytest.param(block, id=f"{path.name}-{i}")
        for path in DOCS
        for i, block in enumerate(pattern.findall(path.read_text("utf-8")))
    ]


def in_this_environment(command: str) -> str:
    """The command with this interpreter in place of the clone's environment."""
    programs = {"python": sys.executable, "jaxinfer": f"{sys.executable} -m jaxinfer"}
    return re.sub(r"(?<!\S)\.venv/bin/(\w+)", lambda match: programs[match[1]], command)


@pytest.mark.ci
@pytest.mark.once
@pytest.mark.parametrize("block", blocks("bash"))
def test_every_command_in_the_documents_runs(block, tmp_path):
    lines = [line.partition("  #")[0].strip() for line in block.splitlines()]
    wanted = [line for line in lines if line and not any(skip in line for skip in NOT_HERE)]
    if not wanted:
        return
    bare = [line for line in wanted if line.startswith(("python", "jaxinfer"))]
    assert not bare, f"{bare} runs what is first on the PATH: say .venv/bin/python"
    script = "\n".join(wanted)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", in_this_environment(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


@pytest.mark.ci
@pytest.mark.once
@pytest.mark.parametrize("block", blocks("python"))
def test_every_example_in_the_documents_runs(block):
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:jaxinfer", "-c", block],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.ci
@pytest.mark.once
@pytest.mark.filterwarnings("default")  # the notebook machinery's own
@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.name)
def test_every_notebook_runs_from_top_to_bottom(path, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    notebook = nbformat.read(path, as_version=4)
    assert all(not c.get("outputs") for c in notebook.cells), "commit notebooks without outputs"
    kernel = tmp_path / "kernels" / "here"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(
        f'{{"argv": ["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"],'
        ' "display_name": "here", "language": "python"}'
    )
    os.environ["JUPYTER_PATH"] = str(tmp_path)
    try:
        nbclient.NotebookClient(notebook, timeout=300, kernel_name="here").execute()
    finally:
        del os.environ["JUPYTER_PATH"]


def test_links_between_documents_lead_somewhere():
    for path in DOCS:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text("utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_make_targets_name_what_exists():
    """`make run`, `make bench` and the rest call subcommands and presets that exist."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert not re.findall(r"scripts/\w+\.py", makefile)
    commands = re.findall(r"/bin/jaxinfer ([a-z -]+?)(?= --| \$|$)", makefile, re.M)
    assert {find_command(command.split())[0] for command in commands} == set(commands)
    assert {"generate", "serve", "bench offline", "compile-check"} <= set(commands)
    for preset in re.findall(r"--config=(\w+)", makefile):
        assert (ROOT / "configs" / f"{preset}.toml").exists(), preset
    targets = ["run", "serve", "test", "bench"]
    dry = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr


def test_make_run_passes_the_prompt_as_it_was_typed():
    """No dollar sign is lost, and nothing in it is run."""
    prompt = "costs $5, $HOME, $(shell echo no) and 'quotes'"
    done = subprocess.run(
        ["make", "--silent", "print-prompt", f"PROMPT={prompt}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == prompt, done.stderr
