"""`steelyard sweep SUITE`: the same cases at several parallelisms: a table, plots, and where to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from steelyard.cli.click_types import Parsed, flags_of, given_options, target_changes, target_flags
from steelyard.cli.dry_run import UNKNOWN_OUTPUT, Estimate, Estimator, indented, once_round
from steelyard.cli.main import TOO_MANY_ERRORS
from steelyard.cli.output import say, show, show_json
from steelyard.cli.output_dir import choose_sweep_place, command_again, remove_if_unused, warn_if_temporary
from steelyard.cli.run import load_suite
from steelyard.cli.run_control import allow_calls, log_to_stderr, run_interruptibly
from steelyard.journal.files import disk_errors
from steelyard.load.sweep import PlannedRequests, Sweep, SweepResult
from steelyard.report.sweep.page import write_charts
from steelyard.report.sweep.table import sweep_table
from steelyard.run.config import EngineChoice
from steelyard.run.options import RunOptions
from steelyard.run.runner import Runner
from steelyard.stats.prices import format_money, read_prices
from steelyard.units import parse_duration


class SweepFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What was given on the command line besides the options of each level's run and the engine."""

    suite: str
    parallelism: str | None
    arrivals: str | None
    requests: int | None
    duration: float | None
    slo: str
    pause: float
    out: Path | None
    model: str | None
    base_url: str | None
    params: dict[str, Any] | None
    settings: tuple[str, ...]
    force: bool
    new: bool
    dry_run: bool
    as_json: bool
    quiet: bool
    verbose: bool
    no_progress: bool


@click.command("sweep")
@click.argument("suite")
@click.option("-j", "--parallelism", metavar="N,N,...", help="The levels: 1,10,50,100, or auto to search.")
@click.option(
    "--arrivals",
    metavar="KIND:RATE,...",
    help="Open loop, rates instead of levels: poisson:5/s,10/s,20/s, or constant:…",
)
@click.option("-n", "--requests", type=int, help="Exactly this many requests per level [default: until decided].")
@click.option(
    "--duration", type=Parsed(parse_duration, "duration"), help="Measure each level for this long instead (30s, 2m)."
)
@click.option(
    "--slo", default="", metavar="LIST", help="Objectives that a level must keep: ttft_p99<500ms,error_rate<1%."
)
@click.option("--pause", type=Parsed(parse_duration, "duration"), default=0.0, help="Pause between two levels (5s).")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Folder of the sweep [default: runs/SUITE-sweep-TIME]."
)
@target_flags(several_models=False)
@flags_of(RunOptions, "sweep")
@flags_of(EngineChoice, "sweep")
@click.option("--force", is_flag=True, help="Start over; existing files are moved to DIR/previous.")
@click.option("--new", is_flag=True, help="Start a new sweep even if one could be resumed.")
@click.option("--dry-run", is_flag=True, help="Show how many requests would be sent and their cost; call nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors and the result.")
@click.option("-v", "--verbose", is_flag=True, help="Print more details.")
@click.option("--no-progress", is_flag=True, help="Show no progress.")
def command(**given: Any) -> int:
    """Measure SUITE at several loads (parallelisms or arrival rates) and recommend one.

    Each level is a separate run that cycles through the cases. Errors are part of the measurement: nothing is
    retried or cached. Judges are called when a level is over. An unfinished sweep of the same suite and target is
    resumed; finished levels are not measured again.
    """
    options, engine = given_options(RunOptions, "sweep", given), given_options(EngineChoice, "sweep", given)
    flags = SweepFlags(**given)
    log_to_stderr(quiet=flags.quiet, verbose=flags.verbose)
    if flags.new and flags.out is not None:
        raise click.UsageError("--new cannot be used with --out: it chooses a directory itself")
    if (flags.parallelism is None) == (flags.arrivals is None):
        raise click.UsageError(
            "give the levels: -j 1,10,50 (calls in flight; auto searches), or --arrivals poisson:5/s,10/s"
        )
    runner = _load(flags, options, engine)
    if flags.dry_run:
        sweep = _sweep(runner, flags, flags.out or Path("runs"))
        ahead = _look_ahead(sweep)
        show_json(ahead) if flags.as_json else show(ahead.describe())
        return 0
    place = choose_sweep_place(runner, out=flags.out, new=flags.new, force=flags.force)
    warn_if_temporary(place)
    try:
        sweep = _sweep(runner, flags, place)
        searches = sweep.levels == "auto" or not sweep.levels
        allow_calls(sweep.options.max_parallelism if searches else max(map(int, sweep.levels)))
        sweep.check_folder(force=flags.force)
        if not flags.quiet:
            say(_look_ahead(sweep).describe())
        return _run(sweep, flags, place)
    finally:
        remove_if_unused(place)
        if runner.engine is not None:
            runner.engine.close()


def _load(flags: SweepFlags, options: dict[str, Any], engine: dict[str, Any]) -> Runner:
    """The runner that a suite names; what was given on the command line overrides the suite's own options."""
    runner, _ = load_suite(flags.suite, target_changes(flags), engine, flags.settings)
    if flags.quiet or flags.no_progress:
        options["progress"] = "off"
    return runner.with_changes(**options)


def _sweep(runner: Runner, flags: SweepFlags, place: Path) -> Sweep:
    return Sweep(
        runner,
        levels=flags.parallelism or "auto",
        arrivals=flags.arrivals,
        output_path=place,
        requests=flags.requests,
        duration=flags.duration,
        pause=flags.pause,
        slo=flags.slo,
    )


class PlannedSweep(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep would send, and what that would cost."""

    suite: str
    requests: PlannedRequests
    estimate: Estimate
    """Of as many requests as it sends at least; of once round the cases where that is not known."""
    cost_at_most: float | None = None

    def describe(self) -> str:
        """The plan in words."""
        estimate = self.estimate
        cost = estimate.describe()[-1]
        if self.requests.least is None:
            cost = f"once round the cases, {cost}"
        elif self.cost_at_most is not None and self.requests.most != self.requests.least:
            cost += f", up to {format_money(self.cost_at_most, estimate.currency)}"
        return f"{self.suite}: {self.requests.says}\n{indented(cost)}"


def _look_ahead(sweep: Sweep) -> PlannedSweep:
    """How many requests a sweep will send, and with prices what they cost; nothing is called."""
    requests = sweep.planned_requests()
    runner = sweep.runner
    estimator = once_round(runner)
    most = None if requests.most is None or estimator is None else estimator.estimate(requests.most).cost
    unknown = Estimator(runner.target, read_prices(runner.options.prices, runner.target.model_id), UNKNOWN_OUTPUT)
    estimate = (estimator or unknown).estimate(requests.least)
    return PlannedSweep(suite=runner.suite.id, requests=requests, estimate=estimate, cost_at_most=most)


def _run(sweep: Sweep, flags: SweepFlags, place: Path) -> int:
    again = command_again(place)
    ending = run_interruptibly(
        lambda: sweep.run(force=flags.force), again, token=sweep.token, read_partial=lambda _: None
    )
    result: SweepResult | None = ending.result
    if result is None:
        say(f"resume with: {again}", whole=True)
        return ending.signal_code
    _show(result, flags, place)
    if not result.complete:
        # The same command would stop at once where the budget is spent.
        more = " a larger --max-cost" if "max_cost" in (result.stopped or "") else ""
        say(f"resume with{more}: {again}", whole=True)
        return ending.signal_code or TOO_MANY_ERRORS
    return 0


def _show(result: SweepResult, flags: SweepFlags, place: Path) -> None:
    """The table or the JSON, and where the plots are."""
    metrics = result.to_metrics()
    plots = []
    if result.complete:
        with disk_errors(place):
            plots = write_charts(metrics, place)
    if flags.as_json:
        show_json({**metrics, "plots": [str(plot) for plot in plots]})
        return
    show(sweep_table(metrics, str(place)))
    for plot in plots:
        show(f"plot in {plot}")
