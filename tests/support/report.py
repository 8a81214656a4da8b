"""Runs to report on: one in which every text tries something, agents with trials, judges and files, a large one."""

from __future__ import annotations

import base64
import json
import re
import zlib
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from steelyard import EvalCase, EvalSet, InvocationContext, InvocationResponse, Runner
from steelyard.errors import TargetError
from steelyard.records import Record, Score
from steelyard.scoring import Judge
from steelyard.workspace.places import safe_name
from steelyard.workspace.recording import CALLS_VERSION, Body, CallFile, CallLine, EndLine, SessionLine
from tests.support.journal import a_record, write_journal
from tests.support.judged import Assessor

HOSTILE = (
    "<script>window.ran = 1</script>",
    "</script><script>window.ran = 2</script>",
    "<!-- <script>",
    "<img src=x onerror='window.ran = 3'>",
    "[click](javascript:window.ran=4) <a href='javascript:window.ran=5'>x</a>",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07",
    "abc\u202edcba\u2066hidden\u2069",
    '=HYPERLINK("http://evil.test","x")',
    "+1+1",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\uff1d1+1",
    "]]> <![CDATA[ &amp; &lt;",
    "\x00\x01\x08\x0b\ufffe\uffff\x7f\x9b",
    "\u2028\u2029",
    "| pipe | `tick` **bold** @everyone #12 https://evil.test $x$ ~~s~~",
    '" onmouseover="window.ran = 6" x="',
    "{{7*7}} @@OVERVIEW@@ @@SCRIPT@@ ${window.ran = 7}",
    "\U000e0041\U000e0042 tags, \u200b\u200d joiner, \ufeff mark",
)


def hostile_record(number: int) -> Record:
    text = HOSTILE[number]
    failed = number % 3 == 1
    return a_record(
        id=f"{number} {text}",
        index=number,
        status="error" if number % 3 == 2 else "ok",
        error=f"Broken: {text}" if number % 3 == 2 else None,
        error_type=f"Type{text}" if number % 3 == 2 else None,
        response_text=text if number % 3 != 2 else None,
        input_prompt=text,
        messages=[{"role": text, "content": text, "tool_calls": [{"function": {"name": text, "arguments": text}}]}],
        stop_reason=text,
        request_id=text,
        scores=[Score("exact", float(not failed), not failed, text), Score(f"odd {text}", 0.5, None, text, by=text)]
        if number % 3 != 2
        else [],
    )


def hostile_run(folder: Path) -> Path:
    """An unfinished run whose every text is one of HOSTILE."""
    write_journal(folder, map(hostile_record, range(len(HOSTILE))))
    return folder


def agent_run(folder: Path) -> Path:
    """Six cases, three trials each: one always right, one always wrong, one flaky, one that errs, one escalated."""

    async def agent(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        if case.id == "errs":
            raise TargetError("the agent gave up")
        wrong = case.id in ("wrong", "rescued") or (case.id == "flaky" and context.trial == 1)
        text = f"Something else about {case.id}" if wrong else str(case.expected)
        call = {"id": "c1", "function": {"name": "look_up", "arguments": '{"query": "capital"}'}}
        return InvocationResponse(
            response_text=text,
            messages=[
                {"role": "user", "content": case.prompt},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "found it"},
                {"role": "assistant", "content": text},
            ],
            time_to_first_token=0.1 + len(case.id) / 100,
            time_to_last_token=0.3 + len(case.id) / 50,
            num_tokens_input=12,
            num_tokens_output=len(text),
            cost=0.001,
            stop_reason="stop",
        )

    cases = [
        EvalCase(id=name, prompt=f"The {name} question?", expected=f"The {name} answer is Paris")
        for name in ("right", "wrong", "flaky", "errs", "rescued", "plain")
    ]
    assessor = Assessor(lambda case_id, trial, run: 0.9 if case_id == "rescued" else 0.1 * run)
    suite = EvalSet("agents", iter(cases), system_prompt="Be brief.")
    scorers = ["exact", Judge(model="assessor", target=assessor, when="failed")]
    runner = Runner(agent, suite, scorers, trials=3, num_runs=3, retries=0, output_path=folder, progress="off")
    runner.run_sync(low_memory=True)
    return folder


def a_call(
    number: int, at: float, elapsed: float, turns: list[Any], *, thread: int = 1, model: str = "m", **response: Any
) -> CallLine:
    """A model call as a gateway records it."""
    body = Body(json.dumps({"model": model, "messages": turns}).encode())
    given = {"num_tokens_input": 10, "num_tokens_output": 5, "cost": 0.5, "http_status": 200, **response}
    return CallLine(
        session="s", call=number, api="openai", path="/chat/completions", model=model, at=at, elapsed=elapsed,
        thread=thread, request=body.whole(), response=InvocationResponse(**given),
    )  # fmt: skip


def write_calls(run: Path, case_id: str, calls: list[CallLine], *, is_ended: bool = True) -> None:
    """Calls of the first trial of a case, as its gateway writes them."""
    begin = SessionLine(v=CALLS_VERSION, id=case_id, trial=0, attempt=1, session="s", time=datetime.now(UTC))
    file = CallFile(run / "calls" / safe_name(case_id) / "0.jsonl", begin)
    for call in calls:
        file.append(call)
    if is_ended:
        file.append(EndLine(session="s", calls=len(calls)))
    file.close()


def worked_run(folder: Path, text: str = "plain", ids: tuple[str, str] = ("fixer", "printer")) -> Path:
    """A run whose agents left something: one with a gateway's calls and a patch, one with turns; `text` is in all."""
    fixer, printer = ids
    write_journal(folder, [
        a_record(id=fixer, index=0, response_text=f"Fixed. {text}", input_prompt=f"Fix it. {text}",
                 time_in_model=2.0, time_waiting=0.5, time_in_tools=1.5, num_turns=3, peak_memory=50 << 20,
                 scores=[Score("tests", 1.0, True)]),
        a_record(id=printer, index=1, response_text="Done.", input_prompt="Print it.", time_to_last_token=4.0,
                 scores=[Score("tests", 0.0, False)]),
    ])  # fmt: skip
    asked = {"role": "user", "content": "Fix it."}
    tool = {"id": "t1", "type": "function", "function": {"name": f"run {text}", "arguments": "{}"}}
    reply = {"role": "assistant", "content": None, "tool_calls": [tool]}
    result = {"role": "tool", "tool_call_id": "t1", "content": f"result {text}"}
    aside = {"role": "user", "content": f"Where? {text}"}
    write_calls(folder, fixer, [
        a_call(1, 0.5, 1.0, [asked], model=f"large {text}", messages=[reply], time_to_first_token=0.2),
        a_call(2, 1.5, 1.0, [aside], thread=2, model="small", messages=[{"role": "assistant", "content": "There."}],
               time_waiting=0.5),
        a_call(3, 3.0, 0.5, [asked, reply, result], messages=[{"role": "assistant", "content": "Done."}]),
    ])  # fmt: skip
    for case_id in ids:
        name = safe_name(case_id)
        kept, logs = folder / "artifacts" / name / "0", folder / "logs" / name
        (kept / "files").mkdir(parents=True)
        logs.mkdir(parents=True)
        patch = f"diff --git a/task.py b/task.py\n--- a/task.py\n+++ b/task.py\n@@ -1 +1 @@\n-old\n+new {text}\n"
        (kept / "workspace.patch").write_text(patch, encoding="utf-8")
        (kept / "workspace.json").write_text('{"template": "t", "files": 1, "added": 1, "removed": 1}')
        (kept / "files" / "page.html").write_text("<script>window.ran = 9</script>")
        (kept / "files" / "notes.txt").write_text(f"notes {text}", encoding="utf-8")
        (logs / "0.out").write_text(f"printed {text}\n", encoding="utf-8")
        (logs / "0.err").write_text(f"warned {text}\n", encoding="utf-8")
    turns: list[dict[str, Any]] = [
        {"time": 100.0, "attempt": 1},
        {"time": 101.0, "message": {**reply, "content": text}, "input_tokens": 7, "output_tokens": 2, "cost": 0.25},
        {"time": 103.0, "message": result},
        {"time": 103.5, "message": {"role": "assistant", "content": "Done."}},
    ]
    lines = "".join(json.dumps(turn) + "\n" for turn in turns)
    (folder / "logs" / safe_name(printer) / "0.turns.jsonl").write_text(lines)
    return folder


def large_run(folder: Path, count: int, *, text: str = "an answer of a few words") -> Path:
    """An unfinished run of so many records, one in ten failed, one in fifty an error."""

    def record(number: int) -> Record:
        ok, passed = number % 50 != 7, number % 10 != 3
        return a_record(
            id=f"case-{number:06}",
            index=number,
            status="ok" if ok else "error",
            error=None if ok else "TimeoutError: no answer within 30 s",
            error_type=None if ok else "TimeoutError",
            response_text=f"{text} {number}" if ok else None,
            input_prompt=f"Question {number}?",
            time_to_first_token=0.1 + number % 97 / 100 if ok else None,
            time_to_last_token=0.5 + number % 89 / 50 if ok else None,
            run_time=number / 100,
            scores=[Score("exact", float(passed), passed, None if passed else "not the same")] if ok else [],
        )

    write_journal(folder, map(record, range(count)))
    return folder


class PageData:
    """What a page holds, read without a browser."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.blocks = dict(re.findall(r'<script type="[^"]+" id="([^"]+)">(.*?)</script>', text, flags=re.S))
        self.overview: dict[str, Any] = json.loads(self.blocks["overview"])

    def columns(self, name: str) -> list[Any]:
        return [value for block in self._unpacked("columns") for value in block[name]]

    def bodies(self) -> list[dict[str, Any]]:
        return [one for number in range(len(self.overview["chunks"])) for one in self._unpacked(f"chunk-{number}")]

    def _unpacked(self, name: str) -> Any:
        return json.loads(zlib.decompress(base64.b64decode(self.blocks[name]), wbits=-15))


class Elements(HTMLParser):
    """Every tag of a document with its attributes, the text of its scripts and styles, and that of all the rest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.text = ""
        self._open: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.inside:
            self.inside[tag].append("")
            self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.inside[self._open][-1] += data
        else:
            self.text += data
