"""`steelyard calibrate RUN`: how well a run's judges agree with people's labels, and whether to trust them."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from steelyard.cli.main import FAILED_GATE
from steelyard.cli.output import say, show, show_json
from steelyard.errors import ConfigurationError, SuiteError, suggestion
from steelyard.journal.files import CORRECTION, write_json
from steelyard.journal.manifest import now
from steelyard.records import Record, Score
from steelyard.report.formats import write_text
from steelyard.run.audit import STRATA, correct, correct_by_other, draw, labelled_strata, stratum_of
from steelyard.run.result import Result
from steelyard.scoring.judge.calibration import (
    PASS_FROM,
    Agreement,
    Judged,
    LabelKind,
    OldCalibration,
    agreement,
    calibration,
    read_calibrations,
)
from steelyard.stats.agreement import MIN_RATE, HumanCeiling, KindAgreement, human_ceiling
from steelyard.stats.correction import (
    MIN_AUDIT,
    Correction,
    ErrorRates,
    Stratum,
    weighted_error_rates,
)
from steelyard.stats.formatting import counted, safe_text, trim
from steelyard.stats.metrics import Metrics, correction_note
from steelyard.suite.sources import CaseColumns, CsvSource, JsonlSource, found

_WORDS = {"true": 1.0, "pass": 1.0, "yes": 1.0, "false": 0.0, "fail": 0.0, "no": 0.0}
_WIDTH = 80
_MAX_ID_CHARS = 40
_LABEL = "label"
_LABELLER = "label_"
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


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """The judges of a run and its pass rate, by labels of an audit."""

    judges: list[Agreement]
    strata: list[Stratum]
    corrected: Correction


class JudgeKey(msgspec.Struct, frozen=True, order=True):
    """One judge of a run: the score's name, and who gave it."""

    name: str
    by: str


Labels = dict[tuple[str, int], Label]


@click.command("calibrate")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--labels",
    "labels_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Labels by people: CSV or JSONL with `id`, `label` (0..1, pass/fail, yes/no; of several people `label_NAME` "
    "each) and, where a case has several answers, `trial`.",
)
@click.option(
    "--labels-of",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="The labels are of the answers of this other run, by the same scorers and judges: RUN's pass rate is "
    "corrected by the error rates that they show there.",
)
@click.option(
    "--audit",
    type=click.IntRange(MIN_AUDIT),
    metavar="N",
    help="Draw N answers at random from each stratum (passed, failed, overruled or confirmed by a judge) and write "
    "them to --out, a CSV file for labels.",
)
@click.option("--seed", type=int, default=0, help="What the draw of --audit depends on [default: 0].")
@click.option(
    "--min-agreement",
    type=click.FloatRange(0, 1),
    metavar="RATE",
    default=MIN_RATE,
    help="The sensitivity and specificity, or rho for graded labels, from which a judge is trusted "
    f"[default: {MIN_RATE:.2f}].",
)
@click.option("--judge", metavar="NAME", help="Only the judge with this name.")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Write the calibration to this file, for a suite to demand."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(
    run: Path,
    labels_path: Path | None,
    labels_of: Path | None,
    audit: int | None,
    seed: int,
    min_agreement: float,
    judge: str | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Compare the judges of RUN with labels by people.

    With pass/fail labels a judge is trusted when it passes at least --min-agreement of the answers that people
    passed and fails as many of those that they failed, with the one-sided 95 % lower end of each rate above 0.70;
    with grades, when Spearman's rho and its lower end reach the same. Exit 0 when every judge is trusted, 1 when one
    is not. No model is called.

    Labels of an --audit, or of another run (--labels-of), also give the pass rate without the verdicts' errors: it is
    kept in RUN/correction.json, and reports, pages and gates (`pass_rate_corrected>=0.8`) show it beside the raw one.
    """
    if (labels_path is None) == (audit is None):
        raise click.UsageError("give --labels FILE, or --audit N to draw answers for labels")
    if labels_of is not None and labels_path is None:
        raise click.UsageError("--labels-of needs --labels FILE")
    if audit is not None:
        return _draw(run, audit, seed, out)
    assert labels_path is not None
    _check_out(out)
    labels = read_labels(labels_path)
    kind = _kind(labels)
    labelled = labels_of or run
    correction = _corrected(run, labels_of, labels, labels_path) if kind == "pass/fail" else None
    strata = correction.strata if correction is not None and correction.strata else None
    pairs = _judged(labelled, labels, labels_path, judge, kind, needed=correction is None or judge is not None)
    ceiling = _ceiling(labels, kind)
    found = [
        agreement(
            key.name,
            key.by,
            judged,
            labels=kind,
            min_agreement=min_agreement,
            unscored=len(labels) - _undecided(labels, kind) - len(judged),
            ceiling=ceiling,
            weighted=None if strata is None else _weighted(labelled, strata, key),
        )
        for key, judged in sorted(pairs.items())
    ]
    if out is not None and found:
        _write(out, found, labels_path)
    if correction is not None:
        write_json(run / CORRECTION, correction)
    if as_json:
        show_json(found if correction is None else Audited(judges=found, strata=strata or [], corrected=correction))
    else:
        parts = [_described(one, _undecided(labels, kind)) for one in found]
        parts += [] if correction is None else ["\n".join(_correction(correction))]
        show("\n\n".join(parts))
    if out is not None and found:
        say(f"the calibration is in {out}")
    if correction is not None and correction.rate is not None:
        say(f"the corrected pass rate is in {run / CORRECTION}: report, view and gate show it")
    return 0 if all(one.trusted for one in found) else FAILED_GATE


def read_labels(path: Path) -> Labels:
    """The labels of a file, by case and trial; an error with its line for one that cannot be used."""
    labels: Labels = {}
    for line, row in _rows(path):
        if row.get("stratum") and row.get(_LABEL) in (None, ""):
            continue  # drawn, and not labelled
        try:
            place, label = _label(row, line)
        except ValueError as error:
            raise SuiteError(str(error), path=path, line=line) from error
        if place in labels:
            trial = f", trial {place[1]}," if place[1] else ""
            message = f"case {_quoted(place[0])}{trial} has a label already, in line {labels[place].line}"
            raise SuiteError(message, path=path, line=line)
        labels[place] = label
    if not labels:
        raise SuiteError("holds no labels", path=path)
    return labels


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file of either kind, read as files of cases are: all columns go into the metadata of a case."""
    source = CsvSource if path.suffix.lower() == ".csv" else JsonlSource
    for line, case in source(path, lambda row: CaseColumns({"prompt": "label"}, row)).read():
        yield line or 0, case.metadata


def _label(row: dict[str, Any], line: int) -> tuple[tuple[str, int], Label]:
    columns = [name for name in row if name == _LABEL or str(name).startswith(_LABELLER)]
    for name in ("id", _LABEL):
        if name not in row and not (name == _LABEL and columns):
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


def _draw(run: Path, count: int, seed: int, out: Path | None) -> int:
    """Write answers drawn at random from each stratum to a file for labels."""
    if out is None:
        raise click.UsageError("--audit needs --out FILE, where the answers to label go")
    if out.exists():
        raise ConfigurationError(f"{out} is there already, maybe with labels; it is not overwritten")
    from steelyard.report.csv import cell

    drawn, sizes = draw(Result.load(run).iter_responses(), count, seed)
    if not drawn:
        raise ConfigurationError(f"{run} has no answer with a verdict: there is nothing to audit")
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["id", "trial", _LABEL, "stratum", "stratum_size", "answer"])
    rows.writerows([one.id, one.trial, "", one.stratum, sizes[one.stratum], cell(one.answer)] for one in drawn)
    write_text(out, text.getvalue())
    shown = ", ".join(f"{name} {size:,}" for name, size in sorted(sizes.items()))
    say(f"{counted(len(drawn), 'answer')} to label in {out} (of {shown}): say pass or fail in the column `label`")
    return 0


def _corrected(run: Path, labels_of: Path | None, labels: Labels, path: Path) -> Correction | None:
    """What the labels make of the run's pass rate; None where they are its own and not drawn from its strata."""
    drawn = all(label.stratum is not None for label in labels.values())
    metrics = Result.load(run).typed_metrics
    if labels_of is not None:
        _refuse_other_judges(metrics, Result.load(labels_of).typed_metrics, run, labels_of)
        strata = _audited(labels_of, labels, path) if drawn else _plain_strata(labels_of, labels)
        found = correct_by_other(metrics, strata, drawn=drawn, labels_of=str(labels_of))
    elif drawn:
        found = correct(metrics, _audited(run, labels, path))
    else:
        return None
    return msgspec.structs.replace(found, labels_digest=_digest(path), created=now())


def _refuse_other_judges(metrics: Metrics, other: Metrics, run: Path, labels_of: Path) -> None:
    """Refuse labels of a run that was scored in another way: its error rates say nothing of this one's."""
    ways = [
        {name: sorted(score.by or []) for name, score in one.scores.items() if not score.advisory}
        for one in (metrics, other)
    ]
    for name in sorted(ways[0].keys() | ways[1].keys()):
        if ways[0].get(name) != ways[1].get(name):
            shown = [" ".join(way[name]) or "a scorer" if name in way else "nothing" for way in ways]
            raise ConfigurationError(
                f"{_quoted(name)} is scored by {shown[0]} in {run} and by {shown[1]} in {labels_of}: "
                f"error rates measured there are not those of this run; label answers of {run} instead"
            )


def _plain_strata(run: Path, labels: Labels) -> list[Stratum]:
    """How many of the labelled answers passed and failed there, and what people said of them."""
    met: list[tuple[str, bool]] = []
    for record in Result.load(run).iter_responses():
        label, stratum = labels.get((record.id, record.trial)), stratum_of(record)
        if label is not None and stratum is not None and label.value != PASS_FROM:
            met.append(("passed" if STRATA[stratum] else "failed", label.value > PASS_FROM))
    return labelled_strata(Counter(stratum for stratum, _ in met), met)


def _audited(run: Path, labels: Labels, path: Path) -> list[Stratum]:
    """The strata of the run with the labels that were drawn from them."""
    sizes = Counter(stratum_of(record) for record in Result.load(run).iter_responses())
    for label in labels.values():
        if label.stratum_size is not None and label.stratum_size != sizes[label.stratum]:
            message = f"stratum {label.stratum!r} had {label.stratum_size:,} answers when it was drawn from, and has "
            raise SuiteError(f"{message}{sizes[label.stratum]:,} now: draw again", path=path, line=label.line)
    known = {name: size for name, size in sizes.items() if name is not None}
    labelled = [(label.stratum or "", label.value > PASS_FROM) for label in labels.values() if label.value != PASS_FROM]
    return labelled_strata(known, labelled)


def _weighted(run: Path, strata: list[Stratum], key: JudgeKey) -> ErrorRates | None:
    """A judge's error rates over the strata that it decided."""
    asked = Result.load(run).typed_metrics.scores[key.name].escalated
    mine = [stratum for stratum in strata if stratum.name.startswith("judge ")] if asked else strata
    return weighted_error_rates(mine)


def _correction(found: Correction) -> list[str]:
    """The pass rate as measured and as labels correct it, with the strata."""
    lines = ["pass rate corrected by labels" + (" of another run" if found.labels_of else "")]
    if found.rate is None or found.raw is None or found.ci95 is None:
        lines.append(_row("no corrected rate", found.why_not or ""))
    else:
        low, high = found.ci95
        lines.append(_row("raw", f"{found.raw:.1%}"))
        lines.append(_row("corrected", f"{found.rate:.1%}   95 % CI {low:.1%} – {high:.1%}"))
        notes = correction_note(found).split(", ")[1:]
        lines += [_row("", note) for note in notes]
    if found.labels_of and found.sensitivity is not None and found.specificity is not None:
        rates = f"sensitivity {found.sensitivity:.3f}, specificity {found.specificity:.3f}"
        lines.append(_row("the verdict there", rates))
    for one in found.strata:
        right = f"{one.right:,} of {one.labelled:,} labelled are right"
        lines.append(_row(one.name, f"{counted(one.size, 'answer')}, {right}"))
    return lines


def _kind(labels: Labels) -> LabelKind:
    """What the labels are: grades, unless each person only ever said 0 or 1."""
    plain = all(vote in (0.0, 1.0) for label in labels.values() for vote in label.votes.values())
    return "pass/fail" if plain else "graded"


def _is_undecided(label: Label, kind: LabelKind) -> bool:
    """Whether as many people passed the answer as failed it: then there is nothing to agree with."""
    return kind == "pass/fail" and label.value == PASS_FROM


def _undecided(labels: Labels, kind: LabelKind) -> int:
    return sum(_is_undecided(label, kind) for label in labels.values())


def _ceiling(labels: Labels, kind: LabelKind) -> HumanCeiling | None:
    """How well people agree with each other; None where nobody labelled what somebody else did."""
    columns = sorted({name for label in labels.values() for name in label.votes})
    if len(columns) < 2:
        return None
    table = np.array([[label.votes.get(name, math.nan) for name in columns] for label in labels.values()])
    return human_ceiling(table, pass_from=PASS_FROM, graded=kind == "graded")


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


def _judged(
    run: Path, labels: Labels, path: Path, judge: str | None, kind: LabelKind, *, needed: bool
) -> dict[JudgeKey, list[Judged]]:
    """For each judge of the run the labelled answers that it scored; the run is read a record at a time.

    A run without judges is refused where one is `needed`.
    """
    result = Result.load(run)
    pairs: dict[JudgeKey, list[Judged]] = {}
    unmet = dict(labels)
    for record in result.iter_responses():
        label = _label_of(record, labels, path)
        unmet.pop((record.id, record.trial), None)
        for key, score in _judges(record.scores):
            judged = pairs.setdefault(key, [])
            if label is None or _is_undecided(label, kind):
                continue
            if (pair := _pair(record.id, label, score)) is not None:
                judged.append(pair)
    if unmet:
        _refuse_unknown(unmet, path, run, complete=result.complete)
    return _selected(pairs, judge, run) if pairs or needed else {}


def _label_of(record: Record, labels: Labels, path: Path) -> Label | None:
    if record.trial:
        of_first = labels.get((record.id, 0))
        if of_first is not None and not of_first.names_trial:
            message = f"case {_quoted(record.id)} was asked several times: say in `trial` which answer this is of"
            raise SuiteError(message, path=path, line=of_first.line)
    return labels.get((record.id, record.trial))


def _judges(scores: Iterable[Score]) -> Iterable[tuple[JudgeKey, Score]]:
    """The scores that a model gave, one for each judge; what a deterministic scorer says needs no calibration."""
    return {JudgeKey(score.name, score.by): score for score in scores if score.by is not None}.items()


def _pair(case_id: str, label: Label, score: Score) -> Judged | None:
    value = score.value if score.mean is None else score.mean
    if value is None:
        return None
    return Judged(label.value, value, value >= PASS_FROM if score.passed is None else score.passed, case_id)


def _refuse_unknown(unmet: Labels, path: Path, run: Path, *, complete: bool) -> None:
    (case_id, trial), label = next(iter(unmet.items()))
    which = f"case {_quoted(case_id)}" + (f", trial {trial}," if label.names_trial else "")
    others = f" (nor are {len(unmet) - 1:,} others)" if len(unmet) > 1 else ""
    hint = "" if complete else "; the run is not complete"
    raise SuiteError(f"{which} is not in the run {run}{others}{hint}", path=path, line=label.line)


def _selected(pairs: dict[JudgeKey, list[Judged]], judge: str | None, run: Path) -> dict[JudgeKey, list[Judged]]:
    if not pairs:
        raise ConfigurationError(f"{run} has no scores of a judge; deterministic scorers are not calibrated")
    if judge is None:
        return pairs
    chosen = {key: judged for key, judged in pairs.items() if key.name == judge}
    if not chosen:
        names = sorted({key.name for key in pairs})
        raise ConfigurationError(f"{run} has no judge named {judge!r}; {suggestion(judge, names)}")
    return chosen


def _check_out(out: Path | None) -> None:
    """Refuse, before anything is read, a place where the calibration cannot go: another file is not overwritten."""
    if out is None:
        return
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigurationError(f"cannot write {out}: " + ("it is a folder" if out.is_dir() else "no such folder"))
    if out.exists() and out.stat().st_size:
        try:
            read_calibrations(out)
        except OldCalibration:
            return
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; it is not overwritten") from error


def _digest(labels_path: Path) -> str:
    return hashlib.sha256(labels_path.read_bytes()).hexdigest()


def _write(out: Path, agreements: list[Agreement], labels_path: Path) -> None:
    digest = _digest(labels_path)
    entries = [calibration(one, labels_digest=digest, created=now()) for one in agreements]
    write_json(out, entries[0] if len(entries) == 1 else entries)


def _described(one: Agreement, undecided: int = 0) -> str:
    """A judge's figures as a few lines for a terminal."""
    head = f"{_plain(one.judge, _MAX_ID_CHARS)}: {'trusted' if one.trusted else 'not trusted'}"
    lines = [head, f"  {_plain(one.by, _WIDTH - 2)}"]
    lines += textwrap.wrap(one.reason, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    several = f" of {counted(one.cases, 'case')}" if one.cases < one.n else ""
    unscored = f", and {one.unscored:,} without a score of this judge" if one.unscored else ""
    lines += ["", _row("labels", f"{one.n:,}{several}{unscored}")]
    if undecided:
        lines.append(_row("left out", f"{counted(undecided, 'answer')} on which people are evenly split"))
    if not one.n:
        return "\n".join(lines)
    if one.graded is not None and one.graded.rho is not None:
        end = "" if one.graded.lower is None else f"   lower end {one.graded.lower:.3f}"
        lines.append(_row("Spearman’s rho", f"{one.graded.rho:.3f}{end}"))
    found = one.pass_fail
    lines += [_rate("sensitivity", found.sensitivity), _rate("specificity", found.specificity)]
    for name, value in (("balanced accuracy", found.balanced_accuracy), ("Cohen’s kappa", found.kappa)):
        if value is not None:
            lines.append(_row(name, f"{value:.3f}   does not decide"))
    if one.ceiling is not None:
        lines += _people(one.ceiling)
    return "\n".join(lines + _table(one))


def _row(name: str, text: str) -> str:
    return f"  {name:<18} {text}"


def _rate(name: str, kind: KindAgreement) -> str:
    """How often the judge agrees about the answers that people passed, or about those that they failed."""
    kind_of_label = "pass" if name == "sensitivity" else "fail"
    if kind.rate is None:
        return _row(name, f"–       no label says {kind_of_label}")
    return _row(name, f"{kind.rate:.3f}   lower end {kind.lower:.3f}   {counted(kind.labels, 'label')} {kind_of_label}")


def _people(ceiling: HumanCeiling) -> list[str]:
    """How well people agree with each other."""
    names = ("sensitivity", "specificity", "kappa", "rho")
    rates = [f"{name} {value:.2f}" for name in names if (value := getattr(ceiling, name)) is not None]
    shared = f"{ceiling.labellers} labellers, {counted(ceiling.cases, 'answer')} with two labels or more"
    return [_row("people", ", ".join(rates) or "–"), _row("", shared)]


def _table(one: Agreement) -> list[str]:
    """Who said pass and who said fail, people in rows and the judge in columns."""
    met = {
        (row, column): count
        for row, counts in zip(one.confusion.labels, one.confusion.counts, strict=True)
        for column, count in zip(one.confusion.labels, counts, strict=True)
    }
    lines = ["", f"  {'':<15} {'judge: pass':>12} {'judge: fail':>12}"]
    for passed, word in ((True, "pass"), (False, "fail")):
        lines.append(f"  {'label: ' + word:<15} {met.get((passed, True), 0):>12,} {met.get((passed, False), 0):>12,}")
    return lines


def _quoted(case_id: str) -> str:
    return repr(trim(case_id, _MAX_ID_CHARS))


def _plain(text: str, width: int) -> str:
    return trim(safe_text(text), width)
