"""What a call had sent when its time was up, when it broke off, or when the run ended: kept, counted and priced."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steelyard import CancellationToken, EvalCase, EvalSet, InvocationResponse, Record, Runner
from steelyard.records import CUT_OFF
from steelyard.targets import (
    AnthropicMessages,
    Bedrock,
    CallableTarget,
    Command,
    Gemini,
    OpenAIChat,
    OpenAICompletions,
    OpenAIResponses,
)
from tests.support.cli import run_cli
from tests.support.mock import Mock, running_mock

PRICES = {"input": 1_000, "output": 10_000}
CASES = EvalSet(id="s", cases=[EvalCase(id="a", prompt="Say very much.")])


@pytest.fixture(scope="module")
def endless() -> Iterator[Mock]:
    """A mock whose answers never end while a test runs."""
    with running_mock(output_tokens=20_000, chunk_interval=0.005) as mock:
        yield mock


def targets(mock: Mock) -> dict[str, Any]:
    return {
        "chat": OpenAIChat("m", base_url=mock.base_url),
        "completions": OpenAICompletions("m", base_url=mock.base_url),
        "responses": OpenAIResponses("m", base_url=mock.base_url),
        "anthropic": AnthropicMessages("m", base_url=mock.base_url),
        "gemini": Gemini("m", base_url=f"{mock.url}/v1beta", api_key="AIza-not-a-key"),
        "bedrock": Bedrock("m", base_url=mock.url, region="eu-west-1", api_key="not-a-key"),
    }


def only_record(target: Any, **options: Any) -> Record:
    runner = Runner(target, CASES, progress="off", prices=PRICES)
    (record,) = runner.run_sync(**options).responses
    return record


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "anthropic", "gemini", "bedrock"])
def test_a_stream_that_runs_out_of_time_keeps_its_text_tokens_times_and_cost(endless: Mock, api: str) -> None:
    record = only_record(targets(endless)[api], timeout=1.0)
    assert record.status == "error"
    assert record.error_type == "TimeoutError"
    assert record.response_text
    assert len(record.response_text) > 20
    assert record.num_tokens_input
    assert record.num_tokens_output
    assert record.num_tokens_output >= 5
    assert record.tokens_estimated or api == "gemini"  # which reports its tokens with each piece
    assert record.time_to_first_token is not None
    assert 0 < record.time_to_first_token <= record.time_to_last_token <= 1.5
    assert record.cost == pytest.approx((record.num_tokens_input + 10 * record.num_tokens_output) * 1e-3)
    assert record.http_status == 200
    estimated = " (estimated)" if record.tokens_estimated else ""
    tokens = f"{record.num_tokens_output:,} tokens received{estimated}"
    assert record.error == f"TimeoutError: timed out after 1 s with {tokens}"


def test_a_stream_that_breaks_off_has_its_tokens_estimated_and_priced() -> None:
    with running_mock(output_tokens=200, torn_rate=1.0) as mock:
        record = only_record(OpenAIChat("m", base_url=mock.base_url), retries=0)
    assert record.error_type == "ConnectionLost"
    assert record.response_text
    assert record.num_tokens_output
    assert record.tokens_estimated
    assert record.cost == pytest.approx((record.num_tokens_input + 10 * record.num_tokens_output) * 1e-3)


def test_a_reasoning_item_that_is_done_does_not_hide_the_text_that_is_not() -> None:
    with running_mock(output_tokens=20_000, chunk_interval=0.005, reasoning_tokens=3) as mock:
        record = only_record(OpenAIResponses("m", base_url=mock.base_url), timeout=1.0)
    assert [item["type"] for item in record.messages or []] == ["reasoning", "message"]
    assert record.response_text


def test_an_answer_of_which_nothing_came_says_so(tmp_path: Path) -> None:
    with running_mock(latency=60.0) as mock:
        record = only_record(OpenAIChat("m", base_url=mock.base_url), timeout=0.2)
    assert record.error == "TimeoutError: no answer within 0.2 s"
    assert record.response_text is None
    assert record.num_tokens_output is None


def test_a_program_that_runs_out_of_time_keeps_what_it_wrote() -> None:
    script = "import sys, time; print('so far', flush=True); print('why', file=sys.stderr, flush=True); time.sleep(60)"
    record = only_record(Command([sys.executable, "-c", script]), timeout=3.0)
    assert record.error == "TimeoutError: timed out after 3 s with 7 characters received"
    assert record.response_text == "so far\n"
    assert record.stderr == "why"
    assert record.time_to_first_token is not None


def test_a_program_that_only_complained_before_its_time_was_up_says_so() -> None:
    script = "import sys, time; print('why', file=sys.stderr, flush=True); time.sleep(60)"
    record = only_record(Command([sys.executable, "-c", script]), timeout=3.0)
    assert record.error == "TimeoutError: timed out after 3 s with output on stderr only"
    assert record.stderr == "why"


def test_a_program_that_succeeds_or_fails_keeps_the_end_of_its_stderr() -> None:
    script = "import sys; print('out'); sys.stderr.write('x' * 9000 + 'end'); sys.exit({})"
    good = only_record(Command([sys.executable, "-c", script.format(0)]))
    assert (good.status, good.response_text) == ("ok", "out")
    assert good.stderr is not None
    assert good.stderr.endswith("xend")
    assert len(good.stderr) <= 4096
    bad = only_record(Command([sys.executable, "-c", script.format(3)]))
    assert (bad.status, bad.response_text) == ("error", "out\n")
    assert bad.stderr == good.stderr


def test_the_stderr_of_a_program_shows_no_value_of_its_environment() -> None:
    script = (
        "import base64, os, sys; k = os.environ['KEY']; sys.stderr.write(k + base64.b64encode(k.encode()).decode())"
    )
    record = only_record(Command([sys.executable, "-c", script + "; print(1)"], env={"KEY": "sk-very-secret-indeed"}))
    assert "secret" not in (record.stderr or "")
    assert "c2VjcmV0" not in (record.stderr or "")


async def yields_async(case: EvalCase) -> Any:
    yield "first "
    yield "second"
    await asyncio.Event().wait()


def yields_in_thread(case: EvalCase) -> Any:
    yield "first "
    yield "second"
    threading.Event().wait(20)


@pytest.mark.parametrize("function", [yields_async, yields_in_thread])
def test_a_function_that_yields_keeps_its_pieces_when_its_time_is_up(function: Any) -> None:
    record = only_record(CallableTarget(function), timeout=0.5)
    assert record.error == "TimeoutError: timed out after 0.5 s with 12 characters received"
    assert record.response_text == "first second"
    assert record.time_to_first_token is not None


async def fails_async(case: EvalCase) -> Any:
    yield "so far"
    raise KeyError("missing")


def fails_in_thread(case: EvalCase) -> Any:
    yield "so far"
    raise KeyError("missing")


@pytest.mark.parametrize("function", [fails_async, fails_in_thread])
def test_a_function_that_yields_keeps_its_pieces_when_it_fails(function: Any) -> None:
    record = only_record(CallableTarget(function))
    assert record.error_type == "KeyError"
    assert record.response_text == "so far"


def cut_answers(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]


def test_an_answer_cut_off_by_the_end_of_the_run_is_kept_counted_and_asked_for_again(
    endless: Mock, tmp_path: Path
) -> None:
    token = CancellationToken()
    cases = EvalSet(id="s", cases=[EvalCase(id=f"c{n}", prompt="Say very much.") for n in range(3)])
    run = tmp_path / "run"
    threading.Timer(1.0, token.cancel, ["enough"]).start()
    target = OpenAIChat("m", base_url=endless.base_url)
    runner = Runner(target, cases, progress="off", prices=PRICES, token=token)
    result = runner.run_sync(output_path=run, parallelism=3)
    assert result.metrics["counts"]["cancelled"] == 3
    cut = cut_answers(run)
    assert sorted(line["id"] for line in cut) == ["c0", "c1", "c2"]
    for line in cut:
        assert (line["status"], line["error_type"]) == ("error", CUT_OFF)
        assert len(line["response_text"]) > 20
        assert line["tokens_estimated"] is True
    spent = sum(line["cost"] for line in cut)
    assert result.metrics["cost"] == pytest.approx(spent)

    with running_mock(output_tokens=3) as mock:
        again = Runner(_same_place(target, mock), cases, progress="off", prices=PRICES)
        resumed = again.run_sync(output_path=run)
        assert mock.stats()["requests"] == 3
    assert resumed.metrics["counts"]["ok"] == 3
    answers = sum(record.cost or 0.0 for record in resumed.load_responses())
    assert resumed.metrics["cost"] == pytest.approx(spent + answers)


def _same_place(target: OpenAIChat, mock: Mock) -> OpenAIChat:
    """The target, which now calls another server: a run may not be resumed with another target."""
    target._url = f"{mock.base_url}/chat/completions"
    return target


def test_a_case_that_had_sent_nothing_leaves_nothing_behind_when_the_run_ends(tmp_path: Path) -> None:
    token = CancellationToken()

    async def never(case: EvalCase) -> str:
        token.cancel("enough")
        await asyncio.Event().wait()
        return ""

    Runner(never, CASES, progress="off", token=token).run_sync(output_path=tmp_path / "run")
    assert not (tmp_path / "run" / "answers.jsonl").exists()


def test_what_a_users_error_carries_as_partial_is_checked() -> None:
    class Odd(Exception):
        partial = "not a response"

    async def answer(case: EvalCase) -> str:
        raise Odd

    record = only_record(CallableTarget(answer))
    assert (record.error_type, record.response_text) == ("Odd", None)


def test_the_new_field_reads_back_from_a_record() -> None:
    response = InvocationResponse(response_text="x", stderr="why")
    assert msgspec.json.decode(msgspec.json.encode(response), type=InvocationResponse).stderr == "why"


def test_a_suite_file_shows_the_stderr_of_its_program_in_the_report(tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    program = f"{sys.executable} -c \"import sys; print('hi'); print('a warning', file=sys.stderr)\""
    suite.write_text(
        textwrap.dedent(
            f"""\
            target: {{command: {{argv: {json.dumps(program)}}}}}
            cases: [{{id: a, prompt: hello}}]
            """
        )
    )
    assert run_cli(tmp_path, "run", suite.name, "--out", "run").code == 0
    assert "  stderr:\n    a warning" in run_cli(tmp_path, "report", "run", "--case", "a").out
