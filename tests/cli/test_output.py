"""What programs read: a run whose folder has a name that is no text is told of like any other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.cli import run_cli
from tests.support.compare import finished

NO_TEXT = os.fsdecode(b"run \xff")


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    try:
        (tmp_path / "runs" / NO_TEXT).mkdir(parents=True)
    except OSError:
        pytest.skip("this file system takes no such names")
    finished(tmp_path / "plain", "pp")
    finished(tmp_path / "runs" / NO_TEXT, "pp")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "--json"],
        ["gate", f"runs/{NO_TEXT}", "--rule", "n==2", "--json"],
        ["compare", "plain", f"runs/{NO_TEXT}", "-f", "json"],
    ],
    ids=lambda words: words[0],
)
def test_a_name_that_is_no_text_comes_back_as_it_was(odd: Path, words: list[str]) -> None:
    ended = run_cli(odd, *words)
    assert ended.code == 0, ended.err
    ended.out.encode()
    assert f"runs/{NO_TEXT}" in strings(json.loads(ended.out))


def test_the_same_in_a_file(odd: Path) -> None:
    assert run_cli(odd, "compare", "plain", f"runs/{NO_TEXT}", "-f", "json", "-o", "out.json").code == 0
    assert f"runs/{NO_TEXT}" in strings(json.loads((odd / "out.json").read_bytes()))


def strings(value: object) -> set[str]:
    """All texts within a JSON value."""
    if isinstance(value, dict):
        return strings(list(value.values()))
    if isinstance(value, list):
        return set().union(*map(strings, value)) if value else set()
    return {value} if isinstance(value, str) else set()
