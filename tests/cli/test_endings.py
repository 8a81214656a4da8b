"""Endings that something could hold up: readers that do not read, threads that hang, streams that are closed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from steelyard.journal.lock import is_locked
from tests.support.cli import STEELYARD, Ended, Workshop, finish, start, wait_until

pytestmark = pytest.mark.slow

AGENT = """
import asyncio, multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
pool = None

def answered(case):
    with open(HERE / "calls.txt", "a") as calls:
        calls.write(case.id + "\\n")
    return case.prompt.upper()

async def shouts(case):
    text = answered(case)
    print("x" * 200_000, flush=True)
    return text

async def waits(case):
    text = answered(case)
    await asyncio.sleep(60)
    return text

async def delegates(case):
    answered(case)
    await asyncio.to_thread(time.sleep, 60)

def crunch(prompt):
    (HERE / f"worker-{os.getpid()}").touch()
    time.sleep(0.05)
    return prompt.upper()

async def forks(case):
    global pool
    pool = pool or ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))
    text = await asyncio.get_running_loop().run_in_executor(pool, crunch, case.prompt)
    with open(HERE / "calls.txt", "a") as calls:
        calls.write(case.id + "\\n")
    if case.id >= "c3" and not (HERE / "calm").exists():
        await asyncio.sleep(60)
    return text
"""


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    shop = Workshop(tmp_path)
    shop.agent(AGENT)
    return shop


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe that is full, and whose reader does not read."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


def run_into(shop: Workshop, kind: str, *, out: int, err: int) -> subprocess.Popen[bytes]:
    """A run that has asked its first case, with its output going to these descriptors."""
    shop.suite(target={"python": f"agent.py:{kind}"})
    command = [STEELYARD, "run", "suite.yaml", "--out", "RUN", "--no-progress"]
    process = subprocess.Popen(command, cwd=shop.folder, stdout=out, stderr=err)
    wait_until((shop.folder / "calls.txt").exists)
    return process


def killed_unless_ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code, or None for a process that had to be killed."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


@pytest.mark.parametrize("kind", ["shouts", "waits"])
def test_a_pipe_that_nobody_reads_does_not_hold_up_ctrl_c(shop: Workshop, unread: int, kind: str) -> None:
    process = run_into(shop, kind, out=unread, err=unread)
    process.send_signal(signal.SIGINT)
    assert killed_unless_ended(process, 5.5) == 130
    assert is_locked(shop.run) is None


def test_what_can_still_be_read_is_told_when_stdout_is_stuck(shop: Workshop, unread: int) -> None:
    with open(shop.folder / "said.txt", "wb") as said:
        process = run_into(shop, "shouts", out=unread, err=said.fileno())
        process.send_signal(signal.SIGTERM)
        assert killed_unless_ended(process, 5.5) == 143
    assert "resume with: " in (shop.folder / "said.txt").read_text()


def test_a_second_signal_ends_at_once_a_process_whose_streams_are_stuck(shop: Workshop, unread: int) -> None:
    process = run_into(shop, "shouts", out=unread, err=unread)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # there is no stream left on which it could say that it has heard
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert killed_unless_ended(process, 1.0) == 130


def test_ctrl_c_ends_a_process_that_cannot_write_its_result(shop: Workshop, unread: int) -> None:
    shop.agent("def answer(case):\n    return case.prompt.upper()\n")
    shop.suite()
    command = [STEELYARD, "run", "suite.yaml", "--out", "RUN", "--no-progress"]
    process = subprocess.Popen(command, cwd=shop.folder, stdout=unread, stderr=subprocess.DEVNULL)
    wait_until((shop.run / "metrics.json").exists)
    time.sleep(0.3)  # from the metrics to the moment when it is stuck
    process.send_signal(signal.SIGINT)
    assert killed_unless_ended(process, 2.0) == 130
    assert shop.metrics()["complete"]


def test_a_terminal_that_hangs_up_ends_the_run_and_the_programs_it_started(shop: Workshop) -> None:
    (shop.folder / "program.py").write_text(
        "import os, signal, time\nfrom pathlib import Path\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "Path('draft').write_text(str(os.getpid()))\nos.rename('draft', 'child.pid')\ntime.sleep(60)\n"
    )
    shop.suite(target={"command": {"argv": [sys.executable, "program.py"]}})
    process = start(shop.folder, "run", "suite.yaml", "--out", "RUN", "-j", "1")
    wait_until((shop.folder / "child.pid").exists)
    child = int((shop.folder / "child.pid").read_text())
    process.send_signal(signal.SIGHUP)
    ended = finish(process)
    assert ended.code == 129, ended.err
    assert "resume with: " in ended.err
    assert json.loads((shop.run / "partial.json").read_bytes())["stopped"] == "SIGHUP"
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_run_under_nohup_does_not_mind_the_terminal_going(shop: Workshop) -> None:
    shop.suite(target={"python": "agent.py:waits"})
    ignoring = f"trap '' HUP; exec {STEELYARD} run suite.yaml --out RUN"
    process = subprocess.Popen(["sh", "-c", ignoring], cwd=shop.folder, stderr=subprocess.PIPE, text=True)
    wait_until((shop.folder / "calls.txt").exists)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    ended = Ended(code=0, out="", err=process.communicate(timeout=30)[1])
    assert process.returncode == 130
    assert "Interrupted: cancelling calls in flight" in ended.err
    assert "SIGHUP" not in ended.err


def test_a_thread_pool_that_hangs_does_not_hold_up_the_exit_of_a_finished_run(shop: Workshop) -> None:
    shop.suite("c0 c1", target={"python": "agent.py:delegates"}, run={"timeout": 0.2, "retries": 0})
    began = time.monotonic()
    process = start(shop.folder, "run", "suite.yaml", "--out", "RUN", "--no-progress")
    try:
        ended = finish(process, timeout=20)
    finally:
        process.kill()
    assert ended.code == 4, ended.err
    assert "2 of 2 done" in ended.out
    assert time.monotonic() - began < 15
    assert "still run" in ended.err


def test_an_ordinary_exit_is_left_to_python(shop: Workshop) -> None:
    """What the suite's own modules want to do at exit, to send their last traces for one, is done."""
    shop.agent(
        "import atexit\nfrom pathlib import Path\natexit.register(Path('traces-sent').touch)\n"
        "def answer(case):\n    return case.prompt.upper()\n"
    )
    shop.suite()
    assert finish(start(shop.folder, "run", "suite.yaml", "--out", "RUN")).code == 0
    assert (shop.folder / "traces-sent").exists()


@pytest.mark.parametrize("closed", [">&- 2>&-", "<&- >&- 2>&-", ">&-", "2>&-"])
def test_closed_streams_do_not_keep_a_run_from_its_end(shop: Workshop, closed: str) -> None:
    shop.agent("def answer(case):\n    return case.prompt.upper()\n")
    shop.suite()
    process = subprocess.run(["sh", "-c", f"{STEELYARD} run suite.yaml --out RUN {closed}"], cwd=shop.folder)
    assert process.returncode == 0
    assert shop.metrics()["counts"]["ok"] == 6
    assert len(shop.lines()) == 6


def worker_pids(shop: Workshop) -> list[int]:
    return [int(place.name.partition("-")[2]) for place in shop.folder.glob("worker-*")]


def end(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_a_killed_run_is_free_though_processes_that_it_forked_live_on(shop: Workshop) -> None:
    shop.suite(target={"python": "agent.py:forks"})
    process = start(shop.folder, "run", "suite.yaml", "--out", "RUN", "-j", "2", "--no-progress")
    calls = shop.folder / "calls.txt"
    wait_until(lambda: calls.exists() and len(calls.read_text().split()) >= 5)
    try:
        assert is_locked(shop.run) is not None
        process.kill()
        process.wait()
        for pid in worker_pids(shop):
            os.kill(pid, 0)
        assert is_locked(shop.run) is None
        (shop.folder / "calm").touch()
        shop.asked()
        ended = finish(start(shop.folder, "run", "suite.yaml", "--out", "RUN", "--no-progress"))
        assert ended.code == 0, ended.err
        assert sorted(shop.asked()) == ["c3", "c4", "c5"]
    finally:
        end(worker_pids(shop))
        process.communicate()


def test_a_signal_ends_the_worker_processes_of_a_pool_too(shop: Workshop) -> None:
    shop.suite(target={"python": "agent.py:forks"})
    process = start(shop.folder, "run", "suite.yaml", "--out", "RUN", "-j", "2", "--no-progress")
    calls = shop.folder / "calls.txt"
    wait_until(lambda: calls.exists() and len(calls.read_text().split()) >= 5)
    process.send_signal(signal.SIGTERM)
    try:
        assert finish(process).code == 143
        wait_until(lambda: not any(is_running(pid) for pid in worker_pids(shop)), seconds=3)
    finally:
        end(worker_pids(shop))


def is_running(pid: int) -> bool:
    """Whether a process lives; one that only waits to be buried by whoever adopted it does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


RAISES = """
from steelyard import EvalCase, EvalSet, Runner

async def closes(case):
    if case.id == "c3":
        raise GeneratorExit
    return case.prompt.upper()

async def interrupts(case):
    if case.id == "c3":
        raise KeyboardInterrupt
    return case.prompt.upper()

async def answers(case):
    return case.prompt.upper()

async def scorer(case, response):
    if case.id == "c3":
        raise KeyboardInterrupt
    return True

def cases():
    yield EvalCase(id="c0", prompt="p")
    raise OSError("the table is gone")

lazy = Runner(answers, EvalSet("lazy", cases))
once = Runner(answers, EvalSet("once", cases()))
"""


def test_a_target_that_raises_generator_exit_is_one_bad_case(shop: Workshop) -> None:
    shop.agent(RAISES)
    shop.suite(target={"python": "agent.py:closes"})
    ended = finish(start(shop.folder, "run", "suite.yaml", "--out", "RUN", "-j", "1", "--max-error-rate", "0.5"))
    assert ended.code == 0, ended.err
    assert shop.metrics()["counts"]["ok"] == 5
    assert shop.metrics()["errors"] == {"GeneratorExit": 1}


@pytest.mark.parametrize(
    ("target", "scorers"), [("interrupts", ["exact"]), ("answers", [{"python": "agent.py:scorer"}])]
)
def test_keyboard_interrupt_from_the_suites_code_ends_the_run_as_ctrl_c_does(
    shop: Workshop, target: str, scorers: list[object]
) -> None:
    shop.agent(RAISES)
    shop.suite(target={"python": f"agent.py:{target}"}, scorers=scorers)
    ended = finish(start(shop.folder, "run", "suite.yaml", "--out", "RUN", "-j", "1"))
    assert ended.code == 130, ended.err
    assert "Traceback" not in ended.err
    assert "KeyboardInterrupt, raised by the target or a scorer of case c3" in ended.err
    assert "resume with: " in ended.err
    partial = json.loads((shop.run / "partial.json").read_bytes())
    assert partial["counts"] == {"planned": 6, "ok": 3, "error": 0, "cancelled": 1, "not_started": 2}
    assert "KeyboardInterrupt" in partial["stopped"]


@pytest.mark.parametrize("name", ["lazy", "once"])
def test_a_generator_of_cases_that_raises_is_a_problem_of_the_suite(shop: Workshop, name: str) -> None:
    shop.agent(RAISES)
    ended = finish(start(shop.folder, "run", f"agent.py:{name}", "--out", "RUN"))
    assert ended.code == 2, ended.err
    assert (
        "the code that makes the cases failed after 1 of them: OSError: the table is gone (agent.py, line" in ended.err
    )
    assert "Traceback" not in ended.err


def test_a_signal_that_meets_a_run_as_it_completes_stops_nothing(shop: Workshop) -> None:
    shop.agent("""
        import os, signal, time
        async def answer(case):
            if case.id == "c5":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.3)  # the main thread takes the signal; this answer is finished without an await
            return case.prompt.upper()
    """)
    ended = finish(start(shop.folder, "run", "suite.yaml", "--out", "RUN", "-j", "1"))
    assert ended.code == 0, ended.err
    assert shop.metrics()["complete"] is True
    assert shop.metrics()["stopped"] is None
    assert "resume with" not in ended.err


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the reaper needs /proc")
def test_the_next_launch_ends_what_a_killed_run_and_a_killed_reaper_left(shop: Workshop) -> None:
    (shop.folder / "program.py").write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "sys.stdin.read()\n"
        "calm = Path('calm').exists()\n"
        "for place in Path().glob('pid-*') if calm else ():\n"
        "    stat = Path('/proc', place.name[4:], 'stat')\n"
        "    if stat.exists() and stat.read_text().rpartition(')')[2].split()[0] != 'Z':\n"
        "        Path('met-' + place.name).touch()\n"
        "if not calm:\n"
        "    Path(f'pid-{os.getpid()}').touch()\n"
        "    time.sleep(60)\n"
        "print('x')\n"
    )
    shop.suite("c0 c1", target={"command": {"argv": [sys.executable, "program.py"]}}, scorers=[])
    words = ("run", "suite.yaml", "--out", "RUN", "-j", "2", "--no-progress")
    process = start(shop.folder, *words)
    wait_until(lambda: len(list(shop.folder.glob("pid-*"))) == 2)
    (reaper,) = [child for child in psutil.Process(process.pid).children() if "reaper.py" in " ".join(child.cmdline())]
    reaper.kill()
    process.kill()
    process.communicate()
    left = [int(path.name.removeprefix("pid-")) for path in shop.folder.glob("pid-*")]
    try:
        assert all(map(is_running, left))
        (shop.folder / "calm").touch()
        ended = finish(start(shop.folder, *words))
        assert ended.code == 0, ended.err
        assert "ended 2 programs of an earlier launch" in ended.err
        assert not any(map(is_running, left))
        assert not list(shop.folder.glob("met-*"))
        assert not (shop.run / "processes.jsonl").exists()
    finally:
        end(left)


def test_leaving_ends_the_programs_that_still_run(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(
        "import asyncio, os, sys\n"
        "from steelyard import EvalCase, InvocationContext\n"
        "from steelyard.cli.run_control import exit_now\n"
        "from steelyard.targets import Command\n"
        "async def main():\n"
        "    program = 'import os, pathlib, time; pathlib.Path(\"pid\").write_text(str(os.getpid())); time.sleep(60)'\n"
        "    target = Command([sys.executable, '-c', program])\n"
        "    call = asyncio.create_task(target.invoke(EvalCase(id='a', prompt='?'), InvocationContext('a')))\n"
        "    while not (os.path.exists('pid') and open('pid').read()):\n"
        "        await asyncio.sleep(0.01)\n"
        "    exit_now(7)\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, timeout=60, check=False)
    assert ended.returncode == 7
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


BACKTRACKING = """
def answer(case):
    with open(__file__.replace("agent.py", "calls.txt"), "a") as calls:
        calls.write(case.id + "\\n")
    return "a" * 60 + "b"
"""


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM])
def test_a_run_whose_pattern_backtracks_on_every_answer_can_be_stopped(shop: Workshop, signal_: signal.Signals) -> None:
    shop.agent(BACKTRACKING)
    shop.suite(" ".join(f"c{n}" for n in range(60)), scorers=[{"regex": {"pattern": "(a|aa)+$"}}])
    command = [STEELYARD, "run", "suite.yaml", "--out", "RUN", "--no-progress"]
    process = subprocess.Popen(command, cwd=shop.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until((shop.folder / "calls.txt").exists)
    process.send_signal(signal_)
    assert killed_unless_ended(process, 5.5) == 128 + signal_
    assert (shop.run / "partial.json").exists()


def test_a_pattern_that_backtracks_is_a_scoring_error_and_the_run_goes_on(shop: Workshop) -> None:
    shop.agent(BACKTRACKING)
    shop.suite("c0 c1", scorers=["number", {"regex": {"pattern": "(a|aa)+$"}}])
    ended = finish(start(shop.folder, "run", "suite.yaml", "--out", "RUN", "--no-progress"))
    assert "2 of 2 done" in ended.out, ended.err
    assert shop.metrics()["scoring_errors"] == 2
    assert "the pattern '(a|aa)+$' ran for more than 1 s" in (shop.run / "outputs.jsonl").read_text()
