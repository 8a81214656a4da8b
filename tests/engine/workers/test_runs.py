"""Whole runs on worker processes and on a real cluster of one node: shared limits, one journal, what is refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, ProcessEngine, Result, Runner
from steelyard.engine.base import CancellationToken
from steelyard.errors import ConfigurationError
from steelyard.journal.reader import iter_records
from steelyard.load.sweep import Sweep
from steelyard.scoring import Judge
from steelyard.targets import Command, OpenAIChat
from tests.support.board import Board
from tests.support.engine import make_suite, wait_for
from tests.support.mock import mock_process
from tests.support.ray import local_cluster, patiently
from tests.support.ray_targets import Asking, Failing, Juror, RefusesOnce, Seeing, weather

on_ray = [pytest.mark.ray, patiently]


@pytest.fixture(scope="module", params=["processes", pytest.param("ray", marks=on_ray)])
def engine(request) -> Iterator[Any]:
    """Two workers that serve all tests of this file."""
    if request.param == "processes":
        with ProcessEngine(2) as processes:
            processes.check()
            yield processes
        return
    from steelyard.engine.ray.engine import RayEngine

    with local_cluster(cpus=4), RayEngine(workers=2) as made:
        made.check()
        yield made


def is_ray(engine: Any) -> bool:
    return not isinstance(engine, ProcessEngine)


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
    assert "nodes" not in here.metrics
    if not is_ray(engine):
        assert "nodes" not in there.metrics
        return
    nodes = there.metrics["nodes"]
    assert sum(figures["requests"] for figures in nodes.values()) == 80
    assert {record.node for record in there.responses} == set(nodes)


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
    called_again = [line[0] for line in board.lines("called")[calls:]]
    assert sorted(called_again) == sorted({case.id for case in suite} - journalled)
    assert len(answers(place)) == 200


def test_a_rate_holds_for_all_workers_together(engine, board) -> None:
    run(Asking(board, 0.0), make_suite(60), engine, parallelism=30, rate="100/s")
    calls = board.lines("called")
    times = sorted(float(line[2]) for line in calls)
    assert times[-1] - times[0] >= 0.4  # 0.59, less the time that a message takes to reach a busy worker
    assert len({line[1] for line in calls}) == 2


def test_a_refusal_of_one_worker_slows_all(engine, board) -> None:
    result = run(RefusesOnce(board, 0.01), make_suite(1000), engine, parallelism=8)
    assert result.metrics["counts"]["ok"] == 1000
    (refused,) = board.lines("refused")
    moment = float(refused[1])
    others = [float(line[2]) - moment for line in board.lines("called") if line[1] != refused[0]]
    assert any(after < 0 for after in others)
    assert any(after > 0.95 for after in others)
    assert not [after for after in others if 0.3 < after < 0.9]
    assert len(board.lines("opened")) == len(board.lines("closed")) == 2


def test_auto_finds_what_a_provider_handles_over_the_cluster(engine, tmp_path) -> None:
    limits = ("--latency", "50ms", "--output-tokens", "1", "--max-concurrency", "10", "--retry-after", "0.05")
    with mock_process(*limits) as (mock, _):
        target = OpenAIChat("m", base_url=mock.base_url)
        result = run(target, make_suite(500), engine, parallelism="auto", max_parallelism=64)
    assert result.metrics["counts"]["ok"] == 500
    history = [allowed for _, allowed, _ in result.metrics["parallelism_history"]]
    assert 5 <= history[-1] <= 20
    assert result.metrics["peak_in_flight"] <= 32


def test_a_slow_judge_does_not_decide_how_much_the_target_is_asked_over_the_cluster(engine) -> None:
    with (
        mock_process("--latency", "5ms", "--output-tokens", "1") as (quick, _),
        mock_process("--latency", "300ms", "--output-tokens", "1") as (slow, _),
    ):
        judge = Judge(model="j", prompt="correctness_v1", target=OpenAIChat("j", base_url=slow.base_url, stream=False))
        target = OpenAIChat("m", base_url=quick.base_url, stream=False)
        cases = [EvalCase(id=f"c{number}", prompt=f"{number}?", expected="x") for number in range(200)]
        runner = Runner(target, EvalSet("s", cases), [judge], engine=engine, progress="off")
        result = runner.run_sync(parallelism="auto", max_parallelism=64)
        assert result.metrics["counts"]["ok"] == 200
        assert 16 < slow.stats()["peak_concurrency"] <= 64
        assert quick.stats()["peak_concurrency"] <= 64


def test_what_cannot_be_sent_is_named(engine, board) -> None:
    target = Asking(board)
    target.client = {"lock": threading.Lock()}  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"Asking\.client\.lock \(lock\) cannot be sent to a worker"):
        run(target, make_suite(3), engine)
    assert not board.lines()


def test_a_key_that_was_given_in_code_leaves_this_machine_with_no_run(engine) -> None:
    if not is_ray(engine):
        with mock_process("--latency", "0ms", "--key", "sk-secret") as (mock, _):
            result = run(OpenAIChat("m", base_url=mock.base_url, api_key="sk-secret"), make_suite(3), engine)
        assert result.metrics["counts"]["ok"] == 3
        return
    target = OpenAIChat("m", base_url="http://127.0.0.1:9/v1", api_key="sk-secret")
    with pytest.raises(ConfigurationError, match="api_key_env") as caught:
        run(target, make_suite(3), engine)
    assert "sk-secret" not in str(caught.value)


def test_a_key_that_no_worker_has_is_missed_before_the_first_call(engine, monkeypatch) -> None:
    monkeypatch.setenv("ONLY_HERE", "sk-secret")
    target = OpenAIChat("m", base_url="http://127.0.0.1:9/v1", api_key_env="ONLY_HERE")
    with pytest.raises(
        ConfigurationError, match=r"^openai-chat, model m: api_key_env names ONLY_HERE, which is not set"
    ) as caught:
        run(target, make_suite(3), engine)
    assert "sk-secret" not in str(caught.value)


def test_the_client_load_is_that_of_the_busiest_worker_by_name(engine, board) -> None:
    client = run(Asking(board), make_suite(30), engine, parallelism=4).metrics["client"]
    assert client["process"].startswith("the worker on " if is_ray(engine) else "worker process ")


def test_arrivals_are_shared_by_the_workers_each_sends_every_second_one(engine, board, tmp_path) -> None:
    options: dict[str, Any] = {"arrivals": "constant:50/s", "duration": 2.0, "output_path": tmp_path / "run"}
    result = run(Asking(board, 0.001), make_suite(7), engine, **options)
    sends = result.metrics["load"]["sends"]
    assert sends["planned"] == 100
    assert sends["missed"] <= 2  # at the end of the time, on a busy machine
    assert result.metrics["counts"]["ok"] == sends["sent"] == len(board.lines("called"))
    assert result.complete
    parts = sends["workers"]
    assert sum(part["sent"] for part in parts.values()) == sends["sent"]
    assert [48 <= part["sent"] <= 50 for part in parts.values()] == [True, True]
    # By the clock of the machine, which both have: one schedule, in turns.
    times = [float(line[2]) for line in board.lines("called")]
    assert 1.9 <= max(times) - min(times) < 2.5
    turns = [line[1] for line in sorted(board.lines("called"), key=lambda line: float(line[2]))]
    assert sum(one != other for one, other in itertools.pairwise(turns)) > 60


def test_an_open_loop_of_a_number_of_requests_sends_them_all(engine, board) -> None:
    result = run(Asking(board, 0.001), make_suite(3), engine, arrivals="poisson:200/s", requests=50)
    assert result.metrics["counts"]["ok"] == result.metrics["load"]["sends"]["sent"] == 50
    assert result.metrics["load"]["sends"]["missed"] == 0


def test_a_cache_and_judges_serve_runs_there_as_here(engine, board, tmp_path) -> None:
    """Asked on the cluster, found in the cache by this process and by the cluster, and so are the judges' replies."""
    for number, who in enumerate((engine, None, engine)):
        target, judge = Asking(board, 0.0, model_id="m"), Judge(model="j", target=Juror(board))
        runner = Runner(
            target, make_suite(30, expected="x"), [judge], engine=who, parallelism=8, num_runs=3, progress="off"
        )
        result = runner.run_sync(cache=tmp_path / "cache", output_path=tmp_path / str(number))
        assert result.metrics["cached"] == (30 if number else 0)
        assert len(board.lines("called")) == 30
        assert len(board.lines("judged")) == 30 * 3
        assert all(len(record.scores[0].samples or ()) == 3 for record in result.responses)


def test_a_judged_run_is_resumed_on_the_cluster_and_then_locally(engine, board, tmp_path) -> None:
    """Begun here, resumed there, ended here: only what was in flight at a stop is called again."""
    place, suite = tmp_path / "run", make_suite(360, expected="x")
    for stop_at, who in ((40, None), (80, engine), (None, None)):
        token, judge = CancellationToken(), Judge(model="j", target=Juror(board))
        runner = Runner(Asking(board, 0.02), suite, [judge], engine=who, token=token, parallelism=6, progress="off")
        with cancelled_when(token, board, stop_at):
            complete = runner.run_sync(output_path=place).complete
        assert complete is (stop_at is None)
    assert len(answers(place)) == 360
    called = Counter(line[0] for line in board.lines("called"))
    assert len(called) == 360
    assert called.total() <= 360 + 2 * 6


@contextlib.contextmanager
def cancelled_when(token: CancellationToken, board: Board, judged: int | None) -> Iterator[None]:
    """Cancel as soon as `judged` cases have been judged, unless it is None."""
    if judged is None:
        yield
        return
    stop = threading.Thread(
        target=lambda: (wait_for(lambda: len(board.lines("judged")) >= judged, seconds=60), token.cancel())
    )
    stop.start()
    yield
    stop.join()


def test_sessions_commands_and_tools_work_there_as_here(engine, tmp_path) -> None:
    session = tmp_path / "session.json"
    session.write_text('{"data": {"seen": []}, "messages": [{"role": "system", "content": "first"}]}')
    begun = run(Seeing(), make_suite(6), engine, parallelism=3, initial_session_file=session)
    assert [record.response_text for record in begun.responses] == [f"first ['c{n}']" for n in range(6)]
    (tmp_path / "words").write_text("from a file")
    printed = run(Command(["/bin/cat", "words"], cwd=tmp_path), make_suite(3), engine, parallelism=3)
    assert {record.response_text for record in printed.responses} == {"from a file"}
    with mock_process("--latency", "0ms", "--tool-call-rate", "1") as (mock, _):
        agent = OpenAIChat("m", base_url=mock.base_url, functions={"weather": weather})
        looped = run(agent, make_suite(4), engine, parallelism=2)
    for record in looped.responses:
        assert any(message.get("role") == "tool" for message in record.messages or []), record


def test_a_time_limit_holds_on_workers(engine, board) -> None:
    result = run(Asking(board, 30.0), make_suite(4), engine, parallelism=2, timeout=0.1)
    assert result.metrics["errors"] == {"TimeoutError": 4}
    if is_ray(engine):
        assert {record.node for record in result.responses} == set(result.metrics["nodes"])


def test_too_many_errors_and_a_spent_budget_stop_the_workers(engine, board, tmp_path) -> None:
    failing = run(Failing(board), make_suite(2000), engine, parallelism=8, stop_error_rate=0.5)
    assert "stop_error_rate" in failing.metrics["stopped"]
    assert len(board.lines("called")) < 600
    before = len(board.lines("called"))
    prices = {"m": {"input": 1.0, "output": 1.0}}
    paid = Asking(board, 0.005, model_id="m", tokens=1_000_000)
    spent = run(paid, make_suite(2000), engine, parallelism=8, prices=prices, max_cost=200.0)
    assert "max_cost" in spent.metrics["stopped"]
    assert 100 <= spent.metrics["cost"] == len(board.lines("called")) - before <= 200


def test_a_sweep_is_measured_by_the_workers_and_judged_here(engine, board, tmp_path) -> None:
    judge = Judge(model="j", target=Juror(board))
    runner = Runner(Asking(board, 0.01), make_suite(5, expected="x"), [judge], engine=engine, progress="off")
    result = Sweep(runner, levels=[2, 6], output_path=tmp_path / "sweep", requests=20).run_sync()
    assert [level.level for level in result.levels] == [2, 6]
    assert [level.peak_in_flight for level in result.levels] == [2, 6]
    assert len(board.lines("judged")) == 20 + 20
    assert str(os.getpid()) not in {line[1] for line in board.lines("called")}
