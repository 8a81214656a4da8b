"""`steelyard calibrate RUN`: how well a run's judges agree with people's labels, and whether to trust them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import click
import msgspec

from steelyard.cli.click_types import SHARE
from steelyard.cli.main import FAILED_GATE
from steelyard.cli.output import say, show, show_json
from steelyard.errors import ConfigurationError
from steelyard.journal.files import CORRECTION, LABELS, write_json
from steelyard.journal.manifest import now
from steelyard.report.formats import write_text
from steelyard.report.labels import labels_csv
from steelyard.run.audit import draw
from steelyard.run.calibration import calibrated, file_digest
from steelyard.run.labels import LABEL, own_labels, read_labels
from steelyard.run.result import Result
from steelyard.scoring.judge.calibration import Agreement, OldCalibration, calibration, read_calibrations
from steelyard.stats.agreement import MIN_RATE, HumanCeiling, KindAgreement
from steelyard.stats.correction import MIN_AUDIT, Correction, Stratum
from steelyard.stats.formatting import counted, safe_text, trim
from steelyard.stats.metrics import correction_note

_WIDTH = 80
_MAX_NAME_CHARS = 40


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """The judges of a run and its pass rate, by labels of an audit."""

    judges: list[Agreement]
    strata: list[Stratum]
    corrected: Correction


@click.command("calibrate")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--labels",
    "labels_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Labels by people: CSV or JSONL with `id`, `label` (0..1, pass/fail, yes/no; for several people `label_NAME` "
    "each) and, if a case has several answers, `trial` [default: the labels of `steelyard label RUN`].",
)
@click.option(
    "--labels-of",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="The labels are for answers of this other run, which has the same scorers and judges. The error rates "
    "found there correct RUN's pass rate.",
)
@click.option(
    "--audit",
    type=click.IntRange(MIN_AUDIT),
    metavar="N",
    help="Draw N answers at random from each stratum (passed, failed, overruled or confirmed by a judge) and write "
    "them to --out, a CSV file for labels.",
)
@click.option("--seed", type=int, default=0, help="Seed of the draw of --audit [default: 0].")
@click.option(
    "--min-agreement",
    type=SHARE,
    metavar="RATE",
    default=MIN_RATE,
    help="The sensitivity and specificity, or rho for graded labels, from which a judge is trusted "
    f"[default: {MIN_RATE:.2f}].",
)
@click.option("--judge", metavar="NAME", help="Only the judge with this name.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="Write the calibration to this file, for a suite's judges to use.",
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

    Labels of `steelyard label`, of an --audit or of another run (--labels-of) also give the pass rate without the
    verdicts' errors: it is kept in RUN/correction.json, and reports, pages and gates (`pass_rate_corrected>=0.8`)
    show it beside the raw one.
    """
    if labels_path is not None and audit is not None:
        raise click.UsageError("give --labels FILE, or --audit N to draw answers for labels, not both")
    if labels_of is not None and labels_path is None:
        raise click.UsageError("--labels-of needs --labels FILE")
    if audit is not None:
        return _draw(run, audit, seed, out)
    _check_out(out)
    labels = own_labels(run) if labels_path is None else read_labels(labels_path)
    labels_path = labels_path or run / LABELS
    compared = calibrated(run, labels, labels_path, labels_of=labels_of, judge=judge, min_agreement=min_agreement)
    found, correction = compared.judges, compared.correction
    if out is not None and found:
        _write(out, found, labels_path)
    if correction is not None:
        write_json(run / CORRECTION, correction)
    if as_json:
        show_json(
            found if correction is None else Audited(judges=found, strata=correction.strata, corrected=correction)
        )
    else:
        parts = [_described(one, compared.undecided) for one in found]
        parts += [] if correction is None else ["\n".join(_correction(correction))]
        show("\n\n".join(parts))
    if out is not None and found:
        say(f"the calibration is in {out}")
    if correction is not None and correction.rate is not None:
        say(f"the corrected pass rate is in {run / CORRECTION}: report, view and gate show it")
    return 0 if all(one.trusted for one in found) else FAILED_GATE


def _draw(run: Path, count: int, seed: int, out: Path | None) -> int:
    """Write answers drawn at random from each stratum to a file for labels."""
    if out is None:
        raise click.UsageError("--audit needs --out FILE, where the answers to label go")
    if out.exists():
        raise ConfigurationError(
            f"{out} already exists and may have labels; choose another file, it is not overwritten"
        )
    drawn, sizes = draw(Result.load(run).iter_responses(), count, seed)
    if not drawn:
        raise ConfigurationError(f"{run} has no answer with a verdict: there is nothing to audit")
    sized = {name: size for name, size in sizes.items() if name is not None}
    write_text(out, labels_csv(drawn, sized, [LABEL], lambda _: [""]))
    shown = ", ".join(f"{name} {size:,}" for name, size in sorted(sized.items()))
    say(f"{counted(len(drawn), 'answer')} to label in {out} (of {shown}): say pass or fail in the column `label`")
    return 0


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
        right = f"{one.right:,} of {one.labelled:,} labelled are right" if one.labelled else "none labelled yet"
        lines.append(_row(one.name, f"{counted(one.size, 'answer')}, {right}"))
    return lines


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


def _write(out: Path, agreements: list[Agreement], labels_path: Path) -> None:
    digest = file_digest(labels_path)
    entries = [calibration(one, labels_digest=digest, created=now()) for one in agreements]
    write_json(out, entries[0] if len(entries) == 1 else entries)


def _described(one: Agreement, undecided: int = 0) -> str:
    """A judge's figures as a few lines for a terminal."""
    head = f"{_plain(one.judge, _MAX_NAME_CHARS)}: {'trusted' if one.trusted else 'not trusted'}"
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


def _plain(text: str, width: int) -> str:
    return trim(safe_text(text), width)
