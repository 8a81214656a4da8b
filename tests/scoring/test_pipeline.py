"""A scorer's own clock, turns and retries."""

from __future__ import annotations

import asyncio
import pickle
import threading
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, InvocationResponse, Record, Runner
from steelyard.errors import ConfigurationError, TransientError
from steelyard.records import Score
from steelyard.run.config import build_suite
from steelyard.scoring import Combined, Exact, FunctionScorer, Judge, Regex, pipeline
from steelyard.scoring.base import as_scorer, run_scorers
from steelyard.scoring.pipeline import is_immediate, limited
from tests.support.engine import make_suite
from tests.support.judge import Script

CASE = EvalCase(id="c", expected="x")
RESPONSE = InvocationResponse(response_text="x")


@pytest.fixture(autouse=True)
def no_waits(monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "_FIRST_WAIT", 0.0)


def score(*scorers: Any, times: int = 1) -> list[Score]:
    """The scores that several answers get, scored at the same time."""
    ready = [limited(as_scorer(scorer)) for scorer in scorers]

    async def all_at_once() -> list[list[Score]]:
        return await asyncio.gather(*(run_scorers(ready, CASE, RESPONSE) for _ in range(times)))

    return [one for scores in asyncio.run(all_at_once()) for one in scores]


class Flaky:
    """Fails so often before it gives its score."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self.calls = 0
        self._failures = failures
        self._error = error or TransientError("busy")

    def __call__(self, case: EvalCase, response: InvocationResponse) -> float:
        self.calls += 1
        if self.calls <= self._failures:
            raise self._error
        return 1.0


class Crowded:
    """Notes how many of it run at once, in threads or on the loop."""

    name = "crowded"

    def __init__(self, waits_for: int) -> None:
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(waits_for)

    def identity(self) -> dict[str, Any]:
        return {"kind": "crowded"}

    def score(self, case: EvalCase, response: InvocationResponse) -> Score:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self._barrier.wait(10)
        with self._lock:
            self._now -= 1
        return Score(self.name, 1.0, True)


def test_graders_that_take_longer_than_the_agents_timeout_score_all_answers() -> None:
    async def slow(case: EvalCase, response: InvocationResponse) -> bool:
        await asyncio.sleep(0.3)
        return True

    async def answer(case: EvalCase) -> str:
        return "x"

    runner = Runner(answer, make_suite(18), [slow], parallelism=18, timeout=0.1, progress="off")
    metrics = runner.run_sync().metrics
    assert (metrics["scored"], metrics["scoring_errors"]) == (18, 0)


def test_a_scorer_is_retried_after_a_transient_error_and_the_retries_are_counted() -> None:
    flaky = Flaky(2)
    (got,) = score(FunctionScorer(flaky, name="flaky"))
    assert (got.value, got.retries, flaky.calls) == (1.0, 2, 3)


def test_retries_are_bounded_and_the_error_says_how_often_it_was_tried() -> None:
    flaky = Flaky(99)
    (got,) = score(FunctionScorer(flaky, name="flaky", retries=1))
    assert got.errors == ["TransientError: busy (tried 2 times)"]
    assert (got.retries, flaky.calls) == (1, 2)


@pytest.mark.parametrize("error", [ValueError("wrong"), TimeoutError("its own"), TransientError("x", retry_after=3600)])
def test_a_fault_that_will_not_pass_or_asks_for_too_long_a_wait_is_not_retried(error) -> None:
    flaky = Flaky(1, error)
    (got,) = score(FunctionScorer(flaky, name="flaky"))
    assert (len(got.errors), got.retries, flaky.calls) == (1, 0, 1)


@pytest.mark.parametrize(("parallelism", "most"), [(1, 1), (2, 2), (4, 4)])
def test_parallelism_limits_how_many_of_a_scorer_run_at_once(parallelism: int, most: int) -> None:
    """Each run waits until as many as are allowed are inside: fewer would never end, more are seen."""
    crowded = Crowded(most)
    crowded.parallelism = parallelism  # type: ignore[attr-defined]
    assert len(score(crowded, times=8)) == 8
    assert crowded.most == most


def test_a_class_with_a_blocking_score_is_bounded_by_its_own_timeout() -> None:
    class Stuck:
        timeout = 0.05

        def __init__(self) -> None:
            self.free = threading.Event()

        def score(self, case: EvalCase, response: InvocationResponse) -> float:
            self.free.wait(30)
            return 1.0

    stuck = Stuck()
    (got,) = score(stuck)
    stuck.free.set()
    assert got.errors == ["TimeoutError: no score within 0.05 s"]


def test_time_spent_waiting_for_a_turn_does_not_count() -> None:
    async def brief(case: EvalCase, response: InvocationResponse) -> float:
        await asyncio.sleep(0.05)
        return 1.0

    scores = score(FunctionScorer(brief, parallelism=1, timeout=0.4), times=12)
    assert [one.errors for one in scores] == [[]] * 12


def test_built_in_scorers_are_immediate_unless_they_have_limits() -> None:
    exact = Exact()
    assert limited(exact) is exact
    assert not is_immediate(Exact(timeout="5s"))
    assert score(Exact(timeout="5s", parallelism=2))[0].value == 1.0
    assert not is_immediate(FunctionScorer(lambda case, response: 1.0))


def test_limits_are_no_part_of_a_scorers_identity() -> None:
    assert Regex(pattern="x", timeout=3, parallelism=1, retries=0).identity() == Regex(pattern="x").identity()
    plain, bounded = (Judge(model="m", target=Script(), **more) for more in ({}, {"timeout": "2m", "parallelism": 1}))
    assert plain.identity() == bounded.identity()
    assert (plain.by, bounded.timeout) == (bounded.by, 120.0)


def test_a_judges_parallelism_limits_how_many_of_its_samples_are_asked_at_once() -> None:
    most = now = 0

    async def reply(case: EvalCase) -> str:
        nonlocal most, now
        if not case.id.endswith("#judge"):
            return "x"
        now += 1
        most = max(most, now)
        for _ in range(20):
            await asyncio.sleep(0)
        now -= 1
        return '{"reason": "fine", "score": 1, "passed": true}'

    target = Runner(reply, make_suite(1)).target
    judge = Judge(model="m", target=target, prompt="helpfulness_v1", parallelism=2)
    metrics = Runner(reply, make_suite(10), [judge], parallelism=10, progress="off").run_sync().metrics
    assert metrics["scored"] == 10
    assert most == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timeout": 0}, "timeout must be above 0, got 0"),
        ({"timeout": "soon"}, "timeout must be a length of time like 500ms, 60s or 2m, got 'soon'"),
        ({"parallelism": 0}, "parallelism must be a whole number >= 1, got 0"),
        ({"parallelism": True}, "parallelism must be a whole number >= 1, got True"),
        ({"retries": -1}, "retries must be a whole number >= 0, got -1"),
        ({"retries": 1.5}, "retries must be a whole number >= 0, got 1.5"),
    ],
)
def test_a_bad_limit_is_refused_with_its_value(given: dict[str, Any], message: str) -> None:
    class Own:
        def score(self, case: EvalCase, response: InvocationResponse) -> float:
            return 1.0

    own = Own()
    vars(own).update(given)
    for make in (
        lambda: Exact(**given),
        lambda: FunctionScorer(len, **given),  # type: ignore[arg-type]
        lambda: Judge(model="m", target=Script(), **given),
        lambda: as_scorer(own),
    ):
        with pytest.raises(ConfigurationError) as caught:
            make()
        assert message in str(caught.value)


CHECKS = """
def polite(case, response):
    return 1.0

class Polite:
    def __init__(self, word="please"):
        self.word = word
    def score(self, case, response):
        return self.word in response.response_text

class Ready:
    name = "ready"
    def identity(self):
        return {}
    def score(self, case, response):
        return None

ready = Ready()
"""


@pytest.mark.parametrize(
    "scorer",
    [
        "exact: {LIMITS}",
        "python: {function: checks.py:polite, LIMITS}",
        "python: {class: checks.py:Polite, word: thanks, LIMITS}",
        "python: {function: checks.py:ready, LIMITS}",
        "judge: {model: m, target: {simulated: {}}, LIMITS}",
    ],
)
def test_every_scorer_of_a_suite_file_takes_limits(tmp_path, scorer: str) -> None:
    (tmp_path / "checks.py").write_text(CHECKS)
    limits = scorer.replace("LIMITS", "timeout: 2m, parallelism: 3, retries: 1")
    (tmp_path / "suite.yaml").write_text(f"target: simulated\ncases: [{{prompt: p}}]\nscorers: [{{{limits}}}]\n")
    (made,) = build_suite(tmp_path / "suite.yaml").scorers
    ready = limited(made) if not isinstance(made, Judge) else made
    assert (ready.timeout, ready.parallelism, ready.retries) == (120.0, 3, 1)  # type: ignore[union-attr]


def test_a_limited_scorer_can_be_sent_to_another_process() -> None:
    copy = pickle.loads(pickle.dumps(limited(Exact(parallelism=1))))
    assert asyncio.run(run_scorers([copy], CASE, RESPONSE)) == [Score("exact", 1.0, True)]


def combined_run(*scorers: Any, answer: str = "please 4") -> Record:
    suite = EvalSet("s", [EvalCase(id="c", prompt="?", expected="4")])
    return Runner(lambda case: answer, suite, scorers, progress="off").run_sync().responses[0]


def polite(case: EvalCase, response: InvocationResponse) -> float:
    return float("please" in (response.response_text or ""))


@pytest.mark.parametrize(("threshold", "passed"), [(0.3, True), (1 / 3, True), (0.4, False)])
def test_a_combined_score_decides_in_place_of_those_it_weighs(threshold: float, passed: bool) -> None:
    record = combined_run("exact", polite, Combined(weights={"exact": 2, "polite": 1}, threshold=threshold))
    found = {score.name: score for score in record.scores}
    assert found["combined"].value == pytest.approx(1 / 3)
    assert (found["combined"].passed, found["exact"].passed, found["polite"].passed) == (passed, None, None)
    assert found["combined"].reason == "2 × exact 0 + 1 × polite 1"
    assert record.passed is passed


def test_a_combined_score_that_does_not_decide_leaves_the_others_alone() -> None:
    record = combined_run("exact", polite, Combined(weights={"exact": 1, "polite": 1}, decides=False))
    assert [score.passed for score in record.scores] == [False, True, None]
    assert record.passed is False


def test_a_combined_score_of_one_that_broke_down_is_a_scoring_error() -> None:
    def broken(case: EvalCase, response: InvocationResponse) -> float:
        raise ValueError("no")

    record = combined_run("exact", broken, Combined(weights={"exact": 1, "broken": 1}))
    assert record.passed is None
    assert record.scores[-1].errors == ["broken has no value from 0 to 1 to combine"]


def test_what_does_not_apply_is_left_out_of_the_mean() -> None:
    def never(case: EvalCase, response: InvocationResponse) -> None:
        return None

    record = combined_run(polite, never, Combined(weights={"polite": 1, "never": 5}))
    assert record.scores[-1].value == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": {}}, "weights must be a mapping"),
        ({"weights": {"exact": -1}}, "weights.exact must be a number >= 0"),
        ({"weights": {"exact": 0}}, "must not all be 0"),
        ({"weights": {"exakt": 1}}, "no scorer is named 'exakt'; did you mean 'exact'?"),
        ({"weights": {"exact": 1}, "decides": "no"}, "decides must be true or false"),
    ],
)
def test_weights_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as problem:
        combined_run("exact", Combined(**arguments))
    assert message in str(problem.value)
