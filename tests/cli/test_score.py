"""`steelyard score RUN`: stored answers weighed again without a call; and judges at a gate."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cli import AGENT, Ended, Workshop, run_cli

JUDGE = """

def noted(name, word):
    with open(HERE / name, "a") as file:
        file.write(word + "\\n")


def assess(case, context):
    noted("judged.txt", f"{context.case_id}/{context.trial}")
    if listed("judge_down.txt"):
        raise ValueError("out of order")
    return '{"score": 1.0, "passed": true, "reason": "fine"}'


def moody(case, context):
    noted("calls.txt", f"{case.id}/{context.trial}")
    return case.prompt.upper() if context.trial else "wrong"
"""
JUDGED = {"judge": {"model": "assessor", "prompt": "helpfulness_v1", "target": {"python": "agent.py:assess"}}}


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    shop = Workshop(tmp_path)
    shop.agent(AGENT + JUDGE)
    return shop


def score(shop: Workshop, *words: str, run: str = "RUN", out: str = "AGAIN") -> Ended:
    return run_cli(shop.folder, "score", run, "--out", out, "--no-progress", *words)


def metrics_in(shop: Workshop, name: str = "AGAIN") -> dict[str, Any]:
    return dict(json.loads((shop.folder / name / "metrics.json").read_bytes()))


def lines_in(shop: Workshop, name: str = "AGAIN") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (shop.folder / name / "outputs.jsonl").read_bytes().splitlines()]
    return sorted(lines, key=lambda line: (line["index"], line["trial"]))


def other_suite(shop: Workshop, **changes: Any) -> None:
    """Write other.yaml: the suite with some of its keys changed."""
    document = yaml.safe_load((shop.folder / "suite.yaml").read_text())
    (shop.folder / "other.yaml").write_text(yaml.safe_dump({**document, **changes}))


def test_a_run_is_scored_again_without_a_call_and_says_what_it_came_from(shop: Workshop) -> None:
    shop.by_command()
    assert len(shop.asked()) == 6
    before = {path.name: path.read_bytes() for path in shop.run.iterdir() if path.is_file()}
    ended = score(shop)
    assert ended.code == 0
    assert shop.asked() == []
    assert {path.name: path.read_bytes() for path in shop.run.iterdir() if path.is_file()} == before
    assert json.loads((shop.folder / "AGAIN" / "run.json").read_bytes())["scored_from"] == "RUN"
    assert metrics_in(shop)["scored_from"] == "RUN"
    assert metrics_in(shop)["pass_rate"] == 1.0
    assert "nothing was asked" in ended.out
    first, again = shop.lines(), lines_in(shop)
    kept = ("id", "response_text", "time_to_last_token", "request_time", "case_fp")
    assert [[line[key] for key in kept] for line in again] == [
        [line[key] for key in kept] for line in sorted(first, key=lambda line: line["index"])
    ]


def test_another_suite_brings_other_scorers_and_expectations(shop: Workshop) -> None:
    shop.by_command()
    shop.asked()
    cases = [{"id": f"c{n}", "prompt": f"c{n}", "expected": "C1"} for n in range(6)]
    other_suite(shop, cases=cases, scorers=["contains", {"python": "agent.py:shout"}])
    assert score(shop, "--suite", "other.yaml").code == 0
    assert shop.asked() == []
    metrics = metrics_in(shop)
    assert set(metrics["scores"]) == {"contains", "shout"}
    assert metrics["passed"] == 1
    assert metrics["scores"]["shout"]["passed"] == 6


def test_without_out_the_new_directory_stands_beside_the_run(shop: Workshop) -> None:
    shop.by_command()
    assert run_cli(shop.folder, "score", "RUN", "--no-progress").code == 0
    made = [path for path in shop.folder.glob("RUN-scored-*") if path.is_dir()]
    assert len(made) == 1
    assert (made[0] / "metrics.json").exists()


def test_carried_over_errors_count_against_the_error_rate(shop: Workshop) -> None:
    shop.failing("c1 c4")
    shop.by_command()
    shop.failing("")
    ended = score(shop)
    assert ended.code == 4
    assert "error rate 33.3% is above 0.0%" in ended.err
    assert score(shop, "--force", "--max-error-rate", "0.4").code == 0


def test_the_suite_s_gate_holds_for_a_scored_run_and_flags_go_before_it(shop: Workshop) -> None:
    shop.by_command()
    cases = [{"id": f"c{n}", "prompt": f"c{n}", "expected": "C1"} for n in range(6)]
    other_suite(shop, cases=cases, gate={"min_pass_rate": 0.5})
    ended = score(shop, "--suite", "other.yaml")
    assert ended.code == 1
    assert "pass rate 16.7%, below 50.0%" in ended.err
    assert score(shop, "--suite", "other.yaml", "--force", "--min-pass-rate", "0.1").code == 0


def test_the_command_that_resumes_can_be_typed_as_it_is(shop: Workshop) -> None:
    """The suite is edited while it is read: the run stops half way, and says how it goes on."""
    shop.by_command()
    odd = shop.folder / "odd name; $x.yaml"
    other_suite(shop, scorers=[{"python": "agent.py:shout"}, {"python": "agent.py:edits"}], cases="more.jsonl")
    (shop.folder / "other.yaml").rename(odd)
    row = '{{"id": "c{}", "prompt": "c{}", "expected": "C{}"}}\n'
    rows = [row.format(n, n, n) for n in range(6)]
    (shop.folder / "more.jsonl").write_text("".join(rows[:5]) + "\n" * 200_000 + rows[5])
    shop.agent(
        AGENT
        + """

def edits(case, response):
    cases = HERE / "more.jsonl"
    cases.write_text(cases.read_text().replace('"prompt": "c5"', '"prompt": "another"'))
    return True
"""
    )
    ended = score(shop, "--suite", odd.name, "-j", "1", out="half way")
    assert ended.code == 4
    (said,) = [line for line in ended.err.splitlines() if "resume with: " in line]
    words = shlex.split(said.partition("resume with: ")[2])
    assert words[1:] == [
        "score",
        "RUN",
        "--out",
        "half way",
        "--suite",
        odd.name,
        "--parallelism",
        "1",
        "--no-progress",
    ]


def test_errors_are_carried_over_as_errors(shop: Workshop) -> None:
    shop.failing("c1 c4")
    shop.by_command()
    shop.asked()
    shop.failing("")
    score(shop)
    assert shop.asked() == []
    lines = lines_in(shop)
    assert [line["id"] for line in lines if line["status"] == "error"] == ["c1", "c4"]
    assert {line["error"] for line in lines if line["status"] == "error"} == {
        "ValueError: told to fail on c1",
        "ValueError: told to fail on c4",
    }
    assert metrics_in(shop)["errors"] == {"ValueError": 2}
    assert metrics_in(shop)["pass_rate"] == 1.0


def test_cases_that_the_run_does_not_have_are_errors(shop: Workshop) -> None:
    shop.suite("c0 c1 c2 c3")
    shop.by_command()
    shop.asked()
    shop.suite()
    score(shop)
    assert shop.asked() == []
    missing = [line for line in lines_in(shop) if line["status"] == "error"]
    assert [line["id"] for line in missing] == ["c4", "c5"]
    assert all("RUN has no answer to case" in line["error"] for line in missing)
    assert metrics_in(shop)["n"] == 6


def test_of_a_run_of_the_first_cases_only_those_are_scored(shop: Workshop) -> None:
    shop.by_command(limit=4)
    assert score(shop).code == 0
    assert [line["id"] for line in lines_in(shop)] == ["c0", "c1", "c2", "c3"]


def test_trials_are_kept(shop: Workshop) -> None:
    shop.suite(target={"python": "agent.py:moody"}, run={"trials": 3})
    shop.by_command()
    assert len(shop.asked()) == 18
    other_suite(shop, run={})
    assert score(shop, "--suite", "other.yaml").code == 0
    assert shop.asked() == []
    trials = metrics_in(shop)["trials"]
    assert (trials["trials"], trials["flaky"], trials["pass_rate"]) == (3, 6, pytest.approx(2 / 3))
    said = [(line["id"], line["trial"], line["scores"][0]["value"]) for line in lines_in(shop)]
    assert said == [(f"c{case}", trial, float(trial > 0)) for case in range(6) for trial in range(3)]


def test_the_order_of_the_cases_does_not_matter(shop: Workshop) -> None:
    shop.suite(target={"python": "agent.py:moody"}, run={"trials": 2})
    shop.by_command()
    shop.asked()
    cases = yaml.safe_load((shop.folder / "suite.yaml").read_text())["cases"]
    other_suite(shop, cases=[*cases[3:], {"id": "new", "prompt": "new", "expected": "NEW"}, *cases[:3][::-1]])
    score(shop, "--suite", "other.yaml")
    answers = {(line["id"], line["trial"]): line["response_text"] for line in lines_in(shop)}
    assert answers == {
        **{(f"c{case}", trial): f"C{case}" if trial else "wrong" for case in range(6) for trial in range(2)},
        ("new", 0): None,
        ("new", 1): None,
    }


def test_a_judge_is_asked_about_stored_answers_as_often_as_told(shop: Workshop) -> None:
    shop.by_command()
    shop.asked()
    other_suite(shop, scorers=["exact", JUDGED])
    assert score(shop, "--suite", "other.yaml", "--num-runs", "2").code == 0
    assert shop.asked() == []
    asked = shop._taken("judged.txt")
    assert sorted(asked) == sorted(f"c{case}#0/{run}" for case in range(6) for run in range(2))
    assert [line["scores"][1]["samples"] for line in lines_in(shop)] == [[1.0, 1.0]] * 6


def test_a_finished_scoring_is_refused_and_force_starts_over(shop: Workshop) -> None:
    shop.by_command()
    assert score(shop).code == 0
    assert score(shop).code == 2
    assert score(shop, "--force").code == 0
    assert len(list((shop.folder / "AGAIN" / "previous").iterdir())) == 1


@pytest.mark.parametrize("num_runs", ["0", "-1"])
def test_num_runs_below_one_is_refused(shop: Workshop, num_runs: str) -> None:
    shop.by_command()
    ended = score(shop, "--num-runs", num_runs)
    assert ended.code == 2
    assert f"--num-runs must be >= 1, got {num_runs}" in ended.err
    assert not (shop.folder / "AGAIN").exists()


def test_a_place_without_answers_is_refused(shop: Workshop) -> None:
    ended = score(shop, run="nowhere")
    assert ended.code == 2
    assert "nowhere" in ended.err
    assert not (shop.folder / "AGAIN").exists()


def test_the_run_itself_cannot_be_the_new_directory(shop: Workshop) -> None:
    """Not even with --force: the answers would be moved away from under the scoring."""
    shop.by_command()
    before = (shop.run / "outputs.jsonl").read_bytes()
    for words in ((), ("--force",)):
        assert score(shop, *words, out="RUN").code == 2
        assert (shop.run / "outputs.jsonl").read_bytes() == before


# Judges at a gate --------------------------------------------------------------------------------------------------


def judged(**more: Any) -> dict[str, Any]:
    return {"judge": {**JUDGED["judge"], **more}}


def test_a_judge_that_nobody_calibrated_passes_a_gate_that_allows_it(shop: Workshop) -> None:
    shop.suite(scorers=[judged()])
    assert shop.by_command(min_pass_rate=0.9).code == 1
    shop.suite(scorers=[judged()], gate={"allow": ["uncalibrated-judge"]})
    assert shop.by_command(min_pass_rate=0.9, force=True).code == 0
    shop.suite(scorers=[judged()])
    assert shop.by_command(min_pass_rate=0.9, force=True, allow="uncalibrated-judge").code == 0


def test_an_advisory_judge_cannot_pass_a_gate_and_is_shown_as_advisory(shop: Workshop) -> None:
    shop.suite(scorers=[judged(calibration="absent.json")])
    ended = run_cli(shop.folder, "run", "suite.yaml", "--out", "RUN", "--no-progress", "--min-pass-rate", "0.1")
    assert ended.code == 1
    assert "advisory" in ended.out
    assert "advisory" in ended.err
    assert "nothing was scored" in ended.err
    metrics = shop.metrics()
    assert metrics["scores"]["judge"]["advisory"] is True
    assert metrics["scores"]["judge"]["mean"] == 1.0
    assert metrics["pass_rate"] is None


def test_an_advisory_escalation_does_not_lift_the_pass_rate(shop: Workshop) -> None:
    shop.suite(scorers=["exact", judged(when="failed", calibration="absent.json")], target={"python": "agent.py:moody"})
    outcome = shop.by_command(min_pass_rate=0.5)
    assert outcome.code == 1
    assert outcome.done["pass_rate"] == 0.0
    assert outcome.done["scores"]["judge"]["escalated"] == 6
    assert len(shop._taken("judged.txt")) == 6


def test_an_escalated_judge_decides_where_it_need_not_be_calibrated(shop: Workshop) -> None:
    allow = {"allow": ["uncalibrated-judge"]}
    shop.suite(scorers=["exact", judged(when="failed")], target={"python": "agent.py:moody"}, gate=allow)
    ended = run_cli(shop.folder, "run", "suite.yaml", "--out", "RUN", "--no-progress", "--min-pass-rate", "1")
    assert ended.code == 0
    assert "6 answers that the scorers before it had failed" in ended.out


def test_a_judge_that_is_down_is_more_errors_than_allowed_and_a_retry_mends_it(shop: Workshop) -> None:
    shop.suite(scorers=[judged()])
    (shop.folder / "judge_down.txt").write_text("down")
    outcome = shop.by_command(retries=0)
    assert outcome.code == 4
    assert outcome.done["scoring_errors"] == 6
    (shop.folder / "judge_down.txt").unlink()
    shop.asked()
    outcome = shop.by_command(retry_errors=True)
    assert outcome.code == 0
    assert shop.asked() == []
    assert outcome.done["pass_rate"] == 1.0
