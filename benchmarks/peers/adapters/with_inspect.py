"""Inspect: `inspect eval` of a task with `generate` and the `exact` scorer (inspect.aisi.org.uk).

The endpoint is the documented `openai-api/<name>/<model>` with its `<NAME>_BASE_URL`; `--max-connections` sets the
connections, and samples in flight follow it. It logs a transcript of each sample. It reports no time to first token.
After a crash its page on log files has `inspect log recover`, then `inspect eval-retry`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from job import API_KEY, MODEL, Job, become, command_path, serve

TASK = "inspect_task.py"


def logs(job: Job) -> list[Path]:
    return sorted(job.path("logs").glob("*.eval"))


def use_endpoint(job: Job) -> None:
    os.environ.update(PEERS_BASE_URL=job.base_url, PEERS_API_KEY=API_KEY, INSPECT_LOG_DIR=str(job.path("logs")))


def prepare(job: Job) -> None:
    """Put the task beside the run: it must be given as a relative path."""
    shutil.copy(Path(__file__).with_name(TASK), job.path(TASK))


def run(job: Job) -> None:
    use_endpoint(job)
    given = ["-T", f"cases_file={job.cases_file}", "-T", f"count={job.count}"]
    model = ["--model", f"openai-api/peers/{MODEL}", "--max-connections", job.parallelism]
    become("inspect", "eval", TASK, *model, *given)


def recover(job: Job) -> None:
    """Recover what the crashed log and its buffer have, and dump it, for the log is compressed."""
    use_endpoint(job)
    inspect, recovered = command_path("inspect"), job.path("logs/recovered.eval")
    subprocess.run([inspect, "log", "recover", logs(job)[0], "--output", recovered], check=False)
    for log in logs(job):
        with job.path(f"{log.stem}.json").open("wb") as file:
            subprocess.run([inspect, "log", "dump", log], stdout=file, check=False)


def again(job: Job) -> None:
    use_endpoint(job)
    recovered = job.path("logs/recovered.eval")
    become("inspect", "eval-retry", recovered if recovered.exists() else logs(job)[0])


if __name__ == "__main__":
    serve(run, prepare=prepare, recover=recover, again=again)
