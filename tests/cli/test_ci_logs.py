"""What CI systems obey in a log: nothing of it is left in whatever a command prints, and files keep it as it was."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from steelyard.stats.formatting import json_without_commands, without_commands, xml_without_commands
from tests.support.cli import STEELYARD, run_cli

COMMANDS = [
    "::error::boom",
    "::error file=a.py,line=1::boom",
    "::add-mask::e",
    "::stop-commands::token",
    "::token::",
    "##[error]boom",
    "##[add-mask]e",
    "##vso[task.setvariable variable=x]y",
    "##teamcity[buildStop comment='x']",
]
SAID = "said\n" + "\n".join(COMMANDS) + "\r  ::error::after a return ###[error]end"


def obeyed(log: str) -> list[str]:
    """The lines that a runner would act on: GitHub's, which reads to `\\r` or `\\n`, Azure's and TeamCity's."""
    found = []
    for line in log.replace("\r", "\n").split("\n"):
        at_start = line.strip().startswith("::") and "::" in line.strip()[2:]
        if at_start or any(mark in line for mark in ("##[", "##vso[", "##teamcity[")):
            found.append(line)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose ids, answers, errors and scorers' words are such commands."""
    folder = tmp_path_factory.mktemp("ci")
    (folder / "agent.py").write_text(
        f"SAID = {SAID!r}\n"
        "def answer(case):\n"
        "    if case.prompt == 'fail':\n"
        "        raise ValueError(SAID)\n"
        "    return SAID\n"
        "def judge(case, response):\n"
        "    raise RuntimeError(SAID)\n"
    )
    cases = [{"id": f"c{n} {command}", "prompt": SAID} for n, command in enumerate(COMMANDS)]
    cases += [{"id": f"{command} f{n}", "prompt": "fail"} for n, command in enumerate(COMMANDS)]
    suite = {
        "id": "##[error]suite",
        "target": {"python": "agent.py:answer"},
        "scorers": ["exact", {"python": "agent.py:judge"}],
        "cases": [{**case, "expected": "::error::expected"} for case in cases],
    }
    (folder / "suite.yaml").write_text(json.dumps(suite))
    ended = run_cli(folder, "run", "suite.yaml", "--out", "run", "-v")
    assert ended.code == 4
    assert obeyed(ended.out) == []
    assert obeyed(ended.err) == []
    return folder


@pytest.mark.parametrize("form", ["text", "json", "csv", "md", "junit"])
def test_no_report_on_stdout_commands_a_runner(place: Path, form: str) -> None:
    ended = run_cli(place, "report", "run", "-f", form)
    assert ended.code == 0
    assert "error" in ended.out
    assert obeyed(ended.out) == []


def test_one_case_and_its_traceback_command_nothing(place: Path) -> None:
    for case_id in ("##[error]boom f5", f"c0 {COMMANDS[0]}"):
        for form in ("text", "json"):
            ended = run_cli(place, "report", "run", "--case", case_id, "-f", form)
            assert ended.code == 0
            assert "boom" in ended.out
            assert obeyed(ended.out) == []


@pytest.mark.parametrize("form", ["text", "json", "md", "html"])
def test_a_comparison_commands_nothing(place: Path, form: str) -> None:
    ended = run_cli(place, "compare", "run", "run", "-f", form)
    assert ended.code == 0
    assert obeyed(ended.out) == []


def test_our_own_errors_command_nothing(place: Path) -> None:
    for words in (
        ("report", "##[error]no-such-run"),
        ("report", "run", "--case", "no\n::error::such"),
        ("run", "a\n::stop-commands::x.yaml"),
        ("report", "run", "-f", "a\n::error::b"),
        ("gate", "run", "--rule", "##vso[x]<1"),
        ("nothing\n::error::x",),
    ):
        ended = run_cli(place, *words)
        assert ended.code == 2
        assert obeyed(ended.out + ended.err) == []


def test_the_json_and_the_xml_on_stdout_have_the_values_as_they_were(place: Path) -> None:
    found = json.loads(run_cli(place, "report", "run", "--case", "##[error]boom f5", "-f", "json").out)
    assert found["id"] == "##[error]boom f5"
    document = ElementTree.fromstring(run_cli(place, "report", "run", "-f", "junit").out)
    names = [case.get("name") for case in document.iter("testcase")]
    assert "##[error]boom f5" in names


def test_files_have_the_values_as_they_were(place: Path) -> None:
    run_cli(place, "report", "run", "-f", "csv", "-o", "cases.csv")
    rows = list(csv.DictReader(io.StringIO((place / "cases.csv").read_text(), newline="")))
    assert "##[error]boom f5" in {row["id"] for row in rows}
    with open(place / "redirected.csv", "wb") as file:
        subprocess.run([STEELYARD, "report", "run", "-f", "csv"], cwd=place, stdout=file, check=True)
    assert (place / "redirected.csv").read_bytes() == (place / "cases.csv").read_bytes()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("before", ["", "  ", "\u3000", "text\n", "text\r", "text\n\t"])
def test_each_command_is_broken_and_can_still_be_read(command: str, before: str) -> None:
    text = f"{before}{command} and more"
    assert obeyed(without_commands(text)) == []
    assert without_commands(text).replace(" ", "") == text.replace(" ", "")
    assert without_commands(without_commands(text)) == without_commands(text)
    assert json.loads(json_without_commands(json.dumps(text))) == text
    assert obeyed(json_without_commands(json.dumps(text))) == []
    assert ElementTree.fromstring(f"<a>{xml_without_commands(text)}</a>").text == text.replace("\r", "\n")


@pytest.mark.parametrize(
    "text", ["a::b::c", "# Heading", "## Heading [1]", "::1 is an address", "C++: std::vector::at"]
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert without_commands(text) == text
