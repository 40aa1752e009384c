"""docs/models.md says of the registry what the tests found."""

import re

import pytest

from jaxinfer.models import GGUF_FAMILIES, HF_FAMILIES
from tests.references import make_models_page
from tests.support.paths import ROOT

# A wrapper of another family, with which test_config_defaults_dense.py compares it.
WRAPPERS = {"mistral3"}


def _rows() -> dict[str, list[str]]:
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    table = page.partition(make_models_page.BEGIN)[2].partition(make_models_page.END)[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {row[0]: row for row in rows}


def test_every_family_of_the_registry_is_on_the_page_and_no_other():
    rows = _rows()
    named = {family.models for name, family in HF_FAMILIES.items() if name not in WRAPPERS}
    assert rows.keys() == named, "run tests/references/make_models_page.py"
    model_types = {name for row in rows.values() for name in re.findall(r"`([^`]+)`", row[1])}
    assert model_types == HF_FAMILIES.keys() - WRAPPERS
    architectures = {name for row in rows.values() for name in re.findall(r"`([^`]+)`", row[3])}
    assert architectures == set(GGUF_FAMILIES), "an architecture without a test"


PASSED = '<testcase name="test_x[dense-mistral]"><properties/></testcase>'


@pytest.mark.parametrize(
    "other",
    [
        '<testcase name="test_x[dense-a b]"><failure/></testcase>',
        '<testcase name="test_y"><error/></testcase>',
        '<testcase name="test_x[dense-qwen2]"><skipped/></testcase>',
    ],
)
def test_results_with_a_failure_make_no_page(other, tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuite>{PASSED}</testsuite>", "utf-8")
    [result] = make_models_page.read_report(report)
    assert result == ("test_x", "dense/mistral", None)
    report.write_text(f"<testsuite>{PASSED}{other}</testsuite>", "utf-8")
    with pytest.raises(ValueError, match="failed or skipped"):
        make_models_page.read_report(report)
