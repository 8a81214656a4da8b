"""How many files the command line lets itself have open."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import pytest

from steelyard.cli.run_control import allow_calls, raise_limit
from tests.support.cli import STEELYARD, Workshop

Limits = tuple[int, int]

AGENT = """
import resource

def answer(case):
    return str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


class System:
    """A system's limits, which can be changed like real ones and refuse what it is told to refuse."""

    def __init__(self, soft: int, hard: int, most: int | None = None) -> None:
        self.limits = (soft, hard)
        self.most = most

    def set(self, _kind: int, limits: Limits) -> None:
        if self.most is not None and limits[0] > self.most:
            raise ValueError("not allowed to raise maximum limit")
        self.limits = limits


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    system = System(1_024, 524_288)
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: system.limits)
    monkeypatch.setattr(resource, "setrlimit", system.set)
    return system


def test_the_soft_limit_is_raised_to_what_is_wanted_and_the_hard_one_stays(system: System) -> None:
    assert raise_limit(5_000) == 5_000
    assert system.limits == (5_000, 524_288)


def test_a_limit_that_is_high_enough_is_left_alone(system: System) -> None:
    assert raise_limit(200) == 1_024
    assert system.limits == (1_024, 524_288)


def test_no_more_is_asked_for_than_the_hard_limit(system: System, caplog: pytest.LogCaptureFixture) -> None:
    """So many calls fit: nothing is said."""
    system.limits = (256, 4_096)
    allow_calls(2_000)
    assert system.limits == (4_096, 4_096)
    assert not caplog.records


def test_too_low_a_hard_limit_is_told(system: System, caplog: pytest.LogCaptureFixture) -> None:
    system.limits = (256, 512)
    allow_calls(1_000)
    assert system.limits == (512, 512)
    assert "1,000 calls at once need about 1,064 open files, and this process may have 512" in caplog.text


def test_where_the_system_refuses_less_is_taken(system: System) -> None:
    """macOS names no hard limit and grants 10,240."""
    system.limits, system.most = (256, resource.RLIM_INFINITY), 10_240
    assert raise_limit(65_536) == 10_240
    assert system.limits == (10_240, resource.RLIM_INFINITY)


def test_what_cannot_be_raised_at_all_stays(system: System) -> None:
    system.limits, system.most = (256, resource.RLIM_INFINITY), 0
    assert raise_limit(65_536) == 256


def test_unlimited_is_enough(system: System) -> None:
    system.limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert raise_limit(65_536) is None


@pytest.mark.parametrize(
    ("words", "least"), [(["run", "suite.yaml", "-j", "300"], 300), (["sweep", "suite.yaml", "-j", "1,300"], 300)]
)
def test_a_command_makes_room_for_its_calls(tmp_path: Path, words: list[str], least: int) -> None:
    workshop = Workshop(tmp_path)
    workshop.agent(AGENT)
    workshop.suite("c0", scorers=[])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    subprocess.run(
        [STEELYARD, *words, "--out", "RUN", "--no-progress"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard)),
    )
    outputs = next(tmp_path.glob("RUN/**/outputs.jsonl"))
    assert f'"response_text":"{4 * least + 64}"' in outputs.read_text()
