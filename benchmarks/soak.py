"""`make soak`: faults by the hundred, seeded: what must not hang, be lost or be left running.

    python -m benchmarks.soak [--pairs 300] [--kills 200] [--tasks 200] [--task-kills 10] [--seed 0] [--jobs 2]

Pairs of signals, 0 to 5 ms apart, for runs that wait, sleep, run programs, score, match a backtracking pattern or hold
Python's global lock; kills (SIGKILL) while scorers run, each followed by a resume; and a run of agents in workspaces,
graded by tests, that is killed while agents work, while graders run and between. Takes some minutes. Prints each fault
that was found, and exits 1 if there was one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_TARGETS = {
    "async": "python: agent.py:waits",
    "thread": "python: agent.py:sleeps",
    "program": f"command: {{argv: [{sys.executable}, program.py]}}",
    "scorer": "python: agent.py:answers",
    "pattern": "python: agent.py:answers",
    "lock": "python: agent.py:holds_the_lock",
}
_SCORERS = {"scorer": "[{python: agent.py:scores_slowly}]", "pattern": '[{regex: {pattern: "^(a|aa)+$"}}]'}
_SUITE = """
id: soak
target:
  {target}
cases: [{{id: c0, prompt: a}}, {{id: c1, prompt: b}}, {{id: c2, prompt: c}}, {{id: c3, prompt: d}}]
scorers: {scorers}
run: {{parallelism: 2}}
"""
_AGENT = """
import asyncio, time
from pathlib import Path

async def waits(case):
    Path("started").touch()
    await asyncio.sleep(60)

def sleeps(case):
    Path("started").touch()
    time.sleep(60)

def answers(case):
    Path("started").touch()
    return "a" * 200 + "b"

def scores_slowly(case, response):
    time.sleep(60)

async def holds_the_lock(case):
    import re
    Path("started").touch()
    re.match("(a+)+$", "a" * 64 + "b")  # in C, for years, without ever letting go of the global lock
"""
_PROGRAM = """
import os, time
from pathlib import Path
Path(f"pid-{os.getpid()}").touch()
Path("started").touch()
time.sleep(60)
"""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_START_SECONDS = 60.0
MAX_END_SECONDS = 5.5
"""Five seconds are promised; the rest is for a busy machine."""
MAX_PROGRAM_SECONDS = 2.0
MAX_RUN_SECONDS = 600.0


def signal_pairs(
    folder: Path, *, pairs: int, seed: int, jobs: int = 1, report: Callable[[str], None] | None = None
) -> list[str]:
    """Interrupt runs by two signals 0 to 5 ms apart; every fault that was found."""

    def interrupt(number: int) -> list[str]:
        place = folder / f"pair-{seed}-{number}"
        place.mkdir()
        rng = random.Random(seed * 1_000_003 + number)
        return [f"seed {seed}, pair {number}: {fault}" for fault in _interrupt(place, rng)]

    return _each(interrupt, pairs, jobs, "pairs of signals", report)


def kills_while_scoring(
    folder: Path, *, kills: int, seed: int, jobs: int = 1, report: Callable[[str], None] | None = None
) -> list[str]:
    """Kill runs, each twice, while their scorers run, and resume them; every fault that was found."""

    def play(number: int) -> list[str]:
        place = folder / f"kill-{seed}-{number}"
        place.mkdir()
        rng = random.Random(seed * 1_000_003 + number)
        return [f"seed {seed}, run {number}: {fault}" for fault in _kill_and_resume(place, rng)]

    return _each(play, -(-kills // KILLS_EACH), jobs, "killed runs", report)


def _each(
    play: Callable[[int], list[str]], count: int, jobs: int, what: str, report: Callable[[str], None] | None
) -> list[str]:
    faults: list[str] = []
    with ThreadPoolExecutor(jobs) as pool:
        for number, found in enumerate(pool.map(play, range(count)), 1):
            faults += found
            for fault in found:
                print(f"FAULT  {fault}", flush=True)
            if report is not None and number % 25 == 0:
                report(f"{number} of {count} {what}, {len(faults)} faults")
    return faults


def _interrupt(place: Path, rng: random.Random) -> list[str]:
    """Start a run, send it a pair of signals, and look at what is left."""
    kind = rng.choice(sorted(_TARGETS))
    (place / "suite.yaml").write_text(_SUITE.format(target=_TARGETS[kind], scorers=_SCORERS.get(kind, "[]")))
    (place / "agent.py").write_text(_AGENT)
    (place / "program.py").write_text(_PROGRAM)
    first, second = rng.choice(_STOP_SIGNALS), rng.choice(_STOP_SIGNALS)
    gap = rng.choice([0.0, rng.uniform(0, 100e-6), rng.uniform(0, 5e-3)])
    with open(place / "stderr.txt", "wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "steelyard", "run", "suite.yaml", "--out", "RUN", "--no-progress"],
            cwd=place,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        try:
            if not _becomes_true((place / "started").exists, MAX_START_SECONDS):
                return [f"{kind}: the run did not start: {(place / 'stderr.txt').read_text()[-300:]}"]
            time.sleep(rng.uniform(0, 0.02))
            _send_pair(process.pid, first, second, gap)
            found = _faults(process, place, (first, second), is_locked=kind == "lock")
        finally:
            process.kill()
            process.wait()
    said = (place / "stderr.txt").read_text()[-300:]
    return [f"{kind}, {first.name} and {second.name} {gap * 1e6:.0f} µs apart: {fault}; {said}" for fault in found]


def _send_pair(pid: int, first: signal.Signals, second: signal.Signals, gap: float) -> None:
    os.kill(pid, first)
    until = time.perf_counter() + gap
    while time.perf_counter() < until:  # a sleep would be longer than most of the gaps
        pass
    os.kill(pid, second)


def _faults(
    process: subprocess.Popen[bytes], place: Path, sent: tuple[signal.Signals, ...], *, is_locked: bool
) -> list[str]:
    try:
        code = process.wait(MAX_END_SECONDS)
    except subprocess.TimeoutExpired:
        return ["it hangs"]
    if is_locked and code == -signal.SIGKILL:  # no handler could run: ended from outside, and nothing more is promised
        return []
    faults = [] if code in {128 + number for number in sent} else [f"its exit code is {code}"]
    if not (place / "RUN" / "partial.json").exists():
        faults.append("there is no partial.json")
    if b"resume with: " not in (place / "stderr.txt").read_bytes():
        faults.append("it does not say how to resume")
    pids = [int(path.name.partition("-")[2]) for path in place.glob("pid-*")]
    if not _becomes_true(lambda: not any(map(_is_running, pids)), MAX_PROGRAM_SECONDS):
        faults.append("a program lives on")
    return faults


CASES = 24
KILLS_EACH = 2
_SCORED = """
id: scored
target: {python: scored.py:agent}
cases: cases.jsonl
scorers: SCORERS
run: {parallelism: 4}
"""
_KINDS = {
    "thread": "[{python: scored.py:in_thread}]",
    "async": "[{python: scored.py:in_loop}]",
    "program": "[{python: scored.py:runs_tests}]",
    "judge": "[{python: scored.py:in_thread}, {judge: {name: judge, model: m, target: {python: scored.py:verdict}}}]",
    "after a built-in": "[exact, {python: scored.py:in_loop}]",
}
_SCORED_CODE = """
import asyncio, os, subprocess, time

LOG = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

def note(word, case):
    os.write(LOG, f"{word} {case.id}\\n".encode())

def agent(case):
    note("agent", case)
    return f"answer to {case.id}"

def in_thread(case, response):
    note("scoring", case)
    time.sleep(0.05)
    return response.response_text == f"answer to {case.id}"

async def in_loop(case, response):
    note("scoring", case)
    await asyncio.sleep(0.05)
    return response.response_text == f"answer to {case.id}"

async def verdict(case):
    await asyncio.sleep(0.05)
    return '{"reason": "as expected", "score": 1, "passed": true}'

def runs_tests(case, response):
    note("scoring", case)
    return subprocess.run(["sleep", "0.05"]).returncode == 0
"""


def _kill_and_resume(place: Path, rng: random.Random) -> list[str]:
    """Kill a run twice while it scores, and resume it: no answer that was being scored may be asked for again."""
    kind = rng.choice(sorted(_KINDS))
    (place / "suite.yaml").write_text(_SCORED.replace("SCORERS", _KINDS[kind]))
    (place / "scored.py").write_text(_SCORED_CODE)
    cases = [{"id": f"c{n}", "prompt": "?", "expected": f"answer to c{n}"} for n in range(CASES)]
    (place / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    faults: list[str] = []
    log = place / "log"
    with open(place / "stderr.txt", "wb") as stderr:
        for launch in range(KILLS_EACH + 1):
            scored, asked = _noted(log, "scoring"), Counter(_noted(log, "agent"))
            process = subprocess.Popen(
                [sys.executable, "-m", "steelyard", "run", "suite.yaml", "--out", "RUN", "--no-progress"],
                cwd=place,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
            try:
                if launch < KILLS_EACH:
                    _wait_for_scoring(process, log, len(scored))
                    time.sleep(rng.uniform(0, 0.15))
                elif (code := process.wait(MAX_START_SECONDS)) not in (0, 1, 2):  # 2: it was complete before
                    faults.append(f"the resumed run ended with {code}")
            except (subprocess.TimeoutExpired, TimeoutError) as error:
                faults.append(f"launch {launch + 1} hangs: {error}")
            finally:
                process.kill()
                process.wait()
            again = {case_id for case_id, times in Counter(_noted(log, "agent")).items() if times > asked[case_id]}
            if repeated := sorted(again & set(scored)):
                faults.append(f"answers that were being scored were asked for again: {repeated}")
    metrics = place / "RUN" / "metrics.json"
    if not metrics.exists() or json.loads(metrics.read_bytes())["counts"]["ok"] != CASES:
        faults.append("the resumed run is not complete")
    said = (place / "stderr.txt").read_text()[-300:]
    return [f"{kind}: {fault}; {said}" for fault in faults]


def _wait_for_scoring(process: subprocess.Popen[bytes], log: Path, seen: int) -> None:
    """Wait until a scorer has begun, or the run has ended: all may be scored already."""

    def begun() -> bool:
        return len(_noted(log, "scoring")) > seen or process.poll() is not None

    if not _becomes_true(begun, MAX_START_SECONDS):
        raise TimeoutError("it does not begin to score")


def _noted(log: Path, word: str) -> list[str]:
    """The cases for which this was called, since the log was begun."""
    if not log.exists():
        return []
    return [line.split()[1] for line in log.read_text().splitlines() if line.startswith(f"{word} ")]


_AGENTS = """
id: agents
target:
  agent: {argv: [sh, "{{ suite }}/agent.sh", "{{ id }}", "{{ metadata.kind }}", "{{ metadata.seconds }}"], grace: 1s}
cases: cases.jsonl
workspace: {from: {files: {task.txt: "bug\\n"}}, keep: none}
scorers:
  - tests: {argv: [sh, grade.sh, "{{ id }}"], files: hidden, timeout: 60s}
run: {parallelism: 8, retries: 0, stop_error_rate: null}
gate: {max_error_rate: 1.0}
"""
_AGENT_SCRIPT = """
note() { echo "$1 $2 $3" >> LOG; }
note agent "$1" $$
echo "begin $1"
[ "$2" = daemon ] && { setsid sleep 600 > /dev/null 2>&1 & note daemon "$1" $!; }
sleep "$3"
[ "$2" = helpless ] || echo "fixed $1" > task.txt
echo "end $1"
note ended "$1" $$
[ "$2" = crash ] && exit 1
exit 0
"""
_GRADE_SCRIPT = """
echo "grading $1 $$" >> LOG
sleep 0.1
grep -q fixed task.txt
"""
_PHASES = {"agent": "agent", "between": "ended", "grading": "grading"}
"""Where a kill falls, and what is written down there."""


def kills_of_agents(
    place: Path, *, tasks: int, kills: int, seed: int, report: Callable[[str], None] | None = None
) -> list[str]:
    """Kill a run of agents in workspaces again and again and resume it; what differs from one that was left alone."""
    rng = random.Random(seed)
    log = place / "log"
    crashing = _write_agents(place, tasks, rng, log)
    if (code := _launch_agents(place, "ALONE").wait(MAX_RUN_SECONDS)) not in (0, 1):
        return [f"the run that is left alone ended with {code}: {(place / 'stderr.txt').read_text()[-300:]}"]
    log.unlink()
    faults: list[str] = []
    killed, at_their_end = Counter[str](), set[str]()
    for launch in range(kills + 1):
        graded, asked, ended = (Counter(_noted(log, word)) for word in ("grading", "agent", "ended"))
        process = _launch_agents(place, "RUN")
        try:
            if launch < kills:
                phase = sorted(_PHASES)[launch % len(_PHASES)]
                _wait_for_more(process, log, _PHASES[phase], rng.randint(1, max(1, tasks // (kills + 2))))
                time.sleep(0 if phase == "between" else rng.uniform(0, 0.08))
                killed[phase if process.poll() is None else "too late"] += 1
            elif (code := process.wait(MAX_RUN_SECONDS)) not in (0, 1, 2):  # 2: it was complete before
                faults.append(f"the resumed run ended with {code}")
        except (subprocess.TimeoutExpired, TimeoutError) as error:
            faults.append(f"launch {launch + 1} hangs: {error}")
        finally:
            process.kill()
            process.wait()
        again = {case for case, times in Counter(_noted(log, "agent")).items() if times > asked[case]}
        again -= crashing  # an error is tried again by each launch
        at_their_end |= again & set(ended)
        if repeated := sorted(again & set(graded)):
            faults.append(f"agents that had finished were run again: {repeated}")
        pids = [int(line.split()[2]) for line in log.read_text().splitlines()]
        if not _becomes_true(lambda pids=pids: not any(map(_is_running, pids)), MAX_PROGRAM_SECONDS):  # type: ignore[misc]
            faults.append(f"launch {launch + 1} leaves programs running")
    faults += _differences(place / "ALONE", place / "RUN", tasks)
    if left := [path.name for path in (place / "work").glob("*/*")]:
        faults.append(f"workspaces are left: {left[:5]}")
    if report is not None:
        times = Counter(_noted(log, "agent"))
        asked_twice = sum(times[case] > 1 for case in times if case not in crashing)
        report(
            f"{tasks} tasks, killed {dict(sorted(killed.items()))}: {asked_twice} agents were cut short and run again, "
            f"{len(at_their_end)} of them killed in the moment of their end; {len(faults)} faults"
        )
    return [f"seed {seed}, agents: {fault}" for fault in faults]


def _write_agents(place: Path, tasks: int, rng: random.Random, log: Path) -> set[str]:
    """Write a suite of agents of several kinds; the tasks whose agents crash."""
    (place / "suite.yaml").write_text(_AGENTS)
    (place / "agent.sh").write_text(_AGENT_SCRIPT.replace("LOG", f"'{log}'"))
    (place / "hidden").mkdir()
    (place / "hidden" / "grade.sh").write_text(_GRADE_SCRIPT.replace("LOG", f"'{log}'"))
    kinds = ["plain", "plain", "plain", "daemon", "helpless", "plain", "crash"]
    with open(place / "cases.jsonl", "w") as file:
        for number in range(tasks):
            told = {"kind": kinds[number % len(kinds)], "seconds": f"{rng.uniform(0.02, 0.4):.2f}"}
            file.write(json.dumps({"id": f"task-{number}", "prompt": "Fix it.", "metadata": told}) + "\n")
    return {f"task-{number}" for number in range(tasks) if kinds[number % len(kinds)] == "crash"}


def _launch_agents(place: Path, out: str) -> subprocess.Popen[bytes]:
    with open(place / "stderr.txt", "ab") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "steelyard", "run", "suite.yaml", "--out", out, "--no-progress"],
            cwd=place,
            env={**os.environ, "STEELYARD_WORK": str(place / "work")},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )


def _wait_for_more(process: subprocess.Popen[bytes], log: Path, word: str, more: int) -> None:
    """Wait until this was written down that many times more, or the run has ended."""
    seen = len(_noted(log, word))
    if not _becomes_true(
        lambda: len(_noted(log, word)) >= seen + more or process.poll() is not None, MAX_START_SECONDS
    ):
        raise TimeoutError(f"{word} was not reached")


def _differences(alone: Path, killed: Path, tasks: int) -> list[str]:
    """How a run that was killed differs from one that was left alone: outcomes, patches and logs."""
    from steelyard import Result

    def outcomes(run: Path) -> dict[str, tuple[object, ...]]:
        return {
            record.id: (
                record.status,
                record.passed,
                record.exit_code,
                record.response_text,
                (run / "artifacts" / record.id / "0" / "workspace.patch").read_bytes(),
                (run / "logs" / record.id / "0.out").read_bytes(),
            )
            for record in Result.load(run).iter_responses()
        }

    expected, found = outcomes(alone), outcomes(killed)
    faults = [f"{case} differs: {found.get(case)}" for case in expected if found.get(case) != expected[case]]
    if len(expected) != tasks or len(found) != tasks:
        faults.append(f"{len(found)} of {tasks} tasks are done; left alone, {len(expected)}")
    return faults


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _becomes_true(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def main() -> int:
    """Run the soak; 1 when it found a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300, help="pairs of signals")
    parser.add_argument("--kills", type=int, default=200, help="kills while scorers run")
    parser.add_argument("--tasks", type=int, default=200, help="tasks of the run of agents")
    parser.add_argument("--task-kills", type=int, default=10, help="kills of the run of agents")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="steelyard-soak-") as folder:
        place = Path(folder)
        faults = signal_pairs(place, pairs=given.pairs, seed=given.seed, jobs=given.jobs, report=print)
        faults += kills_while_scoring(place, kills=given.kills, seed=given.seed, jobs=given.jobs, report=print)
        faults += kills_of_agents(place, tasks=given.tasks, kills=given.task_kills, seed=given.seed, report=print)
    for fault in faults:
        if ", agents: " in fault:
            print(f"FAULT  {fault}")
    print(
        f"{given.pairs} pairs of signals, {given.kills} kills while scoring, {given.task_kills} while agents work: "
        f"{len(faults)} faults"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
