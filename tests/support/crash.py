"""Runs that are killed: a small deterministic model, the moments at which to die, and the driver that forks and kills.

As a program (`python -m tests.support.crash JOBS`) it plays a list of jobs and prints what happened as JSON. A job
is one run directory and a list of launches; each is a forked process of its own, ended by a real SIGKILL or left to
finish. The moments are put in place by patching in the child: the product knows nothing of them.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from steelyard import EvalCase, EvalSet, InvocationResponse
from steelyard.engine.base import CancellationToken
from steelyard.errors import TargetError
from steelyard.journal.files import read_metrics
from steelyard.protocols import Identity, InvocationContext, derived_rng
from steelyard.run.runner import Runner
from tests.support.paths import ROOT

CASES = 300
SEED = 7
LONGEST_SITTING = 30.0

CLOCK_DERIVED = ("active_seconds", "client", "lines", "parallelism", "parallelism_shortfall", "peak_in_flight")
"""Top-level metrics that a clock decides, or how the last launch was run.

With a real model `p50_latency_s` is one too; here it is drawn.
"""

CLOCK_DERIVED_STATS = ("requests_per_minute", "output_tps")
"""Entries of `stats` that a clock decides. With a real model all of `time_*` are too; here they are drawn."""


class LoggedModel:
    """Answers as (seed, case) say, times included, and writes each call down before it answers."""

    model_id = "logged"
    default_parallelism = 12

    def __init__(self, log: Path, *, pause: float = 0.01, error_rate: float = 0.08) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._pause = pause
        self._error_rate = error_rate

    def identity(self) -> Identity:
        return {"kind": "logged"}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        os.write(self._log, f"{case.id}\n".encode())
        rng = derived_rng(context.seed, case.id, context.trial)
        await asyncio.sleep(self._pause * (0.5 + rng.random()))
        if rng.random() < self._error_rate:
            raise TargetError(f"no answer to {case.id}")
        return InvocationResponse(
            response_text=str(case.expected) if rng.random() < 0.8 else "éè\u2028\0 wrong",
            messages=[{"role": "assistant", "content": "x" * rng.randrange(400)}],
            time_to_first_token=rng.random(),
            time_to_last_token=1 + rng.random(),
            time_per_output_token=rng.random() / 100,
            num_tokens_input=rng.randrange(50),
            num_tokens_output=rng.randrange(1, 500),
            stop_reason="stop",
        )


def suite_of(count: int = CASES) -> EvalSet:
    return EvalSet(
        "crash", [EvalCase(id=f"case-{i:03}", prompt=f"What is {i}?", expected=str(i)) for i in range(count)]
    )


def runner_in(directory: Path, log: Path, **changes: Any) -> Runner:
    """The run that every launch of a job is of."""
    return Runner(
        LoggedModel(log),
        suite_of(),
        ["exact"],
        **{"output_path": directory, "seed": SEED, "progress": "off", **changes},
    )


def without_clocks(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics less every field that a clock decides."""
    stats = {name: value for name, value in metrics["stats"].items() if name not in CLOCK_DERIVED_STATS}
    return {name: value for name, value in metrics.items() if name not in CLOCK_DERIVED} | {"stats": stats}


def readable_lines(directory: Path) -> list[dict[str, Any]]:
    """Every line of outputs.jsonl that is a whole JSON object, read with nothing of the product's."""
    try:
        data = (directory / "outputs.jsonl").read_bytes()
    except FileNotFoundError:
        return []
    found = []
    for line in data.split(b"\n"):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def finished_ids(directory: Path) -> list[str]:
    """The cases with a readable ok record."""
    return [line["id"] for line in readable_lines(directory) if line["status"] == "ok"]


# The moments at which a child dies ---------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # the signal may be a moment away


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by `around(original, *args)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def die_around(
    owner: Any, name: str, *, nth: int = 1, after: bool = False, when: Callable[..., bool] | None = None
) -> None:
    """Die before or after the nth call of a function for which `when(*args)` holds."""
    left = [nth]

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        fits = when is None or when(*args)
        left[0] -= fits
        if fits and left[0] == 0 and not after:
            die()
        value = original(*args, **kwargs)
        if fits and left[0] == 0:
            die()
        return value

    wrap(owner, name, around)


def renames(to: str) -> Callable[..., bool]:
    """Whether an os.replace is one that puts a file of this name into place."""
    return lambda source, target: Path(target).name == to and Path(target).parent.parent.name != "previous"


def called_by(function: str) -> Callable[..., bool]:
    """Whether the patched function was called by the product's function of this name."""

    def called(*_: object) -> bool:
        frame = sys._getframe(3)
        return frame.f_code.co_name == function and "steelyard" in frame.f_code.co_filename

    return called


def _mid_append(nth: int) -> None:
    from steelyard.journal.writer import JournalWriter

    def around(original: Callable[..., Any], writer: Any, line: bytes) -> int:
        if (left := left_over.pop()) == 1:
            os.write(writer._descriptor, line[: len(line) // 2])
            die()
        left_over.append(left - 1)
        return original(writer, line)

    left_over = [nth]
    wrap(JournalWriter, "append", around)


def _before_commit(nth: int) -> None:
    """Nothing is ever committed, and then the process dies just after an append."""
    from steelyard.journal.writer import JournalWriter

    wrap(JournalWriter, "_commit", lambda original, writer: None)
    die_around(JournalWriter, "append", nth=nth, after=True)


def _mid_index_rows(nth: int) -> None:
    """The nth group of index rows stops in the middle of its first row."""
    written_here = called_by("_write_rows")
    left_over = [nth]

    def around(original: Callable[..., Any], descriptor: int, data: bytes) -> int:
        if written_here():
            left_over[0] -= 1
            if not left_over[0]:
                original(descriptor, data[:13])
                die()
        return original(descriptor, data)

    wrap(os, "write", around)


def _in(module: str, name: str, **how: Any) -> Callable[[int], None]:
    """Die around a function of a module (or `module:Class`), found only in the child."""

    def install(nth: int) -> None:
        place, _, inner = module.partition(":")
        owner: Any = __import__(place, fromlist=["_"])
        die_around(getattr(owner, inner) if inner else owner, name, nth=nth, **how)

    return install


POINTS: dict[str, Callable[[int], None]] = {
    "before append": _in("steelyard.journal.writer:JournalWriter", "append"),
    "in the middle of a line": _mid_append,
    "after append, before commit": _before_commit,
    "before a commit's sync": _in("steelyard.journal.writer", "_sync"),
    "after a commit's sync, before its index rows": _in("steelyard.journal.writer", "_sync", after=True),
    "in the middle of an index row": _mid_index_rows,
    "before metrics are composed": _in("steelyard.run.execution", "compose"),
    "before metrics.json is renamed": _in("os", "replace", when=renames("metrics.json")),
    "after metrics.json is renamed": _in("os", "replace", when=renames("metrics.json"), after=True),
    "before partial.json is renamed": _in("os", "replace", when=renames("partial.json")),
    "after partial.json is renamed": _in("os", "replace", when=renames("partial.json"), after=True),
    "between metrics.json and the end of partial.json": _in(
        "pathlib:Path", "unlink", when=lambda path, *_: path.name == "partial.json"
    ),
    "after the lock is taken": _in("steelyard.journal.lock:RunLock", "acquire", after=True),
    "after the torn line is cut, before the sync": _in("os", "fsync", when=called_by("repair_tail")),
    "after the torn line is repaired": _in("steelyard.run.directory", "repair_tail", after=True),
    "in the middle of the replay": _in("steelyard.journal.replay", "pack_row"),
    "before the index is renamed": _in("os", "replace", when=renames("outputs.idx")),
    "between the index and the writer": _in("os", "replace", when=renames("outputs.idx"), after=True),
    "between the writer and the manifest": _in("steelyard.run.directory", "write_manifest"),
    "before the manifest is renamed": _in("os", "replace", when=renames("run.json")),
    "after the manifest": _in("steelyard.run.directory", "write_manifest", after=True),
    "before a move": _in("os", "replace", when=called_by("move_aside")),
    "after a move": _in("os", "replace", when=called_by("move_aside"), after=True),
    "in the middle of a salvage": _in("steelyard.journal.reader", "_dealt_with", when=called_by("rewrite")),
    "before a salvage is renamed": _in("os", "replace", when=renames("outputs.jsonl")),
    "after a salvage is renamed": _in("os", "replace", when=renames("outputs.jsonl"), after=True),
}


# The driver --------------------------------------------------------------------------------------------------------


def play(jobs: list[dict[str, Any]], *, drivers: int = 4) -> list[list[dict[str, Any]]]:
    """What happened in each launch of each job; several driver processes share the jobs."""
    shares = [jobs[start::drivers] for start in range(drivers)]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.crash", json.dumps(share)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in shares
        if share
    ]
    told = [json.loads(process.communicate()[0]) for process in running]
    return [told[number % drivers][number // drivers] for number in range(len(jobs))]


def _play_job(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Its launches in turn; those whose run has already come to its end fall away unless they mean to reopen it."""
    directory, log = Path(job["directory"]), Path(job["log"])
    told: list[dict[str, Any]] = []
    for launch in job["launches"]:
        if read_metrics(directory) is None or "entry" in launch:
            told.append(_play_launch(directory, log, launch))
    return told


def _play_launch(directory: Path, log: Path, launch: dict[str, Any]) -> dict[str, Any]:
    """Damage what is to be damaged, fork, kill or wait, and say what was called and what had finished before."""
    if "damage" in launch:
        _damage(directory / "outputs.jsonl", **launch["damage"])
    finished = finished_ids(directory)
    calls_before = log.stat().st_size if log.exists() else 0
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        _sit(directory, log, launch)
    status = _kill_after(pid, launch.get("seconds", LONGEST_SITTING))
    called = log.read_bytes()[calls_before:].decode().split() if log.exists() else []
    return {
        "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
        "exit": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "finished_before": finished,
        "called": called,
        "lines": len(readable_lines(directory)),
        "seconds": time.monotonic() - began,
    }


def _sit(directory: Path, log: Path, launch: dict[str, Any]) -> None:
    """One launch in the forked child, which never returns."""
    code = 1
    try:
        runner = runner_in(directory, log, parallelism=launch.get("parallelism", 12), low_memory=True)
        if "cancel_after" in launch:
            runner.token = CancellationToken()
            _cancel_after(runner.token, launch["cancel_after"])
        if "point" in launch:
            POINTS[launch["point"]](launch.get("nth", 1))
        runner.run_sync(**launch.get("entry", {}))
        code = 0
    except BaseException as error:
        print(f"{launch}: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def _cancel_after(token: CancellationToken, records: int) -> None:
    from steelyard.journal.writer import JournalWriter

    left = [records]

    def around(original: Callable[..., Any], *args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            token.cancel("enough")
        return original(*args)

    wrap(JournalWriter, "append", around)


def _kill_after(pid: int, seconds: float) -> int:
    """The child's wait status; it is killed when it is still there after so many seconds."""
    deadline = time.monotonic() + seconds
    for pause in _pauses(deadline):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(pause)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _pauses(deadline: float) -> Iterator[float]:
    while (left := deadline - time.monotonic()) > 0:
        yield min(left, 0.002)


def _damage(path: Path, *, kind: str, line: int = 1) -> None:
    """Spoil a journal as a crash or a bad disk would."""
    data = path.read_bytes()
    if kind == "torn":
        path.write_bytes(data[:-20])
    else:
        lines = data.split(b"\n")
        lines[line] = b"\0" * len(lines[line])
        path.write_bytes(b"\n".join(lines))


if __name__ == "__main__":
    print(json.dumps([_play_job(job) for job in json.loads(sys.argv[1])]))
