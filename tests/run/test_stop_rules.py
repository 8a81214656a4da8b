"""When the first calls of a run tell that nothing it asks can be answered."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from steelyard import CancellationToken, EvalCase, EvalSet, InvocationResponse, Runner
from steelyard.errors import ConfigurationError, RunFinished, TargetError
from steelyard.protocols import InvocationContext
from steelyard.records import Record
from steelyard.report.summary import summary
from steelyard.run.stop_rules import FirstErrors, expected_share
from tests.support.journal import CountedModel, a_record, cases, run_in


def failed(status: int | None = None, *, kind: str = "TargetError", attempts: int = 1) -> Record:
    return a_record(status="error", error=f"{kind}: no", error_type=kind, http_status=status, attempts=attempts)


def reasons(*records: Record, most: int = 3) -> list[str]:
    """Why the run would have ended, each time that it was said."""
    first = FirstErrors(most)
    return [reason for record in records if (reason := first.take(record)) is not None]


@pytest.mark.parametrize("status", [401, 402, 403, 404, 405])
def test_the_same_lasting_refusal_of_the_first_calls_ends_a_run_once(status: int) -> None:
    assert reasons(*[failed(status)] * 2) == []
    assert reasons(*[failed(status)] * 9) == [
        "every call is refused: the first 3 calls all failed, the last with TargetError: no (stop_first_errors)"
    ]


def refused(status: int, text: str) -> Record:
    return a_record(status="error", error=f"TargetError: {text}", error_type="TargetError", http_status=status)


@pytest.mark.parametrize("status", [400, 422])
def test_first_calls_that_are_all_refused_in_the_same_words_end_a_run(status: int) -> None:
    """A wrong model, at many gateways; ids of requests in the message do not make it another one."""
    records = [refused(status, f"unknown model 'gpt-9' (request 4f9a{number:08x})") for number in range(20)]
    assert reasons(*records[:19], most=20) == []
    (reason,) = reasons(*records, most=20)
    assert reason.startswith(
        "every call is refused: the first 20 calls all failed, the last with TargetError: unknown model"
    )


@pytest.mark.parametrize("other", [refused(400, "too long"), refused(422, "unknown model"), failed(401), a_record()])
@pytest.mark.parametrize("place", [0, 1, 10])
def test_bad_requests_that_differ_are_faults_of_their_cases(other: Record, place: int) -> None:
    records = [refused(400, "unknown model")] * 20
    records.insert(place, other)
    assert reasons(*records, most=20) == []


@pytest.mark.parametrize("kind", ["CannotConnect", "CannotResolve", "TlsFailed", "TimedOut", "ConnectionRefusedError"])
def test_tries_to_connect_count_one_by_one(kind: str) -> None:
    assert reasons(failed(kind=kind, attempts=2)) == []
    assert reasons(failed(kind=kind, attempts=2), failed(kind=kind, attempts=2)) == [
        "nothing answers there: the first 4 calls, retries included, all failed, "
        f"the last with {kind}: no (stop_first_errors)"
    ]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(a_record(), id="an answer"),
        pytest.param(failed(400), id="a case that is refused"),
        pytest.param(failed(500), id="a fault that may pass"),
        pytest.param(failed(None, kind="TimeoutError"), id="a slow answer"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_anything_else_among_the_first_calls_is_proof_that_the_endpoint_can_be_asked(other: Record, place: int) -> None:
    records = [failed(401)] * 20
    records.insert(place, other)
    assert reasons(*records) == []


def test_an_answer_out_of_the_cache_proves_nothing() -> None:
    assert len(reasons(failed(401), a_record(cached=True), failed(401), failed(401))) == 1


def test_reasons_that_differ_are_counted_apart() -> None:
    assert reasons(failed(401), failed(401), failed(403), failed(401), failed(403)) == []
    assert len(reasons(failed(401), failed(401), failed(403), failed(403), failed(403))) == 1


def test_none_are_counted_when_that_is_wanted() -> None:
    assert FirstErrors(0).is_over
    assert reasons(*[failed(401)] * 99, most=0) == []


@pytest.mark.parametrize("records", [[a_record()], [failed(401)] * 3, [failed(401), failed(500)]])
def test_when_all_is_said_no_record_need_be_looked_at_any_more(records: list[Record]) -> None:
    first = FirstErrors(3)
    for record in records:
        assert not first.is_over
        first.take(record)
    assert first.is_over


def test_an_answer_of_an_earlier_sitting_that_is_only_scored_again_proves_nothing(tmp_path: Path) -> None:
    def answer(case: EvalCase, _: InvocationContext) -> InvocationResponse:
        if int(case.id.removeprefix("c")) >= 10:
            raise TargetError("no", partial=InvocationResponse(http_status=401))
        return InvocationResponse(response_text="x")

    run_in(tmp_path, CountedModel(answer), cases(60), stop_first_errors=0)
    model = CountedModel(answer)
    runner = Runner(model, EvalSet("journal", cases(60)), ["contains"], output_path=tmp_path, progress="off")
    result = runner.run_sync(retry_errors=True, parallelism=1)
    assert "every call is refused: the first 20 calls all failed" in result.metrics["stopped"]
    assert len(model.called) == 20
    assert result.metrics["scores"]["contains"]["n"] == 10


def test_quick_refusals_do_not_end_a_run_whose_first_answers_are_still_to_come() -> None:
    """Some prompts may be forbidden, and a refusal comes sooner than an answer."""
    refused = 0
    enough = asyncio.Event()

    async def answer(case: EvalCase, _: InvocationContext) -> str:
        nonlocal refused
        if int(case.id.removeprefix("c")) % 10 == 0:
            await enough.wait()
            return "x"
        await asyncio.sleep(0)
        refused += 1
        if refused == 40:
            enough.set()
        raise TargetError("HTTP 403", partial=InvocationResponse(http_status=403))

    result = Runner(answer, EvalSet("s", cases(60)), progress="off").run_sync(parallelism=10)
    assert result.complete
    assert (result.metrics["counts"]["ok"], result.metrics["counts"]["error"]) == (6, 54)


def test_a_call_that_hangs_does_not_keep_a_run_from_ending_for_ever() -> None:
    async def answer(case: EvalCase, _: InvocationContext) -> str:
        if case.id == "c0":
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        raise TargetError("HTTP 403", partial=InvocationResponse(http_status=403))

    result = Runner(answer, EvalSet("s", cases(600)), progress="off").run_sync(parallelism=4)
    assert "every call is refused: the first 200 calls all failed" in result.metrics["stopped"]


class Agent:
    """Answers rightly but for the cases that it is told to get wrong, or to fail on."""

    model_id = "agent"
    default_parallelism = 4

    def __init__(self, wrong: set[str], broken: set[str] | None = None, slow: set[str] | None = None) -> None:
        self.wrong, self.broken, self.slow = wrong, broken or set(), slow or set()
        self.asked: list[str] = []

    def identity(self) -> dict[str, Any]:
        return {"kind": "agent"}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        self.asked.append(case.id)
        if case.id in self.slow:
            await asyncio.sleep(0.005)
        if case.id in self.broken:
            raise ValueError("no")
        return InvocationResponse(response_text="no" if case.id in self.wrong else "yes")


def suite(n: int) -> EvalSet:
    return EvalSet(id="s", cases=[EvalCase(id=f"c{number}", prompt="?", expected="yes") for number in range(n)])


def wrong(n: int, count: int, seed: int = 1) -> set[str]:
    return {f"c{number}" for number in random.Random(seed).sample(range(n), count)}


def runner(agent: Agent, n: int = 400, **options: Any) -> Runner:
    given = {"decide": ("pass_rate>=0.9",), "stop_when": "decided", "progress": "off", **options}
    return Runner(agent, suite(n), ["exact"], **given)


def test_a_run_stops_when_its_rule_is_settled_and_its_counts_add_up(tmp_path: Path) -> None:
    agent = Agent(wrong(400, 4))
    result = runner(agent, output_path=tmp_path / "r").run_sync()
    metrics = result.typed_metrics
    counts = metrics.counts
    assert result.complete
    assert metrics.stopped is None
    assert counts.planned == 400
    assert counts.ok + counts.not_asked == 400
    assert 0 < counts.ok == len(agent.asked) < 150
    assert (counts.cancelled, counts.not_started) == (0, 0)
    assert metrics.decided
    assert [(one.rule, one.outcome) for one in metrics.decided.rules] == [("pass_rate>=0.9", "holds")]
    assert "not asked: decided: " in summary(metrics)
    with pytest.raises(RunFinished):
        runner(agent, output_path=tmp_path / "r").run_sync()


def test_a_rule_that_is_broken_is_settled_too() -> None:
    metrics = runner(Agent(wrong(400, 160))).run_sync().typed_metrics
    assert metrics.decided
    assert metrics.decided.rules[0].outcome == "broken"
    assert metrics.counts.not_asked > 200


def test_the_order_is_that_of_the_seed_whatever_is_answered_and_wherever_a_case_stands() -> None:
    one, other, third = Agent(set()), Agent(wrong(400, 200)), Agent(set())
    runner(one, parallelism=1).run_sync()
    runner(other, parallelism=1).run_sync()
    runner(third, parallelism=1, seed=7).run_sync()
    shared = min(len(one.asked), len(other.asked))
    assert one.asked[:shared] == other.asked[:shared]
    assert one.asked[:5] != [f"c{number}" for number in range(5)]
    assert one.asked[:10] != third.asked[:10]


def test_verdicts_enter_in_the_order_of_the_draw_not_of_completion() -> None:
    """Wrong answers come late: in the order of completion the first would all be right."""
    bad = wrong(300, 60)
    results = []
    for parallelism, slow in ((1, set()), (40, bad)):
        agent = Agent(bad, slow=slow)
        results.append(runner(agent, 300, decide=("pass_rate>=0.7",), parallelism=parallelism).run_sync().typed_metrics)
    one_by_one, at_once = results
    assert one_by_one.decided
    assert at_once.decided
    assert at_once.decided.rules == one_by_one.decided.rules
    assert at_once.counts.ok >= one_by_one.counts.ok  # those that were in flight when it was settled
    assert at_once.counts.not_asked > 0


def test_an_interrupted_run_goes_on_to_the_same_decision(tmp_path: Path) -> None:
    bad = wrong(400, 20)
    whole = runner(Agent(bad), parallelism=1).run_sync().typed_metrics
    token = CancellationToken()
    agent = Agent(bad)
    ask = agent.invoke

    async def until(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        if len(agent.asked) == 30:
            token.cancel("enough")
        return await ask(case, context)

    agent.invoke = until  # type: ignore[method-assign]
    options = {"output_path": tmp_path / "r", "parallelism": 1}
    part = Runner(
        agent,
        suite(400),
        ["exact"],
        token=token,
        progress="off",
        stop_when="decided",
        decide=("pass_rate>=0.9",),
        **options,
    ).run_sync()
    assert not part.complete
    assert part.typed_metrics.counts.not_started > 0
    again = Agent(bad)
    result = runner(again, **options).run_sync().typed_metrics
    assert result.complete
    assert result.counts == whole.counts
    assert len(again.asked) < whole.counts.ok
    assert json.loads((tmp_path / "r" / "metrics.json").read_bytes())["counts"]["not_asked"] == whole.counts.not_asked


def test_what_stays_open_to_the_end_asks_everything() -> None:
    metrics = runner(Agent(wrong(40, 4)), 40, decide=("pass_rate>=0.9",)).run_sync().typed_metrics
    assert metrics.decided
    assert metrics.decided.rules[0].outcome == "holds"  # exactly nine of ten: known when the last ones are
    assert metrics.counts.ok >= 36


def test_errors_are_no_verdicts_and_the_rule_is_settled_all_the_same() -> None:
    agent = Agent(wrong(400, 4), broken={f"c{number}" for number in range(0, 400, 40)})
    metrics = runner(agent, retries=0).run_sync().typed_metrics
    assert metrics.decided
    assert metrics.decided.rules[0].outcome == "holds"
    assert metrics.counts.planned == metrics.counts.ok + metrics.counts.error + metrics.counts.not_asked


def test_every_rule_must_be_settled() -> None:
    one = runner(Agent(wrong(400, 4))).run_sync().typed_metrics
    both = runner(Agent(wrong(400, 4)), decide=("pass_rate>=0.9", "pass_rate_all>=97%")).run_sync().typed_metrics
    assert both.counts.ok > one.counts.ok


def test_a_baseline_is_a_rule_as_well(tmp_path: Path) -> None:
    Runner(Agent(wrong(600, 30)), suite(600), ["exact"], progress="off", output_path=tmp_path / "base").run_sync()
    options = {"decide": (), "baseline": tmp_path / "base", "max_regression": 0.05}
    same = runner(Agent(wrong(600, 30)), 600, **options).run_sync().typed_metrics
    worse = runner(Agent(wrong(600, 300, seed=2)), 600, **options).run_sync().typed_metrics
    assert same.decided
    assert worse.decided
    assert [one.outcome for one in same.decided.rules] == ["holds"]
    assert [one.outcome for one in worse.decided.rules] == ["broken"]
    assert same.counts.not_asked > 0
    assert worse.counts.not_asked > 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decide": ()}, "needs a rule to decide"),
        ({"decide": ("latency_p95<2s",)}, "cannot settle 'latency_p95<2s' before the end"),
        ({"decide": ("pass_rate<0.5",)}, "cannot settle"),
        ({"stop_when": "bored"}, "stop_when must be decided, got 'bored'"),
        ({"requests": 5}, "cannot be used in a load run"),
    ],
)
def test_what_cannot_be_decided_is_refused_before_any_call(options: dict[str, Any], message: str) -> None:
    agent = Agent(set())
    with pytest.raises(ConfigurationError, match=message):
        runner(agent, **options).run_sync()
    assert agent.asked == []


def test_how_much_of_a_suite_a_rule_takes_is_known_before() -> None:
    assert expected_share("pass_rate>=0.9", 1000, 0.95) == pytest.approx(0.17, abs=0.04)
    assert expected_share("pass_rate>=0.9", 1000, 0.9) > 0.9
    assert expected_share("error_rate<=10%", 1000, 0.95) == pytest.approx(0.17, abs=0.04)


def test_the_cases_of_a_group_are_asked_together_and_enter_together() -> None:
    cases = [EvalCase(id=f"c{number}", prompt="?", expected="yes", group=f"g{number % 50}") for number in range(500)]
    agent = Agent(wrong(500, 5))
    made = Runner(
        agent, EvalSet(id="s", cases=cases), ["exact"], progress="off", parallelism=1,
        stop_when="decided", decide=("pass_rate>=0.8",),
    )  # fmt: skip
    metrics = made.run_sync().typed_metrics
    assert metrics.decided
    assert metrics.decided.rules[0].outcome == "holds"
    assert metrics.counts.not_asked
    groups = [int(case[1:]) % 50 for case in agent.asked]
    blocks = [group for place, group in enumerate(groups) if place == 0 or groups[place - 1] != group]
    assert len(blocks) == len(set(blocks))  # one after another, each whole
