"""Errors are grouped by HTTP status or by what happened to the connection, and by their type where neither is known."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, InvocationContext, InvocationResponse, Result, Runner
from steelyard.errors import TargetError, TransientError
from steelyard.report.markdown import markdown
from steelyard.report.summary import summary
from steelyard.stats.errors import error_name
from steelyard.transport import CannotConnect, ConnectionLost
from tests.support.metrics import typed

CASES = [EvalCase(id=f"c{number}", prompt="p") for number in range(8)]


def partial(status: int) -> InvocationResponse:
    return InvocationResponse(http_status=status)


class Fails:
    """A target that raises what it is given for a case, and answers the others."""

    model_id = "fails"
    default_parallelism = 1

    def __init__(self, errors: dict[str, BaseException]) -> None:
        self.errors = errors

    def identity(self) -> dict[str, Any]:
        return {"kind": "fails"}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        await asyncio.sleep(0)
        if case.id in self.errors:
            raise self.errors[case.id]
        return InvocationResponse(response_text="a")


def run(errors: dict[str, BaseException], path: Path | None = None, **entry: bool) -> dict[str, Any]:
    suite = EvalSet(id="s", cases=CASES)
    return Runner(Fails(errors), suite, output_path=path, retries=0, progress="off").run_sync(**entry).metrics


@pytest.mark.parametrize(
    ("error_type", "status", "kind"),
    [
        ("TransientError", 429, "429 rate limited"),
        ("TransientError", 503, "503 unavailable"),
        ("TargetError", 418, "418"),
        ("TargetError", 301, "301"),
        ("TimeoutError", None, "timeout"),
        ("CannotConnect", None, "cannot connect"),
        ("ConnectionRefusedError", None, "connection refused"),
        ("ConnectionLost", 200, "connection lost"),
        ("TransientError", 200, "200 without a whole answer"),
        ("TargetError", None, "TargetError"),
        ("ValueError", 200, "ValueError"),
        ("KeyError", None, "KeyError"),
        (None, None, "error"),
    ],
)
def test_the_kind_of_an_error(error_type: str | None, status: int | None, kind: str) -> None:
    name = error_name(InvocationResponse(error="e", error_type=error_type, http_status=status))
    assert name == (error_type or "error", kind)


def test_one_type_with_two_statuses_is_two_kinds() -> None:
    metrics = run(
        {
            "c1": TransientError("HTTP 429: slow down", partial=partial(429)),
            "c3": TransientError("HTTP 503: try later", partial=partial(503)),
            "c4": TransientError("HTTP 429: slow down", partial=partial(429)),
        }
    )
    assert metrics["errors"] == {"TransientError": 3}
    assert metrics["error_kinds"] == {"429 rate limited": 2, "503 unavailable": 1}
    assert metrics["error_kind_examples"]["503 unavailable"] == {
        "id": "c3",
        "error": "TransientError: HTTP 503: try later",
    }
    assert metrics["error_examples"]["TransientError"]["id"] == "c1"


def test_two_types_with_one_status_are_one_kind() -> None:
    metrics = run(
        {
            "c2": TargetError("HTTP 429: no credit", partial=partial(429)),
            "c1": TransientError("HTTP 429: slow down", partial=partial(429)),
        }
    )
    assert metrics["errors"] == {"TargetError": 1, "TransientError": 1}
    assert metrics["error_kinds"] == {"429 rate limited": 2}
    assert metrics["error_kind_examples"]["429 rate limited"]["id"] == "c1"


def test_the_summary_groups_by_kind() -> None:
    metrics = run({"c1": TransientError("HTTP 429: slow down", partial=partial(429)), "c2": CannotConnect("nobody")})
    text = summary(typed(metrics))
    assert "      1 × 429 rate limited\n            c1: TransientError: HTTP 429: slow down\n" in text
    assert "      1 × cannot connect\n" in text
    assert "× TransientError" not in text


def test_markdown_groups_by_kind(tmp_path: Path) -> None:
    run({"c1": TransientError("HTTP 429: slow down", partial=partial(429)), "c2": CannotConnect("nobody")}, tmp_path)
    rows = [line for line in "".join(markdown(tmp_path)).splitlines() if line.startswith("| <code>")]
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| <code>429 rate limited</code>", "1"],
        ["| <code>cannot connect</code>", "1"],
    ]


def test_the_summary_of_an_older_run_groups_by_type() -> None:
    metrics = run({"c1": ValueError("bad")})
    del metrics["error_kinds"], metrics["error_kind_examples"]
    assert "      1 × ValueError\n            c1: ValueError: bad" in summary(typed(metrics))


def test_kinds_of_earlier_sittings_are_counted_and_go_when_their_cases_are_answered(tmp_path: Path) -> None:
    errors: dict[str, BaseException] = {
        "c1": TransientError("HTTP 429: slow down", partial=partial(429)),
        "c3": ConnectionLost("gone"),
    }
    assert run(errors, tmp_path)["error_kinds"] == {"429 rate limited": 1, "connection lost": 1}
    (tmp_path / "metrics.json").unlink()
    replayed = Result.load(tmp_path).metrics
    assert replayed["error_kinds"] == {"429 rate limited": 1, "connection lost": 1}
    assert replayed["errors"] == {"ConnectionLost": 1, "TransientError": 1}
    del errors["c1"]
    assert run(errors, tmp_path)["error_kinds"] == {"connection lost": 1}
