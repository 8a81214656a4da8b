"""AIPerf: `aiperf profile`, `--concurrency` and a `single_turn` file (docs.nvidia.com/aiperf, "Custom Dataset Guide").

It wants a tokenizer, which it would fetch from a hub; it gets one of whole words, made on the spot, and counts tokens
with it, as is its default. It scores nothing. At its default export level it writes numbers and no answers;
`--export-level raw` has the answers too, and is used where answers are looked for after a kill.
"""

from __future__ import annotations

import json
from pathlib import Path

from job import API_KEY, MODEL, Job, Reported, become, serve


def make_tokenizer(folder: Path) -> None:
    """A tokenizer that knows every word as the unknown one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"[UNK]": 0, "[EOS]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="[EOS]").save_pretrained(folder)


def prepare(job: Job) -> None:
    make_tokenizer(job.path("tokenizer"))
    with job.path("input.jsonl").open("w") as file:
        for case in job.cases():
            file.write(json.dumps({"text": case["prompt"]}) + "\n")


def run(job: Job) -> None:
    options: dict[str, object] = {
        "--model": MODEL,
        "--endpoint-type": "chat",
        "--url": job.base_url.removesuffix("/v1"),
        "--api-key": API_KEY,
        "--tokenizer": job.path("tokenizer"),
        "--concurrency": job.parallelism,
        "--request-count": job.count,
        "--input-file": job.path("input.jsonl"),
        "--custom-dataset-type": "single_turn",
        "--artifact-dir": job.path("artifacts"),
    }
    if job.warmup:
        options["--warmup-request-count"] = job.warmup
    if job.keep_answers:
        options["--export-level"] = "raw"
    flags = ["--streaming"] if job.stream else []
    become("aiperf", "profile", *(part for option in options.items() for part in option), *flags)


def read(job: Job) -> Reported:
    told = json.loads(job.path("artifacts/profile_export_aiperf.json").read_text())["time_to_first_token"]
    return Reported(told["p50"] / 1e3, told["p99"] / 1e3)


if __name__ == "__main__":
    serve(run, prepare=prepare, read=read)
