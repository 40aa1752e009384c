"""Write docs/models.md's table of families, from the registry and the results of the tests.

    python tests/references/make_models_page.py             runs the families' tests (minutes)
    python tests/references/make_models_page.py --results=junit.xml     uses the report of a run

A family is in the table if its tests passed: the logits and greedy tokens of its tiny checkpoints
compared with transformers, also from a GGUF file, and with quantized weights. Needs torch and
transformers.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags

from jaxinfer.models import GGUF_FAMILIES, HF_FAMILIES, Family
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.nn.layers import Numerics
from tests.support.families_encoders import CASES as ENCODERS
from tests.support.family_groups import GROUPS
from tests.support.paths import ROOT

FLAGS = flags.FLAGS
flags.DEFINE_string("results", None, "A JUnit report of these tests; without one they are run.")
flags.DEFINE_string("page", str(ROOT / "docs" / "models.md"), "The page whose table to replace.")

BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
HEAD = (
    "| family | `model_type` | equal to transformers | GGUF | weights packed | split by |\n"
    "| --- | --- | --- | --- | --- | --- |\n"
)
ALL_GROUPS = GROUPS | {"encoders": ENCODERS}
FILES = ("tests/models/test_families.py", "tests/models/test_encoders.py")
LIVE = {
    "test_logits_and_greedy_tokens_equal_transformers": "logits within {:.0e}; greedy tokens equal",
    "test_hidden_states_equal_transformers": "hidden states within {:.0e}",
}
GGUF = "test_gguf_file_is_the_same_model"
PACKED = "test_quantized_weights_equal_their_dequantized_arrays"


class Result(NamedTuple):
    """A passed test of a case; `difference` is the one it recorded, if any."""

    test: str
    case: str
    difference: float | None


def read_report(path: Path) -> list[Result]:
    """Read the passed tests of a JUnit report; raise `ValueError` if any failed or was skipped."""
    results, others = [], []
    for case in ElementTree.parse(path).iter("testcase"):
        if any(case.find(kind) is not None for kind in ("failure", "error", "skipped")):
            others.append(case.get("name"))
            continue
        matched = re.fullmatch(r"(\w+)\[(?:(\w+)-)?(\w+)\]", case.get("name", ""))
        if matched is None:  # not a test of one case
            continue
        values = {p.get("name"): p.get("value") for p in case.iter("property")}
        difference = values.get("difference")
        name = f"{matched[2] or 'encoders'}/{matched[3]}"
        results.append(Result(matched[1], name, None if difference is None else float(difference)))
    if others:
        raise ValueError(f"{path}: failed or skipped: {', '.join(map(str, others))}")
    return results


def table(results: Sequence[Result]) -> str:
    """Return the Markdown table; families without a passed parity test are left out."""
    by_test: Mapping[str, dict[str, Result]] = defaultdict(dict)
    for result in results:
        by_test[result.test][result.case] = result
    families: dict[int, Family] = {id(family): family for family in HF_FAMILIES.values()}
    rows = []
    for family in families.values():
        types = [name for name, other in HF_FAMILIES.items() if other is family]
        cases = {
            f"{group}/{name}": case
            for group, named in ALL_GROUPS.items()
            for name, case in named.items()
            if case.config["model_type"] in types
        }
        found = {test: [by_test[test][n] for n in cases if n in by_test[test]] for test in LIVE}
        live = [(test, results) for test, results in found.items() if results]
        if not live:
            continue
        [(test, passed)] = live
        equal = LIVE[test].format(max(result.difference or 0.0 for result in passed))
        architectures = [name for name, other in GGUF_FAMILIES.items() if other is family]
        tested = {
            case.gguf.architecture
            for name, case in cases.items()
            if case.gguf is not None and name in by_test[GGUF]
        }
        packed = [by_test[PACKED][name] for name in cases if name in by_test[PACKED]]
        rows.append(
            f"| {family.models} | {_code(types)} | {len(passed)} variant{_s(passed)}: {equal} "
            f"| {_code(a for a in architectures if a in tested)} "
            f"| {'int8' if packed else '-'} | {_code(_split_axes(family, cases))} |\n"
        )
    return HEAD + "".join(sorted(rows))


def _s(things: Sequence[Any]) -> str:
    return "" if len(things) == 1 else "s"


def _code(names) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def _split_axes(family: Family, cases) -> list[str]:
    """Return the logical axes of the family's parameters that tensor parallelism may split."""
    axes: dict[str, None] = {}
    for case in cases.values():
        config = family.config_from_hf(case.config_json, {})
        for spec in FunctionalModel(family, config, Numerics()).parameters:
            axes |= dict.fromkeys(spec.axes)
    return [name for name in ("heads", "kv_heads", "ffn", "experts", "vocab") if name in axes]


def run_tests(report: Path) -> None:
    """Run the families' tests, writing a JUnit report."""
    command = [sys.executable, "-m", "pytest", "-q", "--matrix=all", *FILES]
    subprocess.run(
        [*command, "--require-parity", f"--junitxml={report}", "-o", "junit_family=xunit1"],
        cwd=ROOT,
        check=True,
    )


def main(argv: Sequence[str]) -> None:
    """Replace the table between the page's two marks."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(FLAGS.results or Path(folder) / "junit.xml")
        if FLAGS.results is None:
            run_tests(report)
        new = table(read_report(report))
    page = Path(FLAGS.page)
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{page} lacks the marks {BEGIN.strip()} and {END.strip()}")
    page.write_text(before + BEGIN + new + END + after, "utf-8")


if __name__ == "__main__":
    app.run(main)
