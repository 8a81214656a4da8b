"""The five seconds that an interrupted process may take, added up."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import steelyard
from steelyard import LocalEngine, reaper, shutdown
from steelyard.engine.workers import driver

_WRITERS = (
    "cli/output.py",
    "cli/run_control.py",
    "subprocesses.py",
    "engine/local.py",
    "engine/ray/engine.py",
    "engine/worker_processes.py",
)


def test_the_steps_of_an_interrupted_run_add_up_to_less_than_five_seconds() -> None:
    """In the worst case: calls that do not end, a stuck event loop, and two full pipes that nobody reads."""
    steps = {
        "the calls do not end": shutdown.CALLS_SECONDS,
        "the run does not close": shutdown.CLOSE_SECONDS,
        "which is found out": shutdown.POLL_SECONDS,
        "that is said, after the first message on stderr": shutdown.BLOCKED_WRITE_SECONDS,
        "the journal is read": shutdown.JOURNAL_SECONDS,
        "the result goes to stdout": shutdown.WRITE_SECONDS,
        "how to resume goes to stderr": shutdown.BLOCKED_WRITE_SECONDS,
        "worker processes are killed": shutdown.WORKER_KILL_SECONDS,
        "both are flushed": 2 * shutdown.BLOCKED_WRITE_SECONDS,
    }
    assert sum(steps.values()) < reaper.BUDGET_SECONDS < shutdown.INTERRUPT_SECONDS == 5.0


def test_a_program_that_ignores_sigterm_is_gone_while_the_calls_may_still_end() -> None:
    ended = shutdown.PROGRAM_GRACE_SECONDS + shutdown.PROGRAM_REAP_SECONDS
    reaped = ended + shutdown.PROGRAM_GRACE_SECONDS
    assert reaped < shutdown.CALLS_SECONDS


def test_workers_report_while_the_run_may_still_close() -> None:
    assert shutdown.WORKER_REPORT_SECONDS + shutdown.HOOK_SECONDS < shutdown.CLOSE_SECONDS


def test_in_python_an_engine_abandons_its_calls_before_run_sync_gives_up() -> None:
    assert shutdown.ENGINE_GRACE_SECONDS < shutdown.INTERRUPT_SECONDS
    assert inspect.signature(LocalEngine).parameters["grace"].default == shutdown.ENGINE_GRACE_SECONDS


@pytest.mark.parametrize("name", _WRITERS)
def test_no_other_module_has_a_time_of_its_own_for_an_interruption(name) -> None:
    tree = ast.parse((Path(steelyard.__file__).parent / name).read_text())
    assigned = [
        ast.unparse(node)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, float)
    ]
    assert not [text for text in assigned if any(word in text for word in ("GRACE", "PATIENCE", "REAP", "DRAIN"))]


def test_the_driver_takes_its_time_from_the_budget() -> None:
    assert driver.WORKER_REPORT_SECONDS == shutdown.WORKER_REPORT_SECONDS
