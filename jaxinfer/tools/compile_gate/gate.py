"""The compile gate's three runs: everything, what changed, and CI's check of the ledger."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfer.tools.compile_gate.ledger import Ledger, Row
from jaxinfer.tools.compile_gate.matrix import CompileJob
from jaxinfer.tools.compile_gate.report import problems
from jaxinfer.tools.compile_gate.run import NUM_CHILDREN

OnRow = Callable[[Row], None]
# Compiles jobs until a moment of `time.monotonic`; rows of the jobs that were begun by then.
RunJobs = Callable[[Sequence[CompileJob], OnRow, float], list[Row]]

FOREVER = float("inf")
RECORD_COMMAND = "make compile-check COMPILE_ARGS=--changed"


@dataclasses.dataclass
class Outcome:
    """What a run found: rows by job id, compiled now or recorded, why it fails besides what the
    rows tell, and remarks."""

    rows: dict[str, Row] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Gate:
    """The ledger, the hash of every job's inputs as they are now, and the budgets of steps.

    `save` keeps the ledger, after every row, so that an interrupted run is resumed by
    `compile_changed`.
    """

    ledger: Ledger
    inputs: Mapping[str, str]
    budgets: dict[str, Any]
    run_jobs: RunJobs
    save: Callable[[], None]
    records_budgets: bool = False

    def compile_all(self, jobs: Sequence[CompileJob]) -> Outcome:
        """Compile every job and record what passes."""
        return Outcome({row["id"]: row for row in self._compile_and_record(jobs)})

    def compile_changed(self, jobs: Sequence[CompileJob]) -> Outcome:
        """Compile the jobs whose entries are missing or stale, and record what passes."""
        stale = self.ledger.stale(jobs, self.inputs)
        outcome = self._recorded(jobs, stale)
        outcome.rows |= {row["id"]: row for row in self._compile_and_record(stale)}
        outcome.notes.append(f"{len(jobs) - len(stale)} rows are recorded, {len(stale)} changed")
        return outcome

    def check(self, jobs: Sequence[CompileJob], *, seed: str, budget_s: float) -> Outcome:
        """Compile what changed, then a sample of the rest, within a budget of seconds. Nothing is
        recorded.

        A row that changed and is not compiled within the budget fails the check, as does one that
        comes out otherwise than its entry says.
        """
        end = time.monotonic() + budget_s
        stale = self.ledger.stale(jobs, self.inputs)
        outcome = self._recorded(jobs, stale)
        expected_s = self.ledger.seconds(stale) / NUM_CHILDREN
        if expected_s > budget_s:
            outcome.failures["ledger.json"] = (
                f"{len(stale)} of {len(jobs)} rows are missing or stale; to compile them takes "
                f"about {expected_s / 60:.0f} minutes, and --budget_s is {budget_s:g}: run "
                f"`{RECORD_COMMAND}` and commit the ledger"
            )
            return outcome
        outcome.rows |= {row["id"]: row for row in self._compile(stale, end)}
        if left := [job for job in stale if job.id not in outcome.rows]:
            outcome.failures["ledger.json"] = (
                f"{len(left)} of {len(stale)} missing or stale rows were not compiled within "
                f"--budget_s={budget_s:g}: run `{RECORD_COMMAND}` and commit the ledger"
            )
            return outcome
        if stale:
            outcome.notes.append(
                f"{len(stale)} changed rows compile; record them: `{RECORD_COMMAND}`"
            )
        self._check_sample(jobs, outcome, seed, end)
        return outcome

    def _check_sample(
        self, jobs: Sequence[CompileJob], outcome: Outcome, seed: str, end: float
    ) -> None:
        """Compile recorded rows again in the time that is left, and compare."""
        fresh = [job for job in jobs if outcome.rows[job.id].get("is_recorded")]
        seconds = max(0.0, end - time.monotonic())
        sample = self.ledger.sample(fresh, seed, seconds=seconds * NUM_CHILDREN, longest=seconds)
        compiled = self._compile(sample, end)
        for row in compiled:
            outcome.rows[row["id"]] = row
            has_passed = not problems(row, self.budgets)
            if has_passed and (differences := self.ledger.differences(row)):
                reason = f"differs from the ledger with the same inputs: {'; '.join(differences)}"
                outcome.failures[row["id"]] = reason
        outcome.notes.append(
            f"{len(fresh)} rows are recorded, {len(compiled)} of them compiled again (--sample="
            f"{seed})"
        )

    def _recorded(self, jobs: Sequence[CompileJob], stale: Sequence[CompileJob]) -> Outcome:
        left_out = {job.id for job in stale}
        recorded = [job for job in jobs if job.id not in left_out]
        return Outcome({job.id: self.ledger.row(job) for job in recorded})

    def _compile(self, jobs: Sequence[CompileJob], end: float) -> list[Row]:
        return self.run_jobs(jobs, lambda row: None, end) if jobs else []

    def _compile_and_record(self, jobs: Sequence[CompileJob]) -> list[Row]:
        def on_row(row: Row) -> None:
            if self.records_budgets and "per_layer" in row:
                self.budgets[row["id"]] = row["per_layer"]
            self.ledger.record(row, self.inputs[row["id"]], problems(row, self.budgets))
            self.save()

        return self.run_jobs(jobs, on_row, FOREVER) if jobs else []
