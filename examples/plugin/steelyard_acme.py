"""A sample plugin: one of each thing that a package can add to Steelyard. Names are given to them in pyproject.toml."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from steelyard import EvalCase, Hook, InvocationContext, InvocationResponse, Record, Result, Score
from steelyard.scoring import Prompt


@dataclass(frozen=True)
class Acme:
    """A target: `target: {acme: {model: m}}`. As it declares `model` and `base_url`, `-m` and `--base-url` work."""

    model: str
    base_url: str = "https://acme.invalid"
    default_parallelism: int = 4

    @property
    def model_id(self) -> str:
        return self.model

    def identity(self) -> dict[str, Any]:
        return {"kind": "acme", "model": self.model, "base_url": self.base_url}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        return InvocationResponse(response_text=f"{self.model} says: {case.prompt}")


@dataclass(frozen=True)
class Vowels:
    """A scorer: `scorers: [{vowels: {least: 2}}]`."""

    least: int = 1
    name: str = "vowels"

    def identity(self) -> dict[str, Any]:
        return {"kind": "vowels", **asdict(self)}

    def score(self, case: EvalCase, response: InvocationResponse) -> Score:
        found = sum(letter in "aeiou" for letter in (response.response_text or "").lower())
        return Score(self.name, min(found / self.least, 1.0), found >= self.least, f"{found} vowels")


class Tally(Hook):
    """A hook: `hooks: [{acme: {file: tally.txt}}]` writes how many cases ended in an error to a file."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._errors = 0

    def on_error(self, record: Record) -> None:
        self._errors += 1

    def on_end(self, result: Result) -> None:
        self._file.write_text(f"{self._errors} errors\n")


class OneFile:
    """A store of answers in one JSON file: `--cache acme:answers.json`. Fine for a sample, slow for many answers."""

    def __init__(self, place: str) -> None:
        self._path = Path(place)
        self._lock = threading.Lock()  # a run puts answers from several threads at once
        self._kept: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def get(self, eval_set_id: str, case_id: str, key: str) -> InvocationResponse | None:
        kept = self._kept.get(f"{eval_set_id}/{case_id}/{key}")
        return None if kept is None else msgspec.convert(kept, InvocationResponse)

    def put(self, eval_set_id: str, case_id: str, key: str, response: InvocationResponse) -> None:
        with self._lock:
            self._kept[f"{eval_set_id}/{case_id}/{key}"] = msgspec.to_builtins(response)
            self._path.write_text(json.dumps(self._kept))


def one_line(result: Result) -> str:
    """A report format: `steelyard report RUN -f acme`. It may return bytes too."""
    return f"ACME: {result.metrics['n']} answers, {result.metrics['pass_rate']:.0%} passed\n"


BREVITY = Prompt(
    name="acme_v1",
    task="You judge whether an answer is as short as it can be.\n\nscore: 1 when it is.\npassed: true when it is.\n",
    template="Question:\n{{ question }}\n\nAnswer to judge:\n{{ answer }}\n",
)
"""A judge prompt: `judge: {model: m, prompt: acme_v1}`."""
