"""promptfoo: `promptfoo eval` of a config file with the `equals` assertion (promptfoo.dev/docs/usage/command-line).

The endpoint is the `apiBaseUrl` of the provider `openai:chat:<model>`, `--max-concurrency` the requests at once; the
cases are a JSON Lines file of tests. It keeps a database and a cache of answers in its home folder. It reports no time
to first token. After a crash its page on the command line has `promptfoo eval --resume`. Its telemetry and its look for
updates, which want a network, are off, by the variables that its pages on them name.
"""

from __future__ import annotations

import json
import os

from job import API_KEY, MODEL, Job, become, serve

CONFIG = "promptfooconfig.yaml"


def prepare(job: Job) -> None:
    provider = {"id": f"openai:chat:{MODEL}", "config": {"apiBaseUrl": job.base_url, "apiKey": API_KEY}}
    config = {"prompts": ["{{prompt}}"], "providers": [provider], "tests": "file://tests.jsonl"}
    job.path(CONFIG).write_text(json.dumps(config))
    with job.path("tests.jsonl").open("w") as file:
        for case in job.cases():
            equals = {"type": "equals", "value": case["expected"]}
            file.write(json.dumps({"vars": {"prompt": case["prompt"]}, "assert": [equals]}) + "\n")


def evaluate(*arguments: object) -> None:
    os.environ.update(PROMPTFOO_DISABLE_TELEMETRY="1", PROMPTFOO_DISABLE_UPDATE="1")
    # Wrong answers are no failure of the tool: with this, as with the others, its exit code says only how it ended.
    os.environ.update(PROMPTFOO_FAILED_TEST_EXIT_CODE="0")
    become("promptfoo", "eval", *arguments)


def run(job: Job) -> None:
    evaluate("--config", CONFIG, "--max-concurrency", job.parallelism, "--output", job.path("results.json"))


def again(_: Job) -> None:
    """Resume the latest run, which keeps its options."""
    evaluate("--resume")


if __name__ == "__main__":
    serve(run, prepare=prepare, again=again)
