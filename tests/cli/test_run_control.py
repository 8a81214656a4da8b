"""Ctrl-C and SIGTERM, on the real program: what finished is kept, the rest resumable, nothing holds up the exit."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks import soak

from steelyard.cli.run_control import allow_calls, raise_limit
from steelyard.journal.checksum import sealed
from steelyard.shutdown import SAME_SIGNAL_SECONDS
from tests.support.cli import STEELYARD, Ended, Workshop, finish, start, wait_until

pytestmark = pytest.mark.slow

LIMIT = 5.5
"""Seconds from the signal to the end: five, and a little for a busy machine."""

# Cases c0..c2 are answered at once; the others hang in their own way until the file `calm` is there.
HANG = """
import asyncio, sys, time
from pathlib import Path

HERE = Path(__file__).parent

def note(case_id):
    with open(HERE / "calls.txt", "a") as calls:
        calls.write(case_id + "\\n")
    return case_id >= "c3" and not (HERE / "calm").exists()

async def waits(case):
    if note(case.id):
        await asyncio.sleep(60)
    return case.prompt.upper()

def sleeps(case):
    if note(case.id):
        time.sleep(60)
    return case.prompt.upper()

async def swallows(case):
    hangs = note(case.id)
    until = time.monotonic() + 60
    while hangs and time.monotonic() < until:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
    return case.prompt.upper()

async def blocks(case):
    if note(case.id):
        time.sleep(60)
    return case.prompt.upper()

async def delegates(case):
    if note(case.id):
        await asyncio.to_thread(time.sleep, 60)
    return case.prompt.upper()

if __name__ == "__main__":
    import json, signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    case = json.loads(sys.stdin.read())
    if note(case["id"]):
        (HERE / "child.pid").write_text(str(__import__("os").getpid()))
        time.sleep(60)
    print(case["prompt"].upper())
"""
KINDS = ["waits", "sleeps", "swallows", "blocks", "delegates", "program"]


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    shop = Workshop(tmp_path)
    shop.agent(HANG)
    return shop


def started(shop: Workshop, kind: str, *words: str) -> subprocess.Popen[str]:
    """A run that has three answers and hangs on the rest, two at a time where its loop lets it."""
    if kind == "program":
        shop.suite(target={"command": {"argv": [sys.executable, "agent.py"]}})
    else:
        shop.suite(target={"python": f"agent.py:{kind}"})
    process = start(shop.folder, "run", "suite.yaml", "--out", "RUN", "-j", "1" if kind == "blocks" else "2", *words)
    outputs, calls = shop.run / "outputs.jsonl", shop.folder / "calls.txt"
    hanging = 4 if kind == "blocks" else 5
    wait_until(lambda: calls.exists() and len(calls.read_text().split()) >= hanging)
    wait_until(lambda: outputs.exists() and outputs.read_bytes().count(b"\n") >= 3)
    if kind == "program":
        wait_until((shop.folder / "child.pid").exists)
    return process


def interrupt(process: subprocess.Popen[str], number: signal.Signals) -> tuple[Ended, float]:
    process.send_signal(number)
    began = time.monotonic()
    ended = finish(process)
    return ended, time.monotonic() - began


def wait_for_the_answer(process: subprocess.Popen[str]) -> None:
    """Wait until the first signal was answered, and until a second one counts as a second one."""
    assert process.stderr is not None
    while "to quit immediately" not in process.stderr.readline():
        pass
    time.sleep(SAME_SIGNAL_SECONDS)


def resume_command(ended: Ended) -> list[str]:
    (line,) = [line for line in ended.err.splitlines() if "resume with: " in line]
    return shlex.split(line.partition("resume with: ")[2])


def resume(shop: Workshop, ended: Ended) -> None:
    """Type the command that was printed, as it stands: it finishes, and nothing finished is asked again."""
    (shop.folder / "calm").touch()
    shop.asked()
    done = subprocess.run(resume_command(ended), cwd=shop.folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(shop.asked()) == ["c3", "c4", "c5"]
    assert shop.metrics()["counts"]["ok"] == 6
    assert not (shop.run / "partial.json").exists()


@pytest.mark.parametrize(
    ("kind", "number"),
    [*((kind, signal.SIGINT) for kind in KINDS), ("waits", signal.SIGTERM), ("blocks", signal.SIGTERM)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_signal_ends_the_run_in_time_with_counts_that_add_up_and_the_command_that_resumes(
    shop: Workshop, kind: str, number: signal.Signals
) -> None:
    ended, seconds = interrupt(started(shop, kind), number)
    assert ended.code == 128 + number, ended.err
    assert seconds < LIMIT
    assert "Traceback" not in ended.err
    assert "3 of 6 done, not complete" in ended.out
    assert number.name in ended.out
    partial = json.loads((shop.run / "partial.json").read_bytes())
    counts = partial["counts"]
    assert partial["complete"] is False
    assert partial["stopped"] == number.name
    assert counts["planned"] == 6 == counts["ok"] + counts["error"] + counts["cancelled"] + counts["not_started"]
    assert counts["ok"] == 3
    assert not (shop.run / "metrics.json").exists()
    resume(shop, ended)


def test_a_program_that_ignores_sigterm_is_ended_with_the_run(shop: Workshop) -> None:
    process = started(shop, "program")
    child = int((shop.folder / "child.pid").read_text())
    interrupt(process, signal.SIGINT)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_second_signal_ends_the_programs_too(shop: Workshop) -> None:
    process = started(shop, "program")
    child = int((shop.folder / "child.pid").read_text())
    process.send_signal(signal.SIGINT)
    wait_for_the_answer(process)
    interrupt(process, signal.SIGINT)
    try:
        wait_until(lambda: not is_alive(child), seconds=2)
    finally:
        if is_alive(child):
            os.kill(child, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_json_of_an_interrupted_run_is_whole(shop: Workshop) -> None:
    ended, _ = interrupt(started(shop, "waits", "--json"), signal.SIGINT)
    metrics = json.loads(ended.out)
    assert metrics["complete"] is False
    assert metrics["counts"]["ok"] == 3


@pytest.mark.parametrize("kind", ["swallows", "blocks"])
def test_a_second_signal_kills_at_once_and_loses_nothing_finished(shop: Workshop, kind: str) -> None:
    process = started(shop, kind)
    process.send_signal(signal.SIGINT)
    wait_for_the_answer(process)
    ended, seconds = interrupt(process, signal.SIGINT)
    assert ended.code == 130
    assert seconds < 1.0
    resume(shop, ended)


@pytest.mark.parametrize("seed", range(2))
def test_two_signals_close_together_end_the_run_once_and_hang_nothing(tmp_path: Path, seed: int) -> None:
    """A few pairs each, of every kind of run; `make soak` sends hundreds."""
    assert soak.signal_pairs(tmp_path, pairs=8, seed=seed) == []


def test_kills_while_scorers_run_cost_no_answer_that_was_being_scored(tmp_path: Path) -> None:
    """Four kills; `make soak` makes hundreds."""
    assert soak.kills_while_scoring(tmp_path, kills=4, seed=7) == []


@pytest.mark.slow
def test_kills_while_agents_work_or_are_graded_change_no_result(tmp_path: Path) -> None:
    """Twenty tasks and three kills; `make soak` has two hundred and ten."""
    assert soak.kills_of_agents(tmp_path, tasks=20, kills=3, seed=3) == []


HELD = """
import asyncio, re
from pathlib import Path

HERE = Path(__file__).parent

def note(case_id):
    with open(HERE / "calls.txt", "a") as calls:
        calls.write(case_id + "\\n")
    return case_id >= "c3" and not (HERE / "calm").exists()

def backtrack():
    re.match("(a|aa)+$", "a" * 60 + "b")  # holds the GIL for hours: no other thread runs, and no signal handler

def thread(case):
    if note(case.id):
        backtrack()
    return case.prompt.upper()

async def coroutine(case):
    if note(case.id):
        backtrack()
    return case.prompt.upper()

async def endless(case):
    while note(case.id):
        while True:
            pass
    return case.prompt.upper()

def answer(case):
    note(case.id)
    return case.prompt.upper()

def scorer(case, response):
    if case.id >= "c3" and not (HERE / "calm").exists():
        backtrack()
    return True
"""


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("thread", signal.SIGINT),
        ("coroutine", signal.SIGTERM),
        ("endless", signal.SIGINT),
        ("scorer", signal.SIGTERM),
    ],
)
def test_code_that_never_lets_go_cannot_keep_a_signal_from_ending_the_process(
    shop: Workshop, kind: str, number: signal.Signals
) -> None:
    shop.agent(HELD)
    scored = kind == "scorer"
    shop.suite(
        target={"python": f"agent.py:{'answer' if scored else kind}"},
        scorers=[{"python": "agent.py:scorer"}] if scored else ["exact"],
    )
    process = start(shop.folder, "run", "suite.yaml", "--out", "RUN", "-j", "1")
    calls = shop.folder / "calls.txt"
    wait_until(lambda: calls.exists() and "c3" in calls.read_text())
    ended, seconds = interrupt(process, number)
    assert ended.code in (128 + number, -signal.SIGKILL), ended.err
    assert seconds < LIMIT
    (shop.folder / "calm").touch()
    shop.asked()
    done = finish(start(shop.folder, "run", "suite.yaml", "--out", "RUN"))
    assert done.code == 0, done.err
    assert "c2" not in shop.asked()
    assert shop.metrics()["counts"]["ok"] == 6


def test_a_pool_of_forked_workers_can_be_ended_while_the_run_goes_on(shop: Workshop) -> None:
    """Their signals are theirs: the reaper does not take them for the runner's, and they end by SIGTERM."""
    shop.agent("""
        import multiprocessing
        def square(number):
            return number * number
        async def answer(case):
            pool = multiprocessing.get_context("fork").Pool(1)
            pool.map(square, [1])
            pool.terminate()
            pool.join()
            return case.prompt.upper()
    """)
    ended = finish(start(shop.folder, "run", "suite.yaml", "--out", "RUN", "-j", "1"), timeout=30)
    assert ended.code == 0, ended.err


def test_a_signal_while_a_retry_is_waited_for_ends_the_run(shop: Workshop) -> None:
    shop.agent("""
        from pathlib import Path
        def answer(case):
            (Path(__file__).parent / "calls.txt").write_text("asked")
            raise ConnectionError("again")
    """)
    process = start(shop.folder, "run", "suite.yaml", "--out", "RUN", "--retries", "1000")
    wait_until((shop.folder / "calls.txt").exists)
    ended, seconds = interrupt(process, signal.SIGINT)
    assert ended.code == 130
    assert seconds < LIMIT
    assert "0 of 6 done" in ended.out


ENDLESS = """
from itertools import count
from pathlib import Path
from steelyard import EvalCase, EvalSet, Runner

def cases():
    for number in count():
        if number == 5000:
            Path("reading").touch()
        yield EvalCase(id=f"c{number}", prompt="p")

runner = Runner(lambda case: "x", EvalSet(id="endless", cases=cases))
"""


def test_a_signal_while_the_suite_is_read_calls_nothing_and_says_how_to_go_on(shop: Workshop) -> None:
    shop.agent(ENDLESS)
    process = start(shop.folder, "run", "agent.py:runner", "--out", "RUN", "--force", "-n", "1000000000")
    wait_until((shop.folder / "reading").exists)
    ended, seconds = interrupt(process, signal.SIGINT)
    assert ended.code == 130, ended.err
    assert seconds < LIMIT
    assert ended.out == ""
    assert "Traceback" not in ended.err
    assert "--force" in resume_command(ended)
    assert not shop.run.exists()


def test_a_signal_while_a_large_journal_is_recovered_leaves_it_as_it_was(shop: Workshop) -> None:
    ids = range(150_000)
    with open(shop.folder / "cases.jsonl", "w") as cases:
        cases.writelines(f'{{"id": "c{number}", "prompt": "p"}}\n' for number in ids)
    text = "id: large\ntarget: {simulated: {latency: 0, tokens_per_second: 0}}\ncases: cases.jsonl\n"
    (shop.folder / "suite.yaml").write_text(text)
    words = ("run", "suite.yaml", "--out", "RUN", "--no-progress")
    assert finish(start(shop.folder, *words, "-n", "1")).code == 0
    line = (shop.run / "outputs.jsonl").read_bytes().rpartition(b',"crc32"')[0]
    with open(shop.run / "outputs.jsonl", "ab") as outputs:
        lines = (line.replace(b'"id":"c0"', b'"id":"c%d"' % number, 1) for number in ids[1:-1])
        outputs.writelines(sealed(one + b"}") for one in lines)
    for name in ("metrics.json", "outputs.idx", ".lock"):
        (shop.run / name).unlink()
    before = (shop.run / "outputs.jsonl").read_bytes()
    process = start(shop.folder, *words)
    wait_until((shop.run / ".lock").exists)
    ended, seconds = interrupt(process, signal.SIGINT)
    assert ended.code == 130, ended.err
    assert seconds < LIMIT
    assert (shop.run / "outputs.jsonl").read_bytes().startswith(before)
    done = subprocess.run(resume_command(ended), cwd=shop.folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "150,000 of 150,000 done" in done.stdout


SCRIPT = """
import sys
from agent import waits
from steelyard import EvalCase, EvalSet, Runner

suite = EvalSet(id="s", cases=[EvalCase(id=f"c{number}", prompt=f"c{number}") for number in range(6)])
runner = Runner(waits, suite, output_path="RUN", parallelism=2, progress="off")
try:
    result = runner.run_sync()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
print(result.metrics["counts"]["ok"])
"""


def test_ctrl_c_in_a_python_script_commits_and_raises_keyboard_interrupt(shop: Workshop) -> None:
    (shop.folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    process = subprocess.Popen(command, cwd=shop.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    outputs = shop.run / "outputs.jsonl"
    wait_until(lambda: outputs.exists() and outputs.read_bytes().count(b"\n") >= 3)
    ended, seconds = interrupt(process, signal.SIGINT)
    assert ended.code in (-signal.SIGINT, 130, 1)
    assert seconds < LIMIT
    assert ended.out == "interrupted\n"
    counts = json.loads((shop.run / "partial.json").read_bytes())["counts"]
    assert counts["ok"] == 3
    assert counts["planned"] == 6 == counts["ok"] + counts["cancelled"] + counts["not_started"]
    (shop.folder / "calm").touch()
    shop.asked()
    done = subprocess.run(command, cwd=shop.folder, capture_output=True, text=True, timeout=60)
    assert done.stdout == "6\n"
    assert sorted(shop.asked()) == ["c3", "c4", "c5"]


# Open files ----------------------------------------------------------------------------------------------------------


Limits = tuple[int, int]

AGENT = """
import resource

def answer(case):
    return str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


class System:
    """A system's limits, which can be changed like real ones and refuse what it is told to refuse."""

    def __init__(self, soft: int, hard: int, most: int | None = None) -> None:
        self.limits = (soft, hard)
        self.most = most

    def set(self, _kind: int, limits: Limits) -> None:
        if self.most is not None and limits[0] > self.most:
            raise ValueError("not allowed to raise maximum limit")
        self.limits = limits


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    system = System(1_024, 524_288)
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: system.limits)
    monkeypatch.setattr(resource, "setrlimit", system.set)
    return system


def test_the_soft_limit_is_raised_to_what_is_wanted_and_the_hard_one_stays(system: System) -> None:
    assert raise_limit(5_000) == 5_000
    assert system.limits == (5_000, 524_288)


def test_a_limit_that_is_high_enough_is_left_alone(system: System) -> None:
    assert raise_limit(200) == 1_024
    assert system.limits == (1_024, 524_288)


def test_no_more_is_asked_for_than_the_hard_limit(system: System, caplog: pytest.LogCaptureFixture) -> None:
    """So many calls fit: nothing is said."""
    system.limits = (256, 4_096)
    allow_calls(2_000)
    assert system.limits == (4_096, 4_096)
    assert not caplog.records


def test_too_low_a_hard_limit_is_told(system: System, caplog: pytest.LogCaptureFixture) -> None:
    system.limits = (256, 512)
    allow_calls(1_000)
    assert system.limits == (512, 512)
    assert "1,000 calls at once need about 1,064 open files, and this process may have 512" in caplog.text


def test_where_the_system_refuses_less_is_taken(system: System) -> None:
    """macOS names no hard limit and grants 10,240."""
    system.limits, system.most = (256, resource.RLIM_INFINITY), 10_240
    assert raise_limit(65_536) == 10_240
    assert system.limits == (10_240, resource.RLIM_INFINITY)


def test_what_cannot_be_raised_at_all_stays(system: System) -> None:
    system.limits, system.most = (256, resource.RLIM_INFINITY), 0
    assert raise_limit(65_536) == 256


def test_unlimited_is_enough(system: System) -> None:
    system.limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert raise_limit(65_536) is None


@pytest.mark.parametrize(
    ("words", "least"), [(["run", "suite.yaml", "-j", "300"], 300), (["sweep", "suite.yaml", "-j", "1,300"], 300)]
)
def test_a_command_makes_room_for_its_calls(tmp_path: Path, words: list[str], least: int) -> None:
    workshop = Workshop(tmp_path)
    workshop.agent(AGENT)
    workshop.suite("c0", scorers=[])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    subprocess.run(
        [STEELYARD, *words, "--out", "RUN", "--no-progress"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard)),
    )
    outputs = next(tmp_path.glob("RUN/**/outputs.jsonl"))
    assert f'"response_text":"{4 * least + 64}"' in outputs.read_text()
