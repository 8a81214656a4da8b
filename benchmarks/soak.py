"""`make soak`: faults by the hundred, seeded: what must not hang, be lost or be left running.

    python -m benchmarks.soak [--pairs 300] [--kills 200] [--seed 0] [--jobs 2]

Pairs of signals, 0 to 5 ms apart, for runs that wait, sleep, run programs, score, match a backtracking pattern or hold
Python's global lock; and kills (SIGKILL) while scorers run, each followed by a resume. Takes some minutes. Prints each
fault that was found, and exits 1 if there was one.
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="steelyard-soak-") as folder:
        place = Path(folder)
        faults = signal_pairs(place, pairs=given.pairs, seed=given.seed, jobs=given.jobs, report=print)
        faults += kills_while_scoring(place, kills=given.kills, seed=given.seed, jobs=given.jobs, report=print)
    print(f"{given.pairs} pairs of signals, {given.kills} kills while scoring: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
