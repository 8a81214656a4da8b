"""Workers, nodes and drivers that die, on a real cluster of three nodes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalSet, Result, Runner
from steelyard.engine.base import CancellationToken
from steelyard.journal.reader import iter_records
from steelyard.records import Record
from tests.support.board import Board
from tests.support.cli import finish, run_cli, start
from tests.support.engine import make_jobs, make_suite, wait_for
from tests.support.ray import cluster_of_nodes, patiently
from tests.support.ray_memory import Memory
from tests.support.ray_targets import (
    Asking,
    Deadly,
    DiesBeforeJudging,
    Watched,
    Wordy,
    called_when_journalled,
    most_outstanding,
)

pytestmark = [pytest.mark.ray, patiently]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with cluster_of_nodes(3) as made:
        yield made


@pytest.fixture
def board(tmp_path) -> Board:
    (tmp_path / "board").mkdir()
    return Board(tmp_path / "board")


def run(target: Any, suite: EvalSet, engine: Any, **options: Any) -> Result:
    return Runner(target, suite, ["exact"], engine=engine, progress="off").run_sync(**options)


def test_a_case_that_kills_its_workers_becomes_an_error_and_the_others_none(cluster, board) -> None:
    from steelyard.engine.ray.engine import RayEngine

    with RayEngine(workers=2, max_reschedules=1) as mortal:
        result = run(Deadly(board, "c7"), make_suite(60), mortal, parallelism=12)
    assert len(board.lines("killing")) == 2
    assert result.complete
    assert result.metrics["counts"] == {"planned": 60, "ok": 59, "error": 1, "cancelled": 0, "not_started": 0}
    assert result.metrics["errors"] == {"WorkerLost": 1}
    (lost,) = [record for record in result.responses if record.status == "error"]
    assert lost.id == "c7"
    assert "2 workers died while this case was in flight" in (lost.error or "")


def test_an_answer_whose_worker_died_before_it_was_judged_is_not_requested_again(cluster, board) -> None:
    from steelyard.engine.ray.engine import RayEngine

    emitted: list[Any] = []
    with RayEngine(workers=1) as mortal:
        run = mortal.run(
            DiesBeforeJudging(board), make_jobs(3), emitted.append, parallelism=3, token=CancellationToken()
        )
        tally = asyncio.run(run)
    assert (tally.finished, tally.cancelled) == (3, 0)
    assert sorted(board.noted("asked")) == sorted(board.noted("judged")) == [0, 1, 2]
    assert sum(isinstance(item, Record) for item in emitted) == 3


AGENT = """
import asyncio
from pathlib import Path
from shared import LOG

async def answer(case):
    with open(LOG, "a") as log:
        log.write(case.id + chr(10))
    await asyncio.sleep(0.02)
    return Path("words.txt").read_text() + case.id
"""


def write_suite(folder: Path, count: int) -> None:
    (folder / "agent.py").write_text(AGENT)
    (folder / "shared.py").write_text(f"LOG = {str(folder / 'asked.log')!r}\n")
    (folder / "words.txt").write_text("hello ")
    (folder / "cases.jsonl").write_text("".join(f'{{"id": "c{n}", "prompt": "{n}"}}\n' for n in range(count)))
    (folder / "suite.yaml").write_text("id: far\ntarget: {python: agent.py:answer}\ncases: cases.jsonl\n")


def test_a_driver_that_is_killed_is_resumed_and_asks_nothing_journalled_again(cluster, tmp_path) -> None:
    """By the command line, with a suite in Python and its files sent along; resumed in one process."""
    write_suite(tmp_path, 1500)
    out, asked = tmp_path / "run" / "outputs.jsonl", tmp_path / "asked.log"
    words = ("run", "suite.yaml", "--out", "run", "-j", "20")
    driver = start(tmp_path, *words, "--engine", "ray", "--ray-address", cluster.address, "--workers", "2")
    try:
        wait_for(
            lambda: (out.exists() and out.read_bytes().count(b"\n") > 200) or driver.poll() is not None, seconds=120
        )
    finally:
        driver.kill()
    ended = finish(driver)
    assert ended.code == -signal.SIGKILL, ended.err
    lines = [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]
    answered = [line for line in lines if line["status"] == "ok"]  # an error, should there be one, is called again
    assert len(answered) > len(lines) - 5, lines[0]
    assert answered[0]["response_text"] == f"hello {answered[0]['id']}"
    settle(asked)
    before = asked.read_text().split()
    resumed = run_cli(tmp_path, *words, "--no-progress")
    assert resumed.code == 0, resumed.err
    again = asked.read_text().split()[len(before) :]
    journalled = {line["id"] for line in answered}
    assert not journalled & set(again)
    assert len(again) == 1500 - len(journalled)
    assert len({record.id for record in iter_records(tmp_path / "run")}) == 1500


def settle(log: Path) -> None:
    """Wait until the workers of a dead driver are gone too."""
    size = -1
    while size != (size := log.stat().st_size):
        time.sleep(0.5)


def test_a_worker_killed_and_a_node_removed_cost_no_case_and_no_journalled_call(cluster, board, tmp_path) -> None:
    """5,000 cases over three nodes. Calls are counted in a file that outlives the processes that write to it."""
    from steelyard.engine.ray.engine import RayEngine

    suite = make_suite(5000)
    removed: list[str] = []

    over = threading.Event()

    def disturb() -> None:
        wait_for(lambda: over.is_set() or watched.taken > 1000, seconds=120)
        victim = next(node for node in cluster.others if any(node.node_id.startswith(n[-8:]) for n in watched.nodes))
        cluster.others.remove(victim)
        cluster.remove_node(victim, allow_graceful=False)
        removed.append("a node")
        # Its worker may live on for a moment. The next to die is to be another.
        wait_for(lambda: over.is_set() or losses(warnings) > 0, seconds=120)
        enough = watched.taken + 200
        wait_for(lambda: over.is_set() or watched.taken > enough, seconds=120)
        if not over.is_set():
            os.kill(int(board.lines("called")[-1][1]), signal.SIGKILL)
            removed.append("a worker")

    with RayEngine(workers=3) as mortal, caught_warnings() as warnings:
        mortal.check()
        watched = Watched(mortal, board)
        disturbing = threading.Thread(target=disturb, daemon=True)
        disturbing.start()
        try:
            result = run(Asking(board, 0.2), suite, watched, parallelism=60, output_path=tmp_path / "run")
        finally:
            over.set()
            disturbing.join()
            if removed:
                cluster.others.append(cluster.add_one())
    assert result.complete
    assert len(removed) == 2
    assert losses(warnings) >= 2  # a third where a new worker was just being started on the node that went
    assert result.metrics["counts"] == {"planned": 5000, "ok": 5000, "error": 0, "cancelled": 0, "not_started": 0}
    assert Counter(record.id for record in iter_records(tmp_path / "run")) == Counter(case.id for case in suite)
    called = Counter(line[0] for line in board.lines("called"))
    assert called.keys() == {case.id for case in suite}
    assert called_when_journalled(board) == []
    # Called again is what was in flight where something died, and what was emitted in the last moment before.
    assert called.total() - 5000 <= 2 * 60


def losses(warnings: list[str]) -> int:
    return sum("was lost, with" in warning for warning in warnings)


@contextlib.contextmanager
def caught_warnings() -> Iterator[list[str]]:
    """Collect what is logged as a warning."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("steelyard").addHandler(handler)
    try:
        yield warnings
    finally:
        logging.getLogger("steelyard").removeHandler(handler)


def test_a_slow_journal_slows_the_workers_and_nothing_piles_up(cluster, board, tmp_path) -> None:
    """1,500 answers of 64 KB that the driver takes at a tenth of the workers' pace: neither side holds more of them."""
    from steelyard.engine.ray.engine import RayEngine

    memory = Memory(board)
    with RayEngine(workers=2) as engine:
        slow = Watched(engine, board, seconds=0.001, look=memory.look)
        result = run(
            Wordy(board, 64), make_suite(1500), slow, parallelism=20, low_memory=True, output_path=tmp_path / "run"
        )
    assert result.metrics["counts"]["ok"] == 1500
    assert most_outstanding(board) <= 20 + 100
    # Without a limit 90 MB would pile up on one side or the other.
    assert memory.driver_growth < 40 * 2**20
    assert memory.worker_growth < 40 * 2**20
