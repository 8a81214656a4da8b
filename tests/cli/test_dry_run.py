"""`--dry-run`: what a run would ask, use and cost, without a call and without a trace."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steelyard import EvalCase, EvalSet, InvocationResponse, Runner
from steelyard.cli.dry_run import PlannedRun, can_show, look_ahead
from steelyard.errors import ConfigurationError, RunMismatch
from steelyard.run.directory import OpenMode
from steelyard.run.options import RunOptions
from steelyard.tokens import estimate_input_tokens
from tests.support.cache import STORES, open_store
from tests.support.cli import Workshop, run_cli
from tests.support.judge import judge

PRICES = {"input": 2.0, "output": 8.0}
CASES = [EvalCase(id=f"c{number}", prompt="words " * (number + 1), expected="a") for number in range(6)]
SUITE = EvalSet(id="s", cases=CASES)
INPUT = sum(map(estimate_input_tokens, CASES))


class Answers:
    """A target that answers everything, and counts how often."""

    model_id = "m"
    default_parallelism = 2

    def __init__(self, params: dict[str, Any] | None = None, fails_after: int | None = None) -> None:
        self.asked = 0
        self.params = params or {}
        self.fails_after = fails_after

    def identity(self) -> dict[str, Any]:
        return {"kind": "answers", "model": "m", "params": self.params}

    async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
        self.asked += 1
        if self.fails_after is not None and self.asked > self.fails_after:
            raise ValueError("told to fail")
        return InvocationResponse(
            response_text="a", stop_reason="stop", num_tokens_input=10, num_tokens_output=50, cost=0.25
        )


def ahead(target: Any, run: Path, scorers: Any = (), suite: EvalSet = SUITE, **options: Any) -> PlannedRun:
    runner = Runner(target, suite, scorers, progress="off", output_path=run, **options)
    return look_ahead(runner, OpenMode())


def files(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, byte for byte."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def unfinished(run: Path, lines: int) -> None:
    """Make a complete run look like one that was killed after so many records."""
    outputs = run / "outputs.jsonl"
    outputs.write_bytes(b"".join(outputs.read_bytes().splitlines(keepends=True)[:lines]))
    (run / "metrics.json").unlink()


def test_a_fresh_run_is_planned_with_its_input_tokens_and_asks_nothing(tmp_path: Path) -> None:
    target = Answers()
    planned = ahead(target, tmp_path / "r", trials=3, prices=PRICES)
    assert (planned.cases, planned.trials, planned.planned, planned.to_ask, planned.done) == (6, 3, 18, 18, 0)
    assert planned.estimate.input_tokens == 3 * INPUT
    assert target.asked == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", [{"rate": "10/week"}, {"arrivals": "poison:20/s"}])
def test_a_pace_that_a_run_would_refuse_is_refused(option: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"week|poison"):
        ahead(Answers(), tmp_path / "r", **option)


def test_without_a_word_on_the_output_the_cost_is_that_of_the_input_at_least(tmp_path: Path) -> None:
    planned = ahead(Answers(), tmp_path / "r", prices=PRICES)
    estimate = planned.estimate
    assert (estimate.output_tokens, estimate.cost_bound) == (None, "at least")
    assert estimate.cost == pytest.approx(INPUT * 2 / 1e6)
    assert "output tokens: not known" in planned.describe()
    assert "the input alone (the suite)" in planned.describe()


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_limit_in_the_params_bounds_the_cost_from_above(name: str, tmp_path: Path) -> None:
    planned = ahead(Answers({name: 100}), tmp_path / "r", prices=PRICES)
    assert (planned.estimate.output_tokens, planned.estimate.cost_bound) == (600, "at most")
    assert planned.estimate.cost == pytest.approx((INPUT * 2 + 600 * 8) / 1e6)
    assert f"output tokens: 600, at most 100 each ({name})" in planned.describe()


def test_answers_that_are_there_say_how_long_the_rest_will_be(tmp_path: Path) -> None:
    run = tmp_path / "r"
    target = Answers({"max_tokens": 4096})
    Runner(target, SUITE, output_path=run, progress="off").run_sync()
    unfinished(run, lines=4)
    before, asked = files(run), target.asked
    planned = ahead(target, run, prices=PRICES)
    assert (planned.done, planned.to_ask) == (4, 2)
    assert (planned.estimate.output_tokens, planned.estimate.cost_bound) == (100, "about")
    assert planned.spent == 1.0
    assert "spent already: 1.00 USD" in planned.describe()
    assert (files(run), target.asked) == (before, asked)


def test_a_cost_that_nobody_knows_is_said_to_be_unknown(tmp_path: Path) -> None:
    planned = ahead(Answers(), tmp_path / "r")
    assert (planned.estimate.cost, planned.estimate.cost_bound) == (None, None)
    assert "cost: not known: the suite has no `prices` for model 'm'" in planned.describe()


@pytest.mark.parametrize("kind", STORES)
def test_what_is_in_the_cache_is_not_asked_and_not_estimated(kind: str, tmp_path: Path) -> None:
    some = EvalSet(id="s", cases=CASES[:2])
    store = open_store(kind, tmp_path)
    Runner(Answers(), some, cache=store, trials=2, progress="off").run_sync()
    store.close()
    cache = tmp_path / ("files" if kind == "local" else "cache.db")
    before = files(tmp_path)
    planned = ahead(Answers(), tmp_path / "r", trials=3, cache=cache)
    assert (planned.planned, planned.cached, planned.to_ask) == (18, 4, 14)
    assert planned.estimate.input_tokens == 3 * INPUT - 2 * sum(map(estimate_input_tokens, CASES[:2]))
    assert "in the cache: 4" in planned.describe()
    assert files(tmp_path) == before


@pytest.mark.parametrize("cache", ["files", "cache.db"])
def test_a_cache_that_is_not_there_is_not_made(cache: str, tmp_path: Path) -> None:
    assert ahead(Answers(), tmp_path / "r", cache=tmp_path / cache).cached == 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_begins_with_a_session_is_recognised_with_its_cached_answers(tmp_path: Path) -> None:
    session = tmp_path / "session.json"
    session.write_text('{"messages": [{"role": "user", "content": "before"}]}')
    options: dict[str, Any] = {"initial_session_file": session, "cache": tmp_path / "cache"}
    run = tmp_path / "r"
    Runner(Answers(), SUITE, output_path=run, progress="off", **options).run_sync()
    unfinished(run, lines=4)
    planned = ahead(Answers(), run, **options)
    assert (planned.done, planned.cached, planned.to_ask) == (4, 2, 0)
    with pytest.raises(RunMismatch):
        ahead(Answers(), run)


def test_the_sessions_messages_are_among_the_input_tokens(tmp_path: Path) -> None:
    session = tmp_path / "session.json"
    session.write_text('{"messages": [{"role": "user", "content": "%s"}]}' % ("long " * 1000))
    planned = ahead(Answers(), tmp_path / "r", initial_session_file=session)
    assert planned.estimate.input_tokens > INPUT + 6 * 1000


def test_judges_are_counted_by_how_often_they_may_be_asked(tmp_path: Path) -> None:
    """`correctness_v1` needs an expected answer: it does not apply to the case without one."""
    cases = [*CASES, EvalCase(id="open", prompt="p")]
    planned = ahead(
        Answers(), tmp_path / "r", [judge(), judge(name="other", when="failed")],
        EvalSet(id="s", cases=cases), num_runs=3, trials=2,
    )  # fmt: skip
    assert planned.judge_calls == 2 * 6 * 2 * 3
    assert "judges: at most 72 calls" in planned.describe()


def test_an_answer_that_was_kept_before_it_was_judged_is_not_asked_again(tmp_path: Path) -> None:
    run = tmp_path / "r"
    Runner(Answers(), SUITE, [judge()], output_path=run, progress="off").run_sync()
    unfinished(run, lines=4)
    planned = ahead(Answers(), run, [judge()])
    assert (planned.done, planned.to_judge, planned.to_ask) == (4, 2, 0)
    assert "answered already, to be judged: 2" in planned.describe()
    assert "input tokens" not in planned.describe()


def test_a_load_run_is_planned_by_its_requests(tmp_path: Path) -> None:
    planned = ahead(Answers({"max_tokens": 10}), tmp_path / "r", requests=30, warmup=6, prices=PRICES)
    assert (planned.cases, planned.planned, planned.to_ask) == (6, 30, 36)
    assert (planned.estimate.input_tokens, planned.estimate.output_tokens) == (6 * INPUT, 360)
    assert planned.estimate.cost == pytest.approx((6 * INPUT * 2 + 360 * 8) / 1e6)


def test_a_load_run_of_a_duration_is_estimated_once_round(tmp_path: Path) -> None:
    planned = ahead(Answers({"max_tokens": 10}), tmp_path / "r", duration=60.0)
    assert (planned.planned, planned.to_ask) == (None, None)
    assert "to be asked: as many as the time allows" in planned.describe()
    assert "once round the cases:" in planned.describe()


def test_no_line_of_a_plan_is_wider_than_80_columns(tmp_path: Path) -> None:
    planned = ahead(Answers(), tmp_path / "run")
    lines = msgspec.structs.replace(planned, can_show=can_show(10, RunOptions())).describe().splitlines()
    assert max(map(len, lines[1:])) <= 80  # the first names a path
    assert lines[-2:] == [
        "  10 cases show a change of the pass rate by 68 points or more, 4 times in 5, if",
        "    all changes go the same way",
    ]


def test_the_budget_is_part_of_the_plan(tmp_path: Path) -> None:
    assert "max_cost: the run stops at 2.50 USD" in ahead(Answers(), tmp_path / "r", max_cost=2.5).describe()


@pytest.mark.slow
def test_cases_are_read_as_they_are_looked_at(tmp_path: Path) -> None:
    """What is held grows by the plan's few bytes a case, not by the cases: these weigh 1 kB each."""

    def written(count: int) -> EvalSet:
        path = tmp_path / f"{count}.jsonl"
        with open(path, "w") as file:
            file.writelines(json.dumps({"id": f"c{number}", "prompt": "x" * 1000}) + "\n" for number in range(count))
        return EvalSet.from_jsonl(path, id="s")

    def peak(suite: EvalSet) -> int:
        tracemalloc.start()
        try:
            ahead(Answers(), tmp_path / "r", suite=suite)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    small, large = written(2000), written(12_000)
    peak(small)
    assert (peak(large) - peak(small)) / 10_000 < 120


def test_the_command_prints_the_plan_in_words_and_as_json(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    ended = run_cli(shop.folder, "run", "suite.yaml", "--dry-run", "--out", "RUN")
    assert ended.code == 0
    assert ended.out.startswith("shouting: 6 cases, in RUN\n  to be asked: 6, 1 at a time; nothing was called\n")
    ended = run_cli(shop.folder, "run", "suite.yaml", "--dry-run", "--out", "RUN", "--json")
    planned = msgspec.json.decode(ended.out, type=PlannedRun)
    assert (planned.planned, planned.to_ask, planned.estimate.cost) == (6, 6, None)
    assert shop.asked() == []
    assert not shop.run.exists()


def test_one_of_a_thing_is_said_as_one(tmp_path: Path) -> None:
    one = EvalSet(id="s", cases=CASES[:1])
    words = ahead(Answers(), tmp_path / "r", [judge()], suite=one).describe()
    assert words.startswith("s: 1 case, in ")
    assert "judges: at most 1 call, which is not in the estimate" in words
    assert ahead(Answers(), tmp_path / "r").describe().startswith("s: 6 cases, in ")


@pytest.mark.parametrize(
    ("cases", "points", "which"),
    [
        (10, 68, "all changes go the same way"),
        (60, 13, "all changes go the same way"),
        (200, 6, "1 in 10 cases changes"),
    ],
)
def test_what_a_suite_can_show_is_possible_with_the_changes_that_it_names(cases: int, points: int, which: str) -> None:
    """If 1 in 10 cases changes, the rate can change by 10 points at most."""
    shown = f"{cases} cases show a change of the pass rate by {points} points or more, 4 times in 5, if {which}"
    assert can_show(cases, RunOptions()) == [shown]


def test_tokens_of_calls_to_come_are_said_to_be_estimated(tmp_path: Path) -> None:
    planned = ahead(Answers(), tmp_path / "run").describe()
    assert f"input tokens: about {INPUT}, estimated from the text (4 bytes a token)" in planned


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-j", "2000"], "to be asked: 6, 2,000 at a time;"),
        (["-j", "auto"], "to be asked: 6, as many at a time as the endpoint sustains;"),
        (["--arrivals", "constant:20/s"], "to be asked: 6, at most 512 at a time;"),
    ],
)
def test_how_many_are_asked_at_a_time_is_said(tmp_path: Path, flags: list[str], said: str) -> None:
    ended = run_cli(Workshop(tmp_path).folder, "run", "suite.yaml", "--dry-run", "--out", "RUN", *flags)
    assert ended.code == 0, ended.err
    assert said in ended.out
