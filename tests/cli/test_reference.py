"""docs/cli.md is what `--help` says, and a shell can complete what stands there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from steelyard.cli.main import COMMANDS
from tests.support.cli import STEELYARD
from tests.support.paths import ROOT
from tests.support.scripts import script

pytestmark = pytest.mark.slow


def run(*words: str | Path, **environment: str) -> str:
    ended = subprocess.run(
        words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == script("cli_reference").reference(), "docs/cli.md is out of date: make docs"


def test_the_script_writes_the_page_and_notices_an_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("cli_reference")
    monkeypatch.setattr(module, "PAGE", tmp_path / "cli.md")
    assert module.main([]) == 0
    assert module.main(["--check"]) == 0
    (tmp_path / "cli.md").write_text("old")
    assert module.main(["--check"]) == 1


def test_the_page_has_every_command_and_the_ones_inside_them() -> None:
    headings = re.findall(r"^## (.+)$", script("cli_reference").reference(), flags=re.M)
    assert headings[0] == "steelyard"
    assert {f"steelyard {name}" for name in COMMANDS} <= set(headings)
    assert {"steelyard cache info", "steelyard cache clear"} <= set(headings)


@pytest.mark.parametrize("words", [[], ["run"], ["gate"], ["cache", "clear"]], ids=" ".join)
def test_the_page_has_what_the_program_prints(words: list[str]) -> None:
    printed = run(STEELYARD, *words, "--help", COLUMNS="100")
    assert f"```text\n{printed.rstrip()}\n```" in script("cli_reference").reference()


def completed(shell: str, *words: str) -> list[str]:
    """What the program offers a shell for the last of these words."""
    asked = {
        "bash": {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)},
        "fish": {"COMP_WORDS": " ".join(words[:-1]), "COMP_CWORD": words[-1]},
    }[shell]
    said = run(STEELYARD, _STEELYARD_COMPLETE=f"{shell}_complete", **asked).splitlines()
    if shell == "zsh":  # three lines for each: its kind, the word, its help
        return said[1::3]
    return [re.split(r"[,\t]", line)[1] for line in said]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["steelyard", "re"], {"report"}),
        (["steelyard", "c"], {"calibrate", "cache", "check", "compare"}),
        (["steelyard", "run", "--min"], {"--min-pass-rate"}),
        (["steelyard", "report", "-f", "j"], {"json", "junit"}),
        (["steelyard", "cache", "i"], {"info"}),
        (["steelyard", "cache", "clear", "--s"], {"--suite"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_shell_is_offered_commands_flags_and_choices(shell: str, words: list[str], offered: set[str]) -> None:
    assert set(completed(shell, *words)) == offered


def test_every_command_is_offered() -> None:
    assert completed("zsh", "steelyard", "") == list(COMMANDS)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_code_for_a_shell_names_the_program(shell: str) -> None:
    assert "_STEELYARD_COMPLETE" in run(STEELYARD, _STEELYARD_COMPLETE=f"{shell}_source")


def test_bash_completes_with_the_code_that_the_program_gives_it() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    code = """
        eval "$(_STEELYARD_COMPLETE=bash_source steelyard)"
        COMP_WORDS=(steelyard repo) COMP_CWORD=1
        _steelyard_completion steelyard repo steelyard
        echo "${COMPREPLY[@]}"
    """
    path = os.pathsep.join([str(STEELYARD.parent), os.environ["PATH"]])
    assert run(bash, "--norc", "-c", code, PATH=path).split() == ["report"]
