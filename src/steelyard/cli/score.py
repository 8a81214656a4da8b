"""`steelyard score RUN`: score stored answers again, without a call to the target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from steelyard.cli.click_types import SHARE, flags_of, given_options
from steelyard.cli.main import TOO_MANY_ERRORS
from steelyard.cli.output import say, show, show_json
from steelyard.cli.output_dir import command_again
from steelyard.cli.run import load_suite, with_gated_slices
from steelyard.cli.run_control import log_to_stderr, partial_result, run_interruptibly, verdict_code, with_flags
from steelyard.engine.base import CancellationToken
from steelyard.engine.local import LocalEngine
from steelyard.errors import ConfigurationError
from steelyard.protocols import Scorer
from steelyard.report.summary import summary
from steelyard.run.options import RunOptions
from steelyard.run.rescore import StoredAnswers
from steelyard.run.runner import Runner
from steelyard.scoring.base import PlainScorer
from steelyard.shutdown import CALLS_SECONDS

_NOTHING_WAITS = 4
"""How many at once where no scorer waits for anything: turns among more of them cost time and win none."""


@click.command("score")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--suite", help="Another suite file, for its scorers and expected answers [default: the run's own].")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="New run directory [default: RUN-scored-TIME].")
@flags_of(RunOptions, "score")
@click.option("--min-pass-rate", type=SHARE, metavar="RATE", help="Exit 1 below this pass rate: 0.8 or 80%.")
@click.option("--max-error-rate", type=SHARE, metavar="RATE", help="Exit 4 above this error rate [default: 0].")
@click.option(
    "--allow", multiple=True, metavar="NAME", help="Do not fail the gate for this; see `steelyard gate --allow`."
)
@click.option("--force", is_flag=True, help="Start over in --out; existing files are moved aside.")
@click.option("--json", "as_json", is_flag=True, help="Print the metrics as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors and the result.")
@click.option("--no-progress", is_flag=True, help="Show no progress.")
def command(
    run: Path,
    suite: str | None,
    out: Path | None,
    min_pass_rate: float | None,
    max_error_rate: float | None,
    allow: tuple[str, ...],
    force: bool,
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **given: Any,
) -> int:
    """Score the answers stored in RUN again. The target is not called; the result is a new run directory.

    Errors of RUN are carried over, and count as they did there.
    """
    log_to_stderr(quiet=quiet, verbose=False)
    place = _new_place(run, out)
    answers = StoredAnswers(run)
    named = suite or (answers.manifest.suite_file if answers.manifest is not None else None)
    if named is None:
        raise ConfigurationError(f"{run}/run.json names no suite: give one with --suite")
    if suite is None:
        _refuse_code(run, named)
    runner, gate = load_suite(named, variant={} if answers.manifest is None else answers.manifest.variant)
    gate = with_flags(gate, allow, min_pass_rate=min_pass_rate, max_error_rate=max_error_rate)
    changes = {
        "output_path": place,
        "low_memory": True,
        "trials": answers.trials,
        "parallelism": _at_once(runner.scorers),
        "cache": None,
        "initial_session_file": None,
        "progress": "off" if quiet or no_progress else "auto",
    }
    changes |= answers.selection
    changes |= given_options(RunOptions, "score", given)
    options = runner.options.replace(**with_gated_slices(changes, gate))
    token = CancellationToken()
    scoring = Runner(
        answers,
        runner.suite,
        runner.scorers,
        workspace=runner.workspace,
        hooks=runner.hooks,
        run_metrics=runner.run_metrics,
        options=options,
        engine=LocalEngine(grace=CALLS_SECONDS),
        token=token,
        suite_file=named,
        scored_from=str(run),
    )
    again = command_again(place)
    try:
        ending = run_interruptibly(
            lambda: scoring.run(force=force),
            again,
            token=token,
            read_partial=lambda reason: partial_result(place, reason),
        )
    finally:
        answers.close()
    if ending.result is None:
        return ending.signal_code
    if as_json:
        show_json(ending.result.metrics)
    else:
        show(summary(ending.result.typed_metrics, str(place)), in_colour=True)
    if not ending.result.complete:
        say(f"resume with: {again}", whole=True)
        return ending.signal_code or TOO_MANY_ERRORS
    return verdict_code(
        ending.result.typed_metrics, gate, remedy=f"to retry the errors of {run}, run its suite with --retry-errors"
    )


def _refuse_code(run: Path, named: str) -> None:
    """Refuse to run code only because a run directory, which may come from anywhere, says so."""
    again = f"to use it, name it yourself: --suite {named}"
    if Path(named).suffix.lower() not in (".yaml", ".yml"):
        raise ConfigurationError(f"{run}/run.json names {named}, which is Python code; {again}")
    if Path(named).resolve().is_relative_to(run.resolve()):
        raise ConfigurationError(f"{run}/run.json names a suite in the run directory itself, {named}; {again}")


def _new_place(run: Path, out: Path | None) -> Path:
    """Where the scores go: never to the run itself, whose answers would be moved aside or mixed with their copies."""
    if out is None:
        return run.with_name(f"{run.name}-scored-{time.strftime('%Y%m%d-%H%M%S')}")
    if out.resolve() == run.resolve():
        raise ConfigurationError(f"--out {out} is the run that is scored: name a new directory")
    return out


def _at_once(scorers: Sequence[Scorer]) -> int | None:
    """How many answers to score at once; None leaves it to what the stored answers prefer."""
    return _NOTHING_WAITS if all(isinstance(scorer, PlainScorer) for scorer in scorers) else None
