"""A run in a line: its state, how far it has come and how well. Reads small files and the index, no answers."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from msgspec import UNSET

from steelyard.errors import RunRefused, RunVersionError
from steelyard.journal.files import OUTPUTS, read_metrics, written_at
from steelyard.journal.index import PASSED, UNSCORED, counting
from steelyard.journal.lock import is_locked
from steelyard.journal.manifest import Manifest, read_manifest
from steelyard.journal.reader import belonging_rows, index_rows
from steelyard.run.result import REPLAYED, load_metrics, read_partial
from steelyard.stats.formatting import counted, format_bytes
from steelyard.stats.intervals import clopper_pearson
from steelyard.stats.metrics import Metrics, correction_note, not_calibrated, uncalibrated

_LATELY = 60.0


class Headline(msgspec.Struct, kw_only=True):
    """What is known of a run without reading its answers."""

    state: str
    """`complete`, `running`, `interrupted` or `damaged`."""
    suite: str = ""
    model: str | None = None
    created: str = ""
    done: int = 0
    planned: int = 0
    errors: int = 0
    passed: int = 0
    scored: int = 0
    pass_rate: float | None = None
    pass_rate_ci95: tuple[float, float] | None = None
    pass_rate_corrected: float | None = None
    correction: str | None = None
    """What to know of the corrected rate, or why there is none; None where nothing corrects it."""
    p50: float | None = None
    per_minute: float | None = None
    cost: float | None = None
    currency: str | None = None
    uncalibrated: list[str] = []
    """What must be said of judges that decided and are not calibrated."""
    problem: str | None = None
    """Why it counts as damaged, or cannot be read whole."""


def read_headline(run: Path) -> Headline:
    """The headline of the run in a directory; of a damaged one, as far as it could be read."""
    headline = Headline(state="damaged")
    try:
        headline.state = live_state(run)
        _fill(headline, run)
    except RunVersionError as error:
        headline.problem = str(error)
    except (RunRefused, OSError) as error:
        headline.state, headline.problem = "damaged", str(error)
    return headline


def live_state(run: Path) -> str:
    """How far a run has come, by its metrics and its lock."""
    if read_metrics(run) is not None:
        return "complete"
    return "running" if is_writing(run) else "interrupted"


def is_writing(run: Path) -> bool:
    """Whether a process writes to the run now. Where its lock may not be touched: whether one did lately."""
    try:
        return is_locked(run) is not None
    except OSError:
        written = written_at(run / OUTPUTS)
        return written is not None and time.time() - written / 1e9 < _LATELY


def _fill(headline: Headline, run: Path) -> None:
    manifest = read_manifest(run)
    if manifest is not None:
        headline.suite, headline.model = manifest.suite, manifest.model_id
        headline.created, headline.planned = manifest.created, manifest.planned
    metrics = load_metrics(run) or (read_partial(run) if headline.state == "interrupted" else None)
    if metrics is not None:
        _fill_from_metrics(headline, metrics)
    elif (run / OUTPUTS).exists():
        _fill_from_index(headline, run)
        headline.uncalibrated = [] if manifest is None else _untrusted_judges(manifest)


def _fill_from_metrics(headline: Headline, metrics: Metrics) -> None:
    headline.suite = headline.suite or metrics.suite
    headline.done, headline.planned = metrics.n, metrics.counts.planned
    headline.errors, headline.pass_rate = metrics.counts.error, metrics.pass_rate
    headline.passed, headline.scored = metrics.passed, metrics.scored
    headline.pass_rate_ci95 = metrics.pass_rate_ci95
    headline.pass_rate_corrected = metrics.pass_rate_corrected
    headline.correction = correction_note(metrics.correction) if metrics.correction else None
    headline.p50 = metrics.stats.get("time_to_last_token-p50")
    headline.per_minute = metrics.stats.get("requests_per_minute")
    headline.cost, headline.currency = metrics.cost, metrics.currency
    headline.uncalibrated = uncalibrated(metrics)


def _untrusted_judges(manifest: Manifest) -> list[str]:
    """A sentence for each judge of a run that is still written, unless labels have shown that it can be trusted."""
    judges = [str(one.get("name")) for one in manifest.scorers if one.get("kind") in ("judge", "jury")]
    trusted = {name for name, one in manifest.calibrations.items() if one.trusted}
    return [not_calibrated([name]) for name in judges if name not in trusted]


def _fill_from_index(headline: Headline, run: Path) -> None:
    rows = counting(belonging_rows(run, index_rows(run)))
    scored = rows[(rows["ok"] == 1) & (rows["verdict"] != UNSCORED)]
    headline.done, headline.errors = len(rows), int((rows["ok"] == 0).sum())
    headline.scored, headline.passed = len(scored), int((scored["verdict"] == PASSED).sum())
    if len(scored):
        headline.pass_rate = headline.passed / headline.scored
        if not rows["trial"].any():  # trials of a case count together, which is worked out at the end
            headline.pass_rate_ci95 = clopper_pearson(headline.passed, headline.scored)


def stop_reason(metrics: Metrics) -> str | None:
    """Why a run stopped before it was complete, in a user's words; None where that is not known."""
    if metrics.complete or metrics.stopped == REPLAYED:
        return None
    return "Ctrl-C (SIGINT)" if metrics.stopped == "SIGINT" else metrics.stopped


def notices(metrics: Metrics) -> list[dict[str, str]]:
    """Warnings first, then what is only good to know: each a level, a title and a text."""
    found = [
        _incomplete(metrics),
        _bottleneck(metrics),
        *_judges(metrics),
        _unscored(metrics),
        _cost(metrics),
        _source(metrics),
        _cached(metrics),
        _left_out(metrics),
        _limits(metrics),
        _not_kept(metrics),
    ]
    return [notice for notice in found if notice is not None]


def _notice(level: str, title: str, text: str) -> dict[str, str]:
    return {"level": level, "title": title, "text": text}


def _incomplete(metrics: Metrics) -> dict[str, str] | None:
    if metrics.complete:
        return None
    text = f"{metrics.n:,} of {metrics.counts.planned:,} records are here."
    if reason := stop_reason(metrics):
        text += f" Stopped: {reason}."
    return _notice("warning", "This run is not complete", f"{text} The figures may change when it is resumed.")


def _limits(metrics: Metrics) -> dict[str, str] | None:
    if not metrics.limits:
        return None
    reached = [
        f"{limit.n:,} of {metrics.n:,} hit the {reason.replace('_', ' ')}, {limit.passed:,} of them passed"
        for reason, limit in metrics.limits.items()
    ]
    return _notice("info", "Limits were reached", "; ".join(reached) + ".")


def _not_kept(metrics: Metrics) -> dict[str, str] | None:
    if not metrics.not_kept:
        return None
    files, cases = counted(metrics.not_kept.files, "file"), counted(metrics.not_kept.cases, "case")
    size = format_bytes(metrics.not_kept.bytes)
    text = f"{files} of {cases}, {size}: `max_disk` was used up. Patches are kept always."
    return _notice("info", "Not everything was kept", text)


def _bottleneck(metrics: Metrics) -> dict[str, str] | None:
    client = metrics.client
    if not client or not client.bottleneck:
        return None
    reason = f"{client.reason}. " if client.reason else ""
    text = f"{reason}Latency and throughput tell of the machine that measured, not of what was measured."
    return _notice("warning", "The client was the bottleneck", text[:1].upper() + text[1:])


def _judges(metrics: Metrics) -> list[dict[str, str]]:
    found = []
    advisory = [name for name, score in metrics.scores.items() if score.advisory]
    if advisory:
        text = f"{', '.join(advisory)}: not calibrated against people's labels, so it decides nothing here."
        found.append(_notice("warning", "A judge is only advisory", text))
    for sentence in uncalibrated(metrics):
        text = f"{sentence[:1].upper()}{sentence[1:]}. Compare it with labels by people: steelyard calibrate."
        found.append(_notice("warning", "A judge that is not calibrated decides", text))
    for name, score in metrics.scores.items():
        if score.overruled and score.pass_rate_without not in (None, UNSET) and metrics.pass_rate is not None:
            rates = f"{metrics.pass_rate:.1%} passed with it, {score.pass_rate_without:.1%} without it"
            text = f"{name} passed {counted(score.overruled, 'answer')} that the scorers before it had failed: {rates}."
            found.append(_notice("info", "A judge overruled scorers", text))
    return found


def _unscored(metrics: Metrics) -> dict[str, str] | None:
    if not metrics.scoring_errors:
        return None
    text = f"A scorer broke down on {metrics.scoring_errors:,} of them: --retry-errors scores them again."
    return _notice("warning", "Some answers could not be scored", text)


def _cost(metrics: Metrics) -> dict[str, str] | None:
    if metrics.cost is not None or not metrics.cost_unknown_because:
        return None
    return _notice("info", "The cost is unknown", f"{metrics.cost_unknown_because}")


def _source(metrics: Metrics) -> dict[str, str] | None:
    if metrics.scored_from is UNSET:
        return None
    return _notice("info", "Scored again", f"Answers and times are those of {metrics.scored_from}; nothing was asked.")


def _cached(metrics: Metrics) -> dict[str, str] | None:
    if not metrics.cached:
        return None
    text = f"{metrics.cached:,} of {metrics.n:,} answers were not asked for; their times and costs are left out."
    return _notice("info", "From the cache", text)


def _left_out(metrics: Metrics) -> dict[str, str] | None:
    if not metrics.left_out:
        return None
    left_out = counted(metrics.left_out, "record")
    return _notice("info", "Left out", f"{left_out} of cases that are not in this run any more.")
