"""A sweep measures one level after another, keeps what is finished, and recommends only usable levels."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steelyard import CancellationToken, EvalCase, EvalSet, InvocationContext, InvocationResponse, Runner
from steelyard.errors import ConfigurationError, RunFinished, RunLocked, RunMismatch, TargetError, TransientError
from steelyard.journal.lock import RunLock
from steelyard.load.sweep import Sweep, SweepResult
from steelyard.report.sweep.table import sweep_table
from steelyard.run import send_policy
from steelyard.scoring import Exact, Regex
from steelyard.stats import client_load
from steelyard.targets import OpenAIChat
from tests.support.cli import wait_until
from tests.support.judged import Assessor
from tests.support.sweep import LimitedTarget

CASES = [EvalCase(id=f"c{n}", prompt=f"p{n}", expected=f"P{n}") for n in range(3)]


@pytest.fixture(autouse=True)
def a_client_with_time_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this machine is busy with is not what these tests are about."""
    monkeypatch.setattr(client_load, "MIN_SECONDS", float("inf"))


def says_p1(case: EvalCase, response: InvocationResponse) -> bool:
    return response.response_text == "P1"


def runner_of(target: object, scorers: tuple[object, ...] = (), **options: Any) -> Runner:
    return Runner(target, EvalSet(id="s", cases=CASES), scorers, progress="off", **options)


def sweep_of(
    target: object, path: Path, levels: Any = (1, 4), *, scorers: tuple[object, ...] = (), **how: Any
) -> Sweep:
    if "duration" not in how:
        how = {"requests": 20, **how}
    return Sweep(runner_of(target, scorers), levels=levels, output_path=path, **how)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "outputs.jsonl").read_bytes().splitlines()]


def numbers(result: SweepResult) -> list[int]:
    return [level.level for level in result.levels]


def on_call(target: LimitedTarget, number: int, then: Callable[[], None]) -> None:
    """Call something at a given call of the target."""
    answer = target.invoke

    async def invoke(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        if target.asked + 1 == number:
            then()
        return await answer(case, context)

    target.invoke = invoke  # type: ignore[method-assign]


def test_each_level_is_a_run_of_its_own_and_the_sweep_is_written_last(tmp_path: Path) -> None:
    result = sweep_of(LimitedTarget(100, 0.01), tmp_path, requests=15, scorers=("exact",)).run_sync()
    assert result.complete
    assert numbers(result) == [1, 4]
    assert [level.requests for level in result.levels] == [15, 15]
    assert [level.pass_rate for level in result.levels] == [1.0, 1.0]
    assert len(lines(tmp_path / "level-4")) == 15
    assert json.loads((tmp_path / "sweep.json").read_bytes()) == json.loads(json.dumps(result.to_metrics()))
    assert result.recommendation.level == 4


def test_a_level_goes_round_the_cases(tmp_path: Path) -> None:
    sweep_of(LimitedTarget(100, 0.001), tmp_path, levels=[2]).run_sync()
    asked = sorted((line["trial"], line["id"]) for line in lines(tmp_path / "level-2"))
    assert asked == sorted((number // 3, f"c{number % 3}") for number in range(20))


def test_errors_are_measured_and_not_retried(tmp_path: Path) -> None:
    target = LimitedTarget(2, 0.01)
    result = sweep_of(target, tmp_path, levels=[2, 8], requests=20).run_sync()
    assert target.asked == 20 + 20
    assert [level.error_rate == 0.0 for level in result.levels] == [True, False]
    assert result.recommendation.level == 2
    assert result.recommendation.reason.startswith("at 8 the error rate is ")


class Forbids(LimitedTarget):
    """Refuses with a status that would last, were it not for the load."""

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        try:
            return await super().invoke(case, context)
        except TransientError as error:
            raise TargetError("HTTP 403", partial=InvocationResponse(http_status=403)) from error


def test_an_endpoint_that_has_answered_once_is_measured_however_it_refuses_at_a_higher_level(tmp_path: Path) -> None:
    result = sweep_of(Forbids(2), tmp_path, levels=[1, 64], requests=200).run_sync()
    assert result.complete
    assert result.levels[1].requests == 200
    assert result.levels[1].error_kinds.keys() == {"403 forbidden"}
    assert result.recommendation.level == 1


def test_an_endpoint_that_has_never_answered_ends_the_sweep(tmp_path: Path) -> None:
    result = sweep_of(Forbids(0), tmp_path, levels=[4, 8], requests=80).run_sync()
    assert result.levels == []
    assert "every call is refused: the first 20 calls all failed" in (result.stopped or "")


def test_a_cache_is_neither_used_nor_filled(tmp_path: Path) -> None:
    target = LimitedTarget(100, 0.001)
    runner = runner_of(target, cache=tmp_path / "cache")
    Sweep(runner, levels=[1], requests=20, output_path=tmp_path / "out").run_sync()
    assert target.asked == 20
    assert not list(tmp_path.glob("cache/**/*.json"))


def test_judges_are_asked_when_the_level_is_over(tmp_path: Path) -> None:
    target = LimitedTarget(100, 0.002)
    busy: list[int] = []
    assessor = Assessor(
        lambda case_id, trial, run: float(case_id[:2] == "c0"), on_call=lambda *_: busy.append(target.in_flight)
    )
    result = sweep_of(target, tmp_path, levels=[2], scorers=(Exact(), assessor.judge())).run_sync()
    assert len(busy) == 20
    assert not any(busy)
    assert target.asked == 20
    (level,) = result.levels
    assert level.judged
    assert level.pass_rate == pytest.approx(7 / 20)  # c0 was sent seven times in twenty
    assert "scores" in lines(tmp_path / "level-2")[0]
    assert len(lines(tmp_path / "level-2" / "judged")) == 20


def test_a_judge_that_is_asked_only_about_failures_sees_the_verdicts_before_it(tmp_path: Path) -> None:
    assessor = Assessor()
    scorers = (says_p1, assessor.judge(when="failed"))
    result = sweep_of(LimitedTarget(100, 0.001), tmp_path, levels=[1], requests=9, scorers=scorers).run_sync()
    assert len(assessor.calls) == 6  # of nine, c1 was right three times
    assert result.levels[0].pass_rate == 1.0


@pytest.mark.parametrize(
    ("scorer", "said"),
    [
        (Exact(), []),
        (Regex(pattern="P1"), ["level 1: 2 answers are judged"]),
        (says_p1, ["level 1: 3 answers are scored"]),
    ],
    ids=["fails none", "fails two", "scores after the level itself"],
)
def test_only_answers_that_a_judge_is_asked_about_are_called_judged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scorer: Any, said: list[str]
) -> None:
    scorers = (scorer, Assessor().judge(when="failed"))
    with caplog.at_level("INFO"):
        sweep_of(LimitedTarget(100, 0.001), tmp_path, levels=[1], requests=3, scorers=scorers).run_sync()
    assert [one for one in caplog.messages if "answer" in one] == said


def test_an_async_scorer_waits_for_the_end_of_the_level_too(tmp_path: Path) -> None:
    target = LimitedTarget(100, 0.002)
    busy: list[int] = []

    async def slowly(case: EvalCase, response: InvocationResponse) -> bool:
        busy.append(target.in_flight)
        return True

    result = sweep_of(target, tmp_path, levels=[2], scorers=(slowly,)).run_sync()
    assert busy == [0] * 20
    assert result.levels[0].pass_rate == 1.0


def test_an_interrupted_sweep_keeps_its_finished_levels_and_measures_the_other_again(tmp_path: Path) -> None:
    token, target = CancellationToken(), LimitedTarget(100, 0.005)
    on_call(target, 20 + 11, lambda: token.cancel("enough"))
    result = sweep_of(target, tmp_path, levels=[1, 4, 5], token=token).run_sync()
    assert not result.complete
    assert (numbers(result), result.stopped) == ([1], "enough")
    assert not (tmp_path / "sweep.json").exists()
    again = LimitedTarget(100, 0.005)
    result = sweep_of(again, tmp_path, levels=[1, 4, 5]).run_sync()
    assert result.complete
    assert numbers(result) == [1, 4, 5]
    assert again.asked == 20 + 20
    assert len(lines(tmp_path / "level-4")) == 20


def test_a_sweep_that_is_interrupted_while_judging_goes_on_judging(tmp_path: Path) -> None:
    token, target = CancellationToken(), LimitedTarget(100, 0.001)
    first = Assessor(on_call=lambda *_: token.cancel("enough") if len(first.calls) == 8 else None)
    assert not sweep_of(target, tmp_path, levels=[1], scorers=(first.judge(),), token=token).run_sync().complete
    second = Assessor()
    result = sweep_of(target, tmp_path, levels=[1], scorers=(second.judge(),)).run_sync()
    assert result.levels[0].pass_rate == 1.0
    assert target.asked == 20
    kept = {line["id"] for line in lines(tmp_path / "level-1" / "judged")}
    assert len(kept) == 20
    assert len(second.calls) < 20


def test_cancelling_during_the_pause_ends_the_sweep_at_once(tmp_path: Path) -> None:
    token = CancellationToken()
    sweep = sweep_of(LimitedTarget(100, 0.001), tmp_path, pause=3600.0, token=token)

    async def cancel_in_the_pause() -> SweepResult:
        running = asyncio.create_task(sweep.run())
        await asyncio.to_thread(wait_until, (tmp_path / "level-1" / "metrics.json").exists)
        token.cancel("enough")
        return await running

    result = asyncio.run(cancel_in_the_pause())
    assert (numbers(result), result.stopped) == ([1], "enough")
    assert not (tmp_path / "level-4").exists()


def test_a_token_that_is_cancelled_before_leaves_nothing_measured(tmp_path: Path) -> None:
    token, target = CancellationToken(), LimitedTarget(1)
    token.cancel("enough")
    result = sweep_of(target, tmp_path, token=token).run_sync()
    assert (numbers(result), result.recommendation.level, target.asked) == ([], None, 0)


def test_a_cancelled_task_lets_go_of_the_folder(tmp_path: Path) -> None:
    async def cancel() -> None:
        running = asyncio.create_task(sweep_of(LimitedTarget(100, 30.0), tmp_path).run())
        await asyncio.to_thread(wait_until, (tmp_path / "level-1" / "outputs.jsonl").exists)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancel())
    with RunLock(tmp_path):
        pass


def test_a_finished_sweep_is_refused_and_force_starts_over(tmp_path: Path) -> None:
    target = LimitedTarget(100, 0.001)
    sweep_of(target, tmp_path, levels=[1]).run_sync()
    with pytest.raises(RunFinished, match="holds a finished sweep; force=True"):
        sweep_of(target, tmp_path, levels=[1]).run_sync()
    assert target.asked == 20
    sweep_of(target, tmp_path, levels=[1]).run_sync(force=True)
    assert target.asked == 40
    (previous,) = (tmp_path / "previous").iterdir()
    assert {path.name for path in previous.iterdir()} >= {"sweep.json", "level-1"}


def test_more_levels_are_added_to_a_finished_sweep(tmp_path: Path) -> None:
    target = LimitedTarget(100, 0.001)
    sweep_of(target, tmp_path, levels=[1]).run_sync()
    assert numbers(sweep_of(target, tmp_path, levels=[1, 3]).run_sync()) == [1, 3]
    assert target.asked == 20 + 20


def test_other_objectives_are_held_against_what_was_measured(tmp_path: Path) -> None:
    target = LimitedTarget(100, 0.01)
    assert sweep_of(target, tmp_path, levels=[1, 2]).run_sync().recommendation.level is not None
    result = sweep_of(target, tmp_path, levels=[1, 2], slo="latency_p50<1ms").run_sync()
    assert result.recommendation.level is None
    assert target.asked == 40


def test_another_number_of_requests_is_another_measurement(tmp_path: Path) -> None:
    target = LimitedTarget(100, 0.001)
    sweep_of(target, tmp_path, levels=[1], requests=11).run_sync()
    assert sweep_of(target, tmp_path, levels=[1], requests=12).run_sync().levels[0].requests == 12
    assert target.asked == 23


def test_other_scorers_score_the_answers_again_without_new_calls(tmp_path: Path) -> None:
    target = LimitedTarget(100, 0.001)
    sweep_of(target, tmp_path, levels=[1], scorers=("exact",)).run_sync()
    changed = sweep_of(target, tmp_path, levels=[1, 2], scorers=(says_p1,)).run_sync()
    assert target.asked == 20 + 20
    assert [level.pass_rate for level in changed.levels] == pytest.approx([7 / 20, 7 / 20])


def test_a_folder_with_levels_of_another_target_is_refused(tmp_path: Path) -> None:
    sweep_of(LimitedTarget(100, 0.001), tmp_path, levels=[1]).run_sync()
    with pytest.raises(RunMismatch, match="places: 100 there, 50 now"):
        sweep_of(LimitedTarget(50, 0.001), tmp_path, levels=[1, 2]).run_sync()


def test_a_folder_in_which_another_sweep_is_at_work_is_refused(tmp_path: Path) -> None:
    target = LimitedTarget(100)
    with RunLock(tmp_path), pytest.raises(RunLocked):
        sweep_of(target, tmp_path).run_sync()
    assert target.asked == 0


def test_a_level_lasts_for_its_duration(tmp_path: Path) -> None:
    result = sweep_of(LimitedTarget(100, 0.01), tmp_path, levels=[3], duration=0.3).run_sync()
    (level,) = result.levels
    assert 0.3 <= level.active_seconds < 3.0
    assert level.reached


def test_a_duration_too_short_for_steady_figures_is_marked(tmp_path: Path) -> None:
    result = sweep_of(LimitedTarget(100, 0.2), tmp_path, levels=[4], duration=0.1).run_sync()
    assert result.levels[0].few
    assert "too few" in sweep_table(result.to_metrics())


def test_the_answers_of_a_level_with_a_duration_are_judged_all_the_same(tmp_path: Path) -> None:
    assessor = Assessor()
    result = sweep_of(
        LimitedTarget(100, 0.01), tmp_path, levels=[2], duration=0.1, scorers=(assessor.judge(),)
    ).run_sync()
    assert len(assessor.calls) == result.levels[0].requests > 0


def test_cases_that_can_be_read_only_once_serve_every_level(tmp_path: Path) -> None:
    suite = EvalSet(id="s", cases=iter(CASES))
    target = LimitedTarget(100, 0.001)
    runner = Runner(target, suite, ["exact"], progress="off")
    result = Sweep(runner, levels=[1, 2], requests=20, output_path=tmp_path).run_sync()
    assert [level.pass_rate for level in result.levels] == [1.0, 1.0]


def test_a_level_that_is_not_reached_is_not_recommended(tmp_path: Path) -> None:
    async def at_once(case: EvalCase) -> str:
        return case.prompt or ""

    result = sweep_of(at_once, tmp_path, levels=[64]).run_sync()
    assert not result.levels[0].reached
    assert result.recommendation.level is None


def test_a_level_at_which_this_client_was_the_bottleneck_is_not_recommended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_load, "MIN_SECONDS", 0.0)

    async def blocks_the_loop(case: EvalCase) -> InvocationResponse:
        await asyncio.sleep(0)
        time.sleep(0.03)  # noqa: ASYNC251 - what a careless client does
        return InvocationResponse(response_text="x", time_to_first_token=0.05, time_to_last_token=0.05)

    result = sweep_of(blocks_the_loop, tmp_path, levels=[2]).run_sync()
    assert result.levels[0].invalid is not None
    assert result.recommendation.level is None
    assert "this client was the bottleneck" in result.recommendation.reason


def test_a_level_that_says_nothing_of_the_endpoint_is_measured_again_when_the_sweep_goes_on(tmp_path: Path) -> None:
    target = LimitedTarget(100, 0.001)
    sweep_of(target, tmp_path, levels=[1, 2]).run_sync()
    metrics = json.loads((tmp_path / "level-2" / "metrics.json").read_bytes())
    metrics["client"] |= {"bottleneck": True, "reason": "its event loop was busy 97% of the time"}
    (tmp_path / "level-2" / "metrics.json").write_text(json.dumps(metrics))
    result = sweep_of(target, tmp_path, levels=[1, 2, 3]).run_sync()
    assert target.asked == 20 + 20 + 20 + 20
    assert [level.invalid for level in result.levels] == [None, None, None]
    assert len(list((tmp_path / "level-2" / "previous").iterdir())) == 1


def test_a_level_in_which_this_client_was_late_by_chance_is_measured_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lateness = iter([1.0, 0.0])
    judge = send_policy.judge_client

    def judged(load: client_load.ClientLoad, first: float | None) -> client_load.ClientLoad:
        return judge(msgspec.structs.replace(load, loop_lag_sustained=next(lateness), loop_cpu_share=0.1), first)

    monkeypatch.setattr(client_load, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(send_policy, "judge_client", judged)
    target = LimitedTarget(100, 0.001)
    result = sweep_of(target, tmp_path, levels=[1]).run_sync()
    assert target.asked == 40
    assert [level.invalid for level in result.levels] == [None]


@pytest.mark.parametrize(("busy", "times"), [(0.1, 2), (0.99, 1)])
def test_a_client_that_is_too_slow_is_measured_twice_at_most_and_once_where_it_was_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: float, times: int
) -> None:
    judge = send_policy.judge_client

    def judged(load: client_load.ClientLoad, first: float | None) -> client_load.ClientLoad:
        return judge(msgspec.structs.replace(load, loop_lag_sustained=1.0, loop_cpu_share=busy), first)

    monkeypatch.setattr(client_load, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(send_policy, "judge_client", judged)
    target = LimitedTarget(100, 0.001)
    result = sweep_of(target, tmp_path, levels=[1]).run_sync()
    assert target.asked == 20 * times
    assert result.levels[0].invalid is not None


def test_an_unfinished_sweep_of_another_target_is_refused_whatever_levels_are_requested(tmp_path: Path) -> None:
    token, target = CancellationToken(), LimitedTarget(100, 0.001)
    on_call(target, 25, lambda: token.cancel("enough"))
    assert not sweep_of(target, tmp_path, levels=[1, 2], token=token).run_sync().complete
    with pytest.raises(RunMismatch, match="places: 100 there, 50 now"):
        sweep_of(LimitedTarget(50, 0.001), tmp_path, levels=[8]).run_sync()


def test_how_far_a_sweep_has_come_is_on_disk_while_it_goes_on(tmp_path: Path) -> None:
    seen: list[Any] = []
    target = LimitedTarget(100, 0.001)
    on_call(target, 21, lambda: seen.append(json.loads((tmp_path / "sweep.partial.json").read_bytes())))
    sweep_of(target, tmp_path, levels=[1, 2]).run_sync()
    (found,) = seen
    assert (found["complete"], found["stopped"], [level["level"] for level in found["levels"]]) == (
        False,
        "not finished",
        [1],
    )
    assert not (tmp_path / "sweep.partial.json").exists()


def test_what_a_killed_sweep_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    for name in ("sweep.json", "sweep.partial.json"):
        (tmp_path / f"{name}.4242.tmp").write_bytes(b'{"v": 1, "lev')
    sweep_of(LimitedTarget(10, 0.001), tmp_path, levels=[1]).run_sync()
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_sweep_whose_target_is_refused_leaves_no_trace(tmp_path: Path) -> None:
    runner = Runner(OpenAIChat(model="m", api_key_env="NO_SUCH_KEY_HERE"), EvalSet(id="s", cases=CASES), progress="off")
    with pytest.raises(ConfigurationError):
        Sweep(runner, levels=[1], requests=20, output_path=tmp_path).run_sync()
    assert not (tmp_path / "sweep.partial.json").exists()


def test_a_search_finds_what_the_endpoint_handles(tmp_path: Path) -> None:
    result = sweep_of(LimitedTarget(6, 0.02), tmp_path, levels="auto", requests=10).run_sync()
    assert result.complete
    assert {1, 2, 4} <= set(numbers(result))
    assert result.recommendation.level in (4, 5, 6)


def test_a_search_that_was_interrupted_goes_the_same_way_again(tmp_path: Path) -> None:
    token, target = CancellationToken(), LimitedTarget(3, 0.01)
    on_call(target, 45, lambda: token.cancel("enough"))
    part = sweep_of(target, tmp_path, levels="auto", token=token).run_sync()
    whole = sweep_of(target, tmp_path, levels="auto").run_sync()
    assert whole.levels[: len(part.levels)] == part.levels
    assert whole.recommendation.level in (2, 3)


def test_it_runs_inside_a_running_loop(tmp_path: Path) -> None:
    async def within() -> SweepResult:
        return sweep_of(LimitedTarget(100, 0.001), tmp_path, levels=[1]).run_sync()

    assert asyncio.run(within()).complete


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"requests": 10, "duration": 1.0}, "give one of the two"),
        ({"pause": -1.0}, "got -1.0"),
        ({"pause": float("nan")}, "got nan"),
        ({"requests": 0}, "requests must be >= 1, got 0"),
        ({"duration": 0.0}, "duration must be a number of seconds above 0, got 0.0"),
        ({"levels": [0]}, "got 0"),
        ({"slo": "ttft<1s"}, "needs an aggregate"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_is_called(
    how: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        sweep_of(LimitedTarget(1), tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()


def test_so_many_requests_means_so_many_at_every_level(tmp_path: Path) -> None:
    """A smoke of 20 requests at 1, 10, 50 and 100 is 80 requests."""
    target = LimitedTarget(200, 0.001)
    sweep = sweep_of(target, tmp_path, levels=[1, 10, 50, 100], requests=20)
    planned = sweep.planned_requests()
    assert (planned.least, planned.most, planned.says) == (80, 80, "80 requests: 4 × 20")
    sweep.run_sync()
    assert target.asked == 80


@pytest.mark.parametrize(
    ("how", "least", "says"),
    [
        ({"levels": [1, 50]}, 560, "at least 560 requests (60 + 500), up to 2,240 if that leaves something undecided"),
        ({"levels": [1], "slo": "ttft_p99<1s"}, 437, "at least 437 requests (437), up to 1,748 if"),
        ({"levels": [1], "duration": 5.0}, None, "5 s a level, as many requests as come through"),
        ({"levels": "auto"}, 120, "at least 120 requests; about 620 if 8, 2,210 if 32, "),
        ({"levels": "auto", "requests": 20}, 20, "20 requests a level, about 16 levels at most"),
        ({"arrivals": "poisson:5/s,100/s"}, 560, "at least 560 requests (60 + 500), up to 2,240 if"),
    ],
)
def test_how_many_requests_it_will_send_is_known_before(
    how: dict[str, Any], least: int | None, says: str, tmp_path: Path
) -> None:
    planned = Sweep(runner_of(LimitedTarget(1)), output_path=tmp_path, **how).planned_requests()
    assert planned.least == least
    assert planned.says.startswith(says)


class Queue:
    """A target with so many slots and random service times, as a server has: calls beyond them wait their turn.

    Its clock is its own: a call waits as long as the others take, whatever this machine is busy with.
    """

    model_id = "queue"
    default_parallelism = 1

    def __init__(self, slots: int, mean: float = 0.01, seed: int = 3) -> None:
        self.slots, self.mean = asyncio.Semaphore(slots), mean
        self.places, self.rng, self.asked = slots, random.Random(seed), 0

    def identity(self) -> dict[str, Any]:
        return {"kind": "queue", "slots": self.places}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        self.asked += 1
        started = time.perf_counter()
        async with self.slots:
            await asyncio.sleep(self.rng.expovariate(1 / self.mean))
        seconds = time.perf_counter() - started
        return InvocationResponse(response_text="x", time_to_first_token=seconds, time_to_last_token=seconds)


def test_without_a_number_a_level_is_measured_in_blocks_and_the_search_marks_what_stays_open(tmp_path: Path) -> None:
    result = Sweep(runner_of(Queue(4, 0.004), max_parallelism=16), output_path=tmp_path).run_sync()
    assert result.complete
    assert {1, 2, 4} <= set(numbers(result))
    assert result.recommendation.level is not None
    for level in result.levels:
        assert level.requests % max(60, 10 * int(level.level)) == 0
        assert [(tmp_path / run / "metrics.json").exists() for run in level.runs] == [True] * len(level.runs)
        assert level.requests_per_second_ci95 is not None
        low, high = level.requests_per_second_ci95
        assert low <= level.requests_per_second <= high
    if not result.recommendation.decided:
        assert "undecided" in result.recommendation.describe()
    again = sweep_of(Queue(4), tmp_path, levels="auto", requests=None)
    again.options = again.options.replace(max_parallelism=16)
    with pytest.raises(RunFinished):
        again.run_sync()


def test_an_objective_that_is_open_gets_more_requests_until_it_is_settled(tmp_path: Path) -> None:
    target = LimitedTarget(100, 0.001)
    result = Sweep(runner_of(target), levels=[1], output_path=tmp_path, slo="latency_p95<1s").run_sync()
    (level,) = result.levels
    assert [one.outcome for one in level.objectives] == ["kept", "kept"]
    assert level.runs == ["level-1", "level-1-block-2"]
    assert target.asked == level.requests
    assert 85 <= level.requests <= 130  # 86 without one above it, at a quarter of 5 %
    assert result.recommendation.level == 1
    before = target.asked
    again = Sweep(runner_of(target), levels=[1, 2], output_path=tmp_path, slo="latency_p95<1s").run_sync()
    assert again.levels[0] == level
    assert target.asked > before


def test_too_few_requests_for_an_objective_recommend_nothing_and_say_how_many_would_do(tmp_path: Path) -> None:
    result = sweep_of(LimitedTarget(100, 0.001), tmp_path, levels=[1, 2], slo="latency_p99<1s").run_sync()
    advice = result.recommendation
    assert (advice.level, advice.decided, advice.more_requests) == (None, False, 279)
    assert "cannot tell: 0 of 20 requests took longer than 1.00s" in advice.reason
    assert "279 more requests would" in advice.describe()


def test_calls_that_time_out_break_an_objective_that_the_answers_keep(tmp_path: Path) -> None:
    class Stalls(LimitedTarget):
        async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
            if self.asked % 4 == 3:
                self.asked += 1
                raise TimeoutError("no answer")
            return await super().invoke(case, context)

    result = sweep_of(
        Stalls(100, 0.001), tmp_path, levels=[1], requests=80, slo="latency_p90<5s,error_rate<50%"
    ).run_sync()
    assert "time to last token p90 is broken: 20 of 80" in result.levels[0].broken[0]


def test_a_sweep_over_arrival_rates_finds_where_the_endpoint_falls_behind(tmp_path: Path) -> None:
    """Two places of 20 ms each are 100 answers a second."""

    class Places(Queue):
        async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
            self.asked += 1
            started = time.perf_counter()
            async with self.slots:
                await asyncio.sleep(0.02)
            seconds = time.perf_counter() - started
            return InvocationResponse(response_text="x", time_to_first_token=seconds, time_to_last_token=seconds)

    sweep = Sweep(
        runner_of(Places(2)),
        arrivals="poisson:10/s,400/s",
        requests=120,
        output_path=tmp_path,
        slo="latency_p50<300ms",
    )
    result = sweep.run_sync()
    assert numbers(result) == [10, 400]
    assert result.to_metrics()["asked"]["arrivals"] == "poisson:10/s,400/s"
    assert result.levels[1].broken
    assert result.recommendation.unit == "/s"
    assert result.recommendation.level in (10, None)  # None where this machine was too busy even for that
    assert "/s" in sweep_table(result.to_metrics())
    assert (tmp_path / "level-400" / "metrics.json").exists()
