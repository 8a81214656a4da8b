"""Runs held against a baseline: what is paired, what is left out, and what is said of it."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from steelyard.errors import ConfigurationError, RunDamaged
from steelyard.records import Score
from steelyard.report.compare.compare import compare_runs as compare
from steelyard.report.compare.comparison import Against, Change, Comparison
from tests.support.cli import run_cli
from tests.support.compare import finished, journal, outcome
from tests.support.journal import write_journal


def against(tmp_path: Path, baseline: str, run: str, **more: Any) -> Against:
    journal(tmp_path / "a", baseline)
    journal(tmp_path / "b", run)
    return compare([tmp_path / "a", tmp_path / "b"], **more).against[0]


def changed(change: Change | None) -> Change:
    assert change is not None
    return change


def test_a_run_that_is_better_on_14_cases_and_worse_on_3_is_better(tmp_path: Path) -> None:
    one = against(tmp_path, "f" * 14 + "p" * 43, "p" * 14 + "f" * 3 + "p" * 40)
    assert one.outcome == "better"
    assert one.verdict == (
        "b is better: passed +19.3 points, 95 % CI +3.8 – +34.1, p = 0.013; better on 14 cases, worse on 3"
    )
    assert changed(one.pass_rate).difference == pytest.approx(11 / 57)
    assert [case.id for case in one.worse] == ["c14", "c15", "c16"]
    assert len(one.better) == 14


def test_a_run_that_is_worse_says_so_first(tmp_path: Path) -> None:
    one = against(tmp_path, "p" * 40, "f" * 20 + "p" * 20)
    assert one.outcome == "worse"
    assert one.verdict.startswith(
        "b is worse: passed −50.0 points, 95 % CI −66.2 – −29.6, p < 0.001; worse on 20 cases"
    )
    low, high = changed(one.pass_rate).ci95
    assert low < -0.5 < high < 0


def test_too_little_to_tell_says_what_could_be_seen(tmp_path: Path) -> None:
    one = against(tmp_path, "f" * 3 + "p" * 57, "p" * 60)
    assert one.outcome == "no difference"
    assert one.verdict == (
        "no difference that 60 cases could show: b passed +5.0 points, 95 % CI −2.6 – +13.9, p = 0.25;"
        " better on 3 cases, worse on 0; the smallest that they show four times in five is about 13 points"
    )
    few = against(tmp_path, "fp", "pp")
    assert few.verdict.startswith("no difference: b passed +50.0 points, 95 % CI −77.6 – +98.7, p = 1;")
    assert few.verdict.endswith("2 cases are too few to show any")


def test_the_same_answers_are_no_difference_and_not_certain(tmp_path: Path) -> None:
    one = against(tmp_path, "p" * 50, "p" * 50)
    assert one.outcome == "no difference"
    low, high = changed(one.pass_rate).ci95
    assert low < 0 < high


def test_only_cases_with_a_verdict_in_both_count_for_the_pass_rate(tmp_path: Path) -> None:
    one = against(tmp_path, "pppuef", "pfeupp")
    rate = changed(one.pass_rate)
    assert (rate.cases, rate.baseline, rate.run) == (3, pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert one.paired == 6
    assert one.error_rate.baseline == one.error_rate.run == pytest.approx(1 / 6)


def test_nothing_scored_is_unknown_but_times_are_compared(tmp_path: Path) -> None:
    one = against(tmp_path, "uuu", "uuu")
    assert (one.outcome, one.pass_rate, one.split) == ("unknown", None, None)
    assert "no case has a verdict in both runs" in one.verdict
    assert one.times["time_to_last_token"].ratio == 1.0


def test_cases_of_one_run_only_are_counted_and_named(tmp_path: Path) -> None:
    write_journal(tmp_path / "a", [outcome("p", number) for number in (0, 1, 2)])
    write_journal(tmp_path / "b", [outcome("p", number) for number in (3, 2)])
    one = compare([tmp_path / "a", tmp_path / "b"]).against[0]
    assert (one.paired, one.only_in_baseline.ids, one.only_here.ids) == (1, ["c0", "c1"], ["c3"])


def test_trials_are_averaged_so_that_the_case_is_the_unit(tmp_path: Path) -> None:
    for run, trials in (("a", ("pf", "ff", "pp")), ("b", ("pp", "ff", "pf"))):
        records = [outcome(t[k], i, trial=k) for i, t in enumerate(trials) for k in (0, 1)]
        write_journal(tmp_path / run, records)
    one = compare([tmp_path / "a", tmp_path / "b"]).against[0]
    assert changed(one.pass_rate).cases == 3
    assert one.split is not None
    assert (one.split.better, one.split.worse, one.split.same) == (1, 1, 1)
    assert (one.better[0].baseline_passed, one.better[0].baseline_tried, one.better[0].run_passed) == (1, 2, 2)


def test_runs_with_different_numbers_of_trials_are_paired(tmp_path: Path) -> None:
    journal(tmp_path / "a", "pf")
    write_journal(tmp_path / "b", [outcome("p", i, trial=k) for i in (0, 1) for k in (0, 1, 2)])
    one = compare([tmp_path / "a", tmp_path / "b"]).against[0]
    assert changed(one.pass_rate).difference == 0.5
    assert one.run.trials == 3


def test_the_last_ok_record_of_a_case_counts(tmp_path: Path) -> None:
    write_journal(tmp_path / "a", [outcome("e", 0), outcome("p", 0), outcome("e", 0)])
    journal(tmp_path / "b", "f")
    assert compare([tmp_path / "a", tmp_path / "b"]).against[0].worse[0].id == "c0"


def test_an_edited_case_is_left_out_unless_asked_for(tmp_path: Path) -> None:
    journal(tmp_path / "a", "pppp")
    edited = [outcome("f", 0, case_fp="f" * 16), outcome("f", 1, scored_by="b" * 16), outcome("p", 2), outcome("p", 3)]
    write_journal(tmp_path / "b", edited)
    one = compare([tmp_path / "a", tmp_path / "b"]).against[0]
    assert (one.paired, one.edited.ids, changed(one.pass_rate).difference) == (2, ["c0", "c1"], 0.0)
    assert "2 of 4 cases were edited in between and are left out" in one.notes
    one = compare([tmp_path / "a", tmp_path / "b"], with_edited=True).against[0]
    assert (one.paired, changed(one.pass_rate).difference) == (4, -0.5)
    assert "2 of 4 cases were edited in between and are paired all the same" in one.notes


def test_a_prompt_that_all_cases_share_may_differ(tmp_path: Path) -> None:
    """Comparing two system prompts is what comparisons are for: every case is asked otherwise, and still paired."""
    journal(tmp_path / "a", "pppf")
    journal(tmp_path / "b", "pppp", case_fp="f" * 16)
    one = compare([tmp_path / "a", tmp_path / "b"]).against[0]
    assert (one.paired, one.edited.total) == (4, 0)
    assert any("4 of 4 cases were asked otherwise" in note for note in one.notes)


def test_a_system_prompt_that_differs_is_noticed_in_real_runs(tmp_path: Path) -> None:
    for name, prompt in (("a", "Be brief."), ("b", "Be kind.")):
        (tmp_path / f"{name}.yaml").write_text(
            json.dumps(
                {
                    "id": "s",
                    "target": {"simulated": {"latency": 0}},
                    "system_prompt": prompt,
                    "cases": [{"prompt": str(n), "id": str(n), "expected": "x"} for n in range(4)],
                    "scorers": ["exact"],
                }
            )
        )
        assert run_cli(tmp_path, "run", f"{name}.yaml", "--out", name, "--no-progress").code == 0
    one = compare([tmp_path / "a", tmp_path / "b"]).against[0]
    assert one.paired == 4
    assert one.notes == ["4 of 4 cases were asked otherwise (prompt, system prompt, template, tools or metadata)"]


def test_each_score_s_mean_is_compared(tmp_path: Path) -> None:
    for run, values in (("a", (0.2, 0.4, None)), ("b", (0.3, 0.9, 1.0))):
        scored = [[Score("likeness", value), Score(f"only in {run}", 1.0)] for value in values]
        write_journal(tmp_path / run, [outcome("u", i, scores=scores) for i, scores in enumerate(scored)])
    one = compare([tmp_path / "a", tmp_path / "b"]).against[0]
    assert list(one.scores) == ["likeness"]
    assert (one.scores["likeness"].cases, one.scores["likeness"].difference) == (2, pytest.approx(0.3))


def test_ten_thousand_score_names_are_limited_and_the_rest_counted(tmp_path: Path) -> None:
    for run in ("a", "b"):
        write_journal(tmp_path / run, [outcome("u", i, scores=[Score(f"s{i}", 0.5)]) for i in range(300)])
    one = compare([tmp_path / "a", tmp_path / "b"]).against[0]
    assert (len(one.scores), one.scores_left_out) == (50, 250)


def test_times_and_costs_are_ratios_of_the_same_cases(tmp_path: Path) -> None:
    for run, factor in (("a", 1.0), ("b", 1.5)):
        records = [
            outcome("p", i, time_to_last_token=(i + 1) * factor, time_to_first_token=None, cost=0.01 * factor)
            for i in range(20)
        ]
        extra = outcome("p", 99 if run == "a" else 98, time_to_last_token=1e6, cost=1e3)
        write_journal(tmp_path / run, [*records, extra])
    one = compare([tmp_path / "a", tmp_path / "b"]).against[0]
    last = one.times["time_to_last_token"]
    assert list(one.times) == ["time_to_last_token"]
    assert (last.cases, last.ratio, last.ci95) == (20, pytest.approx(1.5), (pytest.approx(1.5), pytest.approx(1.5)))
    assert last.baseline["p50"] == pytest.approx(10.5)
    assert last.run["p99"] == pytest.approx(last.baseline["p99"] * 1.5)
    assert one.cost is not None
    assert (one.cost.baseline["total"], one.cost.run["total"]) == (pytest.approx(0.2), pytest.approx(0.3))


def test_cached_answers_have_no_times_and_no_cost(tmp_path: Path) -> None:
    write_journal(tmp_path / "a", [outcome("p", i, cost=1.0) for i in range(3)])
    write_journal(tmp_path / "b", [outcome("p", i, cost=0.0, cached=True) for i in range(3)])
    one = compare([tmp_path / "a", tmp_path / "b"]).against[0]
    assert (one.times, one.cost) == ({}, None)
    assert any("3 answers of this run came from the cache" in note for note in one.notes)


def test_several_runs_are_corrected_for_their_number(tmp_path: Path) -> None:
    journal(tmp_path / "a", "f" * 6 + "p" * 34)
    for name in ("b", "c"):
        journal(tmp_path / name, "p" * 40)
    alone = compare([tmp_path / "a", tmp_path / "b"]).against[0]
    both = compare([tmp_path / name for name in "abc"]).against
    assert alone.outcome == "better"
    assert [one.outcome for one in both] == ["no difference"] * 2
    assert all(changed(one.pass_rate).p_adjusted == 2 * changed(one.pass_rate).p for one in both)
    assert "p = 0.062 (Holm)" in both[0].verdict


def test_rows_are_corrected_for_their_number_and_a_row_twice_counts_once(tmp_path: Path) -> None:
    """The score of the only scorer is the pass rate again; another score is one more chance of a false alarm."""
    alone = against(tmp_path / "alone", "f" * 6 + "p" * 34, "p" * 40)
    assert (changed(alone.pass_rate).p_adjusted, alone.outcome) == (changed(alone.pass_rate).p, "better")
    assert alone.scores["exact"].outcome == "better"
    for run, letters in (("a", "f" * 6 + "p" * 34), ("b", "p" * 40)):
        scores = [
            [Score("exact", float(letter == "p"), letter == "p"), Score("style", (i * 7 + (run == "b") * 3) % 10 / 10)]
            for i, letter in enumerate(letters)
        ]
        write_journal(tmp_path / run, [outcome("u", i, scores=each) for i, each in enumerate(scores)])
    two = compare([tmp_path / "a", tmp_path / "b"]).against[0]
    rate = changed(two.pass_rate)
    assert (rate.p_adjusted, two.outcome) == (pytest.approx(2 * rate.p), "no difference")
    assert rate.ci95[0] > 0
    assert "(Holm)" in two.verdict
    note = "the interval of passed is for that row alone, p is raised for the number of rows: where it excludes 0 and p"
    assert two.verdict.endswith(f"; {note} is not below 0.05, no difference is shown")
    assert "excludes 0" not in alone.verdict


def test_cases_that_fail_now_come_first(tmp_path: Path) -> None:
    """Errors leave the pass rate alone: without this the headline was "no difference" while 40 of 100 timed out."""
    journal(tmp_path / "a", "p" * 100)
    timeouts = [outcome("e", i, error_type="TimeoutError") for i in range(40)]
    write_journal(tmp_path / "b", [*timeouts, *(outcome("p", i) for i in range(40, 100))])
    one = compare([tmp_path / "a", tmp_path / "b"]).against[0]
    assert one.outcome == one.error_rate.outcome == "worse"
    assert one.verdict.startswith("40 of 100 cases now time out; errors +40.0 points, 95 % CI +28.9 – +50.3, p < 0.001")
    assert "of the 60 with a verdict in both, no difference" in one.verdict
    assert (one.errors.now_failing, one.errors.kinds) == (40, {"timeout": 40})
    back = compare([tmp_path / "b", tmp_path / "a"]).against[0]
    assert back.verdict.startswith("40 of 100 fail no longer; errors −40.0 points")
    assert back.outcome == "better"


def test_better_answers_and_more_errors_are_mixed(tmp_path: Path) -> None:
    one = against(tmp_path, "f" * 20 + "p" * 80, "p" * 20 + "e" * 40 + "p" * 40)
    assert (one.outcome, changed(one.pass_rate).outcome, one.error_rate.outcome) == ("mixed", "better", "worse")
    assert one.verdict.startswith("40 of 100 cases now fail (40 TargetError)")


@pytest.mark.parametrize("trials", [(1, 10), (1, 3)])
def test_an_unchanged_model_with_other_numbers_of_trials_is_not_called_worse(
    tmp_path: Path, trials: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sign test on the cases' rates did, in 65 to 100 of 100 comparisons: more trials show more cases below 100 %."""
    # What the comparison could show takes nearly all of its time, and is not what is tested here.
    monkeypatch.setattr("steelyard.report.compare.compare.smallest_detectable", lambda *_: None)
    rng = np.random.default_rng(13)
    alarms = 0
    for number in range(20):
        for run, count in zip("ab", trials, strict=True):
            passed = rng.random((60, count)) < 0.9
            records = [outcome("fp"[int(passed[i, k])], i, trial=k) for i in range(60) for k in range(count)]
            write_journal(tmp_path / f"{run}{number}", records)
        one = compare([tmp_path / f"a{number}", tmp_path / f"b{number}"]).against[0]
        alarms += one.outcome != "no difference"
    assert alarms <= 3


def test_what_a_verdict_says_its_interval_supports(tmp_path: Path) -> None:
    """Fewer cases are better, and by more: the counts point one way, the mean the other."""
    for run, rates in (("a", [10] * 30 + [0] * 6), ("b", [9] * 30 + [10] * 6)):
        records = [outcome("p" if k < rate else "f", i, trial=k) for i, rate in enumerate(rates) for k in range(10)]
        write_journal(tmp_path / run, records)
    one = compare([tmp_path / "a", tmp_path / "b"]).against[0]
    change = changed(one.pass_rate)
    assert one.split is not None
    assert (one.split.better, one.split.worse) == (6, 30)
    assert change.difference > 0
    assert (one.outcome == "worse") is (change.ci95[1] < 0) is False


def test_what_differs_between_the_runs_is_said(tmp_path: Path) -> None:
    finished(tmp_path / "a", "ppp", seed=1, parallelism=1)
    finished(tmp_path / "b", "ppp", seed=2, parallelism=2, scorers=["contains"])
    noted = compare([tmp_path / "a", tmp_path / "b"]).against[0].notes
    assert "seed: 1 in the baseline, 2 here" in noted
    assert "scorer exact: only in the baseline" in noted
    assert "scorer contains: not in the baseline" in noted
    assert "parallelism: 1 in the baseline, 2 here" in noted


def test_a_difference_within_a_long_value_is_shown_and_not_cut_off(tmp_path: Path) -> None:
    """Two judges whose descriptions begin alike, such as two models on one address, look the same when cut."""
    for name, model in (("a", "small"), ("b", "large")):
        finished(tmp_path / name, "ppp")
        manifest = json.loads((tmp_path / name / "run.json").read_bytes())
        where = {"base_url": "http://localhost:8000/" + "v" * 80, "model": model}
        manifest["scorers"] = [{"name": "judge", "target": where, "prompt": "p" * 100 + model}]
        (tmp_path / name / "run.json").write_text(json.dumps(manifest))
    noted = compare([tmp_path / "a", tmp_path / "b"]).against[0].notes
    assert "scorer judge target.model: small in the baseline, large here" in noted
    (prompt,) = [note for note in noted if note.startswith("scorer judge prompt: ")]
    assert "small in the baseline" in prompt
    assert "large here" in prompt


def test_a_run_against_itself_is_said_to_be_that(tmp_path: Path) -> None:
    finished(tmp_path / "a", "ppp")
    assert "it is the same run" in compare([tmp_path / "a", tmp_path / "." / "a"]).against[0].notes


def test_complete_runs_of_the_same_have_nothing_to_note(tmp_path: Path) -> None:
    finished(tmp_path / "a", "ppp")
    finished(tmp_path / "b", "ppf")
    one = compare([tmp_path / "a", tmp_path / "b"]).against[0]
    assert (one.notes, one.run.complete) == ([], True)


def test_an_unfinished_run_is_compared_as_far_as_it_has_come_and_says_so(tmp_path: Path) -> None:
    finished(tmp_path / "a", "ppppp")
    finished(tmp_path / "b", "ppppp", parallelism=1)
    run = tmp_path / "b"
    (run / "metrics.json").unlink()
    lines = (run / "outputs.jsonl").read_bytes().splitlines(keepends=True)
    (run / "outputs.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:20])
    one = compare([tmp_path / "a", run]).against[0]
    assert (one.paired, one.run.complete, one.only_in_baseline.ids) == (2, False, ["c2", "c3", "c4"])
    assert "this run is not complete: 2 of 5 done" in one.notes


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        journal(tmp_path / folder / "run", "pp")
    comparison = compare([tmp_path / "x" / "run", tmp_path / "y" / "run"])
    assert comparison.against[0].run.label == str(tmp_path / "y" / "run")


def test_lists_are_limited_and_all_on_request(tmp_path: Path) -> None:
    one = against(tmp_path, "p" * 60, "f" * 60)
    assert len(one.worse) == 20
    assert len(against(tmp_path, "p" * 60, "f" * 60, most=None).worse) == 60


def test_nothing_in_common_is_refused(tmp_path: Path) -> None:
    journal(tmp_path / "a", "pp")
    write_journal(tmp_path / "b", [outcome("p", 7)])
    with pytest.raises(ConfigurationError, match="nothing can be paired"):
        compare([tmp_path / "a", tmp_path / "b"])
    ended = run_cli(tmp_path, "compare", "a", "b")
    assert (ended.code, ended.out) == (2, "")
    assert run_cli(tmp_path, "compare", "a").code == 2


def test_damage_in_the_middle_is_refused(tmp_path: Path) -> None:
    journal(tmp_path / "a", "ppp")
    journal(tmp_path / "b", "ppp")
    path = tmp_path / "b" / "outputs.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{}\n" + lines[2])
    with pytest.raises(RunDamaged):
        compare([tmp_path / "a", tmp_path / "b"])


def test_the_json_reads_back_as_the_comparison(tmp_path: Path) -> None:
    journal(tmp_path / "a", "ppfu")
    journal(tmp_path / "b", "pfpe")
    ended = run_cli(tmp_path, "compare", "a", "b", "-f", "json")
    assert ended.code == 0
    back = msgspec.json.decode(ended.out, type=Comparison)
    assert back.against[0].verdict.startswith("1 of 4 cases now fail (1 TargetError); errors +25.0 points")
    assert run_cli(tmp_path, "compare", "a", "b", "-f", "json", "-o", "c.json").out == ""
    assert msgspec.json.decode((tmp_path / "c.json").read_bytes(), type=Comparison) == back


def test_answers_are_not_held_in_memory(tmp_path: Path) -> None:
    for run in ("a", "b"):
        write_journal(tmp_path / run, (outcome("pf"[i % 2], i, response_text="x" * 5_000) for i in range(2_000)))
    tracemalloc.start()
    try:
        compare([tmp_path / "a", tmp_path / "b"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (tmp_path / "b" / "outputs.jsonl").stat().st_size / 2
