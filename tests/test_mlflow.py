"""A run in MLflow: by a stand-in that refuses what MLflow refuses, and by MLflow itself where it is installed."""

from __future__ import annotations

import importlib.util
import json
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import EvalCase, EvalSet, Runner, Score
from steelyard.errors import ConfigurationError
from steelyard.integrations.mlflow import log_run, name_for_mlflow
from steelyard.report.rules import figures
from steelyard.targets import Simulated

_GOOD_NAME = re.compile(r"[/\w.\- ]{1,250}", re.ASCII)


class Logged(msgspec.Struct):
    """What a tracking server holds of a run."""

    experiment: str
    name: str
    status: str = "RUNNING"
    params: dict[str, str] = {}
    metrics: dict[str, float] = {}
    tags: dict[str, str] = {}
    files: set[str] = set()


class Pair(NamedTuple):
    key: str
    value: Any
    timestamp: int = 0
    step: int = 0


class StandIn:
    """As much of `mlflow` as we call, with its rules about names and sizes."""

    def __init__(self) -> None:
        self.runs: dict[str, Logged] = {}
        self.experiments: list[str] = []
        self.active: str | None = None
        self.entities = SimpleNamespace(Metric=Pair, Param=Pair, RunTag=Pair)

    def MlflowClient(self, tracking_uri: str | None = None) -> StandIn:  # noqa: N802 - its name there
        return self

    def active_run(self) -> Any:
        return None if self.active is None else SimpleNamespace(info=SimpleNamespace(run_id=self.active))

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        assert name not in self.experiments
        self.experiments.append(name)
        return name

    def create_run(self, experiment_id: str, *, start_time: int | None, run_name: str) -> Any:
        assert experiment_id in self.experiments
        assert start_time is None or start_time > 1e12
        run_id = f"r{len(self.runs)}"
        self.runs[run_id] = Logged(experiment=experiment_id, name=run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def log_batch(self, run_id: str, *, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        assert len(metrics) <= 1000
        assert len(params) <= 100
        assert len(tags) <= 100
        for pair in [*metrics, *params, *tags]:
            assert _GOOD_NAME.fullmatch(pair.key), pair
            assert posixpath.normpath(pair.key) == pair.key, pair
        assert all(isinstance(pair.value, str) and len(pair.value) <= 500 for pair in [*params, *tags])
        assert all(type(pair.value) is float for pair in metrics)
        run = self.runs[run_id]
        run.metrics.update((pair.key, pair.value) for pair in metrics)
        run.params.update((pair.key, pair.value) for pair in params)
        run.tags.update((pair.key, pair.value) for pair in tags)

    def log_artifact(self, run_id: str, path: str) -> None:
        assert Path(path).is_file()
        self.runs[run_id].files.add(Path(path).name)

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[run_id].status = status


class Tracking:
    """Where runs are logged to in a test, real or not."""

    def __init__(self, mlflow: Any) -> None:
        self.mlflow = mlflow

    def run(self, run_id: str) -> Logged:
        if isinstance(self.mlflow, StandIn):
            return self.mlflow.runs[run_id]
        client = self.mlflow.MlflowClient()
        run = client.get_run(run_id)
        return Logged(
            experiment=client.get_experiment(run.info.experiment_id).name,
            name=run.info.run_name,
            status=run.info.status,
            params=run.data.params,
            metrics=run.data.metrics,
            tags=run.data.tags,
            files={file.path for file in client.list_artifacts(run_id)},
        )

    def begin(self) -> str:
        """Start a run of the user's own."""
        if isinstance(self.mlflow, StandIn):
            self.mlflow.create_experiment("mine")
            self.mlflow.active = self.mlflow.create_run("mine", start_time=None, run_name="mine").info.run_id
            return str(self.mlflow.active)
        return str(self.mlflow.start_run().info.run_id)


@pytest.fixture(params=["stand-in", "mlflow"])
def tracking(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracking]:
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    if request.param == "stand-in":
        stand_in = StandIn()
        monkeypatch.setitem(sys.modules, "mlflow", stand_in)
        yield Tracking(stand_in)
        return
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("mlflow is not installed")
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    yield Tracking(mlflow)
    mlflow.end_run()


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
    assert len(logged.metrics) == sum(value is not None for value in figures(metrics).values())
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
    assert logged.files == {"run.json", "metrics.json", "outputs.jsonl"}


def test_a_score_with_a_name_that_mlflow_refuses_is_logged_by_one_it_takes(tracking: Tracking, run: Path) -> None:
    logged = tracking.run(log_run(run))
    (name,) = [name for name in logged.metrics if name.startswith("score.tone") and ".mean-" in name]
    assert logged.metrics[name] == 0.5


def test_the_report_is_logged_where_it_was_made_and_answers_may_stay_at_home(tracking: Tracking, run: Path) -> None:
    (run / "report.html").write_text("<p>")
    assert "report.html" in tracking.run(log_run(run)).files
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


def test_a_folder_that_is_no_run_is_refused_before_anything_is_logged(tmp_path: Path, monkeypatch: Any) -> None:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "mlflow", stand_in)
    with pytest.raises(ConfigurationError, match="is not a run directory"):
        log_run(tmp_path)
    assert stand_in.runs == {}


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
