"""One case from question to record, whatever the target and the scorers do."""

from __future__ import annotations

import asyncio
import math
import pickle
import threading
import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard import EvalSet, Result
from steelyard.engine.base import CancellationToken
from steelyard.errors import TargetError
from steelyard.journal.reader import Entry
from steelyard.journal.writer import encode_record
from steelyard.protocols import InvocationContext
from steelyard.records import EvalCase, InvocationResponse, Job, Record, Score
from steelyard.run.case import CaseRunner
from steelyard.run.runner import Runner
from steelyard.scoring import Exact, FunctionScorer
from steelyard.scoring.pipeline import ScoringPipeline
from steelyard.targets.function import CallableTarget
from steelyard.targets.simulated import Simulated
from tests.support.engine import Asked, make_job, make_suite, one_record, raising, returning, until


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class OwnExit(BaseException):
    """Neither an Exception nor one of Python's own exits, as some libraries raise."""


def deep_error() -> RecursionError:
    def dive() -> None:
        dive()

    try:
        dive()
    except RecursionError as error:
        return error
    raise AssertionError


ERRORS: list[tuple[BaseException, str]] = [
    (ValueError("bad value"), "ValueError: bad value"),
    (KeyError("k"), "KeyError: 'k'"),
    (AssertionError(), "AssertionError"),
    (SystemExit(3), "SystemExit: 3"),
    (asyncio.CancelledError("my own"), "CancelledError: my own"),
    (TimeoutError("upstream"), "TimeoutError: upstream"),
    (Unprintable(), "Unprintable: (its message could not be read)"),
    (ExceptionGroup("two", [ValueError("a"), OSError("b")]), "ExceptionGroup: two (2 sub-exceptions)"),
    (BaseExceptionGroup("one", [SystemExit(1)]), "BaseExceptionGroup: one (1 sub-exception)"),
    (MemoryError(), "MemoryError"),
    (StopAsyncIteration(), "StopAsyncIteration"),
    (OwnExit("left"), "OwnExit: left"),
]


@pytest.mark.parametrize(("error", "text"), ERRORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("timeout", [None, 60.0])
def test_whatever_a_target_raises_becomes_the_cases_record(error, text, timeout) -> None:
    record = one_record(raising(error), timeout=timeout)
    assert (record.id, record.index, record.trial) == ("c0", 0, 0)
    assert (record.status, record.attempts, record.scores) == ("error", 1, [])
    assert (record.error, record.error_type) == (text, type(error).__name__)
    assert record.elapsed >= 0


def test_a_target_that_recurses_too_deep_is_an_error_record() -> None:
    record = one_record(raising(deep_error()))
    assert record.error_type == "RecursionError"


def test_a_keyboard_interrupt_is_not_a_record() -> None:
    with pytest.raises(KeyboardInterrupt):
        one_record(raising(KeyboardInterrupt()))


def test_a_target_that_cancels_its_own_task_is_an_error_record() -> None:
    """It is one bad case; nobody asked for the run to end."""

    async def answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return InvocationResponse()

    record = one_record(Asked(answer), token=CancellationToken())
    assert (record.status, record.error_type) == ("error", "CancelledError")


def test_an_endless_error_message_is_cut() -> None:
    assert len(one_record(raising(ValueError("x" * 1_000_000))).error or "") <= 10_000


@pytest.mark.parametrize("limit", [None, 60.0])
def test_a_timeout_of_the_target_is_told_from_ours_by_its_message(limit) -> None:
    own = one_record(raising(TimeoutError("gateway")), timeout=limit)
    assert (own.error_type, own.error) == ("TimeoutError", "TimeoutError: gateway")


def test_a_case_that_takes_longer_than_its_time_is_an_error_record() -> None:
    async def hang(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        await asyncio.sleep(3600)
        return InvocationResponse()

    record = one_record(Asked(hang), timeout=0.02)
    assert (record.error_type, record.error) == ("TimeoutError", "TimeoutError: no answer within 0.02 s")
    assert 0.019 <= record.elapsed < 5


@pytest.mark.parametrize("value", [None, "text", 3, b"bytes", {"response_text": "x"}, [], Score("a", 1.0)])
def test_an_answer_that_is_no_response_is_an_error_that_names_its_type(value) -> None:
    record = one_record(returning(value))
    assert record.error == f"TypeError: the target returned {type(value).__name__}, not an InvocationResponse"


class Text(str):
    pass


class Number(float):
    pass


GOOD_VALUES: list[tuple[str, Any, Any]] = [
    ("response_text", Text("a"), "a"),
    ("stop_reason", Text("stop"), "stop"),
    ("time_to_first_token", np.float64(0.5), 0.5),
    ("time_to_last_token", np.float32(0.5), 0.5),
    ("time_to_last_token", 1, 1),
    ("time_per_output_token", Number(0.25), 0.25),
    ("num_tokens_input", np.int64(7), 7),
    ("num_tokens_output", np.int32(7), 7),
    ("num_tokens_output", 7.0, 7),
    ("num_tokens_output", np.float64(7), 7),
    ("num_tokens_input_cached", np.uint8(7), 7),
    ("messages", ({"role": "user"},), [{"role": "user"}]),
    ("retries", 0.0, 0),
    ("cost", np.float64(0.5), 0.5),
]


@pytest.mark.parametrize(("field", "given_value", "kept"), GOOD_VALUES)
def test_numbers_of_numpy_and_subclasses_become_plain_values(field, given_value, kept) -> None:
    record = one_record(returning(InvocationResponse(**{field: given_value})))
    assert record.error is None
    assert getattr(record, field) == kept
    assert type(getattr(record, field)) is type(kept)
    assert getattr(msgspec.json.decode(encode_record(record), type=Record), field) == kept


BAD_VALUES: list[tuple[str, Any]] = [
    ("response_text", 5),
    ("response_text", b"bytes"),
    ("response_text", ["a"]),
    ("input_prompt", 5),
    ("messages", "hello"),
    ("messages", [1, 2]),
    ("messages", {"role": "user"}),
    ("time_to_first_token", "0.5"),
    ("time_to_last_token", True),
    ("time_to_last_token", timedelta(seconds=1)),
    ("time_per_output_token", [0.1]),
    ("num_tokens_input", True),
    ("num_tokens_input", np.bool_(True)),
    ("num_tokens_input", "12"),
    ("num_tokens_output", 7.5),
    ("num_tokens_output", float("nan")),
    ("num_tokens_output", float("inf")),
    ("num_tokens_output", 2 + 0j),
    ("num_tokens_input_cached", "1"),
    ("num_tokens_output_reasoning", {}),
    ("retries", "two"),
    ("retries", None),
    ("request_time", "2026-01-01"),
    ("request_time", 1.7e9),
    ("stop_reason", 0),
    ("error", 404),
    ("error_type", ValueError),
    ("cost", np.array([0.1, 0.2])),
    ("cost", "cheap"),
    ("http_status", "200"),
]


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_a_field_of_the_wrong_type_is_an_error_that_names_it_and_can_be_read_back(field, value) -> None:
    record = one_record(returning(InvocationResponse(**{field: value})), [Exact()])
    assert (record.status, record.error_type) == ("error", "TypeError")
    assert field in (record.error or "")
    assert msgspec.json.decode(encode_record(record), type=Record).status == "error"


def test_a_bad_value_after_a_good_one_of_another_shape_is_still_seen() -> None:
    """Shapes that were checked are remembered: the memory must not let through what it never saw."""
    answers = iter([5, np.int64(5), "5", 5, True, 5])

    async def answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        return InvocationResponse(num_tokens_output=next(answers))

    target = Asked(answer)
    assert [one_record(target).status for _ in range(6)] == ["ok", "ok", "error", "ok", "error", "ok"]


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([name for name in InvocationResponse.__struct_fields__ if name not in ("id", "input_payload")]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.text(),
            st.binary(),
            st.lists(st.integers() | st.dictionaries(st.text(), st.text())),
            st.dictionaries(st.text(), st.floats()),
            st.datetimes(),
            st.complex_numbers(),
        ),
    )
)
def test_whatever_stands_in_a_response_its_record_can_be_written_and_read_back(fields) -> None:
    record = one_record(returning(InvocationResponse(**fields)), [Exact()])
    back = msgspec.json.decode(encode_record(record), type=Record)
    assert (back.id, back.status, back.error) == (record.id, record.status, record.error)


def test_a_rare_field_is_kept_when_the_answer_before_had_only_common_ones() -> None:
    """Records of answers whose rare fields have their defaults are made in a shorter way than others."""
    common = InvocationResponse(response_text="a")
    rare = InvocationResponse(response_text="a", resent=2, reasoning_in_text=True, workspace_patch="+ line")
    kept = [one_record(returning(response)) for response in (common, rare, common)]
    assert [(record.resent, record.reasoning_in_text, record.workspace_patch) for record in kept] == [
        (0, False, None),
        (2, True, "+ line"),
        (0, False, None),
    ]


def test_a_rare_field_that_cannot_be_compared_is_an_error_that_names_it() -> None:
    record = one_record(returning(InvocationResponse(fields_left_out=np.array([1, 2]))))  # type: ignore[arg-type]
    assert record.error is not None
    assert "fields_left_out is ndarray" in record.error


def test_a_huge_whole_number_is_kept_exactly_or_refused() -> None:
    record = one_record(returning(InvocationResponse(num_tokens_output=np.int64(2**53 + 1))))
    assert record.status == "error" or record.num_tokens_output == 2**53 + 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cost", 10**400),
        ("cost", float("inf")),
        ("time_to_last_token", float("-inf")),
        ("time_to_first_token", 1e300),
        ("time_waiting", 10**400),
        ("num_tokens_output", 10**400),
        ("http_status", 10**400),
        ("retries", 10**400),
    ],
)
@pytest.mark.parametrize("raised", [False, True], ids=["returned", "partial"])
def test_a_number_that_no_figure_can_hold_is_an_error_that_keeps_the_answer(field, value, raised: bool) -> None:
    response = InvocationResponse(response_text="paid for", time_per_output_token=math.nan, **{field: value})

    async def answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        if raised:
            raise TargetError("broke off", partial=response)
        return response

    record = one_record(Asked(answer), [Exact()])
    assert (record.status, record.error_type, record.response_text) == ("error", "TargetError", "paid for")
    assert ("broke off" if raised else field) in (record.error or "")
    back = msgspec.json.decode(encode_record(record), type=Record)
    assert getattr(back, field) in (None, 0)
    assert back.time_per_output_token is None


def test_a_run_whose_target_reports_impossible_numbers_can_be_read_and_resumed(tmp_path) -> None:
    costs = {"a": 10**400, "b": 0.5}
    suite = EvalSet("s", [EvalCase(id=name, prompt="?") for name in costs])
    Runner(
        lambda case: InvocationResponse(response_text="x", cost=costs[case.id]),
        suite,
        progress="off",
        output_path=tmp_path,
    ).run_sync()
    loaded = Result.load(tmp_path)
    assert [record.status for record in loaded.iter_responses()] == ["error", "ok"]
    assert loaded.metrics["counts"]["error"] == 1


def test_a_request_time_keeps_its_moment() -> None:
    class Stamp(datetime):
        pass

    moment = Stamp(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=2)))
    record = one_record(returning(InvocationResponse(request_time=moment)))
    assert record.request_time == datetime(2026, 1, 2, 1, 4, 5, 678901, tzinfo=UTC)


def test_a_response_that_says_error_is_an_error_record_and_is_not_scored() -> None:
    asked: list[str] = []

    def scorer(case: EvalCase, response: InvocationResponse) -> bool:
        asked.append(case.id)
        return True

    record = one_record(
        returning(InvocationResponse(response_text="half an ans", error="content filter", error_type="Refused")),
        [FunctionScorer(scorer)],
    )
    assert (record.status, record.error, record.error_type) == ("error", "content filter", "Refused")
    assert (record.response_text, record.scores, asked) == ("half an ans", [], [])


def test_a_response_with_only_a_type_of_error_is_an_error_too() -> None:
    record = one_record(returning(InvocationResponse(error_type="Refused")))
    assert (record.status, record.error) == ("error", "Refused")


def test_an_empty_text_of_error_is_an_error() -> None:
    assert one_record(returning(InvocationResponse(response_text="x", error=""))).status == "error"


def test_a_scorer_that_crashes_leaves_the_response_ok() -> None:
    def broken(case: EvalCase, response: InvocationResponse) -> bool:
        raise ZeroDivisionError("division by zero")

    record = one_record(
        returning(InvocationResponse(response_text="x")), [FunctionScorer(broken), Exact()], job=make_job(expected="x")
    )
    assert (record.status, record.error, record.response_text) == ("ok", None, "x")
    where = record.scores[0].error_traceback
    assert "in broken" in (where or "")
    assert record.scores == [
        Score("broken", errors=["ZeroDivisionError: division by zero"], error_traceback=where),
        Score("exact", 1.0, True),
    ]


def test_an_async_scorer_that_hangs_is_a_scoring_error_within_its_own_time() -> None:
    async def hang(case: EvalCase, response: InvocationResponse) -> bool:
        await asyncio.sleep(3600)
        return True

    began = time.monotonic()
    record = one_record(returning(InvocationResponse(response_text="x")), [FunctionScorer(hang, timeout=0.03)])
    assert time.monotonic() - began < 5
    assert record.status == "ok"
    assert record.scores[0].errors


def test_the_record_holds_everything_the_target_said() -> None:
    said = InvocationResponse(
        response_text="text",
        input_prompt="prompt",
        input_payload={"temperature": 0},
        messages=[{"role": "assistant", "content": "text"}],
        time_to_first_token=0.1,
        time_to_last_token=0.4,
        time_per_output_token=0.01,
        num_tokens_input=3,
        num_tokens_output=4,
        num_tokens_input_cached=1,
        num_tokens_output_reasoning=2,
        request_time=datetime(2026, 1, 1, tzinfo=UTC),
        stop_reason="stop",
        num_tokens_input_cache_write=1,
    )
    record = one_record(returning(said))
    for field in InvocationResponse.__struct_fields__:
        if field != "id":
            assert getattr(record, field) == getattr(said, field), field


def test_a_subclass_of_the_response_is_recorded_by_the_fields_that_all_responses_have() -> None:
    class Detailed(InvocationResponse):
        mood: str = "fine"

    record = one_record(returning(Detailed(response_text="text", stop_reason="stop")))
    assert (record.status, record.response_text, record.stop_reason) == ("ok", "text", "stop")


def test_records_and_the_entries_of_the_journal_have_every_field_of_a_response() -> None:
    fields = set(InvocationResponse.__struct_fields__)
    assert fields < set(Record.__struct_fields__) == set(Entry.__struct_fields__)


def test_a_stored_response_is_scored_and_not_asked_again() -> None:
    stored = one_record(returning(InvocationResponse(response_text="yes", num_tokens_output=3)))
    stored.attempts, stored.elapsed = 2, 1.25
    job = Job(index=4, trial=1, case=EvalCase(id="c4", expected="yes"), case_fp="f", scored_by="s", stored=stored)
    record = one_record(raising(AssertionError("asked again")), [Exact()], job=job)
    assert (record.index, record.trial, record.scored_by) == (4, 1, "s")
    assert (record.status, record.response_text, record.num_tokens_output) == ("ok", "yes", 3)
    assert (record.attempts, record.elapsed) == (2, 1.25)
    assert record.scores == [Score("exact", 1.0, True)]


def test_the_context_tells_the_target_which_case_and_trial_this_is() -> None:
    seen: list[InvocationContext] = []

    async def answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        seen.append(context)
        return InvocationResponse()

    token = CancellationToken()
    one_record(Asked(answer), job=Job(index=3, trial=2, case=EvalCase(id="x"), case_fp="", scored_by=""), token=token)
    assert (seen[0].case_id, seen[0].trial, seen[0].attempt, seen[0].token) == ("x", 2, 1, token)


def test_cancelling_the_work_makes_no_record() -> None:
    inside = False

    async def hang(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        nonlocal inside
        inside = True
        await asyncio.sleep(3600)
        return InvocationResponse()

    async def main() -> list[Record]:
        records: list[Record] = []
        token = CancellationToken()
        work = CaseRunner(Asked(hang), ScoringPipeline(()), timeout=60.0, seed=0, token=token)
        task = asyncio.create_task(work(make_job(), records.append))
        await until(lambda: inside)
        token.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return records

    assert asyncio.run(main()) == []


def test_work_can_be_sent_to_another_process() -> None:
    work = CaseRunner(Simulated(latency=0, tokens_per_second=0), ScoringPipeline([Exact()]), timeout=5.0, seed=1)
    records: list[Record] = []
    asyncio.run(pickle.loads(pickle.dumps(work))(make_job(prompt="p", expected="e"), records.append))
    assert records[0].status == "ok"


MISBEHAVIOURS = [
    "fine",
    "raise",
    "exit",
    "own exit",
    "group",
    "cancelled",
    "cancels itself",
    "hang",
    "wrong type",
    "wrong field",
    "says error",
    "surrogate",
    "unprintable",
    "deep",
    "scorer raises",
    "scorer cancelled",
    "scorer hangs",
    "scorer lies",
]


async def misbehave(case: EvalCase) -> Any:
    """Do what the case asks for."""
    match case.metadata["does"]:
        case "raise":
            raise ValueError("no")
        case "exit":
            raise SystemExit(1)
        case "own exit":
            raise OwnExit
        case "group":
            raise BaseExceptionGroup("g", [SystemExit(2)])
        case "cancelled":
            raise asyncio.CancelledError
        case "cancels itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        case "hang":
            await asyncio.sleep(3600)
        case "wrong type":
            return 17
        case "wrong field":
            return InvocationResponse(num_tokens_output="many")  # type: ignore[arg-type]
        case "says error":
            return InvocationResponse(error="refused")
        case "surrogate":
            return "\ud800"
        case "unprintable":
            raise Unprintable
        case "deep":
            raise deep_error()
    return "fine"


async def judge(case: EvalCase, response: InvocationResponse) -> Any:
    match case.metadata["does"]:
        case "scorer raises":
            raise ValueError("no")
        case "scorer cancelled":
            raise asyncio.CancelledError
        case "scorer hangs":
            await asyncio.sleep(3600)
        case "scorer lies":
            return 17
    return True


SCORER_ERRORS = {"scorer raises", "scorer cancelled", "scorer hangs", "scorer lies"}
ANSWERS = {"fine", "surrogate", *SCORER_ERRORS}


@settings(max_examples=25, deadline=None)
@given(
    does=st.lists(st.sampled_from(MISBEHAVIOURS), min_size=1, max_size=12),
    parallelism=st.integers(1, 6),
)
def test_no_mix_of_bad_cases_ends_a_run(does, parallelism) -> None:
    """Every case has its record, the good ones their answer, the bad ones their error, and the counts add up."""
    suite = make_suite(0)
    cases = [EvalCase(id=str(n), prompt="p", metadata={"does": what}) for n, what in enumerate(does)]
    suite = type(suite)("bad", cases)
    runner = Runner(
        CallableTarget(misbehave),
        suite,
        [FunctionScorer(judge, timeout=0.02)],
        parallelism=parallelism,
        timeout=0.02,
        progress="off",
        retries=0,
    )
    result = runner.run_sync()
    assert result.complete
    assert [record.id for record in result.responses] == [case.id for case in cases]
    for record, what in zip(result.responses, does, strict=True):
        assert record.status == ("ok" if what in ANSWERS else "error"), what
        if what in ANSWERS:
            assert bool(record.scores[0].errors) == (what in SCORER_ERRORS)
    errors = sum(what not in ANSWERS for what in does)
    assert result.metrics["counts"] == {
        "planned": len(does),
        "ok": len(does) - errors,
        "error": errors,
        "cancelled": 0,
        "not_started": 0,
    }


def test_sync_targets_misbehave_just_as_safely() -> None:
    def answer(case: EvalCase) -> Any:
        if case.id == "c1":
            raise SystemExit(1)
        if case.id == "c2":
            raise asyncio.CancelledError
        if case.id == "c3":
            raise KeyboardInterrupt
        if case.id == "c4":
            raise StopIteration
        return threading.current_thread().name

    result = Runner(answer, make_suite(6), progress="off").run_sync()
    assert [record.status for record in result.responses] == ["ok", "error", "error", "error", "error", "ok"]
