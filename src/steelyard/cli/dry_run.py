"""What a run would do: how many cases are done and how many would be asked, without a call."""

from __future__ import annotations

from pathlib import Path

from steelyard.errors import ConfigurationError
from steelyard.journal.files import OUTPUTS
from steelyard.journal.manifest import compare, read_manifest
from steelyard.journal.replay import DONE, UNSCORED, Replay
from steelyard.rundir import PlanSlots
from steelyard.runner import Runner
from steelyard.sitting import manifest_of, plan_of


def describe_plan(runner: Runner) -> str:
    """The plan of a run in words; reads what is on disk and changes nothing."""
    if runner.suite.one_shot:
        raise ConfigurationError("a one-shot iterator cannot be looked at without using it up")
    options = runner.options
    run = Path(options.output_path or ".")
    plan = plan_of(runner.suite, runner.scorers, options)
    states = bytearray(plan.slots)
    old = read_manifest(run)
    if old is not None:
        compare(run, old, manifest_of(runner.target, runner.suite, runner.scorers, options, planned=plan.slots))
    if (run / OUTPUTS).exists():
        Replay(run, PlanSlots(plan), states).read()
    done, to_score = states.count(DONE), states.count(UNSCORED)
    parallelism = options.parallelism or runner.target.default_parallelism
    lines = [f"{runner.suite.id}: {plan.slots:,} cases, in {run}"]
    if done:
        lines.append(f"  done already: {done:,}")
    if to_score:
        lines.append(f"  to be scored again, not asked: {to_score:,}")
    lines.append(f"  to be asked: {plan.slots - done - to_score:,}, {parallelism} at a time; nothing was called")
    return "\n".join(lines)
