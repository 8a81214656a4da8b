"""GuideLLM: `guidellm run` with the `concurrent` profile and a JSON Lines file (its README, "Load Patterns" and on).

It counts tokens by the server's usage and scores nothing. Its warm-up is a share of the requests, which it leaves out
of its metrics. It writes its report when the benchmark has ended.
"""

from __future__ import annotations

import json

from job import MODEL, Job, Reported, become, serve


def run(job: Job) -> None:
    total = job.count + job.warmup
    backend = {
        "kind": "openai_http",
        "target": job.base_url.removesuffix("/v1"),
        "model": MODEL,
        "request_format": "/v1/chat/completions",
        "stream": job.stream,
    }
    profile: dict[str, object] = {"kind": "concurrent", "streams": job.parallelism}
    if job.warmup:
        profile["warmup"] = {"percent": job.warmup / total, "mode": "requests"}
    options = {
        "--backend": backend,
        "--profile": profile,
        "--constraint": {"kind": "max_requests", "count": total},
        "--data": {"kind": "json_file", "path": job.cases_file},
        "--data-column-mapper": {"kind": "generative_column_mapper", "column_mappings": {"text_column": "prompt"}},
        "--output": {"kind": "json", "path": str(job.path("report.json"))},
    }
    become("guidellm", "run", *(part for name, value in options.items() for part in (name, json.dumps(value))))


def read(job: Job) -> Reported:
    report = json.loads(job.path("report.json").read_text())
    told = report["benchmarks"][0]["metrics"]["time_to_first_token_ms"]["successful"]["percentiles"]
    return Reported(told["p50"] / 1e3, told["p99"] / 1e3)


if __name__ == "__main__":
    serve(run, read=read)
