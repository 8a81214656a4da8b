"""The command line as a whole: every command and option is described, and mistakes are named."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest

import steelyard
from steelyard.cli.group import group
from steelyard.cli.main import COMMANDS, front_page, main, terminal_columns
from tests.support.cli import Workshop, run_cli


def options() -> list[tuple[str, click.Option]]:
    commands = {name: import_module(f"steelyard.cli.{name}").command for name in COMMANDS}
    return [
        (name, option)
        for name, command in commands.items()
        for option in command.params
        if isinstance(option, click.Option)
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(tmp_path: Path, name: str) -> None:
    for flag in ("--help", "-h"):
        ended = run_cli(tmp_path, name, flag)
        assert ended.code == 0
        assert ended.out.startswith(f"Usage: steelyard {name}")
        assert import_module(f"steelyard.cli.{name}").command.help


@pytest.mark.parametrize(("name", "option"), options(), ids=lambda value: getattr(value, "name", value))
def test_every_option_has_help(name: str, option: click.Option) -> None:
    assert option.help
    assert len(option.help) > 5


def test_the_help_names_every_command_and_exit_code(tmp_path: Path) -> None:
    for words in (["--help"], ["-h"]):
        ended = run_cli(tmp_path, *words)
        assert ended.code == 0
        for word in [*COMMANDS, "0 ", "1 ", "2 ", "3 ", "4 ", "129/130/143", "a judge is not trusted"]:
            assert word in ended.out


@pytest.mark.parametrize("columns", ["1", "50", "66", "80", "99", "100", "101", "300", "-5", "wide", ""])
def test_the_front_page_is_what_click_would_write(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with group.make_context("steelyard", [], resilient_parsing=True) as context:
        assert front_page(terminal_columns()) == f"{group.get_help(context)}\n"


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--version"]])
def test_what_is_said_without_click_is_what_click_says(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    assert ended.value.code == 0 == group.main(words, prog_name="steelyard", standalone_mode=False)
    assert said == capsys.readouterr()


def test_help_and_version_do_not_wait_for_click() -> None:
    program = "import sys; from steelyard.cli import main; sys.argv[1:] = ['--help']\ntry: main()\n"
    program += "finally: assert not {'click', 'typing', 'msgspec'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-S", "-c", program], check=True, capture_output=True, env=_importable())


def _importable() -> dict[str, str]:
    """An environment in which the package is found without `site`, which brings modules of its own."""
    return {**os.environ, "PYTHONPATH": str(Path(steelyard.__file__).parents[1])}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_stream_that_takes_nothing_is_not_passed_over() -> None:
    program = "import sys; from steelyard.cli import main; sys.argv[1:] = ['--help']; main()"
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert ended.returncode == 3


def test_version_says_the_version(tmp_path: Path) -> None:
    from steelyard import __version__

    assert __version__ in run_cli(tmp_path, "--version").out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["rnu"], "did you mean 'run'?"),
        (["xyzzy"], "known here: run, score, report, ls"),
        (["run", "suite.yaml", "--retry-error"], "--retry-errors"),
        (["run"], "SUITE"),
        (["run", "nowhere.yaml"], "nowhere.yaml: no such file; steelyard init writes a suite to start from"),
        (["run", "siute.yaml"], "siute.yaml: no such file; did you mean 'suite.yaml'?"),
        (["run", "no-cases.yaml"], "nowhere.jsonl: no such file"),
        (["sweep", "no-cases.yaml", "-j", "1"], "nowhere.jsonl: no such file"),
        (["run", "."], "directory"),
        (["run", "suite.yaml", "--out", "suite.yaml"], "suite.yaml is not a directory"),
        (["run", "agent.py"], "agent.py:"),
        (["run", "cases.jsonl"], "cases: cases.jsonl"),
        (["run", "agent.py:anwser"], "did you mean 'answer'?"),
        (["run", "nowhere.py:runner"], "no file"),
        (["run", "no_such_module:runner"], "no_such_module"),
        (["report"], "RUN"),
        (["report", "nowhere"], "nowhere is not a run directory: there is no such folder"),
        (["report", "."], "not a run directory"),
        (["report", "suite.yaml"], "not a run directory"),
        (["report", ".", "-f", "pdf"], "pdf"),
        (["ls", "nowhere"], "there is no folder nowhere"),
        (["ls", "suite.yaml"], "there is no folder suite.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_exit_2_and_named(tmp_path: Path, words: list[str], named: str) -> None:
    shop = Workshop(tmp_path)
    (tmp_path / "cases.jsonl").write_text('{"id": "a", "prompt": "p"}\n')
    (tmp_path / "no-cases.yaml").write_text("target: simulated\ncases: nowhere.jsonl\n")
    ended = run_cli(tmp_path, *words)
    assert ended.code == 2
    assert named in ended.err
    assert "Traceback" not in ended.err
    assert ended.out == ""
    assert shop.asked() == []


BENCH = """
import os

from steelyard import EvalCase, EvalSet, Runner

suite = EvalSet(id="s", cases=[EvalCase(id="a", prompt="p", expected="P")])
runner = Runner(lambda case: case.prompt.upper(), suite, ["exact"])
number = 5


def make():
    return runner


async def make_later():
    return runner


def needs(more):
    return runner


def breaks():
    raise KeyError("model")


class Names:
    inner = runner
"""


@pytest.mark.parametrize("name", ["runner", "make", "Names.inner"])
def test_a_python_suite_is_a_runner_or_a_function_that_returns_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "bench.py").write_text(BENCH)
    ended = run_cli(tmp_path, "run", f"bench.py:{name}", "--no-progress")
    assert ended.code == 0
    assert "1 of 1 done" in ended.out


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("suite", "is an EvalSet, which has no target"),
        ("number", "is int, not a Runner"),
        ("zzzzzz", "known here: suite, runner, number, make"),
        ("runer", "did you mean 'runner'?"),
        ("make_later", "coroutine"),
        ("needs", "needs"),
        ("breaks", "KeyError"),
    ],
)
def test_a_python_name_that_is_no_runner_is_explained(tmp_path: Path, name: str, named: str) -> None:
    (tmp_path / "bench.py").write_text(BENCH)
    ended = run_cli(tmp_path, "run", f"bench.py:{name}", "--no-progress")
    assert ended.code == 2
    assert named in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("import nothing_of_the_kind", "nothing_of_the_kind"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(7)", "exit"),
    ],
)
def test_a_python_file_that_cannot_be_imported_is_exit_2(tmp_path: Path, source: str, named: str) -> None:
    (tmp_path / "bench.py").write_text(source)
    ended = run_cli(tmp_path, "run", "bench.py:runner")
    assert ended.code == 2
    assert named in ended.err
    assert "Traceback" not in ended.err


def test_a_python_file_may_import_its_neighbours_from_anywhere(tmp_path: Path) -> None:
    folder = tmp_path / "bench with spaces"
    folder.mkdir()
    (folder / "neighbour.py").write_text("def answer(case):\n    return 'x'\n")
    (folder / "bänch.py").write_text(BENCH.replace("from steelyard", "import neighbour\nfrom steelyard", 1))
    assert run_cli(tmp_path, "run", "bench with spaces/bänch.py:runner", "--no-progress").code == 0


@pytest.mark.parametrize("stem", ["json", "random", "asyncio", "msgspec", "steelyard", "click"])
def test_a_python_file_named_like_a_module_does_not_replace_it(tmp_path: Path, stem: str) -> None:
    import sys

    before = sys.modules[stem]
    (tmp_path / f"{stem}.py").write_text(BENCH)
    ended = run_cli(tmp_path, "run", f"{stem}.py:runner", "--no-progress")
    assert ended.code == 0, ended.err
    assert sys.modules[stem] is before


def test_file_names_with_spaces_and_other_scripts_work_throughout(tmp_path: Path) -> None:
    folder = tmp_path / "meine Prüfung 日本"
    folder.mkdir()
    shop = Workshop(folder)
    (folder / "suite.yaml").rename(folder / "mein Test é.yaml")
    (folder / "agent.py").rename(folder / "der agent.py")
    text = (folder / "mein Test é.yaml").read_text(encoding="utf-8").replace("agent.py:", "der agent.py:")
    (folder / "mein Test é.yaml").write_text(text, encoding="utf-8")
    ended = run_cli(tmp_path, "run", folder / "mein Test é.yaml", "--out", folder / "läufe 1", "--no-progress")
    assert ended.code == 0, ended.err
    assert len(shop.asked()) == 6
    assert run_cli(tmp_path, "report", folder / "läufe 1").code == 0
    assert "läufe 1" in run_cli(tmp_path, "ls", folder).out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu"], "no command is named 'rnu'; did you mean 'run'?"),
        (["run"], "SUITE is missing; usage: steelyard run [OPTIONS] SUITE"),
        (
            ["run", "suite.yaml", "--paralelism", "2"],
            "no option is named '--paralelism'; did you mean '--parallelism'?",
        ),
        (["run", "suite.yaml", "-j"], "option '-j' requires an argument"),
        (["run", "suite.yaml", "-j", "many"], "-j/--parallelism: 'many' is neither a whole number nor auto"),
        (["run", "suite.yaml", "-j", "0"], "-j/--parallelism must be >= 1, got 0"),
        (["run", "suite.yaml", "more"], "got unexpected extra argument (more)"),
        (["run", "suite.yaml", "--engine", "car"], "--engine: 'car' is not one of 'local', 'ray'"),
        (["run", "suite.yaml", "--max-cost", "x"], "--max-cost: 'x' is not a number"),
        (["run", "suite.yaml", "--timeout", "x"], "--timeout must be a length of time like 500ms, 60s or 2m, got 'x'"),
        (["run", "suite.yaml", "--min-pass-rate", "3"], "--min-pass-rate must be within 0..1, or 0%..100%, got '3'"),
        (["run", "suite.yaml", "-p", "x"], "-p/--param: write NAME=VALUE, such as temperature=0.2, got 'x'"),
        (
            ["run", "suite.yaml", "--new", "--out", "x"],
            "--new cannot be used with --out: it chooses a directory itself",
        ),
        (["import", "log.json"], "-o/--out is missing; usage: steelyard import [OPTIONS] FILE"),
        (["cache", "stats"], "no command is named 'stats'; known here: clear, info"),
        (["mock", "--port", "x"], "--port: 'x' is not an integer"),
        (["check", "suite.yaml", "--repeat", "0"], "--repeat: 0 is not in the range 1<=x<=100"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_on_the_command_line_has_the_form_of_all_messages(
    tmp_path: Path, words: list[str], said: str
) -> None:
    ended = run_cli(tmp_path, *words)
    command = "" if words == ["rnu"] else f"{words[0]} "
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"steelyard: {said}\nMore: steelyard {command}--help\n"


def test_a_share_may_be_a_percentage_on_the_command_line(tmp_path: Path) -> None:
    Workshop(tmp_path)
    ended = run_cli(tmp_path, "run", "suite.yaml", "--no-progress", "--min-pass-rate", "101%")
    assert "--min-pass-rate must be within 0..1" in ended.err
    assert run_cli(tmp_path, "run", "suite.yaml", "--no-progress", "--min-pass-rate", "0%").code == 0
