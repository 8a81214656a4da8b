"""lm-eval: `lm-eval run` with the model `local-chat-completions` (its README, "Model APIs and Inference Servers").

`base_url` and `num_concurrent` are model arguments; the cases are a task file of the kind that its "New Task Guide"
describes, with `exact_match`. It makes all requests before it sends the first, scores when it has the last answer, and
writes its results then. It reports no time to first token. To keep answers from one run to the next its user guide has
`--use_cache`, which is used where answers are looked for after a kill. The hub of datasets is off: there is no network.
"""

from __future__ import annotations

import json
import os

from job import MODEL, Job, become, serve


def prepare(job: Job) -> None:
    task = {
        "task": "peers",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": job.cases_file}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{expected}}",
        "metric_list": [{"metric": "exact_match"}],
    }
    job.path("task").mkdir()
    job.path("task/peers.yaml").write_text(json.dumps(task))


def run(job: Job) -> None:
    os.environ.update(HF_HUB_OFFLINE="1")
    endpoint = f"model={MODEL},base_url={job.base_url}/chat/completions,num_concurrent={job.parallelism}"
    model = ["--model", "local-chat-completions", "--model_args", endpoint, "--apply_chat_template"]
    task = ["--include_path", job.path("task"), "--tasks", "peers", "--limit", job.count]
    output = ["--output_path", job.path("out"), "--log_samples"]
    cache = ["--use_cache", job.path("cache")] if job.keep_answers else []
    become("lm-eval", "run", *model, *task, *output, *cache)


if __name__ == "__main__":
    serve(run, prepare=prepare)
