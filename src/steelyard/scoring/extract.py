"""Scores of a part of the answer, and of several scores together: `extract` before any scorer, and `combined`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from steelyard.errors import ConfigurationError, suggestion
from steelyard.patterns import PATTERNS_VERSION, Pattern
from steelyard.protocols import Identity, InvocationContext, RepeatedJudge, Scorer, ScoreResult, ScoringContext, Target
from steelyard.records import EvalCase, InvocationResponse, Sample, Score
from steelyard.scoring.base import PlainScorer, as_scorer, limits_of, shown, takes_context, with_context
from steelyard.scoring.pipeline import LimitedScorer
from steelyard.scoring.structured import read_json

_KINDS = ("pattern", "json", "last_line", "code_block")
_CODE_FENCE = re.compile(r"[ ]{0,3}(`{3,}|~{3,})[ ]*([\w+#.-]*)")
_MAX_KEPT = 1_000


class Extract:
    """What part of an answer is scored: a step, or a list of steps that are taken one after another.

    A step is `last_line`, `code_block`, or a mapping: `{pattern: …}` (its first group, or all of it), `{json: a.b.0}`,
    `{code_block: python}`; `take: last` takes the last match or block instead of the first.
    """

    def __init__(self, given: Any) -> None:
        steps = given if isinstance(given, list) else [given]
        if not steps:
            raise ConfigurationError("extract names no step")
        self._steps = [_read_step(step) for step in steps]
        self.given = given

    def of(self, text: str) -> tuple[str | None, str]:
        """The part that is meant, and nothing; or None, and what was not found."""
        for step in self._steps:
            found = step.find(text)
            if found is None:
                return None, f"the answer has no {step.what}: {shown(text.strip())}"
            text = found
        return text, ""

    def identity(self) -> Identity:
        """What it was given, and which engine reads its patterns."""
        return {"steps": self.given, "patterns": PATTERNS_VERSION}


class _Step(NamedTuple):
    """One step: what it looks for, in words, and how."""

    what: str
    find: Callable[[str], str | None]


def _read_step(given: Any) -> _Step:
    if isinstance(given, str) and given in ("last_line", "code_block"):
        given = {given: True}
    if not isinstance(given, Mapping) or sum(kind in given for kind in _KINDS) != 1:
        raise ConfigurationError(
            f"extract takes last_line, code_block, or a mapping with pattern or json, got {given!r}"
        )
    (kind,) = (kind for kind in _KINDS if kind in given)
    value, take = given[kind], given.get("take", "first")
    for key in given:
        if key not in (kind, "take", "ignore_case") or (key == "ignore_case" and kind != "pattern"):
            raise ConfigurationError(f"extract: {kind} does not take {key!r}; {suggestion(str(key), (kind, 'take'))}")
    if take not in ("first", "last"):
        raise ConfigurationError(f"extract: take must be first or last, got {take!r}")
    if kind == "pattern":
        return _pattern_step(value, given.get("ignore_case", False), last=take == "last")
    if kind == "json":
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise ConfigurationError(f"extract: json must be a path such as answer.0.text, got {value!r}")
        return _Step(f"JSON with {str(value)!r}", partial(_at_path, str(value)))
    if kind == "code_block":
        if value is not True and not isinstance(value, str):
            raise ConfigurationError(f"extract: code_block must be true or a language, got {value!r}")
        language = "" if value is True else value
        named = f"code block in {language}" if language else "code block"
        return _Step(named, partial(_code_block, language.lower(), last=take == "last"))
    if value is not True:
        raise ConfigurationError(f"extract: last_line takes no argument, got {value!r}")
    return _Step("line", _last_line)


def _pattern_step(source: Any, ignore_case: Any, *, last: bool) -> _Step:
    if not isinstance(source, str) or not source:
        raise ConfigurationError(f"extract: pattern must be a text, got {source!r}")
    if not isinstance(ignore_case, bool):
        raise ConfigurationError(f"extract: ignore_case must be true or false, got {ignore_case!r}")
    pattern = Pattern(source, ignore_case=ignore_case)

    def find(text: str) -> str | None:
        match = pattern.last(text) if last else pattern.search(text)
        if match is None:
            return None
        groups = [group for group in match.groups() if group is not None]
        return str(groups[0] if groups else match[0]).strip()

    return _Step(f"match of {shown(source)}", find)


def _last_line(text: str) -> str | None:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)


def _code_block(language: str, text: str, *, last: bool) -> str | None:
    """The first or last block between code fences, in one language where named; one without an end is the rest."""
    found: list[str] = []
    opened, kept = "", False
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        code_fence = _CODE_FENCE.match(line)
        if not opened and code_fence is not None:
            opened, kept, lines = code_fence[1], not language or code_fence[2].lower() == language, []
        elif opened and code_fence is not None and code_fence[1].startswith(opened) and not code_fence[2]:
            found += ["".join(lines)] if kept else []
            opened = ""
        elif opened:
            lines.append(line)
    if opened and kept:
        found.append("".join(lines))
    return None if not found else found[-1 if last else 0].strip("\n")


def _at_path(path: str, text: str) -> str | None:
    try:
        value: Any = read_json(text)
    except ValueError:
        return None
    for part in path.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.lstrip("-").isdecimal() and -len(value) <= int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def extracting(scorer: object, extract: Any) -> Scorer | RepeatedJudge:
    """A scorer, or a judge, of a part of the answer alone; an answer without that part fails."""
    step = extract if isinstance(extract, Extract) else Extract(extract)
    if isinstance(scorer, RepeatedJudge):
        return ExtractingJudge(scorer, step)
    made = as_scorer(scorer)
    if isinstance(made, LimitedScorer):  # the limits stay outermost
        return LimitedScorer(ExtractingScorer(made.scorer, step), limits_of(made))
    return ExtractingScorer(made, step)


class ExtractingScorer:
    """A scorer of a part of the answer."""

    def __init__(self, scorer: Scorer, extract: Extract) -> None:
        self._scorer, self._extract = scorer, extract
        self.name = scorer.name
        limits = limits_of(scorer)
        self.timeout, self.parallelism, self.retries = limits.timeout, limits.parallelism, limits.retries
        self.immediate = getattr(scorer, "immediate", False) is True
        self.takes_context = takes_context(scorer)
        self.sandbox_provider = getattr(scorer, "sandbox_provider", None)

    def identity(self) -> Identity:
        return {**self._scorer.identity(), "extract": self._extract.identity()}

    def score(
        self, case: EvalCase, response: InvocationResponse, context: ScoringContext | None = None
    ) -> ScoreResult | Awaitable[ScoreResult]:
        """The score of the part, with what it was; a failed one where there is none."""
        found, missing = self._extract.of(response.response_text or "")
        part = msgspec.structs.replace(response, response_text=found or "")
        if found is None:
            return self._failed(case, part, missing)
        score: Any = with_context(self._scorer.score, context) if self.takes_context else self._scorer.score
        answer = score(case, part)
        return _later(answer, found) if inspect.isawaitable(answer) else _noted(answer, found)

    def _failed(self, case: EvalCase, empty: InvocationResponse, reason: str) -> Score | None:
        """A failed score; None where the scorer has nothing to say of this case, whatever the answer."""
        if isinstance(self._scorer, PlainScorer):
            score: Any = self._scorer
            if score.score(case, empty) is None:
                return None
            failed: Score = score._score(False, reason)
            return failed
        return Score(self.name, 0.0, False, reason)


async def _later(answer: Awaitable[ScoreResult], found: str) -> ScoreResult:
    return _noted(await answer, found)


def _noted(answer: ScoreResult, found: str) -> ScoreResult:
    """The scores with what they are of."""
    kept = found if len(found) <= _MAX_KEPT else f"{found[: _MAX_KEPT - 1]}…"
    for score in answer if isinstance(answer, list) else [answer]:
        if isinstance(score, Score):
            score.extracted = kept
    return answer


class ExtractingJudge:
    """A judge that sees a part of the answer alone."""

    def __init__(self, judge: RepeatedJudge, extract: Extract) -> None:
        self._judge, self._extract = judge, extract

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked of a judge, such as its target and its calibration."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._judge, name)

    @property
    def name(self) -> str:
        return self._judge.name

    @property
    def by(self) -> str:
        return self._judge.by

    @property
    def when(self) -> str:
        return self._judge.when

    def identity(self) -> Identity:
        return {**self._judge.identity(), "extract": self._extract.identity()}

    def applies(self, case: EvalCase) -> bool:
        return self._judge.applies(case)

    def fingerprint(self, case: EvalCase, response: InvocationResponse) -> str:
        return self._judge.fingerprint(case, self._part(response)[0])

    def bound(self, wrap: Callable[[Target], Target]) -> RepeatedJudge:
        return ExtractingJudge(self._judge.bound(wrap), self._extract)

    async def sample(self, case: EvalCase, response: InvocationResponse, context: InvocationContext) -> Sample:
        """What the judge says of the part; without one it is not asked, and the answer fails."""
        part, missing = self._part(response)
        return (
            Sample(score=0.0, passed=False, reason=missing)
            if missing
            else await self._judge.sample(case, part, context)
        )

    def combine(self, samples: Sequence[Sample], *, escalated: bool = False) -> Score:
        return self._judge.combine(samples, escalated=escalated)

    def _part(self, response: InvocationResponse) -> tuple[InvocationResponse, str]:
        found, missing = self._extract.of(response.response_text or "")
        return msgspec.structs.replace(response, response_text=found or ""), missing
