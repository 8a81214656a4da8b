"""Hooks: what they are called with, and that a slow, hanging or broken one changes nothing."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import pytest

from steelyard import CancellationToken, ConfigurationError, EvalCase, EvalSet, Hook, Record, Result, RunInfo, Runner
from steelyard.run import hooks as module
from steelyard.run.config import build_suite
from steelyard.suite.suite_file import SuiteError


class Noting(Hook):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def on_start(self, run: RunInfo) -> None:
        self.events.append(("start", run))

    def on_record(self, record: Record) -> None:
        self.events.append(("record", record.id))

    def on_error(self, record: Record) -> None:
        self.events.append(("error", record.id))

    def on_end(self, result: Result) -> None:
        self.events.append(("end", result.complete))

    def on_failure(self, error: BaseException) -> None:
        self.events.append(("failure", type(error).__name__))

    def of(self, kind: str) -> list[object]:
        return [value for event, value in self.events if event == kind]


def suite(count: int) -> EvalSet:
    return EvalSet("s", [EvalCase(id=f"c{number}", prompt="p", expected="p") for number in range(count)])


def answer(case: EvalCase) -> str:
    if case.id == "c1":
        raise ValueError("no")
    return "p"


def runner(*hooks: object, count: int = 3, target: object = answer, **options) -> Runner:
    return Runner(target, suite(count), ["exact"], hooks=hooks, progress="off", retries=0, **options)


def test_a_hook_sees_the_start_every_record_every_error_and_the_end(tmp_path) -> None:
    hook = Noting()
    runner(hook, output_path=tmp_path / "run").run_sync()
    [about] = hook.of("start")
    assert about == RunInfo(suite="s", path=(tmp_path / "run").absolute(), model_id=None, planned=3, done_before=0)
    assert sorted(hook.of("record")) == ["c0", "c1", "c2"]
    assert hook.of("error") == ["c1"]
    assert hook.of("end") == [True]
    assert hook.events[0][0] == "start"
    assert hook.events[-1][0] == "end"


def test_the_metrics_are_written_before_the_end_is_told(tmp_path) -> None:
    found = []

    class Ending:
        def on_end(self, result: Result) -> None:
            found.append((result.path / "metrics.json").is_file())

    runner(Ending(), output_path=tmp_path / "run").run_sync()
    assert found == [True]


def test_a_resumed_run_tells_what_was_done_and_only_its_own_records(tmp_path) -> None:
    token = CancellationToken()

    class Stopping:
        def on_record(self, record: Record) -> None:
            token.cancel("enough")

    blocked = [True]

    async def slow(case: EvalCase) -> str:
        if case.id != "c0" and blocked:
            await asyncio.Event().wait()
        return "p"

    first, second = Noting(), Noting()
    result = runner(first, Stopping(), target=slow, output_path=tmp_path / "run", token=token).run_sync()
    assert result.cancelled
    assert first.of("end") == [False]
    blocked.clear()
    runner(second, target=slow, output_path=tmp_path / "run").run_sync()
    [about] = second.of("start")
    assert about.done_before == 1
    assert sorted(second.of("record")) == ["c1", "c2"]


def test_what_a_hook_raises_is_reported_once_and_changes_nothing(tmp_path, caplog) -> None:
    class Broken(Hook):
        name = "broken"

        def on_record(self, record: Record) -> None:
            raise RuntimeError("the \x1b[31mdatabase\x1b[0m is gone")

        def on_end(self, result: Result) -> None:
            raise SystemExit(7)

    with caplog.at_level(logging.WARNING, "steelyard"):
        result = runner(Broken(), output_path=tmp_path / "run").run_sync()
    assert result.complete
    messages = [record.getMessage() for record in caplog.records if "hook" in record.getMessage()]
    assert len(messages) == 2
    assert messages[0].startswith("hook broken failed in on_record: RuntimeError: the ")
    assert "\x1b" not in messages[0]
    assert messages[1] == "hook broken failed 4 times in all"


def test_a_hook_that_hangs_is_abandoned_and_the_run_is_complete(caplog) -> None:
    never = threading.Event()

    class Hanging(Hook):
        end_seconds = 0.05

        def on_start(self, run: RunInfo) -> None:
            never.wait()

    try:
        with caplog.at_level(logging.WARNING, "steelyard"):
            assert runner(Hanging()).run_sync().complete
    finally:
        never.set()
    assert "hook Hanging had not finished 0.05 s after the run: it is abandoned" in caplog.messages


def test_a_slow_hook_misses_records_and_the_run_says_how_many(monkeypatch, caplog) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 5)
    go = threading.Event()

    class Slow(Noting):
        def on_start(self, run: RunInfo) -> None:
            go.wait(30)

        def on_end(self, result: Result) -> None:
            super().on_end(result)

    class Opening(Hook):
        """Lets the slow one go when the run is over."""

        def on_end(self, result: Result) -> None:
            go.set()

    slow = Slow()
    with caplog.at_level(logging.WARNING, "steelyard"):
        runner(slow, Opening(), count=20).run_sync()
    told = len(slow.of("record")) + len(slow.of("error"))
    assert told == 5
    assert slow.of("end") == [True]
    assert "hook Slow missed 16 records: it was slower than the run" in caplog.messages


def test_a_run_waits_for_a_hook_that_is_to_see_all(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    behind = []

    class All(Noting):
        sees_all = True

        def on_record(self, record: Record) -> None:
            behind.append(len(self.events))
            super().on_record(record)

    hook = All()
    runner(hook, count=200, parallelism=4).run_sync()
    assert len(hook.of("record")) == 200


def test_an_async_hook_is_awaited() -> None:
    seen = []

    class Async:
        async def on_record(self, record: Record) -> None:
            await asyncio.sleep(0)
            seen.append(record.id)

    runner(Async()).run_sync()
    assert sorted(seen) == ["c0", "c1", "c2"]


def test_a_run_that_fails_tells_why(tmp_path, monkeypatch) -> None:
    from steelyard.run.directory import RunDirectory

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunDirectory, "write_metrics", full)
    hook = Noting()
    with pytest.raises(OSError, match="No space left"):
        runner(hook, output_path=tmp_path / "run").run_sync()
    assert hook.of("failure") == ["OSError"]
    assert hook.of("end") == []


def test_a_refused_run_calls_no_hook(tmp_path) -> None:
    hook = Noting()
    runner(output_path=tmp_path / "run").run_sync()
    with pytest.raises(Exception, match="complete"):
        runner(hook, output_path=tmp_path / "run").run_sync()
    assert hook.events == []


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (Noting, "hook Noting is a class: give an instance, Noting"),
        (object(), "hook object has none of the methods on_start, on_record"),
    ],
)
def test_what_is_no_hook_is_refused(hook, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        runner(hook)


_SUITE = """
target: simulated
cases: [{id: a, prompt: p}]
scorers: [exact]
hooks:
%s
"""


def built(folder: Path, text: str):
    (folder / "mine.py").write_text(
        "class Mine:\n    def __init__(self, tag='x'):\n        self.tag = tag\n    def on_end(self, result):\n"
        "        pass\n\nready = Mine('ready')\n"
    )
    path = folder / "suite.yaml"
    path.write_text(_SUITE % text)
    return build_suite(path).hooks


def test_a_suite_file_names_hooks_of_its_own(tmp_path) -> None:
    made = built(
        tmp_path,
        "  - python: mine.py:Mine\n  - python: {class: 'mine.py:Mine', tag: y}\n  - python: mine.py:ready\n"
        "  - webhook: {url: 'http://127.0.0.1:9/x'}\n",
    )
    assert [getattr(hook, "tag", None) for hook in made] == ["x", "y", "ready", None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  - nothing\n", r"hooks\[0\]: no hook is named 'nothing'; known here: mlflow, webhook"),
        ("  - webhook: {url: 'ftp://x'}\n", r"hooks\[0\].webhook: a webhook's url must start with http"),
        ("  - webhook: {link: 'http://x'}\n", r"hooks\[0\].webhook.link"),
        ("  - webhook: {url: 'http://x', events: [finish]}\n", "events are a list of start, record"),
        ("  - python: {class: 'mine.py:ready', tag: y}\n", "that is a hook already"),
        ("  - python: mine.py\n", r"hooks\[0\].python must be file.py:name"),
    ],
)
def test_a_mistake_in_a_suite_files_hooks_is_named(tmp_path, text, message) -> None:
    with pytest.raises(SuiteError, match=message):
        built(tmp_path, text)
