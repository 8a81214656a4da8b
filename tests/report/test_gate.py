"""`steelyard gate`: silent when a run is good enough, a line and an exit code when it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import EvalCase, EvalSet, InvocationResponse, Result, Runner
from steelyard.errors import ConfigurationError
from steelyard.protocols import InvocationContext
from steelyard.report.gate import Allowance, CheckedRule, check_rule, hold_to, parse_drop, parse_rule
from steelyard.scoring import Judge
from steelyard.stats.intervals import clopper_pearson
from steelyard.stats.metrics import figures
from steelyard.targets import CallableTarget
from tests.support.cli import Ended, Workshop, run_cli
from tests.support.compare import finished, journal, outcome
from tests.support.journal import CountedModel, write_journal
from tests.support.junit import assert_valid_junit
from tests.support.metrics import typed


@pytest.fixture(autouse=True)
def no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def gate(folder: Path, *words: str) -> Ended:
    return run_cli(folder, "gate", *words)


def compared(folder: Path, baseline: str, run: str, *words: str) -> Ended:
    """A complete run against a complete baseline, a letter a case."""
    finished(folder / "old", baseline)
    finished(folder / "new", run)
    return gate(folder, "new", "--baseline", "old", *words)


def test_a_run_that_keeps_its_rules_is_met_with_silence(tmp_path: Path) -> None:
    finished(tmp_path / "run", "ppppf")
    ended = gate(tmp_path, "run", "--rule", "pass_rate>=0.8", "--rule", "n==5")
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_each_broken_rule_is_a_line_and_the_exit_is_1(tmp_path: Path) -> None:
    finished(tmp_path / "run", "pppff")
    ended = gate(tmp_path, "run", "--rule", "pass_rate>=0.8", "--rule", "n==5", "--rule", "cost<2")
    assert ended.code == 1
    first, second = ended.out.splitlines()
    assert first == "pass_rate>=0.8: is 0.6"
    assert second.startswith("cost<2: is not known: no call has a known cost; give the suite `prices`")


def test_verbose_prints_every_rule_and_json_too(tmp_path: Path) -> None:
    finished(tmp_path / "run", "pp")
    said = gate(tmp_path, "run", "--rule", "n==2", "--rule", "n==3", "-v")
    assert said.out.splitlines() == ["ok      the run: is complete", "ok      n==2: is 2", "broken  n==3: is 2"]
    told = json.loads(gate(tmp_path, "run", "--rule", "n==2", "--json").out)
    assert (told["passed"], told["checks"][1]) == (True, {"rule": "n==2", "ok": True, "value": 2.0, "reason": "is 2"})


def test_the_suite_s_own_gate_holds(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.failing("c0")
    shop.suite(gate={"min_pass_rate": 0.9, "max_error_rate": 0.5, "rules": ["counts.ok>=6", "n==6"]})
    assert shop.by_command().code == 1
    ended = gate(tmp_path, "RUN")
    assert (ended.code, ended.out) == (1, "counts.ok>=6: is 5\n")
    said = gate(tmp_path, "RUN", "-v").out
    assert "ok      pass_rate>=0.9: is 1" in said
    assert "ok      failure_rate<=0.5: is 0.1667" in said


def test_another_suite_s_gate_can_be_named_and_a_missing_one_is_said(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    path = shop.suite(gate={"rules": ["n==6"]})
    shop.by_command()
    path.rename(tmp_path / "moved.yaml")
    ended = gate(tmp_path, "RUN", "--rule", "n>0")
    assert (ended.code, ended.out) == (0, "")
    assert "the suite file suite.yaml is not to be found from here" in ended.err
    assert gate(tmp_path, "RUN", "--suite", "moved.yaml").code == 0


@pytest.mark.parametrize("rules", ["n==6", [6], ["n is 6"], ["no_such_metric>1"]])
def test_a_bad_rule_in_a_suite_is_exit_2_and_named(tmp_path: Path, rules: object) -> None:
    shop = Workshop(tmp_path)
    shop.by_command()
    shop.suite(gate={"rules": rules})
    ended = gate(tmp_path, "RUN")
    assert (ended.code, ended.out) == (2, "")
    assert "rule" in ended.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run"], "nothing to check: give --rule or --baseline"),
        (["nowhere"], "nowhere is not a run directory"),
        (["nowhere", "--rule", "n>0"], "nowhere is not a run directory"),
        (["run", "--rule", "pas_rate>1"], "did you mean 'pass_rate'?"),
        (["run", "--rule", "tft<3s"], "did you mean 'ttft_p50'?"),
        (["run", "--max-slowdown", "1.1"], "need a --baseline"),
        (["run", "--baseline", "run", "--max-slowdown", "0.5"], "1 or more, got 0.5"),
        (["run", "--baseline", "run", "--max-regression", "pass_rate"], "a drop within 0..1, got 'pass_rate'"),
        (["run", "--baseline", "run", "--max-regression", "pass_rate=2"], "got 'pass_rate=2'"),
        (["run", "--baseline", "run", "--max-regression", "score.exat=0.1"], "did you mean 'score.exact'?"),
        (["run", "--baseline", "nowhere"], "nowhere is not a run directory"),
        (["run", "--rule", "n>0", "--junit", "nowhere/x.xml"], "cannot write nowhere/x.xml"),
    ],
)
def test_a_mistake_is_exit_2_and_named(tmp_path: Path, words: list[str], named: str) -> None:
    finished(tmp_path / "run", "pp")
    ended = gate(tmp_path, *words)
    assert (ended.code, ended.out) == (2, "")
    assert named in ended.err


def test_an_unfinished_run_fails_unless_that_is_allowed(tmp_path: Path) -> None:
    journal(tmp_path / "run", "ppp")
    ended = gate(tmp_path, "run", "--rule", "n==3")
    assert (ended.code, ended.out) == (1, "the run: is not complete: 3 of 3 done (--allow incomplete lets that pass)\n")
    assert gate(tmp_path, "run", "--rule", "n==3", "--allow", "incomplete").code == 0


def test_an_unchanged_run_is_not_worse_than_its_baseline(tmp_path: Path) -> None:
    ended = compared(tmp_path, "ppppffff", "ppppffff")
    assert (ended.code, ended.out) == (0, "")


def test_a_run_that_is_shown_to_be_worse_breaks_the_gate(tmp_path: Path) -> None:
    ended = compared(tmp_path, "p" * 40, "f" * 10 + "p" * 30)
    assert ended.code == 1
    assert ended.out.startswith("pass_rate not worse than old: is 0.75 against 1 on 40 cases: −0.250, 95 % CI ")
    assert ended.out.endswith(": it is worse\n")


def test_a_few_changes_that_may_be_chance_do_not_break_it(tmp_path: Path) -> None:
    """Four of sixty: the interval reaches 0 (p = 0.125)."""
    assert compared(tmp_path, "p" * 60, "f" * 4 + "p" * 56).code == 0


def test_errors_that_the_baseline_did_not_have_break_it_too(tmp_path: Path) -> None:
    """Errors leave the pass rate alone: without a rule of their own a run could fail on all hard cases and pass."""
    ended = compared(tmp_path, "p" * 20 + "f" * 20, "p" * 20 + "e" * 20)
    assert ended.code == 1
    assert ended.out.startswith("error_rate not worse than old: is 0.5 against 0")


def test_what_else_is_different_from_the_baseline_is_said_when_asked(tmp_path: Path) -> None:
    ended = compared(tmp_path, "pppp", "pppppp", "-v")
    assert ended.code == 0
    assert "note    2 of 6 cases are not in the baseline" in ended.out.splitlines()
    assert gate(tmp_path, "new", "--baseline", "old").out == ""


def test_cases_that_a_run_has_lost_are_said(tmp_path: Path) -> None:
    """A run without the cases that it would fail is no better, and only looks so."""
    compared(tmp_path, "ppff", "pp")
    told = json.loads(gate(tmp_path, "new", "--baseline", "old", "--json").out)
    assert "2 of 4 cases of the baseline are not in this run" in told["notes"]
    gate(tmp_path, "new", "--baseline", "old", "--markdown", "gate.md")
    assert "2 of 4 cases of the baseline" in (tmp_path / "gate.md").read_text()


def test_runs_without_verdicts_are_held_to_what_they_have(tmp_path: Path) -> None:
    """A load test scores nothing: its errors and its times can be checked all the same."""
    for name in ("old", "new"):
        finished(tmp_path / name, "p" * 10, scorers=())
    assert gate(tmp_path, "new", "--baseline", "old", "--max-slowdown", "2").code == 0
    asked = gate(tmp_path, "new", "--baseline", "old", "--max-regression", "pass_rate=0")
    assert asked.out == "pass_rate not worse than old: is not known: no case has it in both runs\n"


def test_verdicts_that_only_one_run_has_are_not_known_to_be_no_worse(tmp_path: Path) -> None:
    finished(tmp_path / "old", "p" * 10)
    finished(tmp_path / "new", "p" * 10, scorers=())
    finished(tmp_path / "failed", "e" * 10)
    for run in ("new", "failed"):
        assert "pass_rate not worse than old: is not known" in gate(tmp_path, run, "--baseline", "old").out
    assert "pass_rate not worse than failed: is not known" in gate(tmp_path, "failed", "--baseline", "failed").out


def test_an_allowance_asks_for_evidence(tmp_path: Path) -> None:
    """With a margin the interval must rule out a larger drop: few cases cannot, many can."""
    ended = compared(tmp_path, "p" * 30, "p" * 30, "--max-regression", "pass_rate=0.05")
    assert ended.code == 1
    assert ended.out.endswith(
        "a drop of more than 0.05 cannot be ruled out; about 72 cases, none of which changes, could\n"
    )
    few = compared(tmp_path / "more", "p" * 100, "p" * 100, "--max-regression", "pass_rate=0.05")
    assert few.code == 0


def test_six_cases_rule_nothing_out(tmp_path: Path) -> None:
    """One of six improved: the bootstrap's interval began at 0 and passed any margin."""
    ended = compared(tmp_path, "fppppp", "pppppp", "--max-regression", "pass_rate=0.001")
    assert ended.code == 1
    assert "a drop of more than 0.001 cannot be ruled out; about " in ended.out


def test_an_error_rate_has_a_margin_too(tmp_path: Path) -> None:
    words = ("--max-regression", "error_rate=0.1")
    assert compared(tmp_path / "same", "p" * 40, "p" * 40, *words).code == 0
    ended = compared(tmp_path / "worse", "p" * 40, "e" * 20 + "p" * 20, *words)
    assert "error_rate not worse than old by more than 0.1: is 0.5 against 0 on 40 cases: +0.500" in ended.out
    assert ": it is worse by more than 0.1\n" in ended.out


def test_cases_of_a_group_count_together(tmp_path: Path) -> None:
    """Ten cases of one document that all got worse are one document that got worse."""
    for name, letter in (("old", "p"), ("new", "f")):
        groups = [str(number // 10) for number in range(40)]
        records = [outcome(letter if i < 10 else "p", i, group=group) for i, group in enumerate(groups)]
        write_journal(tmp_path / name, records)
    gated = hold_to(tmp_path / "new", [], baseline=tmp_path / "old", allowed={"incomplete"})
    (check,) = [check for check in gated.checks if check.rule.startswith("pass_rate")]
    assert check.ok
    assert "on 40 cases in 4 groups: −0.250" in check.reason


def run_of_answers(folder: Path, *, stop_reason: str = "stop", scorer: Any = "exact") -> None:
    """A suite file and a complete run of it, of ten right answers, the first three of which stopped otherwise."""

    def answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        return InvocationResponse(response_text="yes", stop_reason=stop_reason if int(case.id) < 3 else "stop")

    cases = [EvalCase(id=str(number), prompt="?", expected="yes") for number in range(10)]
    run = folder / "run"
    Runner(CountedModel(answer), EvalSet("s", cases), [scorer], output_path=run, progress="off").run_sync()


@pytest.mark.parametrize("reason", ["length", "max_tokens", "MAX_TOKENS", "max_output_tokens"])
def test_answers_that_were_cut_off_break_a_gate_on_quality(tmp_path: Path, reason: str) -> None:
    run_of_answers(tmp_path, stop_reason=reason)
    ended = gate(tmp_path, "run", "--rule", "pass_rate>=0.8")
    said = "truncated answers: 3 of 10 answers were cut off at the limit of tokens"
    assert (ended.code, ended.out) == (1, f"{said} (--allow truncated lets that pass)\n")
    allowed = gate(tmp_path, "run", "--rule", "pass_rate>=0.8", "--allow", "truncated")
    assert (allowed.code, allowed.out) == (0, "")
    assert said in allowed.err
    of_speed = gate(tmp_path, "run", "--rule", "n==10")
    assert (of_speed.code, of_speed.out) == (0, "")
    assert said in of_speed.err
    assert gate(tmp_path, "run", "--rule", "pass_rate>=0.8", "--rule", "truncated_rate<=30%").code == 0
    assert "truncated_rate<=20%: is 30%" in gate(tmp_path, "run", "--rule", "truncated_rate<=20%").out
    known = Result.load(tmp_path / "run").typed_metrics
    assert (known.truncated, known.stop_reasons) == (3, {"stop": 7, reason: 3})


def test_answers_that_could_not_be_scored_break_a_gate_on_quality(tmp_path: Path) -> None:
    def broken(case: EvalCase, response: InvocationResponse) -> bool:
        if case.id == "0":
            raise ValueError("no")
        return True

    run_of_answers(tmp_path, scorer=broken)
    ended = gate(tmp_path, "run", "--rule", "pass_rate>=0.8")
    assert ended.code == 1
    assert ended.out.startswith(
        "scoring errors: a scorer failed on 1 of 10 answers; no pass rate counts the 1 without a verdict (--allow "
    )
    assert gate(tmp_path, "run", "--rule", "pass_rate>=0.8", "--allow", "scoring-errors").code == 0
    assert gate(tmp_path, "run", "--rule", "pass_rate>=0.8", "--rule", "failure_rate<=10%").code == 0


def test_an_answer_that_a_judge_could_not_rescue_is_not_said_to_be_in_no_pass_rate(tmp_path: Path) -> None:
    """With `when: failed` the case stays failed, as the other scorers say."""
    suite = EvalSet("s", [EvalCase(id=str(n), prompt="p", expected="wrong" if n < 2 else "P") for n in range(10)])
    judge = Judge(model="m", target=CallableTarget(lambda case: "no verdict"), when="failed")
    Runner(lambda case: "P", suite, ["exact", judge], output_path=tmp_path / "run").run_sync()
    ended = gate(tmp_path, "run", "--rule", "pass_rate>=0.8")
    assert (ended.code, ended.out.partition(" (")[0]) == (1, "scoring errors: a scorer failed on 2 of 10 answers")


def test_what_may_pass_can_be_said_in_the_suite(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.suite(gate={"rules": ["n==6"], "allow": ["incomplete", "truncated"]})
    assert shop.by_command().code == 0
    assert gate(tmp_path, "RUN").code == 0
    shop.suite(gate={"rules": ["n==6"], "allow": ["truncatd"]})
    ended = gate(tmp_path, "RUN")
    assert ended.code == 2
    assert "'truncatd' cannot be allowed; did you mean 'truncated'?" in ended.err
    assert "cannot be allowed" in gate(tmp_path, "RUN", "--rule", "n>0", "--allow", "everything").err


def test_a_drop_beyond_the_allowance_is_called_that(tmp_path: Path) -> None:
    ended = compared(tmp_path, "p" * 60, "f" * 30 + "p" * 30, "--max-regression", "pass_rate=2%")
    assert "by more than 0.02" in ended.out
    assert ended.out.endswith(": it is worse by more than 0.02\n")


def test_a_score_s_mean_can_be_held_against_the_baseline(tmp_path: Path) -> None:
    ended = compared(tmp_path, "p" * 40, "f" * 20 + "p" * 20, "--max-regression", "score.exact=0")
    assert "score.exact not worse than old: is 0.5 against 1 on 40 cases" in ended.out
    assert parse_drop("scores.exact.mean = 2%") == ("score.exact", 0.02)


@pytest.mark.parametrize(
    ("factor", "allowed", "ok"), [(1.0, 1.0, True), (1.3, 1.0, False), (1.05, 1.1, True), (1.3, 1.1, False)]
)
def test_a_slowdown_is_the_typical_case_s_ratio(tmp_path: Path, factor: float, allowed: float, ok: bool) -> None:
    for run, times in (("old", 1.0), ("new", factor)):
        records = [outcome("p", i, time_to_last_token=times * (1 + i % 7)) for i in range(40)]
        write_journal(tmp_path / run, records)
    gated = hold_to(
        tmp_path / "new",
        [],
        baseline=tmp_path / "old",
        allowance=Allowance(slowdown=allowed),
        allowed={"incomplete"},
    )
    check = gated.checks[-1]
    assert check.value == pytest.approx(factor)
    assert check.ok is ok, check


def test_too_few_times_cannot_show_that_it_is_not_slower(tmp_path: Path) -> None:
    ended = compared(tmp_path, "ppp", "ppp", "--max-slowdown", "1.5")
    assert ended.code == 1
    assert "too few cases to tell" in ended.out


def test_a_busy_client_says_nothing_of_a_slowdown(tmp_path: Path) -> None:
    compared(tmp_path, "p" * 10, "p" * 10)
    path = tmp_path / "new" / "metrics.json"
    metrics = json.loads(path.read_bytes())
    metrics["client"] |= {"bottleneck": True, "reason": "its event loop was busy"}
    path.write_text(json.dumps(metrics))
    words = ("new", "--baseline", "old", "--max-slowdown", "3")
    assert "in new the client was the bottleneck: its event loop was busy" in gate(tmp_path, *words).out
    assert gate(tmp_path, *words, "--allow", "client-bottleneck").code == 0


def test_a_baseline_without_a_common_case_is_refused(tmp_path: Path) -> None:
    finished(tmp_path / "run", "pp")
    write_journal(tmp_path / "old", [outcome("p", 7)])
    with pytest.raises(ConfigurationError, match="nothing can be paired"):
        hold_to(tmp_path / "run", [], baseline=tmp_path / "old")
    assert gate(tmp_path, "run", "--baseline", "old").code == 2


def test_junit_has_a_test_case_for_each_rule(tmp_path: Path) -> None:
    finished(tmp_path / "run", "pp")
    ended = gate(tmp_path, "run", "--rule", "n==2", "--rule", "n==3", "--junit", "gate.xml")
    assert ended.code == 1
    suite = assert_valid_junit((tmp_path / "gate.xml").read_text(encoding="utf-8"))[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "0")
    assert [child.tag for child in suite] == ["properties", *["testcase"] * 3, "system-out", "system-err"]
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert (failure.get("message"), failure.text) == ("is 2", "n==3: is 2")


def test_hostile_names_break_no_format(tmp_path: Path) -> None:
    name = "<b>]]>&\"'|`@me\x1b[31m\u202e"
    run = tmp_path / "run"
    finished(run, "pp")
    metrics = json.loads((run / "metrics.json").read_bytes())
    metrics["scores"][name] = {**metrics["scores"]["exact"], "mean": 0.1}
    (run / "metrics.json").write_text(json.dumps(metrics | {"suite": name, "model_id": name}))
    rule = f"score.{name}.mean>0.5"
    ended = gate(tmp_path, "run", "--rule", rule, "--junit", "g.xml", "--markdown", "g.md")
    assert ended.code == 1
    assert "\x1b" not in ended.out
    assert "\u202e" not in ended.out
    case = assert_valid_junit((tmp_path / "g.xml").read_text(encoding="utf-8")).find("testsuite/testcase[2]")
    assert case is not None
    assert "<b>]]>&\"'|`@me" in str(case.get("name"))
    text = (tmp_path / "g.md").read_text(encoding="utf-8")
    for sign in ("<b>", "`", "@me", "\x1b", "\u202e"):
        assert sign not in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {4}


def test_a_summary_is_written_for_a_pull_request_and_appended_for_github(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    finished(tmp_path / "run", "pp")
    assert gate(tmp_path, "run", "--rule", "n==2", "--markdown", "gate.md").out == ""
    written = (tmp_path / "gate.md").read_text(encoding="utf-8")
    assert written.startswith("### ✅ gate passed\n")
    assert summary.read_text(encoding="utf-8") == f"before\n{written}\n"
    gate(tmp_path, "run", "--rule", "n==3")
    assert "❌ gate failed: 1 of 2 broken" in summary.read_text(encoding="utf-8")


def test_a_summary_that_cannot_be_written_changes_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "nowhere" / "x.md"))
    finished(tmp_path / "run", "pp")
    ended = gate(tmp_path, "run", "--rule", "n==2")
    assert (ended.code, ended.out) == (0, "")
    assert "GITHUB_STEP_SUMMARY" in ended.err


def test_rules_are_read_before_any_is_judged(tmp_path: Path) -> None:
    finished(tmp_path / "run", "ff")
    with pytest.raises(ConfigurationError, match="no metric"):
        hold_to(tmp_path / "run", [parse_rule("pass_rate>=1"), parse_rule("nothing>1")])


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    """Ten cases in two trials each; the odd ones fail, and case 9 raises."""

    def answer(case: EvalCase) -> str:
        if case.id == "9":
            raise ValueError("no")
        return "even" if int(case.id) % 2 == 0 else "odd"

    cases = [EvalCase(id=str(number), prompt="?", expected="even") for number in range(10)]
    return Runner(answer, EvalSet("s", cases), ["exact"], trials=2, progress="off").run_sync().metrics


def checked(rule: str, metrics: dict[str, Any], *allowed: str) -> CheckedRule:
    found = typed(metrics)
    return check_rule(parse_rule(rule), found, figures(found), allowed)


@pytest.mark.parametrize(
    ("rule", "ok"),
    [
        ("pass_rate>=0.5", True),
        ("pass_rate >= 60%", False),
        ("pass_rate.ci_low>0.1", True),
        ("pass_rate.ci_high<=1", True),
        ("error_rate==0.1", True),
        ("failure_rate<=10%", True),
        ("n==20", True),
        ("n!=20", False),
        ("counts.error<2", False),
        ("errors.ValueError==2", True),
        ("errors.TimeoutError==0", True),
        ("error_kinds.HTTP 429==0", True),
        ("score.exact.mean>0.5", True),
        ("scores.exact.mean>0.5", True),
        ("score.exact.ci_low>=0.75", False),
        ("score.exact.pass_rate.ci_high<0.9", True),
        ("time_to_last_token-p99<1s", True),
        ("time_to_last_token-p99<0.001us", False),
        ("time_to_last_token-p50<60000ms", True),
        ("trials.flaky==0", True),
        ("trials.pass_at_k.2>=0.5", True),
        ("trials.score.exact.mean>=.5", True),
        ("requests_per_minute>1e0", True),
        ("total_requests<=1_000", True),
        ("score.exact.n>=27", False),
        ("latency_p99<1s", True),
        ("ttlt_p50 < 0.001us", False),
        ("TTLT_max<1m", True),
        ("time_to_last_token_avg<1min", True),
        ("ttlt-p99<1", True),
    ],
)
def test_a_rule_may_name_any_figure(rule: str, ok: bool, metrics: dict[str, Any]) -> None:
    found = checked(rule, metrics, "client-bottleneck")
    assert found.ok is ok, found


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "pass_rate",
        "pass_rate>",
        ">=0.8",
        "pass_rate=0.8",
        "pass_rate>=high",
        "n<5 apples",
        "n<nan",
    ],
)
def test_what_is_no_rule_is_refused(rule: str) -> None:
    with pytest.raises(ConfigurationError, match="a rule is a metric"):
        parse_rule(rule)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("pass_rate>=80ms", "pass_rate is not a time"),
        ("cost<5%", "cost is not a share"),
        ("time_to_first_token-p99<5%", "is not a share"),
        ("ttft_p99<5%", "is not a share"),
        ("latncy_p99<5s", "did you mean 'latency_p99'?"),
    ],
)
def test_a_unit_must_fit_its_metric(rule: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parse_rule(rule)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("ttft<1s", "ttft needs an aggregate, such as ttft_p99"),
        ("time_to_last_token<1", "time_to_last_token needs an aggregate"),
        ("ttlt_p98<1s", "no aggregate 'p98'; did you mean 'p9"),
        ("time_to_first_token-p97<1", "no aggregate 'p97'; did you mean 'p9"),
        ("pass_rate>0.5,error_rate<1%", "more than one rule"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_run_is_looked_at(rule: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parse_rule(rule)


@pytest.mark.parametrize(
    ("rule", "meant"),
    [
        ("error_rate<5", "5%"),
        ("pass_rate>=80", "80%"),
        ("pass_rate.ci_low>=80", "80%"),
        ("failure_rate<=1.5", "1.5%"),
        ("trials.pass_hat_k.3>=50", "50%"),
    ],
)
def test_a_share_above_1_would_hold_always_or_never_and_is_refused(rule: str, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=f"a share above 1; did you mean {meant}?"):
        parse_rule(rule)
    with pytest.raises(ConfigurationError, match="a share above 1"):
        parse_rule("pass_rate>=101%")


@pytest.mark.parametrize("rule", ["score.exact.mean>=75", "score.exact.ci_low>=75"])
def test_so_is_a_mean_above_1_of_a_score_that_is_no_measurement(metrics: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigurationError, match="a share above 1; did you mean 75%"):
        checked(rule, metrics)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("pass_rat>=0.8", "did you mean 'pass_rate'?"),
        ("score.exat.mean>0", "did you mean 'score.exact.mean'?"),
        ("pass_rate=>0.8", "did you mean 'pass_rate'?"),
        ("xyzzy>0", "steelyard report RUN -f json shows them all"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(rule: str, named: str, metrics: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="no metric of this run is named") as refused:
        checked(rule, metrics)
    assert named in str(refused.value)


def test_a_figure_that_is_not_known_breaks_its_rule(metrics: dict[str, Any]) -> None:
    found = checked("pass_rate!=1", {**metrics, "pass_rate": None})
    assert (found.ok, found.value, found.reason) == (False, None, "is not known: there was nothing to measure")


def test_a_rule_on_a_cost_that_nobody_knows_says_how_to_get_one(metrics: dict[str, Any]) -> None:
    help_ = "; give the suite `prices`, or pip install 'steelyard[prices]' for a list of public ones"
    found = checked("cost<2", metrics)
    assert (found.ok, found.value) == (False, None)
    assert found.reason == f"is not known: no call has a known cost{help_}"
    assert checked("cost_per_passed_case<2", metrics).reason == found.reason
    unpriced = {**metrics, "cost_unknown_because": "the suite has no `prices` for model 'm'"}
    assert checked("cost<2", unpriced).reason == f"is not known: the suite has no `prices` for model 'm'{help_}"
    none_passed = {**metrics, "cost": 1.0}
    assert checked("cost_per_passed_case<2", none_passed).reason == "is not known: there was nothing to measure"


def test_a_run_from_before_there_were_costs_has_none_that_is_known(metrics: dict[str, Any]) -> None:
    old = {key: value for key, value in metrics.items() if not key.startswith("cost")}
    assert "no call has a known cost" in checked("cost<2", old).reason


def test_a_cost_of_which_a_part_is_not_known_cannot_be_below_a_limit(metrics: dict[str, Any]) -> None:
    partly = {**metrics, "cost": 1.5, "cost_unknown": 3, "cost_unknown_judges": 2}
    found = checked("cost<2", partly)
    assert not found.ok
    assert found.reason == "is 1.5 or more: the cost of 3 answers and 2 calls of judges is not known"
    assert checked("cost>1", partly).ok
    assert not checked("cost>2", partly).ok
    assert checked("cost<2", {**partly, "cost_unknown": 0, "cost_unknown_judges": 0}).ok


def test_the_interval_of_a_score_is_that_over_cases_where_each_was_tried_several_times(metrics: dict[str, Any]) -> None:
    """Trials of one case are no new evidence about others: as records they would make it look more certain."""
    known = figures(typed(metrics))
    low, high = metrics["trials"]["scores"]["exact"]["mean_ci95"]
    assert (known["score.exact.ci_low"], known["score.exact.ci_high"]) == (low, high)
    assert (known["score.exact.mean.ci_low"], known["score.exact.mean.ci_high"]) == (low, high)
    assert (known["score.exact.pass_rate.ci_low"], known["score.exact.pass_rate.ci_high"]) == clopper_pearson(5, 9)


def test_texts_are_no_figures_even_where_there_are_none(metrics: dict[str, Any]) -> None:
    assert {"stopped", "model_id", "cost_unknown_because", "currency", "client.reason"}.isdisjoint(
        figures(typed(metrics))
    )


def test_an_advisory_judge_cannot_pass_a_gate(metrics: dict[str, Any]) -> None:
    score = {**metrics["scores"]["exact"], "advisory": True}
    advisory = {**metrics, "scores": {"exact": score}}
    for rule in ("score.exact.mean>0", "trials.score.exact.mean>0"):
        found = checked(rule, advisory)
        assert not found.ok
        assert "advisory" in found.reason
    assert checked("pass_rate>0", advisory).ok


@pytest.mark.parametrize("rule", ["time_to_last_token-p99<9s", "latency_p99<=9s", "p50_latency_s<9"])
def test_a_time_below_its_limit_is_below_it_although_the_client_was_late(rule: str, metrics: dict[str, Any]) -> None:
    """Lag only adds: what was measured late and is still fast enough was faster."""
    client = {**metrics["client"], "bottleneck": True, "reason": "its event loop was busy 97% of the time"}
    busy = {**metrics, "client": client}
    found = checked(rule, busy)
    assert found.ok
    assert found.reason.endswith(" although the client was late, which can only add to it")
    above = checked(rule.replace("9s", "0.001us").replace("<9", "<1e-9"), busy)
    assert not above.ok
    assert "says nothing of the target" in above.reason


@pytest.mark.parametrize(
    "rule", ["time_to_last_token-p99>0", "time_to_last_token-p99>=0s", "requests_per_minute>0", "p50_latency_s!=9"]
)
def test_times_of_a_client_that_was_the_bottleneck_break_their_rules(rule: str, metrics: dict[str, Any]) -> None:
    client = {**metrics["client"], "bottleneck": True, "reason": "its event loop was busy 97% of the time"}
    busy = {**metrics, "client": client}
    found = checked(rule, busy)
    assert not found.ok
    assert "the client was the bottleneck: its event loop was busy 97%" in found.reason
    assert checked(rule, busy, "client-bottleneck").ok
    assert checked("pass_rate>0", busy).ok


@pytest.mark.parametrize("percent", range(101))
def test_a_limit_in_percent_is_met_by_just_that_share(percent: int, metrics: dict[str, Any]) -> None:
    """70 × 0.01 is a little more than 0.7 in floating point: a pass rate of 70 % would not be at least 70 %."""
    rate = {**metrics, "pass_rate": percent / 100}
    assert checked(f"pass_rate>={percent}%", rate).ok
    assert checked(f"pass_rate=={percent}%", rate).ok
    assert parse_rule(f"ttft_p99<{percent}ms").limit == percent / 1000


def test_a_broken_rule_shows_enough_digits_to_tell_the_value_from_the_limit(metrics: dict[str, Any]) -> None:
    assert checked("pass_rate>=0.8", {**metrics, "pass_rate": 0.79999}).reason == "is 0.79999"
    assert checked("pass_rate>=80%", {**metrics, "pass_rate": 0.79999}).reason == "is 79.999%"
    assert checked("pass_rate!=0.8", {**metrics, "pass_rate": 0.8}).reason == "is 0.8"


def test_a_broken_rule_says_the_value_in_its_own_unit(metrics: dict[str, Any]) -> None:
    assert checked("pass_rate>=80%", metrics).reason.startswith("is 55.5")
    assert checked("n<5", metrics).reason == "is 20"
    slow = {**metrics, "stats": {**metrics["stats"], "time_to_first_token-p99": 0.6123}}
    assert checked("time_to_first_token-p99<500ms", slow, "client-bottleneck").reason == "is 612.3 ms"


@given(st.text(min_size=1, max_size=20), st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), st.integers(0, 10**6))
def test_a_score_may_have_any_name(name: str, operator: str, limit: int) -> None:
    rule = parse_rule(f"score.{name}.n{operator}{limit}")
    assert (rule.name, rule.operator, rule.limit) == (f"score.{name}.n", operator, limit)


def test_a_percentile_among_timeouts_is_not_known_to_be_below_a_limit() -> None:
    def slow(case: EvalCase) -> str:
        raise TimeoutError("no answer")

    suite = EvalSet("one", [EvalCase(id=str(number), prompt="?") for number in range(3)])
    metrics = Runner(slow, suite, progress="off", retries=0).run_sync().metrics
    found = checked("latency_p99<100s", metrics)
    assert not found.ok
    assert "is at least" in found.reason
    assert "it lies among calls that timed out" in found.reason
