"""A program as a target: its input, and how its answer is read."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import EvalSet, Runner
from steelyard import subprocesses as process_module
from steelyard.errors import ConfigurationError, TargetError, TransientError
from steelyard.protocols import InvocationContext, Target
from steelyard.records import EvalCase, InvocationResponse
from steelyard.targets import Command
from steelyard.targets.command import MALFORMED, _from_text, read_json

CASE = EvalCase(id="fr", prompt="Capital of France?", expected="Paris", metadata={"level": 1})
CONTEXT = InvocationContext(case_id="fr", trial=2, attempt=3, seed=7)


def ask(command: Command, case: EvalCase = CASE) -> InvocationResponse:
    return asyncio.run(command.invoke(case, CONTEXT))


def shell(script: str, **options: Any) -> Command:
    return Command(["/bin/sh", "-c", script], **options)


def printing(text: str | bytes, tmp_path: Path, **options: Any) -> Command:
    """A command whose stdout is exactly this."""
    file = tmp_path / "printed"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Command(["/bin/cat", str(file)], **options)


def test_a_command_is_a_target() -> None:
    command = Command("/bin/cat", model_id="m", parallelism=4)
    assert isinstance(command, Target)
    assert (command.model_id, command.default_parallelism) == ("m", 4)
    assert Command("/bin/cat").default_parallelism == 1


def test_the_program_reads_every_field_of_the_case_and_which_try_it_is() -> None:
    payload = json.loads(ask(Command("/bin/cat")).response_text)
    assert payload == {
        "id": "fr",
        "prompt": "Capital of France?",
        "messages": None,
        "system_prompt": None,
        "tools": None,
        "expected": "Paris",
        "expected_trajectory": None,
        "metadata": {"level": 1},
        "limits": None,
        "group": None,
        "trial": 2,
        "attempt": 3,
        "seed": 7,
    }


@pytest.mark.parametrize("prompt", ["naïve 日本 🐈", "line\nbreak \0 nul", "lone \ud800 surrogate", ""])
def test_any_prompt_reaches_the_program_unchanged(prompt) -> None:
    case = EvalCase(id="x", prompt=prompt)
    assert json.loads(ask(Command("/bin/cat"), case).response_text)["prompt"] == prompt


@pytest.mark.parametrize(
    ("printed", "text"),
    [("hi\n", "hi"), ("hi", "hi"), ("hi\n\n", "hi\n"), ("hi\r\n", "hi"), ("\n", ""), (" é 日\n", " é 日")],
)
def test_text_is_kept_as_it_is_but_for_one_newline_at_the_end(printed, text, tmp_path) -> None:
    response = ask(printing(printed, tmp_path))
    assert response.response_text == text
    assert response.error is None


def test_times_and_prompt_are_filled_in() -> None:
    response = ask(shell("echo early; sleep 0.2; echo late"))
    assert response.response_text == "early\nlate"
    assert 0 < response.time_to_first_token < response.time_to_last_token - 0.02
    assert response.input_prompt == CASE.prompt
    assert response.request_time is not None
    assert response.time_per_output_token is None


def test_a_json_answer_fills_the_response_and_what_it_says_stands(tmp_path) -> None:
    answer = {
        "response_text": "Paris",
        "time_to_first_token": 0.5,
        "time_to_last_token": 2.5,
        "num_tokens_output": 5,
        "stop_reason": "stop",
        "messages": [{"role": "assistant", "content": "Paris"}],
    }
    response = ask(printing(json.dumps(answer), tmp_path, output="json"))
    assert {name: getattr(response, name) for name in answer} == answer
    assert response.time_per_output_token == 0.5
    assert response.error is None


def test_a_json_answer_without_times_has_only_the_time_that_can_be_measured(tmp_path) -> None:
    """The first byte of a document is not the first token of an answer."""
    response = ask(printing('{"response_text": "x", "num_tokens_output": 9}', tmp_path, output="json"))
    assert response.time_to_last_token > 0
    assert response.time_to_first_token is None
    assert response.time_per_output_token is None


def test_a_json_answer_may_be_an_error_of_its_own(tmp_path) -> None:
    response = ask(printing('{"error": "no quota", "error_type": "Quota"}', tmp_path, output="json"))
    assert (response.response_text, response.error, response.error_type) == (None, "no quota", "Quota")


@pytest.mark.parametrize(
    ("printed", "error"),
    [
        ('{"response_txt": "x"}', "unknown key 'response_txt'; did you mean 'response_text'"),
        ('{"zzz": 1, "response_text": "x"}', "unknown key 'zzz'$"),
        ("{}", "must have `response_text` or `error`"),
        ("[1]", "must be a JSON object, got list"),
        ('{"response_text": 5}', r"bad field: .*response_text"),
        ('{"response_text": "x"', "not JSON"),
        ("Traceback (most recent call last)", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_malformed_json_is_an_error_and_what_came_back_is_kept(printed, error, tmp_path) -> None:
    response = ask(printing(printed, tmp_path, output="json"))
    assert response.error_type == MALFORMED
    assert response.response_text == printed
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(response.error)


@pytest.mark.parametrize("output", ["text", "json"])
def test_bytes_that_are_not_utf8_are_an_error_and_the_readable_part_is_kept(output, tmp_path) -> None:
    response = ask(printing(b'{"response_text": "caf\xe9 ok"}', tmp_path, output=output))
    assert response.error is not None
    assert response.error_type == MALFORMED
    assert response.response_text == '{"response_text": "caf� ok"}'


@given(st.binary(min_size=1, max_size=200))
def test_no_output_at_all_can_make_reading_it_crash(stdout) -> None:
    for read in (_from_text, read_json):
        response = read(stdout)
        assert response.response_text is not None or response.error is not None


def test_a_failing_program_is_an_error_with_its_code_and_stderr() -> None:
    with pytest.raises(TargetError, match=r"/bin/sh exited with code 3: no such model$"):
        ask(shell("echo half an answer; echo no such model >&2; exit 3"))


def test_a_failing_program_that_says_nothing_is_an_error_with_its_code() -> None:
    with pytest.raises(TargetError, match=r"exited with code 1$"):
        ask(shell("exit 1"))


def test_a_program_that_dies_of_a_signal_is_an_error_with_the_signals_name() -> None:
    with pytest.raises(TargetError, match="was killed by SIGSEGV"):
        ask(shell("kill -SEGV $$"))


def test_a_failing_program_is_not_a_transient_fault() -> None:
    with pytest.raises(TargetError) as caught:
        ask(shell("exit 1"))
    assert not isinstance(caught.value, TransientError)


def test_no_output_with_exit_code_0_is_an_error() -> None:
    with pytest.raises(TargetError, match=r"wrote nothing to stdout: why$"):
        ask(shell("echo why >&2"))


def test_megabytes_of_stderr_do_not_block_the_program_and_only_the_end_is_kept() -> None:
    noise = "head -c 5000000 /dev/zero | tr '\\0' x >&2"
    assert ask(shell(f"{noise}; echo answer")).response_text == "answer"
    with pytest.raises(TargetError) as caught:
        ask(shell(f"{noise}; echo the end >&2; exit 1"))
    assert str(caught.value).endswith("xxxthe end")
    assert 2000 < len(str(caught.value)) < 2200


def test_too_much_output_is_an_error_and_the_program_is_ended() -> None:
    with pytest.raises(TargetError, match="wrote more than 1000 bytes to stdout and was ended"):
        asyncio.run(asyncio.wait_for(Command("yes", max_output_bytes=1000).invoke(CASE, CONTEXT), timeout=10))


def test_output_of_exactly_the_limit_is_fine(tmp_path) -> None:
    assert len(ask(printing("x" * 1000, tmp_path, max_output_bytes=1000)).response_text) == 1000
    with pytest.raises(TargetError, match="more than 999 bytes"):
        ask(printing("x" * 1000, tmp_path, max_output_bytes=999))


def test_a_program_that_never_reads_its_stdin_answers_all_the_same() -> None:
    case = EvalCase(id="big", prompt="x" * 1_000_000)
    assert ask(shell("exec <&-; echo fine"), case).response_text == "fine"
    assert ask(shell("echo fine"), case).response_text == "fine"


def test_megabytes_go_in_and_out_at_once() -> None:
    case = EvalCase(id="big", prompt="x" * 3_000_000)
    assert json.loads(ask(Command("/bin/cat"), case).response_text)["prompt"] == case.prompt


def test_no_word_is_ever_read_by_a_shell(tmp_path) -> None:
    command = Command("/bin/echo '$HOME' ; touch pwned `id` > out | cat && *", cwd=tmp_path)
    assert ask(command).response_text == "$HOME ; touch pwned `id` > out | cat && *"
    assert list(tmp_path.iterdir()) == []


def test_what_is_named_of_the_environment_is_inherited_and_extended(monkeypatch) -> None:
    monkeypatch.setenv("NAMED", "old")
    monkeypatch.setenv("NOT_NAMED", "secret")
    script = 'echo "$NAMED $EXTRA ${NOT_NAMED:-none} ${PATH:+path} ${HOME:+home}"'
    command = shell(script, env={"EXTRA": "new"}, pass_env=["NAMED"])
    assert ask(command).response_text == "old new none path home"


def test_exit_code_75_asks_to_be_tried_again() -> None:
    with pytest.raises(TransientError, match="try again"):
        ask(shell("exit 75"))


def test_the_program_runs_in_its_directory(tmp_path) -> None:
    assert ask(Command("pwd", cwd=tmp_path)).response_text == str(tmp_path.resolve())


def test_identity_names_what_is_run_without_any_value_of_the_environment() -> None:
    command = Command("/bin/cat -u", output="json", env={"B_KEY": "s3cret-value", "A": "1"}, cwd="/usr")
    assert command.identity() == {
        "kind": "command",
        "argv": ["/bin/cat", "-u"],
        "output": "json",
        "env": ["A", "B_KEY"],
        "~cwd": "/usr",
        "~files": None,
    }
    assert "s3cret" not in repr(command)


def test_a_changed_script_or_input_changes_the_identity_and_nothing_else_does(tmp_path: Path) -> None:
    (tmp_path / "agent.sh").write_text("cat data/a.txt")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("one")
    (tmp_path / "other.txt").write_text("other")
    os.mkfifo(tmp_path / "data" / "pipe.txt")

    def files(**options: Any) -> Any:
        return Command(["/bin/sh", "agent.sh"], cwd=tmp_path, **options).identity()["~files"]

    alone, with_inputs = files(), files(inputs=["data/**/*.txt"])
    assert alone != with_inputs
    (tmp_path / "other.txt").write_text("changed")
    assert (files(), files(inputs=["data/**/*.txt"])) == (alone, with_inputs)
    (tmp_path / "data" / "a.txt").write_text("two")
    assert files() == alone
    assert files(inputs=["data/**/*.txt"]) != with_inputs
    (tmp_path / "agent.sh").write_text("cat data/b.txt")
    assert files() != alone


def test_a_cached_answer_is_not_served_once_its_program_has_changed(tmp_path: Path) -> None:
    suite = EvalSet(id="s", cases=[CASE])

    def answer() -> str | None:
        target = Command(["/bin/sh", "agent.sh"], cwd=tmp_path, model_id="agent")
        result = Runner(target, suite, cache=tmp_path / "cache", progress="off").run_sync()
        return next(iter(result.load_responses())).response_text

    (tmp_path / "agent.sh").write_text("echo one")
    assert answer() == answer() == "one"
    (tmp_path / "agent.sh").write_text("echo two")
    assert answer() == "two"


@pytest.mark.parametrize("inputs", ["*.py", [""], [3], ["/etc/*"], ["../*.py"]])
def test_inputs_that_cannot_be_meant_are_refused(inputs: Any) -> None:
    with pytest.raises(ConfigurationError, match="inputs must be"):
        Command(["/bin/cat"], inputs=inputs)


def test_a_secret_from_env_that_the_program_complains_about_is_masked() -> None:
    with pytest.raises(TargetError, match=r"bad key \*\*\*$") as caught:
        ask(shell('echo "bad key $KEY" >&2; exit 1', env={"KEY": "sk-0123456789"}))
    assert "0123" not in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ("", "must name a program, got ''"),
        ([], r"must name a program, got \[\]"),
        ([""], "must name a program"),
        ("echo 'open", 'got "echo \'open": No closing quotation'),
        (["echo", 5], r"got \['echo', 5\]"),
        (["echo", "a\0b"], "NUL"),
        ("no-such-program-anywhere --flag", "program not found: 'no-such-program-anywhere'"),
        ("/no/such/program", "program not found: '/no/such/program'"),
        ("/etc/passwd", "program is not executable: '/etc/passwd'"),
        ("/tmp", "program is not executable: '/tmp'"),
    ],
)
def test_a_program_that_cannot_be_run_is_refused_when_the_command_is_made(argv, error) -> None:
    with pytest.raises(ConfigurationError, match=error):
        Command(argv)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"output": "xml"}, "output must be 'text' or 'json', got 'xml'"),
        ({"max_output_bytes": 0}, "max_output_bytes must be >= 1, got 0"),
        ({"parallelism": 0}, "parallelism must be >= 1, got 0"),
        ({"cwd": "/no/such/place"}, "cwd must be a directory, got '/no/such/place'"),
        ({"env": {"A=B": "x"}}, "invalid name: 'A=B'"),
        ({"env": {"KEY": 5}}, r"env\['KEY'\] must be text without NUL, got int"),
    ],
)
def test_a_bad_option_is_refused_with_its_value(options, error) -> None:
    with pytest.raises(ConfigurationError, match=error):
        Command("/bin/cat", **options)


def write_program(path: Path, mode: int = 0o755) -> None:
    path.write_text("#!/bin/sh\necho here\n")
    path.chmod(mode)


def test_a_relative_program_is_looked_up_from_its_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir("/")
    write_program(tmp_path / "answer")
    assert ask(Command("./answer", cwd=tmp_path)).response_text == "here"
    with pytest.raises(ConfigurationError, match="program not found"):
        Command("./answer")


def test_the_path_given_in_env_is_searched(tmp_path) -> None:
    write_program(tmp_path / "my-answer")
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert ask(Command("my-answer", env={"PATH": path})).response_text == "here"


def test_a_program_that_vanished_is_the_calls_error(tmp_path) -> None:
    write_program(tmp_path / "answer")
    command = Command([str(tmp_path / "answer")])
    copy = pickle.loads(pickle.dumps(command))
    (tmp_path / "answer").unlink()
    for one in (command, copy):
        with pytest.raises(TargetError, match=r"cannot start .*answer: No such file"):
            ask(one)


def test_a_scarcity_of_descriptors_is_a_transient_fault(monkeypatch) -> None:
    def no_descriptors(*args: Any, **options: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(process_module.subprocess, "Popen", no_descriptors)
    with pytest.raises(TransientError, match="Too many open files"):
        ask(Command("/bin/cat"))


def test_a_pickled_command_answers() -> None:
    copy = pickle.loads(pickle.dumps(shell("echo $KEY", env={"KEY": "value"})))
    assert ask(copy).response_text == "value"


def test_a_python_program_of_the_documented_shape_answers() -> None:
    script = (
        "import json, sys\n"
        "case = json.load(sys.stdin)\n"
        "json.dump({'response_text': case['expected'], 'num_tokens_output': 1}, sys.stdout)\n"
    )
    response = ask(Command([sys.executable, "-c", script], output="json"))
    assert (response.response_text, response.num_tokens_output) == ("Paris", 1)
