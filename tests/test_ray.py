"""Whole runs on a real cluster of three nodes on this machine: shared limits, one journal, and faults."""

from __future__ import annotations

import asyncio
import json
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
from steelyard.engine.cancellation import CancellationToken
from steelyard.errors import ConfigurationError
from steelyard.journal.reader import iter_records
from steelyard.records import Record
from steelyard.targets import OpenAIChat
from support_board import Board
from support_cli import finish, run_cli, start
from support_engine import make_jobs, make_suite, wait_for
from support_mock import mock_process
from support_ray import cluster_of_nodes, needs_ray
from support_ray_targets import Asking, Deadly, DiesBeforeJudging, RefusesOnce, Watched, called_when_journalled

pytestmark = needs_ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with cluster_of_nodes(3) as made:
        yield made


@pytest.fixture(scope="module")
def engine(cluster) -> Iterator[Any]:
    """Two workers that serve all tests but those that kill some."""
    from steelyard.engine.cluster.engine import RayEngine

    with RayEngine(workers=2) as made:
        made.check()
        yield made


@pytest.fixture
def board(tmp_path) -> Board:
    (tmp_path / "board").mkdir()
    return Board(tmp_path / "board")


def run(target: Any, suite: EvalSet, engine: Any, **options: Any) -> Result:
    return Runner(target, suite, ["exact"], engine=engine, progress="off").run_sync(**options)


def answers(path: Path) -> dict[str, tuple[Any, ...]]:
    return {r.id: (r.response_text, r.status, r.case_fp, r.scored_by, r.index) for r in iter_records(path)}


def test_a_run_is_the_same_as_in_this_process_but_for_the_node(engine, board, tmp_path) -> None:
    suite = make_suite(80, expected="about c3")
    here = run(Asking(board, 0.001), suite, None, parallelism=8, output_path=tmp_path / "here")
    there = run(Asking(board, 0.001), suite, engine, parallelism=8, output_path=tmp_path / "there")
    assert answers(tmp_path / "here") == answers(tmp_path / "there")
    assert there.metrics["passed"] == here.metrics["passed"] == 1
    nodes = there.metrics["nodes"]
    assert sum(figures["requests"] for figures in nodes.values()) == 80
    assert {record.node for record in there.responses} == set(nodes)
    assert "nodes" not in here.metrics


@pytest.mark.parametrize("order", ["here first", "there first"])
def test_a_run_that_was_begun_with_one_engine_is_resumed_with_the_other(engine, board, tmp_path, order) -> None:
    suite, place = make_suite(200), tmp_path / "run"
    first, second = (None, engine) if order == "here first" else (engine, None)
    token = CancellationToken()
    stopped = Runner(Asking(board, 0.01), suite, engine=first, token=token, parallelism=4, output_path=place)
    threading.Thread(
        target=lambda: (wait_for(lambda: len(board.lines("called")) > 60), token.cancel()), daemon=True
    ).start()
    assert not stopped.run_sync(progress="off").complete
    journalled = {json.loads(line)["id"] for line in (place / "outputs.jsonl").read_text().splitlines()}
    calls = len(board.lines("called"))
    assert run(Asking(board, 0.001), suite, second, parallelism=4, output_path=place).complete
    asked_again = [line[0] for line in board.lines("called")[calls:]]
    assert sorted(asked_again) == sorted({case.id for case in suite} - journalled)
    assert len(answers(place)) == 200


def test_a_rate_holds_for_all_workers_together(engine, board) -> None:
    run(Asking(board, 0.0), make_suite(60), engine, parallelism=30, rate="100/s")
    calls = board.lines("called")
    times = sorted(float(line[2]) for line in calls)
    assert times[-1] - times[0] >= 0.55
    assert len({line[1] for line in calls}) == 2


def test_a_refusal_of_one_worker_slows_all(engine, board) -> None:
    result = run(RefusesOnce(board, 0.01), make_suite(400), engine, parallelism=8)
    assert result.metrics["counts"]["ok"] == 400
    (refused,) = board.lines("refused")
    moment = float(refused[1])
    others = [float(line[2]) - moment for line in board.lines("called") if line[1] != refused[0]]
    assert any(after < 0 for after in others)
    assert any(after > 0.95 for after in others)
    assert not [after for after in others if 0.3 < after < 0.9]
    assert len(board.lines("opened")) == len(board.lines("closed")) == 2


def test_auto_finds_what_a_provider_bears_over_the_cluster(engine, tmp_path) -> None:
    limits = ("--latency", "50ms", "--output-tokens", "1", "--max-concurrency", "10", "--retry-after", "0.05")
    with mock_process(*limits) as (mock, _):
        target = OpenAIChat("m", base_url=mock.base_url)
        result = run(target, make_suite(500), engine, parallelism="auto", max_parallelism=64)
    assert result.metrics["counts"]["ok"] == 500
    history = [allowed for _, allowed, _ in result.metrics["parallelism_history"]]
    assert 6 <= history[-1] <= 12
    assert result.metrics["peak_in_flight"] <= 32


def test_what_cannot_be_sent_is_named(engine, board) -> None:
    target = Asking(board)
    target.client = {"lock": threading.Lock()}  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"Asking\.client\.lock \(lock\) cannot be sent to a worker"):
        run(target, make_suite(3), engine)
    assert not board.lines()


def test_a_key_that_was_given_in_code_is_not_sent(engine) -> None:
    target = OpenAIChat("m", base_url="http://127.0.0.1:9/v1", api_key="sk-secret")
    with pytest.raises(ConfigurationError, match="api_key_env") as caught:
        run(target, make_suite(3), engine)
    assert "sk-secret" not in str(caught.value)


def test_a_key_that_no_worker_has_is_missed_before_the_first_call(engine, monkeypatch) -> None:
    monkeypatch.setenv("ONLY_HERE", "sk-secret")
    target = OpenAIChat("m", base_url="http://127.0.0.1:9/v1", api_key_env="ONLY_HERE")
    with pytest.raises(ConfigurationError, match=r"^api_key_env names ONLY_HERE, which is not set") as caught:
        run(target, make_suite(3), engine)
    assert "sk-secret" not in str(caught.value)


def test_an_open_loop_is_refused_before_anything_is_called(engine, board, tmp_path) -> None:
    with pytest.raises(ConfigurationError, match="local engine"):
        run(Asking(board), make_suite(3), engine, arrivals="constant:20/s", output_path=tmp_path / "run")
    assert not board.lines()
    assert not (tmp_path / "run").exists()


def test_a_case_that_kills_its_workers_becomes_an_error_and_the_others_none(cluster, board) -> None:
    from steelyard.engine.cluster.engine import RayEngine

    with RayEngine(workers=2, max_reschedules=1) as mortal:
        result = run(Deadly(board, "c7"), make_suite(60), mortal, parallelism=12)
    assert len(board.lines("killing")) == 2
    assert result.complete
    assert result.metrics["counts"] == {"planned": 60, "ok": 59, "error": 1, "cancelled": 0, "not_started": 0}
    assert result.metrics["errors"] == {"WorkerLost": 1}
    (lost,) = [record for record in result.responses if record.status == "error"]
    assert lost.id == "c7"
    assert "2 worker(s) died while this case was in flight" in (lost.error or "")


def test_an_answer_whose_worker_died_before_it_was_judged_is_not_asked_for_again(cluster, board) -> None:
    from steelyard.engine.cluster.engine import RayEngine

    said: list[Any] = []
    with RayEngine(workers=1) as mortal:
        run = mortal.run(DiesBeforeJudging(board), make_jobs(3), said.append, parallelism=3, token=CancellationToken())
        tally = asyncio.run(run)
    assert (tally.finished, tally.cancelled) == (3, 0)
    assert sorted(board.noted("asked")) == sorted(board.noted("judged")) == [0, 1, 2]
    assert sum(isinstance(item, Record) for item in said) == 3


AGENT = """
import asyncio
from pathlib import Path
from beside import LOG

async def answer(case):
    with open(LOG, "a") as log:
        log.write(case.id + chr(10))
    await asyncio.sleep(0.02)
    return Path("words.txt").read_text() + case.id
"""


def write_suite(folder: Path, count: int) -> None:
    (folder / "agent.py").write_text(AGENT)
    (folder / "beside.py").write_text(f"LOG = {str(folder / 'asked.log')!r}\n")
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
            lambda: (out.exists() and out.read_bytes().count(b"\n") > 200) or driver.poll() is not None, seconds=60
        )
    finally:
        driver.kill()
    ended = finish(driver)
    assert ended.code == -signal.SIGKILL, ended.err
    lines = [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]
    assert lines[0]["response_text"] == f"hello {lines[0]['id']}"
    settle(asked)
    before = asked.read_text().split()
    resumed = run_cli(tmp_path, *words, "--no-progress")
    assert resumed.code == 0, resumed.err
    again = asked.read_text().split()[len(before) :]
    journalled = {line["id"] for line in lines}
    assert not journalled & set(again)
    assert len(again) == 1500 - len(journalled)
    assert len(answers(tmp_path / "run")) == 1500


def settle(log: Path) -> None:
    """Wait until the workers of a dead driver are gone too."""
    size = -1
    while size != (size := log.stat().st_size):
        time.sleep(0.5)


def test_a_worker_killed_and_a_node_removed_cost_no_case_and_no_journalled_call(cluster, board, tmp_path) -> None:
    """The last test of this file: it leaves the cluster with a node less."""
    from steelyard.engine.cluster.engine import RayEngine

    suite = make_suite(5000)

    def disturb() -> None:
        wait_for(lambda: len(board.lines("journalled")) > 1000, seconds=60)
        cluster.remove_node(cluster.others[0], allow_graceful=False)
        wait_for(lambda: len(board.lines("journalled")) > 2500, seconds=60)
        os.kill(int(board.lines("called")[-1][1]), signal.SIGKILL)

    disturbing = threading.Thread(target=disturb, daemon=True)
    with RayEngine(workers=3) as mortal:
        mortal.check()
        disturbing.start()
        result = run(Asking(board), suite, Watched(mortal, board), parallelism=60, output_path=tmp_path / "run")
    disturbing.join()
    assert result.complete
    assert result.metrics["counts"] == {"planned": 5000, "ok": 5000, "error": 0, "cancelled": 0, "not_started": 0}
    assert Counter(record.id for record in iter_records(tmp_path / "run")) == Counter(case.id for case in suite)
    assert len({line[0] for line in board.lines("called")}) == 5000
    assert called_when_journalled(board) == []
