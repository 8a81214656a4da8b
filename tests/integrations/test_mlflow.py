"""A run in MLflow: the real one, with its store in a folder of the test's own."""

from __future__ import annotations

import importlib.util
import json
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import EvalCase, EvalSet, Runner, Score
from steelyard.errors import ConfigurationError
from steelyard.integrations.mlflow import MlflowHook, log_run, name_for_mlflow
from steelyard.report.page.page import page
from steelyard.scoring import Contains
from steelyard.stats.metrics import figures
from steelyard.targets import Simulated
from tests.support.judged import Assessor
from tests.support.metrics import typed

_GOOD_NAME = re.compile(r"[/\w.\- ]{1,250}", re.ASCII)


class Logged(msgspec.Struct):
    """What MLflow holds of a run."""

    experiment: str
    name: str
    status: str
    params: dict[str, str]
    metrics: dict[str, float]
    tags: dict[str, str]
    files: set[str]


class Tracking:
    """MLflow with a separate store."""

    def __init__(self, mlflow: Any) -> None:
        self.mlflow = mlflow
        self.client = mlflow.MlflowClient()

    def run(self, run_id: str) -> Logged:
        run = self.client.get_run(run_id)
        return Logged(
            experiment=self.client.get_experiment(run.info.experiment_id).name,
            name=run.info.run_name,
            status=run.info.status,
            params=run.data.params,
            metrics=run.data.metrics,
            tags=run.data.tags,
            files={file.path for file in self.client.list_artifacts(run_id)},
        )

    def begin(self) -> str:
        """Start a run of the user's own."""
        return str(self.mlflow.start_run().info.run_id)

    @property
    def experiments(self) -> set[str]:
        return {experiment.name for experiment in self.client.search_experiments()}


@pytest.fixture
def tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracking]:
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("needs the extra `mlflow`")
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the one store that needs no server and no database
    import mlflow

    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    yield Tracking(mlflow)
    mlflow.end_run()
    mlflow.set_tracking_uri(None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    place = tmp_path / "runs" / "first"
    cases = [EvalCase(id=str(number), prompt="?", expected="x") for number in range(8)]
    target = Simulated(model="small", latency=0, tokens_per_second=0)

    def odd(case: Any, response: Any) -> Score:
        return Score("tone/über: 100%", 0.5, True)

    Runner(target, EvalSet("capitals", cases), ["exact", odd], progress="off", output_path=place, seed=7).run_sync()
    return place


def test_params_figures_tags_and_files_are_logged(tracking: Tracking, run: Path) -> None:
    logged = tracking.run(log_run(run, tags={"team": "search"}))
    metrics = json.loads((run / "metrics.json").read_bytes())
    assert (logged.experiment, logged.name, logged.status) == ("capitals", "first", "FINISHED")
    assert logged.metrics["pass_rate"] == metrics["pass_rate"]
    assert logged.metrics["pass_rate.ci_low"] == metrics["pass_rate_ci95"][0]
    assert logged.metrics["time_to_last_token-p99"] == metrics["stats"]["time_to_last_token-p99"]
    assert logged.metrics["score.exact.mean"] == metrics["scores"]["exact"]["mean"]
    assert logged.metrics["counts.planned"] == 8
    assert len(logged.metrics) == sum(value is not None for value in figures(typed(metrics)).values())
    assert logged.params["suite"] == "capitals"
    assert logged.params["model"] == "small"
    assert logged.params["seed"] == "7"
    assert logged.params["target.kind"] == "simulated"
    assert logged.params["options.num_runs"] == "1"
    assert json.loads(logged.params["scorer.exact"])["kind"] == "exact"
    expected = {
        "team": "search",
        "steelyard.suite": "capitals",
        "steelyard.complete": "true",
        "steelyard.run": str(run),
    }
    assert expected.items() <= logged.tags.items()
    assert logged.files == {"run.json", "metrics.json", "outputs.jsonl", "report.html"}


def test_rates_that_an_uncalibrated_judge_decided_are_marked_by_a_tag(tracking: Tracking, tmp_path: Path) -> None:
    cases = EvalSet("s", [EvalCase(id="a", prompt="?")])
    Runner(lambda case: "x", cases, [Assessor().judge()], progress="off", output_path=tmp_path / "judged").run_sync()
    marked = tracking.run(log_run(tmp_path / "judged")).tags["steelyard.uncalibrated"]
    assert marked == "the judge is not calibrated; without it nothing decides"


def test_a_score_with_a_name_that_mlflow_refuses_is_logged_by_one_it_takes(tracking: Tracking, run: Path) -> None:
    logged = tracking.run(log_run(run))
    (name,) = [name for name in logged.metrics if name.startswith("score.tone") and ".mean-" in name]
    assert logged.metrics[name] == 0.5


def test_the_report_is_made_for_it_and_the_run_is_left_as_it_is(tracking: Tracking, run: Path, tmp_path: Path) -> None:
    before = sorted(run.iterdir())
    logged = log_run(run)
    report = Path(tracking.client.download_artifacts(logged, "report.html", str(tmp_path)))
    assert report.read_text(encoding="utf-8") == "".join(page(run))
    assert sorted(run.iterdir()) == before


def test_answers_may_stay_at_home(tracking: Tracking, run: Path) -> None:
    (run / "report.html").write_text("<p>")
    assert tracking.run(log_run(run, outputs=False)).files == {"run.json", "metrics.json"}


def test_an_unfinished_run_is_logged_as_one(tracking: Tracking, run: Path) -> None:
    (run / "metrics.json").unlink()
    logged = tracking.run(log_run(run, experiment="nightly", run_name="cut short"))
    assert (logged.experiment, logged.name, logged.status) == ("nightly", "cut short", "KILLED")
    assert logged.tags["steelyard.complete"] == "false"
    assert logged.metrics["counts.ok"] == 8


def test_an_experiment_is_used_again(tracking: Tracking, run: Path) -> None:
    first, second = log_run(run), log_run(run)
    assert first != second
    assert tracking.run(first).experiment == tracking.run(second).experiment == "capitals"


def test_the_experiment_may_come_from_the_environment(
    tracking: Tracking, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from-outside")
    assert tracking.run(log_run(run)).experiment == "from-outside"


def test_the_active_run_is_logged_to_and_left_open(tracking: Tracking, run: Path) -> None:
    mine = tracking.begin()
    assert log_run(run) == mine
    logged = tracking.run(mine)
    assert logged.status == "RUNNING"
    assert logged.metrics["n"] == 8


def test_a_run_that_is_named_is_logged_to(tracking: Tracking, run: Path) -> None:
    mine = tracking.begin()
    assert log_run(run, run_id=mine) == mine
    assert tracking.run(mine).params["suite"] == "capitals"


def test_more_figures_and_parameters_than_a_request_may_hold_are_all_logged(tracking: Tracking, tmp_path: Path) -> None:
    def many(case: Any, response: Any) -> list[Score]:
        return [Score(f"part {number}", 1.0, True) for number in range(150)]

    place, target = tmp_path / "many", Simulated(latency=0, tokens_per_second=0)
    suite = EvalSet("many", [EvalCase(id="1", prompt="?", expected="x")])
    plain = [Contains(name=f"contains {number}") for number in range(120)]
    Runner(target, suite, [many, *plain], progress="off", output_path=place).run_sync()
    logged = tracking.run(log_run(place))
    known = figures(typed(json.loads((place / "metrics.json").read_bytes())))
    assert len(logged.metrics) == sum(value is not None for value in known.values()) > 1000
    assert sum(name.startswith("scorer.") for name in logged.params) == 121


def test_a_folder_that_is_no_run_is_refused_before_anything_is_logged(tracking: Tracking, tmp_path: Path) -> None:
    before = tracking.experiments
    with pytest.raises(ConfigurationError, match="is not a run directory"):
        log_run(tmp_path)
    assert tracking.experiments == before


def test_a_store_that_mlflow_does_not_have_is_refused_with_what_helps(tracking: Tracking, run: Path) -> None:
    """The small MLflow of the extra has no database, which newer versions use by default."""
    with pytest.raises(ConfigurationError, match=r"cannot use nowhere://x.*MLFLOW_TRACKING_URI.*pip install mlflow"):
        log_run(run, tracking_uri="nowhere://x")


def test_without_mlflow_it_says_what_to_install(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'steelyard\[mlflow\]'"):
        log_run(run)


@given(st.text(max_size=400))
def test_any_name_becomes_one_that_mlflow_takes(name: str) -> None:
    made = name_for_mlflow(name)
    assert _GOOD_NAME.fullmatch(made)
    assert posixpath.normpath(made) == made


@given(st.lists(st.text(max_size=5), unique=True, max_size=20))
def test_different_names_stay_different(names: list[str]) -> None:
    assert len(set(map(name_for_mlflow, names))) == len(names)


def test_as_a_hook_a_run_is_logged_when_it_ends(tracking: Tracking, tmp_path: Path) -> None:
    cases = [EvalCase(id="a", prompt="?", expected="x")]
    hook = MlflowHook(experiment="nightly", tags={"team": "search"}, outputs=False)
    Runner(
        lambda case: "x", EvalSet("s", cases), ["exact"], hooks=[hook], progress="off", output_path=tmp_path / "r"
    ).run_sync()
    [found] = tracking.client.search_runs([tracking.client.get_experiment_by_name("nightly").experiment_id])
    logged = tracking.run(found.info.run_id)
    assert (logged.name, logged.status, logged.tags["team"]) == ("r", "FINISHED", "search")
    assert logged.metrics["pass_rate"] == 1.0


def test_a_run_without_a_directory_is_not_logged_and_the_hook_says_why(
    tracking: Tracking, caplog: pytest.LogCaptureFixture
) -> None:
    Runner(
        lambda case: "x", EvalSet("s", [EvalCase(id="a", prompt="?")]), hooks=[MlflowHook()], progress="off"
    ).run_sync()
    assert [text for text in caplog.messages if "give it an output_path" in text]
