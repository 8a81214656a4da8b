"""What a run would do: how many cases are done and how many would be asked, without a call."""

from __future__ import annotations

from pathlib import Path

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.journal.files import OUTPUTS
from steelyard.journal.manifest import compare, read_manifest
from steelyard.journal.replay import DONE, UNSCORED, Replay
from steelyard.journal.states import refuse_finished
from steelyard.rundir import Entry, PlanSlots
from steelyard.runner import Runner
from steelyard.sitting import manifest_of, plan_of
from steelyard.stats.wording import safe_text


class PlannedRun(msgspec.Struct, kw_only=True):
    """How much of a run is done and what is left."""

    suite: str
    run: str
    planned: int
    done: int
    to_score: int
    to_ask: int
    parallelism: int

    def describe(self) -> str:
        """The plan in words."""
        lines = [f"{safe_text(self.suite)}: {self.planned:,} cases, in {safe_text(self.run)}"]
        if self.done:
            lines.append(f"  done already: {self.done:,}")
        if self.to_score:
            lines.append(f"  to be scored again, not asked: {self.to_score:,}")
        lines.append(f"  to be asked: {self.to_ask:,}, {self.parallelism:,} at a time; nothing was called")
        return "\n".join(lines)


def look_ahead(runner: Runner, entry: Entry) -> PlannedRun:
    """What a run would do, refusing what it would refuse; reads what is on disk and changes nothing."""
    if runner.suite.one_shot:
        raise ConfigurationError("a one-shot iterator cannot be looked at without using it up")
    options = runner.options
    run = Path(options.output_path or ".")
    plan = plan_of(runner.suite, runner.scorers, options)
    states = bytearray(plan.slots)
    if not entry.force:
        old = read_manifest(run)
        if not entry.retry_errors:
            refuse_finished(run)
        if old is not None:
            compare(run, old, manifest_of(runner.target, runner.suite, runner.scorers, options, planned=plan.slots))
        if (run / OUTPUTS).exists():
            Replay(run, PlanSlots(plan), states).read()
    done, to_score = states.count(DONE), states.count(UNSCORED)
    return PlannedRun(
        suite=runner.suite.id,
        run=str(run),
        planned=plan.slots,
        done=done,
        to_score=to_score,
        to_ask=plan.slots - done - to_score,
        parallelism=options.parallelism or runner.target.default_parallelism,
    )
