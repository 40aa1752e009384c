"""A pipeline of four stages on four CPU devices: schedule, tokens, aborts and failures."""

from __future__ import annotations

import pytest

from tests.support.child_process import findings
from tests.support.paths import SUPPORT

CHILD = SUPPORT / "pipeline_child.py"
STAGES = 4


@pytest.fixture(scope="module")
def found():
    return findings(CHILD)


def test_pipeline_takes_19_ticks_for_16_micro_batches(found):
    trace = found["chunks"]
    assert len(trace) == 16 + STAGES - 1
    for tick, stages in enumerate(trace):
        expected = [tick - s if 0 <= tick - s < 16 else None for s in range(STAGES)]
        assert stages == expected


def test_full_pipeline_has_no_bubbles(found):
    """Eight requests decode, two in each micro-batch in flight."""
    trace = found["decodes"]
    full = [tick for tick, stages in enumerate(trace) if None not in stages]
    assert full == list(range(full[0], full[-1] + 1))  # from the first to the last, no bubble
    assert len(full) >= 15 * STAGES - 2 * STAGES


@pytest.mark.parametrize("what", ["reports", "aborts", "failure", "tokens"])
def test_pipeline_results_equal_one_device(found, what):
    expected, piped = found[what]
    assert piped == expected
