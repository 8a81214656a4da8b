"""The figures of a run as types: written and read back the same, each with a name, a unit and a direction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steelyard import EvalCase, EvalSet, InvocationResponse, Metrics, Result, Runner, RunVersionError
from steelyard.journal.files import RunState, run_state
from steelyard.report.headline import read_headline
from steelyard.stats.figures import STATS, patterns
from steelyard.stats.metrics import figure_of, figures, fixed_figures
from steelyard.stats.running import RunningStats
from tests.support.cli import run_cli
from tests.support.metrics import plain, typed


def run(place: Path, **options: Any) -> Result:
    """Six cases, one of which raises, with all that a load run in several trials has to tell."""

    def answer(case: EvalCase) -> InvocationResponse:
        if case.id == "5":
            raise ValueError("no")
        return InvocationResponse(
            response_text=case.id, time_to_first_token=0.1, time_to_last_token=0.2, num_tokens_output=3, cost=0.5
        )

    suite = EvalSet("s", [EvalCase(id=str(number), prompt="?", expected="1") for number in range(6)])
    return Runner(answer, suite, ["exact"], progress="off", output_path=place, **options).run_sync()


@pytest.mark.parametrize(
    "options",
    [{}, {"trials": 3}, {"requests": 12}, {"arrivals": "constant:1000/s", "requests": 6}, {"parallelism": "auto"}],
    ids=str,
)
def test_metrics_are_the_same_when_they_are_read_back_by_type(options: dict[str, Any], tmp_path: Path) -> None:
    result = run(tmp_path, **options)
    written = json.loads((tmp_path / "metrics.json").read_bytes())
    assert result.metrics == written == plain(result.typed_metrics)
    loaded = Result.load(tmp_path)
    assert loaded.typed_metrics == result.typed_metrics
    assert loaded.metrics == written
    assert loaded.stats == written["stats"]


def test_every_number_in_the_file_is_a_figure_with_a_name_and_a_unit(tmp_path: Path) -> None:
    metrics = run(tmp_path, trials=2).typed_metrics
    named = figures(metrics)
    assert [name for name in named if figure_of(name) is None] == []
    not_figures = {"v", "seed"}
    numbers = {
        name
        for name, value in plain(metrics).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in not_figures
    }
    assert numbers <= named.keys()


def test_the_statistics_have_the_names_that_rules_know() -> None:
    stats = RunningStats()
    stats.update(InvocationResponse(time_queued=1.0, time_waiting=1.0, time_in_backoff=1.0, time_from_planned=1.0))
    assert stats.to_stats().keys() <= STATS.keys()


@pytest.mark.parametrize(
    ("name", "unit", "better", "kind"),
    [
        ("pass_rate", "share", "higher", "quality"),
        ("pass_rate.ci_low", "share", "higher", "quality"),
        ("error_rate", "share", "lower", "quality"),
        ("failure_rate", "share", "lower", "quality"),
        ("time_to_first_token-p99", "seconds", "lower", "speed"),
        ("time_waiting-max", "seconds", "lower", "speed"),
        ("output_tps", "rate", "higher", "speed"),
        ("cost_per_1000_cases", "money", "lower", "cost"),
        ("cost_unknown", "count", "lower", "count"),
        ("score.my.judge.mean", "ratio", "higher", "quality"),
        ("score.judge.ci_high", "ratio", "higher", "quality"),
        ("trials.pass_at_k.3", "share", "higher", "quality"),
        ("trials.score.judge.spread", "ratio", "lower", "quality"),
        ("errors.TimeoutError", "count", "lower", "count"),
        ("nodes.n1.time_to_last_token-p50", "seconds", "lower", "speed"),
        ("client.loop_cpu_share", "ratio", "lower", "client"),
        ("load.sends.worst_lateness", "seconds", "lower", "client"),
    ],
)
def test_a_figure_knows_its_unit_and_which_direction_is_better(name: str, unit: str, better: str, kind: str) -> None:
    figure = figure_of(name)
    assert figure is not None
    assert (figure.unit, figure.better, figure.kind) == (unit, better, kind)


@pytest.mark.parametrize(
    "name", ["pass_rat", "client.lagg", "score.x.median", "suite", "v", "stats", "time_to_think-p50"]
)
def test_what_no_run_has_is_no_figure(name: str) -> None:
    assert figure_of(name) is None


def test_figures_that_can_be_named_before_a_run_depend_on_no_key_of_it() -> None:
    assert not [name for name in fixed_figures() if "*" in name]
    assert {"pass_rate", "client.loop_lag_p99", "trials.flaky", "load.sends.late"} < fixed_figures().keys()
    assert {"score.*.mean", "errors.*", "nodes.*.requests"} < dict(patterns(Metrics)).keys()


def test_a_group_that_came_with_a_later_version_is_passed_over(tmp_path: Path) -> None:
    result = run(tmp_path)
    written = json.loads((tmp_path / "metrics.json").read_bytes())
    (tmp_path / "metrics.json").write_text(json.dumps({**written, "later": {"hard": {"pass_rate": 1}}}))
    assert run_state(tmp_path) is RunState.COMPLETE
    assert Result.load(tmp_path).typed_metrics == result.typed_metrics


@pytest.mark.parametrize("group", ["client", "peak_in_flight", "error_kinds", "cost", "pass_rate_ci95", "target"])
def test_what_an_older_version_did_not_write_is_unknown(group: str, tmp_path: Path) -> None:
    run(tmp_path)
    written = json.loads((tmp_path / "metrics.json").read_bytes())
    del written[group]
    (tmp_path / "metrics.json").write_text(json.dumps(written))
    assert run_state(tmp_path) is RunState.COMPLETE
    assert Result.load(tmp_path).complete
    assert run_cli(tmp_path.parent, "report", tmp_path.name).code == 0


def test_metrics_of_another_version_leave_a_run_complete_and_are_named_as_such(tmp_path: Path) -> None:
    place = tmp_path / "RUN"
    run(place)
    written = json.loads((place / "metrics.json").read_bytes())
    written["scores"]["exact"] = {"centre": 0.5}
    (place / "metrics.json").write_text(json.dumps(written))
    manifest = json.loads((place / "run.json").read_bytes())
    manifest["launches"][-1]["steelyard"] = "7.1.0"
    (place / "run.json").write_text(json.dumps(manifest))

    assert run_state(place) is RunState.COMPLETE
    with pytest.raises(RunVersionError, match=r"written by Steelyard 7\.1\.0 .*`n` - at `\$\.scores"):
        Result.load(place)
    told = run_cli(tmp_path, "report", "RUN")
    assert told.code == 2
    assert "written by Steelyard 7.1.0" in told.err
    headline = read_headline(place)
    assert headline.state == "complete"
    assert "Steelyard 7.1.0" in (headline.problem or "")


def test_a_run_of_another_version_is_not_asked_again(tmp_path: Path) -> None:
    run(tmp_path)
    written = json.loads((tmp_path / "metrics.json").read_bytes())
    written["scores"]["exact"] = {"centre": 0.5}
    (tmp_path / "metrics.json").write_text(json.dumps(written))
    before = (tmp_path / "outputs.jsonl").read_bytes()
    with pytest.raises(Exception, match="is complete"):
        run(tmp_path)
    assert (tmp_path / "outputs.jsonl").read_bytes() == before


def test_absent_groups_are_not_written() -> None:
    least = {
        "suite": "s",
        "n": 0,
        "counts": {"planned": 0, "ok": 0, "error": 0, "cancelled": 0, "not_started": 0},
        "scoring_errors": 0,
        "errors": {},
        "scores": {},
        "stats": {},
    }
    metrics = typed(least)
    assert {"client", "load", "nodes", "trials", "scored_from"}.isdisjoint(plain(metrics))
    assert metrics.trials is msgspec.UNSET
    assert metrics.pass_rate is None
