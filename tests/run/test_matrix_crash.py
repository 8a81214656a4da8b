"""A matrix that is killed in the middle: resumed as a whole, nothing asked twice, one limit held per endpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.support.cli import wait_until
from tests.support.mock import STEELYARD, Mock, running_mock

CASES = 200
LIMIT = 8
RATE = 320
"""A second: what the run keeps to. The endpoint refuses what is above a little more."""


def write_suite(folder: Path, shared: Mock, other: Mock) -> None:
    """Three models with two prompts; two models are at one endpoint."""

    def target(name: str, mock: Mock) -> dict[str, object]:
        return {"openai-chat": {"model": name, "base_url": mock.base_url, "stream": False}}

    suite = {
        "id": "sums",
        "targets": {"a": target("a", shared), "b": target("b", shared), "c": target("c", other)},
        "prompts": {"terse": {"system_prompt": "One word."}, "steps": {"prompt": "{{ prompt }} Think."}},
        "cases": [{"id": f"c{n:03}", "prompt": f"What is {n}?"} for n in range(CASES)],
        "run": {"parallelism": LIMIT, "rate": f"{RATE}/s", "retries": 0},
    }
    (folder / "suite.yaml").write_text(yaml.safe_dump(suite))


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [str(STEELYARD), "run", "suite.yaml", "-o", "M", "--json", "--no-progress"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def journalled(folder: Path) -> Counter[str]:
    """How many whole records each variant has."""
    return Counter(
        {
            place.parent.name: sum(line.endswith(b"}\n") for line in place.read_bytes().splitlines(keepends=True))
            for place in (folder / "M").glob("*/outputs.jsonl")
        }
    )


@pytest.mark.slow
def test_a_killed_matrix_is_resumed_as_a_whole_and_asks_nothing_twice(tmp_path) -> None:
    # The endpoints hold the limits against the run: what is above them is refused, and would be an error.
    limits = {"max_concurrency": LIMIT, "rate": f"{RATE + 40}/s", "latency": "5ms"}
    with running_mock(**limits) as shared, running_mock(**limits) as other:
        write_suite(tmp_path, shared, other)
        running = start(tmp_path)
        wait_until(lambda: shared.stats()["requests"] >= 300 or running.poll() is not None)
        running.send_signal(signal.SIGKILL)
        running.communicate(timeout=30)
        assert running.returncode == -signal.SIGKILL
        done = journalled(tmp_path)
        assert len(done) == 6
        assert 250 <= sum(done.values()) < 6 * CASES
        # In turn: the four variants of the shared endpoint are at the same case.
        of_shared = [count for name, count in done.items() if name.startswith(("a", "b"))]
        assert max(of_shared) - min(of_shared) <= LIMIT + 2
        # What was in flight is answered to nobody; then the endpoints are free for the next launch.
        wait_until(lambda: not any(mock.stats()["current_concurrency"] for mock in (shared, other)))
        asked_before = shared.stats()["requests"] + other.stats()["requests"]
        assert sum(done.values()) <= asked_before <= sum(done.values()) + 2 * LIMIT

        again = start(tmp_path)
        out, err = again.communicate(timeout=120)
        assert again.returncode == 0, err.decode()
        variants = json.loads(out)["variants"]
        assert {name: metrics["counts"]["ok"] for name, metrics in variants.items()} == {
            f"{model}/{prompt}": CASES for model in "abc" for prompt in ("terse", "steps")
        }
        assert all(metrics["complete"] for metrics in variants.values())
        # What was journalled is not asked again: the second launch asks the rest, and only that.
        stats = [shared.stats(), other.stats()]
        assert sum(one["requests"] for one in stats) - asked_before == 6 * CASES - sum(done.values())
        # One limit per endpoint, over all of its variants and both launches: nothing was refused. What was in flight
        # when the run was killed may have no status: the server found nobody to answer.
        for one in stats:
            assert set(one["by_status"]) == {"200"}
            assert one["requests"] - LIMIT <= one["by_status"]["200"] <= one["requests"]
        assert all(one["peak_concurrency"] <= LIMIT for one in stats)
        assert stats[0]["peak_concurrency"] > LIMIT // 4  # how many a busy machine manages
    manifest = json.loads((tmp_path / "M" / "a-terse" / "run.json").read_text())
    assert len(manifest["launches"]) == 2


@pytest.mark.slow
def test_ctrl_c_ends_all_variants_in_time_and_they_are_resumed(tmp_path) -> None:
    with running_mock(latency="1h") as stuck, running_mock() as quick:
        write_suite(tmp_path, stuck, quick)
        running = start(tmp_path)
        wait_until(lambda: stuck.stats()["current_concurrency"] == LIMIT or running.poll() is not None)
        wait_until(lambda: quick.stats()["requests"] == 2 * CASES)
        os.kill(running.pid, signal.SIGINT)
        _, err = running.communicate(timeout=15)
        assert running.returncode == 130
        assert b"resume with: " in err
    for name in ("a-terse", "a-steps", "b-terse", "b-steps"):
        counts = json.loads((tmp_path / "M" / name / "partial.json").read_text())["counts"]
        assert counts["cancelled"] + counts["not_started"] == CASES
    assert (tmp_path / "M" / "c-terse" / "metrics.json").is_file()
