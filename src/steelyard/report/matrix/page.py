"""Several runs side by side as one HTML file that needs no network: the leaderboard, and every case by every variant.

It is made like the page of one run, and holds its cases in the same way: see `report/page/`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeAlias

import msgspec
import numpy as np
from markupsafe import Markup

from steelyard.journal.manifest import Manifest, read_manifest
from steelyard.records import Record, is_digest
from steelyard.report.case import question
from steelyard.report.chart import Axis, Chart, LegendEntry, Mark, Series, draw, nice_ticks
from steelyard.report.compare.comparison import Change
from steelyard.report.html import environment, head, render, script_json
from steelyard.report.matrix.leaderboard import Leaderboard, Standing, pareto_front, rank
from steelyard.report.matrix.table import AlignedCases, VariantRuns, lead_of
from steelyard.report.matrix.text import (
    HEADINGS,
    MISSING,
    against_words,
    cells,
    change_cells,
    how_tested,
    leaderboard_text,
    shown_columns,
)
from steelyard.report.page.data import (
    BLOCK,
    CaseWork,
    PackedCases,
    answer_body,
    cut,
    expected_body,
    preview,
    text_limit,
)
from steelyard.report.page.page import SHARED_SCRIPTS
from steelyard.report.records import STATES, Expectations, SuiteCase, open_suite, shows_expected, state_of
from steelyard.stats.formatting import counted, format_seconds, one_line
from steelyard.stats.prices import format_money
from steelyard.suite.evalset import EvalSet

SCRIPTS = (*SHARED_SCRIPTS, "chart_keys.js", "variants.js", "side_by_side.js", "page.js")
_DRAFT = "steelyard-report-"
_PREVIEW = 120
_MAX_METADATA = 12
_MAX_METADATA_CHARS = 60
_ANSWERS_DIFFER = 1
"""The bit of a case's flags that says that not every variant gave the same answer."""

OpenSuite: TypeAlias = Callable[[Path, Manifest | None], tuple[EvalSet | None, str | None]]


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What a page that is part of a site has more than one in a file."""

    home: str | None = None
    """The address of the list of runs."""
    links: Mapping[str, str] = {}
    """The addresses of the variants' own pages, by their names."""
    open_suite: OpenSuite = open_suite
    """Where the cases of a run come from that its records do not hold."""


def matrix_page(
    variants: VariantRuns,
    suite: EvalSet | None = None,
    *,
    board: Leaderboard | None = None,
    around: Surroundings | None = None,
) -> Iterator[str]:
    """The page as pieces of HTML. What was expected comes from the records, else from `suite` or where a run says."""
    around = around or Surroundings()
    board = rank(variants) if board is None else board
    aligned = AlignedCases([one.run for one in variants.runs])
    with tempfile.TemporaryFile(prefix=_DRAFT) as bodies, tempfile.TemporaryFile(prefix=_DRAFT) as columns:
        packed = _Packed(bodies, columns, variants, text_limit(aligned.records))
        asked = _Asked(variants, suite, around.open_suite)
        for _, records in aligned.read():
            packed.add(records, asked)
        packed.finish()
        overview = {
            "about": {"run": "", "suite": board.suite, "suite_note": asked.note(packed.has_expected)},
            "metrics": {"currency": board.currency},
            "variants": [{"name": one.name, "run": str(one.run)} for one in variants.runs],
            "chunks": packed.starts,
        }
        template = environment("steelyard.report").get_template("matrix.html")
        yield from template.generate(
            title=f"{matrix_title(board)}: Steelyard report",
            bar_name=matrix_title(board),
            home=around.home,
            summary=leaderboard_text(board),
            leaderboard=leaderboard_markup(board, around.links),
            overview=script_json(overview),
            pieces=map(Markup, packed.data()),
            **page_head(),
        )


@cache
def page_head() -> dict[str, Markup]:
    """The style sheet and the script of the page, and the policy that allows these alone."""
    return head("sweep.css", "matrix.css", scripts=SCRIPTS)


def matrix_title(board: Leaderboard) -> str:
    """What is shown."""
    return f"{board.suite or 'runs'}: {counted(len(board.variants), 'variant')}"


class _Asked:
    """What each case asked and expected: from the records, else from the suite of the run that has the case first."""

    def __init__(self, variants: VariantRuns, suite: EvalSet | None, find: OpenSuite) -> None:
        self._manifests = [read_manifest(one.run) for one in variants.runs]
        opened = [
            (suite, None) if suite is not None else find(one.run, manifest)
            for one, manifest in zip(variants.runs, self._manifests, strict=True)
        ]
        self._notes = [note for _, note in opened]
        self._recorded = [Expectations(None, manifest) for manifest in self._manifests]
        self._from_suite = [
            Expectations(cases, manifest) for (cases, _), manifest in zip(opened, self._manifests, strict=True)
        ]

    def of(self, records: Sequence[Sequence[tuple[int, Record]]]) -> SuiteCase | None:
        """A variant may have another system prompt than the suite, so that only its records know what was asked."""
        found = [(number, trials[0][1]) for number, trials in enumerate(records) if trials]
        for number, record in found:
            if record.expected is not None and not is_digest(record.expected):
                return self._recorded[number].of(record)
        number, record = found[0]
        return self._from_suite[number].of(record)

    def note(self, has_expected: bool) -> str | None:
        """Why the page does not show what was expected; None where it does."""
        if not any(map(shows_expected, self._manifests)):
            return "left out of the records and of this page (keep_expected)"
        return None if has_expected else next((note for note in self._notes if note), None)


class _Packed(PackedCases):
    """The cases of all variants: a row of the table, and a body, for each case."""

    def __init__(self, bodies: IO[bytes], columns: IO[bytes], variants: VariantRuns, limit: int) -> None:
        super().__init__(bodies, columns)
        self.has_expected = False
        self._limit = limit
        self._work = [CaseWork(one.run) for one in variants.runs]
        self._clear()

    def add(self, records: Sequence[Sequence[tuple[int, Record]]], asked: _Asked) -> None:
        """Take in one case."""
        case = asked.of(records)
        first = next(trials[0][1] for trials in records if trials)
        expected = expected_body(case, self._limit)
        self.has_expected = self.has_expected or "expected" in expected
        question_text = question(first, case.case if case is not None else None)
        metadata = {} if case is None else _shown_metadata(case.case.metadata)
        shown = {
            **expected,
            "question": cut(question_text, self._limit),
            "metadata": metadata,
            "variants": [
                [answer_body(record, offset, case, self._limit, work) for offset, record in trials]
                for trials, work in zip(records, self._work, strict=True)
            ],
        }
        self.put_body(msgspec.json.encode(shown))
        self._row(first.id, question_text, metadata, [[record for _, record in trials] for trials in records])

    def finish(self) -> None:
        """Close what is still open."""
        self._end_block()
        super().finish()

    def _row(self, case_id: str, asked: str, metadata: dict[str, str], records: Sequence[Sequence[Record]]) -> None:
        leads = []
        for number, trials in enumerate(records):
            states = [state_of(record) for record in trials]
            self._states[number].append("".join(str(STATES.index(state)) for state in states))
            lead = trials[lead_of(states)] if trials else None
            leads.append("" if lead is None else (lead.error if lead.error is not None else lead.response_text) or "")
            self._answers[number].append(preview(leads[-1], _PREVIEW))
        there = {answer for answer, trials in zip(leads, records, strict=True) if trials}
        self._block["id"].append(case_id)
        self._block["prompt"].append(preview(asked, _PREVIEW))
        self._block["metadata"].append(metadata)
        self._block["flags"].append(_ANSWERS_DIFFER * (len(there) > 1))
        if len(self._block["id"]) >= BLOCK:
            self._end_block()

    def _end_block(self) -> None:
        self.put_block(msgspec.json.encode({**self._block, "states": self._states, "answers": self._answers}))
        self._clear()

    def _clear(self) -> None:
        self._block: dict[str, list[Any]] = {name: [] for name in ("id", "prompt", "metadata", "flags")}
        self._states: list[list[str]] = [[] for _ in self._work]
        self._answers: list[list[str]] = [[] for _ in self._work]


def _shown_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The plain values of a case's metadata: text, numbers and truths."""
    plain = {
        preview(str(name), _MAX_METADATA_CHARS): preview(_word(value), _MAX_METADATA_CHARS)
        for name, value in metadata.items()
        if isinstance(value, str | int | float | bool)
    }
    return dict(list(plain.items())[:_MAX_METADATA])


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# The leaderboard

_WHISKER = (120, 14)
_TAGS = {
    "best": "passed",
    "tied": "accent",
    "not distinguishable": "accent",
    "worse": "failed",
    "better": "passed",
    "not ranked": "",
}


def leaderboard_markup(board: Leaderboard, links: Mapping[str, str] | None = None) -> Markup:
    """The first view: the verdict, the variants from the best to the worst, and the scatter charts."""
    return render(
        "leaderboard.html",
        board=board,
        facts=_facts(board),
        verdict=f"{board.verdict}.",
        columns=[name for name, _ in _COLUMNS if name in _kept(board)],
        rows=[_row(board, one, (links or {}).get(one.name)) for one in board.variants],
        drawings=[draw(chart) for chart in scatter_charts(board)],
        notes=[(one.name, "; ".join([*one.uncalibrated, *one.notes])) for one in board.variants if _has_notes(one)],
        tested=how_tested(board),
        about=_about_columns(board),
    )


def _about_columns(board: Leaderboard) -> str:
    """What the headings leave open of the columns that there are."""
    kept, currency = _kept(board), f" in {board.currency}" if board.currency else ""
    sentences = {
        "passed": "Passed: of all records, an error counts as not passed; with the interval of each run's own summary.",
        "cost per case": f"Costs{currency}, judges included.",
        "time": "Time: to last token, the median.",
        "output tokens": "Output tokens: of an answer, on average.",
    }
    return " ".join(text for name, text in sentences.items() if name in kept)


def _has_notes(one: Standing) -> bool:
    return bool(one.uncalibrated or one.notes)


def _facts(board: Leaderboard) -> list[str]:
    facts = [board.place or "", counted(board.cases_in_common, "case") + " in common"]
    facts += [f"{axis}: {', '.join(values)}" for axis, values in board.axes.items()]
    facts += [f"not begun: {', '.join(board.not_begun)}"] if board.not_begun else []
    facts += [] if all(one.complete for one in board.variants) else ["not complete"]
    return [fact for fact in facts if fact]


_COLUMNS = (
    ("passed", ("passed", "95 % CI", "of scored")),
    ("errors", ("errors",)),
    ("cost per case", ("cost/case", "cost/passed")),
    ("time", ("time p50", "time p95")),
    ("output tokens", ("output tokens",)),
)
"""The columns of the page: a name, the figure, and what is below it in small print."""
_BELOW = {"of scored": "{} of scored", "cost/passed": "{} per passed", "time p95": "p95 {}"}


def _kept(board: Leaderboard) -> list[str]:
    there = [HEADINGS[place] for place in shown_columns(board)]
    return [name for name, (figure, *_) in _COLUMNS if figure in there]


def _row(board: Leaderboard, one: Standing, address: str | None) -> dict[str, Any]:
    tags: list[tuple[str, str]] = [(_TAGS[one.place], one.place)]
    tags += [("", "Pareto front")] if one.pareto else []
    tags += [] if one.complete else [("error", "not complete")]
    tags += [("error", "judge not calibrated")] if one.uncalibrated else []
    change = None if one.against_best is None else one.against_best.change
    return {
        "name": one.name,
        "address": address,
        "sub": " · ".join(filter(None, [_model(one), f"{one.trials:,} trials" if one.trials > 1 else ""])),
        "rank": one.rank,
        "tags": tags,
        "best": one.place == "best",
        "cells": list(_cells(board, one)),
        "whisker": _whisker(one),
        "change": None if change is None else change_cells(change)[0],
        "says": [] if change is None else [", ".join(change_cells(change)[1:]), *against_words(one).split(": ")],
        "tone": _tone(change),
    }


def _model(one: Standing) -> str:
    """Its model, where the name of the variant does not say that already."""
    return "" if one.model_id is None or one.model_id == one.name else one.model_id


def _cells(board: Leaderboard, one: Standing) -> Iterator[tuple[str, list[str]]]:
    """Each figure, and what is below it."""
    figures = dict(zip(HEADINGS, cells(one), strict=True))
    there = {HEADINGS[place] for place in shown_columns(board)} - ({"of scored"} if one.scored == one.n else set())
    for name, (figure, *more) in _COLUMNS:
        if name in _kept(board):
            small = [(below, figures[below]) for below in more if below in there and figures[below] != MISSING]
            yield figures[figure].removesuffix(" *"), [_BELOW.get(below, "{}").format(text) for below, text in small]


def _tone(change: Change | None) -> str:
    return {"better": "good", "worse": "bad"}.get("" if change is None else change.outcome, "")


def _whisker(one: Standing) -> dict[str, Any] | None:
    """The interval of the pass rate as a line from 0 to 100 %."""
    if one.pass_rate_all is None or one.pass_rate_all_ci95 is None:
        return None
    width, height = _WHISKER
    low, high = one.pass_rate_all_ci95
    left, right, point = (round(4 + (width - 8) * share, 1) for share in (low, high, one.pass_rate_all))
    return {"width": width, "height": height, "left": left, "right": right, "point": point}


_WIDE = 20
"""From this ratio of the highest value to the lowest on, the scale is logarithmic."""
_MAX_LABEL = 24
_MAX_POINTS_NAMED = 16

Price = Callable[[Standing], float | None]


def scatter_charts(board: Leaderboard) -> list[Chart]:
    """The pass rate against the cost of a case, and against the median latency; those that can be drawn."""
    unit = f" {board.currency}".rstrip()
    charts = [
        _scatter(board, "cost", lambda one: one.cost_per_case, _money, f"cost per case,{unit}".rstrip(","), unit),
        _scatter(board, "latency", _median, format_seconds, "median time to last token"),
    ]
    return [chart for chart in charts if chart is not None]


def _median(one: Standing) -> float | None:
    return None if one.latency_p50 is None else one.latency_p50.value


def _scatter(
    board: Leaderboard, name: str, price: Price, show: Callable[[float], str], label: str, unit: str = ""
) -> Chart | None:
    """None where fewer than two variants have both."""
    known = [
        (one, value, one.pass_rate_all)
        for one in board.variants
        if (value := price(one)) is not None and one.pass_rate_all is not None and one.rank is not None
    ]
    if len(known) < 2:
        return None
    front = pareto_front(np.array([[value, -rate] for _, value, rate in known]))
    marks = [
        _mark(one, value, rate, f"{name} {show(value)}{unit}", is_on, named=len(known) <= _MAX_POINTS_NAMED)
        for (one, value, rate), is_on in zip(known, front, strict=True)
    ]
    on_front = sorted((mark for mark, is_on in zip(marks, front, strict=True) if is_on), key=lambda mark: mark.x)
    rest = [mark for mark, is_on in zip(marks, front, strict=True) if not is_on]
    legend = [LegendEntry("good", f"Pareto front: none passes more for less {name}")]
    legend += [LegendEntry("level weak", "another is at least as good for less")] if rest else []
    return Chart(
        title=f"Pass rate against {name}",
        description=f"Pass rate against {name}, a point for each variant",
        x=_axis([value for _, value, _ in known], show, label),
        y=_share_axis([rate for _, _, rate in known]),
        series=[Series("good", on_front), *(Series("none", [mark]) for mark in rest)],
        legend=legend,
    )


def _mark(one: Standing, value: float, rate: float, shown: str, on_front: bool, *, named: bool) -> Mark:
    interval = one.pass_rate_all_ci95
    sure = "" if interval is None else f" (95 % CI {interval[0]:.1%} – {interval[1]:.1%})"
    text = f"{one_line(one.name, 80)}: {rate:.1%} passed{sure}, {shown}"
    label = one_line(one.name, _MAX_LABEL) if named else ""
    return Mark(value, rate, text, "good" if on_front else "level weak", 5, label=label, ringed=one.place == "best")


def _axis(values: Sequence[float], show: Callable[[float], str], label: str) -> Axis:
    """From zero; logarithmic where the dearest would press all the others against the axis."""
    least, most = min(values), max(values)
    if least > 0 and most / least >= _WIDE:
        powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        low, high = least / 1.6, most * 1.6
        within = [tick for tick in ticks if low <= tick <= high]
        return Axis(low, high, within[:: math.ceil(len(within) / 6)], show, label, log=True)
    high = most * 1.15 or 1.0
    return Axis(0, high, nice_ticks(high, 5), show, label)


def _share_axis(rates: Sequence[float]) -> Axis:
    """From a little below the lowest to a little above the highest, so that small differences are seen."""
    low, high = min(rates), max(rates)
    room = max((high - low) * 0.2, 0.02)
    low, high = max(low - room, -0.04), high + room
    step = nice_ticks(high - low, 5)[1]
    first = math.ceil(max(low, 0.0) / step - 1e-9)
    ticks = [number * step for number in range(first, int(min(high, 1.0) / step + 1e-9) + 1)]
    digits = 0 if step >= 0.0099 else 1
    return Axis(low, high, ticks, lambda rate: f"{rate:.{digits}%}")


def _money(amount: float) -> str:
    return "0" if not amount else format_money(amount, "").strip()
