"""Logs of inspect_ai: files that inspect 0.3.285 wrote (see toys/inspect_capitals.py), and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from steelyard import Record, Result
from steelyard.errors import ConfigurationError
from steelyard.integrations.inspect_log import InspectLog, _read_member
from steelyard.run.imports import import_log
from steelyard.scoring.trajectory import tool_calls
from tests.support.cli import run_cli

HERE = Path(__file__).parent
EVAL, JSON = HERE / "logs" / "inspect_capitals.eval", HERE / "logs" / "inspect_capitals.json"
PRINTED = {"match": 0.8, "includes": 0.8, "partly": 0.7, "words": 1.4, "shape.letters": 6.4, "shape.capital": 1.0}
"""What inspect printed for the .eval file."""


@pytest.fixture
def records(tmp_path: Path) -> dict[tuple[str, int], Record]:
    import_log(InspectLog(EVAL), tmp_path / "RUN")
    return {(one.id, one.trial): one for one in Result.load(tmp_path / "RUN").iter_responses()}


def test_records_give_the_figures_that_inspect_printed(tmp_path: Path) -> None:
    made = import_log(InspectLog(EVAL), tmp_path / "RUN")
    assert {check.score: check.theirs for check in made.checks} == pytest.approx(PRINTED)
    assert all(check.same for check in made.checks)
    metrics = Result.load(tmp_path / "RUN").typed_metrics
    assert metrics.pass_rate == pytest.approx(PRINTED["match"])
    for name in ("match", "includes", "partly"):
        assert metrics.scores[name].mean == pytest.approx(PRINTED[name])
    assert metrics.scores["words"].mean == pytest.approx(PRINTED["words"])
    assert (metrics.n, metrics.trials.trials) == (10, 2)


def test_trajectories_tokens_times_and_what_was_asked_are_there(records: dict[tuple[str, int], Record]) -> None:
    record = records["Norway", 1]
    (call,) = tool_calls(record.messages or [])
    assert (call.name, call.arguments) == ("look_up", {"country": "Norway"})
    assert [message["role"] for message in record.messages or []] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert (record.response_text, record.stop_reason, record.num_turns) == ("Oslo", "stop", 2)
    assert (record.num_tokens_input, record.num_tokens_output) == (24, 6)
    assert record.input_prompt == "Norway\n" + "What is its capital? " * 20, "also where inspect keeps long texts apart"
    assert (record.expected, record.metadata) == ("Oslo", {"letters": 4})
    assert record.request_time is not None
    assert 0 < record.time_to_last_token <= record.elapsed
    assert record.run_time > 0
    assert record.scores["partly"].reason == "exact, within, or not"
    assert record.scores["tone"].label == "short"
    assert records["Japan", 0].scores["partly"].value == 0.5


def test_a_json_log_is_read_alike(tmp_path: Path) -> None:
    made = import_log(InspectLog(JSON), tmp_path / "RUN")
    assert made.about.tool_version == "0.3.285"
    assert all(check.same for check in made.checks)
    assert len(made.checks) == 6
    assert [one.id for one in Result.load(tmp_path / "RUN").iter_responses()] == ["France", "Norway"]


def log_of(tmp_path: Path, *samples: dict[str, Any], **header: Any) -> Path:
    about = {"task": "toy", "model": "m", "packages": {"inspect_ai": "0.3"}}
    path = tmp_path / "log.json"
    path.write_text(json.dumps({"version": 2, "status": "success", "eval": about, "samples": samples, **header}))
    return path


def only(path: Path) -> Any:
    (sample,) = InspectLog(path).samples()
    return sample


def test_errors_limits_retries_and_missing_scores(tmp_path: Path) -> None:
    error = {"message": "httpx.ReadTimeout('slow')", "traceback": "x" * 9_000}
    retried = [{"message": "odd", "traceback": ""}]
    failed = {"id": 1, "error": error, "error_retries": retried, "started_at": "2026-01-01T00:00:00+00:00"}
    sample = only(log_of(tmp_path, failed))
    assert (sample.response.error, sample.response.error_type) == ("httpx.ReadTimeout('slow')", "ReadTimeout")
    assert len(sample.response.error_traceback) == 8_000
    assert (sample.attempts, sample.failures[0].error_type, sample.case.id) == (2, "SampleError", "1")
    limited = {
        "id": "a",
        "limit": {"type": "token"},
        "scores": {"x": {"value": float("nan")}, "j": {"value": "C", "metadata": {"grading": []}}},
    }
    sample = only(log_of(tmp_path, limited))
    assert sample.response.stop_reason == "token_limit"
    assert (sample.scores["x"].value, sample.scores["j"].by) == (None, "inspect/j")


@pytest.mark.parametrize(("total", "tokens"), [(130, 100), (180, 150)])
def test_cached_tokens_are_counted_once_whichever_way_the_provider_counts(
    tmp_path: Path, total: int, tokens: int
) -> None:
    usage = {"input_tokens": 100, "output_tokens": 30, "total_tokens": total, "input_tokens_cache_read": 50}
    other = {"input_tokens": 7, "output_tokens": 7, "total_tokens": 14}
    response = only(log_of(tmp_path, {"id": 1, "model_usage": {"m": usage, "grader": other}})).response
    assert (response.num_tokens_input, response.num_tokens_input_cached, response.num_tokens_output) == (tokens, 50, 30)


def test_messages_and_several_targets_are_a_case(tmp_path: Path) -> None:
    asked = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "attachment://k"}]},
    ]
    sample = only(
        log_of(
            tmp_path, {"id": 1, "input": asked, "target": ["a", "b"], "choices": ["x"], "attachments": {"k": "Hello?"}}
        )
    )
    assert sample.case.prompt is None
    assert sample.case.messages[1] == {"role": "user", "content": [{"type": "text", "text": "Hello?"}]}
    assert (sample.case.expected, sample.case.metadata) == (["a", "b"], {"choices": ["x"]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not as inspect writes it"),
        (b'{"version": 2}', "missing required field `eval`"),
        (b'{"version": 3, "eval": {"task": "t", "model": "m"}}', "version 3, known are 1 and 2"),
        (b"PK\x03\x04 and no end", "is cut off"),
        (
            b'{"version": 2, "eval": {"task": "t", "model": "m"}, "samples": [{"epoch": 1}]}',
            "missing required field `id`",
        ),
    ],
)
def test_what_is_no_log_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "log.eval").write_bytes(content)
    ended = run_cli(tmp_path, "import", "log.eval", "-o", "RUN")
    assert ended.code == 2
    assert "log.eval" in ended.err
    assert message in ended.err
    assert not (tmp_path / "RUN").exists()


def test_a_damaged_member_a_foreign_zip_and_an_unfinished_log(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.eval", "w") as archive:
        archive.writestr("a.txt", "hello")
    with pytest.raises(ConfigurationError, match=r"other\.eval is no inspect log: it has no header\.json"):
        InspectLog(tmp_path / "other.eval")
    with zipfile.ZipFile(EVAL) as archive, zipfile.ZipFile(tmp_path / "begun.eval", "w") as begun:
        for name in ("_journal/start.json", "samples/France_epoch_1.json"):
            begun.writestr(name, _read_member(archive, name, EVAL))
    log = InspectLog(tmp_path / "begun.eval")
    assert log.about.unfinished
    assert [one.case.id for one in log.samples()] == ["France"]
    data = bytearray(EVAL.read_bytes())
    with zipfile.ZipFile(EVAL) as archive:
        place = archive.getinfo("header.json")
    middle = place.header_offset + 200
    data[middle : middle + 40] = bytes(40)
    (tmp_path / "bad.eval").write_bytes(data)
    with pytest.raises(ConfigurationError, match=r"bad\.eval: header\.json"):
        InspectLog(tmp_path / "bad.eval")


def test_without_zstd_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zstandard", "compression"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=r"pip install 'steelyard\[inspect\]', or make a JSON log of it"):
        InspectLog(EVAL)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_log_made_just_now_gives_the_figures_that_inspect_prints(tmp_path: Path) -> None:
    """With a Python that has inspect_ai: this one, or the one that INSPECT_PYTHON names."""
    python = os.environ.get("INSPECT_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import inspect_ai"], capture_output=True, check=False).returncode:
        pytest.skip("inspect_ai is not installed; INSPECT_PYTHON may name a Python that has it")
    script = shutil.copy(HERE / "toys" / "inspect_capitals.py", tmp_path)
    for form, more in (("eval", ["error"]), ("json", [])):
        ended = subprocess.run(
            [python, script, form, "logs", *more], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        printed = json.loads(ended.stdout.splitlines()[-1])
        made = import_log(InspectLog(Path(printed["log"])), tmp_path / form)
        assert {check.score: check.ours for check in made.checks} == pytest.approx(printed["figures"])
    assert Result.load(tmp_path / "eval").typed_metrics.errors == {"ValueError": 1}
