"""Judges in a run: repeated, in parallel, escalated, down, advisory; paid for once."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steelyard import (
    CancellationToken,
    ConfigurationError,
    EvalCase,
    EvalSet,
    InvocationContext,
    InvocationResponse,
    Result,
    Runner,
)
from steelyard.report.headline import notices, read_headline
from steelyard.report.summary import summary
from steelyard.scoring import Combined, Jury
from steelyard.scoring.judge.calibration import Judged, agreement, calibration
from steelyard.stats.metrics import not_calibrated, uncalibrated
from tests.support.cli import run_cli
from tests.support.judge import Script, judge
from tests.support.judged import Agent, Assessor, Gauge, journalled, lines_of, run, runner_of, suite_of

THREE = (1.0, 0.5, 0.0)


def by_run(case_id: str, trial: int, run: int) -> float:
    return THREE[run % 3]


# The headline: a warm cache ----------------------------------------------------------------------------------------


def test_a_second_run_with_a_warm_cache_asks_no_agent_and_pays_no_judge(tmp_path: Path) -> None:
    """20 cases, 4 at once, 3 judge runs: the agent is asked once for each, 4 at a time, and then never again."""
    gauge, assessor = Gauge(), Assessor(by_run)
    agents = [Agent(seconds=0.02, gauge=gauge) for _ in range(2)]
    for number, agent in enumerate(agents):
        out = tmp_path / str(number)
        judge = assessor.judge(name="judge")
        result = run(agent, suite_of(20), [judge], num_runs=3, cache=tmp_path / "cache", output_path=out)
        assert result.complete
        assert result.metrics["cached"] == 20 * number
    assert [len(agent.calls) for agent in agents] == [20, 0]
    assert gauge.peak == 4
    assert Counter(assessor.calls) == {(f"c{n:02}", 0, each): 1 for n in range(20) for each in range(3)}
    scores = [[record.scores for record in Result.load(tmp_path / name).load_responses()] for name in ("0", "1")]
    assert scores[0] == scores[1]


def test_hits_are_judged_and_counted_as_hits(tmp_path: Path) -> None:
    assessor = Assessor(by_run)
    for _ in range(2):
        result = run(Agent(), suite_of(3), [assessor.judge()], num_runs=3, cache=tmp_path)
    assert result.metrics["cached"] == 3
    assert len(assessor.calls) == 3 * 3
    assert [record.scores[0].std_dev for record in result.responses] == [pytest.approx(0.408, abs=0.001)] * 3


def test_another_prompt_of_the_judge_asks_no_agent(tmp_path: Path) -> None:
    agent, assessor = Agent(), Assessor()
    run(agent, suite_of(5), [assessor.judge()], cache=tmp_path)
    changes: list[dict[str, Any]] = [
        {"template": "Is {{ answer }} good?"},
        {"threshold": 0.9},
        {"params": {"temperature": 1}},
    ]
    for change in changes:
        result = run(agent, suite_of(5), [assessor.judge(**change)], cache=tmp_path)
        assert result.metrics["cached"] == 5
    assert len(agent.calls) == 5
    assert len(assessor.calls) == 15, "a reply does not depend on the threshold"


def test_a_cached_reply_is_of_one_sample_one_trial_and_one_answer(tmp_path: Path) -> None:
    assessor = Assessor()
    options: dict[str, Any] = {"cache": tmp_path, "parallelism": 4}
    run(Agent(), suite_of(2), [assessor.judge()], num_runs=1, **options)
    run(Agent(), suite_of(2), [assessor.judge()], num_runs=2, **options)
    assert Counter(assessor.calls) == {(f"c{n:02}", 0, each): 1 for n in range(2) for each in range(2)}
    run(Agent(), suite_of(2), [assessor.judge()], num_runs=2, trials=2, **options)
    assert Counter(trial for _, trial, _ in assessor.calls) == {0: 4, 1: 4}
    other = Agent(lambda case, context: "another answer", model_id="other")
    run(other, suite_of(2), [assessor.judge()], num_runs=2, **options)
    assert len(assessor.calls) == 12


def test_a_reply_that_is_no_verdict_is_not_kept_in_the_cache(tmp_path: Path) -> None:
    broken, whole = Script("no JSON"), Script()
    case = {"expected": "x"}
    run(Agent(), suite_of(2, **case), [judge(broken)], cache=tmp_path)
    result = run(Agent(), suite_of(2, **case), [judge(whole)], cache=tmp_path)
    assert len(whole.asked) == 2
    assert result.metrics["scoring_errors"] == 0


CHANGES: dict[str, dict[str, Any]] = {
    "model": {"agent": {"model_id": "another"}},
    "temperature": {"agent": {"temperature": 0.7}},
    "tools": {"case": {"tools": [{"name": "search"}]}},
    "system prompt": {"case": {"system_prompt": "Be brief."}},
    "messages": {"case": {"messages": [{"role": "user", "content": "before"}]}},
    "session data": {"session": {"data": {"user": "Ada"}}},
    "session messages": {"session": {"messages": [{"role": "user", "content": "hi"}]}},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_decides_an_answer_misses_the_cache_when_it_changes(name: str, tmp_path: Path) -> None:
    change = CHANGES[name]

    def go(agent: dict[str, Any], case: dict[str, Any], session: object) -> int:
        options: dict[str, Any] = {"cache": tmp_path / "cache"}
        if session is not None:
            options["initial_session_file"] = tmp_path / "session.json"
            options["initial_session_file"].write_text(json.dumps(session))
        asked = Agent(**{"temperature": 0.0, **agent})
        run(asked, suite_of(5, **case), [Assessor().judge()], **options)
        return len(asked.calls)

    plain: tuple[Any, ...] = ({}, {}, {} if "session" in change else None)
    changed = (change.get("agent", {}), change.get("case", {}), change.get("session", plain[2]))
    assert [go(*plain), go(*plain), go(*changed), go(*changed), go(*plain)] == [5, 0, 5, 0, 0]


# Permits -----------------------------------------------------------------------------------------------------------


def test_seven_judges_and_the_agent_are_each_asked_as_often_at_once_as_is_allowed() -> None:
    gauges = [Gauge() for _ in range(8)]
    judges = [Assessor(seconds=0.002, gauge=gauges[number]).judge(name=f"judge-{number}") for number in range(7)]
    result = run(Agent(seconds=0.005, gauge=gauges[7]), suite_of(16), judges, parallelism=4, num_runs=2)
    assert result.metrics["n"] == 16
    assert all(gauge.peak <= 4 for gauge in gauges)
    assert gauges[7].peak == 4
    assert all(len(record.scores) == 7 for record in result.responses)


@pytest.mark.parametrize("parallelism", [1, 8])
def test_as_many_cases_are_judged_at_once_as_the_parallelism_allows(parallelism: int) -> None:
    gauge = Gauge()
    judge = Assessor(seconds=0.01, gauge=gauge).judge()
    run(Agent(), suite_of(16), [judge], parallelism=parallelism, num_runs=2)
    assert gauge.peak == parallelism


class Together(Assessor):
    """A judge's model that answers nobody before so many ask at once."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._together = asyncio.Barrier(count)

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        await self._together.wait()
        return await super().invoke(case, context)


def test_the_samples_of_one_judge_are_asked_for_at_once() -> None:
    result = run(Agent(), suite_of(2), [Together(3).judge()], num_runs=3, parallelism=3, timeout=30)
    assert result.metrics["scores"]["judge"]["n"] == 2
    assert result.metrics["scoring_errors"] == 0


def test_a_judge_at_the_targets_own_endpoint_shares_its_limit() -> None:
    class Both(Assessor):
        async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
            asked = msgspec.structs.replace(context, case_id=f"{case.id}#0") if "#" not in context.case_id else context
            return await super().invoke(case, asked)

    gauge = Gauge()
    model = Both(seconds=0.003, gauge=gauge)
    run(model, suite_of(12), [model.judge()], num_runs=3, parallelism=4)
    assert gauge.peak == 4
    assert len(model.calls) == 12 * 4


def test_a_cancelled_run_leaves_no_sample_behind() -> None:
    token = CancellationToken()
    assessor = Assessor(seconds=60, on_call=lambda case_id, run: token.cancel("enough") if run == 2 else None)
    runner = runner_of(Agent(), suite_of(1), [assessor.judge()], num_runs=3, token=token)
    result = runner.run_sync()
    assert result.cancelled
    assert len(assessor.calls) == 3


# num_runs ----------------------------------------------------------------------------------------------------------


def test_samples_mean_and_population_std_dev_stand_in_record_and_metrics(tmp_path: Path) -> None:
    result = run(Agent(), suite_of(4), [Assessor(by_run).judge()], num_runs=3, output_path=tmp_path)
    for score in (record.scores[0] for record in Result.load(tmp_path).load_responses()):
        assert score.samples == [1.0, 0.5, 0.0]
        assert score.mean == score.value == 0.5
        assert score.std_dev == pytest.approx(0.408, abs=0.0005)
        assert score.reasons == ["run 0", "run 1", "run 2"]
        assert score.by is not None
        assert score.by.startswith("assessor/helpfulness_v1@")
    named = result.metrics["scores"]["judge"]
    assert (named["n"], named["mean"]) == (4, 0.5)
    assert named["std_dev"] == pytest.approx(0.408, abs=0.0005)


def test_a_deterministic_scorer_is_not_repeated() -> None:
    seen: Counter[str] = Counter()

    def look(case: Any, response: Any) -> bool:
        seen[case.id] += 1
        return True

    run(Agent(), suite_of(3), [look, Assessor().judge()], num_runs=5)
    assert set(seen.values()) == {1}


@pytest.mark.parametrize("num_runs", [0, -1, 1.5, True])
def test_num_runs_below_one_is_refused(num_runs: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"num_runs must be .*got {num_runs}"):
        run(Agent(), suite_of(1), [Assessor().judge()], num_runs=num_runs)


def test_num_runs_raised_on_a_finished_run_asks_only_the_additional_runs(tmp_path: Path) -> None:
    agent, first, second = Agent(), Assessor(by_run), Assessor(by_run)
    run(agent, suite_of(4), [first.judge()], num_runs=1, output_path=tmp_path)
    result = run(agent, suite_of(4), [second.judge()], num_runs=3, output_path=tmp_path, retry_errors=True)
    assert len(agent.calls) == 4
    assert {each for _, _, each in first.calls} == {0}
    assert Counter(each for _, _, each in second.calls) == {1: 4, 2: 4}
    assert [record.scores[0].samples for record in result.responses] == [[1.0, 0.5, 0.0]] * 4
    assert result.metrics["n"] == 4


# A judge that is down ----------------------------------------------------------------------------------------------


def test_a_judge_that_is_down_is_a_scoring_error_and_never_a_zero(tmp_path: Path) -> None:
    down = Assessor(lambda *_: ValueError("out of order"))
    result = run(Agent(), suite_of(5), [down.judge()], num_runs=2, output_path=tmp_path)
    metrics = result.metrics
    assert [record.status for record in result.responses] == ["ok"] * 5
    assert (metrics["error_rate"], metrics["scoring_errors"], metrics["unscored"]) == (0.0, 5, 5)
    assert (metrics["scored"], metrics["pass_rate"]) == (0, None)
    assert metrics["scores"]["judge"]["errors"] == 5
    assert metrics["scores"]["judge"]["mean"] is None
    for record in result.responses:
        assert record.scores[0].value is None
        assert record.scores[0].errors == ["ValueError: out of order"] * 2


def test_when_the_judge_is_up_again_only_it_is_asked(tmp_path: Path) -> None:
    agent = Agent()
    run(agent, suite_of(5), [Assessor(lambda *_: ValueError("down")).judge()], num_runs=2, output_path=tmp_path)
    up = Assessor()
    result = run(agent, suite_of(5), [up.judge()], num_runs=2, output_path=tmp_path, retry_errors=True)
    assert len(agent.calls) == 5
    assert Counter(each for _, _, each in up.calls) == {0: 5, 1: 5}
    assert (result.metrics["scoring_errors"], result.metrics["pass_rate"]) == (0, 1.0)


def failing_second_run(case_id: str, trial: int, run: int) -> float | Exception:
    return ValueError("one bad run") if run == 1 else 1.0


def test_a_run_that_failed_counts_for_nothing_beside_those_that_did_not(tmp_path: Path) -> None:
    result = run(Agent(), suite_of(2), [Assessor(failing_second_run).judge()], num_runs=3)
    for record in result.responses:
        score = record.scores[0]
        assert (score.samples, score.value, score.passed) == ([1.0, None, 1.0], 1.0, True)
        assert score.errors == ["ValueError: one bad run"]


def test_retrying_errors_asks_only_the_samples_that_failed(tmp_path: Path) -> None:
    agent = Agent()
    run(agent, suite_of(4), [Assessor(failing_second_run).judge()], num_runs=3, output_path=tmp_path)
    up = Assessor()
    result = run(agent, suite_of(4), [up.judge()], num_runs=3, output_path=tmp_path, retry_errors=True)
    assert Counter(each for _, _, each in up.calls) == {1: 4}
    assert len(agent.calls) == 4
    assert [record.scores[0].samples for record in result.responses] == [[1.0, 1.0, 1.0]] * 4


def test_a_resume_asks_only_the_samples_that_failed(tmp_path: Path) -> None:
    """Every run but the second fails, and with `all failed` in one judge the case is scored again."""
    agent = Agent()
    only_second = Assessor(lambda case_id, trial, run: 1.0 if run == 1 else ValueError("down"), model_id="some")
    never = Assessor(lambda *_: ValueError("down"), model_id="none")
    judges = [only_second.judge(name="some"), never.judge(name="none")]
    run(agent, suite_of(3), judges, num_runs=3, output_path=tmp_path)
    (tmp_path / "metrics.json").unlink()
    some, none = Assessor(model_id="some"), Assessor(model_id="none")
    result = run(
        agent, suite_of(3), [some.judge(name="some"), none.judge(name="none")], num_runs=3, output_path=tmp_path
    )
    assert Counter(each for _, _, each in some.calls) == {0: 3, 2: 3}
    assert Counter(each for _, _, each in none.calls) == {0: 3, 1: 3, 2: 3}
    assert len(agent.calls) == 3
    assert result.metrics["scoring_errors"] == 0


def test_a_judge_that_waits_for_leave_does_not_use_up_its_time() -> None:
    model = Script()  # which answers and judges: the judge's calls line up behind all those of the cases
    result = run(model, suite_of(8, expected="x"), [judge(model, timeout=0.2)], parallelism=8, rate="20/s")
    assert [score.errors for record in result.responses for score in record.scores] == [[]] * 8


def test_a_timed_out_judge_is_a_scoring_error() -> None:
    slow = Assessor(seconds=30)
    began = time.monotonic()
    result = run(Agent(), suite_of(2), [slow.judge(timeout=0.05)])
    assert time.monotonic() - began < 5
    assert [record.status for record in result.responses] == ["ok", "ok"]
    assert result.metrics["scoring_errors"] == 2
    assert all("TimeoutError" in record.scores[0].errors[0] for record in result.responses)


# Escalation --------------------------------------------------------------------------------------------------------


def escalated_run(reply: Any, **judge: Any) -> tuple[Result, Assessor]:
    """Ten cases of which the even ones are answered right; the judge is asked about the others."""
    assessor = Assessor(reply)
    agent = Agent(lambda case, context: "yes" if int(case.id[1:]) % 2 == 0 else "maybe")
    scorers = ["exact", assessor.judge(when="failed", **judge)]
    return run(agent, suite_of(10, expected="yes"), scorers), assessor


def test_an_escalated_judge_is_asked_only_where_the_scorers_before_it_said_no() -> None:
    result, assessor = escalated_run(lambda case_id, *_: 1.0 if case_id in ("c01", "c03") else 0.0)
    assert {case_id for case_id, _, _ in assessor.calls} == {"c01", "c03", "c05", "c07", "c09"}
    assert result.metrics["scores"]["judge"]["escalated"] == 5
    assert result.metrics["scores"]["exact"]["n"] == 10
    for record in result.responses:
        exact = record.scores[0]
        if int(record.id[1:]) % 2 == 0:
            assert [score.name for score in record.scores] == ["exact"]
            assert (exact.passed, exact.overruled) == (True, False)
        else:
            judged = record.scores[1]
            assert (exact.passed, exact.overruled, judged.escalated) == (False, judged.passed, True)
    assert result.metrics["passed"] == 7, "five by the scorer, two by the judge's verdict"
    assert result.metrics["scored"] == 10


def test_an_escalated_judge_that_is_down_leaves_the_case_failed(caplog: pytest.LogCaptureFixture) -> None:
    result, _ = escalated_run(lambda *_: ValueError("down"))
    metrics = result.metrics
    assert (metrics["scored"], metrics["passed"], metrics["pass_rate"]) == (10, 5, 0.5)
    assert (metrics["unscored"], metrics["scoring_errors"]) == (0, 5)
    assert not any(score.overruled for record in result.responses for score in record.scores)
    assert "judge could not score c01, and maybe others" in caplog.text


def test_an_escalated_judge_that_is_up_again_is_asked_about_what_it_could_not_judge(tmp_path: Path) -> None:
    suite, agent = suite_of(4, expected="yes"), Agent(lambda case, context: "maybe")
    down, up = Assessor(lambda *_: ValueError("down")), Assessor()
    run(agent, suite, ["exact", down.judge(when="failed")], output_path=tmp_path)
    result = run(agent, suite, ["exact", up.judge(when="failed")], output_path=tmp_path, retry_errors=True)
    assert len(agent.calls) == 4
    assert (result.metrics["passed"], result.metrics["scoring_errors"]) == (4, 0)


def test_a_failure_that_the_judge_confirms_is_not_called_overruled(tmp_path: Path) -> None:
    agent, assessor = Agent(lambda case, context: "maybe"), Assessor(lambda case_id, *_: float(case_id == "c00"))
    run(agent, suite_of(2, expected="yes"), ["exact", assessor.judge(when="failed")], output_path=tmp_path)
    overruled, confirmed = (run_cli(tmp_path, "report", ".", "--case", f"c0{number}").out for number in range(2))
    assert "score exact: 0.000 failed overruled\n" in overruled
    assert "score exact: 0.000 failed\n" in confirmed
    assert "score judge: 0.000 failed escalated by" in confirmed, "one sample has no spread"


def test_a_judge_without_a_verdict_is_not_called_calibrated() -> None:
    result, _ = escalated_run(lambda *_: ValueError("down"))
    named = result.metrics["scores"]["judge"]
    assert (named["n"], named["errors"], named["calibrated"]) == (0, 5, False)
    assert uncalibrated(result.typed_metrics) == [], "it decided nothing"


def test_the_metrics_have_the_rate_with_and_without_a_judge_and_how_many_it_overruled(tmp_path: Path) -> None:
    result, _ = escalated_run(lambda case_id, *_: 1.0 if case_id in ("c01", "c03") else 0.0)
    named = result.metrics["scores"]["judge"]
    assert (result.metrics["pass_rate"], named["pass_rate_without"], named["overruled"]) == (0.7, 0.5, 2)
    assert named["calibrated"] is False
    shown = summary(result.typed_metrics)
    assert "asked about 5 answers that the scorers before it had failed" in shown
    assert "overruled them on 2: pass rate 70.0% with it, 50.0% without it" in shown
    assert "not calibrated; the pass rate without it is 50.0%" in shown


def test_a_judge_that_only_advises_changes_no_rate(tmp_path: Path) -> None:
    result, _ = escalated_run(lambda *_: 1.0, calibration=tmp_path / "absent.json")
    named = result.metrics["scores"]["judge"]
    assert (named["pass_rate_without"], named["overruled"], named["advisory"]) == (0.5, 0, True)
    assert "advisory: not calibrated, so it decides nothing" in summary(result.typed_metrics)
    assert "with it" not in summary(result.typed_metrics)


def test_without_a_judge_that_decides_alone_there_is_no_rate() -> None:
    result = run(Agent(), suite_of(4), [Assessor().judge()])
    assert (result.metrics["pass_rate"], result.metrics["scores"]["judge"]["pass_rate_without"]) == (1.0, None)
    assert "not calibrated; without it nothing decides" in summary(result.typed_metrics)


def test_of_two_escalated_judges_the_rate_without_each_is_of_what_the_other_decides() -> None:
    first = Assessor(lambda case_id, *_: float(case_id == "c01"), model_id="first")
    second = Assessor(lambda case_id, *_: float(case_id in ("c01", "c03", "c05")), model_id="second")
    agent = Agent(lambda case, context: "yes" if int(case.id[1:]) % 2 == 0 else "maybe")
    judges = [model.judge(when="failed", name=model.model_id) for model in (first, second)]
    scores = run(agent, suite_of(10, expected="yes"), ["exact", *judges]).metrics["scores"]
    assert (scores["first"]["overruled"], scores["second"]["overruled"]) == (1, 2)
    assert scores["second"]["pass_rate_without"] == 0.6


def calibrated(path: Path, judge: Any) -> Path:
    """A calibration file that vouches for a judge, on 20 + 20 labels."""
    pairs = [Judged(float(n % 2), float(n % 2 or n == 0), bool(n % 2 or n == 0), str(n)) for n in range(40)]
    entry = calibration(agreement(judge.name, judge.by, pairs), labels_digest="0" * 64, created="2026-01-01")
    assert entry.trusted
    path.write_bytes(msgspec.json.encode(entry))
    return path


def test_a_calibrated_judge_decides_unmarked_with_its_error_rates(tmp_path: Path) -> None:
    path = calibrated(tmp_path / "calibration.json", Assessor().judge(when="failed"))
    result, _ = escalated_run(lambda *_: 1.0, calibration=path)
    named = result.metrics["scores"]["judge"]
    assert (result.metrics["pass_rate"], named["calibrated"], named["advisory"]) == (1.0, True, False)
    assert (named["calibration"]["sensitivity"], named["calibration"]["specificity"]) == (1.0, 0.95)
    assert "on 40 labels: sensitivity 1.00, specificity 0.95" in summary(result.typed_metrics)
    assert "not calibrated" not in summary(result.typed_metrics)


def test_a_judges_calibration_is_in_the_figures_of_a_run_that_is_read_back(tmp_path: Path) -> None:
    path = calibrated(tmp_path / "calibration.json", Assessor().judge())
    run(Agent(), suite_of(3), [Assessor().judge(calibration=path)], output_path=tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    named = Result.load(tmp_path / "run").metrics["scores"]["judge"]
    assert (named["calibrated"], named["calibration"]["labels"]) == (True, 40)


def test_required_without_a_file_is_a_calibration_beside_the_suite(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result, _ = escalated_run(lambda *_: 1.0, calibration="required")
    assert result.metrics["scores"]["judge"]["advisory"] is True
    calibrated(tmp_path / "calibration.json", Assessor().judge(when="failed"))
    result, _ = escalated_run(lambda *_: 1.0, calibration="required")
    assert result.metrics["scores"]["judge"]["calibrated"] is True


def test_a_calibration_that_names_no_file_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="calibration must be a file's path or 'required', got True"):
        Assessor().judge(calibration=True)


def test_a_judge_that_is_not_calibrated_is_marked_wherever_its_rate_is_shown(tmp_path: Path) -> None:
    agent = Agent(lambda case, context: "yes" if int(case.id[1:]) % 2 == 0 else "maybe")
    scorers = ["exact", Assessor().judge(when="failed", name="lenient")]
    result = run(agent, suite_of(10, expected="yes"), scorers, output_path=tmp_path / "runs" / "r")
    mark = "judge lenient is not calibrated; the pass rate without it is 50.0%"
    assert uncalibrated(result.typed_metrics) == [mark]
    assert any("Judge lenient is not calibrated" in notice["text"] for notice in notices(result.typed_metrics))
    gated = run_cli(tmp_path, "gate", "runs/r", "--rule", "pass_rate>=0.9")
    assert (gated.code, gated.out) == (
        1,
        f"uncalibrated judge: {mark} (--allow uncalibrated-judge lets that pass)\n",
    )
    words = ("gate", "runs/r", "--rule", "pass_rate>=0.9", "--allow", "uncalibrated-judge")
    allowed = run_cli(tmp_path, *words)
    assert (allowed.code, allowed.out) == (0, "")
    assert mark in allowed.err
    assert json.loads(run_cli(tmp_path, *words, "--json").out)["warnings"] == [f"uncalibrated judge: {mark}"]
    of_speed = run_cli(tmp_path, "gate", "runs/r", "--rule", "n==10")
    assert (of_speed.code, of_speed.out) == (0, "")
    assert mark in of_speed.err
    listed = run_cli(tmp_path, "ls").out
    assert "100.0% *" in listed
    assert f"r: {mark}" in listed
    markdown = run_cli(tmp_path, "report", "runs/r", "-f", "md").out
    assert "is not calibrated" in markdown
    assert mark in result._repr_html_()
    assert "pass_rate=100.0% (judge not calibrated)" in repr(result)


def test_a_rate_that_an_uncalibrated_judge_decides_is_marked_while_the_run_goes_on(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run(Agent(), suite_of(3), [Assessor().judge()], progress="lines")
    assert "passed 100.0% (29%–100%), judge not calibrated" in capsys.readouterr().err


def test_a_judge_that_only_advises_is_in_no_combined_verdict(tmp_path: Path) -> None:
    combined = Combined(weights={"exact": 1, "judge": 3}, threshold=0.7)
    advisory = Assessor().judge(calibration=str(tmp_path / "none.json"))
    result = run(Agent(), suite_of(4, expected="no"), ["exact", advisory, combined])
    assert result.metrics["scores"]["judge"]["mean"] == 1.0
    assert result.pass_rate == 0.0, "the judge alone would have passed them"


def test_without_a_judge_there_is_no_verdict_that_is_made_of_its_score() -> None:
    combined = Combined(weights={"exact": 1, "judge": 3}, threshold=0.7)
    result = run(Agent(), suite_of(4, expected="no"), ["exact", Assessor().judge(), combined])
    assert result.pass_rate == 1.0
    assert result.responses[0].scores[-1].combines == ["exact", "judge"]
    assert uncalibrated(result.typed_metrics) == ["the judge is not calibrated; without it nothing decides"]


def test_a_run_without_figures_yet_is_listed_with_the_mark(tmp_path: Path) -> None:
    run(Agent(), suite_of(3), [Assessor().judge()], output_path=tmp_path / "runs" / "r", trials=2)
    (tmp_path / "runs" / "r" / "metrics.json").unlink()
    found = read_headline(tmp_path / "runs" / "r")
    assert (found.pass_rate, found.pass_rate_ci95) == (1.0, None), "trials count together, which the end works out"
    assert found.uncalibrated == ["the judge is not calibrated"]
    path = calibrated(tmp_path / "calibration.json", Assessor().judge())
    run(Agent(), suite_of(3), [Assessor().judge(calibration=path)], output_path=tmp_path / "runs" / "t")
    (tmp_path / "runs" / "t" / "metrics.json").unlink()
    assert read_headline(tmp_path / "runs" / "t").uncalibrated == []


@pytest.mark.parametrize(
    ("judges", "sentence"),
    [
        (["judge"], "the judge is not calibrated"),
        (["tone"], "judge tone is not calibrated"),
        (["judge", "tone"], "2 judges (judge, tone) are not calibrated"),
    ],
)
def test_a_judge_is_named_once(judges: list[str], sentence: str) -> None:
    assert not_calibrated(judges) == sentence


def test_slices_by_an_uncalibrated_judge_are_marked(tmp_path: Path) -> None:
    cases = [EvalCase(id=f"c{n}", prompt="?", metadata={"topic": "ab"[n % 2]}) for n in range(6)]
    result = run(Agent(), EvalSet("s", cases), [Assessor().judge()], by=("topic",), output_path=tmp_path / "r")
    mark = "the judge is not calibrated: these rates are with it"
    assert f"  {mark}\n" in summary(result.typed_metrics)
    markdown = run_cli(tmp_path, "report", "r", "-f", "md").out
    assert markdown.count("these rates are with it") == 1


def test_how_far_a_jury_agrees_is_in_the_metrics() -> None:
    yes = Assessor(model_id="a")
    some = Assessor(lambda case_id, *_: float(case_id != "c00"), model_id="b")
    one = Assessor(lambda case_id, *_: float(case_id > "c01"), model_id="c")
    jury = Jury([model.judge() for model in (yes, some, one)])
    result = run(Agent(), suite_of(4), [jury])
    found = result.metrics["scores"]["judge"]["jury"]
    assert (found["votes"], found["unanimous"]) == (4, 0.5)
    assert found["agreement"] == pytest.approx((1 + 1 + 3 + 3) / 12)
    assert "its models agree on 50.0% of answers" in summary(result.typed_metrics)


def test_an_escalated_judge_is_not_asked_where_nothing_was_scored() -> None:
    assessor = Assessor()
    result = run(Agent(), suite_of(3), ["exact", assessor.judge(when="failed")])
    assert assessor.calls == []
    assert result.metrics["unscored"] == 3


def test_an_uncalibrated_judge_is_shown_and_decides_nothing(tmp_path: Path) -> None:
    result, assessor = escalated_run(lambda *_: 1.0, calibration=tmp_path / "absent.json")
    assert len(assessor.calls) == 5
    assert result.metrics["scores"]["judge"]["advisory"] is True
    assert (result.metrics["passed"], result.metrics["scored"]) == (5, 10)
    judged = [record.scores for record in result.responses if len(record.scores) == 2]
    assert all(judge.advisory and not exact.overruled for exact, judge in judged)


def test_only_advice_is_no_verdict(tmp_path: Path) -> None:
    judge = Assessor().judge(calibration=tmp_path / "absent.json")
    result = run(Agent(), suite_of(3), [judge])
    assert (result.metrics["pass_rate"], result.metrics["unscored"]) == (None, 3)
    assert result.metrics["scoring_errors"] == 0


# Trials ------------------------------------------------------------------------------------------------------------


def by_trial(case_id: str, trial: int, run: int) -> float:
    return float(trial % 2)


@pytest.mark.parametrize(("reply", "dominates"), [(by_trial, "agent"), (by_run, "judge")])
def test_trials_and_num_runs_split_the_variance_and_say_which_dominates(reply: Any, dominates: str) -> None:
    agent = Agent(lambda case, context: f"{case.id} in trial {context.trial}")
    result = run(agent, suite_of(6), [Assessor(reply).judge()], trials=4, num_runs=3)
    trials = result.metrics["trials"]
    variance = trials["scores"]["judge"]["variance"]
    assert trials["trials"] == 4
    assert result.metrics["n"] == 24
    assert variance["dominates"] == dominates
    assert dominates in variance["says"]
    if dominates == "agent":
        assert (variance["judge"], variance["agent"]) == (0.0, pytest.approx(1 / 3))
        assert (trials["flaky"], trials["pass_rate"]) == (6, 0.5)
        assert trials["pass_at_k"]["4"] == 1.0
        assert trials["pass_hat_k"]["4"] == 0.0
    else:
        assert (variance["judge"], variance["agent"]) == (0.25, 0.0)


def test_a_trial_is_a_record_of_its_own(tmp_path: Path) -> None:
    agent, assessor = Agent(), Assessor()
    run(agent, suite_of(3), [assessor.judge()], trials=3, num_runs=2, output_path=tmp_path)
    every = {(f"c{case:02}", trial) for case in range(3) for trial in range(3)}
    records = lines_of(tmp_path, "outputs.jsonl")
    assert sorted((record["id"], record["trial"]) for record in records) == sorted(every)
    assert Counter(agent.calls) == Counter(every)
    assert journalled(tmp_path) == {(*slot, each) for slot in every for each in range(2)}


def test_a_run_resumes_in_the_middle_of_trials(tmp_path: Path) -> None:
    """What is on record of a case's trials stays; the others are asked, and the figures are of all of them."""
    agent = Agent(lambda case, context: f"{case.id} in trial {context.trial}")
    whole = run(agent, suite_of(4), [Assessor(by_trial).judge()], trials=3, num_runs=2)
    options: dict[str, Any] = {"trials": 3, "num_runs": 2, "output_path": tmp_path, "parallelism": 1}
    run(agent, suite_of(4), [Assessor(by_trial).judge()], **options)
    outputs = tmp_path / "outputs.jsonl"
    outputs.write_bytes(b"".join(outputs.read_bytes().splitlines(keepends=True)[:4]))
    for name in ("metrics.json", "answers.jsonl"):
        (tmp_path / name).unlink()
    agent.calls.clear()
    assessor = Assessor(by_trial)
    result = run(agent, suite_of(4), [assessor.judge()], **options)
    done = {("c00", 0), ("c00", 1), ("c00", 2), ("c01", 0)}
    left = {(f"c{case:02}", trial) for case in range(4) for trial in range(3)} - done
    assert Counter(agent.calls) == Counter(left)
    assert Counter(assessor.calls) == Counter((*slot, each) for slot in left for each in range(2))
    assert result.metrics["trials"] == whole.metrics["trials"]
    assert [(record.id, record.trial) for record in result.responses] == sorted(left | done)


def test_trials_added_to_a_finished_run_are_asked_and_the_others_are_not(tmp_path: Path) -> None:
    agent, assessor = Agent(), Assessor()
    run(agent, suite_of(3), [assessor.judge()], trials=1, output_path=tmp_path)
    result = run(agent, suite_of(3), [assessor.judge()], trials=2, output_path=tmp_path, retry_errors=True)
    assert Counter(agent.calls) == {(f"c{case:02}", trial): 1 for case in range(3) for trial in range(2)}
    assert len(assessor.calls) == 6
    assert result.metrics["n"] == 6


def test_a_scorer_that_breaks_down_is_told_of_once_while_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def picky(case: EvalCase, response: Any) -> float:
        raise ValueError("no \x1b[31mred\x1b[0m here")

    cases = [EvalCase(id=f"c{number}", prompt="?") for number in range(30)]
    result = Runner(lambda case: "yes", EvalSet("s", cases), [picky], progress="off", parallelism=1).run_sync()
    assert result.metrics["scoring_errors"] == 30
    (told,) = [record.getMessage() for record in caplog.records if "could not score" in record.getMessage()]
    assert told.startswith("picky could not score c0, and maybe others: ValueError: no ")
    assert "\x1b" not in told
