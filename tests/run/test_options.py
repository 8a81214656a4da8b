"""The options of a run: given to the Runner or to `run()`, checked before anything is called."""

from __future__ import annotations

import asyncio
import typing
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from steelyard import ConfigurationError, EvalCase, InvocationResponse, Runner, RunOptions, TransientError
from steelyard.cli.run import command as run_command
from steelyard.cli.score import command as score_command
from steelyard.cli.sweep import command as sweep_command
from steelyard.run.config import RUN_KEYS, EngineChoice
from steelyard.run.options import RunChanges, options_of, read_suite_options
from tests.support.engine import make_suite

HELP = {"help_option_names": ["-h", "--help"]}
"""As the group sets them: click keeps the help option of a command's first context."""


def echo(case: EvalCase) -> str:
    return case.prompt or ""


BAD: list[tuple[str, Any, str]] = [
    ("parallelism", 0, r"parallelism must be >= 1, got 0"),
    ("parallelism", -1, r"parallelism must be >= 1, got -1"),
    ("parallelism", True, r"parallelism must be a whole number, got True"),
    ("parallelism", "x", r"parallelism must be a whole number, got 'x'"),
    ("parallelism", 2.0, r"parallelism must be a whole number, got 2.0"),
    ("retries", -1, r"retries must be >= 0, got -1"),
    ("retries", "4", r"retries must be a whole number, got '4'"),
    ("limit", 0, r"limit must be >= 1, got 0"),
    ("limit", "3", r"limit must be a whole number, got '3'"),
    ("seed", None, r"seed must be a whole number, got None"),
    ("seed", 1.5, r"seed must be a whole number, got 1.5"),
    ("timeout", 0, r"timeout must be a number of seconds above 0, got 0"),
    ("timeout", -1.0, r"timeout must be .* got -1.0"),
    ("timeout", float("nan"), r"timeout must be .* got nan"),
    ("timeout", "10", r"timeout must be .* got '10'"),
    ("timeout", True, r"timeout must be .* got True"),
    ("stop_error_rate", 1.5, r"stop_error_rate must be within 0..1, got 1.5"),
    ("stop_error_rate", -0.1, r"stop_error_rate must be within 0..1, got -0.1"),
    ("stop_error_rate", "half", r"stop_error_rate must be within 0..1, got 'half'"),
    ("progress", "loud", r"progress must be one of auto, bar, lines, off, got 'loud'"),
    ("progress", None, r"progress must be one of auto, bar, lines, off, got None"),
    ("progress_bar_stats", {"x": "nonsense"}, r"progress_bar_stats\['x'\].*nonsense"),
    ("progress_bar_stats", 5, r"progress_bar_stats must map .* got 5"),
    ("retry_on", ValueError, r"retry_on must be a tuple of exception classes, got <class 'ValueError'>"),
    ("retry_on", ("ValueError",), r"retry_on must be a tuple of exception classes, got 'ValueError'"),
    ("retry_on", (KeyboardInterrupt,), r"retry_on: KeyboardInterrupt ends a run, it cannot be tried again"),
    ("retry_on", (asyncio.CancelledError,), r"retry_on: CancelledError ends a run"),
    ("retry_on", (BaseException,), r"retry_on: BaseException ends a run"),
    ("low_memory", "yes", r"low_memory must be true or false, got 'yes'"),
    ("output_path", 5, r"output_path must be a path, got 5"),
    ("output_path", "", r"output_path must be a path, got ''"),
    ("match", 5, r"match must be text, got 5"),
    ("paralelism", 5, r"no option is named 'paralelism'; did you mean 'parallelism'\?"),
]


@pytest.mark.parametrize(("name", "value", "said"), BAD)
def test_a_bad_option_is_refused_when_the_runner_is_made_and_its_value_is_named(name, value, said) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Runner(echo, make_suite(1), **{name: value})


@pytest.mark.parametrize(("name", "value", "said"), BAD)
def test_a_bad_option_is_refused_by_run_before_anything_is_called(name, value, said, tmp_path) -> None:
    asked: list[str] = []
    runner = Runner(lambda case: asked.append(case.id) or "x", make_suite(1), output_path=tmp_path / "run")
    with pytest.raises(ConfigurationError, match=said):
        runner.run_sync(**{name: value})
    assert asked == []
    assert list(tmp_path.iterdir()) == []


def test_low_memory_without_an_output_path_is_refused_at_once_in_both_places(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match="low_memory=True needs an output_path"):
        Runner(echo, make_suite(1), low_memory=True)
    with pytest.raises(ConfigurationError, match="low_memory=True needs an output_path"):
        Runner(echo, make_suite(1)).run_sync(low_memory=True)
    runner = Runner(echo, make_suite(1), low_memory=True, output_path=tmp_path / "run")
    with pytest.raises(ConfigurationError, match="low_memory=True needs an output_path"):
        runner.run_sync(output_path=None)


def test_options_given_to_run_count_for_that_run_only() -> None:
    runner = Runner(echo, make_suite(5), limit=3, progress="off")
    assert len(runner.run_sync().responses) == 3
    assert len(runner.run_sync(limit=1).responses) == 1
    assert len(runner.run_sync(limit=None).responses) == 5
    assert len(runner.run_sync().responses) == 3


def test_an_options_struct_can_be_given_whole_and_changed() -> None:
    options = RunOptions(limit=2, progress="off")
    runner = Runner(echo, make_suite(5), options=options, limit=4)
    assert runner.options == RunOptions(limit=4, progress="off")
    assert len(runner.run_sync().responses) == 4
    assert options.limit == 2


def test_run_changes_has_exactly_the_names_and_types_of_run_options() -> None:
    assert list(RunChanges.__annotations__) == list(RunOptions.__struct_fields__)
    assert typing.get_type_hints(RunChanges) == typing.get_type_hints(RunOptions)


def test_options_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        RunOptions().parallelism = 3  # type: ignore[misc]


def test_what_a_manifest_keeps_of_the_options_is_json() -> None:
    kept = RunOptions(retry_on=(ValueError,), output_path="x").for_manifest()
    assert kept["retry_on"] == ["ValueError"]
    assert "output_path" not in kept
    assert msgspec.json.decode(msgspec.json.encode(kept)) == kept


@pytest.mark.parametrize("suite", [None, [], "suite.yaml", [EvalCase(id="a", prompt="p")]])
def test_a_suite_that_is_none_is_refused_and_named(suite) -> None:
    with pytest.raises(ConfigurationError, match=f"suite must be an EvalSet, got {type(suite).__name__}"):
        Runner(echo, suite)


@pytest.mark.parametrize("target", [None, "openai", 5])
def test_a_target_that_is_none_is_refused_when_the_runner_is_made(target) -> None:
    with pytest.raises(ConfigurationError, match="a target must be a callable or have a method `invoke`"):
        Runner(target, make_suite(1))


@pytest.mark.parametrize("likes", [0, -3, None, "many"])
def test_a_target_that_likes_an_impossible_parallelism_is_refused_when_the_runner_is_made(likes) -> None:
    """Without the check the run would have no worker."""

    class Odd:
        model_id = None
        default_parallelism = likes

        def identity(self) -> dict[str, Any]:
            return {}

        async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
            return InvocationResponse()

    with pytest.raises(ConfigurationError, match="parallelism must be"):
        Runner(Odd(), make_suite(1), progress="off")


def test_the_targets_own_parallelism_counts_unless_another_is_given() -> None:
    from steelyard.targets import CallableTarget

    most = now = 0

    async def busy(case: EvalCase) -> str:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return ""

    target = CallableTarget(busy, parallelism=3)
    runner = Runner(target, make_suite(20), progress="off")
    runner.run_sync()
    assert most == 3
    most = 0
    runner.run_sync(parallelism=5)
    assert most == 5


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (1, 2)])
def test_retries_and_retry_on_reach_the_calls(retries, attempts, monkeypatch) -> None:
    from steelyard.engine.retry import RetryPolicy

    monkeypatch.setattr(RetryPolicy, "wait_before", lambda self, attempt: 0.0)

    class Mine(Exception):
        pass

    def fail(case: EvalCase) -> str:
        raise Mine if case.id == "c0" else TransientError("busy")

    result = Runner(fail, make_suite(2), progress="off", retries=retries, retry_on=(Mine,)).run_sync()
    assert [record.attempts for record in result.responses] == [attempts, attempts]


def test_an_output_path_may_be_text_or_a_path(tmp_path) -> None:
    for path in (str(tmp_path / "a"), Path(tmp_path / "b")):
        assert Runner(echo, make_suite(1), output_path=path, progress="off").run_sync().path == Path(path)


FIELDS = options_of(RunOptions)


@pytest.mark.parametrize("name", FIELDS)
def test_every_option_is_declared_with_its_help(name) -> None:
    assert FIELDS[name].option.help.endswith(".")


def test_a_flag_of_run_is_there_for_every_option_that_has_one() -> None:
    flags = {parameter.name: tuple(parameter.opts) for parameter in run_command.params}
    for field in [*FIELDS.values(), *options_of(EngineChoice).values()]:
        if field.option.flags:
            assert flags[field.name] == field.option.flags
        else:
            assert field.name not in flags


@pytest.mark.parametrize("command", [run_command, sweep_command, score_command], ids=lambda command: command.name)
def test_a_derived_flag_that_is_not_given_is_none(command) -> None:
    """So that it leaves alone what the suite says."""
    words = {"run": ["s.yaml"], "sweep": ["s.yaml", "-j", "1"], "score": ["RUN"]}[command.name]
    given = command.make_context(command.name, words, **HELP).params
    derived = [name for name in FIELDS if name in given and (command.name, name) != ("sweep", "parallelism")]
    assert derived
    assert {given[name] for name in derived} <= {None, ()}


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["-j", "auto"], "parallelism", "auto"),
        (["-j", "8"], "parallelism", 8),
        (["--timeout", "2m"], "timeout", 120.0),
        (["--tokens-per-min", "200k"], "tokens_per_min", 200_000),
        (["--stop-error-rate", "20%"], "stop_error_rate", 0.2),
        (["--cache", "answers"], "cache", Path("answers")),
        (["--cache", "sqlite:answers"], "cache", "sqlite:answers"),
        (["--low-memory"], "low_memory", True),
    ],
)
def test_a_flag_is_read_by_the_options_own_parser(words, name, value) -> None:
    assert run_command.make_context("run", ["s.yaml", *words], **HELP).params[name] == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-j", "many"], "'many' is neither a whole number nor auto"),
        (["--timeout", "soon"], "--timeout must be a length of time like"),
        (["--tokens-per-min", "lots"], "--tokens-per-min must be a whole number or a size"),
        (["--stop-error-rate", "5"], "--stop-error-rate must be within 0..1, or 0%..100%"),
    ],
)
def test_a_flag_that_cannot_be_read_is_a_usage_error(words, said) -> None:
    with pytest.raises(click.UsageError) as caught:
        run_command.make_context("run", ["s.yaml", *words], **HELP)
    assert said in caught.value.message


def test_a_suite_files_options_are_read_and_its_paths_are_relative_to_it(tmp_path) -> None:
    given = {
        "timeout": "2m",
        "tokens_per_min": "1k",
        "stop_error_rate": "5%",
        "cache": "c",
        "initial_session_file": "s",
    }
    assert read_suite_options(given, RunOptions, tmp_path) == {
        "timeout": 120.0,
        "tokens_per_min": 1000,
        "stop_error_rate": 0.05,
        "cache": tmp_path / "c",
        "initial_session_file": tmp_path / "s",
    }


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rate", "often", r"rate must be a number above 0 and a unit, like 10/s"),
        ("arrivals", "sometimes", r"arrivals must be like constant:20/s"),
        ("arrivals", "poison:20/s", r"arrivals: unknown kind 'poison'; did you mean 'poisson'\?"),
        ("rate", 5, r"rate must be text like '600/min', got 5"),
    ],
)
def test_a_pace_that_cannot_be_read_is_refused_when_the_options_are_made(name, value, said) -> None:
    with pytest.raises(ConfigurationError, match=said):
        RunOptions(**{name: value})


def test_the_keys_of_a_suite_and_what_run_json_keeps_come_from_the_declarations() -> None:
    assert set(RUN_KEYS) == {
        *(name for name, field in FIELDS.items() if field.option.in_suite),
        *("engine", "ray_address", "workers", "strict_workers"),
    }
    assert set(RunOptions().for_manifest()) == set(FIELDS) - {
        *("output_path", "progress", "progress_bar_stats", "low_memory", "cache", "tracebacks")
    }
