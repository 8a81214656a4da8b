"""A folder with a suite whose every call is written down, and two doors to run it: the command line and Python."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from steelyard.cli.main import main
from steelyard.errors import SteelyardError
from steelyard.run.config import build_suite
from steelyard.run.options import RunOptions
from steelyard.run.runner import Runner

STEELYARD = Path(sys.executable).with_name("steelyard")

AGENT = """
from pathlib import Path

HERE = Path(__file__).parent


def listed(name):
    place = HERE / name
    return place.read_text().split() if place.exists() else []


def answer(case):
    with open(HERE / "calls.txt", "a") as calls:
        calls.write(case.id + "\\n")
    if case.id in listed("failing.txt"):
        raise ValueError(f"told to fail on {case.id}")
    return case.prompt.upper()


def shout(case, response):
    with open(HERE / "scored.txt", "a") as scored:
        scored.write(case.id + "\\n")
    if case.id in listed("unscorable.txt"):
        raise RuntimeError(f"cannot score {case.id}")
    return response.response_text.isupper()
"""


ENTRY_FLAGS = ("force", "retry_errors", "salvage", "accept_edits")
"""What a run may be told about a directory that is not empty, by the same name in Python and as a flag."""


class Ended(msgspec.Struct, kw_only=True):
    """How a command ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str


class Outcome(msgspec.Struct, kw_only=True):
    """What came of a run: its metrics, or why it was refused; and what was said on the way."""

    metrics: dict[str, Any] | None = None
    refusal: str | None = None
    code: int | None = None
    error: SteelyardError | None = None
    said: str = ""

    @property
    def done(self) -> dict[str, Any]:
        """The metrics of a run that was not refused."""
        assert self.metrics is not None, self.refusal
        return self.metrics


class Workshop:
    """A folder with `suite.yaml`, six cases `c0`..`c5` and an agent that notes whom it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "RUN"
        self.agent(AGENT)
        self.suite()

    def agent(self, source: str) -> None:
        """Write agent.py."""
        (self.folder / "agent.py").write_text(textwrap.dedent(source))

    def suite(
        self,
        ids: str = "c0 c1 c2 c3 c4 c5",
        *,
        prompts: dict[str, str] | None = None,
        target: Any = None,
        scorers: Any = ("exact",),
        **more: Any,
    ) -> Path:
        """Write suite.yaml: each case's prompt is its id, unless given."""
        prompts = prompts or {}
        cases = [
            {"id": one, "prompt": prompts.get(one, one), "expected": prompts.get(one, one).upper()}
            for one in ids.split()
        ]
        document = {
            "id": "shouting",
            "target": target or {"python": "agent.py:answer"},
            "cases": cases,
            "scorers": list(scorers),
            **more,
        }
        path = self.folder / "suite.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), encoding="utf-8")
        return path

    def failing(self, ids: str) -> None:
        """Which cases the agent fails on from now."""
        (self.folder / "failing.txt").write_text(ids)

    def unscorable(self, ids: str) -> None:
        """Which cases the scorer `shout` raises on from now."""
        (self.folder / "unscorable.txt").write_text(ids)

    def asked(self) -> list[str]:
        """Whom the agent was asked for since this was last looked at, in order."""
        return self._taken("calls.txt")

    def scored(self) -> list[str]:
        """What the scorer `shout` looked at since this was last looked at, in order."""
        return self._taken("scored.txt")

    def _taken(self, name: str) -> list[str]:
        place = self.folder / name
        words = place.read_text().split() if place.exists() else []
        place.unlink(missing_ok=True)
        return words

    def cut_back(self, lines: int) -> None:
        """Make the run look like one that was killed after so many records."""
        outputs = self.run / "outputs.jsonl"
        outputs.write_bytes(b"".join(outputs.read_bytes().splitlines(keepends=True)[:lines]))
        (self.run / "metrics.json").unlink()

    def metrics(self) -> dict[str, Any]:
        """What metrics.json says."""
        return dict(json.loads((self.run / "metrics.json").read_bytes()))

    def lines(self) -> list[dict[str, Any]]:
        """The records in outputs.jsonl."""
        return [json.loads(line) for line in (self.run / "outputs.jsonl").read_bytes().splitlines()]

    def by_command(self, **flags: Any) -> Outcome:
        """Run the suite through the command line, into RUN."""
        words = [word for name, value in flags.items() for word in _as_flag(name, value)]
        ended = run_cli(self.folder, "run", "suite.yaml", "--out", "RUN", "--json", "--no-progress", *words)
        metrics = json.loads(ended.out) if ended.out else None
        return Outcome(metrics=metrics, refusal=ended.err if ended.code == 2 else None, code=ended.code, said=ended.err)

    def by_python(self, *, update: bool = False, **options: Any) -> Outcome:
        """Run the suite through Runner, into RUN."""
        entry = {name: options.pop(name) for name in ENTRY_FLAGS if name in options}
        with alone(self.folder), heard() as said:
            built = build_suite("suite.yaml")
            given = {"progress": "off", **built.options, **options, "output_path": "RUN"}
            runner = Runner(built.target, built.suite, built.scorers, options=RunOptions(**given))
            try:
                result = runner.run_sync(if_complete="update" if update else "error", **entry)
            except SteelyardError as error:
                return Outcome(refusal=str(error), error=error, said=said.getvalue())
            return Outcome(metrics=result.metrics, said=said.getvalue())


Door = Callable[..., Outcome]


def run_cli(folder: Path, *words: str | Path) -> Ended:
    """The command line, in this process, standing in `folder`."""
    with alone(folder), capture() as (out, err):
        try:
            main([str(word) for word in words])
        except SystemExit as ending:
            code = ending.code
    assert isinstance(code, int)
    return Ended(code=code, out=out.getvalue(), err=err.getvalue())


@contextlib.contextmanager
def capture() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Take what is written to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


@contextlib.contextmanager
def heard() -> Iterator[io.StringIO]:
    """Take what the library logs."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    log = logging.getLogger("steelyard")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Stand in `folder`, and afterwards leave the process as it was: path, modules, signals, log."""
    log = logging.getLogger("steelyard")
    path, modules, place = list(sys.path), set(sys.modules), os.getcwd()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    logging_before = (list(log.handlers), log.propagate, log.level)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(place)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]
        for number, handler in handlers.items():
            signal.signal(number, handler)
        log.handlers[:], log.propagate = logging_before[0], logging_before[1]
        log.setLevel(logging_before[2])


def start(folder: Path, *words: str | Path, **environment: str) -> subprocess.Popen[str]:
    """The real program, in a process of its own, standing in `folder`."""
    return subprocess.Popen(
        [STEELYARD, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
    )


def finish(process: subprocess.Popen[str], timeout: float = 60) -> Ended:
    """Wait for a started program to end by itself."""
    out, err = process.communicate(timeout=timeout)
    return Ended(code=process.returncode, out=out, err=err)


def wait_until(true: Callable[[], bool], seconds: float = 30) -> None:
    """Return as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def _as_flag(name: str, value: Any) -> list[str]:
    flag = {"match": "-k"}.get(name, "--" + name.replace("_", "-"))
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, str(value)]
