"""A comparison as one HTML file that needs no network: plain markup, all of it escaped, and a switch for the theme."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from steelyard.report.compare.comparison import Against, CaseChange, Change, Comparison, RunFacts, lists, outcomes, rows
from steelyard.report.page.frame import document, escaped

_PILLS = {"better": "passed", "worse": "failed", "no difference": "unscored", "unknown": "unscored"}
_WIDTH, _HEIGHT = 180, 14


def compare_page(comparison: Comparison) -> str:
    """The whole page."""
    return document(comparison_title(comparison), "compare", comparison_markup(comparison))


def comparison_title(comparison: Comparison) -> str:
    """Which runs are held against which."""
    return f"{', '.join(one.run.label for one in comparison.against)} against {comparison.baseline.label}"


def comparison_markup(comparison: Comparison) -> Iterator[str]:
    """What the page shows, without its frame."""
    yield f'<div class="head"><div><h1>{escaped(comparison.baseline.label)}</h1>{_facts(comparison.baseline)}</div>'
    yield '<span class="pill">baseline</span></div>'
    for one in comparison.against:
        yield "<section>"
        yield f'<div class="section-head"><span class="pill {_PILLS[one.outcome]}">{one.outcome}</span>'
        yield f'<div><h2 class="verdict">{escaped(one.verdict)}</h2>{_facts(one.run)}</div></div>'
        yield from _figures(one, comparison)
        yield from _changed(one)
        yield from _differences(one)
        yield "</section>"


def _facts(run: RunFacts) -> str:
    known = [run.run, run.suite, run.model_id or "", f"{run.cases:,} cases"]
    known += [f"{run.trials:,} trials"] if run.trials > 1 else []
    known += [] if run.complete else ["not complete"]
    return f'<div class="facts">{"".join(f"<span>{escaped(fact)}</span>" for fact in known if fact)}</div>'


def _figures(one: Against, comparison: Comparison) -> Iterator[str]:
    names = [escaped(comparison.baseline.label), escaped(one.run.label)]
    head = [f"{one.paired:,} paired cases", *names, "change", "95 % CI", ""]
    drawn = _drawn(one)
    body = (
        [
            f'<td class="name">{escaped(f"{row.label} {row.name}")}</td>',
            *(f"<td>{escaped(cell)}</td>" for cell in (row.baseline, row.run, row.change, row.interval)),
            f'<td class="whisker-cell">{drawn.get((row.label.partition(",")[0], row.name), "")}</td>',
        ]
        for row in rows(one, comparison.currency)
    )
    yield f'<div class="card scroll">{_table(head, body)}'
    if one.scores_left_out:
        yield f"<p>and {one.scores_left_out:,} more scores</p>"
    yield "</div>"


def _drawn(one: Against) -> dict[tuple[str, str], str]:
    """The changes that have an interval, drawn around no change, all on the scale of the widest."""
    changes = {("errors", ""): one.error_rate, **{("score", name): change for name, change in one.scores.items()}}
    if one.pass_rate is not None:
        changes["passed", ""] = one.pass_rate
    widest = max(max(abs(end) for end in change.ci95 or (0.0,)) for change in changes.values())
    return {key: _whisker(change, widest or 1.0, key[0] != "errors") for key, change in changes.items()}


def _whisker(change: Change, widest: float, more_is_better: bool) -> str:
    """The interval as a line, green or red where it leaves out no change."""
    if change.ci95 is None:
        return ""
    low, high = change.ci95
    tone = "" if low <= 0 <= high else "good" if (low > 0) == more_is_better else "bad"
    left, right, point = (_WIDTH * (0.5 + 0.46 * value / widest) for value in (low, high, change.difference))
    middle = _HEIGHT / 2
    return (
        f'<svg class="whisker {tone}" viewBox="0 0 {_WIDTH} {_HEIGHT}" aria-hidden="true">'
        f'<line class="zero" x1="{_WIDTH / 2:g}" x2="{_WIDTH / 2:g}" y1="0" y2="{_HEIGHT}"/>'
        f'<line class="reach" x1="{left:.1f}" x2="{right:.1f}" y1="{middle:g}" y2="{middle:g}"/>'
        f'<circle class="point" cx="{point:.1f}" cy="{middle:g}" r="4"/></svg>'
    )


def _changed(one: Against) -> Iterator[str]:
    yield '<div class="card"><h2>Cases</h2>'
    if one.split is not None:
        yield from _flips("better", one.split.better, one.better)
        yield from _flips("worse", one.split.worse, one.worse)
        yield f"<p>the same on {one.split.same:,}</p>"
    for title, listed in lists(one):
        ids = "".join(f"<li>{escaped(name)}</li>" for name in listed.ids)
        yield f'<details><summary>{title}: {listed.total:,}</summary><ul class="plain-list">{ids}</ul>'
        yield f"{_more(listed.total - len(listed.ids))}</details>"
    yield "</div>"


def _flips(title: str, total: int, cases: list[CaseChange]) -> Iterator[str]:
    if not total:
        yield f"<p>{title} on none</p>"
        return
    body = (
        [
            f'<td class="case">{escaped(case.id)}</td>',
            f"<td>{' → '.join(outcomes(case))}</td>",
            *(f'<td class="answer">{escaped(said)}</td>' for said in (case.baseline_answer, case.run_answer)),
        ]
        for case in cases
    )
    yield f"<details open><summary>{title} on {total:,}</summary>"
    yield f'<div class="scroll">{_table(["case", "", "baseline", "run"], body, answers=2)}</div>'
    yield f"{_more(total - len(cases))}</details>"


def _differences(one: Against) -> Iterator[str]:
    if one.notes:
        listed = "".join(f"<li>{escaped(note)}</li>" for note in one.notes)
        yield f'<div class="card"><h2>What else is different</h2><ul class="differences">{listed}</ul></div>'


def _table(head: list[str], body: Iterable[list[str]], *, answers: int = 0) -> str:
    """A table; the last `answers` columns are text. Its cells must be markup already."""
    plain = len(head) - answers
    titles = "".join(
        f'<th scope="col"{"" if n < plain else " class=answer"}>{cell}</th>' for n, cell in enumerate(head)
    )
    lines = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in body)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>\n{lines}\n</tbody></table>"


def _more(count: int) -> str:
    return f"<p>and {count:,} more: --all lists them</p>" if count > 0 else ""
