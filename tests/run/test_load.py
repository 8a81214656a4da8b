"""Load runs through Runner: requests, duration, open loop, warm-up, limits, and what the metrics say of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, InvocationResponse, Result, Runner
from steelyard.errors import ConfigurationError, RunFinished, RunMismatch, RunRefused, TransientError


class Endpoint:
    """Answers after a moment and counts what it was asked; refuses whatever is more than it bears at once."""

    model_id = "endpoint"
    default_parallelism = 8

    def __init__(self, *, seconds: float = 0.0, bears: int | None = None, fails: int = 0) -> None:
        self.asked: list[str] = []
        self.at_once = self.peak = 0
        self._seconds, self._bears, self._fails = seconds, bears, fails

    def identity(self) -> dict[str, Any]:
        return {"kind": "endpoint"}

    async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
        self.asked.append(case.id)
        if len(self.asked) <= self._fails:
            raise TransientError("busy")
        self.at_once += 1
        self.peak = max(self.peak, self.at_once)
        try:
            if self._bears is not None and self.at_once > self._bears:
                raise TransientError("too many at once", overloaded=True, retry_after=0.01)
            began = time.monotonic()
            await asyncio.sleep(self._seconds)
            return InvocationResponse(response_text="x", time_to_last_token=time.monotonic() - began)
        finally:
            self.at_once -= 1


def suite(cases: int = 3) -> EvalSet:
    return EvalSet(id="load", cases=[EvalCase(id=f"c{n}", prompt="?", expected="x") for n in range(cases)])


def run(target: object, cases: int = 3, **options: Any) -> Result:
    return Runner(target, suite(cases), ["exact"], progress="off").run_sync(**options)


def test_requests_go_round_the_cases_and_each_has_its_record(tmp_path: Path) -> None:
    target = Endpoint()
    result = run(target, requests=8, output_path=tmp_path / "run")
    assert Counter(target.asked) == {"c0": 3, "c1": 3, "c2": 2}
    assert result.metrics["counts"] == {"planned": 8, "ok": 8, "error": 0, "cancelled": 0, "not_started": 0}
    found = [(record.id, record.trial) for record in Result.load(tmp_path / "run").iter_responses()]
    assert found == [("c0", 0), ("c0", 1), ("c0", 2), ("c1", 0), ("c1", 1), ("c1", 2), ("c2", 0), ("c2", 1)]
    assert result.metrics["load"]["requests"] == 8
    assert result.metrics["pass_rate"] == 1.0


def test_a_duration_goes_on_until_the_time_is_up_and_what_is_in_flight_finishes() -> None:
    target = Endpoint(seconds=0.01)
    result = run(target, duration=0.3, parallelism=4)
    counts = result.metrics["counts"]
    assert counts["planned"] == counts["ok"] == len(target.asked) > 30
    assert 0.3 <= result.metrics["active_seconds"] < 3.0
    assert result.metrics["peak_in_flight"] == 4
    assert result.complete


def test_open_loop_sends_at_its_moments_and_says_how_long_it_took_from_them() -> None:
    target = Endpoint(seconds=0.02)
    result = run(target, arrivals="constant:100/s", duration=0.5)
    sends = result.metrics["load"]["sends"]
    assert sends["planned"] == 50
    assert sends["sent"] + sends["missed"] == 50
    assert len(target.asked) == sends["sent"] == result.metrics["n"]
    assert all(record.time_from_planned >= 0.019 for record in result.responses)


def test_open_loop_ends_with_the_time_or_with_the_requests_whichever_comes_first() -> None:
    by_time = run(Endpoint(), arrivals="constant:20/s", duration=0.3, requests=1000).metrics
    assert by_time["complete"]
    assert by_time["counts"]["planned"] == by_time["n"] == by_time["load"]["sends"]["sent"] == 6
    by_number = run(Endpoint(), arrivals="constant:1000/s", duration=60.0, requests=5).metrics
    assert by_number["complete"]
    sends = by_number["load"]["sends"]
    assert by_number["counts"]["planned"] == by_number["n"] == sends["planned"] == sends["sent"] == 5


class Dear(Endpoint):
    """One whose every answer costs 1."""

    async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
        await super().invoke(case, context)
        return InvocationResponse(response_text="x", cost=1.0)


def test_a_duration_that_the_budget_cut_short_is_not_complete(tmp_path: Path) -> None:
    result = run(Dear(), duration=60.0, max_cost=3.0, output_path=tmp_path / "run")
    assert (result.complete, result.cancelled) == (False, True)
    assert "max_cost is 3" in result.metrics["stopped"]
    assert not (tmp_path / "run/metrics.json").exists()


def test_a_moment_that_found_the_budget_used_up_is_no_send() -> None:
    target = Dear()
    metrics = run(target, arrivals="constant:100/s", duration=5.0, max_cost=3.0).metrics
    sends = metrics["load"]["sends"]
    assert not metrics["complete"]
    assert len(target.asked) == metrics["n"] == sends["sent"]
    assert sends["missed"] == sends["planned"] - sends["sent"] > 0


def test_a_target_that_hands_out_one_response_for_all_does_not_mix_up_their_times() -> None:
    shared = InvocationResponse(response_text="x", time_to_last_token=0.01)

    class Sharing(Endpoint):
        async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
            await super().invoke(case, context)
            return shared

    result = run(Sharing(seconds=0.05), parallelism=1, arrivals="constant:1000/s", requests=3)
    first, *_, last = result.responses
    assert last.time_from_planned > 0.1 + first.time_from_planned - 0.05
    assert shared.time_from_planned is None


def test_open_loop_without_an_end_sends_each_case_once() -> None:
    target = Endpoint()
    run(target, cases=5, arrivals="poisson:1000/s")
    assert sorted(target.asked) == [f"c{n}" for n in range(5)]


def test_a_parallelism_that_is_too_small_makes_planned_sends_late_and_shows_in_the_time_from_them() -> None:
    target = Endpoint(seconds=0.05)
    result = run(target, cases=10, arrivals="constant:1000/s", parallelism=1)
    sends = result.metrics["load"]["sends"]
    assert target.peak == 1
    assert sends["late"] >= 8
    assert max(record.time_from_planned or 0 for record in result.responses) > 0.4
    assert all((record.time_to_last_token or 0) < 0.4 for record in result.responses)


def test_warm_up_requests_are_sent_and_left_out_of_everything(tmp_path: Path) -> None:
    target = Endpoint()
    result = run(target, requests=6, warmup=4, output_path=tmp_path / "run")
    assert len(target.asked) == 10
    assert result.metrics["n"] == result.stats["total_requests"] == 6
    assert len((tmp_path / "run" / "outputs.jsonl").read_bytes().splitlines()) == 6
    assert result.metrics["load"]["warmup"] == 4


def test_warm_up_keeps_to_what_auto_allows() -> None:
    target = Endpoint(seconds=0.02)
    run(target, warmup=40, requests=1, parallelism="auto", max_parallelism=40)
    assert target.peak <= 16


def test_warm_up_requests_do_not_answer_those_that_count_from_the_cache(tmp_path: Path) -> None:
    target = Endpoint()
    result = run(target, warmup=3, cache=tmp_path / "cache")
    assert Counter(target.asked) == {"c0": 2, "c1": 2, "c2": 2}
    assert [record.cached for record in result.responses] == [False] * 3


def test_in_a_load_run_nothing_is_tried_again_unless_asked_for() -> None:
    assert run(Endpoint(fails=2), requests=6, parallelism=1).metrics["counts"]["error"] == 2
    assert run(Endpoint(fails=1), requests=6, parallelism=1, retries=1).metrics["counts"]["error"] == 0
    assert run(Endpoint(fails=1), parallelism=1).metrics["counts"]["error"] == 0


def test_a_load_run_neither_reads_nor_fills_the_cache(tmp_path: Path) -> None:
    target = Endpoint()
    run(target, requests=6, cache=tmp_path / "cache")
    run(target, requests=6, cache=tmp_path / "cache")
    assert len(target.asked) == 12
    assert not (tmp_path / "cache").exists()


def test_an_unfinished_load_run_is_measured_anew_and_what_it_had_is_kept(tmp_path: Path) -> None:
    place = tmp_path / "run"
    run(Endpoint(), requests=6, output_path=place)
    (place / "metrics.json").unlink()
    target = Endpoint()
    result = run(target, requests=6, output_path=place)
    assert len(target.asked) == 6
    assert result.metrics["n"] == 6
    (kept,) = (place / "previous").glob("*/outputs.jsonl")
    assert len(kept.read_bytes().splitlines()) == 6


def test_a_finished_load_run_is_refused_and_its_errors_are_what_it_measured(tmp_path: Path) -> None:
    run(Endpoint(fails=1), requests=3, parallelism=1, output_path=tmp_path / "run")
    with pytest.raises(RunFinished):
        run(Endpoint(), requests=3, output_path=tmp_path / "run")
    with pytest.raises(RunRefused, match="its errors are what it measured"):
        run(Endpoint(), requests=3, output_path=tmp_path / "run", retry_errors=True)


@pytest.mark.parametrize(("first", "second"), [({"requests": 3}, {}), ({}, {"requests": 3})])
def test_a_load_run_and_an_evaluation_do_not_mix(tmp_path: Path, first: Any, second: Any) -> None:
    run(Endpoint(), output_path=tmp_path / "run", **first)
    with pytest.raises(RunMismatch, match="a load run"):
        run(Endpoint(), output_path=tmp_path / "run", **second)
    (tmp_path / "run" / "metrics.json").unlink()
    with pytest.raises(RunMismatch, match="a load run"):
        run(Endpoint(), output_path=tmp_path / "run", **second)


def test_a_load_run_of_something_else_is_refused_complete_or_not(tmp_path: Path) -> None:
    run(Endpoint(), requests=3, output_path=tmp_path / "run")
    with pytest.raises(RunMismatch, match="seed: 0 there, 3 now"):
        run(Endpoint(), requests=3, output_path=tmp_path / "run", seed=3)
    (tmp_path / "run" / "metrics.json").unlink()
    with pytest.raises(RunMismatch, match="seed: 0 there, 3 now"):
        run(Endpoint(), requests=3, output_path=tmp_path / "run", seed=3)


def test_a_rate_spreads_the_calls_and_the_waiting_is_recorded_apart_from_the_answers_time() -> None:
    result = run(Endpoint(), cases=11, rate="50/s", timeout=0.1)
    assert result.metrics["counts"]["ok"] == 11  # waiting for leave does not eat the case's time
    assert result.metrics["active_seconds"] >= 0.15
    waited = sorted(record.time_waiting or 0.0 for record in result.responses)
    assert waited[-1] > 0.05
    assert all((record.time_to_last_token or 0) < 0.05 for record in result.responses)


def test_time_in_backoff_is_recorded_apart() -> None:
    result = run(Endpoint(fails=1), cases=1)
    (record,) = result.responses
    assert (record.retries, record.attempts) == (1, 2)
    assert record.time_in_backoff is not None
    assert record.time_in_backoff > 0


def test_time_in_backoff_is_in_the_figures_whatever_the_target() -> None:
    stats = run(Endpoint(fails=1), retries=1).stats
    assert stats["time_in_backoff-max"] > 0


@pytest.mark.slow
def test_auto_finds_what_the_endpoint_bears_and_tells_its_history() -> None:
    target = Endpoint(seconds=0.02, bears=12)
    result = run(target, cases=20, parallelism="auto", requests=1500, retries=4)
    history = result.metrics["parallelism_history"]
    assert history[0][2] == "start"
    assert result.metrics["parallelism"] == "auto"
    assert 8 <= history[-1][1] <= 13
    assert result.metrics["error_rate"] < 0.05


def test_auto_never_goes_above_its_most() -> None:
    target = Endpoint(seconds=0.01)
    result = run(target, parallelism="auto", max_parallelism=6, requests=300)
    assert target.peak <= 6
    assert max(step[1] for step in result.metrics["parallelism_history"]) == 6


def test_the_metrics_say_how_busy_the_client_was() -> None:
    quiet = run(Endpoint(seconds=0.1), parallelism=1).metrics["client"]
    assert quiet["bottleneck"] is False

    async def busy(case: EvalCase) -> str:
        time.sleep(0.02)  # noqa: ASYNC251 - that is the point
        return "x"

    blocked = run(busy, requests=30, parallelism=5).metrics["client"]
    assert blocked["bottleneck"] is True
    assert "event loop" in blocked["reason"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests": 0}, "requests must be >= 1, got 0"),
        ({"duration": 0}, "duration must be a number of seconds above 0, got 0"),
        ({"arrivals": "sometimes"}, "arrivals must be like constant:20/s or poisson:20/s, got 'sometimes'"),
        ({"arrivals": "constant:20/s", "parallelism": "auto"}, "arrivals cannot be used with parallelism 'auto'"),
        ({"requests": 3, "trials": 2}, "trials cannot be used in a load run"),
        ({"rate": "often"}, "rate must be a number above 0 and a unit, like 10/s, 600/min or 5000/h, got 'often'"),
        ({"tokens_per_min": 0}, "tokens_per_min must be >= 1, got 0"),
        ({"warmup": -1}, "warmup must be >= 0, got -1"),
        ({"parallelism": "many"}, "parallelism must be a whole number, got 'many'"),
        ({"max_cost": 0}, "max_cost must be a number above 0, got 0"),
    ],
)
def test_a_bad_way_of_sending_is_refused_before_anything_is_called(options: Any, message: str) -> None:
    target = Endpoint()
    with pytest.raises(ConfigurationError, match=message):
        run(target, **options)
    assert target.asked == []
