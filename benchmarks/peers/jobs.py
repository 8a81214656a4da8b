"""The three jobs, the same for every tool, against a mock in another process that keeps its own counts."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np

from benchmarks.mock_ceiling import mock
from benchmarks.peers.adapters.job import Job
from benchmarks.peers.tools import Installed, Tool
from benchmarks.peers.tree import Tree, Usage, start

CASES = 40_000
PARALLELISM = 50
FEW = 250
"""Requests of a small run: what it takes is start-up, and is taken off the big one's CPU time."""
AIM_SECONDS = 12.0
SETTLED = 0.1
"""The share of a run that counts as its beginning, when connections open and code is run for the first time."""
TOKENS = 64
FIRST_MS = 100
STREAMS = ((50, 20), (200, 20), (200, 5))
"""Streams at once, and milliseconds between two chunks of one."""
STREAM_REQUESTS = {50: 500, 200: 1_000}
KILL_COUNT = 500
KILL_AFTER = 250
KILL_PARALLELISM = 10
KILL_LATENCY_MS = 50
LIMIT_SECONDS = 240.0
ANSWER = re.compile(rb"word-[0-9a-f]{16}")


class JobFailed(Exception):
    """A tool did not do the job; says what was seen."""


@dataclass
class Rate:
    """Whole answers as fast as may be."""

    requests: int
    per_second: float
    cpu_us: float
    peak_mb: float
    processes: int
    start_seconds: float


@dataclass
class Streams:
    """Time to first token in ms, as the tool has it and as the mock sent it."""

    reported: tuple[float, float]
    true: tuple[float, float]
    in_flight: float

    @property
    def error(self) -> tuple[float, float]:
        return self.reported[0] - self.true[0], self.reported[1] - self.true[1]


@dataclass
class Killed:
    """Answers that were finished at the kill, found on disk afterwards, and sent again by a second start."""

    finished: int
    found: int
    asked_again: int
    ended_well: bool


def answer_to(number: int) -> str:
    """An answer that is found nowhere else on a disk."""
    return f"word-{hashlib.sha256(str(number).encode()).hexdigest()[:16]}"


def write_cases(folder: Path) -> tuple[Path, Path]:
    """The cases with their answers, which the mock has too, and the same cases with no answer in them."""
    answered, blank = folder / "cases.jsonl", folder / "blank.jsonl"
    with answered.open("w") as full, blank.open("w") as empty:
        for number in range(CASES):
            case = {"id": f"case-{number:06d}", "prompt": f"Question {number:06d}: which word stands for it?"}
            full.write(json.dumps(case | {"expected": answer_to(number)}) + "\n")
            empty.write(json.dumps(case | {"expected": "unknown"}) + "\n")
    return answered, blank


@dataclass
class Bench:
    """One tool and the files that it works with."""

    tool: Tool
    installed: Installed
    folder: Path
    answered: Path
    blank: Path

    def begin(self, job: Job, verb: str) -> Tree:
        path = Path(job.folder) / "job.json"
        path.write_text(json.dumps(vars(job)))
        return start([self.installed.python, self.tool.script, verb, path], Path(job.folder))

    def do(self, job: Job, verb: str = "run") -> Usage:
        tree = self.begin(job, verb)
        usage = tree.finish(LIMIT_SECONDS)
        if tree.process.returncode:
            raise JobFailed(f"{verb} left with {tree.process.returncode}: {last_words(Path(job.folder))}")
        return usage

    def fresh(self, name: str, address: str, *, cases_file: Path, **given: Any) -> Job:
        """A job in an empty folder, with what the tool needs in it."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        job = Job(base_url=f"{address}/v1", cases_file=str(cases_file), folder=str(folder), **given)
        self.do(job, "prepare")
        reset(address)
        return job

    def rate(self) -> Rate:
        """How many whole answers a second, once it runs."""
        with mock("--answers", str(self.answered)) as (_, (host, port)):
            few, small = self._rate_of(f"http://{host}:{port}", FEW)
            most = self.tool.most_requests or CASES
            count = int(min(most, max(1_000, few * AIM_SECONDS))) // PARALLELISM * PARALLELISM
            per_second, big = self._rate_of(f"http://{host}:{port}", count)
        cpu = (big.cpu - small.cpu) / (count - FEW) * 1e6
        return Rate(count, per_second, cpu, big.peak_bytes / 1e6, big.processes, small.wall)

    def _rate_of(self, address: str, count: int) -> tuple[float, Usage]:
        job = self.fresh(
            "rate", address, cases_file=self.answered, count=count, parallelism=PARALLELISM, stream=False, warmup=0
        )
        usage = self.do(job)
        times = answered_times(address)
        if len(times) < count:
            raise JobFailed(f"{count} requests were to come, {len(times)} came: {last_words(Path(job.folder))}")
        received = sorted(one["received_ns"] for one in times)
        skipped = int(len(times) * SETTLED)
        took = (max(one["last_ns"] for one in times) - received[skipped]) / 1e9
        return (len(times) - skipped) / took, usage

    def streams(self, parallelism: int, interval_ms: int) -> Streams:
        """What it says of the time to first token, and what that was."""
        flags = ("--latency", f"{FIRST_MS}ms", "--chunk-interval", f"{interval_ms}ms", "--output-tokens", str(TOKENS))
        count = STREAM_REQUESTS[parallelism]
        with mock(*flags) as (_, (host, port)):
            address = f"http://{host}:{port}"
            job = self.fresh(
                "streams",
                address,
                cases_file=self.answered,
                count=count,
                parallelism=parallelism,
                stream=True,
                warmup=parallelism,
            )
            self.do(job)
            times = sorted(answered_times(address), key=lambda one: one["received_ns"])[-count:]
        told = subprocess.run(
            [self.installed.python, self.tool.script, "read", Path(job.folder) / "job.json"],
            capture_output=True,
            check=True,
        )
        reported = json.loads(told.stdout.splitlines()[-1])
        true = np.percentile([one["first_token_delay_s"] for one in times], (50, 99)) * 1e3
        return Streams(
            (reported["p50"] * 1e3, reported["p99"] * 1e3), (float(true[0]), float(true[1])), mean_in_flight(times)
        )

    def kill(self) -> Killed:
        """`kill -9` half-way, then a second start against a mock that names the same requests the same."""
        flags = ("--answers", str(self.answered), "--latency", f"{KILL_LATENCY_MS}ms")
        with mock(*flags) as (_, (host, port)):
            address = f"http://{host}:{port}"
            job = self.fresh(
                "kill",
                address,
                cases_file=self.blank,
                count=KILL_COUNT,
                parallelism=KILL_PARALLELISM,
                stream=False,
                warmup=0,
                keep_answers=True,
            )
            tree = self.begin(job, "run")
            wait_for_answers(address, tree)
            tree.kill()
            finished = {one["request_id"] for one in answered_times(address)}
            rounds = len(finished) / unique_requests(address)
        self.begin(job, "recover").finish(LIMIT_SECONDS)
        found = found_answers(Path(job.folder), at_most=ceil(rounds))
        with mock(*flags, "--port", str(port)):
            second_start = self.begin(job, "again")
            second_start.finish(LIMIT_SECONDS)
            second = {one["request_id"] for one in answered_times(address)}
        return Killed(len(finished), found, len(finished & second), second_start.process.returncode == 0)


def reset(address: str) -> None:
    urlopen(f"{address}/stats/reset", data=b"").close()


def answered_times(address: str) -> list[dict[str, Any]]:
    """When the mock had, began and ended each answer."""
    with urlopen(f"{address}/stats?times=1") as answer:
        times: list[dict[str, Any]] = json.load(answer)["times"]
    return [one for one in times if one["last_ns"]]


def unique_requests(address: str) -> int:
    """How many different requests there were."""
    with urlopen(f"{address}/stats") as answer:
        unique: int = json.load(answer)["unique_ids"]
    return unique


def wait_for_answers(address: str, tree: Tree) -> None:
    """Until half of the requests are answered."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        with urlopen(f"{address}/stats") as answer:
            if json.load(answer)["by_status"].get("200", 0) >= KILL_AFTER:
                return
        if tree.process.poll() is not None:
            raise JobFailed("ended before it could be killed")
        time.sleep(0.01)
    tree.kill()
    raise JobFailed(f"{KILL_AFTER} answers did not come within {LIMIT_SECONDS:g} s")


def mean_in_flight(times: list[dict[str, Any]]) -> float:
    """How many streams were open on average, from the first request to the last."""
    received = [one["received_ns"] for one in times]
    begin, end = min(received), max(received)
    open_time = sum(min(one["last_ns"], end) - one["received_ns"] for one in times)
    return open_time / (end - begin)


def found_answers(folder: Path, at_most: int) -> int:
    """How many of the answers stand in any file below; each counts once a line, up to how often it was given."""
    wanted = {answer_to(number).encode() for number in range(KILL_COUNT)}
    seen: Counter[bytes] = Counter()
    for path in filter(Path.is_file, folder.rglob("*")):
        lines = path.read_bytes().split(b"\n")
        seen |= Counter(word for line in lines for word in set(ANSWER.findall(line)) & wanted)
    return sum(min(times, at_most) for times in seen.values())


def last_words(folder: Path) -> str:
    lines = (folder / "output.txt").read_text(errors="replace").strip().splitlines()
    return " / ".join(lines[-3:])[-400:]
