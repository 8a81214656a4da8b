"""EvalScope: `evalscope perf` with `--parallel` and a `line_by_line` file (evalscope.readthedocs.io, "Stress Test").

It takes token counts from the server, so that it needs no tokenizer, and scores nothing. `--warmup-num` is its warm-up.
It keeps every request in a database, to which it commits at first after 1,000 of them.
"""

from __future__ import annotations

import json

from job import API_KEY, MODEL, Job, Reported, become, serve


def prepare(job: Job) -> None:
    job.path("prompts.txt").write_text("".join(case["prompt"] + "\n" for case in job.cases()))


def run(job: Job) -> None:
    options: dict[str, object] = {
        "--model": MODEL,
        "--api": "openai",
        "--url": f"{job.base_url}/chat/completions",
        "--api-key": API_KEY,
        "--parallel": job.parallelism,
        "--number": job.count,
        "--warmup-num": job.warmup,
        "--dataset": "line_by_line",
        "--dataset-path": job.path("prompts.txt"),
        "--outputs-dir": job.path("outputs"),
    }
    given = (part for option in options.items() for part in option)
    become("evalscope", "perf", *given, "--stream" if job.stream else "--no-stream")


def read(job: Job) -> Reported:
    rows = json.loads(next(job.path("outputs").rglob("benchmark_percentile.json")).read_text())
    told = {row["Percentiles"]: row["TTFT (ms)"] for row in rows}
    return Reported(told["50%"] / 1e3, told["99%"] / 1e3)


if __name__ == "__main__":
    serve(run, prepare=prepare, read=read)
