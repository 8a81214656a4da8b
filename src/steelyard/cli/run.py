"""`steelyard run SUITE`: evaluate, resuming by itself."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from steelyard.cli.click_types import SHARE, flags_of, given_options, target_changes, target_flags
from steelyard.cli.main import BROKEN, TOO_MANY_ERRORS
from steelyard.cli.output import say, show, show_json, with_topic
from steelyard.cli.output_dir import choose_place, command_again, does_again, remove_if_unused, warn_if_temporary
from steelyard.cli.run_control import (
    allow_calls,
    log_to_stderr,
    partial_result,
    run_interruptibly,
    verdict_code,
    with_flags,
)
from steelyard.engine.base import CancellationToken, Engine
from steelyard.engine.local import LocalEngine
from steelyard.errors import ConfigurationError, SuiteError, WorkersLost, describe, nearest
from steelyard.plugins import load_object
from steelyard.protocols import Scorer
from steelyard.report.gate import check_gate, gated_keys, parse_rule
from steelyard.report.summary import summary
from steelyard.run.config import BuiltMatrix, BuiltSuite, EngineChoice, Gate, build_any, target_flag
from steelyard.run.directory import OpenMode
from steelyard.run.matrix_runner import MatrixRunner
from steelyard.run.options import RunOptions
from steelyard.run.result import Result
from steelyard.run.runner import Runner
from steelyard.run.send_policy import SendPolicy
from steelyard.shutdown import CALLS_SECONDS
from steelyard.suite.evalset import EvalSet
from steelyard.suite.suite_file import locating

log = logging.getLogger("steelyard")


class RunFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What was given on the command line besides the options of the run and its engine."""

    suite: str
    out: Path | None
    models: tuple[str, ...]
    base_url: str | None
    params: dict[str, Any] | None
    settings: tuple[str, ...]
    variants: tuple[str, ...]
    no_cache: bool
    force: bool
    new: bool
    retry_errors: bool
    update: bool
    salvage: bool
    accept_edits: bool
    min_pass_rate: float | None
    allow: tuple[str, ...]
    max_error_rate: float | None
    dry_run: bool
    as_json: bool
    quiet: bool
    verbose: bool
    no_progress: bool
    otel: bool

    @property
    def model(self) -> str | None:
        """The model that is asked; None where the suite's own is, or several are."""
        return self.models[0] if len(self.models) == 1 else None


@click.command("run")
@click.argument("suite")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Run directory [default: runs/SUITE-TIME].")
@target_flags(several_models=True)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="PATTERN",
    help="Only the variants of a matrix whose names match: small/*. Repeatable.",
)
@flags_of(RunOptions, "run")
@click.option("--no-cache", is_flag=True, help="Do not use the cache that the suite names.")
@flags_of(EngineChoice, "run")
@click.option("--force", is_flag=True, help="Start over; existing files are moved to RUN/previous.")
@click.option("--new", is_flag=True, help="Start a new run even if one could be resumed.")
@click.option(
    "--retry-errors", is_flag=True, help="Continue a complete run: send its errors again. Wrong answers are kept."
)
@click.option(
    "--update", is_flag=True, help="Continue a complete run: send and score only what changed or ended in an error."
)
@click.option("--salvage", is_flag=True, help="Continue a run with damaged records: keep what can be read.")
@click.option("--accept-edits", is_flag=True, help="Accept records that were edited.")
@click.option("--min-pass-rate", type=SHARE, metavar="RATE", help="Exit 1 below this pass rate: 0.8 or 80%.")
@click.option("--max-error-rate", type=SHARE, metavar="RATE", help="Exit 4 above this error rate [default: 0].")
@click.option(
    "--allow", multiple=True, metavar="NAME", help="Do not fail the gate for this; see `steelyard gate --allow`."
)
@click.option("--dry-run", is_flag=True, help="Show what would be sent; call nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the metrics as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors and the result.")
@click.option("-v", "--verbose", is_flag=True, help="Print more details.")
@click.option("--no-progress", is_flag=True, help="Show no progress.")
@click.option("--otel", is_flag=True, help="Export OpenTelemetry spans, configured by the OTEL_* variables.")
def command(**given: Any) -> int:
    """Evaluate SUITE: a YAML file, or file.py:name for a Runner in Python.

    Each result is written to disk when it arrives. An unfinished run of the same suite and target is resumed;
    answered calls are not repeated.
    """
    options, engine = given_options(RunOptions, "run", given), given_options(EngineChoice, "run", given)
    flags = RunFlags(**given)
    log_to_stderr(quiet=flags.quiet, verbose=flags.verbose)
    if flags.new and flags.out is not None:
        raise click.UsageError("--new cannot be used with --out: it chooses a directory itself")
    if flags.update and (flags.new or flags.force):
        raise click.UsageError("--update cannot be used with --new or --force: it continues a run")
    runner, gate = _load(flags, options, engine)
    entry = OpenMode(
        force=flags.force,
        retry_errors=flags.retry_errors,
        salvage=flags.salvage,
        accept_edits=flags.accept_edits,
        if_complete="update" if flags.update else "error",
    )
    if isinstance(runner, MatrixRunner):
        from steelyard.cli.matrix import run_matrix

        return run_matrix(runner, gate, flags, entry)
    if flags.variants:
        raise ConfigurationError(f"{flags.suite} describes one run, not a matrix: --variant has nothing to choose from")
    place = choose_place(runner, flags)
    warn_if_temporary(place)
    # Nothing here needs the responses in memory: the summary comes from the statistics.
    runner = runner.with_changes(output_path=place, low_memory=True)
    _tell(runner, place)
    if flags.dry_run:
        from steelyard.cli.dry_run import look_ahead

        planned = look_ahead(runner, entry)
        show_json(planned) if flags.as_json else show(planned.describe())
        return 0
    allow_calls(SendPolicy(runner.target, runner.scorers, runner.options).parallelism)
    try:
        with traced([runner], runner.engine, flags.otel):
            return _run(runner, gate, flags, entry)
    finally:
        remove_if_unused(place)
        if runner.engine is not None:
            runner.engine.close()


@contextmanager
def traced(runners: Iterable[Runner], engine: Engine | None, wanted: bool) -> Iterator[None]:
    """Export the spans of these runs while they go on, where that is wanted."""
    if wanted and engine is not None and engine.runs_in_other_processes:
        raise ConfigurationError("--otel needs the local engine: spans are made by the process that makes the calls")
    with ExitStack() as stack:
        for runner in runners if wanted else ():
            from steelyard.integrations.otel import exported

            stack.enter_context(exported(runner))
        yield


def _tell(runner: Runner, place: Path) -> None:
    """Log what is about to be run and how, for `--verbose`."""
    options, target = runner.options, runner.target
    log.debug("suite %s from %s", runner.suite.id, runner.suite.path or "memory")
    log.debug("target %s", dict(target.identity()))
    log.debug(
        "%s at a time, timeout %s, %s retries, seed %s, in %s",
        options.parallelism or target.default_parallelism,
        "none" if options.timeout is None else f"{options.timeout:g} s",
        options.attempts - 1,
        options.seed,
        place,
    )


def _run(runner: Runner, gate: Gate, flags: RunFlags, entry: OpenMode) -> int:
    place = Path(runner.options.output_path or "")
    again = command_again(place)
    assert runner.token is not None
    try:
        ending = run_interruptibly(
            lambda: runner.run(**msgspec.structs.asdict(entry)),
            again,
            token=runner.token,
            read_partial=lambda reason: partial_result(place, reason),
        )
    except WorkersLost as error:
        say(f"{error}; what has finished is on disk")
        say(with_topic(f"resume with: {again}", error.topic), whole=True)
        return BROKEN
    if ending.result is None:
        say(f"resume with: {command_again(place, begun=False)}", whole=True)
        return ending.signal_code
    _show(ending.result, flags, place)
    if not ending.result.complete:
        # The same command would stop at once where the budget is spent.
        more = " a larger --max-cost" if "max_cost" in (ending.result.typed_metrics.stopped or "") else ""
        say(f"resume with{more}: {again}", whole=True)
        return ending.signal_code or TOO_MANY_ERRORS
    # A load run's errors are what it measured: they are allowed, or not, but never retried.
    metrics = ending.result.typed_metrics
    remedy = (
        "a load run does not ask them again"
        if runner.options.is_load
        else f"--retry-errors {does_again(metrics.counts.error, metrics.scoring_errors)}"
    )
    return verdict_code(metrics, gate, remedy=remedy)


def _show(result: Result, flags: RunFlags, place: Path) -> None:
    if flags.as_json:
        show_json(result.metrics)
    else:
        show(summary(result.typed_metrics, str(place)), in_colour=True)


def _load(flags: RunFlags, options: dict[str, Any], engine: dict[str, Any]) -> tuple[Runner | MatrixRunner, Gate]:
    """The run or matrix that a suite names; what was given on the command line overrides the suite's own options."""
    if flags.quiet or flags.no_progress:
        options["progress"] = "off"
    if flags.no_cache:
        options["cache"] = None
    options.pop("low_memory", None)  # never in memory, whatever was said
    changed = target_changes(flags)
    found, gate = _load_any(flags.suite, changed, engine, flags.settings, models=flags.models, variants=flags.variants)
    runner = _with_command(found, flags.suite).with_changes(**with_gated_slices(options, gate))
    gate = with_flags(gate, flags.allow, min_pass_rate=flags.min_pass_rate, max_error_rate=flags.max_error_rate)
    if runner.options.stop_when is not None and not runner.options.decide:
        runner = runner.with_changes(decide=deciding_rules(gate))
    return runner, gate


def with_gated_slices(options: dict[str, Any], gate: Gate) -> dict[str, Any]:
    """The same options; where they have slices in place of the suite's, those that its rules name are among them."""
    if "by" not in options:
        return options
    return {**options, "by": tuple(dict.fromkeys([*options["by"], *gated_keys(map(parse_rule, gate.rules))]))}


def deciding_rules(gate: Gate) -> tuple[str, ...]:
    """The rules of a gate that a run which stops when it is decided has to settle."""
    least = () if gate.min_pass_rate is None else (f"pass_rate>={gate.min_pass_rate:g}",)
    return (*least, *gate.rules)


def load_suite(
    suite: str,
    target: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    variant: Mapping[str, str] | None = None,
) -> tuple[Runner, Gate]:
    """The runner that a suite file or file.py:name describes, and its gate.

    `target` changes who is asked, or where; `engine` who makes the calls; `settings` any other value of a file. Of a
    matrix, `variant` has the values of the one that is meant. A local engine gets as long to stop as a command has.
    """
    runner, gate = _load_any(suite, dict(target or {}), engine or {}, settings)
    if isinstance(runner, MatrixRunner):
        if variant is None:
            names = ", ".join(runner.runners)
            raise ConfigurationError(f"{suite} is a matrix ({names}), and one run is wanted here")
        fits = [one for one in runner.variants if all(variant.get(axis) == at for axis, at in one.axes.items())]
        runner = runner.runner_of((fits or runner.variants)[0])
    runner = _with_command(runner, suite)
    assert isinstance(runner, Runner)
    return runner, gate


def _with_command(runner: Runner | MatrixRunner, suite: str) -> Runner | MatrixRunner:
    """The same with what a command adds: a local engine that stops in time, a token for signals, the suite's name."""
    local = None if runner.engine is not None else LocalEngine(grace=CALLS_SECONDS)
    return runner.with_changes(engine=local, token=runner.token or CancellationToken(), suite_file=suite)


def _load_any(
    suite: str,
    changed: dict[str, Any],
    engine: Mapping[str, Any],
    settings: Sequence[str],
    *,
    models: Sequence[str] = (),
    variants: Sequence[str] = (),
) -> tuple[Runner | MatrixRunner, Gate]:
    if not _names_python(suite):
        return _from_yaml(suite, changed, engine, settings, models, variants)
    if settings:
        raise ConfigurationError(f"{suite} is Python code: --set can only change a suite file")
    if changed or models:
        flags = " and ".join(dict.fromkeys(map(target_flag, [*changed, *(["model"] if models else [])])))
        raise ConfigurationError(f"{suite} makes its own target: {flags} can only change that of a suite file")
    runner, gate = _from_python(suite)
    if isinstance(runner, MatrixRunner) and variants:
        runner = runner.only(variants)
    if engine:
        made = EngineChoice(**engine).make(Path(suite.rpartition(":")[0]).parent, CALLS_SECONDS)
        runner = runner.with_changes(engine=made)
    return runner, gate


def _names_python(suite: str) -> bool:
    place, colon, name = suite.rpartition(":")
    return bool(colon) and (place.endswith(".py") or (not Path(suite).exists() and name.isidentifier()))


def _from_yaml(
    path: str,
    target: dict[str, Any],
    engine: Mapping[str, Any],
    settings: Sequence[str],
    models: Sequence[str],
    variants: Sequence[str],
) -> tuple[Runner | MatrixRunner, Gate]:
    if path.endswith(".py"):
        raise ConfigurationError(f"{path}: name the Runner in it too: {path}:NAME")
    if path.endswith((".jsonl", ".csv")):
        raise ConfigurationError(f"{path} holds cases, not a suite: name it in a suite file, as `cases: {path}`")
    if not Path(path).exists():
        suites = {one.stem: str(one) for one in Path(path).parent.glob("*.y*ml")}
        near = nearest(Path(path).stem, suites)
        hint = "steelyard init writes a suite to start from" if near is None else f"did you mean {suites[near]!r}?"
        raise SuiteError(f"no such file; {hint}", path=path)
    built = build_any(path, target, settings, models)
    runner: Runner | MatrixRunner
    if isinstance(built, BuiltMatrix):
        runner, gate = _matrix_from(path, built, engine, variants)
    else:
        runner, gate = _runner_from(path, built, built.scorers, engine), built.gate
    with locating(Path(path), settings):
        check_gate(gate)
    return runner, gate


def _runner_from(path: str, built: BuiltSuite, scorers: Sequence[Scorer], engine: Mapping[str, Any]) -> Runner:
    workers = built.engine.replace(**engine).make(Path(path).parent, CALLS_SECONDS)
    try:
        return Runner(
            built.target,
            built.suite,
            scorers,
            workspace=built.workspace,
            case_limits=built.case_limits,
            hooks=built.hooks,
            run_metrics=built.run_metrics,
            options=_options_of(built),
            engine=workers,
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: run: {error}") from error


def _options_of(built: BuiltSuite) -> RunOptions:
    # Whether responses stay in memory is not the suite's to say here: they never do.
    return RunOptions().replace(**{name: value for name, value in built.options.items() if name != "low_memory"})


def _matrix_from(
    path: str, built: BuiltMatrix, engine: Mapping[str, Any], variants: Sequence[str]
) -> tuple[MatrixRunner, Gate]:
    """The matrix of a suite file. All variants have the same scorers: another judge would be another measure."""
    first = built.build({axis: values[0] for axis, values in built.axes.items()})
    identities = [dict(scorer.identity()) for scorer in first.scorers]

    def make(at: Mapping[str, str]) -> Runner:
        one = built.build(at)
        if [dict(scorer.identity()) for scorer in one.scorers] != identities:
            raise ConfigurationError(
                f"{path}: a judge without a target asks where the variant's target is, which is not the same place for "
                f"all of them: give the judge a target"
            )
        return _runner_from(path, one, first.scorers, {"engine": "local", "workers": None, "ray_address": None})

    options = _options_of(first)
    workers = first.engine.replace(**engine).make(Path(path).parent, CALLS_SECONDS)
    prompts = built.file.prompts or {}
    matrix = MatrixRunner.of_runners(
        built.file.cases, built.axes, prompts, make, options=options, variants=variants, engine=workers
    )
    return matrix, first.gate


def _from_python(reference: str) -> tuple[Runner | MatrixRunner, Gate]:
    found = load_object(reference, Path())
    if callable(found) and not isinstance(found, (Runner, MatrixRunner, EvalSet)):
        found = _called(found, reference)
    if isinstance(found, (Runner, MatrixRunner)):
        return found, Gate()
    if isinstance(found, EvalSet):
        raise ConfigurationError(f"{reference} is an EvalSet, which has no target: name a Runner(target, suite, ...)")
    raise ConfigurationError(f"{reference} is {type(found).__name__}, not a Runner or a function that returns one")


def _called(function: Callable[[], Any], reference: str) -> Any:
    """What the function returns; its failure is a mistake in the suite, before anything is asked."""
    try:
        found = function()
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{reference} could not be called: {describe(error)}") from error
    if inspect.iscoroutine(found):
        found.close()
        raise ConfigurationError(f"{reference} is a coroutine function: name one that is not async")
    return found
