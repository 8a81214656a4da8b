"""Limits of cases: outcomes, scored, never retried; refused where nothing can enforce them."""

import asyncio
import time

import pytest

from steelyard import CaseLimits, ConfigurationError, EvalSet, Runner
from steelyard.report.summary import summary
from steelyard.targets import Agent, CallableTarget, Command

SUITE = EvalSet("s", [{"id": str(number), "prompt": "p"} for number in range(4)])


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    monkeypatch.setenv("STEELYARD_WORK", str(tmp_path / "work"))


def run(target, limits, scorers=(), suite=SUITE, **options):
    return Runner(target, suite, scorers, case_limits=limits, progress="off", **options).run_sync()


def test_the_time_limit_cuts_an_async_function_short_and_keeps_its_turns():
    async def agent(case, context):
        context.record_turn({"role": "assistant", "content": "so far"}, output_tokens=5)
        await asyncio.sleep(600)

    result = run(agent, CaseLimits(time=0.2), [lambda case, response: response.response_text == "so far"])
    record = result.responses[0]
    assert (record.status, record.stop_reason, record.response_text) == ("ok", "time_limit", "so far")
    assert (record.num_turns, record.num_tokens_output, record.attempts) == (1, 5, 1)
    assert "4 of 4 hit the time limit, 4 of them passed" in summary(result.typed_metrics)


@pytest.mark.parametrize(
    ("limits", "stop_reason"),
    [
        (CaseLimits(turns=3), "turn_limit"),
        (CaseLimits(tokens=25), "token_limit"),
        (CaseLimits(cost=0.25), "cost_limit"),
    ],
)
def test_turns_tokens_and_cost_are_counted_by_record_turn(limits, stop_reason):
    def agent(case, context):
        for number in range(50):
            context.record_turn({"role": "assistant", "content": str(number)}, output_tokens=10, cost=0.1)
        return "all fifty"

    record = run(agent, limits).responses[0]
    assert record.stop_reason == stop_reason
    assert record.num_turns in (3, 4)
    assert record.error is None


def test_an_agent_that_catches_the_limit_can_still_answer():
    from steelyard import CaseLimitReached

    def agent(case, context):
        try:
            while True:
                context.record_turn({"role": "assistant", "content": "x"})
        except CaseLimitReached:
            time.sleep(0)
            return "my best guess"

    record = run(agent, CaseLimits(turns=2)).responses[0]
    assert record.stop_reason == "turn_limit"


def test_a_case_has_limits_of_its_own_without_any_of_the_suite():
    async def agent(case, context):
        await asyncio.sleep(600 if case.limits else 0)
        return "done"

    suite = EvalSet("s", [{"id": "a", "prompt": "p", "limits": {"time": "200ms"}}, {"id": "b", "prompt": "p"}])
    first, second = run(agent, None, suite=suite).responses
    assert (first.stop_reason, second.stop_reason) == ("time_limit", None)


def test_an_outcome_is_the_same_after_a_resume(tmp_path):
    async def agent(case, context):
        if case.id == "3" and not (tmp_path / "again").exists():
            raise ValueError
        await asyncio.sleep(600)

    grade = [lambda case, response: case.id == "0"]
    run(agent, CaseLimits(time=0.1), grade, output_path=tmp_path / "run")
    (tmp_path / "again").touch()
    runner = Runner(agent, SUITE, grade, case_limits=CaseLimits(time=0.1), output_path=tmp_path / "run", progress="off")
    metrics = runner.run_sync(retry_errors=True).typed_metrics
    assert "4 of 4 hit the time limit, 1 of them passed" in summary(metrics)


@pytest.mark.parametrize(
    ("target", "limits", "problem"),
    [
        (lambda case: "x", CaseLimits(turns=5), "case_limits.turns cannot be enforced"),
        (Command("cat"), CaseLimits(tokens=5), "case_limits.tokens cannot be enforced"),
        (Agent(["true"]), CaseLimits(tokens=5), "case_limits.tokens cannot be enforced"),
        (Agent(["true"], output="codex-json"), CaseLimits(cost=1.0), "case_limits.cost cannot be enforced"),
        (CallableTarget(lambda case: "x"), CaseLimits(output=5), "case_limits.output cannot be enforced"),
    ],
)
def test_a_limit_that_nothing_can_enforce_is_refused_before_the_first_case(target, limits, problem):
    with pytest.raises(ConfigurationError, match=problem):
        run(target, limits)


def test_a_limit_of_a_case_that_nothing_can_enforce_is_refused():
    suite = EvalSet("s", [{"prompt": "p", "limits": {"tokens": "10k"}}])
    with pytest.raises(ConfigurationError, match=r"case_limits.tokens cannot be enforced"):
        run(lambda case: "x", None, suite=suite)


def test_a_timeout_that_comes_before_the_time_limit_is_refused():
    with pytest.raises(ConfigurationError, match="ends a case as an error before"):
        run(lambda case: "x", CaseLimits(time=60.0), timeout=30.0)


def test_the_timeout_stays_a_backstop_and_an_error():
    async def agent(case, context):
        await asyncio.sleep(600)

    record = run(agent, None, timeout=0.2, retries=0).responses[0]
    assert record.error_type == "TimeoutError"


def test_waiting_for_our_own_rate_limit_is_not_counted():
    async def agent(case, context):
        return "x"

    result = run(agent, CaseLimits(time=0.5), rate="2/s", parallelism=4)
    assert [record.stop_reason for record in result.responses] == [None] * 4
