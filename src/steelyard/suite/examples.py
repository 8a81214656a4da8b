"""Few-shot examples: cases with known answers that go before the question, drawn for each case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import msgspec

from steelyard.errors import ConfigurationError, SuiteError, reject_unknown
from steelyard.records import EvalCase

Select = Literal["random", "balanced", "fixed"]
KEYS = ("from", "n", "seed", "select", "fields")
_MAX_EXAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class Example:
    """A question with its answer."""

    question: list[dict[str, Any]]
    prompt: str | None
    answer: str

    def turns(self) -> list[dict[str, Any]]:
        """Return the example as turns of a conversation."""
        return [*self.question, {"role": "assistant", "content": self.answer}]


class Examples:
    """Draws `n` examples for each case from a pool. What is drawn depends on the seed and the case's id alone.

    `random` draws from all; `balanced` takes turns at the answers, so that each comes equally often; `fixed` gives
    every case the first `n`. An example that asks what the case asks is left out.
    """

    def __init__(self, pool: Iterable[EvalCase], n: int, *, seed: int = 0, select: Select = "random") -> None:
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= _MAX_EXAMPLES:
            raise ConfigurationError(f"examples.n must be a number from 1 to {_MAX_EXAMPLES}, got {n!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigurationError(f"examples.seed must be a whole number, got {seed!r}")
        if select not in get_args(Select):
            raise ConfigurationError(f"examples.select must be one of {', '.join(get_args(Select))}, got {select!r}")
        self.n, self.seed, self.select = n, seed, select
        self._cases = pool
        self._pool: list[Example] = []
        self._labels: dict[str, list[int]] = {}

    def add_to(self, case: EvalCase) -> EvalCase:
        """Return the case with its examples before its messages."""
        if not self._pool:
            self._read()
        asked = _question(case)
        drawn = [one for one in self._drawn(case.id) if one.question != asked][: self.n]
        turns = [turn for one in drawn for turn in one.turns()]
        return msgspec.structs.replace(case, messages=[*turns, *(case.messages or ())])

    def _read(self) -> None:
        for number, case in enumerate(self._cases, 1):
            answer = case.expected[0] if isinstance(case.expected, list) and case.expected else case.expected
            if answer is None:
                raise SuiteError(f"examples: example {number} ({case.id}) has no expected answer to show")
            text = answer if isinstance(answer, str) else msgspec.json.encode(answer).decode()
            self._labels.setdefault(text, []).append(len(self._pool))
            self._pool.append(Example(question=_question(case), prompt=case.prompt, answer=text))
        if len(self._pool) < self.n:
            raise SuiteError(f"examples: {self.n} are asked for, and there are {len(self._pool)}")

    def _drawn(self, case_id: str) -> list[Example]:
        """Return one more than are needed: one of them may be the case itself."""
        wanted = min(self.n + 1, len(self._pool))
        if self.select == "fixed":
            return self._pool[:wanted]
        digest = blake2b(f"{self.seed}:{case_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        rng = Random(int.from_bytes(digest))
        if self.select == "random":
            return [self._pool[place] for place in rng.sample(range(len(self._pool)), wanted)]
        return [self._pool[place] for place in self._balanced(rng, wanted)]

    def _balanced(self, rng: Random, wanted: int) -> list[int]:
        left = {label: rng.sample(places, len(places)) for label, places in self._labels.items()}
        chosen: list[int] = []
        while len(chosen) < wanted:
            labels = [label for label in left if left[label]]
            for label in rng.sample(labels, len(labels)):
                chosen.append(left[label].pop())
                if len(chosen) == wanted:
                    break
        return chosen


def _question(case: EvalCase) -> list[dict[str, Any]]:
    prompt = [] if case.prompt is None else [{"role": "user", "content": case.prompt}]
    return [*(case.messages or ()), *prompt]


def read_examples(path: Path, raw: Mapping[str, Any]) -> Examples:
    """Read the `examples` of a suite file; SuiteError says what is wrong."""
    from steelyard.suite.data_files import file_source
    from steelyard.suite.evalset import EvalSet, arrangement

    reject_unknown(raw, KEYS, "examples", file=path)
    place = raw.get("from")
    if not isinstance(place, str):
        raise SuiteError(f"examples.from must be a file's path, got {place!r}", path=path)
    options = {name: raw[name] for name in ("seed", "select") if name in raw}
    try:
        pool = EvalSet.from_source("examples", file_source(path.parent / place, arrangement(raw.get("fields"))))
        return Examples(pool, raw.get("n", 0), **options)
    except SuiteError:
        raise
    except ConfigurationError as error:
        raise SuiteError(str(error), path=path) from error
