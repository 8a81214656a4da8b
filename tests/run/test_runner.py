"""Running a suite from Python: with and without a loop, a directory, memory to spare."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from steelyard import (
    ConfigurationError,
    EvalCase,
    EvalSet,
    InvocationContext,
    InvocationResponse,
    Record,
    Result,
    RunFinished,
    Runner,
)
from steelyard.targets import Simulated
from tests.support.engine import make_suite

QUIET: dict[str, Any] = {"progress": "off"}


def echo(case: EvalCase) -> str:
    return f"echo {case.prompt}"


async def echo_slowly(case: EvalCase) -> str:
    await asyncio.sleep(0.001)
    return f"echo {case.prompt}"


def texts(records: list[Record]) -> list[str | None]:
    return [record.response_text for record in records]


EXPECTED = [f"echo what is {n}?" for n in range(7)]


def test_run_inside_a_loop() -> None:
    async def main() -> Result:
        return await Runner(echo_slowly, make_suite(7), parallelism=3, **QUIET).run()

    result = asyncio.run(main())
    assert texts(result.responses) == EXPECTED
    assert (result.complete, result.cancelled, result.path) == (True, False, None)


def test_run_sync_without_a_loop() -> None:
    assert texts(Runner(echo_slowly, make_suite(7), parallelism=3, **QUIET).run_sync().responses) == EXPECTED


def test_run_sync_inside_a_running_loop() -> None:
    """As in a notebook."""

    async def main() -> Result:
        return Runner(echo_slowly, make_suite(7), parallelism=3, **QUIET).run_sync()

    assert texts(asyncio.run(main()).responses) == EXPECTED


def test_run_sync_in_another_thread() -> None:
    runner = Runner(echo_slowly, make_suite(7), parallelism=3, **QUIET)
    with ThreadPoolExecutor(1) as pool:
        assert texts(pool.submit(runner.run_sync).result(30).responses) == EXPECTED


def test_run_sync_on_a_loop_of_ones_own_choice() -> None:
    made: list[asyncio.AbstractEventLoop] = []
    seen: list[asyncio.AbstractEventLoop] = []

    def factory() -> asyncio.AbstractEventLoop:
        made.append(asyncio.new_event_loop())
        return made[-1]

    async def answer(case: EvalCase) -> str:
        seen.append(asyncio.get_running_loop())
        return ""

    Runner(answer, make_suite(1), **QUIET).run_sync(loop_factory=factory)
    assert made == seen


def test_two_runs_of_one_runner_at_once_on_one_loop() -> None:
    async def main() -> list[Result]:
        runner = Runner(echo_slowly, make_suite(7), parallelism=3, **QUIET)
        return await asyncio.gather(runner.run(), runner.run(limit=2))

    first, second = asyncio.run(main())
    assert texts(first.responses) == EXPECTED
    assert texts(second.responses) == EXPECTED[:2]


def test_two_runs_of_one_runner_at_once_in_two_threads(tmp_path) -> None:
    runner = Runner(echo, make_suite(7), parallelism=3, **QUIET)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(runner.run_sync, output_path=tmp_path / name) for name in ("a", "b")]
        assert [texts(run.result(30).responses) for run in runs] == [EXPECTED, EXPECTED]


def test_what_run_raises_is_what_run_sync_raises() -> None:
    empty = EvalSet("empty", [])
    with pytest.raises(ConfigurationError, match="suite 'empty' has no cases"):
        asyncio.run(Runner(echo, empty, **QUIET).run())
    with pytest.raises(ConfigurationError, match="suite 'empty' has no cases"):
        Runner(echo, empty, **QUIET).run_sync()


def test_the_callers_context_variables_reach_the_target() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("from the caller")

    def sync_answer(case: EvalCase) -> str:
        return variable.get()

    async def async_answer(case: EvalCase) -> str:
        return variable.get()

    for target in (sync_answer, async_answer):
        result = Runner(target, make_suite(2), parallelism=2, **QUIET).run_sync()
        assert texts(result.responses) == ["from the caller"] * 2


def test_in_memory_the_result_holds_responses_and_stats() -> None:
    result = Runner(echo, make_suite(7), ["exact"], **QUIET).run_sync()
    assert result.load_responses() == result.responses
    assert list(result.iter_responses()) == result.responses
    assert [record.id for record in result.responses] == [f"c{n}" for n in range(7)]
    assert result.stats["total_requests"] == 7
    assert result.stats is result.metrics["stats"]
    assert "complete n=7 ok=7 error=0" in repr(result)


def test_on_disk_and_in_low_memory_the_responses_are_read_when_asked_for(tmp_path) -> None:
    kept = Runner(echo_slowly, make_suite(7), parallelism=3, output_path=tmp_path / "a", **QUIET).run_sync()
    low = Runner(echo_slowly, make_suite(7), parallelism=3, **QUIET).run_sync(
        low_memory=True, output_path=tmp_path / "b"
    )
    assert low.responses == []
    assert texts(kept.responses) == texts(low.load_responses()) == texts(list(low.iter_responses())) == EXPECTED
    assert [record.index for record in low.load_responses()] == list(range(7))
    assert low.path == tmp_path / "b"


def test_a_result_can_be_loaded_again(tmp_path) -> None:
    result = Runner(echo, make_suite(7), ["exact"], output_path=tmp_path / "run", **QUIET).run_sync()
    loaded = Result.load(tmp_path / "run")
    assert loaded.metrics == result.metrics
    assert (loaded.complete, loaded.cancelled, loaded.responses) == (True, False, [])
    assert texts(loaded.load_responses()) == EXPECTED
    with pytest.raises(ConfigurationError, match="is not a run directory"):
        Result.load(tmp_path)


def test_a_finished_run_is_refused_and_forced(tmp_path) -> None:
    runner = Runner(echo, make_suite(7), output_path=tmp_path / "run", **QUIET)
    runner.run_sync()
    with pytest.raises(RunFinished):
        runner.run_sync()
    assert runner.run_sync(force=True).complete


def test_without_an_output_path_nothing_is_written(tmp_path, monkeypatch) -> None:
    """Neither in the current directory nor, after the run, in the place for temporary files."""
    scratch = tmp_path / "scratch"
    here = tmp_path / "here"
    scratch.mkdir()
    here.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.chdir(here)
    Runner(echo, make_suite(3), ["exact"], **QUIET).run_sync()
    Runner(echo, EvalSet("once", iter([EvalCase(id="a", prompt="p")])), **QUIET).run_sync()
    assert [*here.iterdir(), *scratch.iterdir()] == []


def one_shot(count: int) -> Iterator[EvalCase]:
    return (EvalCase(prompt=f"what is {n}?") for n in range(count))


def test_a_one_shot_suite_is_written_down_first(tmp_path) -> None:
    result = Runner(echo, EvalSet("once", one_shot(7)), output_path=tmp_path / "run", **QUIET).run_sync()
    assert texts(result.responses) == EXPECTED
    lines = (tmp_path / "run" / "cases.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [f"what is {n}?" for n in range(7)]
    assert [json.loads(line)["id"] for line in lines] == [record.id for record in result.responses]


def test_a_runner_with_a_one_shot_suite_can_run_again_from_what_was_written_down(tmp_path) -> None:
    runner = Runner(echo, EvalSet("once", one_shot(7)), output_path=tmp_path / "run", **QUIET)
    runner.run_sync()
    assert texts(runner.run_sync(output_path=tmp_path / "again").responses) == EXPECTED


def test_a_one_shot_suite_without_a_directory_runs_once_and_says_so_the_second_time() -> None:
    runner = Runner(echo, EvalSet("once", one_shot(7)), **QUIET)
    assert texts(runner.run_sync().responses) == EXPECTED
    with pytest.raises(ConfigurationError, match=r"once|one-shot|read"):
        runner.run_sync()


def test_a_suite_that_can_be_read_again_leaves_no_cases_file(tmp_path) -> None:
    Runner(echo, make_suite(2), output_path=tmp_path / "run", **QUIET).run_sync()
    assert not (tmp_path / "run" / "cases.jsonl").exists()


def random_answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
    numbers = context.rng
    if numbers.random() < 0.2:
        raise ValueError(f"unlucky {numbers.random()}")
    return InvocationResponse(response_text=str(numbers.random()), num_tokens_output=numbers.randrange(100))


def answers(result: Result) -> dict[str, tuple[Any, ...]]:
    return {
        record.id: (record.response_text, record.error, record.num_tokens_output, record.scores)
        for record in result.load_responses()
    }


@pytest.mark.parametrize("target", [random_answer, Simulated(latency=0, tokens_per_second=0, error_rate=0.1)])
def test_the_same_seed_gives_the_same_answers_whatever_the_parallelism_or_the_selection(target) -> None:
    suite = make_suite(40, expected="yes")
    runner = Runner(target, suite, ["exact"], seed=7, parallelism=1, **QUIET)
    everything = answers(runner.run_sync())
    assert answers(runner.run_sync(parallelism=16)) == everything
    some = answers(runner.run_sync(match="c1*", parallelism=4))
    assert len(some) == 11
    assert some == {case_id: everything[case_id] for case_id in some}
    assert answers(runner.run_sync(seed=8)) != everything


def test_a_resumed_run_gives_the_answers_of_an_uninterrupted_one(tmp_path) -> None:
    suite = make_suite(40)
    whole = answers(Runner(random_answer, suite, seed=7, **QUIET).run_sync())
    runner = Runner(random_answer, suite, seed=7, output_path=tmp_path / "run", **QUIET)
    runner.run_sync(limit=13)
    (tmp_path / "run" / "metrics.json").unlink()
    assert answers(runner.run_sync(parallelism=5)) == whole


def test_the_run_stops_early_when_too_many_fail_and_can_be_resumed(tmp_path) -> None:
    broken = True

    def answer(case: EvalCase) -> str:
        if broken:
            raise ValueError("down")
        return "up"

    runner = Runner(answer, make_suite(120), stop_error_rate=0.5, output_path=tmp_path / "run", **QUIET)
    result = runner.run_sync()
    assert (result.cancelled, result.complete) == (True, False)
    assert result.metrics["counts"] == {"planned": 120, "ok": 0, "error": 50, "cancelled": 0, "not_started": 70}
    assert result.metrics["stopped"] == "error rate 100.0% is above stop_error_rate 50.0%"
    broken = False
    result = runner.run_sync()
    assert (result.cancelled, result.complete) == (False, True)
    assert result.metrics["counts"]["ok"] == 120


@pytest.mark.parametrize(("cases", "rate"), [(49, 0.0), (120, 1.0), (120, None)])
def test_the_run_does_not_stop_before_fifty_cases_or_below_its_rate(cases, rate) -> None:
    def fail(case: EvalCase) -> str:
        raise ValueError("down")

    result = Runner(fail, make_suite(cases), stop_error_rate=rate, **QUIET).run_sync()
    assert (result.complete, result.metrics["counts"]["error"]) == (True, cases)


def test_a_runner_can_be_run_again_and_does_not_change_the_callers_cases() -> None:
    cases = [EvalCase(prompt="p"), EvalCase(prompt="q")]
    runner = Runner(echo, EvalSet("mine", cases, system_prompt="be brief"), **QUIET)
    first, second = runner.run_sync(), runner.run_sync()
    assert texts(first.responses) == texts(second.responses) == ["echo p", "echo q"]
    assert cases == [EvalCase(prompt="p"), EvalCase(prompt="q")]


def test_progress_goes_to_stderr_and_nothing_to_stdout(capfd) -> None:
    Runner(echo, make_suite(3), progress="lines").run_sync()
    out, err = capfd.readouterr()
    assert out == ""
    assert "3/3" in err


def test_a_run_with_progress_off_says_nothing(capfd) -> None:
    Runner(echo, make_suite(3), **QUIET).run_sync()
    assert capfd.readouterr() == ("", "")


def test_a_bad_case_is_refused_before_the_directory_is_made(tmp_path) -> None:
    suite = EvalSet("twice", [EvalCase(id="a", prompt="p"), EvalCase(id="a", prompt="q")])
    with pytest.raises(ConfigurationError, match="'a'"):
        Runner(echo, suite, output_path=tmp_path / "run", **QUIET).run_sync()
    assert list(tmp_path.iterdir()) == []


def test_relative_output_paths_are_seen_from_where_the_run_began(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = Runner(echo, make_suite(2), output_path="runs/x", **QUIET).run_sync()
    assert (tmp_path / "runs" / "x" / "metrics.json").exists()
    assert len(result.load_responses()) == 2


def test_a_result_reads_its_directory_even_after_the_caller_moved_elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = Runner(echo, make_suite(2), output_path="runs/x", low_memory=True, **QUIET).run_sync()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.chdir(elsewhere)
    assert len(result.load_responses()) == 2


def test_run_sync_from_many_threads_at_once() -> None:
    results: list[Result] = []

    def go() -> None:
        results.append(Runner(echo, make_suite(3), **QUIET).run_sync())

    threads = [threading.Thread(target=go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [texts(result.responses) for result in results] == [EXPECTED[:3]] * 8
