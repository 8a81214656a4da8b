"""`make soak`: faults by the hundred, seeded: what must not hang, be lost or be left running.

    python -m benchmarks.soak [--pairs 300] [--seed 0]

Takes some minutes. Prints each fault that was found, and exits 1 if there was one.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_TARGETS = {
    "async": "python: agent.py:waits",
    "thread": "python: agent.py:sleeps",
    "program": f"command: {{argv: [{sys.executable}, program.py]}}",
}
_SUITE = """
id: soak
target:
  {target}
cases: [{{id: c0, prompt: a}}, {{id: c1, prompt: b}}, {{id: c2, prompt: c}}, {{id: c3, prompt: d}}]
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


def signal_pairs(folder: Path, *, pairs: int, seed: int, report: Callable[[str], None] | None = None) -> list[str]:
    """Interrupt runs by two signals 0 to 5 ms apart; every fault that was found."""
    faults = []
    for number in range(pairs):
        rng = random.Random(seed * 1_000_003 + number)
        place = folder / f"pair-{seed}-{number}"
        place.mkdir()
        faults += [f"seed {seed}, pair {number}: {fault}" for fault in _interrupt(place, rng)]
        if report is not None and (number + 1) % 25 == 0:
            report(f"{number + 1} of {pairs} pairs of signals, {len(faults)} faults")
    return faults


def _interrupt(place: Path, rng: random.Random) -> list[str]:
    """Start a run, send it a pair of signals, and look at what is left."""
    kind = rng.choice(sorted(_TARGETS))
    (place / "suite.yaml").write_text(_SUITE.format(target=_TARGETS[kind]))
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
            found = _faults(process, place, (first, second))
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


def _faults(process: subprocess.Popen[bytes], place: Path, sent: tuple[signal.Signals, ...]) -> list[str]:
    try:
        code = process.wait(MAX_END_SECONDS)
    except subprocess.TimeoutExpired:
        return ["it hangs"]
    faults = [] if code in {128 + number for number in sent} else [f"its exit code is {code}"]
    if not (place / "RUN" / "partial.json").exists():
        faults.append("there is no partial.json")
    if b"resume with: " not in (place / "stderr.txt").read_bytes():
        faults.append("it does not say how to resume")
    pids = [int(path.name.partition("-")[2]) for path in place.glob("pid-*")]
    if not _becomes_true(lambda: not any(map(_is_running, pids)), MAX_PROGRAM_SECONDS):
        faults.append("a program lives on")
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
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="steelyard-soak-") as folder:
        faults = signal_pairs(Path(folder), pairs=given.pairs, seed=given.seed, report=print)
    for fault in faults:
        print(f"FAULT  {fault}")
    print(f"{given.pairs} pairs of signals: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
