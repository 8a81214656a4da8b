"""Labelling the answers of a run: a blind, random, resumable sample, one answer at a time, in whatever it is shown."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.journal.files import LABELS
from steelyard.journal.labels import PASS_FAIL, Action, GivenLabel, LabelLog, answer_digest, given
from steelyard.journal.lock import is_locked
from steelyard.journal.manifest import read_manifest
from steelyard.records import Record
from steelyard.report.case import ChatMessage, as_text, question, turns
from steelyard.report.csv import cell
from steelyard.report.records import Expectations, RunRecords, SuiteCase, open_suite
from steelyard.run.audit import Drawn
from steelyard.run.calibration import Calibrated, calibrated
from steelyard.run.labels import LABEL, LABELLER, labels_of_sample, sample
from steelyard.scoring.judge.calibration import error_rates_text
from steelyard.stats.formatting import counted, safe_text
from steelyard.suite.evalset import EvalSet

MAX_NAME_CHARS = 40
MAX_COMMENT_CHARS = 2_000

Asked = Callable[[Record], SuiteCase | None]


class LabelItem(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to label. Nothing in it tells what scorers or judges made of it."""

    id: str
    trial: int
    question: str
    answer: str
    expected: str | None
    conversation: str | None
    """The whole exchange, tool calls included, where there is more to it than question and answer."""


class LabelProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far one labeller has come."""

    labelled: int
    skipped: int
    total: int
    counts: dict[str, int]
    """How often each grade was given, from the worst to the best."""
    can_undo: bool


class LabelSession:
    """One person labelling one run. Each label is on the disk before the next answer is shown.

    The sample is the run's: each labeller gets the same answers in the same order. `count`, `seed` and `grades` are
    for the first who does; a larger `count` later adds answers. With `skipped`, those that were skipped come again.
    Questions and what is expected are taken from `suite`, else from the run's own, or as `asked` finds them.
    """

    def __init__(
        self,
        run: Path,
        labeller: str,
        *,
        count: int | None = None,
        seed: int | None = None,
        grades: tuple[str, ...] | None = None,
        skipped: bool = False,
        suite: EvalSet | None = None,
        asked: Asked | None = None,
    ) -> None:
        self.run, self.labeller = run, checked_name(labeller)
        self._records = RunRecords(run)
        self._asked = asked or _asked_of(run, suite)
        self._log = LabelLog(run)
        if (writer := is_locked(run)) is not None:
            raise ConfigurationError(
                f"{run} is being written by process {writer.pid or '?'}: label it when it has ended, "
                "as the sample would change with each new answer"
            )
        if not len(self._records):
            raise ConfigurationError(f"{run} has no answers to label")
        settings = self._log.begin(count=count, seed=seed, grades=grades)
        self.grades = settings.grades
        self._drawn, self._sizes = sample(run, self._log)
        if not self._drawn:
            raise ConfigurationError(f"{run} has no answers to label: each of its cases ended in an error")
        self._places = {(one.id, one.trial): one for one in self._drawn}
        self._digests = {place: answer_digest(one.answer) for place, one in self._places.items()}
        self._again = skipped
        self._passed_over: set[tuple[str, int]] = set()

    @property
    def keys(self) -> dict[str, int]:
        """What to press for each grade: p and f, the grade itself where that is one digit, else its position."""
        if self.grades == PASS_FAIL:
            return {"f": 0, "p": 1}
        plain = all(len(grade) == 1 and grade.isdecimal() for grade in self.grades)
        return {grade if plain else str(number + 1): number for number, grade in enumerate(self.grades)}

    @property
    def _own(self) -> dict[tuple[str, int], GivenLabel]:
        """This person's labels of the answers as they are now, the latest last."""
        own = self._log.current.get(self.labeller, {})
        return {place: one for place, one in own.items() if self._digests.get(place) == one.answer}

    @property
    def progress(self) -> LabelProgress:
        """How far this person has come."""
        own = self._own.values()
        counts = Counter(one.grade for one in own if one.action == "label")
        return LabelProgress(
            labelled=sum(one.action == "label" for one in own),
            skipped=sum(one.action == "skip" for one in own),
            total=len(self._drawn),
            counts={grade: counts[grade] for grade in self.grades},
            can_undo=bool(own),
        )

    @property
    def current(self) -> LabelItem | None:
        """The answer to label now; None when all are done."""
        drawn = self._next()
        return None if drawn is None else self._item(drawn)

    def _next(self) -> Drawn | None:
        own = self._own
        left = (one for one in self._drawn if (one.id, one.trial) not in own)
        found = next(left, None)
        if found is None and self._again:
            skipped = (place for place, one in own.items() if one.action == "skip" and place not in self._passed_over)
            found = next((self._places[place] for place in skipped), None)
        return found

    def label(self, place: tuple[str, int], grade: int, comment: str = "") -> None:
        """Write down a grade, by its position on the scale, for an answer of the sample."""
        if not 0 <= grade < len(self.grades):
            raise ConfigurationError(f"a grade is a position from 0 to {len(self.grades) - 1}, got {grade}")
        self._append(place, "label", comment, grade)

    def skip(self, place: tuple[str, int], comment: str = "") -> None:
        """Write down that this person skips an answer."""
        self._append(place, "skip", comment)
        self._passed_over.add(place)

    def undo(self) -> bool:
        """Take back the last label or skip; whether there was anything."""
        place = next(reversed(self._own), None)
        if place is None:
            return False
        self._append(place, "undo")
        self._passed_over.discard(place)
        return True

    def agreement(self) -> list[str]:
        """How well judges agree with all labels so far, and how many more it takes, in sentences.

        Of all answers together: it says nothing about one that is still to be labelled.
        """
        labels = labels_of_sample(self._drawn, self._sizes, self._log)
        if not labels:
            return ["no labels yet"]
        return agreement_lines(calibrated(self.run, labels, self.run / LABELS, judges_needed=False))

    def to_csv(self) -> str:
        """All labels of all labellers, as `steelyard calibrate --labels` reads them."""
        labels = labels_of_sample(self._drawn, self._sizes, self._log)
        current = self._log.current
        labellers = [name for name, own in current.items() if any(one.label is not None for one in own.values())]
        alone = len(current) == 1
        columns = [LABEL] if alone else [f"{LABELLER}{name}" for name in labellers]
        comments = ["comment"] if alone else [f"comment_{name}" for name in labellers]

        def cells(one: Drawn) -> list[object]:
            place = (one.id, one.trial)
            votes = labels[place].votes
            own = [current[name].get(place) for name in labellers]
            return [
                *(self._shown(votes[column]) if column in votes else "" for column in columns),
                *(cell(given.comment or "") if given is not None else "" for given in own),
            ]

        rows = [one for one in self._drawn if (one.id, one.trial) in labels]
        return labels_csv(rows, self._sizes, [*columns, *comments], cells)

    def _shown(self, label: float) -> str:
        return PASS_FAIL[round(label)] if self.grades == PASS_FAIL else repr(label)

    def _append(self, place: tuple[str, int], action: Action, comment: str = "", grade: int | None = None) -> None:
        if place not in self._places:
            raise ConfigurationError("that answer is not in the sample")
        about = (place, self.labeller, action, self._places[place].answer)
        comment = comment.strip()[:MAX_COMMENT_CHARS]
        self._log.append(given(*about, grade=grade, grades=self.grades, comment=comment))

    def _item(self, drawn: Drawn) -> LabelItem:
        record = next(record for _, record in self._records.of_case(drawn.id) if record.trial == drawn.trial)
        asked = self._asked(record)
        case = None if asked is None else asked.case
        expected = None if case is None else case.expected
        exchange = turns(record, case)
        more = len(exchange) > 2 or any(turn.calls for turn in exchange)
        return LabelItem(
            id=drawn.id,
            trial=drawn.trial,
            question=question(record, case),
            answer=record.response_text or "",
            expected=None if expected is None else as_text(expected),
            conversation=_written(exchange) if more else None,
        )


def _written(exchange: Iterable[ChatMessage]) -> str:
    parts = []
    for turn in exchange:
        calls = [f"calls {call.name} {as_text(call.arguments)}" for call in turn.calls]
        parts.append("\n".join(line for line in (f"{turn.role}:", turn.text, *calls) if line))
    return "\n\n".join(parts)


def _asked_of(run: Path, suite: EvalSet | None) -> Asked:
    manifest = read_manifest(run)
    suite = open_suite(run, manifest)[0] if suite is None else suite
    return lambda record: Expectations(suite, manifest).of(record)


def checked_name(labeller: str) -> str:
    """A labeller's name, if it can be a column of a table."""
    name = labeller.strip()
    if not name or len(name) > MAX_NAME_CHARS or safe_text(name) != name:
        raise ConfigurationError(
            f"a labeller's name has 1 to {MAX_NAME_CHARS} letters, digits and signs, got {safe_text(labeller)!r}"
        )
    return name


def agreement_lines(found: Calibrated) -> list[str]:
    """What labels say of the judges and of the pass rate, a sentence each."""
    lines = []
    for one in found.judges:
        trusted = "trusted" if one.trusted else "not trusted yet" if one.scarce else "not trusted"
        lines.append(f"{safe_text(one.judge)}: {trusted}; {error_rates_text(one)} on {counted(one.n, 'label')}")
        lines.append(f"  {one.reason}")
    if not found.judges:
        lines.append("no judge has scored these answers")
    rate = found.correction
    if rate is not None and rate.rate is not None and rate.raw is not None and rate.ci95 is not None:
        low, high = rate.ci95
        lines.append(f"pass rate: {rate.raw:.1%} raw, {rate.rate:.1%} corrected, 95 % CI {low:.1%} – {high:.1%}")
    elif rate is not None:
        lines.append(f"no corrected pass rate yet: {rate.why_not}")
    return lines


def labels_csv(
    drawn: Iterable[Drawn], sizes: dict[str, int], columns: Sequence[str], cells: Callable[[Drawn], Sequence[object]]
) -> str:
    """A table of answers for labels, or with them, that `steelyard calibrate` reads."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["id", "trial", *columns, "stratum", "stratum_size", "answer"])
    for one in drawn:
        strata = ["", ""] if one.stratum is None else [one.stratum, sizes[one.stratum]]
        rows.writerow([one.id, one.trial, *cells(one), *strata, cell(one.answer)])
    return text.getvalue()
