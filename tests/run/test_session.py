"""The initial session: a copy for every case, its messages first, part of who is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard import ConfigurationError, EvalCase, EvalSet, InvocationContext, RunMismatch, Runner
from steelyard.targets import CallableTarget

SUITE = EvalSet("s", [EvalCase(id=f"c{number}", prompt=f"question {number}") for number in range(4)])


def session_file(folder: Path, content: object) -> Path:
    path = folder / "session.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_each_case_gets_a_copy_of_its_own(tmp_path: Path) -> None:
    seen = []

    async def answer(case: EvalCase, context: InvocationContext) -> str:
        assert context.session is not None
        seen.append(json.dumps(context.session.data))
        context.session.data["list"].append(case.id)
        return "ok"

    path = session_file(tmp_path, {"data": {"list": []}})
    result = Runner(answer, SUITE, parallelism=4, progress="off", initial_session_file=path).run_sync()
    assert result.metrics["counts"]["ok"] == 4
    assert seen == ['{"list": []}'] * 4


def test_its_messages_come_before_the_cases_own(tmp_path: Path) -> None:
    async def answer(case: EvalCase) -> str:
        return json.dumps([message["content"] for message in case.messages or []] + [case.prompt])

    suite = EvalSet("s", [EvalCase(id="a", prompt="last", messages=[{"role": "user", "content": "own"}])])
    path = session_file(tmp_path, {"messages": [{"role": "system", "content": "first"}]})
    result = Runner(answer, suite, progress="off", initial_session_file=path).run_sync()
    assert json.loads(result.responses[0].response_text or "") == ["first", "own", "last"]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"data": []}', '{"messages": {}}', '{"messages": ["x"]}', '{"extra": 1}', None]
)
def test_a_file_that_is_missing_or_malformed_is_refused_before_any_call(tmp_path: Path, content: str | None) -> None:
    calls = []

    def answer(case: EvalCase) -> str:
        calls.append(case.id)
        return "ok"

    path = tmp_path / "none.json" if content is None else session_file(tmp_path, content)
    runner = Runner(answer, SUITE, progress="off", output_path=tmp_path / "run", initial_session_file=path)
    with pytest.raises(ConfigurationError, match="session"):
        runner.run_sync()
    assert not calls
    assert not (tmp_path / "run").exists()


def test_another_session_is_another_run_and_another_cache_entry(tmp_path: Path) -> None:
    calls = []

    async def answer(case: EvalCase) -> str:
        calls.append(case.id)
        return "ok"

    target = CallableTarget(answer, model_id="m")
    first, second = session_file(tmp_path, {"data": {"user": 1}}), tmp_path / "other.json"
    second.write_text('{"data": {"user": 2}}')
    runner = Runner(target, SUITE, progress="off", cache=tmp_path / "cache", output_path=tmp_path / "run", limit=2)
    runner.run_sync(initial_session_file=first)
    with pytest.raises(RunMismatch, match="initial_session"):
        runner.run_sync(initial_session_file=second, retry_errors=True)
    runner.run_sync(initial_session_file=second, output_path=tmp_path / "run2")
    runner.run_sync(initial_session_file=first, output_path=tmp_path / "run3")
    assert calls == ["c0", "c1"] * 2
