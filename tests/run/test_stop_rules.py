"""When the first calls of a run tell that nothing it asks can be answered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from steelyard import EvalCase, EvalSet, InvocationResponse, Runner
from steelyard.errors import TargetError
from steelyard.protocols import InvocationContext
from steelyard.records import Record
from steelyard.run.stop_rules import FirstErrors
from tests.support.journal import CountedModel, a_record, cases, run_in


def failed(status: int | None = None, *, kind: str = "TargetError", attempts: int = 1) -> Record:
    return a_record(status="error", error=f"{kind}: no", error_type=kind, http_status=status, attempts=attempts)


def reasons(*records: Record, most: int = 3) -> list[str]:
    """Why the run would have ended, each time that it was said."""
    first = FirstErrors(most)
    return [reason for record in records if (reason := first.take(record)) is not None]


@pytest.mark.parametrize("status", [401, 402, 403, 404, 405])
def test_the_same_lasting_refusal_of_the_first_calls_ends_a_run_once(status: int) -> None:
    assert reasons(*[failed(status)] * 2) == []
    assert reasons(*[failed(status)] * 9) == [
        "every call is refused: the first 3 all failed, the last with TargetError: no (stop_first_errors)"
    ]


def refused(status: int, text: str) -> Record:
    return a_record(status="error", error=f"TargetError: {text}", error_type="TargetError", http_status=status)


@pytest.mark.parametrize("status", [400, 422])
def test_first_calls_that_are_all_refused_in_the_same_words_end_a_run(status: int) -> None:
    """A wrong model, at many gateways; ids of requests in the message do not make it another one."""
    records = [refused(status, f"unknown model 'gpt-9' (request 4f9a{number:08x})") for number in range(20)]
    assert reasons(*records[:19], most=20) == []
    (reason,) = reasons(*records, most=20)
    assert reason.startswith("every call is refused: the first 20 all failed, the last with TargetError: unknown model")


@pytest.mark.parametrize("other", [refused(400, "too long"), refused(422, "unknown model"), failed(401), a_record()])
@pytest.mark.parametrize("place", [0, 1, 10])
def test_bad_requests_that_differ_are_faults_of_their_cases(other: Record, place: int) -> None:
    records = [refused(400, "unknown model")] * 20
    records.insert(place, other)
    assert reasons(*records, most=20) == []


@pytest.mark.parametrize("kind", ["CannotConnect", "CannotResolve", "TlsFailed", "TimedOut", "ConnectionRefusedError"])
def test_tries_to_connect_count_one_by_one(kind: str) -> None:
    assert reasons(failed(kind=kind, attempts=2)) == []
    assert reasons(failed(kind=kind, attempts=2), failed(kind=kind, attempts=2)) == [
        f"nothing answers there: the first 4 all failed, the last with {kind}: no (stop_first_errors)"
    ]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(a_record(), id="an answer"),
        pytest.param(failed(400), id="a case that is refused"),
        pytest.param(failed(500), id="a fault that may pass"),
        pytest.param(failed(None, kind="TimeoutError"), id="a slow answer"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_anything_else_among_the_first_calls_is_proof_that_the_endpoint_can_be_asked(other: Record, place: int) -> None:
    records = [failed(401)] * 20
    records.insert(place, other)
    assert reasons(*records) == []


def test_an_answer_out_of_the_cache_proves_nothing() -> None:
    assert len(reasons(failed(401), a_record(cached=True), failed(401), failed(401))) == 1


def test_reasons_that_differ_are_counted_apart() -> None:
    assert reasons(failed(401), failed(401), failed(403), failed(401), failed(403)) == []
    assert len(reasons(failed(401), failed(401), failed(403), failed(403), failed(403))) == 1


def test_none_are_counted_when_that_is_wanted() -> None:
    assert FirstErrors(0).is_over
    assert reasons(*[failed(401)] * 99, most=0) == []


@pytest.mark.parametrize("records", [[a_record()], [failed(401)] * 3, [failed(401), failed(500)]])
def test_when_all_is_said_no_record_need_be_looked_at_any_more(records: list[Record]) -> None:
    first = FirstErrors(3)
    for record in records:
        assert not first.is_over
        first.take(record)
    assert first.is_over


def test_an_answer_of_an_earlier_sitting_that_is_only_scored_again_proves_nothing(tmp_path: Path) -> None:
    def answer(case: EvalCase, _: InvocationContext) -> InvocationResponse:
        if int(case.id.removeprefix("c")) >= 10:
            raise TargetError("no", partial=InvocationResponse(http_status=401))
        return InvocationResponse(response_text="x")

    run_in(tmp_path, CountedModel(answer), cases(60), stop_first_errors=0)
    model = CountedModel(answer)
    runner = Runner(model, EvalSet("journal", cases(60)), ["contains"], output_path=tmp_path, progress="off")
    result = runner.run_sync(retry_errors=True, parallelism=1)
    assert "every call is refused: the first 20 all failed" in result.metrics["stopped"]
    assert len(model.called) == 20
    assert result.metrics["scores"]["contains"]["n"] == 10


def test_quick_refusals_do_not_end_a_run_whose_first_answers_are_still_to_come() -> None:
    """Some prompts may be forbidden, and a refusal comes sooner than an answer."""
    refused = 0
    enough = asyncio.Event()

    async def answer(case: EvalCase, _: InvocationContext) -> str:
        nonlocal refused
        if int(case.id.removeprefix("c")) % 10 == 0:
            await enough.wait()
            return "x"
        await asyncio.sleep(0)
        refused += 1
        if refused == 40:
            enough.set()
        raise TargetError("HTTP 403", partial=InvocationResponse(http_status=403))

    result = Runner(answer, EvalSet("s", cases(60)), progress="off").run_sync(parallelism=10)
    assert result.complete
    assert (result.metrics["counts"]["ok"], result.metrics["counts"]["error"]) == (6, 54)


def test_a_call_that_hangs_does_not_keep_a_run_from_ending_for_ever() -> None:
    async def answer(case: EvalCase, _: InvocationContext) -> str:
        if case.id == "c0":
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        raise TargetError("HTTP 403", partial=InvocationResponse(http_status=403))

    result = Runner(answer, EvalSet("s", cases(600)), progress="off").run_sync(parallelism=4)
    assert "every call is refused: the first 200 all failed" in result.metrics["stopped"]
