"""Spans of a run: what is in which, under which names, and what is left out."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, InvocationContext, InvocationResponse, Judge, Runner, Score, TransientError
from steelyard.errors import ConfigurationError
from steelyard.protocols import RemoteTarget, RepeatedJudge
from steelyard.targets import CallableTarget, OpenAIChat, Simulated
from tests.support.cli import finish, start
from tests.support.scripted_transport import (
    ScriptedTransport,
    chat_chunk,
    chat_end,
    chat_text,
    chat_usage,
    stream,
    tool_fragment,
    whole,
)

pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otel`")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from steelyard.integrations import otel
from steelyard.integrations.otel import TracedScorer, provider_from_environment, trace_runner
from steelyard.integrations.otel_spans import Spans
from steelyard.scoring.base import FunctionScorer, limits_of

CAPITALS = [("fr", "Paris"), ("it", "Rome"), ("pe", "Lima")]


class Traces:
    """A provider whose spans stay in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def under(self, parent: ReadableSpan) -> list[str]:
        """The names of the spans right below this one, sorted."""
        inside = [span.name for span in self.spans if span.parent and span.parent.span_id == parent.context.span_id]
        return sorted(inside)


@pytest.fixture
def traces() -> Traces:
    return Traces()


def suite(*pairs: tuple[str, str]) -> EvalSet:
    cases = [EvalCase(id=one, prompt=f"secret question {one}", expected=answer) for one, answer in pairs or CAPITALS]
    return EvalSet("capitals", cases)


def run_traced(
    traces: Traces, target: Any, scorers: Any = (), *, content: bool | None = None, **options: Any
) -> Runner:
    runner = Runner(target, suite(), scorers, progress="off", **options)
    trace_runner(runner, tracer_provider=traces.provider, content=content)
    runner.run_sync()
    return runner


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def everything(traces: Traces) -> str:
    """All that an exporter would send, as text."""
    return "".join(span.to_json() for span in traces.spans)


def simulated(**more: Any) -> Simulated:
    return Simulated(**{"latency": 0, "tokens_per_second": 0, "accuracy": 1.0, "model": "small", **more})


def test_a_run_holds_its_cases_and_a_case_its_call_and_its_scores(traces: Traces) -> None:
    run_traced(traces, simulated(), ["exact", lambda case, response: True])
    run = traces.one("run capitals")
    assert run.parent is None
    assert traces.under(run) == ["case"] * 3
    for case in traces.named("case"):
        assert traces.under(case) == ["chat small", "score <lambda>", "score exact"]
    assert attributes(run) == {
        "steelyard.suite": "capitals",
        "steelyard.seed": 0,
        "gen_ai.request.model": "small",
        "steelyard.parallelism": 50,
        "steelyard.finished": 3,
        "steelyard.cancelled": 0,
    }
    assert len({span.context.trace_id for span in traces.spans}) == 1


def test_a_model_with_tools_is_an_agent_whose_every_call_and_try_is_a_span(traces: Traces) -> None:
    fragment = tool_fragment(0, '{"city": "Rome"}', id="c1", name="weather")
    wants_tool = stream(chat_chunk(tool_calls=[fragment]), chat_chunk("tool_calls"), chat_end(chat_usage(10, 3)))
    busy = whole({"error": {"message": "try again"}}, status=500)
    transport = ScriptedTransport(wants_tool, busy, stream(*chat_text("Clear", ".", usage=chat_usage(30, 5))))
    functions = {"weather": lambda city: f"clear in {city}"}
    target = OpenAIChat("m", base_url="http://127.0.0.1:9/v1", transport=transport, functions=functions)
    runner = Runner(target, suite(("rome", "Clear.")), ["exact"], progress="off", retries=2)
    trace_runner(runner, tracer_provider=traces.provider, content=True)
    result = runner.run_sync()
    assert (result.metrics["pass_rate"], len(transport.bodies)) == (1.0, 3)
    assert traces.under(traces.one("case")) == ["invoke_agent m", "score exact"]
    assert traces.under(traces.one("invoke_agent m")) == ["chat m"] * 3
    first, second, third = map(attributes, traces.named("chat m"))
    assert [one.get("gen_ai.usage.input_tokens") for one in (first, second, third)] == [10, None, 30]
    assert second["error.type"] == "TransientError"
    assert [json.loads(one["gen_ai.input.messages"])[-1]["role"] for one in (first, third)] == ["user", "tool"]
    assert all(span.kind is SpanKind.CLIENT for span in traces.named("chat m"))
    assert attributes(traces.one("invoke_agent m"))["gen_ai.usage.input_tokens"] == 40


def test_a_case_says_which_it_is_and_how_it_went(traces: Traces) -> None:
    run_traced(traces, simulated(), ["exact"], trials=2)
    found = {
        (one["steelyard.case.id"], one["steelyard.case.trial"], one["steelyard.case.index"], one["steelyard.passed"])
        for one in map(attributes, traces.named("case"))
    }
    assert found == {(name, trial, index, True) for index, (name, _) in enumerate(CAPITALS) for trial in (0, 1)}
    assert {attributes(span)["steelyard.status"] for span in traces.named("case")} == {"ok"}


def test_a_call_has_the_names_of_the_genai_conventions(traces: Traces) -> None:
    async def answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        return InvocationResponse(
            response_text="Paris",
            num_tokens_input=11,
            num_tokens_output=2,
            num_tokens_input_cached=5,
            num_tokens_input_cache_write=3,
            num_tokens_output_reasoning=1,
            time_to_first_token=0.25,
            stop_reason="stop",
            http_status=200,
            request_id="req-1",
        )

    run_traced(traces, answer)
    call = traces.spans[0]
    assert call.name.startswith("invoke_agent ")
    assert call.kind is SpanKind.INTERNAL
    assert attributes(call) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "callable",
        "gen_ai.agent.name": call.name.removeprefix("invoke_agent "),
        "gen_ai.usage.input_tokens": 11,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 5,
        "gen_ai.usage.cache_creation.input_tokens": 3,
        "gen_ai.usage.reasoning.output_tokens": 1,
        "gen_ai.response.time_to_first_chunk": 0.25,
        "gen_ai.response.finish_reasons": ("stop",),
        "http.response.status_code": 200,
        "steelyard.request_id": "req-1",
        "steelyard.attempt": 1,
    }


def test_a_remote_model_says_where_it_is_and_what_it_was_asked_with(traces: Traces) -> None:
    target = OpenAIChat(
        "big", base_url="http://127.0.0.1:9/v1", params={"temperature": 0.5, "max_completion_tokens": 20, "user": "me"}
    )
    runner = trace_runner(Runner(target, suite(), progress="off", retries=0), tracer_provider=traces.provider)
    assert isinstance(runner.target, RemoteTarget)
    assert runner.target.identity() == target.identity()
    runner.run_sync()  # nobody listens there: each call fails
    call = traces.named("chat big")[0]
    assert call.kind is SpanKind.CLIENT
    assert call.status.status_code is StatusCode.ERROR
    found = attributes(call)
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "big",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.stream": True,
        "server.address": "127.0.0.1",
        "server.port": 9,
        "steelyard.attempt": 1,
    }.items() <= found.items()
    assert "error.type" in found
    assert traces.named("case")[0].status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(("scheme", "port"), [("https", 443), ("http", 80)])
def test_an_address_without_a_port_has_that_of_its_scheme(traces: Traces, scheme: str, port: int) -> None:
    target = OpenAIChat("big", base_url=f"{scheme}://models.invalid/v1", api_key="k")
    runner = trace_runner(Runner(target, suite(), progress="off"), tracer_provider=traces.provider)
    assert runner.target._attributes["server.port"] == port  # type: ignore[attr-defined]


def test_every_name_is_one_of_the_present_genai_conventions() -> None:
    """By the list that comes with the SDK: a name that was taken out or replaced there is out of date here."""
    conventions = pytest.importorskip(
        "opentelemetry.semconv._incubating.attributes.gen_ai_attributes", reason="this SDK brings no GenAI names"
    )
    written = Path(conventions.__file__).read_text(encoding="utf-8")
    listed = re.findall(r'= "(gen_ai\.[a-z_.]+)"\n"""\n(.*?)"""', written, flags=re.S)
    present = {name for name, about in listed if not re.search(r"Deprecated: Re(moved|placed)", about)}
    sources = Path(otel.__file__).parent.glob("*.py")
    used = {name for file in sources for name in re.findall(r'"(gen_ai\.[a-z_.]+)"', file.read_text(encoding="utf-8"))}
    assert len(used) > 20
    assert used - present == set()


def test_each_try_is_a_call_of_its_own(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.engine.retry.RetryPolicy.wait_before", lambda self, attempt: 0.0)

    async def flaky(case: EvalCase, context: InvocationContext) -> str:
        if context.attempt < 3:
            raise TransientError("busy", partial=InvocationResponse(num_tokens_input=7))
        return "fine"

    run_traced(traces, flaky)
    case = traces.named("case")[0]
    calls = [span for span in traces.spans if span.parent and span.parent.span_id == case.context.span_id]
    assert [attributes(call)["steelyard.attempt"] for call in calls] == [1, 2, 3]
    assert [attributes(call).get("error.type") for call in calls] == ["TransientError", "TransientError", None]
    assert attributes(calls[0])["gen_ai.usage.input_tokens"] == 7
    assert attributes(case)["steelyard.attempts"] == 3
    assert case.status.status_code is StatusCode.UNSET


def test_a_score_has_its_name_value_and_label(traces: Traces) -> None:
    def half(case: EvalCase, response: InvocationResponse) -> Score:
        return Score("half", 0.25, False, "secret reason")

    def broken(case: EvalCase, response: InvocationResponse) -> bool:
        raise ValueError("secret failure")

    run_traced(traces, lambda case: "secret answer", [half, broken, "exact"])
    found = attributes(traces.named("score half")[0])
    assert found == {
        "gen_ai.evaluation.name": "half",
        "gen_ai.evaluation.score.value": 0.25,
        "gen_ai.evaluation.score.label": "fail",
    }
    failed = traces.named("score broken")[0]
    assert failed.status.status_code is StatusCode.ERROR
    assert attributes(failed)["error.type"] == "ValueError"
    assert attributes(traces.named("case")[0]).get("steelyard.passed") is None


def test_a_judges_call_is_below_its_score(traces: Traces) -> None:
    async def verdict(case: EvalCase, context: InvocationContext) -> str:
        return json.dumps({"reason": "secret reason", "score": 1, "passed": True})

    judge = Judge(model="wise", target=CallableTarget(verdict))
    runner = run_traced(traces, simulated(), [judge], num_runs=2)
    (traced,) = runner.scorers
    assert isinstance(traced, RepeatedJudge)
    assert (traced.identity(), traced.by) == (judge.identity(), judge.by)
    samples = traces.named("score judge")
    assert sorted(attributes(span)["steelyard.sample"] for span in samples) == [0, 0, 0, 1, 1, 1]
    for span in samples:
        assert attributes(span)["steelyard.judge"] == judge.by
        assert attributes(span)["gen_ai.evaluation.score.label"] == "pass"
        (call,) = traces.under(span)
        assert call.startswith("invoke_agent ")


def test_a_judge_that_needs_a_calibration_and_has_none_is_advisory_when_traced_too(
    traces: Traces, tmp_path: Path
) -> None:
    async def verdict(case: EvalCase) -> str:
        return '{"reason": "no", "score": 0, "passed": false}'

    judge = Judge(model="wise", target=CallableTarget(verdict), calibration=tmp_path / "none.json")
    runner = Runner(simulated(), suite(), [judge], progress="off")
    trace_runner(runner, tracer_provider=traces.provider)
    result = runner.run_sync()
    assert all(score.advisory for record in result.responses for score in record.scores)


def test_what_is_asked_and_answered_is_left_out_unless_it_is_asked_for(traces: Traces) -> None:
    async def verdict(case: EvalCase) -> str:
        return '{"reason": "secret reason", "score": 0, "passed": false}'

    def fails(case: EvalCase) -> str:
        if case.id == "fr":
            raise ValueError("secret failure")
        return "secret answer"

    scorers = ["exact", Judge(model="wise", target=CallableTarget(verdict))]
    run_traced(traces, fails, scorers)
    assert "secret" not in everything(traces)
    with_content = Traces()
    run_traced(with_content, fails, scorers, content=True)
    found = everything(with_content)
    for word in ("secret question", "secret answer", "secret reason", "secret failure"):
        assert word in found


@pytest.mark.parametrize(("value", "shown"), [("SPAN_ONLY", True), ("true", True), ("NO_CONTENT", False), ("", False)])
def test_the_usual_variable_asks_for_content(
    traces: Traces, monkeypatch: pytest.MonkeyPatch, value: str, shown: bool
) -> None:
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", value)
    run_traced(traces, simulated())
    assert ("secret question" in everything(traces)) is shown


def test_messages_have_the_shape_of_the_conventions(traces: Traces) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": "x"}]},
        {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "sum", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "\ud800 4"},
    ]
    case = EvalCase(id="a", system_prompt="be brief", messages=turns, prompt="well?")
    runner = Runner(
        lambda case: InvocationResponse(response_text="4", stop_reason="stop"), EvalSet("s", [case]), progress="off"
    )
    trace_runner(runner, tracer_provider=traces.provider, content=True).run_sync()
    found = attributes(next(span for span in traces.spans if span.name.startswith("invoke_agent")))
    assert json.loads(found["gen_ai.system_instructions"]) == [{"type": "text", "content": "be brief"}]
    assert json.loads(found["gen_ai.input.messages"]) == [
        {
            "role": "user",
            "parts": [{"type": "text", "content": "look"}, {"type": "image_url", "image_url": "x"}],
        },
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "sum", "arguments": "{}"}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "result": "\ud800 4"}]},
        {"role": "user", "parts": [{"type": "text", "content": "well?"}]},
    ]
    assert json.loads(found["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "4"}], "finish_reason": "stop"}
    ]
    found["gen_ai.input.messages"].encode()  # as every exporter does


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_the_targets_own_spans_are_below_its_call(traces: Traces, kind: str) -> None:
    tracer = traces.provider.get_tracer("agent")

    def think(case: EvalCase) -> str:
        with tracer.start_as_current_span("thinking"):
            return "x"

    async def think_async(case: EvalCase) -> str:
        return think(case)

    run_traced(traces, think if kind == "thread" else think_async, parallelism=3)
    calls = [span for span in traces.spans if span.name.startswith("invoke_agent")]
    assert [traces.under(call) for call in calls] == [["thinking"]] * 3


def test_an_answer_from_the_cache_has_no_call(traces: Traces, tmp_path: Path) -> None:
    run_traced(Traces(), simulated(), cache=tmp_path)
    run_traced(traces, simulated(), cache=tmp_path)
    assert traces.named("chat small") == []
    assert [attributes(span).get("steelyard.cached") for span in traces.named("case")] == [True] * 3


def test_tracing_changes_no_record_and_no_identity(traces: Traces, tmp_path: Path) -> None:
    def facts(path: Path) -> tuple[Any, list[tuple[Any, ...]]]:
        manifest = json.loads((path / "run.json").read_text())
        records = [json.loads(line) for line in (path / "outputs.jsonl").read_text().splitlines()]
        kept = ("id", "status", "attempts", "case_fp", "scored_by", "response_text", "scores")
        return (manifest["target"], manifest["scorers"]), sorted(tuple(map(str, map(one.get, kept))) for one in records)

    Runner(simulated(), suite(), ["exact"], progress="off", output_path=tmp_path / "plain").run_sync()
    run_traced(traces, simulated(), ["exact"], output_path=tmp_path / "traced")
    assert facts(tmp_path / "plain") == facts(tmp_path / "traced")


def test_a_runner_is_traced_once(traces: Traces) -> None:
    runner = Runner(simulated(), suite(), ["exact"], progress="off")
    trace_runner(runner, tracer_provider=traces.provider)
    assert trace_runner(runner, tracer_provider=traces.provider) is runner
    runner.run_sync()
    assert len(traces.named("chat small")) == len(traces.named("score exact")) == 3


def test_a_cancelled_run_ends_its_spans(traces: Traces) -> None:
    async def scenario() -> None:
        begun = asyncio.Event()

        async def hang(case: EvalCase) -> str:
            begun.set()
            await asyncio.Event().wait()
            return ""

        runner = Runner(hang, suite(), parallelism=1, progress="off")
        trace_runner(runner, tracer_provider=traces.provider)
        running = asyncio.create_task(runner.run())
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    assert attributes(traces.one("run capitals"))["steelyard.cancelled"] == 1
    assert attributes(traces.one("case"))["error.type"] == "CancelledError"


def test_an_exporter_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp,zipkinn")
    with pytest.raises(ConfigurationError, match=r"no exporter 'zipkinn' is installed; known here: .*console"):
        provider_from_environment()


def test_no_exporter_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert provider_from_environment().resource.attributes["service.name"] == "steelyard"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "nightly")
    assert provider_from_environment().resource.attributes["service.name"] == "nightly"


class Collector:
    """Receives what is posted to it, on a free port."""

    def __init__(self) -> None:
        taken = self.taken = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                taken.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


EXPORTING = """
    from steelyard import EvalCase, EvalSet, Runner
    from steelyard.integrations import otel
    from steelyard.targets import Simulated

    otel._FLUSH_SECONDS = {flush}
    suite = EvalSet("capitals", [EvalCase(id=str(number), prompt="?", expected="x") for number in range(20)])
    runner = Runner(Simulated(model="small", latency=0, tokens_per_second=0), suite, ["exact"], progress="off")
    with otel.exported(runner):
        runner.run_sync()
    print("done")
"""


def export(flush: float = 30.0, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EXPORTING).format(flush=flush)],
        env={**clean, "NO_PROXY": "127.0.0.1", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_all_spans_are_sent_where_the_environment_says(collector: Collector) -> None:
    ended = export(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{collector.port}")
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    names: list[str] = []
    for path, body in collector.taken:
        assert path == "/v1/traces"
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            sent = {one.key: one.value.string_value for one in resource.resource.attributes}
            assert sent["service.name"] == "steelyard"
            names += [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == sorted(["run capitals", *["case", "chat small", "score exact"] * 20])


def test_a_collector_that_does_not_answer_holds_up_the_end_no_longer_than_that() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ended = export(0.1, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
    assert "not all spans could be exported within 0.1 s" in ended.stderr


def test_a_collector_that_is_away_fails_nothing() -> None:
    ended = export(0.1, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_the_command_line_exports_a_run_that_asks_for_it(tmp_path: Path, collector: Collector) -> None:
    (tmp_path / "suite.yaml").write_text("{id: one, target: {simulated: {latency: 0}}, cases: [{prompt: hello}]}")
    address = f"http://127.0.0.1:{collector.port}"
    words = ("run", "suite.yaml", "--out", "RUN", "--no-progress")
    assert finish(start(tmp_path, *words, "--otel", OTEL_EXPORTER_OTLP_ENDPOINT=address)).code == 0
    assert collector.taken
    collector.taken.clear()
    assert finish(start(tmp_path, *words, "--force", OTEL_EXPORTER_OTLP_ENDPOINT=address)).code == 0
    assert not collector.taken


def test_without_the_extra_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['opentelemetry'] = None; import steelyard.integrations.otel"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "pip install 'steelyard[otel]'" in ended.stderr


def test_traced_scorers_keep_their_time_limit_parallelism_and_retries() -> None:
    from opentelemetry.trace import NoOpTracer

    scorer = FunctionScorer(lambda case, response: True, name="slow", timeout=3, parallelism=2, retries=1)
    assert limits_of(TracedScorer(scorer, Spans(NoOpTracer(), False))) == limits_of(scorer)
