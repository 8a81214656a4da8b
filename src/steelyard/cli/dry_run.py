"""What a run would do and cost: cases, calls, tokens, what is done or cached already. Nothing is called or written."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from steelyard.attachments import all_attached, has_attachments
from steelyard.cache.cached import Cached
from steelyard.cache.store import EvaluationDataStore, ManagedStore, open_store, path_of
from steelyard.errors import ConfigurationError
from steelyard.journal.answers import AnswerLog
from steelyard.journal.files import OUTPUTS, refuse_finished
from steelyard.journal.manifest import compare, read_manifest, refuse_sweep
from steelyard.journal.replay import Replay, SlotState
from steelyard.protocols import InvocationContext, RepeatedJudge, Session, Target
from steelyard.records import EvalCase, InvocationResponse, Job, id_digest
from steelyard.report.gate import parse_rule
from steelyard.run.directory import OpenMode, PlanSlots
from steelyard.run.options import RunOptions
from steelyard.run.plan import Plan, manifest_of, plan_of, read_session
from steelyard.run.runner import Runner
from steelyard.run.send_policy import parallelism_of
from steelyard.run.stop_rules import expected_share
from steelyard.scoring.pipeline import samples_per_answer
from steelyard.stats.formatting import counted, safe_text
from steelyard.stats.paired import detectable_difference, unchanged_cases_needed
from steelyard.stats.prices import PriceBook, Prices, Spending, cost_of, format_money, read_prices
from steelyard.stats.running import RunningStats


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
    """At most: a judge of `when: failed` is asked less. A verdict that must be fixed takes one more."""
    parallelism: int | str
    arrivals: str | None = None
    """When the calls of an open loop are sent, however many are in flight up to `parallelism`."""
    estimate: Estimate
    spent: float | None = None
    max_cost: float | None = None
    can_show: list[str] = []
    """What a suite of this size can show, and how much of it each rule takes."""

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
        most = "at most " if self.arrivals is not None else ""
        lines.append(f"  to be asked: {asked}, {most}{at_once(self.parallelism)}; nothing was called")
        if self.judge_calls:
            calls = "1 call, which is" if self.judge_calls == 1 else f"{self.judge_calls:,} calls, which are"
            lines.append(f"  judges: at most {calls} not in the estimate")
        lines += [indented(line) for line in self._estimated()]
        lines += [indented(safe_text(line)) for line in self.can_show]
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


def indented(text: str) -> str:
    """A line below a plan's first, broken between words where it is longer than the narrowest usual terminal."""
    return textwrap.fill(
        text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


_WIDTH = 80


def at_once(parallelism: int | str) -> str:
    """How many calls there are at a time, in words."""
    return (
        f"{parallelism:,} at a time" if isinstance(parallelism, int) else "as many at a time as the endpoint sustains"
    )


_MAX_PLANNED = 5_000
"""Cases up to which it is simulated how much of a suite a rule takes."""
_CHANGED = 0.1
"""The share of cases that are taken to change between two runs."""


def can_show(cases: int, options: RunOptions) -> list[str]:
    """What a suite of this many cases can show, in words: against a baseline, and how many cases each rule needs."""
    lines = []
    found = detectable_difference(cases, _CHANGED)
    if found is not None and found < 1:
        # A larger difference takes more changes than that, and is soonest shown where none is the other way.
        which = "1 in 10 cases changes" if found <= _CHANGED else "all changes go the same way"
        change = f"a change of the pass rate by {found * 100:.0f} points or more"
        lines.append(f"{counted(cases, 'case')} show {change}, 4 times in 5, if {which}")
    if options.max_regression:
        needed = unchanged_cases_needed(options.max_regression)
        lines.append(
            f"max_regression {options.max_regression:g}: needs {needed:,} cases, if none changes; more if some do"
        )
    if options.stop_when is not None and cases <= _MAX_PLANNED:
        lines += [f"{rule}: {_share_asked(rule, cases)}" for rule in options.decide]
    return lines


def _share_asked(rule: str, cases: int) -> str:
    """About how many cases settle a rule whose true rate is well above its bar, a little above it, and below."""
    limit = parse_rule(rule)
    bar = limit.limit if limit.operator.startswith(">") else 1 - limit.limit
    rates = sorted({min(1.0, bar + 0.08), min(1.0, bar + 0.03), max(0.0, bar - 0.05)}, reverse=True)
    shown = [(rate, expected_share(rule, cases, rate, draws=8)) for rate in rates]
    return ", ".join(
        f"about {share * cases:,.0f} cases settle it at a true rate of {rate:.0%}" for rate, share in shown
    )


def look_ahead(runner: Runner, entry: OpenMode) -> PlannedRun:
    """What a run would do, refusing what it would refuse; reads what is on disk and changes nothing."""
    if runner.suite.one_shot:
        raise ConfigurationError("a one-shot iterator cannot be looked at without using it up")
    options = runner.options
    run = Path(options.output_path or ".")
    refuse_sweep(run)
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


class _Ahead:
    """One walk over the jobs that are left, which says of each what would become of it."""

    def __init__(
        self,
        runner: Runner,
        plan: Plan,
        session: Session | None,
        replay: Replay,
        stored: AnswerLog | None,
        store: EvaluationDataStore | None,
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._session = session
        self._replay = replay
        self._stored = stored
        self._cached = None if store is None else Cached(runner.target, store, plan.suite.id, session=session)
        self._judges = [scorer for scorer in runner.scorers if isinstance(scorer, RepeatedJudge)]
        self._prices = read_prices(runner.options.prices, runner.target.model_id)
        self._estimator = Estimator(runner.target, self._prices, guess_output(runner.target, replay.stats))
        self._counts = {"to_score": 0, "to_judge": 0, "cached": 0, "to_ask": 0}
        self._judge_calls = 0

    def walk(self) -> None:
        """Look at every job that is left, read as it is looked at."""
        done = bytearray((np.frombuffer(self._replay.states, dtype=np.uint8) == SlotState.DONE).tobytes())
        for job in self._plan.jobs(done):
            if job is not None:
                fate = self._fate(job)
                self._counts[fate] += 1
                self._judge_calls += judge_calls(self._judges, job.case, self._runner.options.num_runs)
        if self._stored is not None:
            self._stored.close()

    def _fate(self, job: Job) -> str:
        slot = self._plan.slot_at(job.index, job.trial)
        if self._replay.states[slot] == SlotState.UNSCORED:
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
            done=self._replay.states.count(SlotState.DONE),
            judge_calls=self._judge_calls,
            parallelism=options.parallelism or self._runner.target.default_parallelism,
            arrivals=options.arrivals,
            estimate=self._estimator.estimate(),
            spent=spending.total if spending.calls else None,
            max_cost=options.max_cost,
            can_show=can_show(self._plan.cases, options),
            **self._counts,
        )


def _found(runner: Runner, run: Path, entry: OpenMode, plan: Plan, session: Session | None) -> Replay:
    """What the run directory holds of this plan: nothing, when it would be moved aside."""
    replay = Replay(run, PlanSlots(plan), bytearray(plan.slots))
    if entry.force:
        return replay
    old = read_manifest(run)
    if old is not None:
        ours = manifest_of(
            runner.target, runner.suite, runner.scorers, runner.options, planned=plan.slots, session=session
        )
        compare(run, old, ours)
    if not entry.retry_errors and entry.if_complete != "update":
        refuse_finished(run)
    if (run / OUTPUTS).exists():
        replay.read()
    return replay


def _unjudged(run: Path, plan: Plan, states: bytearray) -> AnswerLog:
    """The answers that were kept before their judges were heard."""
    answers = AnswerLog(run)

    def unfinished(case_id: str, trial: int) -> int | None:
        slot = int(plan.slot_of(np.array([id_digest(case_id)], dtype=np.uint64), np.array([trial]))[0])
        return None if slot < 0 or states[slot] == SlotState.DONE else slot

    answers.read(unfinished, plan.is_of_case)
    return answers


def _store_of(options: RunOptions) -> EvaluationDataStore | None:
    """The cache, if it is there: opening one that is not would make it."""
    place = path_of(options.cache)
    return None if place is not None and not place.exists() else open_store(options.cache)


def _load_run(runner: Runner, run: Path, plan: Plan, session: Session | None) -> PlannedRun:
    """The plan of a load run: it goes round the cases, resumes nothing and is never answered from a cache."""
    options = runner.options
    requests = options.requests
    if requests is None and options.duration is None:
        requests = plan.cases
    prices = read_prices(options.prices, runner.target.model_id)
    estimator = Estimator(runner.target, prices, guess_output(runner.target, RunningStats()))
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
        parallelism=options.parallelism or parallelism_of(runner.target, options),
        arrivals=options.arrivals,
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
    return sum(samples_per_answer(judge, num_runs) for judge in judges if judge.applies(case))


OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""What the providers call the parameter that ends an answer."""

Bound = Literal["about", "at most", "at least"]


class OutputGuess(msgspec.Struct, frozen=True):
    """How many tokens an answer is taken to have: None when there is nothing to go by."""

    tokens: float | None
    bound: Bound
    source: str


class Estimate(msgspec.Struct, kw_only=True):
    """The tokens and the cost of calls to come. Of a cost whose output is not known, the input's is a lower bound."""

    input_tokens: int
    output_tokens: int | None
    output_tokens_from: str
    cost: float | None
    cost_bound: Bound | None
    currency: str
    prices_from: str
    attachments: int = 0
    attachment_bytes: int = 0

    def describe(self) -> list[str]:
        """The estimate in words."""
        output = "not known: no answer so far, no limit in the target's params"
        if self.output_tokens is not None:
            output = f"{self.output_tokens:,}, {self.output_tokens_from}"
        cost = f"not known: {safe_text(self.prices_from)}"
        if self.cost is not None:
            alone = ", the input alone" if self.output_tokens is None else ""
            money = format_money(self.cost, safe_text(self.currency))
            cost = f"{self.cost_bound} {money}{alone} ({safe_text(self.prices_from)})"
        attached = ""
        if self.attachments:
            size = f" ({self.attachment_bytes:,} bytes)" if self.attachment_bytes else ""
            attached = (
                f", without {counted(self.attachments, 'attachment')}{size}: their tokens are the model's to count"
            )
        tokens = f"about {self.input_tokens:,}, estimated from the text (4 bytes a token){attached}"
        return [f"input tokens: {tokens}", f"output tokens: {output}", f"cost: {cost}"]


UNKNOWN_OUTPUT = OutputGuess(None, "at least", "not known")


def once_round(runner: Runner) -> Estimator | None:
    """An estimator that has counted in each case once; None where the cases can be read only once."""
    if runner.suite.one_shot:
        return None
    options = runner.options.replace(requests=None, duration=None, arrivals=None)
    session = None if options.initial_session_file is None else read_session(options.initial_session_file)
    prices = read_prices(options.prices, runner.target.model_id)
    estimator = Estimator(runner.target, prices, guess_output(runner.target, RunningStats()))
    for job in plan_of(runner.suite, [], options).jobs():
        if job is not None:
            estimator.add(as_asked(job.case, session))
    return estimator


def guess_output(target: Target, finished: RunningStats) -> OutputGuess:
    """As many as the answers so far had on average; else as many as the target's parameters allow."""
    average = finished.to_stats()["num_tokens_output-average"]
    if average is not None:
        return OutputGuess(average, "about", f"like the answers so far ({average:,.0f} each)")
    params = target.identity().get("params")
    given = params if isinstance(params, Mapping) else {}
    for name in OUTPUT_LIMITS:
        limit = given.get(name)
        if isinstance(limit, int) and not isinstance(limit, bool):
            return OutputGuess(limit, "at most", f"at most {limit:,} each ({name})")
    return UNKNOWN_OUTPUT


class Estimator:
    """Adds up calls, one after another; keeps none of them."""

    def __init__(self, target: Target, prices: PriceBook, output: OutputGuess) -> None:
        self._prices: Prices | None = prices.of(target)
        self._source = prices.unknown_because(target) if self._prices is None else self._prices.source
        self._output = output
        self._input_tokens = 0
        self._calls = 0
        self._attachments = self._attachment_bytes = 0
        self._spending = Spending(prices.currency)

    def add(self, case: EvalCase) -> None:
        """Count in a call that asks this case."""
        from steelyard.tokens import estimate_input_tokens

        tokens = estimate_input_tokens(case)
        if has_attachments(case):
            found = all_attached(case)
            self._attachments += len(found)
            self._attachment_bytes += sum(one.size or 0 for one in found)
        self._calls += 1
        self._input_tokens += tokens
        if self._prices is not None:
            output = round(self._output.tokens or 0)
            asked = InvocationResponse(num_tokens_input=tokens, num_tokens_output=output)
            asked.cost = cost_of(asked, self._prices)
            self._spending.update(asked)

    def estimate(self, calls: int | None = None) -> Estimate:
        """The sums; when more `calls` are to be made than were added, each as those were on average."""
        share = 1.0 if calls is None or not self._calls else calls / self._calls
        output = self._output.tokens
        unknown: dict[str, Any] = {"cost": None, "cost_bound": None}
        cost = {"cost": round(self._spending.total * share, 12), "cost_bound": self._output.bound}
        return Estimate(
            input_tokens=round(self._input_tokens * share),
            output_tokens=None if output is None else round(output * self._calls * share),
            output_tokens_from=self._output.source,
            currency=self._spending.currency,
            prices_from=self._source,
            attachments=round(self._attachments * share),
            attachment_bytes=round(self._attachment_bytes * share),
            **(unknown if self._prices is None else cost),
        )
