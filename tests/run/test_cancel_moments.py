"""A judged run that is cancelled at any moment ends at once, loses nothing it paid for, and can be finished later."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steelyard import CancellationToken, RunCancelled
from steelyard.cache import CacheKey, LocalFileTaskResultStore
from steelyard.records import InvocationResponse
from tests.support.judged import Agent, Assessor, journalled, lines_of, runner_of, suite_of

pytestmark = pytest.mark.slow

CASES, RUNS, PARALLELISM = 12, 3, 4
AGENT_SECONDS, JUDGE_SECONDS = 0.02, 0.01
WHOLE = CASES / PARALLELISM * (AGENT_SECONDS + JUDGE_SECONDS)
"""The least that the run takes: the samples of one answer are asked for at once."""
"""Seconds that an undisturbed run takes at least."""


class Moment:
    """Cancels a token from a timer thread, so long after the agent's first call."""

    def __init__(self, seconds: float) -> None:
        self.token = CancellationToken()
        self.when = float("inf")
        self._timer = threading.Timer(seconds, self._cancel)
        self._begun = False

    def begin(self, case_id: str) -> None:
        if not self._begun:
            self._begun = True
            self._timer.start()

    def _cancel(self) -> None:
        self.when = time.monotonic()
        self.token.cancel("enough")

    def join(self) -> None:
        self._timer.join()


def models(moment: Moment | None = None, **agent: Any) -> tuple[Agent, Assessor]:
    on_call = {} if moment is None else {"on_call": moment.begin}
    return Agent(seconds=AGENT_SECONDS, **on_call, **agent), Assessor(seconds=JUDGE_SECONDS)


def check_what_is_left(directory: Path, counts: dict[str, int]) -> None:
    """The counts add up, and what is on disk agrees with them."""
    assert counts["planned"] == CASES == sum(counts[name] for name in ("ok", "error", "cancelled", "not_started"))
    assert counts["error"] == 0
    records = lines_of(directory, "outputs.jsonl")
    assert len(records) == counts["ok"]
    assert all(len(record["scores"][0]["samples"]) == RUNS for record in records), "a cancelled case is not finished"
    assert (directory / "partial.json").exists()
    assert not (directory / "metrics.json").exists()


def answers_on_disk(directory: Path, cache: Path | None) -> set[str]:
    """The cases whose answers a cancelled run has left: in its records, before their judgement, or in the cache."""
    lines = lines_of(directory, "outputs.jsonl") + lines_of(directory, "answers.jsonl")
    kept = {line["id"] for line in lines if "response_text" in line}
    answers, _ = cached(cache)
    return kept | {entry["case_id"] for entry in answers}


def cached(folder: Path | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the cache holds: answers, and replies of judges."""
    entries = [] if folder is None else [json.loads(path.read_bytes()) for path in folder.rglob("*.json")]
    replies = [entry for entry in entries if "#" in entry["case_id"]]
    return [entry for entry in entries if entry not in replies], replies


def cached_samples(folder: Path | None) -> set[tuple[str, int, int]]:
    """The samples of judges in the cache, by case, trial and number."""
    samples = set()
    for entry in cached(folder)[1]:
        case_id, trial, _ = entry["case_id"].split("#")
        reply = json.loads(entry["response"]["response_text"])
        samples.add((case_id, int(trial), int(reply["reason"].removeprefix("run "))))
    return samples


def check_cache(folder: Path, answered: int) -> None:
    """Only whole answers, and no more of them than were given."""
    answers, replies = cached(folder)
    assert all("answer to c" in entry["response"]["response_text"] for entry in answers)
    assert all(entry["response"].get("error") is None for entry in (*answers, *replies))
    assert len(answers) <= answered


@pytest.mark.parametrize("number", range(25))
def test_a_run_cancelled_at_any_moment_can_be_finished_without_paying_twice(number: int, tmp_path: Path) -> None:
    """A seeded moment within the run; every third agent blocks a thread, every second run has a cache."""
    moment = Moment(random.Random(number).uniform(0.02, 0.95) * WHOLE)
    blocking, cache = number % 3 == 2, tmp_path / "cache" if number % 2 else None
    agent, assessor = models(moment, blocking=blocking)
    options: dict[str, Any] = {"num_runs": RUNS, "output_path": tmp_path / "run", "cache": cache}
    partial = runner_of(agent, suite_of(CASES), [assessor.judge()], token=moment.token, **options).run_sync()
    late = time.monotonic() - moment.when
    moment.join()
    assert late < 2.0
    assert (partial.cancelled, partial.complete, partial.metrics["stopped"]) == (True, False, "enough")
    check_what_is_left(tmp_path / "run", partial.metrics["counts"])
    if cache is not None:
        check_cache(cache, len(agent.answered))
    kept = journalled(tmp_path / "run") | cached_samples(cache)
    on_disk = answers_on_disk(tmp_path / "run", cache)
    in_flight = len(agent.calls) - sum(when < moment.when for when in agent.answered)
    assert in_flight <= PARALLELISM
    # A thread may have answered before the cancellation while nobody had come for its answer yet; and an answer that
    # is being put into the cache is still in flight.
    lost = {case_id for case_id, _ in agent.calls} - on_disk
    assert len(lost) <= (PARALLELISM if blocking or cache is not None else in_flight)

    again, assessor_again = models(blocking=blocking)
    result = runner_of(again, suite_of(CASES), [assessor_again.judge()], **options).run_sync()
    assert result.complete
    assert result.metrics["counts"]["ok"] == CASES
    assert not (tmp_path / "run" / "partial.json").exists()
    assert sorted(case_id for case_id, _ in again.calls) == sorted({f"c{n:02}" for n in range(CASES)} - on_disk), (
        "asked what was there"
    )
    assert kept.isdisjoint(assessor_again.calls), "a judgement that was on record was asked for again"
    assert len(kept) + len(assessor_again.calls) == RUNS * CASES
    assert Counter(journalled(tmp_path / "run")) == Counter(
        (f"c{case:02}", 0, run) for case in range(CASES) for run in range(RUNS)
    )
    assert all(score.samples == [1.0] * RUNS for record in result.responses for score in record.scores)


def test_a_case_cancelled_between_judge_runs_keeps_its_samples_and_resumes_with_the_missing_ones(
    tmp_path: Path,
) -> None:
    token = CancellationToken()
    agent = Agent()
    assessor = Assessor(seconds=0.01, on_call=lambda case_id, run: token.cancel() if run == 2 else None)
    options: dict[str, Any] = {"num_runs": 4, "output_path": tmp_path, "parallelism": 1}
    partial = runner_of(agent, suite_of(1), [assessor.judge()], token=token, **options).run_sync()
    assert partial.metrics["counts"]["cancelled"] == 1
    assert journalled(tmp_path) == {("c00", 0, 0), ("c00", 0, 1)}
    assert lines_of(tmp_path, "outputs.jsonl") == []
    again = Assessor()
    result = runner_of(agent, suite_of(1), [again.judge()], **options).run_sync()
    assert result.complete
    assert again.calls == [("c00", 0, 2), ("c00", 0, 3)]
    assert agent.calls == [("c00", 0)]


@pytest.mark.parametrize("waits", ["agent", "judge"])
def test_a_model_that_never_answers_does_not_hold_up_a_cancellation(waits: str, tmp_path: Path) -> None:
    moment = Moment(0.5)  # by then all calls that fit are in flight
    agent = Agent(seconds=3600 if waits == "agent" else 0, on_call=moment.begin)
    assessor = Assessor(seconds=3600)
    result = runner_of(
        agent, suite_of(9), [assessor.judge()], token=moment.token, output_path=tmp_path, cache=tmp_path / "cache"
    ).run_sync()
    assert time.monotonic() - moment.when < 2.0
    assert result.metrics["counts"]["cancelled"] == PARALLELISM
    stored = list((tmp_path / "cache").rglob("*.json"))
    assert len(stored) == (0 if waits == "agent" else PARALLELISM)
    assert journalled(tmp_path) == set()


def test_a_judge_waiting_to_retry_does_not_hold_up_a_cancellation(tmp_path: Path) -> None:
    moment = Moment(0.05)
    agent = Agent(on_call=moment.begin)
    assessor = Assessor(lambda *_: ConnectionError("down"))
    runner = runner_of(agent, suite_of(3), [assessor.judge()], token=moment.token, retries=1000, output_path=tmp_path)
    result = runner.run_sync()
    assert time.monotonic() - moment.when < 2.0
    assert result.metrics["counts"]["cancelled"] == 3
    assert lines_of(tmp_path, "outputs.jsonl") == []


def test_an_answer_that_a_cancelled_target_cut_short_is_not_cached(tmp_path: Path) -> None:
    """The target sees the cancellation and hands in what it has: that is no answer to serve again."""
    token = CancellationToken()
    agent = Agent(lambda case, context: "cut sh", on_call=lambda case_id: token.cancel())
    store = LocalFileTaskResultStore(tmp_path / "cache")
    try:
        runner_of(agent, suite_of(3), [], token=token, parallelism=1, cache=store).run_sync()
    except RunCancelled:
        pytest.fail("the token was cancelled by the first call, not before it")
    assert len(agent.calls) == 1
    assert list((tmp_path / "cache").rglob("*.json")) == []


class SlowStore:
    """A store that takes its time to write, and says so first."""

    def __init__(self, inner: LocalFileTaskResultStore, writing: Callable[[], None]) -> None:
        self._inner = inner
        self._writing = writing

    def get(self, eval_set_id: str, case_id: str, key: CacheKey) -> InvocationResponse | None:
        return self._inner.get(eval_set_id, case_id, key)

    def put(self, eval_set_id: str, case_id: str, key: CacheKey, response: InvocationResponse) -> None:
        self._writing()
        time.sleep(0.2)
        self._inner.put(eval_set_id, case_id, key, response)


def test_an_answer_that_is_being_put_into_the_cache_when_the_run_is_cancelled_is_not_lost(tmp_path: Path) -> None:
    """It has been paid for: the resume finds it in the cache or in answers.jsonl."""
    token = CancellationToken()
    inner = LocalFileTaskResultStore(tmp_path / "cache")
    agent, options = Agent(), {"output_path": tmp_path / "run", "parallelism": 1}
    slow = SlowStore(inner, lambda: token.cancel("enough"))
    partial = runner_of(agent, suite_of(2), [Assessor().judge()], token=token, cache=slow, **options).run_sync()
    assert partial.cancelled
    assert agent.calls == [("c00", 0)]
    assert runner_of(agent, suite_of(2), [Assessor().judge()], cache=inner, **options).run_sync().complete
    assert agent.calls == [("c00", 0), ("c01", 0)]
