"""One case in full, all of its trials: as text for a terminal, as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from steelyard.errors import ConfigurationError, suggestion
from steelyard.journal.manifest import read_manifest
from steelyard.records import EvalCase, Record, Score
from steelyard.report.conversation import as_text, turns
from steelyard.report.expectations import Expectations, open_suite
from steelyard.report.run_records import RunRecords, state_of
from steelyard.report.visible import visible
from steelyard.stats.wording import format_seconds
from steelyard.suite.evalset import EvalSet

_IDS_TO_SUGGEST = 5_000


class OneCase:
    """The records of a case, and the case itself where the suite is at hand."""

    def __init__(self, run: Path, case_id: str, suite: EvalSet | None = None) -> None:
        records = RunRecords(run)
        self.run, self.found = run, records.of_case(case_id)
        if not self.found:
            ids = records.some_ids(_IDS_TO_SUGGEST)
            hint = suggestion(case_id, ids) if len(ids) <= 20 or _is_like_one(case_id, ids) else ""
            raise ConfigurationError(f"{run} has no record of a case {case_id!r}{'; ' + hint if hint else ''}")
        manifest = read_manifest(run)
        self.case = _find(case_id, open_suite(run, manifest)[0] if suite is None else suite)
        asked = None if self.case is None else Expectations(_alone(self.case), manifest).of(self.found[0][1])
        self.edited = asked is not None and asked.edited

    def to_json(self) -> dict[str, Any]:
        """Whole records as they stand in `outputs.jsonl`, each with its byte there, and the case."""
        return {
            "id": self.found[0][1].id,
            "case": None if self.case is None else msgspec.to_builtins(self.case),
            "case_edited_since": self.edited,
            "records": [{"offset": offset, **msgspec.to_builtins(record)} for offset, record in self.found],
        }

    def to_text(self) -> str:
        """All of it for a terminal, which nothing in it can steer."""
        return "\n".join(visible(line) for offset, record in self.found for line in self._lines(offset, record))

    def _lines(self, offset: int, record: Record) -> Iterator[str]:
        trial = f" trial {record.trial + 1}" if len(self.found) > 1 else ""
        yield f"{record.id}{trial}: {state_of(record)}"
        if record.error is not None:
            yield f"  error: {record.error}"
        for turn in turns(record, self.case):
            yield f"  {turn.role}:"
            yield from _indented(turn.text)
            for call in turn.calls:
                yield f"    calls {call.name}"
                yield from _indented(as_text(call.arguments), "      ")
        if self.case is not None and self.case.expected is not None:
            yield f"  expected{' (edited since)' if self.edited else ''}:"
            yield from _indented(as_text(self.case.expected))
        for score in record.scores:
            yield from _score(score)
        yield f"  {_times(record)}"
        yield f"  {self.run}/outputs.jsonl, byte {offset}"


def _find(case_id: str, suite: EvalSet | None) -> EvalCase | None:
    """The case of that id, wherever in the suite it stands now."""
    try:
        return next((case for case in suite or () if case.id == case_id), None)
    except (ConfigurationError, OSError):
        return None


def _alone(case: EvalCase) -> EvalSet:
    return EvalSet("one", [case])


def _is_like_one(case_id: str, ids: list[str]) -> bool:
    return suggestion(case_id, ids).startswith("did you mean")


def _indented(text: str, margin: str = "    ") -> Iterator[str]:
    for line in text.splitlines():
        yield f"{margin}{line}"


def _score(score: Score) -> Iterator[str]:
    verdict = {True: "passed", False: "failed", None: ""}[score.passed]
    value = "–" if score.value is None else f"{score.value:.3f}"
    spread = "" if score.std_dev is None else f" ± {score.std_dev:.3f}"
    marks = [name for name in ("escalated", "overruled", "advisory") if getattr(score, name)]
    by = f" by {score.by}" if score.by else ""
    yield " ".join(part for part in (f"  score {score.name}: {value}{spread}", verdict, *marks) if part) + by
    yield from _indented(score.reason or "")
    errors = iter(score.errors)  # each is of a sample that has no value, in their order
    for sample, reason in zip(score.samples or [], score.reasons or [], strict=False):
        said = (reason if sample is not None else next(errors, reason)) or ""
        yield f"    {'–' if sample is None else f'{sample:.2f}'}  {' '.join(said.split())}".rstrip()
    for error in errors:
        yield from _indented(error)


def _times(record: Record) -> str:
    parts = [f"attempts {record.attempts}", f"in all {format_seconds(record.elapsed)}"]
    for name, label in {"time_to_first_token": "first token", "time_to_last_token": "last token"}.items():
        if (value := getattr(record, name)) is not None:
            parts.append(f"{label} {format_seconds(value)}")
    for name, label in {"num_tokens_input": "tokens in", "num_tokens_output": "out", "cost": "cost"}.items():
        if (value := getattr(record, name)) is not None:
            parts.append(f"{label} {value:,}")
    return ", ".join(parts)
