"""`steelyard gate RUN`: is it good enough? Silent when it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from steelyard.cli.main import FAILED_GATE
from steelyard.cli.output import say, show, show_json
from steelyard.errors import ConfigurationError

if TYPE_CHECKING:
    from steelyard.report.gate import Allowance, Gated
    from steelyard.stats.rules import Rule

_SUMMARY = "GITHUB_STEP_SUMMARY"


class GateFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line."""

    run: Path
    rules: tuple[str, ...]
    suite: Path | None
    baseline: Path | None
    drops: tuple[str, ...]
    slowdown: float | None
    allow: tuple[str, ...]
    junit: Path | None
    markdown: Path | None
    as_json: bool
    verbose: bool


@click.command("gate")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--rule",
    "rules",
    multiple=True,
    metavar="RULE",
    help="A rule that must hold: pass_rate>=0.8, ttft_p99<500ms, cost<2.",
)
@click.option(
    "--suite", type=click.Path(path_type=Path), help="Suite file whose gate applies [default: the run's own]."
)
@click.option("--baseline", type=click.Path(path_type=Path), help="The run that RUN must not be worse than.")
@click.option(
    "--max-regression",
    "drops",
    multiple=True,
    metavar="METRIC=X",
    help="How much worse it may be: pass_rate, error_rate or score.NAME [default: 0 for both rates].",
)
@click.option("--max-slowdown", "slowdown", type=float, metavar="RATIO", help="How much slower it may be: 1.1.")
@click.option(
    "--allow",
    multiple=True,
    metavar="NAME",
    help="Do not fail the gate for this: incomplete, client-bottleneck, scoring-errors, truncated, uncalibrated-judge.",
)
@click.option("--junit", type=click.Path(path_type=Path), help="Write a JUnit file with a test case for each rule.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Write a summary for a pull request.")
@click.option("--json", "as_json", is_flag=True, help="Print all rules as JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Print all rules, and what else differs from the baseline.")
def command(**given: Any) -> int:
    """Check RUN against its suite's gate, the rules of --rule, and a baseline.

    Exits with 0 and prints nothing if all rules hold; otherwise exits with 1 and prints a line for each broken rule.
    In a matrix every variant is checked, and each line names the variant.
    """
    flags = GateFlags(**given)
    from steelyard.report.gate import hold_matrix_to, hold_to, parse_rule, parse_waivers
    from steelyard.run.matrix import is_matrix
    from steelyard.run.result import Result

    if flags.baseline is None and (flags.drops or flags.slowdown is not None):
        raise click.UsageError("--max-regression and --max-slowdown need a --baseline")
    suite_rules, suite_allows = _suite_gate(flags.run, flags.suite)
    rules = [*suite_rules, *(parse_rule(rule) for rule in flags.rules)]
    allowed = parse_waivers(flags.allow) | suite_allows
    if not rules and flags.baseline is None:
        if not is_matrix(flags.run):
            Result.load(flags.run)  # what is no run is refused as that
        raise ConfigurationError(
            f"{flags.run}: nothing to check: give --rule or --baseline, or add a gate to its suite"
        )
    check = hold_matrix_to if is_matrix(flags.run) else hold_to
    gated = check(flags.run, rules, baseline=flags.baseline, allowance=_allowance(flags), allowed=allowed)
    _write_files(gated, flags)
    _print(gated, flags)
    return 0 if gated.passed else FAILED_GATE


def _allowance(flags: GateFlags) -> Allowance:
    from steelyard.report.gate import Allowance, parse_drop

    return Allowance(drops=dict(parse_drop(drop) for drop in flags.drops), slowdown=flags.slowdown)


def _suite_gate(run: Path, suite: Path | None) -> tuple[list[Rule], frozenset[str]]:
    """The rules and waivers of the suite that was named, or of the run's own where its file is at hand."""
    from steelyard.journal.manifest import read_manifest
    from steelyard.report.gate import check_gate, parse_rule, parse_waivers
    from steelyard.run.matrix import is_matrix, read_matrix
    from steelyard.stats.metrics import FAILURE_RATE

    if suite is None:
        manifest = read_matrix(run) if is_matrix(run) else read_manifest(run)
        named = None if manifest is None else manifest.suite_file
        if named is None or Path(named).suffix.lower() not in (".yaml", ".yml"):
            return [], frozenset()
        suite = Path(named)
        if not suite.is_file():
            say(
                f"the suite file {suite} is not to be found from here: its own gate is not looked at (--suite names it)"
            )
            return [], frozenset()
    from steelyard.run.config import build_gate
    from steelyard.suite.suite_file import locating, read_suite_file

    raw = read_suite_file(suite).gate
    with locating(suite):
        gate = build_gate(raw)
        check_gate(gate)
    written = [*gate.rules]
    if raw.get("max_error_rate") is not None:
        written.insert(0, f"{FAILURE_RATE}<={gate.max_error_rate}")
    if gate.min_pass_rate is not None:
        written.insert(0, f"pass_rate>={gate.min_pass_rate}")
    return [parse_rule(rule) for rule in written], parse_waivers(gate.allow)


def _print(gated: Gated, flags: GateFlags) -> None:
    from steelyard.report.gate import gate_lines
    from steelyard.stats.formatting import safe_text

    for warning in gated.warnings:
        say(safe_text(warning))
    if flags.as_json:
        show_json(gated)
    elif flags.verbose:
        lines = [gate_lines(gated.checks, mark=True), *(f"note    {safe_text(note)}" for note in gated.notes)]
        show("\n".join(lines), in_colour=True)
    elif not gated.passed:
        show(gate_lines(gated.broken, mark=False))


def _write_files(gated: Gated, flags: GateFlags) -> None:
    from steelyard.report.formats import write_text
    from steelyard.report.gate import gate_junit, gate_markdown

    if flags.junit is not None:
        from steelyard.journal.manifest import now

        write_text(flags.junit, gate_junit(gated, now()[:19]))
    if flags.markdown is not None:
        write_text(flags.markdown, gate_markdown(gated))
    if summary := os.environ.get(_SUMMARY):
        try:
            with open(summary, "a", encoding="utf-8", errors="replace") as file:
                file.write(gate_markdown(gated) + "\n")
        except OSError as error:  # the verdict does not depend on where it is also written
            say(f"cannot write to ${_SUMMARY} ({summary}): {error.strerror}")
