"""A pipeline of four stages on four virtual devices: ticks, tokens, aborts, failures."""

from __future__ import annotations

import pytest

from tests.support.child_process import findings
from tests.support.paths import SUPPORT

CHILD = SUPPORT / "pipeline_child.py"
STAGES = 4


@pytest.fixture(scope="module")
def found():
    return findings(CHILD)


def test_16_micro_batches_take_16_and_3_ticks(found):
    trace = found["chunks"]
    assert len(trace) == 16 + STAGES - 1
    for tick, stages in enumerate(trace):
        expected = [tick - s if 0 <= tick - s < 16 else None for s in range(STAGES)]
        assert stages == expected


def test_once_full_no_stage_idles(found):
    """Eight requests decode, two in each of the micro-batches under way."""
    trace = found["decodes"]
    full = [tick for tick, stages in enumerate(trace) if None not in stages]
    assert full == list(range(full[0], full[-1] + 1))  # from the first to the last, no bubble
    assert len(full) >= 15 * STAGES - 2 * STAGES


@pytest.mark.parametrize("what", ["reports", "aborts", "failure", "tokens"])
def test_answers_are_those_of_one_device(found, what):
    expected, piped = found[what]
    assert piped == expected
