"""Switches that hold for every test: the CPU, and shapes in signatures checked."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Before jax is imported: tests run on the CPU, whatever the machine has.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Before triton is: its kernels run on CPU tensors.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's background job, as CI may be one, ignores Ctrl-C, and so would what tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from typing import Any

import jax
import pytest

from tests.support import shape_checks

shape_checks.install()

from jaxinfer.execution import compilation_cache  # noqa: E402  (after the hook)
from tests.support import matrix  # noqa: E402

LEFT_OUT = pytest.StashKey[int]()
WORKERS_LEFT_OUT = pytest.StashKey[int]()

# Tests make many engines of few shapes: compile each program once a machine, not once an engine.
compilation_cache.enable()


# Linux allows a process 65,530 memory maps, a compiled program takes hundreds, and XLA aborts past
# them.
MANY_MAPS = 30_000


@pytest.fixture(autouse=True, scope="module")
def _programs_do_not_pile_up() -> Iterator[None]:
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def _ctrl_c_still_interrupts() -> Iterator[None]:
    """What swallows Ctrl-C in one test would do so in those behind it."""
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-parity",
        action="store_true",
        help="fail when a parity or conformance test is skipped (CI)",
    )
    parser.addoption(
        "--require-browser",
        action="store_true",
        help="fail when a test that drives a browser is skipped (CI)",
    )
    parser.addoption(
        "--matrix",
        default=matrix.FIRST,
        metavar="CHOICE",
        help="cases of tests marked `matrix`: first (one of each), all, or any other word, which "
        "adds the tenth that it chooses (CI gives the commit)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen, left_out = matrix.choose(items, str(config.getoption("--matrix")))
    config.stash[LEFT_OUT] = len(left_out)
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(chosen, key=lambda item: item.get_closest_marker("long") is None)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was left out. Under xdist the workers collect, and each counts the same cases."""
    num_left_out = config.stash.get(LEFT_OUT, None)
    if num_left_out is None:  # the controller of xdist collects nothing itself
        num_left_out = config.stash.get(WORKERS_LEFT_OUT, 0)
    if num_left_out:
        terminalreporter.write_line(
            f"left out: {num_left_out:,} cases, of matrices that repeat a check and of long tests "
            "that CI runs (make test-all, or --matrix=all, runs every case)"
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist tells the controller how many cases it left out."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    node.config.stash[WORKERS_LEFT_OUT] = output.get("left_out", 0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """A skip of what --require-... asks to run is a failure, with the skip's reason."""
    outcome = yield
    report = outcome.get_result()
    required = [("parity", "parity"), ("conformance", "parity"), ("browser", "browser")]
    must_run = any(
        item.get_closest_marker(marker) and item.config.getoption(f"--require-{option}")
        for marker, option in required
    )
    if report.skipped and must_run:
        report.outcome = "failed"
        report.longrepr = f"skipped where it must run: {report.longrepr}"
