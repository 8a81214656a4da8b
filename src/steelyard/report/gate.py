"""Whether a run is good enough: its rules, one by one, and how far it may fall behind a baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from steelyard.report.compare_notes import notes
from steelyard.report.figures import figures
from steelyard.report.pairs import Pairs, RunCases
from steelyard.report.regression import Allowance, check_regressions
from steelyard.report.rules import Checked, Leave, Rule, check_rule
from steelyard.result import Result

GATE_VERSION = 1


class Gated(msgspec.Struct, kw_only=True):
    """What became of each rule of a gate."""

    v: int = GATE_VERSION
    run: str
    baseline: str | None
    suite: str
    model_id: str | None
    passed: bool
    checks: list[Checked]
    notes: list[str]
    """What else is different between the run and its baseline."""

    @property
    def broken(self) -> list[Checked]:
        return [check for check in self.checks if not check.ok]


def hold_to(
    run: Path,
    rules: Sequence[Rule],
    *,
    baseline: Path | None = None,
    allowance: Allowance | None = None,
    leave: Leave | None = None,
) -> Gated:
    """The run held to every rule; a name that no figure has is a ConfigurationError before any is judged."""
    leave = leave or Leave()
    cases = None if baseline is None else RunCases(run)
    metrics = Result.load(run).metrics if cases is None else cases.metrics
    known = figures(metrics)
    checks = [_complete(metrics["complete"], metrics["n"], metrics["counts"]["planned"], leave)]
    checks += [check_rule(rule, metrics, known, leave) for rule in rules]
    differences: list[str] = []
    if baseline is not None and cases is not None:
        more, pairs = check_regressions(RunCases(baseline), cases, allowance or Allowance(), leave)
        checks += more
        differences = [*notes(pairs), *_unpaired(pairs)]
    return Gated(
        run=str(run),
        baseline=None if baseline is None else str(baseline),
        suite=metrics["suite"],
        model_id=metrics["model_id"],
        passed=all(check.ok for check in checks),
        checks=checks,
        notes=differences,
    )


def _unpaired(pairs: Pairs) -> Iterator[str]:
    """What the baseline cannot speak of, and what it speaks of in vain."""
    if len(pairs.only_a):
        yield f"{len(pairs.only_a):,} of {len(pairs.baseline.ids):,} cases of the baseline are not in this run"
    if len(pairs.only_b):
        yield f"{len(pairs.only_b):,} of {len(pairs.other.ids):,} cases are not in the baseline"


def _complete(complete: bool, done: int, planned: int, leave: Leave) -> Checked:
    reason = "is complete" if complete else f"is not complete: {done:,} of {planned:,} done"
    allowed = ", which is allowed" if not complete and leave.incomplete else ""
    return Checked(rule="the run", ok=complete or leave.incomplete, value=None, reason=reason + allowed)
