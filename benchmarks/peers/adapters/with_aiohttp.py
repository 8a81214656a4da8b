"""The bare aiohttp loop of `benchmarks/yardstick.py`: uvloop, orjson, lines in Python's own buffer until it is full."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from job import Job, Reported, percentiles, serve

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


def run(job: Job) -> None:
    from benchmarks.yardstick import run_yardstick

    from steelyard import EvalCase

    cases = [EvalCase(**case) for case in job.cases()]
    run_yardstick(
        f"{job.base_url}/chat/completions",
        cases,
        job.path("answers.jsonl"),
        parallelism=job.parallelism,
        stream=job.stream,
        warmup=job.warmup,
    )


def read(job: Job) -> Reported:
    with job.path("answers.jsonl").open() as file:
        return percentiles(json.loads(line)["time_to_first_token"] for line in file)


if __name__ == "__main__":
    serve(run, read=read)
