"""Labels by people: read from a CSV or JSONL file, or from the run in which `steelyard label` wrote them down."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from steelyard.errors import ConfigurationError, SuiteError
from steelyard.journal.files import LABELS
from steelyard.journal.labels import LabelLog, answer_digest
from steelyard.run.audit import STRATA, Drawn, draw
from steelyard.run.result import Result
from steelyard.scoring.judge.calibration import PASS_FROM, LabelKind
from steelyard.stats.formatting import trim
from steelyard.suite.sources import CaseColumns, CsvSource, JsonlSource, found

_WORDS = {"true": 1.0, "pass": 1.0, "yes": 1.0, "false": 0.0, "fail": 0.0, "no": 0.0}
_MAX_ID_CHARS = 40
LABEL = "label"
LABELLER = "label_"
"""How the column of one of several labellers begins: `label_anna`."""


class Label(msgspec.Struct, frozen=True):
    """What people said of one answer, and where."""

    value: float
    """The mean of what they said."""
    line: int
    names_trial: bool
    votes: dict[str, float]
    """By column."""
    stratum: str | None = None
    """Of an audit: what the answer was drawn from."""
    stratum_size: int | None = None


Labels = dict[tuple[str, int], Label]


def read_labels(path: Path) -> Labels:
    """The labels of a file, by case and trial; an error with its line for one that cannot be used."""
    labels: Labels = {}
    for line, row in _rows(path):
        if row.get("stratum") and not any(row.get(name) not in (None, "") for name in _columns(row)):
            continue  # drawn, and not labelled
        try:
            place, label = _label(row, line)
        except ValueError as error:
            raise SuiteError(str(error), path=path, line=line) from error
        if place in labels:
            trial = f", trial {place[1]}," if place[1] else ""
            message = f"case {quoted(place[0])}{trial} has a label already, in line {labels[place].line}"
            raise SuiteError(message, path=path, line=line)
        labels[place] = label
    if not labels:
        raise SuiteError("holds no labels", path=path)
    return labels


def own_labels(run: Path) -> Labels:
    """The labels that `steelyard label` wrote down in a run; an error where there are none."""
    log = LabelLog(run)
    if not log.exists:
        raise ConfigurationError(f"{run} has no labels: `steelyard label {run}` asks for them, --labels names a file")
    labels = labels_of_sample(*sample(run, log), log)
    if not labels:
        raise ConfigurationError(f"{run / LABELS} holds no labels of answers as they are now")
    return labels


def sample(run: Path, log: LabelLog) -> tuple[list[Drawn], dict[str, int]]:
    """The answers of a run that are to be labelled, in the order of the sample, and how large the strata are.

    A run in which nothing was scored is one stratum.
    """
    settings = log.settings
    assert settings is not None
    drawn, sizes = draw(Result.load(run).iter_responses(), settings.count, settings.seed, unscored=True)
    if any(stratum is not None for stratum in sizes):
        drawn = [one for one in drawn if one.stratum is not None]
    return drawn, {stratum: size for stratum, size in sizes.items() if stratum is not None}


def labels_of_sample(drawn: list[Drawn], sizes: dict[str, int], log: LabelLog) -> Labels:
    """What was said of the answers of a sample, in the form that a file of labels has.

    A label of an answer that a later launch replaced is left out.
    """
    by_labeller = log.current
    labels: Labels = {}
    for number, one in enumerate(drawn, 1):
        digest, votes = answer_digest(one.answer), {}
        for labeller, theirs in by_labeller.items():
            given = theirs.get((one.id, one.trial))
            if given is not None and given.label is not None and given.answer == digest:
                votes[LABEL if len(by_labeller) == 1 else f"{LABELLER}{labeller}"] = given.label
        if votes:
            size = None if one.stratum is None else sizes[one.stratum]
            value = math.fsum(votes.values()) / len(votes)
            labels[one.id, one.trial] = Label(value, number, True, votes, one.stratum, size)
    return labels


def label_kind(labels: Labels) -> LabelKind:
    """What the labels are: grades, unless each person only ever said 0 or 1."""
    plain = all(vote in (0.0, 1.0) for label in labels.values() for vote in label.votes.values())
    return "pass/fail" if plain else "graded"


def is_undecided(label: Label, kind: LabelKind) -> bool:
    """Whether as many people passed the answer as failed it: then there is nothing to agree with."""
    return kind == "pass/fail" and label.value == PASS_FROM


def quoted(case_id: str) -> str:
    """A case's id for a message."""
    return repr(trim(case_id, _MAX_ID_CHARS))


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file of either kind, read as files of cases are: all columns go into the metadata of a case."""
    source = CsvSource if path.suffix.lower() == ".csv" else JsonlSource
    for line, case in source(path, lambda row: CaseColumns({"prompt": "label"}, row)).read():
        yield line or 0, case.metadata


def _columns(row: dict[str, Any]) -> list[str]:
    return [name for name in row if name == LABEL or str(name).startswith(LABELLER)]


def _label(row: dict[str, Any], line: int) -> tuple[tuple[str, int], Label]:
    columns = _columns(row)
    for name in ("id", LABEL):
        if name not in row and not (name == LABEL and columns):
            raise ValueError(f"has no {name!r}; columns: {', '.join(map(str, row)) or 'none'}")
    trial = row.get("trial")
    names_trial = trial is not None and trial != ""
    # Of several labellers each labels what they like; a file with one column has a label in each row.
    labelled = [name for name in columns if row[name] is not None and row[name] != ""] if len(columns) > 1 else columns
    if not labelled:
        raise ValueError(f"has no label: {', '.join(columns)} are empty")
    votes = {name: _value(row[name]) for name in labelled}
    stratum, size = row.get("stratum") or None, row.get("stratum_size")
    if stratum is not None and stratum not in STRATA:
        raise ValueError(f"stratum must be one of {', '.join(STRATA)}, got {found(stratum)}")
    count = None if stratum is None or size in (None, "") else _trial(size)
    label = Label(math.fsum(votes.values()) / len(votes), line, names_trial, votes, stratum, count)
    return (_id(row["id"]), _trial(trial) if names_trial else 0), label


def _id(value: Any) -> str:
    """The id as text; a number in JSON is taken as it is in a file of cases."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise ValueError(f"id must be text or a number, got {found(value)}")
    return str(value)


def _trial(value: Any) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"trial must be a whole number from 0 on, got {found(value)}")
    return value


def _value(value: Any) -> float:
    """A label as a number: what a person said in words is 1 or 0."""
    number = math.nan
    if isinstance(value, str):
        word = value.strip().lower()
        try:
            number = _WORDS[word] if word in _WORDS else float(word)
        except ValueError:
            number = math.nan
    elif isinstance(value, bool | int | float):
        number = float(value) if -1 < value < 2 else math.nan
    if not 0 <= number <= 1:
        words = "/".join(_WORDS)
        raise ValueError(f"label must be a number within 0..1 or one of {words}, got {found(value)}")
    return number
