"""`python -m benchmarks.peers`: install each tool, give each the same jobs, write the table into docs/peers.md.

The rounds go through all tools in turn, so that a busy minute of the machine does not fall on one of them alone; of a
tool's rounds the better one counts. A time taken while other work had more than a little of the machine is marked, left
out of the table and taken again. Results are kept in the scratch folder as they come, so that one tool or one job
can be measured again, and the table be written again, without the rest.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.jobs import STREAMS, Bench, JobFailed, write_cases
from benchmarks.peers.report import write_report
from benchmarks.peers.tools import TOOLS, InstallFailed, Tool, install

JOBS = ("rate", "streams", "kill")
QUIET_SECONDS = 15.0
BUSY_PERCENT = 25.0
DISTURBED = 0.1
"""The share of all cores that other work may take beside a measurement."""
TRIES = 3
TIMED = ("rate", "streams")
"""Jobs whose figures hang on time. What is left after a kill is the same on a busy machine."""


def wanted(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    names = [tool.adapter for tool in TOOLS]
    parser.add_argument("--tools", nargs="*", choices=names, default=names, help="only these")
    parser.add_argument("--jobs", nargs="*", choices=JOBS, default=JOBS, help="only these; none: only write the table")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--more", action="store_true", help="add to the rounds of before, rather than replace them")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "steelyard-peers")
    return parser.parse_args(arguments)


def measures(bench: Bench, jobs: list[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is to be measured with one tool: a name, and how."""
    if "rate" in jobs:
        yield "rate", bench.rate
    if "streams" in jobs and bench.tool.first_token:
        for parallelism, interval in STREAMS:
            yield f"streams-{parallelism}-{interval}", lambda p=parallelism, i=interval: bench.streams(p, i)  # type: ignore[misc]
    if "kill" in jobs:
        yield "kill", bench.kill


def measure(what: Callable[[], Any]) -> dict[str, Any]:
    """The figures, or why there are none."""
    try:
        return asdict(what())
    except (JobFailed, TimeoutError, OSError, subprocess.SubprocessError, LookupError, ValueError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def measure_alone(what: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """The figures of each try, until one was not disturbed by other work."""
    for _ in range(TRIES):
        wait_for_quiet()
        started, others = time.monotonic(), cpu_of_others()
        figures = measure(what)
        cores = psutil.cpu_count() or 1
        share = (cpu_of_others() - others) / (time.monotonic() - started) / cores
        if share <= DISTURBED:
            yield figures
            return
        yield figures | {"disturbed": round(share, 2)}


def cpu_of_others() -> float:
    """Seconds of CPU that neither this process took nor any below it that has ended: the tool's and the mock's have."""
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.steal
    ours = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return float(busy - sum(one.ru_utime + one.ru_stime for one in ours))


def wait_for_quiet() -> None:
    """Until the machine has little else to do, or for a while: others may be at work on it."""
    deadline = time.monotonic() + QUIET_SECONDS
    while psutil.cpu_percent(1.0) > BUSY_PERCENT and time.monotonic() < deadline:
        pass


class Results:
    """Everything measured so far, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tools: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, tool: Tool) -> dict[str, Any]:
        return self.tools.setdefault(tool.adapter, {"versions": {}, "measured": {}})

    def save(self) -> None:
        self.path.write_text(json.dumps(self.tools, indent=1))


def installed_benches(asked: argparse.Namespace, results: Results) -> Iterator[Bench]:
    """A bench for each tool that can be installed; of the others it is written down why not."""
    answered, blank = write_cases(asked.scratch)
    for tool in (tool for tool in TOOLS if tool.adapter in asked.tools):
        entry = results.of(tool)
        try:
            installed = install(tool, asked.scratch)
        except InstallFailed as error:
            entry["not_installed"] = str(error)
            print(f"{tool.name}: not installed: {error}", file=sys.stderr)
            continue
        entry.pop("not_installed", None)
        entry["versions"] = installed.versions
        yield Bench(tool, installed, asked.scratch / "jobs" / tool.adapter, answered, blank)


def main(arguments: list[str]) -> int:
    asked = wanted(arguments)
    asked.scratch.mkdir(parents=True, exist_ok=True)
    results = Results(asked.scratch / "results.json")
    benches = list(installed_benches(asked, results))
    for number in range(asked.rounds):
        for bench in benches:
            for name, what in measures(bench, asked.jobs):
                measured = results.of(bench.tool)["measured"]
                rounds = measured[name] = measured.get(name, []) if number or asked.more else []
                for figures in measure_alone(what) if name.startswith(TIMED) else [measure(what)]:
                    print(f"{bench.tool.name}, {name}: {figures}", flush=True)
                    rounds.append(figures)
                    results.save()
    results.save()
    write_report(results.tools)
    return 0
