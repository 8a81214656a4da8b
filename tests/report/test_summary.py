"""The result of a run as text and JSON, and the list of runs."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tqdm.utils import disp_len

from steelyard import EvalCase, EvalSet, InvocationResponse, Metrics, Runner
from steelyard.journal.lock import RunLock
from steelyard.records import Score
from steelyard.report.headline import notices
from steelyard.report.summary import summary
from steelyard.report.summary import trial_lines as lines
from steelyard.run.metrics import Errors, RunCounts, compose
from steelyard.stats.errors import ErrorName
from steelyard.stats.metrics import LoadMetrics
from steelyard.stats.running import RunningStats
from steelyard.stats.scores import ScoreStats
from steelyard.stats.trials import TrialStats
from steelyard.targets import CallableTarget
from tests.support.cli import Workshop, run_cli

SUITE = EvalSet(id="s", cases=[EvalCase(id=f"c{number}", prompt="p", expected="x") for number in range(4)])


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def metrics_of(target: Any, scorers: Any = ("exact",), **options: Any) -> Metrics:
    return Runner(target, SUITE, scorers, progress="off", **options).run_sync().typed_metrics


def composed(*, ok: int, error: int = 0, score: float = 1.0, stopped: str | None = None, left: int = 0) -> Metrics:
    """The metrics of a run with so many records, each the same."""
    stats, scores = RunningStats(), ScoreStats()
    response = InvocationResponse(
        time_to_first_token=12345.6,
        time_to_last_token=123456.7,
        time_per_output_token=98765.4,
        num_tokens_input=10_000_000,
        num_tokens_output=10_000_000,
    )
    for _ in range(ok):
        stats.update(response)
        scores.update([Score("exact", score, score == 1.0)], failed=False)
    stats.update_failed(error)
    for _ in range(error):
        scores.update([], failed=True)
    stats.active_seconds = 1e6
    errors = Errors()
    errors.counts.update({ErrorName(f"Error{number}", f"Error{number}"): 1 for number in range(error)})
    return compose(
        about={"suite": "suite", "target": {}, "model_id": "model", "seed": 0},
        counts=RunCounts(
            planned=ok + error + left, ok=ok, error=error, cancelled=left // 2, not_started=left - left // 2
        ),
        stats=stats,
        scores=scores,
        errors=errors,
        left_out=1_000_000,
        stopped=stopped,
    )


@pytest.mark.parametrize(
    "metrics",
    [
        pytest.param(composed(ok=3), id="large figures"),
        pytest.param(composed(ok=1000, error=1000), id="many records"),
        pytest.param(composed(ok=0, error=3), id="only errors"),
        pytest.param(
            composed(ok=3, left=2_000_000, stopped="error rate 52.0% is above stop_error_rate 50.0%"), id="stopped"
        ),
    ],
)
def test_no_line_is_wider_than_80_columns(metrics: Metrics) -> None:
    metrics.counts.error = 12_345_678
    large = {"n": 98_765_432, "scored": 86_419_753, "passed": 86_419_753, "unscored": 11_111_111}
    text = summary(replace(metrics, **large, scoring_errors=11_111_111), "runs/x")
    assert max(map(len, text.splitlines())) <= 80


def test_a_complete_run_says_its_rates_and_where_it_lies() -> None:
    text = summary(metrics_of(lambda case: "x" if case.id < "c3" else "y"), "runs/x")
    assert "s: 4 of 4 done, complete" in text
    assert "75.0%  3 of 4" in text
    assert text.endswith("results in runs/x")


def test_a_run_with_errors_names_their_kinds_most_frequent_first() -> None:
    def answer(case: EvalCase) -> str:
        raise ValueError("no") if case.id < "c3" else KeyError("no")

    text = summary(metrics_of(answer, scorers=()))
    assert "100.0%  4 of 4" in text
    assert text.index("3 × ValueError") < text.index("1 × KeyError")
    assert "passed" not in text


def test_an_error_is_told_to_its_end_within_the_width_of_a_terminal() -> None:
    """What went wrong stands at the end of a message: `cannot connect to ...: Failed to connect ...: refused`."""

    def answer(case: EvalCase) -> str:
        raise ConnectionError(
            "cannot connect to http://127.0.0.1:8000: Failed to connect to 127.0.0.1 port 8000: refused"
        )

    text = summary(metrics_of(answer, scorers=(), retries=0))
    assert "Failed to connect to 127.0.0.1 port 8000: refused" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_many_kinds_of_errors_are_cut_short() -> None:
    text = summary(composed(ok=1, error=9))
    assert "and 4 more kinds" in text


def test_scoring_errors_are_said_apart_from_errors_and_wrong_answers() -> None:
    def broken(case: EvalCase, response: InvocationResponse) -> bool:
        if case.id == "c1":
            raise RuntimeError("cannot")
        return True

    text = summary(metrics_of(lambda case: "x", scorers=(broken,)))
    assert "100.0%  3 of 3" in text
    assert "scoring errors" in text
    assert "--retry-errors" in text
    assert re.search(r"1 × broken could not score\n +RuntimeError: cannot$", text, re.M)


def test_answers_from_the_cache_are_counted(tmp_path: Path) -> None:
    target = CallableTarget(lambda case: "x", model_id="m")
    assert "cached" not in summary(metrics_of(target, cache=tmp_path / "cache"))
    metrics = metrics_of(target, cache=tmp_path / "cache")
    (row,) = [line.split() for line in summary(metrics).splitlines() if line.startswith("  cached ")]
    assert " ".join(row) == "cached 4 of 4 not asked; left out of the times"
    assert [notice["title"] for notice in notices(metrics)] == ["From the cache"]


def test_planned_sends_that_were_late_are_told_with_what_held_them_up() -> None:
    async def slow(case: EvalCase) -> str:
        await asyncio.sleep(0.05)
        return "x"

    metrics = metrics_of(slow, arrivals="constant:1000/s", requests=8, parallelism=2)
    text = summary(metrics)
    assert "of 8 planned sends" in text
    assert "all 2 places were taken at times; -j says how many there are" in text
    assert "places" not in summary(replace(metrics, parallelism=100))


def test_a_run_without_scores_says_nothing_of_passing() -> None:
    text = summary(metrics_of(lambda case: "x", scorers=()))
    assert "passed" not in text
    assert "unscored" in text


def test_a_run_without_tokens_does_not_speak_of_tokens() -> None:
    text = summary(metrics_of(lambda case: "x"))
    assert "output tokens" not in text
    assert "requests/min" in text


def test_a_run_whose_calls_all_failed_gives_no_rate_of_requests() -> None:
    assert "  no answers over 1,000,000s" in summary(composed(ok=0, error=3))


def test_the_parallelism_of_an_open_loop_is_a_limit() -> None:
    metrics = composed(ok=3)
    metrics.parallelism = 512
    assert summary(metrics).splitlines()[-1].endswith(", 512 at a time")
    metrics.load = LoadMetrics(requests=3, duration=None, arrivals="20/s", warmup=0)
    assert summary(metrics).splitlines()[-1].endswith(", at most 512 at a time")


def test_a_long_reason_is_broken_between_words() -> None:
    reason = "nothing answers there: the first 106 calls, retries included, all failed, the last with CannotConnect: no"
    first, second, *_ = summary(composed(ok=3, left=5, stopped=reason)).splitlines()[1:]
    assert f"{first.strip()} {second.strip()}" == f"stopped: {reason}"


def test_a_stopped_run_says_why_and_what_is_left() -> None:
    text = summary(composed(ok=3, left=5, stopped="SIGINT"))
    assert "3 of 8 done, not complete" in text
    assert "SIGINT" in text
    assert "2 cancelled, 3 not started" in text


def test_a_run_stopped_before_its_first_answer_gives_no_rates() -> None:
    text = summary(composed(ok=0, left=5, stopped="SIGINT"))
    assert "0 of 5 done" in text
    assert "%" not in text
    assert "requests/min" not in text


def test_names_from_elsewhere_cannot_steer_the_terminal() -> None:
    metrics = composed(ok=1, error=1, stopped="\x1b[2Jgone", left=1)
    hostile = {"suite": "\x1b[31msuite", "model_id": "model\r\x9b", "errors": {"\x1b]0;title\x07": 1}}
    scores = {"\x1b[5mscore": next(iter(metrics.scores.values()))}
    text = summary(replace(metrics, **hostile, scores=scores), "runs/\x1b[0m")
    assert not set(text) & {"\x1b", "\r", "\x9b", "\x07"}


# report


def test_report_of_an_unfinished_run_is_read_as_far_as_it_has_come(shop: Workshop) -> None:
    shop.failing("c1")
    shop.by_python()
    shop.cut_back(lines=3)
    ended = run_cli(shop.folder, "report", "RUN")
    assert ended.code == 0
    assert "3 of 6 done, not complete" in ended.out
    assert "1 × ValueError" in ended.out
    metrics = json.loads(run_cli(shop.folder, "report", "RUN", "-f", "json").out)
    assert metrics["counts"] == {"planned": 6, "ok": 2, "error": 1, "cancelled": 0, "not_started": 3}
    assert metrics["complete"] is False


def test_report_of_a_complete_run_as_json_is_its_metrics(shop: Workshop) -> None:
    shop.by_python()
    assert json.loads(run_cli(shop.folder, "report", "RUN", "--format", "json").out) == shop.metrics()


def test_report_prints_what_run_printed(shop: Workshop) -> None:
    ended = run_cli(shop.folder, "run", "suite.yaml", "--out", "RUN")
    assert run_cli(shop.folder, "report", "RUN").out == ended.out


def test_report_changes_nothing_in_the_run(shop: Workshop) -> None:
    shop.by_python()
    shop.cut_back(lines=3)
    with open(shop.run / "outputs.jsonl", "ab") as outputs:
        outputs.write(b'{"v":1,"torn')
    before = {place.name: place.read_bytes() for place in shop.run.iterdir() if place.is_file()}
    assert "3 of 6 done" in run_cli(shop.folder, "report", "RUN").out
    assert {place.name: place.read_bytes() for place in shop.run.iterdir() if place.is_file()} == before


def test_report_of_a_damaged_run_names_the_line(shop: Workshop) -> None:
    shop.by_python()
    shop.cut_back(lines=3)
    outputs = shop.run / "outputs.jsonl"
    outputs.write_bytes(b"garbage\n" + outputs.read_bytes())
    ended = run_cli(shop.folder, "report", "RUN")
    assert ended.code == 2
    assert "line 1 (byte 0)" in ended.err


# ls


def test_ls_lists_every_kind_of_run_and_passes_over_the_rest(shop: Workshop) -> None:
    """Complete, unfinished, running, damaged and unreadable runs are listed; foreign folders and files are not."""
    folder = shop.folder / "runs"
    folder.mkdir()
    shop.failing("c1")
    for name in ("complete", "interrupted", "running", "damaged", "unreadable"):
        shop.by_python()
        os.rename(shop.run, folder / name)
    for name in ("interrupted", "running", "damaged"):
        shop.run = folder / name
        shop.cut_back(lines=3)
        (folder / name / "outputs.idx").unlink()
    outputs = folder / "damaged" / "outputs.jsonl"
    outputs.write_bytes(b"garbage\n" + outputs.read_bytes())
    (folder / "unreadable" / "run.json").write_text("{")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "data.json").write_text("{}")
    (folder / "notes.txt").write_text("")
    (folder / "broken-link").symlink_to(folder / "nowhere")
    with RunLock(folder / "running"):
        table = run_cli(shop.folder, "ls")
        listed = json.loads(run_cli(shop.folder, "ls", "--json").out)
    states = {Path(run["run"]).name: run["state"] for run in listed}
    same = {name: name for name in ("complete", "interrupted", "running", "damaged")}
    assert states == {**same, "unreadable": "damaged"}
    by_name = {Path(run["run"]).name: run for run in listed}
    assert "line 1" in by_name["damaged"]["problem"]
    assert "run.json" in by_name["unreadable"]["problem"]
    assert by_name["interrupted"]["problem"] is None
    assert (by_name["complete"]["done"], by_name["complete"]["planned"], by_name["complete"]["errors"]) == (6, 6, 1)
    assert by_name["complete"]["pass_rate"] == 1.0
    cut = by_name["interrupted"]
    assert (cut["done"], cut["planned"], cut["errors"]) == (3, 6, 1)
    assert by_name["interrupted"]["pass_rate"] == 1.0
    header, *rows = table.out.splitlines()
    assert header.split() == ["run", "state", "suite", "model", "done", "errors", "pass", "rate", "created"]
    assert len(rows) == 5
    assert table.code == 0


def test_ls_shows_the_newest_first(shop: Workshop) -> None:
    for name in ("b", "a", "c"):
        shop.by_python()
        os.rename(shop.run, shop.folder / name)
    listed = json.loads(run_cli(shop.folder, "ls", ".", "--json").out)
    assert [Path(run["run"]).name for run in listed] == ["c", "a", "b"]


def test_ls_lists_sweeps_too(shop: Workshop) -> None:
    assert run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "-n", "1", "-o", "runs/sweep", "-q").code == 0
    _, row, level = run_cli(shop.folder, "ls").out.splitlines()
    assert level.split()[:2] == ["level-1", "complete"]
    assert row.split()[:6] == ["runs/sweep", "complete", "shouting", "–", "1", "level"]
    (listed,) = json.loads(run_cli(shop.folder, "ls", "--json").out)
    assert (listed["run"], listed["levels"]) == ("runs/sweep", 1)


def test_ls_tells_a_sweep_that_goes_on_from_one_that_was_left(tmp_path: Path) -> None:
    place = tmp_path / "runs" / "sweep"
    place.mkdir(parents=True)
    (place / "sweep.partial.json").write_text(json.dumps({"complete": False, "suite": "s", "levels": []}))
    with RunLock(place):
        running = run_cli(tmp_path, "ls").out.splitlines()[1]
    assert running.split()[:6] == ["runs/sweep", "running", "s", "–", "0", "levels"]
    assert "interrupted" in run_cli(tmp_path, "ls").out


def test_ls_before_the_first_run_says_so_and_is_no_error(tmp_path: Path) -> None:
    ended = run_cli(tmp_path, "ls")
    assert (ended.code, ended.out) == (0, "")
    assert "no runs" in ended.err
    assert json.loads(run_cli(tmp_path, "ls", "--json").out) == []


# The lines on repeated trials ----------------------------------------------------------------------------------------


def shown(rows, *, ids=None) -> str:
    """The lines for verdicts given as a row for each case."""
    stats = TrialStats(len(rows), len(rows[0]))
    for position, row in enumerate(rows):
        for trial, passed in enumerate(row):
            stats.update(position, trial, passed, [])
    return "\n".join(lines(stats.to_metrics(ids)))


def shown_scores(scores, *, trials) -> str:
    """The lines for the scores of one case, one for each trial."""
    stats = TrialStats(1, trials)
    for trial, score in enumerate(scores):
        stats.update(0, trial, None, [score])
    return "\n".join(lines(stats.to_metrics()))


def test_the_estimates_are_columns_by_k_and_flaky_cases_follow():
    rows = [[True, True, True], [False, False, False], [True, False, True], [False, True, False]]
    assert shown(rows, ids=lambda position: f"case-{position}").splitlines()[1:] == [
        "  k               1       2       3",
        "  pass@k      50.0%   66.7%   75.0%",
        "  pass^k      50.0%   33.3%   25.0%",
        "            pass@3 95 % CI 19.4% – 99.4%; pass^3 95 % CI 0.6% – 80.6%",
        "  flaky     2 of 4 cases passed in some trials, not in others:",
        "    2 of 3  case-2",
        "    1 of 3  case-3",
    ]


def test_the_pass_rate_stands_with_its_interval_and_the_spread():
    text = shown([[True, True], [True, False]])
    assert "2 trials of 2 cases, spread 0.25 between trials" in text
    assert "CI" not in text.splitlines()[0]  # it stands above, with the pass rate


def test_five_flaky_cases_are_named_and_the_rest_counted():
    text = shown([[True, False]] * 12)
    assert text.count("1 of 2  ") == 5
    assert text.endswith("and 7 more")


def test_it_says_when_no_case_is_flaky():
    assert "flaky     none" in shown([[True, True], [False, False]])


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        (2, "1 2"),
        (8, "1 2 3 4 5 6 7 8"),
        (9, "1 2 4 8 9"),
        (100, "1 2 4 8 16 32 64 100"),
        (1000, "1 2 4 8 16 32 64 1000"),
    ],
)
def test_many_trials_are_shown_at_doubling_numbers_with_the_last(trials, expected):
    rows = [line for line in shown([[True] * trials]).splitlines() if line.startswith("  k ")]
    assert [row.split() for row in rows] == [["k", *expected.split()]]


def test_one_case_is_not_several():
    assert "3 trials of 1 case, spread" in shown([[True, True, False]])


def test_a_k_that_few_cases_reached_is_not_shown():
    text = shown([[True, None], [False, None]])
    assert "  pass@k      50.0%\n" in text
    assert "of the 2 cases with 1 verdict or more" in text
    assert "2 trials of 2 cases\n" in text


def test_a_deterministic_scorer_shows_its_spread_alone():
    text = shown_scores([Score("exact", 0.0), Score("exact", 1.0)], trials=2)
    assert text == "  score exact: spread 0.50 between trials"


def test_a_judge_is_followed_by_whose_variance_dominates():
    scores = [Score("judge", 0.05, samples=[0.0, 0.1]), Score("judge", 0.95, samples=[0.9, 1.0])]
    stats = TrialStats(5, 2)
    for position in range(5):
        for trial, score in enumerate(scores):
            stats.update(position, trial, None, [score])
    assert lines(stats.to_metrics()) == [
        "  score judge: spread 0.45 between trials",
        "    the agent varies more than the judge: std_dev 0.63 against 0.071: more",
        "    trials help, more judge runs do not",
    ]
    assert "cannot tell whether the agent" in shown_scores(scores, trials=2)


def test_with_a_single_trial_only_the_judges_spread_is_told():
    text = shown_scores([Score("judge", 0.5, samples=[0.0, 1.0])], trials=1)
    assert text.startswith("  score judge\n    the judge varies between runs: std_dev 0.71")


@pytest.mark.parametrize("score", [Score("exact", 1.0, True), Score("judge", 1.0, True, by="model")])
def test_a_single_trial_without_repeats_has_nothing_to_tell(score):
    stats = TrialStats(1, 1)
    stats.update(0, 0, True, [score])
    assert lines(stats.to_metrics()) == []


def test_a_run_without_any_verdict_has_nothing_to_tell():
    assert lines(TrialStats(3, 4).to_metrics()) == []


@pytest.mark.parametrize("name", ["x" * 300, "判" * 300, "e\u0301" * 100], ids=["long", "wide", "combining"])
@pytest.mark.parametrize("steadiness", [0.0, 0.3, 1.0])
def test_no_line_on_trials_is_wider_than_80_columns(name, steadiness):
    rng = random.Random(3)
    stats = TrialStats(20, 8)
    for position in range(20):
        for trial in range(8):
            agent = rng.random()
            samples = [steadiness * agent + (1 - steadiness) * rng.random() for _ in range(2)]
            score = Score(name, sum(samples) / 2, samples=samples)
            stats.update(position, trial, rng.random() < 0.5, [score])
    metrics = stats.to_metrics(lambda position: name + str(position))
    metrics.cases = metrics.flaky = 98_765_432
    found = lines(metrics)
    assert len(found) > 12
    assert max(map(disp_len, found)) <= 80


def test_names_of_trials_cannot_steer_the_terminal():
    text = shown([[True, False]], ids=lambda position: "a\x1b[31m\nb")
    text += shown_scores([Score("j\x1b[2J\n", 0.0), Score("j\x1b[2J\n", 1.0)], trials=2)
    assert "\x1b" not in text
    assert "a�[31m�b" in text
    assert "score j�[2J�: spread" in text
