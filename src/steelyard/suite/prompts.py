"""What is put around the question of each case: prompts, which a suite is asked with in turn, and few-shot examples.

A prompt is another system prompt, or a template around the question. Examples are cases with known answers that go
before it, drawn for each case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import msgspec

from steelyard.case_templates import CaseTemplate
from steelyard.errors import ConfigurationError, SuiteError, reject_unknown
from steelyard.records import EvalCase
from steelyard.suite.identity import BadCase

PROMPT_KEYS = ("system_prompt", "prompt")
_MAX_FILE = 10_000_000
"""Bytes of a prompt's file."""


class CasePrompt:
    """A way to ask the cases of a suite: a system prompt in place of the suite's, a template for the question, or both.

    The template sees the case: `{{ prompt }}`, `{{ metadata.x }}`. Of a case whose messages end with the user's turn,
    and that has no prompt, that turn is the question.
    """

    def __init__(self, system_prompt: str | None = None, prompt: str | None = None, *, where: str = "prompt") -> None:
        if system_prompt is None and prompt is None:
            raise ConfigurationError(f"{where} must have a system_prompt, a prompt, or both")
        if system_prompt is not None and not isinstance(system_prompt, str):
            raise ConfigurationError(f"{where}.system_prompt must be text, got {system_prompt!r}")
        self.system_prompt = system_prompt
        self._where = where
        self._template = None if prompt is None else CaseTemplate(prompt, f"{where}.prompt")
        if self._template is not None and self._template.is_constant:
            raise ConfigurationError(
                f"{where}.prompt would ask the same of every case: put the case's question in it, as {{{{ prompt }}}}"
            )

    def apply(self, case: EvalCase) -> EvalCase:
        """The case with its question in the template; BadCase where that cannot be done."""
        if self._template is None:
            return case
        if case.prompt is not None:
            return msgspec.structs.replace(case, prompt=self._render(case))
        *before, last = case.messages or [{}]
        if last.get("role") != "user" or not isinstance(last.get("content"), str):
            raise BadCase(f"{self._where}.prompt needs a prompt in the case, or messages that end with the user's text")
        asked = self._render(msgspec.structs.replace(case, prompt=last["content"], messages=before))
        return msgspec.structs.replace(case, messages=[*before, {**last, "content": asked}])

    def _render(self, case: EvalCase) -> str:
        assert self._template is not None
        try:
            return self._template.render(case)
        except ConfigurationError as error:
            raise BadCase(str(error)) from error


def read_prompts(given: object, folder: Path) -> dict[str, CasePrompt]:
    """The prompts of a suite by their names; ConfigurationError says what is wrong with one."""
    if not isinstance(given, Mapping) or not given:
        raise ConfigurationError(f"prompts must be a mapping of names to prompts, got {given!r}")
    return {str(name): _read_prompt(one, f"prompts.{name}", folder) for name, one in given.items()}


def _read_prompt(given: Any, where: str, folder: Path) -> CasePrompt:
    """A prompt: as it is, a mapping, or a text file, which is a template if it has `{{` and else a system prompt."""
    if isinstance(given, CasePrompt):
        return given
    if isinstance(given, Mapping):
        reject_unknown(given, PROMPT_KEYS, where)
        return CasePrompt(given.get("system_prompt"), given.get("prompt"), where=where)
    if not isinstance(given, str | Path):
        raise ConfigurationError(f"{where} must be a text file's path, or a mapping with {' or '.join(PROMPT_KEYS)}")
    text = _read_file(folder / given, where).removesuffix("\n")
    return CasePrompt(prompt=text, where=where) if "{{" in text else CasePrompt(text, where=where)


def _read_file(path: Path, where: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE + 1)
        if len(content) > _MAX_FILE:
            raise ConfigurationError(f"{where}: {path} is larger than {_MAX_FILE:,} bytes")
        return content.decode("utf-8-sig")
    except OSError as error:
        words = "for the words themselves write a mapping, {system_prompt: …} or {prompt: …}"
        raise ConfigurationError(f"{where}: cannot read {path}: {error.strerror}; {words}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{where}: {path} is not UTF-8 text") from error


Select = Literal["random", "balanced", "fixed"]
EXAMPLE_KEYS = ("from", "n", "seed", "select", "fields")
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

    reject_unknown(raw, EXAMPLE_KEYS, "examples", file=path)
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
