"""The choice of matrix cases: every case runs in the whole suite, and a share in each CI run."""

from __future__ import annotations

import pytest

from tests.support import matrix

pytest_plugins = ["pytester"]

SUITE = """
import pytest

@pytest.mark.matrix(by="backend")
@pytest.mark.parametrize("backend", ["a", "b"])
@pytest.mark.parametrize("case", range(50))
def test_case(backend, case):
    pass

def test_plain():
    pass

@pytest.mark.ci
def test_long():
    pass
"""


def test_shares_differ_by_seed_and_cover_every_case():
    cases = [f"tests/test_x.py::test_y[{i}]" for i in range(500)]
    shares = [{c for c in cases if matrix.is_in_share(c, f"commit-{n}")} for n in range(100)]
    assert all(25 <= len(share) <= 80 for share in shares)
    assert shares[0] != shares[1]
    assert set().union(*shares) == set(cases)


@pytest.mark.parametrize(
    ("choice", "least", "most"), [("first", 3, 3), ("all", 102, 102), ("0f3c", 5, 31)]
)
def test_matrix_option_chooses_cases(pytester, choice, least, most):
    pytester.makeini("[pytest]\nmarkers =\n    matrix(by=()): x\n    ci: y\n")
    pytester.makeconftest(
        "from tests.support import matrix\n"
        "def pytest_collection_modifyitems(items):\n"
        f"    items[:] = matrix.choose(items, {choice!r})[0]\n"
    )
    pytester.makepyfile(SUITE)
    outcome = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider")
    assert least <= outcome.parseoutcomes()["passed"] <= most


def test_unknown_parameter_of_a_matrix_is_an_error(pytester):
    pytester.makeini("[pytest]\nmarkers =\n    matrix(by=()): x\n    ci: y\n")
    pytester.makeconftest(
        "from tests.support import matrix\n"
        "def pytest_collection_modifyitems(items):\n"
        "    matrix.choose(items, 'first')\n"
    )
    pytester.makepyfile(SUITE.replace('by="backend"', 'by="chip"'))
    outcome = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider")
    assert outcome.ret == pytest.ExitCode.USAGE_ERROR
