"""What every adapter is told and what it hands back. Plain Python: it is imported in each tool's own environment.

An adapter is started as `python with_TOOL.py VERB JOB.json`, in the job's folder:

- `prepare` writes the files that the tool wants, before anything is measured;
- `run` does the job, in this process or by becoming the tool's own command;
- `recover` does what the tool's documentation says to do first after it was killed;
- `again` starts it a second time after it was killed, the way its documentation says to go on;
- `read` prints the p50 and p99 of the time to first token that the tool reports, as JSON, or null.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

API_KEY = "nobody"
MODEL = "mock"


@dataclass
class Job:
    """A number of cases of a file to one endpoint, a number in flight; the folder is the tool's to write in."""

    base_url: str
    cases_file: str
    count: int
    parallelism: int
    stream: bool
    warmup: int
    folder: str
    keep_answers: bool = False
    """Whether the answers themselves are wanted on disk, where a tool leaves that open."""

    def cases(self) -> list[dict[str, str]]:
        """The first `count` cases: `id`, `prompt`, `expected`."""
        with open(self.cases_file) as file:
            return [json.loads(line) for line, _ in zip(file, range(self.count), strict=False)]

    def path(self, name: str) -> Path:
        return Path(self.folder) / name


@dataclass
class Reported:
    """Seconds to first token, as the tool has them."""

    p50: float
    p99: float


def percentiles(seconds: Iterable[float]) -> Reported:
    """For tools that keep each request's time and no percentiles."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return Reported(cuts[49], cuts[98])


def nothing(job: Job) -> None:
    """What a tool does that has nothing to do at this point."""


def serve(
    run: Callable[[Job], None],
    *,
    read: Callable[[Job], Reported | None] = nothing,
    prepare: Callable[[Job], None] = nothing,
    recover: Callable[[Job], None] = nothing,
    again: Callable[[Job], None] | None = None,
) -> None:
    """Do what the command line asks for."""
    verb, path = sys.argv[1:]
    job = Job(**json.loads(Path(path).read_text()))
    if verb == "read":
        reported = read(job)
        print(json.dumps(reported and vars(reported)))
    else:
        {"prepare": prepare, "run": run, "recover": recover, "again": again or run}[verb](job)


def command_path(name: str) -> Path:
    """A command of this environment."""
    return Path(sys.executable).with_name(name)


def become(name: str, *arguments: object) -> None:
    """Turn into a command of this environment, so that its memory and CPU are the tool's own."""
    path = command_path(name)
    os.execv(path, [str(path), *map(str, arguments)])
