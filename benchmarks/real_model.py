"""`make bench-real`: 100 questions to a real model on this machine, streamed, journalled and scored, end to end.

The model is SmolLM2 135M behind a llama.cpp server. The same questions are asked by a bare loop of threads over
`http.client`, before and after: what is left is what Steelyard costs.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.__main__ import machine
from benchmarks.rows import Row
from steelyard import EvalCase, EvalSet, Runner
from steelyard.run.result import Result
from steelyard.scoring import Contains
from steelyard.targets import OpenAIChat

QUESTIONS = 100
PARALLELISM = 4
PARAMS = {"temperature": 0, "max_tokens": 24, "cache_prompt": False}
ROOT = Path(__file__).parent.parent


def cases() -> list[EvalCase]:
    """The first hundred of the example's questions about capitals."""
    suite = EvalSet.from_jsonl(ROOT / "examples" / "capitals.jsonl", system_prompt="Answer with the name of the city.")
    return list(islice(suite, QUESTIONS))


@contextmanager
def server(python: str) -> Iterator[str]:
    """The address of a llama.cpp server in its own environment; it ends with the block."""
    command = [python, str(ROOT / "benchmarks" / "real_server.py"), str(PARALLELISM)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield next(line.strip() for line in process.stdout if line.startswith("http"))
        finally:
            process.kill()


def bare(address: str, asked: list[EvalCase]) -> tuple[float, int]:
    """Ask all with threads and `http.client`; return the seconds and the tokens that the server counted."""
    place = urlsplit(address)

    def ask(case: EvalCase) -> int:
        messages = [{"role": "system", "content": case.system_prompt}, {"role": "user", "content": case.prompt}]
        body = {"model": "m", "messages": messages, "stream": True, "stream_options": {"include_usage": True}, **PARAMS}
        connection = http.client.HTTPConnection(place.hostname or "", place.port)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        tokens = 0
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                usage = json.loads(line[6:]).get("usage")
                tokens = usage["completion_tokens"] if usage else tokens
        connection.close()
        return tokens

    begun = time.perf_counter()
    with ThreadPoolExecutor(PARALLELISM) as pool:
        tokens = sum(pool.map(ask, asked))
    return time.perf_counter() - begun, tokens


def measured(address: str, asked: list[EvalCase], run: Path) -> tuple[float, Result]:
    """Run the suite; return the seconds of the whole call, plan, journal, scores and final figures included."""
    target = OpenAIChat("SmolLM2-135M-Instruct", base_url=f"{address}/v1", params=PARAMS)
    runner = Runner(
        target,
        EvalSet("capitals", asked),
        scorers=[Contains()],
        output_path=run,
        parallelism=PARALLELISM,
        progress="off",
    )
    begun = time.perf_counter()
    result = runner.run_sync()
    return time.perf_counter() - begun, result


def measure(python: str) -> Iterator[Row]:
    asked = cases()
    with server(python) as address, tempfile.TemporaryDirectory() as folder:
        bare(address, asked[:PARALLELISM])  # the first answers of a server are slow
        before, expected = bare(address, asked)
        seconds, result = measured(address, asked, Path(folder) / "run")
        after, _ = bare(address, asked)
        records = result.load_responses()
    ok = [record for record in records if record.status == "ok" and record.retries == 0]
    tokens = sum(record.num_tokens_output or 0 for record in records)
    stats = result.stats
    first, last = (
        " ".join(f"{name} {1000 * stats[f'{field}-{name}']:.0f} ms" for name in ("p50", "p90"))
        for field in ("time_to_first_token", "time_to_last_token")
    )
    resent = sum(record.resent for record in records)
    right = sum(1 for record in records for score in record.scores if score.passed)
    detail = f"first token {first}; last token {last}; sent again on a fresh connection: {resent}"
    yield Row("answers without an error or a retry", len(ok), QUESTIONS, detail, "answers", at_least=True)
    detail = f"{seconds:.1f} s, {tokens / seconds:.1f} tokens/s, {right} of {QUESTIONS} answers right"
    bare_seconds = (before + after) / 2
    loop = f"bare loop {before:.1f} and {after:.1f} s"
    yield Row("wall clock, × a bare loop", seconds / bare_seconds, 1.25, f"{detail}; {loop}")
    detail = "as the server counted them in the bare loop's answers to the same questions"
    yield Row("output tokens, × the server's count", tokens / expected, 1.05, f"{tokens} of {expected}: {detail}")


if __name__ == "__main__":
    print(f"on {machine()}")
    missed = 0
    for row in measure(sys.argv[1]):
        print(row, flush=True)
        missed += not row.ok
    sys.exit(1 if missed else 0)
