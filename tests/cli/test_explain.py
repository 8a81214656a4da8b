"""`steelyard explain` prints each section of the troubleshooting page, and errors name sections that are there."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import click
import pytest

from steelyard import EvalCase, EvalSet, Runner, errors
from steelyard.cli.explain import command, topics
from steelyard.cli.output import with_topic
from steelyard.cli.run_control import _TOPICS, errors_topic
from steelyard.errors import ConfigurationError, JournalError, RunLocked, SteelyardError, SuiteError, topic_of
from tests.support.cli import Workshop, run_cli
from tests.support.paths import ROOT

DEFINED_ELSEWHERE = (
    "steelyard.cache.store",
    "steelyard.engine.workers.driver",
    "steelyard.patterns",
    "steelyard.scoring.tests",
    "steelyard.transport.errors",
)


def error_classes() -> list[type[SteelyardError]]:
    modules = [errors, *map(import_module, DEFINED_ELSEWHERE)]
    found = {one for module in modules for one in vars(module).values() if inspect.isclass(one)}
    return sorted((one for one in found if issubclass(one, SteelyardError)), key=lambda one: one.__name__)


def test_the_page_of_the_docs_is_what_the_package_holds() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    source = (ROOT / "src" / "steelyard" / "cli" / "troubleshooting.md").read_text(encoding="utf-8")
    assert page == source, "docs/troubleshooting.md is out of date: make docs"


def test_every_section_of_the_page_is_a_topic_with_a_text() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert [topic.title for topic in topics().values()] == re.findall(r"^##+ (.+)$", page, flags=re.M)
    assert len(re.findall("<a id=", page)) == len(topics())
    assert [topic.name for topic in topics().values() if len(topic.text) < 30] == []


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_every_error_has_a_topic_that_is_there(kind: type[SteelyardError]) -> None:
    assert kind.topic in topics()


def test_every_topic_that_the_code_names_is_there() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r'\btopic ?= ?"([\w-]+)"', source)) | set(
        re.findall(r'with_topic\([^)]+, "(\S+)"\)', source)
    )
    assert len(named) > 25
    assert named - set(topics()) == set()


@pytest.mark.parametrize("name", topics())
def test_each_topic_is_printed(tmp_path: Path, name: str) -> None:
    ended = run_cli(tmp_path, "explain", name)
    assert ended.code == 0
    title, text = topics()[name].title, re.sub(r"\[([^]]+)\]\((.+?\.md).*?\)", r"\1 (docs/\2)", topics()[name].text)
    assert ended.out.split() == [*title.split(), *text.split()]


def test_without_a_topic_all_are_listed(tmp_path: Path) -> None:
    ended = run_cli(tmp_path, "explain")
    assert ended.code == 0
    assert re.findall(r"^  ([\w-]+)", ended.out, flags=re.M) == list(topics())
    assert 'locked            "is being written by process"' in ended.out


def test_no_line_is_wider_than_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for words in (["explain"], ["explain", "api-key"], ["explain", "connection"]):
        assert max(map(len, run_cli(tmp_path, *words).out.splitlines())) <= 60


def test_a_link_is_the_name_of_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert "Calibration (docs/calibration.md) removes" in run_cli(tmp_path, "explain", "uncalibrated").out


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lockd", "the nearest: locked"),
        ("LOCKED-", "the nearest: locked"),
        ("429", "it is mentioned in: rate-limited"),
        ("xyzzy", "steelyard explain lists all topics"),
    ],
)
def test_an_unknown_topic_is_exit_2_with_the_nearest(tmp_path: Path, name: str, hint: str) -> None:
    ended = run_cli(tmp_path, "explain", name)
    assert (ended.code, ended.out) == (2, "")
    assert hint in ended.err


def test_a_shell_completes_topics() -> None:
    (argument,) = command.params
    offered = argument.shell_complete(click.Context(command), "un")
    assert [one.value for one in offered] == ["unknown-key", "unknown-name", "unauthorized", "uncalibrated", "unscored"]


def test_an_error_names_its_own_topic_or_that_of_its_cause() -> None:
    locked = RunLocked("locked", path="x", pid=1, host="h")
    assert topic_of(locked) == "locked"
    assert topic_of(ConfigurationError("x must be >= 1")) is None
    assert topic_of(SuiteError("x must be >= 1", path="suite.yaml")) is None
    assert topic_of(ValueError("x")) is None
    assert topic_of(ConfigurationError("no key", topic="api-key")) == "api-key"
    wrapped = SuiteError("target: no key", path="suite.yaml")
    wrapped.__cause__ = ConfigurationError("no key", topic="api-key")
    assert topic_of(wrapped) == "api-key"
    wrapped.__cause__ = wrapped  # after `raise error from error`
    assert topic_of(wrapped) is None
    assert topic_of(JournalError(28, "cannot write x: No space left on device")) == "disk"


def test_a_message_without_a_topic_stays_as_it_is() -> None:
    assert with_topic("a", None) == "a"
    assert with_topic("a", "locked") == "a\nMore: steelyard explain locked"


def test_the_command_line_names_the_topic_last(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.suite(run={"paralelism": 5})
    ended = run_cli(tmp_path, "run", "suite.yaml")
    assert ended.code == 2
    assert ended.err.endswith("\nMore: steelyard explain unknown-key\n")
    ended = run_cli(tmp_path, "run", "suite.yaml", "--set", "run={}", "--set", "target=nobody")
    assert ended.err.endswith("\nMore: steelyard explain unknown-name\n")


def test_messages_in_python_name_no_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        errors.reject_unknown({"a": 1}, ["b"])
    assert "steelyard explain" not in str(caught.value)


@pytest.mark.parametrize(
    ("kinds", "topic"),
    [
        ({"404 not found": 60}, "not-found"),
        ({"503 unavailable": 3}, "retries"),
        ({"cannot connect": 3, "timeout": 2}, "connection"),
        ({"timeout": 1, "404 not found": 1}, "errors"),
        ({"ValueError": 5}, "errors"),
        ({}, "could-not-score"),
    ],
)
def test_the_section_about_the_errors_is_that_of_the_kind_that_most_are_of(kinds: dict[str, int], topic: str) -> None:
    metrics = Runner(lambda case: "", EvalSet("one", [EvalCase(prompt="p")]), progress="off").run_sync().typed_metrics
    metrics.error_kinds = kinds
    assert errors_topic(metrics) == topic
    assert topic in topics()


def test_every_section_about_a_kind_of_error_is_there() -> None:
    assert set(_TOPICS.values()) <= topics().keys()
