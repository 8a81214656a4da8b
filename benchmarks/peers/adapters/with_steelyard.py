"""Steelyard: `steelyard run` with a suite file; journal, statistics and the `exact` scorer on (docs/runs.md)."""

from __future__ import annotations

import json

from job import API_KEY, MODEL, Job, Reported, become, serve


def prepare(job: Job) -> None:
    target = {"model": MODEL, "base_url": job.base_url, "api_key": API_KEY, "stream": job.stream}
    suite = {"id": "peers", "target": {"openai-chat": target}, "cases": job.cases_file, "scorers": ["exact"]}
    job.path("suite.yaml").write_text(json.dumps(suite))


def run(job: Job) -> None:
    """Become the command; started again with the same directory it resumes by itself."""
    options: list[object] = ["-j", job.parallelism, "-n", job.count, "--out", job.path("run")]
    if job.warmup:
        options += ["--warmup", job.warmup]
    become("steelyard", "run", job.path("suite.yaml"), *options)


def read(job: Job) -> Reported:
    stats = json.loads(job.path("run/metrics.json").read_text())["stats"]
    return Reported(stats["time_to_first_token-p50"], stats["time_to_first_token-p99"])


if __name__ == "__main__":
    serve(run, prepare=prepare, read=read)
