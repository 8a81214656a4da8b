"""Logs a run's parameters, figures and files to MLflow tracking."""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from steelyard._version import __version__
from steelyard.errors import ConfigurationError
from steelyard.journal.files import MANIFEST, METRICS, OUTPUTS, PARTIAL, REPORT
from steelyard.journal.manifest import Manifest, read_manifest
from steelyard.report.page.page import page
from steelyard.run.hooks import Hook
from steelyard.run.result import Result
from steelyard.stats.metrics import Metrics, figures, uncalibrated

_NOT_IN_NAMES = re.compile(r"[^\w.\- ]", re.ASCII)
_MAX_NAME_LENGTH = 250
_MAX_VALUE_LENGTH = 500
"""Length of a parameter's value: newer servers accept more, older ones refuse it."""


def log_run(
    run: str | Path,
    *,
    experiment: str | None = None,
    run_name: str | None = None,
    run_id: str | None = None,
    tracking_uri: str | None = None,
    tags: Mapping[str, str] | None = None,
    outputs: bool = True,
) -> str:
    """Log the run in a directory to MLflow; returns the id of the MLflow run.

    That is `run_id`, or the active run (`with mlflow.start_run():`), else a new one in `experiment`, in the one that
    MLFLOW_EXPERIMENT_NAME names, or in one named after the suite. `outputs=False` leaves out the files with
    the answers: outputs.jsonl, and the report.html that is made for it.
    """
    mlflow = _mlflow()
    place = Path(run)
    result, manifest = Result.load(place), read_manifest(place)
    client = _client(mlflow, tracking_uri)
    active = mlflow.active_run() if run_id is None and tracking_uri is None else None
    found = run_id or (active.info.run_id if active is not None else None)
    logged: str = found or _new_run(client, result, manifest, experiment, run_name or place.resolve().name)
    _log_data(client, mlflow.entities, logged, result, manifest, {**_tags(place, result), **(tags or {})})
    _log_files(client, logged, place, outputs=outputs)
    if found is None:
        client.set_terminated(logged, "FINISHED" if result.complete else "KILLED")
    return logged


class MlflowHook(Hook):
    """Logs a run to MLflow when it ends; the arguments are those of `log_run`."""

    name = "mlflow"
    end_seconds = 600.0  # the answers of a large run are uploaded

    def __init__(
        self,
        *,
        experiment: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
        outputs: bool = True,
    ) -> None:
        _mlflow()
        self._log = partial(
            log_run,
            experiment=experiment,
            run_name=run_name,
            run_id=run_id,
            tracking_uri=tracking_uri,
            tags=tags,
            outputs=outputs,
        )

    def on_end(self, result: Result) -> None:
        """Log the run, complete or not."""
        if result.path is None:
            raise ConfigurationError("a run without a directory cannot be logged to MLflow: give it an output_path")
        self._log(result.path)


def _mlflow() -> Any:
    try:
        return import_module("mlflow")
    except ImportError as error:
        raise ConfigurationError(
            "logging to MLflow needs mlflow: pip install 'steelyard[mlflow]'", topic="extra"
        ) from error


def _client(mlflow: Any, tracking_uri: str | None) -> Any:
    try:
        return mlflow.MlflowClient(tracking_uri)
    except mlflow.exceptions.MlflowException as error:
        place = tracking_uri or mlflow.get_tracking_uri()
        hint = "name a server (tracking_uri, or MLFLOW_TRACKING_URI), or pip install mlflow for one with a database"
        raise ConfigurationError(f"MLflow cannot use {place}: {hint}; its error: {error}") from error


def _new_run(client: Any, result: Result, manifest: Manifest | None, experiment: str | None, name: str) -> str:
    if experiment is None and "MLFLOW_EXPERIMENT_ID" in os.environ:
        experiment_id = os.environ["MLFLOW_EXPERIMENT_ID"]
    else:
        experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or str(result.typed_metrics.suite)
        known = client.get_experiment_by_name(experiment)
        experiment_id = known.experiment_id if known is not None else client.create_experiment(experiment)
    began = None if manifest is None else int(datetime.fromisoformat(manifest.created).timestamp() * 1000)
    made: str = client.create_run(experiment_id, start_time=began, run_name=name).info.run_id
    return made


def _log_data(
    client: Any, entities: Any, run_id: str, result: Result, manifest: Manifest | None, tags: Mapping[str, str]
) -> None:
    """Log everything but the files; the client splits it into requests of a size that servers accept."""
    now = int(time.time() * 1000)
    numbers = [
        entities.Metric(name_for_mlflow(name), float(value), now, 0)
        for name, value in figures(result.typed_metrics).items()
        if value is not None and math.isfinite(value)
    ]
    params = [
        entities.Param(name_for_mlflow(name), value) for name, value in _params(manifest, result.typed_metrics).items()
    ]
    labels = [entities.RunTag(name_for_mlflow(name), value) for name, value in tags.items()]
    client.log_batch(run_id, metrics=numbers, params=params, tags=labels)


def _log_files(client: Any, run_id: str, place: Path, *, outputs: bool) -> None:
    for name in (MANIFEST, METRICS, PARTIAL, *((OUTPUTS,) if outputs else ())):
        if (place / name).is_file():
            client.log_artifact(run_id, str(place / name))
    if outputs:
        # Made again: a report in the run directory may be from before it was resumed, and that directory is only read.
        with TemporaryDirectory(prefix="steelyard-") as folder:
            report = Path(folder) / REPORT
            with report.open("w", encoding="utf-8", errors="replace", newline="") as file:
                file.writelines(page(place))
            client.log_artifact(run_id, str(report))


def _tags(place: Path, result: Result) -> dict[str, str]:
    marks = uncalibrated(result.typed_metrics)
    return {
        "steelyard.run": str(place),
        "steelyard.suite": str(result.typed_metrics.suite),
        "steelyard.complete": "true" if result.complete else "false",
        "steelyard.version": __version__,
        **({"steelyard.uncalibrated": "; ".join(marks)} if marks else {}),
    }


def _params(manifest: Manifest | None, metrics: Metrics) -> dict[str, str]:
    """Collect what decided the answers and scores: the target's identity, the scorers, the options that were set."""
    params: dict[str, Any] = {"suite": metrics.suite, "model": metrics.model_id, "seed": metrics.seed}
    params |= _flat("target", metrics.target)
    if manifest is not None:
        params |= _flat("options", {name: value for name, value in manifest.options.items() if value not in (None, [])})
        for scorer in manifest.scorers:
            params[f"scorer.{scorer.get('name', scorer.get('kind'))}"] = scorer
    return {name: _cut(value) for name, value in params.items() if value is not None}


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Flatten nested objects to dotted names; other values, also lists, stay as they are."""
    for key, value in values.items():
        name = f"{prefix}.{str(key).lstrip('~')}"
        if isinstance(value, Mapping):
            yield from _flat(name, value)
        else:
            yield name, value


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 1]}…"


def name_for_mlflow(name: str) -> str:
    """Return a name that MLflow accepts: unchanged if possible, else with characters replaced and a digest added."""
    kept = _NOT_IN_NAMES.sub("_", name)
    if kept == name and len(name) <= _MAX_NAME_LENGTH and name.strip(". "):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{kept[: _MAX_NAME_LENGTH - 9]}-{digest}"
