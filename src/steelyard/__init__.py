"""Steelyard evaluates and load-tests models and agents: how good and how fast their answers are, from one run."""

from __future__ import annotations

from steelyard._version import __version__

TYPE_CHECKING = False  # what type checkers take for true; importing `typing` would double the cost of this import
if TYPE_CHECKING:
    from steelyard.cache.files import LocalFileTaskResultStore
    from steelyard.cache.sqlite import SqliteTaskResultStore
    from steelyard.cache.store import CacheKey, CaseFingerprint, EvaluationDataStore, StoreError
    from steelyard.engine.base import CancellationToken, Engine
    from steelyard.engine.local import LocalEngine
    from steelyard.engine.ray.engine import RayEngine
    from steelyard.engine.worker_processes import ProcessEngine
    from steelyard.errors import (
        CaseLimitReached,
        ConfigurationError,
        JournalError,
        RunCancelled,
        RunDamaged,
        RunEdited,
        RunFinished,
        RunLocked,
        RunMismatch,
        RunRefused,
        RunVersionError,
        SetupError,
        SteelyardError,
        SuiteError,
        TargetError,
        TransientError,
    )
    from steelyard.load.sweep import Sweep
    from steelyard.protocols import InvocationContext, Scorer, ScoringContext, Session, Target
    from steelyard.records import CaseLimits, EvalCase, InvocationResponse, Record, Score
    from steelyard.run.hooks import Hook, RunInfo
    from steelyard.run.matrix_runner import MatrixResult, MatrixRunner
    from steelyard.run.options import RunOptions
    from steelyard.run.result import Result
    from steelyard.run.run_metrics import MetricValue
    from steelyard.run.runner import Runner
    from steelyard.scoring.judge.judge import Judge
    from steelyard.stats.metrics import Metrics
    from steelyard.stats.running import RunningStats
    from steelyard.suite.evalset import EvalSet
    from steelyard.workspace.template import Workspace

_HOMES = {
    "CacheKey": "steelyard.cache.store",
    "CancellationToken": "steelyard.engine.base",
    "CaseFingerprint": "steelyard.cache.store",
    "CaseLimitReached": "steelyard.errors",
    "CaseLimits": "steelyard.records",
    "ConfigurationError": "steelyard.errors",
    "Engine": "steelyard.engine.base",
    "EvalCase": "steelyard.records",
    "EvalSet": "steelyard.suite.evalset",
    "EvaluationDataStore": "steelyard.cache.store",
    "Hook": "steelyard.run.hooks",
    "MetricValue": "steelyard.run.run_metrics",
    "InvocationContext": "steelyard.protocols",
    "InvocationResponse": "steelyard.records",
    "JournalError": "steelyard.errors",
    "Judge": "steelyard.scoring.judge.judge",
    "LocalEngine": "steelyard.engine.local",
    "LocalFileTaskResultStore": "steelyard.cache.files",
    "MatrixResult": "steelyard.run.matrix_runner",
    "MatrixRunner": "steelyard.run.matrix_runner",
    "Metrics": "steelyard.stats.metrics",
    "ProcessEngine": "steelyard.engine.worker_processes",
    "RayEngine": "steelyard.engine.ray.engine",
    "Record": "steelyard.records",
    "Result": "steelyard.run.result",
    "RunCancelled": "steelyard.errors",
    "RunDamaged": "steelyard.errors",
    "RunEdited": "steelyard.errors",
    "RunFinished": "steelyard.errors",
    "RunInfo": "steelyard.run.hooks",
    "RunLocked": "steelyard.errors",
    "RunMismatch": "steelyard.errors",
    "RunOptions": "steelyard.run.options",
    "RunRefused": "steelyard.errors",
    "RunVersionError": "steelyard.errors",
    "Runner": "steelyard.run.runner",
    "RunningStats": "steelyard.stats.running",
    "Score": "steelyard.records",
    "Scorer": "steelyard.protocols",
    "ScoringContext": "steelyard.protocols",
    "Session": "steelyard.protocols",
    "SetupError": "steelyard.errors",
    "SqliteTaskResultStore": "steelyard.cache.sqlite",
    "SteelyardError": "steelyard.errors",
    "StoreError": "steelyard.cache.store",
    "SuiteError": "steelyard.errors",
    "Sweep": "steelyard.load.sweep",
    "Target": "steelyard.protocols",
    "TargetError": "steelyard.errors",
    "TransientError": "steelyard.errors",
    "Workspace": "steelyard.workspace.template",
}

__all__ = [
    "CacheKey",
    "CancellationToken",
    "CaseFingerprint",
    "CaseLimitReached",
    "CaseLimits",
    "ConfigurationError",
    "Engine",
    "EvalCase",
    "EvalSet",
    "EvaluationDataStore",
    "Hook",
    "InvocationContext",
    "InvocationResponse",
    "JournalError",
    "Judge",
    "LocalEngine",
    "LocalFileTaskResultStore",
    "MatrixResult",
    "MatrixRunner",
    "MetricValue",
    "Metrics",
    "ProcessEngine",
    "RayEngine",
    "Record",
    "Result",
    "RunCancelled",
    "RunDamaged",
    "RunEdited",
    "RunFinished",
    "RunInfo",
    "RunLocked",
    "RunMismatch",
    "RunOptions",
    "RunRefused",
    "RunVersionError",
    "Runner",
    "RunningStats",
    "Score",
    "Scorer",
    "ScoringContext",
    "Session",
    "SetupError",
    "SqliteTaskResultStore",
    "SteelyardError",
    "StoreError",
    "SuiteError",
    "Sweep",
    "Target",
    "TargetError",
    "TransientError",
    "Workspace",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Import a public name's home when it is first asked for, so that `import steelyard` costs next to nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
