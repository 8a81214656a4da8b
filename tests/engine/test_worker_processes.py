"""Worker processes: how they start, what they find, and what becomes of a run when one of them, or the driver, dies."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from steelyard import EvalCase, EvalSet, ProcessEngine, Result, Runner, Workspace
from steelyard.engine import worker_processes
from steelyard.engine.base import CancellationToken
from steelyard.engine.worker_processes import ProcessPool, auto_workers
from steelyard.engine.workers import driver, messages
from steelyard.errors import ConfigurationError, RunCancelled
from steelyard.journal.reader import iter_records
from steelyard.protocols import InvocationContext
from steelyard.records import Record
from steelyard.targets import OpenAIChat
from tests.support.board import Board
from tests.support.cli import finish, run_cli, start
from tests.support.engine import make_jobs, make_suite, wait_for
from tests.support.mock import mock_process
from tests.support.ray_targets import AskedOfAll, Asking, Deadly, DiesBeforeJudging, Watched, called_when_journalled

SLEEPER = "import time; time.sleep(600)"


@pytest.fixture
def board(tmp_path) -> Board:
    (tmp_path / "board").mkdir()
    return Board(tmp_path / "board")


@pytest.fixture
def engine() -> Iterator[ProcessEngine]:
    with ProcessEngine(2) as made:
        yield made


def run(target: Any, suite: EvalSet, engine: Any, **options: Any) -> Result:
    return Runner(target, suite, ["exact"], engine=engine, progress="off").run_sync(**options)


def workers_of(pid: int) -> list[psutil.Process]:
    """The worker processes of a driver."""
    children = psutil.Process(pid).children()
    return [child for child in children if "steelyard.engine.workers.process" in " ".join(child.cmdline())]


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


# How they start, and what they find


def test_auto_leaves_a_core_for_the_driver(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert auto_workers() == 7
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert auto_workers() == 1


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "two"])
def test_a_number_of_workers_that_makes_no_sense_is_refused(workers) -> None:
    with pytest.raises(ConfigurationError, match="workers must be a whole number >= 1"):
        ProcessEngine(workers)


def test_all_processes_are_started_at_once_by_the_check_and_serve_every_run(board) -> None:
    with ProcessEngine(3) as engine:
        engine.check()
        pids = {worker.pid for worker in workers_of(os.getpid())}
        assert len(pids) == 3
        for _ in range(2):
            run(AskedOfAll(board, 3), make_suite(30), engine, parallelism=9)
        assert {int(line[1]) for line in board.lines("called")} == pids
    assert workers_of(os.getpid()) == []


SCRIPT = """
import enum
import sys
from steelyard import EvalCase, EvalSet, ProcessEngine, Runner

print("imported", file=sys.stderr)

class Kind(enum.Enum):
    DOUBLE = "double"

def answer(case):
    assert case.expected is Kind.DOUBLE
    return case.prompt * 2

with ProcessEngine(2) as engine:
    suite = EvalSet("s", [EvalCase(id=str(n), prompt=str(n), expected=Kind.DOUBLE) for n in range(8)])
    result = Runner(answer, suite, engine=engine, parallelism=4, progress="off").run_sync()
    print([record.response_text for record in result.responses])
"""


def test_a_script_needs_no_guard_for_its_main_module(tmp_path) -> None:
    """Its functions are sent as they are: the processes do not import it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str([str(n) * 2 for n in range(8)])
    assert ended.stderr.count("imported") == 1


def write_suite(folder: Path, agent: str, count: int = 12) -> None:
    (folder / "agent.py").write_text(textwrap.dedent(agent))
    (folder / "shared.py").write_text(f"LOG = {str(folder / 'asked.log')!r}\n")
    (folder / "words.txt").write_text("hello ")
    (folder / "cases.jsonl").write_text("".join(f'{{"id": "c{n}", "prompt": "{n}"}}\n' for n in range(count)))
    (folder / "suite.yaml").write_text("id: near\ntarget: {python: agent.py:answer}\ncases: cases.jsonl\n")


AGENT = """
    import asyncio, os
    from pathlib import Path
    from shared import LOG

    async def answer(case):
        with open(LOG, "a") as log:
            log.write(f"{case.id} {os.getpid()}" + chr(10))
        await asyncio.sleep(0.02)
        return Path("words.txt").read_text() + case.id
"""


BOTH = AGENT.replace(
    "await asyncio.sleep(0.02)",
    "while len({line.split()[1] for line in Path(LOG).read_text().splitlines()}) < 2: await asyncio.sleep(0.02)",
)
"""Answers nothing before two processes have been asked, however long one of them takes to start."""


def asked(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "asked.log").read_text().splitlines()]


def test_the_command_line_runs_a_suite_file_on_workers_which_find_its_modules_and_files(tmp_path) -> None:
    write_suite(tmp_path, BOTH)
    ended = run_cli(tmp_path, "run", "suite.yaml", "--out", "run", "-j", "4", "--workers", "2", "--no-progress")
    assert ended.code == 0, ended.err
    records = list(iter_records(tmp_path / "run"))
    assert {record.response_text for record in records} == {f"hello c{n}" for n in range(12)}
    pids = {line.split()[1] for line in (tmp_path / "asked.log").read_text().splitlines()}
    assert str(os.getpid()) not in pids
    assert len(pids) == 2


def test_a_suite_file_may_name_the_workers(tmp_path) -> None:
    write_suite(tmp_path, AGENT)
    suite = tmp_path / "suite.yaml"
    suite.write_text(suite.read_text() + "run: {workers: auto, parallelism: 4}\n")
    assert run_cli(tmp_path, "run", "suite.yaml", "--out", "run", "--no-progress").code == 0
    assert str(os.getpid()) not in (tmp_path / "asked.log").read_text()


def test_a_worker_of_another_version_is_named_before_anything_is_called(board, monkeypatch) -> None:
    monkeypatch.setattr(messages, "__version__", "9.9.9")
    with ProcessEngine(2) as engine, pytest.raises(ConfigurationError, match=r"worker process \d+ .* 9\.9\.9 here"):
        run(Asking(board), make_suite(3), engine)
    assert not board.lines()
    assert workers_of(os.getpid()) == []


def test_a_process_that_cannot_start_says_how_it_ended(monkeypatch, capfd) -> None:
    monkeypatch.setattr(worker_processes, "_BOOTSTRAP", "import sys; sys.exit(7)")
    with ProcessEngine(2) as engine, pytest.raises(ConfigurationError, match="exited with code 7 before it was ready"):
        engine.check()
    assert workers_of(os.getpid()) == []


def test_a_run_goes_on_without_a_worker_that_cannot_be_started_again(board, monkeypatch, caplog) -> None:
    """Steelyard is updated during the run, say, and a process that dies then would be replaced by the other version."""
    with ProcessEngine(2) as engine:
        watched = Watched(engine, board)

        def disturb() -> None:
            wait_for(lambda: watched.taken > 100, seconds=60)
            monkeypatch.setattr(messages, "__version__", "9.9.9")
            os.kill(int(board.lines("called")[-1][1]), signal.SIGKILL)

        disturbing = threading.Thread(target=disturb, daemon=True)
        disturbing.start()
        result = run(Asking(board, 0.03), make_suite(600), watched, parallelism=20)
        disturbing.join()
    assert result.metrics["counts"] == {"planned": 600, "ok": 600, "error": 0, "cancelled": 0, "not_started": 0}
    assert "9.9.9 here; the run goes on without it" in caplog.text


# What comes back


class Chatty(Asking):
    """Logs, warns and raises."""

    async def invoke(self, case: EvalCase, context: Any) -> Any:
        logging.getLogger("mine").info("not wanted")
        logging.getLogger("mine").warning("about %s", case.id)
        threading.Thread(target=logging.getLogger("mine.thread").error, args=("from a thread",)).start()
        warnings.warn(f"careful with {case.id}", UserWarning, stacklevel=1)
        raise ValueError(f"no {case.id}")


def test_logs_warnings_and_tracebacks_reach_the_driver(engine, board, caplog) -> None:
    with pytest.warns(UserWarning, match="careful with c0"):
        result = run(Chatty(board), make_suite(1), engine)
    messages = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    assert ("mine", "WARNING", "about c0") in messages
    assert ("mine.thread", "ERROR", "from a thread") in messages
    assert not [text for _, _, text in messages if text == "not wanted"]
    (logged,) = [record for record in caplog.records if record.name == "mine"]
    assert logged.processName.startswith("worker process")
    (record,) = result.responses
    assert (record.error_type, record.error) == ("ValueError", "ValueError: no c0")
    assert "in invoke" in (record.error_traceback or "")


class Interrupting(Asking):
    async def invoke(self, case: EvalCase, context: Any) -> Any:
        if case.id == "c5":
            raise KeyboardInterrupt
        return await super().invoke(case, context)


def test_a_keyboard_interrupt_of_a_target_ends_the_run_as_it_does_here(engine, board, tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt, match="case c5"):
        run(Interrupting(board), make_suite(400), engine, parallelism=4, output_path=tmp_path / "run")
    assert not Result.load(tmp_path / "run").complete


def test_a_case_that_cannot_be_pickled_ends_the_run_and_says_so(engine, board) -> None:
    suite = EvalSet("s", [EvalCase(id="c0", prompt="x", metadata={"lock": threading.Lock()})])
    with pytest.raises(TypeError, match="pickle"):
        asyncio.run(engine.run(Asking(board).invoke, _jobs_of(suite), print, parallelism=1, token=CancellationToken()))


def _jobs_of(suite: EvalSet) -> Iterator[Any]:
    for job, case in zip(make_jobs(1), suite, strict=True):
        job.case = case
        yield job


# When something dies


def test_a_case_of_a_class_that_workers_do_not_find_ends_the_run_and_says_so(engine, board, monkeypatch) -> None:
    here = types.ModuleType("only_in_the_driver")
    monkeypatch.setitem(sys.modules, here.__name__, here)
    exec("import enum\nclass Kind(enum.Enum):\n    ONE = 1", vars(here))
    suite = EvalSet("s", [EvalCase(id="a", prompt="p", expected=vars(here)["Kind"](1))])
    with pytest.raises(ConfigurationError, match=r"a case cannot be unpickled in a worker process: .*only_in_the"):
        run(Asking(board), suite, engine)


def test_a_case_that_kills_its_workers_becomes_an_error_and_the_others_none(board) -> None:
    with ProcessEngine(2, max_reschedules=1) as mortal:
        result = run(Deadly(board, "c7"), make_suite(60), mortal, parallelism=12)
    assert len(board.lines("killing")) == 2
    assert result.metrics["counts"] == {"planned": 60, "ok": 59, "error": 1, "cancelled": 0, "not_started": 0}
    (lost,) = [record for record in result.responses if record.status == "error"]
    assert (lost.id, lost.error_type, lost.node) == ("c7", "WorkerLost", None)
    assert "2 workers died while this case was in flight, the last was worker process" in (lost.error or "")
    assert "was killed by SIGKILL" in (lost.error or "")


def test_an_answer_whose_worker_died_before_it_was_judged_is_not_requested_again(board) -> None:
    emitted: list[Any] = []
    with ProcessEngine(1) as mortal:
        tally = asyncio.run(
            mortal.run(DiesBeforeJudging(board), make_jobs(3), emitted.append, parallelism=3, token=CancellationToken())
        )
    assert (tally.finished, tally.cancelled) == (3, 0)
    assert sorted(board.noted("asked")) == sorted(board.noted("judged")) == [0, 1, 2]
    assert sum(isinstance(item, Record) for item in emitted) == 3


def test_workers_that_are_killed_cost_no_case_and_no_journalled_call(board, tmp_path, caplog) -> None:
    """Calls are counted in a file that outlives the processes that write to it."""
    suite = make_suite(1500)
    killed: list[int] = []
    with ProcessEngine(3) as mortal:
        watched = Watched(mortal, board)

        def disturb() -> None:
            for enough in (200, 600, 1000):
                wait_for(lambda enough=enough: watched.taken > enough, seconds=60)
                victim = int(board.lines("called")[-1][1])
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)

        disturbing = threading.Thread(target=disturb, daemon=True)
        disturbing.start()
        result = run(Asking(board, 0.03), suite, watched, parallelism=30, output_path=tmp_path / "run")
        disturbing.join()
    assert result.metrics["counts"] == {"planned": 1500, "ok": 1500, "error": 0, "cancelled": 0, "not_started": 0}
    assert Counter(record.id for record in iter_records(tmp_path / "run")) == Counter(case.id for case in suite)
    called = Counter(line[0] for line in board.lines("called"))
    assert called.keys() == {case.id for case in suite}
    assert called_when_journalled(board) == []
    assert called.total() - 1500 <= 3 * 20  # what was in flight, or had ended in the last moment before
    lost = [record.getMessage() for record in caplog.records if "was lost, with" in record.getMessage()]
    assert len(lost) == 3
    assert all(f"worker process {pid} " in text for pid, text in zip(killed, lost, strict=True))


def test_a_killed_driver_leaves_no_worker_and_its_run_is_resumed(tmp_path) -> None:
    write_suite(tmp_path, AGENT, 1500)
    words = ("run", "suite.yaml", "--out", "run", "-j", "20")
    out = tmp_path / "run" / "outputs.jsonl"
    started = start(tmp_path, *words, "--workers", "2")
    wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") > 100, seconds=60)
    workers = workers_of(started.pid)
    assert len(workers) == 2
    workers[0].suspend()  # one that cannot see that its driver is gone
    started.kill()
    assert finish(started).code == -signal.SIGKILL
    wait_for(lambda: all(map(is_gone, workers)))
    journalled = {json.loads(line)["id"] for line in out.read_bytes().split(b"\n")[:-1]}
    before = asked(tmp_path)
    resumed = run_cli(tmp_path, *words, "--workers", "2", "--no-progress")
    assert resumed.code == 0, resumed.err
    again = asked(tmp_path)[len(before) :]
    assert sorted(again) == sorted({f"c{n}" for n in range(1500)} - journalled)


def test_ctrl_c_ends_the_run_within_its_time_and_the_workers_with_it(tmp_path) -> None:
    """Even where a target blocks its process, and would for an hour."""
    write_suite(tmp_path, AGENT.replace("await asyncio.sleep(0.02)", "__import__('time').sleep(3600)"))
    started = start(tmp_path, "run", "suite.yaml", "--out", "run", "-j", "4", "--workers", "2", "--no-progress")
    wait_for(lambda: (tmp_path / "asked.log").exists() and len(asked(tmp_path)) == 2, seconds=60)
    workers = workers_of(started.pid)
    began = time.monotonic()
    started.send_signal(signal.SIGINT)
    ended = finish(started, timeout=30)
    assert ended.code == 130, ended.err
    assert "--workers 2" in ended.err
    assert time.monotonic() - began < 10  # five, on a machine that has nothing else to do
    wait_for(lambda: all(map(is_gone, workers)))
    assert json.loads((tmp_path / "run" / "partial.json").read_text())["counts"]["ok"] == 0


def test_a_stopped_worker_is_reported_and_its_cases_are_done_when_it_goes_on(
    engine, board, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(driver, "_SILENT_SECONDS", 1.5)

    def reported() -> bool:
        return any("has been silent" in record.getMessage() for record in list(caplog.records))

    def disturb() -> None:
        wait_for(lambda: len(board.lines("called")) > 40, seconds=60)
        stopped = int(board.lines("called")[-1][1])
        os.kill(stopped, signal.SIGSTOP)
        try:
            wait_for(reported, seconds=60)
        finally:
            os.kill(stopped, signal.SIGCONT)

    disturbing = threading.Thread(target=disturb, daemon=True)
    disturbing.start()
    suite = make_suite(1000)
    result = run(Asking(board, 0.02), suite, engine, parallelism=8, output_path=tmp_path / "run")
    disturbing.join()
    assert result.metrics["counts"]["ok"] == 1000
    assert Counter(record.id for record in iter_records(tmp_path / "run")) == Counter(case.id for case in suite)
    assert Counter(line[0] for line in board.lines("called")).total() == 1000  # nothing was assigned to another


class WithProgram(Asking):
    """Starts a program that outlives its call, and says which."""

    async def invoke(self, case: EvalCase, context: InvocationContext) -> Any:
        from steelyard.subprocesses import allowed_environment, run_program

        self.board.note("called", case.id, os.getpid(), context.attempt)
        code = f"import os; open({self.board.place + '/program'!r}, 'w').write(str(os.getpid())); {SLEEPER}"
        if not (Path(self.board.place) / "program").exists():
            await run_program(
                [sys.executable, "-c", code],
                env=allowed_environment(),
                cwd=None,
                timeout=None,
                programs=context.programs,
            )
        return await super().invoke(case, context)


def program_of(board: Board) -> psutil.Process:
    place = Path(board.place) / "program"
    wait_for(lambda: place.exists() and place.read_text().isdigit(), seconds=30)
    return psutil.Process(int(place.read_text()))


def test_a_killed_worker_takes_its_programs_with_it_and_its_case_is_asked_again(engine, board, tmp_path) -> None:
    found: list[psutil.Process] = []

    def disturb() -> None:
        found.append(program_of(board))
        os.kill(int(board.lines("called")[0][1]), signal.SIGKILL)

    disturbing = threading.Thread(target=disturb, daemon=True)
    disturbing.start()
    result = run(WithProgram(board), make_suite(1), engine, parallelism=2, output_path=tmp_path / "run")
    disturbing.join()
    assert result.metrics["counts"]["ok"] == 1
    wait_for(lambda: is_gone(found[0]))
    assert len({line[1] for line in board.lines("called")}) == 2


def test_a_killed_driver_takes_the_programs_of_its_workers_with_it(tmp_path, board) -> None:
    agent = f"""
        import sys
        from pathlib import Path
        from steelyard.subprocesses import allowed_environment, run_program

        async def answer(case, context):
            code = "import os; open({board.place + "/program"!r}, 'w').write(str(os.getpid())); {SLEEPER}"
            more = dict(env=allowed_environment(), cwd=None, timeout=None, programs=context.programs)
            await run_program([sys.executable, "-c", code], **more)
            return "x"
    """
    write_suite(tmp_path, agent, 1)
    started = start(tmp_path, "run", "suite.yaml", "--out", "run", "--workers", "2", "--no-progress")
    try:
        program = program_of(board)
    finally:
        started.kill()
        finish(started)
    wait_for(lambda: is_gone(program))


def test_the_arrivals_of_a_lost_worker_are_missed_and_what_it_had_sent_is_an_error(engine, board, tmp_path) -> None:
    def disturb() -> None:
        wait_for(lambda: len(board.lines("called")) > 40, seconds=60)
        os.kill(int(board.lines("called")[-1][1]), signal.SIGKILL)

    disturbing = threading.Thread(target=disturb, daemon=True)
    disturbing.start()
    options: dict[str, Any] = {"arrivals": "constant:50/s", "duration": 3.0, "output_path": tmp_path / "run"}
    result = run(Asking(board, 0.3), make_suite(5), engine, **options)
    disturbing.join()
    sends, counts = result.metrics["load"]["sends"], result.metrics["counts"]
    assert result.complete
    assert sends["planned"] == sends["sent"] + sends["missed"] == 150
    assert sends["missed"] >= 5  # those that it had already, and those that came before another was ready
    assert counts["planned"] == counts["ok"] + counts["error"] == sends["sent"]
    assert set(result.metrics["errors"]) == {"WorkerLost"}
    assert len(board.lines("called")) <= sends["sent"]  # nothing was sent twice


def test_a_full_disk_ends_the_run_and_the_workers_serve_the_next(engine, board) -> None:
    def full(record: Any) -> None:
        raise OSError(28, "No space left on device")

    async def main() -> None:
        await engine.run(_Emitting(), make_jobs(500), full, parallelism=8, token=CancellationToken())

    with pytest.raises(OSError, match="No space left"):
        asyncio.run(main())
    assert run(Asking(board), make_suite(10), engine).metrics["counts"]["ok"] == 10


class _Emitting:
    async def __call__(self, job: Any, emit: Any) -> None:
        emit("something")


def test_a_pool_is_closed_at_once_while_a_process_is_being_started(monkeypatch) -> None:
    monkeypatch.setattr(worker_processes, "_BOOTSTRAP", SLEEPER)
    pool, failures = ProcessPool(1), []

    def start() -> None:
        try:
            pool.start([0])
        except ConfigurationError as error:
            failures.append(str(error))

    starting = threading.Thread(target=start)
    starting.start()
    wait_for(lambda: bool(pool._processes))
    process = pool._processes[0]
    closing = threading.Thread(target=pool.close, args=(0.05,), daemon=True)
    closing.start()
    closing.join(20)
    starting.join(20)
    assert not closing.is_alive()
    assert not process.is_running
    assert len(failures) == 1


def test_a_closed_pool_starts_nothing_more() -> None:
    pool = ProcessPool(1)
    pool.close(0.0)
    with pytest.raises(ConfigurationError, match="closed"):
        pool.start([0])


# Load


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 5])
def test_a_load_run_has_what_was_asked_for_in_flight_from_its_first_second_to_its_last(workers, tmp_path) -> None:
    """Counted at the mock. The benchmark `worker_processes` has the limit of 2 %, for an idle machine."""
    asked_for = 40
    with (
        mock_process("--latency", "800ms", "--output-tokens", "1") as (mock, _),
        ProcessEngine(workers) as engine,
    ):
        target = OpenAIChat("m", base_url=mock.base_url, api_key="x", stream=False)
        options: dict[str, Any] = {"duration": 2.5, "parallelism": asked_for, "output_path": tmp_path / "run"}
        result = Runner(target, make_suite(10), engine=engine, progress="off").run_sync(**options)
        calls = [(one["received_ns"] / 1e9, one["last_ns"] / 1e9) for one in mock.stats(times=True)["times"]]
        assert mock.stats()["peak_concurrency"] == result.metrics["peak_in_flight"] == asked_for
    began, ended = min(calls)[0], max(calls)[0]
    for at in (began, ended - 1.0):
        busy = sum(max(0.0, min(last, at + 1.0) - max(received, at)) for received, last in calls)
        assert busy >= 0.85 * asked_for


@pytest.mark.slow
def test_a_driver_with_too_little_cpu_is_named_as_the_bottleneck_and_loses_nothing(tmp_path) -> None:
    """It runs for 40 ms of each 500, as `benchmarks/ray_faults.py` has it for Ray."""
    write_suite(tmp_path, AGENT, 20)
    requests = 1_500
    words = ("run", "suite.yaml", "--out", "run", "-j", "20", "--requests", str(requests), "--no-progress")
    out = tmp_path / "run" / "outputs.jsonl"
    started = start(tmp_path, *words, "--workers", "2")
    wait_for(lambda: out.exists() and out.stat().st_size > 0, seconds=60)
    until = time.monotonic() + 60
    while started.poll() is None and time.monotonic() < until:
        started.send_signal(signal.SIGSTOP)
        time.sleep(0.46)
        started.send_signal(signal.SIGCONT)
        time.sleep(0.04)
    ended = finish(started)
    assert ended.code == 0, ended.err
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (metrics["counts"]["planned"], metrics["counts"]["ok"]) == (requests, requests)
    assert metrics["client"]["bottleneck"] is True
    assert "the driver's event loop ran" in metrics["client"]["reason"]
    assert out.read_bytes().count(b"\n") == len(asked(tmp_path)) == requests


# Agents


def in_workspace(case: EvalCase, context: InvocationContext) -> str:
    assert context.workspace is not None
    assert (context.workspace / "a.txt").read_text() == "start"
    (context.workspace / "a.txt").write_text(f"{case.id} {os.getpid()}")
    return "done"


def graded(case: EvalCase, response: Any, context: Any) -> bool:
    return bool((context.workspace / "a.txt").read_text().split()[0] == case.id)


def test_cases_have_their_workspaces_on_workers(engine, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STEELYARD_WORK", str(tmp_path / "work"))
    runner = Runner(
        in_workspace,
        make_suite(6),
        [graded],
        workspace=Workspace({"files": {"a.txt": "start"}}, keep="all"),
        engine=engine,
        progress="off",
        output_path=tmp_path / "run",
        parallelism=4,
    )
    result = runner.run_sync()
    assert result.metrics["counts"]["ok"] == result.metrics["passed"] == 6
    texts = [(tmp_path / "run" / "artifacts" / f"c{n}" / "0" / "workspace.patch").read_text() for n in range(6)]
    assert all(f"+c{n} " in text for n, text in enumerate(texts))
    assert str(os.getpid()) not in "".join(texts)
    assert not (tmp_path / "work").exists() or not os.listdir(tmp_path / "work")


def test_a_token_cancelled_before_the_first_call_starts_nothing(engine, board) -> None:
    token = CancellationToken()
    token.cancel()
    with pytest.raises(RunCancelled):
        Runner(Asking(board), make_suite(3), engine=engine, token=token, progress="off").run_sync()
    assert not board.lines()
