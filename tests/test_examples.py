"""The examples of the repository run as their files say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard import Result

EXAMPLES = Path(__file__).parent.parent / "examples"


def steelyard(*arguments: str, cwd: Path, work: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "steelyard", *arguments]
    environment = {**os.environ, "STEELYARD_WORK": str(work)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=110)


@pytest.fixture
def coding(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLES / "coding", tmp_path / "coding"))


def test_the_suite_of_coding_tasks_is_short_and_needs_no_python() -> None:
    lines = (EXAMPLES / "coding/suite.yaml").read_text().splitlines()
    assert len(lines) <= 25
    assert not any("python:" in line for line in lines)


@pytest.mark.slow
def test_twenty_coding_tasks_are_graded_whatever_their_agent_does(coding: Path, tmp_path: Path) -> None:
    done = steelyard("run", "suite.yaml", "--out", "run", "--max-error-rate", "0.1", cwd=coding, work=tmp_path / "work")
    assert done.returncode == 0, done.stderr
    records = {record.id: record for record in Result.load(coding / "run").iter_responses()}
    assert len(records) == 20
    passed = {name for name, record in records.items() if record.passed}
    assert passed == set(records) - {
        "median-even",  # fixed in the wrong place
        "dedupe-order",  # not known to it
        "roman",
        "crashes",
        "edits-tests",
        "adds-conftest",
    }
    crashed = records["crashes"]
    assert "out of ideas" in (crashed.error or "")
    assert records["hangs-after-fixing"].stop_reason == "time_limit"
    assert "the agent added conftest.py" in (records["adds-conftest"].scores["tests"].reason or "")
    assert records["add-signs"].num_turns == 2
    assert records["add-signs"].cost == pytest.approx(0.004)
    patch = coding / "run/artifacts/add-signs/0/workspace.patch"
    assert "+    return a + b" in patch.read_text()
    assert "I read task.py" in (coding / "run/logs/add-signs/0.out").read_text()
    assert not _left_behind(coding)
    assert not [path for path in (tmp_path / "work").rglob("task.py") if "templates" not in path.parts]


def _left_behind(place: Path) -> list[str]:
    """Programs of the agent that are still there: those whose command line names its script, and its daemon."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(place) in line or (line.startswith("sleep 600") and os.fsencode(place.parent) in environment):
            found.append(line)
    return found


@pytest.mark.slow
def test_the_coding_tasks_are_sound(coding: Path, tmp_path: Path) -> None:
    chosen = ("-k", "a*")
    done = steelyard("check", "suite.yaml", *chosen, cwd=coding, work=tmp_path / "work")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 tasks sound" in done.stdout


STAND_INS = {
    "claude": """
import json, sys
from pathlib import Path

def say(**event):
    print(json.dumps({"session_id": "8f1c", "uuid": "u", **event}), flush=True)

def assistant(number, content):
    usage = {"input_tokens": 4, "cache_creation_input_tokens": 10, "cache_read_input_tokens": 100, "output_tokens": 20}
    message = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": "claude-sonnet-4-5",
               "content": [content], "stop_reason": None, "usage": usage}
    say(type="assistant", message=message, parent_tool_use_id=None)

say(type="system", subtype="init", cwd=".", tools=["Read", "Edit"], model="claude-sonnet-4-5", permissionMode="default",
    apiKeySource="ANTHROPIC_API_KEY", mcp_servers=[], slash_commands=[], output_style="default")
change = {"file_path": "task.py", "old_string": "a - b", "new_string": "a + b"}
assistant(1, {"type": "text", "text": "I fix the sign."})
assistant(1, {"type": "tool_use", "id": "toolu_1", "name": "Edit", "input": change})
task = Path("task.py")
task.write_text(task.read_text().replace("a - b", "a + b"))
told = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "The file task.py has been updated."}
say(type="user", message={"role": "user", "content": [told]}, parent_tool_use_id=None)
assistant(2, {"type": "text", "text": "Done."})
usage = {"input_tokens": 8, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 200, "output_tokens": 40}
say(type="result", subtype="success", is_error=False, duration_ms=1200, duration_api_ms=1000, num_turns=2,
    result="Done.", stop_reason="end_turn", total_cost_usd=0.0123, usage=usage, permission_denials=[])
""",
    "codex": """
import json, sys
from pathlib import Path

def say(**event):
    print(json.dumps(event), flush=True)

print("Reading prompt from argument", file=sys.stderr)
say(type="thread.started", thread_id="0199a213-81c0-7800-8aa1-bbab2a035a53")
say(type="turn.started")
say(type="item.completed", item={"id": "item_0", "type": "reasoning", "text": "**Reading the code**"})
command = {"id": "item_1", "type": "command_execution", "command": "bash -lc 'cat task.py'"}
say(type="item.started", item={**command, "aggregated_output": "", "exit_code": None, "status": "in_progress"})
task = Path("task.py")
command |= {"aggregated_output": task.read_text(), "exit_code": 0, "status": "completed"}
say(type="item.completed", item=command)
task.write_text(task.read_text().replace("a - b", "a + b"))
changes = [{"path": str(task.absolute()), "kind": "update"}]
say(type="item.completed", item={"id": "item_2", "type": "file_change", "changes": changes, "status": "completed"})
say(type="item.completed", item={"id": "item_3", "type": "agent_message", "text": "Done."})
usage = {"input_tokens": 228, "cached_input_tokens": 200, "output_tokens": 40, "reasoning_output_tokens": 0}
say(type="turn.completed", usage=usage)
""",
}


@pytest.mark.parametrize(
    ("suite", "program", "key", "turns", "tools"),
    [
        ("claude-code", "claude", "ANTHROPIC_API_KEY", 2, ["Edit"]),
        ("codex", "codex", "CODEX_API_KEY", 3, ["shell", "apply_patch"]),
    ],
)
def test_the_suites_of_known_agents_read_what_these_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suite: str, program: str, key: str, turns: int, tools: list[str]
) -> None:
    """With stand-ins for the programs, which print the shapes that the programs' documentation shows."""
    programs = tmp_path / "bin"
    programs.mkdir()
    guard = (
        "import os, sys\n"
        "if sys.argv[1:] == ['--version']:\n    sys.exit(print('1.2.3 (stand-in)'))\n"
        f"assert os.environ['{key}'] == 'sk-of-the-test'\n"
        "assert '`add` in task.py returns wrong sums. Fix the bug in task.py.' in sys.argv\n"
    )
    (programs / program).write_text(f"#!{sys.executable}\n{guard}{STAND_INS[program]}")
    (programs / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(key, "sk-of-the-test")
    for folder in ("coding", "agents"):
        shutil.copytree(EXAMPLES / folder, tmp_path / folder)
    place = tmp_path / "agents"
    done = steelyard("run", f"{suite}.yaml", "-k", "add-signs", "--out", "run", cwd=place, work=tmp_path / "work")
    assert done.returncode == 0, done.stderr
    (record,) = Result.load(place / "run").iter_responses()
    assert record.passed
    assert record.response_text == "Done."
    assert record.num_turns == turns
    assert (record.num_tokens_input, record.num_tokens_output) == (228, 40)
    assert record.num_tokens_input_cached == 200
    assert record.cost == (0.0123 if program == "claude" else None)
    calls = [call for message in record.messages or () for call in message.get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls] == tools
    assert "1.2.3 (stand-in)" in (place / "run/run.json").read_text()
    assert not any(b"sk-of-the-test" in path.read_bytes() for path in (place / "run").rglob("*") if path.is_file())


def test_slices_measurements_and_run_metrics_of_tickets(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLES / "slices", tmp_path / "slices"))
    done = steelyard("run", "suite.yaml", "--out", "run", "--no-progress", cwd=folder, work=tmp_path / "work")
    assert done.returncode == 0, done.stderr
    metrics = Result.load(folder / "run").typed_metrics
    assert {one.value for one in metrics.slices} == {"accounts", "billing", "bugs", "easy", "hard"}
    assert metrics.run_metrics["hardest"].value == metrics.slices[-1].pass_rate
    assert metrics.scores["words"].unit == "words"
