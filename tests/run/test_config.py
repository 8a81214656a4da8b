"""Names in a suite file become objects, and what is wrong with them is said with its path."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard.errors import ConfigurationError, SuiteError
from steelyard.plugins import load_object
from steelyard.run.config import build_suite
from tests.support.cli import alone, run_cli

AGENT = """
from steelyard.records import InvocationResponse
from steelyard.targets import Simulated

def answer(case):
    return case.prompt.upper()

def loud(case, response):
    return response.response_text.isupper()

ready = Simulated(model="ready", latency=0, tokens_per_second=0)
number = 5
"""


def write(folder: Path, **keys: Any) -> Path:
    document = {"id": "s", "target": "simulated", "cases": [{"id": "a", "prompt": "p", "expected": "P"}], **keys}
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in document.items() if value is not ...}))
    (folder / "agent.py").write_text(AGENT)
    return path


TARGETS: dict[str, Any] = {
    "simulated by name": "simulated",
    "simulated with arguments": {"simulated": {"latency": 0, "tokens_per_second": 0, "accuracy": 1}},
    "command as words": {"command": [sys.executable, "-c", "print(input()[:0] or 'P')"]},
    "command as a line": {"command": f"{sys.executable} -c \"input(); print('P')\""},
    "command with options": {"command": {"argv": [sys.executable, "-c", "input(); print('P')"], "parallelism": 2}},
    "a function in a file": {"python": "agent.py:answer"},
    "a function with options": {"python": {"function": "agent.py:answer", "version": "3"}},
    "a target in a file": {"python": "agent.py:ready"},
    "a function in a module": {"python": "agent:answer"},
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_form_of_target_answers(tmp_path: Path, target: Any) -> None:
    write(tmp_path, target=target)
    ended = run_cli(tmp_path, "run", "suite.yaml", "--no-progress")
    assert ended.code == 0, ended.err
    assert "1 of 1 done, complete" in ended.out


JUDGE = {"model": "m", "target": "simulated"}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"target": ...}, ["suite.yaml", "no target", "simulated, command, agent, answers, python"]),
        ({"target": "simulatd"}, ["'simulatd'", "did you mean 'simulated'?"]),
        ({"target": {"gpt": {}}}, ["'gpt'", "known here"]),
        ({"target": {"simulated": {"latencey": 1}}}, ["target.simulated.latencey", "did you mean 'latency'?"]),
        ({"target": {"simulated": {"latency": -1}}}, ["target.simulated", "latency must be", "-1"]),
        ({"target": {"simulated": [1]}}, ["target.simulated takes a mapping"]),
        (
            {"target": {"command": {"argv": "true", "max_output": 1}}},
            ["target.command.max_output", "did you mean 'max_output_bytes'?"],
        ),
        ({"target": {"command": "no-such-program-here"}}, ["target.command", "no-such-program-here"]),
        ({"target": {"command": {}}}, ["target.command", "argv"]),
        ({"target": {"command": {"argv": "true", "cwd": 5}}}, ["target.command", "cwd", "5"]),
        ({"target": {"python": "agent.py:anwser"}}, ["target.python", "'anwser'", "did you mean 'answer'?"]),
        ({"target": {"python": "agnt.py:answer"}}, ["target.python", "agnt.py"]),
        ({"target": {"python": "answer"}}, ["target.python must be file.py:name"]),
        ({"target": {"python": "agent.py:number"}}, ["target.python"]),
        ({"target": {"python": {"function": "agent.py:answer", "verison": 1}}}, ["target.python.verison", "'version'"]),
        ({"target": {"python": {"function": "agent.py:ready", "version": 1}}}, ["target.python.version"]),
        ({"scorers": ["exct"]}, ["scorers[0]", "did you mean 'exact'?"]),
        ({"scorers": [{"exact": {"extrct": "json"}}]}, ["scorers[0].exact.extrct", "did you mean 'extract'?"]),
        ({"scorers": [{"judge": JUDGE | {"extrct": "json"}}]}, ["scorers[0].judge.extrct", "did you mean 'extract'?"]),
        ({"scorers": [{"judge": JUDGE | {"xyzzy": 1}}]}, ["known here: model, target, ", "retries, models, extract"]),
        ({"scorers": ["exact", {"exact": {"ignorecase": True}}]}, ["scorers[1].exact.ignorecase", "'ignore_case'"]),
        ({"scorers": ["exact", "exact"]}, ["two scorers are named 'exact'"]),
        ({"scorers": [{"python": "agent.py:lod"}]}, ["scorers[0]", "did you mean 'loud'?"]),
        ({"scorers": [5]}, ["scorers[0] must be a name"]),
        ({"run": {"paralelism": 3}}, ["run.paralelism", "did you mean 'parallelism'?"]),
        ({"run": {"parallelism": 0}}, ["run", "parallelism must be >= 1, got 0"]),
        ({"run": {"timeout": "soon"}}, ["run", "timeout", "'soon'"]),
        ({"gate": {"min_pas_rate": 1}}, ["gate.min_pas_rate", "did you mean 'min_pass_rate'?"]),
        ({"gate": {"min_pass_rate": 80}}, ["gate.min_pass_rate must be within 0..1, got 80"]),
        ({"gate": {"min_pass_rate": True}}, ["gate.min_pass_rate", "True"]),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_named_with_its_path_and_the_nearest_key(
    tmp_path: Path, keys: dict[str, Any], named: list[str]
) -> None:
    write(tmp_path, **keys)
    ended = run_cli(tmp_path, "run", "suite.yaml", "--no-progress")
    assert ended.code == 2, ended.err
    assert "suite.yaml" in ended.err
    for word in named:
        assert word in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "runs").exists()


def test_a_function_scorer_in_a_file_scores(tmp_path: Path) -> None:
    write(tmp_path, target={"python": "agent.py:answer"}, scorers=["exact", {"python": "agent.py:loud"}])
    ended = run_cli(tmp_path, "run", "suite.yaml", "--no-progress")
    assert "score loud" in ended.out


def test_a_file_that_is_named_twice_is_one_module(tmp_path: Path) -> None:
    (tmp_path / "state.py").write_text("things = []\nother = things\n")
    with alone(tmp_path):
        assert load_object("state.py:things", tmp_path) is load_object("state.py:other", tmp_path)


def test_relative_names_are_seen_from_the_suite_files_folder(tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    program = folder / "answer.sh"
    program.write_text("#!/bin/sh\ncat > /dev/null\ncat word.txt\n")
    program.chmod(0o755)
    (folder / "word.txt").write_text("P\n")
    write(folder, target={"command": ["./answer.sh"]}, scorers=["exact"])
    ended = run_cli(tmp_path, "run", "deep/suite.yaml", "--no-progress", "--min-pass-rate", "1")
    assert ended.code == 0, ended.err


def test_a_command_is_the_same_target_from_wherever_its_suite_is_run(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep", target={"command": ["cat"]})
    assert run_cli(tmp_path, "run", "deep/suite.yaml", "--out", "RUN", "--no-progress").code == 0
    (tmp_path / "RUN" / "metrics.json").unlink()
    assert run_cli(tmp_path / "deep", "run", "suite.yaml", "--out", "../RUN", "--no-progress").code == 0


def test_the_run_section_and_the_gate_become_options(tmp_path: Path) -> None:
    path = write(tmp_path, run={"parallelism": 7, "timeout": 3}, gate={"min_pass_rate": 0.5, "max_error_rate": None})
    built = build_suite(path)
    assert built.options == {"parallelism": 7, "timeout": 3}
    assert (built.gate.min_pass_rate, built.gate.max_error_rate) == (0.5, 0.0)


def test_a_suite_error_carries_its_path(tmp_path: Path) -> None:
    path = write(tmp_path, target="simulatd")
    with pytest.raises(SuiteError) as caught:
        build_suite(path)
    assert caught.value.path == str(path)
    assert isinstance(caught.value, ConfigurationError)


def test_a_bad_price_is_named_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(SuiteError) as caught:
        build_suite(write(tmp_path, prices={"input": "two", "output": 1}))
    assert str(caught.value) == f"{tmp_path}/suite.yaml:7: prices.input must be a number at least 0, got 'two'"


def test_times_in_run_may_have_a_unit(tmp_path: Path) -> None:
    assert build_suite(write(tmp_path, run={"timeout": "2m", "duration": "500ms"})).options["timeout"] == 120
    with pytest.raises(SuiteError) as caught:
        build_suite(write(tmp_path, run={"timeout": "soon"}))
    assert str(caught.value).startswith(f"{tmp_path}/suite.yaml:7: run.timeout must be a length of time like")


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("run:\n  timeout: 5s\n  paralelism: 3", 6),
        ("target:\n  simulated:\n    modle: x", 6),
        ("scorers:\n- exact\n- contains:\n    ignore_cases: true", 7),
        ("targets:\n  one:\n    simulated: {accuracy: 1}\n  two:\n    simulated: {modle: x}", 8),
        ("run: {retries: 1}\ngate:\n  retries: 2", 6),
        ("fields:\n  prompt: x\n  expcted: x", 6),
        ("examples:\n  from: x.jsonl\n  count: 2", 6),
        ("prompts:\n  short: {system_prompt: x}\n  long:\n    promt: x", 7),
        ("prices:\n  input: 1\n  outptu: 2", 6),
        ("prices:\n  gpt-4.1 mini:\n    input: 1\n    outptu: 2", 7),
        ("case_limits:\n  time: 5m\n  tuns: 2", 6),
        ("workspace:\n  form: x", 5),
        ("workspace:\n  from:\n    git: x\n    rev: y", 7),
        ("workspace:\n  sandbox:\n    bubblewrap:\n      memry: 1G", 7),
        ("target:\n  agent:\n    argv: 'true'\n    gateway:\n      openai:\n        url: x", 9),
        ("target:\n  agent:\n    argv: 'true'\n    gateway:\n      opnai: {}", 8),
        ("target:\n  agent:\n    argv: 'true'\n    sandbox:\n      bubblewrap:\n        memry: 1G", 9),
        ("scorers:\n- judge:\n    model: m\n    target:\n      simulated:\n        modle: x", 9),
        ("hooks:\n- webhook:\n    url: http://127.0.0.1\n    ulr: x", 7),
        ("run_metrics:\n- accuracy\n- classification:\n    lables: x", 7),
    ],
)
def test_an_unknown_key_is_named_with_its_line(tmp_path: Path, wrong: str, line: int) -> None:
    assert re.search(rf"suite.yaml:{line}: (two: )?unknown key ", _refused(tmp_path, wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("by: 5", "4: by must be a list"),
        ("run:\n  retries: 1\n  parallelism: -1", "6: run: parallelism must be"),
        ("gate:\n  min_pass_rate: 3", "5: gate.min_pass_rate must be within 0..1"),
        ("gate:\n  rules:\n  - cost<2\n  - cots<2", "7: gate.rules[1]: rule 'cots<2': no run has a metric 'cots'"),
        ("gate:\n  rules: []\n  allow: [all]", "6: gate.allow: 'all' cannot be allowed"),
        ("case_limits:\n  time: soon", "5: case_limits.time must be"),
        ("prices:\n  m:\n    input: 1", "5: prices.m must say what output tokens cost"),
        ("workspace:\n  setup: 5", "5: workspace.setup must be a list of commands"),
        ("workspace:\n  artifacts: 5", "5: workspace.artifacts must be a list"),
        ("workspace:\n  sandbox: dock", "5: workspace.sandbox: no sandbox is named 'dock'"),
        ("workspace:\n  sandbox:\n    memory: 1G", "5: workspace.sandbox: no sandbox is named 'memory'"),
        ("hooks:\n- mlflow\n- webhok: {}", "6: hooks[1]: no hook is named 'webhok'"),
        ("scorers:\n- exact\n- contians", "6: scorers[1]: no scorer is named 'contians'"),
        ("scorers:\n- exact:\n    ignore_case: 5", "6: scorers[0].exact: ignore_case must be true or false"),
        ("scorers:\n- exact:\n    threshold: 1\n    extract: 5", "7: scorers[0].exact: extract takes"),
        ("target:\n  openai-chat:\n    base_url: http://127.0.0.1:9", "5: target.openai-chat needs a model"),
        (
            "scorers:\n- judge:\n    model: m\n    target: simulated\n    examples:\n"
            "    - {answer: a, expected: b, score: 1}\n    - {answer: a, scor: 1}",
            "10: scorers[0].judge: examples[1]: unknown key scor; did you mean",
        ),
        ("target:\n  openai-chat: my-model", "5: target.openai-chat takes a mapping of arguments"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path: Path, wrong: str, message: str) -> None:
    assert f"suite.yaml:{message}" in _refused(tmp_path, wrong)


def _refused(folder: Path, wrong: str) -> str:
    """What is said of a suite file whose fourth line is where the wrong part begins."""
    target = "" if wrong.startswith("target") else "target: simulated"
    (folder / "suite.yaml").write_text(f"id: s\n{target}\ncases: [{{prompt: p}}]\n{wrong}\n")
    ended = run_cli(folder, "run", "suite.yaml")
    assert ended.code == 2
    return ended.err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("run.paralelism=3", "suite.yaml: unknown key run.paralelism"),
        ("run.parallelism=-1", "suite.yaml: run: parallelism must be"),
        ("gate.min_pass_rate=3", "suite.yaml: gate.min_pass_rate must be"),
        ("scorers.0=contians", "suite.yaml: scorers[0]: no scorer is named"),
    ],
)
def test_what_a_flag_sets_has_no_line(tmp_path: Path, flag: str, message: str) -> None:
    write(tmp_path, run={"retries": 1}, gate={"min_pass_rate": 0.5}, scorers=["exact"])
    assert message in run_cli(tmp_path, "run", "suite.yaml", "--set", flag).err


def test_a_name_that_a_file_does_not_have_is_answered_with_what_it_defines(tmp_path: Path) -> None:
    (tmp_path / "counts.py").write_text(
        "from collections import OrderedDict\nfrom steelyard import Runner\ndef counted(case): ...\nlimit = 3\n"
    )
    with alone(tmp_path):
        with pytest.raises(ConfigurationError, match=r"has no 'nope'; known here: counted, limit$"):
            load_object("counts.py:nope", tmp_path)
        with pytest.raises(ConfigurationError, match="did you mean 'Runner'"):
            load_object("counts.py:Runer", tmp_path)
