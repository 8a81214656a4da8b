"""What running a case costs beside the call itself: engine, journal and statistics against a bare loop.

The bare loop is what one would write by hand: fifty workers over a shared iterator, each awaiting the
target and appending the same JSON line with one write. It has no plan, no time limit, no resume, no
statistics, no index and no group commit.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.rows import Row
from steelyard import EvalCase, EvalSet, Runner

CASES = 50_000
PARALLELISM = 50
ROUNDS = 5
LIMIT = 4.0


async def answer(case: EvalCase) -> str:
    """A target that does nothing."""
    return "Paris" if case.prompt else ""


def make_cases() -> list[EvalCase]:
    return [EvalCase(id=f"case-{number}", prompt=f"Question {number}?") for number in range(CASES)]


def bare_loop(cases: list[EvalCase], folder: Path) -> Path:
    """Append one line a case, with the same fields as ours but for the checksum; returns the file."""
    path = folder / "bare.jsonl"
    encode = msgspec.json.Encoder().encode
    jobs = iter(enumerate(cases))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
    began = time.monotonic()

    async def worker() -> None:
        for index, case in jobs:
            requested, started = datetime.now(UTC), time.perf_counter()
            text = await answer(case)
            elapsed = time.perf_counter() - started
            record = {
                "v": 1,
                "id": case.id,
                "trial": 0,
                "index": index,
                "status": "ok",
                "attempts": 1,
                "elapsed": elapsed,
                "case_fp": "0123456789abcdef",
                "scored_by": "",
                "run_time": time.monotonic() - began,
                "response_text": text,
                "time_to_first_token": None,
                "time_to_last_token": elapsed,
                "time_per_output_token": None,
                "num_tokens_input": None,
                "num_tokens_output": None,
                "request_time": requested,
                "stop_reason": None,
                "error": None,
                "input_prompt": case.prompt,
                "scores": [],
            }
            os.write(descriptor, encode(record) + b"\n")

    async def pool() -> None:
        await asyncio.gather(*(worker() for _ in range(PARALLELISM)))

    asyncio.run(pool())
    os.close(descriptor)
    return path


def steelyard_run(cases: list[EvalCase], folder: Path) -> Path:
    """The same work as a run; returns its outputs."""
    run = folder / "run"
    runner = Runner(answer, EvalSet("overhead", cases), parallelism=PARALLELISM, output_path=run, progress="off")
    runner.run_sync(force=True, low_memory=True)
    return run / "outputs.jsonl"


def seconds(work: Callable[[list[EvalCase], Path], Path], folder: Path) -> tuple[float, Path]:
    cases = make_cases()
    started = time.perf_counter()
    path = work(cases, folder)
    return time.perf_counter() - started, path


def fields_of(path: Path) -> list[str]:
    with path.open("rb") as file:
        record: dict[str, Any] = msgspec.json.decode(file.readline())
    return [field for field in record if field != "crc32"]


def measure() -> list[Row]:
    """Best of several alternating rounds of each, so that a busy moment hurts neither alone."""
    bare, ours = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(ROUNDS):
            took, bare_path = seconds(bare_loop, folder)
            bare.append(took)
            took, our_path = seconds(steelyard_run, folder)
            ours.append(took)
        if fields_of(bare_path) != fields_of(our_path):
            raise AssertionError("the two loops do not write the same lines")
    best_bare, best_ours = min(bare) / CASES * 1e6, min(ours) / CASES * 1e6
    what = f"{CASES:,} no-op cases at parallelism {PARALLELISM}"
    detail = f"{best_ours:.1f} µs a case; a bare worker pool {best_bare:.1f} µs"
    return [Row(what, best_ours / best_bare, LIMIT, detail)]
