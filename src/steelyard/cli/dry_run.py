"""What a run would do and cost: cases, calls, tokens, what is done or cached already. Nothing is called or written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from steelyard.cache.cached import Cached
from steelyard.cache.opening import open_store
from steelyard.cache.store import EvaluationDataStore, ManagedStore
from steelyard.cli.estimate import Estimate, Estimator, guess_output
from steelyard.contracts import InvocationContext, RepeatedJudge, Session
from steelyard.errors import ConfigurationError
from steelyard.journal.files import OUTPUTS
from steelyard.journal.invocations import Invocations
from steelyard.journal.manifest import compare, read_manifest
from steelyard.journal.replay import DONE, UNSCORED, Replay
from steelyard.journal.states import refuse_finished
from steelyard.journal.sweep_file import refuse_sweep
from steelyard.load.arrivals import parse_arrivals
from steelyard.money import read_prices
from steelyard.options import RunOptions
from steelyard.planning import manifest_of, plan_of
from steelyard.rates import parse_rate
from steelyard.records import EvalCase, Job, id_digest
from steelyard.rundir import Entry, PlanSlots
from steelyard.runner import Runner
from steelyard.session import read_session
from steelyard.stats.running import RunningStats
from steelyard.stats.spending import format_money
from steelyard.stats.wording import counted, safe_text
from steelyard.suite.plan import Plan


class PlannedRun(msgspec.Struct, kw_only=True):
    """How much of a run is done, what is left, and what that would use."""

    suite: str
    run: str
    cases: int
    trials: int
    planned: int | None
    """How many (case, trial) there are; requests of a load run, None when only its duration is known."""
    done: int = 0
    to_score: int = 0
    to_judge: int = 0
    cached: int = 0
    to_ask: int | None
    judge_calls: int = 0
    """At most: a judge of `when: failed` is asked less. A verdict that must be mended takes one more."""
    parallelism: int | str
    estimate: Estimate
    spent: float | None = None
    max_cost: float | None = None

    def describe(self) -> str:
        """The plan in words."""
        cases = counted(self.cases, "case")
        trials = f" × {self.trials:,} trials" if self.trials > 1 else ""
        lines = [f"{safe_text(self.suite)}: {cases}{trials}, in {safe_text(self.run)}"]
        for count, words in (
            (self.done, "done already"),
            (self.to_score, "to be scored again, not asked"),
            (self.to_judge, "answered already, to be judged"),
            (self.cached, "in the cache"),
        ):
            if count:
                lines.append(f"  {words}: {count:,}")
        asked = "as many as the time allows" if self.to_ask is None else f"{self.to_ask:,}"
        lines.append(f"  to be asked: {asked}, {self.parallelism} at a time; nothing was called")
        if self.judge_calls:
            calls = "1 call, which is" if self.judge_calls == 1 else f"{self.judge_calls:,} calls, which are"
            lines.append(f"  judges: at most {calls} not in the estimate")
        lines += [f"  {line}" for line in self._estimated()]
        return "\n".join(lines)

    def _estimated(self) -> list[str]:
        if self.to_ask == 0:
            return self._budget()
        lines = self.estimate.describe()
        if self.to_ask is None:
            lines = ["once round the cases:", *(f"  {line}" for line in lines)]
        return lines + self._budget()

    def _budget(self) -> list[str]:
        currency = safe_text(self.estimate.currency)
        lines = [f"spent already: {format_money(self.spent, currency)}"] if self.spent else []
        if self.max_cost is not None:
            lines.append(f"max_cost: the run stops at {format_money(self.max_cost, currency)}")
        return lines


def look_ahead(runner: Runner, entry: Entry) -> PlannedRun:
    """What a run would do, refusing what it would refuse; reads what is on disk and changes nothing."""
    if runner.suite.one_shot:
        raise ConfigurationError("a one-shot iterator cannot be looked at without using it up")
    options = runner.options
    run = Path(options.output_path or ".")
    refuse_sweep(run)
    _check_pace(options)
    session = None if options.initial_session_file is None else read_session(options.initial_session_file)
    # Once round the cases, also where a load run would go on.
    plan = plan_of(runner.suite, runner.scorers, options.replace(requests=None, duration=None, arrivals=None))
    if options.is_load:
        return _load_run(runner, run, plan, session)
    replay = _found(runner, run, entry, plan, session)
    stored = None
    if not entry.force and any(isinstance(scorer, RepeatedJudge) for scorer in runner.scorers):
        stored = _unjudged(run, plan, replay.states)
    store = _store_of(options)
    try:
        ahead = _Ahead(runner, plan, session, replay, stored, store)
        ahead.walk()
    finally:
        if isinstance(store, ManagedStore) and store is not options.cache:
            store.close()
    return ahead.planned(run)


def _check_pace(options: RunOptions) -> None:
    """Refuse a rate or arrivals that cannot be read, which a run does when it makes its limits."""
    if options.rate is not None:
        parse_rate(options.rate)
    if options.arrivals is not None:
        parse_arrivals(options.arrivals)


class _Ahead:
    """One walk over the jobs that are left, which says of each what would become of it."""

    def __init__(
        self,
        runner: Runner,
        plan: Plan,
        session: Session | None,
        replay: Replay,
        stored: Invocations | None,
        store: EvaluationDataStore | None,
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._session = session
        self._replay = replay
        self._stored = stored
        self._cached = None if store is None else Cached(runner.target, store, plan.suite.id, session=session)
        self._judges = [scorer for scorer in runner.scorers if isinstance(scorer, RepeatedJudge)]
        self._book = read_prices(runner.options.prices, runner.target.model_id)
        self._estimator = Estimator(runner.target, self._book, guess_output(runner.target, replay.stats))
        self._counts = {"to_score": 0, "to_judge": 0, "cached": 0, "to_ask": 0}
        self._judge_calls = 0

    def walk(self) -> None:
        """Look at every job that is left, read as it is looked at."""
        done = bytearray((np.frombuffer(self._replay.states, dtype=np.uint8) == DONE).tobytes())
        for job in self._plan.jobs(done):
            if job is not None:
                fate = self._fate(job)
                self._counts[fate] += 1
                self._judge_calls += judge_calls(self._judges, job.case, self._runner.options.num_runs)
        if self._stored is not None:
            self._stored.close()

    def _fate(self, job: Job) -> str:
        slot = self._plan.slot_at(job.index, job.trial)
        if self._replay.states[slot] == UNSCORED:
            return "to_score"
        if self._stored is not None and self._stored.answer(slot) is not None:
            return "to_judge"
        case = as_asked(job.case, self._session)
        context = InvocationContext(case.id, job.trial, seed=self._runner.options.seed)
        if self._cached is not None and self._cached.holds(case, context):
            return "cached"
        self._estimator.add(case)
        return "to_ask"

    def planned(self, run: Path) -> PlannedRun:
        """What the walk has found."""
        options, spending = self._runner.options, self._replay.spending
        return PlannedRun(
            suite=self._runner.suite.id,
            run=str(run),
            cases=self._plan.cases,
            trials=self._plan.trials,
            planned=self._plan.slots,
            done=self._replay.states.count(DONE),
            judge_calls=self._judge_calls,
            parallelism=options.parallelism or self._runner.target.default_parallelism,
            estimate=self._estimator.estimate(),
            spent=spending.total if spending.calls else None,
            max_cost=options.max_cost,
            **self._counts,
        )


def _found(runner: Runner, run: Path, entry: Entry, plan: Plan, session: Session | None) -> Replay:
    """What the run directory holds of this plan: nothing, when it would be moved aside."""
    replay = Replay(run, PlanSlots(plan), bytearray(plan.slots))
    if entry.force:
        return replay
    old = read_manifest(run)
    if not entry.retry_errors:
        refuse_finished(run)
    if old is not None:
        ours = manifest_of(
            runner.target, runner.suite, runner.scorers, runner.options, planned=plan.slots, session=session
        )
        compare(run, old, ours)
    if (run / OUTPUTS).exists():
        replay.read()
    return replay


def _unjudged(run: Path, plan: Plan, states: bytearray) -> Invocations:
    """The answers that were kept before their judges were heard."""
    invocations = Invocations(run)

    def unfinished(case_id: str, trial: int) -> int | None:
        slot = int(plan.slot_of(np.array([id_digest(case_id)], dtype=np.uint64), np.array([trial]))[0])
        return None if slot < 0 or states[slot] == DONE else slot

    invocations.read(unfinished, plan.is_of_case)
    return invocations


def _store_of(options: RunOptions) -> EvaluationDataStore | None:
    """The cache, if it is there: opening one that is not would make it."""
    cache = options.cache
    if isinstance(cache, str | os.PathLike) and not Path(cache).exists():
        return None
    return open_store(cache)


def _load_run(runner: Runner, run: Path, plan: Plan, session: Session | None) -> PlannedRun:
    """The plan of a load run: it goes round the cases, resumes nothing and is never answered from a cache."""
    options = runner.options
    requests = options.requests
    if requests is None and options.duration is None:
        requests = plan.cases
    book = read_prices(options.prices, runner.target.model_id)
    estimator = Estimator(runner.target, book, guess_output(runner.target, RunningStats()))
    judges = [scorer for scorer in runner.scorers if isinstance(scorer, RepeatedJudge)]
    once_round = 0
    for job in plan.jobs():
        if job is not None:
            estimator.add(as_asked(job.case, session))
            once_round += judge_calls(judges, job.case, options.num_runs)
    calls = None if requests is None else requests + options.warmup
    return PlannedRun(
        suite=runner.suite.id,
        run=str(run),
        cases=plan.cases,
        trials=1,
        planned=requests,
        to_ask=calls,
        judge_calls=once_round if requests is None else round(once_round * requests / plan.cases),
        parallelism=options.parallelism or runner.target.default_parallelism,
        estimate=estimator.estimate(calls),
        max_cost=options.max_cost,
    )


def as_asked(case: EvalCase, session: Session | None) -> EvalCase:
    """The case as the target sees it: after the session's messages."""
    if session is None or not session.messages:
        return case
    return msgspec.structs.replace(case, messages=[*session.messages, *(case.messages or [])])


def judge_calls(judges: Sequence[RepeatedJudge], case: EvalCase, num_runs: int) -> int:
    """How often judges are asked about one answer at most."""
    return num_runs * sum(judge.applies(case) for judge in judges)
