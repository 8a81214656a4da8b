"""Binds target, suite, scorers and options: the one object that runs an evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Unpack

from steelyard.daemon_threads import LoopFactory, run_blocking
from steelyard.engine.base import CancellationToken, Engine
from steelyard.engine.local import LocalEngine
from steelyard.errors import ConfigurationError
from steelyard.records import CaseLimits
from steelyard.run.directory import IfComplete, OpenMode
from steelyard.run.execution import Execution, MatrixPart
from steelyard.run.hooks import as_hooks
from steelyard.run.options import RunChanges, RunOptions
from steelyard.run.result import Result
from steelyard.run.run_metrics import as_run_metrics
from steelyard.scoring.base import as_scorers
from steelyard.stats.figures import parse_progress_bar_stats
from steelyard.suite.evalset import EvalSet
from steelyard.targets.function import as_target
from steelyard.units import read_case_limits
from steelyard.workspace.template import Workspace


class Runner:
    """Runs a suite against a target: many cases at once, surviving crashes, resuming by itself.

    With a `workspace`, each attempt at a case gets its own folder; `case_limits` are limits for each attempt.
    `hooks` are called at the start, for each record and at the end: see `Hook`. `run_metrics` are functions over all
    records, called once these are there.
    `RunOptions` lists the options; they are keywords here and may be overridden in `run()`. `suite_file` and
    `scored_from` are for run.json: where the suite was read from, and the run whose answers are scored again.
    """

    def __init__(
        self,
        target: object,
        suite: EvalSet,
        scorers: Iterable[object] = (),
        *,
        workspace: Workspace | None = None,
        case_limits: CaseLimits | None = None,
        hooks: Iterable[object] = (),
        run_metrics: Iterable[object] = (),
        options: RunOptions | None = None,
        engine: Engine | None = None,
        token: CancellationToken | None = None,
        suite_file: str | None = None,
        scored_from: str | None = None,
        **changes: Unpack[RunChanges],
    ) -> None:
        if not isinstance(suite, EvalSet):
            raise ConfigurationError(f"suite must be an EvalSet, got {type(suite).__name__}")
        self.target = as_target(target)
        self.suite = suite
        self.scorers = as_scorers(scorers)
        self.options = _checked((options or RunOptions()).replace(**changes))
        if not isinstance(self.target.default_parallelism, int) or self.target.default_parallelism < 1:
            raise ConfigurationError(
                f"the target's default_parallelism must be >= 1, got {self.target.default_parallelism!r}"
            )
        if engine is not None and not isinstance(engine, Engine):
            raise ConfigurationError(f"engine must be an Engine, got {type(engine).__name__}")
        if workspace is not None and not isinstance(workspace, Workspace):
            raise ConfigurationError(f"workspace must be a Workspace, got {type(workspace).__name__}")
        if workspace is None and getattr(self.target, "needs_workspace", False):
            workspace = Workspace()
        self.workspace = workspace
        self.case_limits = read_case_limits(case_limits)
        self.hooks = as_hooks(hooks)
        self.run_metrics = as_run_metrics(run_metrics)
        self.engine = engine
        self.token = token
        self.suite_file = suite_file
        self.scored_from = scored_from

    def with_changes(
        self,
        *,
        engine: Engine | None = None,
        token: CancellationToken | None = None,
        suite_file: str | None = None,
        **changes: Unpack[RunChanges],
    ) -> Runner:
        """Return a runner like this one with other options, or another engine, token or suite file."""
        runner = copy(self)
        runner.options = _checked(self.options.replace(**changes))
        runner.engine = engine or self.engine
        runner.token = token or self.token
        runner.suite_file = suite_file or self.suite_file
        return runner

    def execution(self, options: RunOptions, engine: Engine | None = None, part: MatrixPart | None = None) -> Execution:
        """One launch of the run, with these options; in another engine, or as a part of a matrix."""
        return Execution(
            self.target,
            self.suite,
            self.scorers,
            _checked(options),
            engine or self.engine or LocalEngine(),
            workspace=self.workspace,
            case_limits=self.case_limits,
            hooks=self.hooks,
            run_metrics=self.run_metrics,
            token=self.token,
            suite_file=self.suite_file,
            scored_from=self.scored_from,
            part=part,
        )

    async def run(
        self,
        *,
        force: bool = False,
        retry_errors: bool = False,
        salvage: bool = False,
        accept_edits: bool = False,
        if_complete: IfComplete = "error",
        **changes: Unpack[RunChanges],
    ) -> Result:
        """Run what is left of the suite.

        An unfinished run in `output_path` is resumed. `if_complete` says what to do about a complete one: raise
        RunFinished ("error"), return it ("load"), ask and score only what changed or failed ("update"), or move it
        aside and start over ("new"). `force` starts over whatever is there, `retry_errors` reopens a complete run.
        `salvage` continues a journal with damaged lines, `accept_edits` one with lines that were edited.
        """
        execution = self.execution(self.options.replace(**changes))
        try:
            return await execution.run(
                OpenMode(
                    force=force,
                    retry_errors=retry_errors,
                    salvage=salvage,
                    accept_edits=accept_edits,
                    if_complete=if_complete,
                )
            )
        finally:
            if execution.has_directory:
                self.suite = execution.suite  # a one-shot's cases are in the directory now: the next run reads them

    def run_sync(
        self,
        *,
        force: bool = False,
        retry_errors: bool = False,
        salvage: bool = False,
        accept_edits: bool = False,
        if_complete: IfComplete = "error",
        loop_factory: LoopFactory | None = None,
        **changes: Unpack[RunChanges],
    ) -> Result:
        """The same from code that is not async; works inside a running event loop too.

        Ctrl-C cancels the run, commits what finished and raises KeyboardInterrupt.
        """
        coroutine = self.run(
            force=force,
            retry_errors=retry_errors,
            salvage=salvage,
            accept_edits=accept_edits,
            if_complete=if_complete,
            **changes,
        )
        return run_blocking(coroutine, loop_factory)


def _checked(options: RunOptions) -> RunOptions:
    parse_progress_bar_stats(options.progress_bar_stats)
    return options
