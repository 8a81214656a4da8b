"""What repeated trials showed, as lines for the text summary."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from steelyard.stats.wording import safe_text, trim

_WIDTH = 80
_LONGEST_NAME = 30
_MOST_FLAKY = 5
_MOST_COLUMNS = 8
_LABEL = 10
_MISSING = "–"


def lines(trials_metrics: Mapping[str, Any]) -> list[str]:
    """The pass rate by case, pass@k and pass^k, the spread, the flaky cases, and whether agent or judge varies more.

    With a single trial only the judges' part is left to tell; nothing at all gives no lines.
    """
    several = trials_metrics["trials"] > 1
    found = []
    if several and trials_metrics["cases"]:
        found += [*_verdicts(trials_metrics), *_estimates(trials_metrics), *_flaky(trials_metrics)]
    for name, score in trials_metrics["scores"].items():
        found += _score(name, score, several=several)
    return found


def _verdicts(metrics: Mapping[str, Any]) -> list[str]:
    low, high = metrics["pass_rate_ci95"]
    spread = "" if metrics["spread"] is None else f", spread {metrics['spread']:.2f} between trials"
    return [
        f"  {metrics['trials']:,} trials of {metrics['cases']:,} cases{spread}",
        f"  {'passed':<{_LABEL}}{_percent(metrics['pass_rate']):>7}  95 % CI {low:.1%} – {high:.1%}, clustered by case",
    ]


def _estimates(metrics: Mapping[str, Any]) -> list[str]:
    ks = [str(k) for k in _columns(metrics["trials"])]
    rows = [f"  {'k':<{_LABEL}}" + "".join(f"{k:>8}" for k in ks).removeprefix(" ")]
    for label, key in (("pass@k", "pass_at_k"), ("pass^k", "pass_hat_k")):
        cells = "".join(f"{_percent(metrics[key][k]):>8}" for k in ks).removeprefix(" ")
        rows.append(f"  {label:<{_LABEL}}{cells}")
    return rows


def _columns(trials: int) -> list[int]:
    """The numbers of trials to show: all that fit, else doubling, with the last."""
    if trials <= _MOST_COLUMNS:
        return list(range(1, trials + 1))
    doubling = [2**power for power in range(_MOST_COLUMNS - 1) if 2**power < trials]
    return [*doubling, trials]


def _flaky(metrics: Mapping[str, Any]) -> list[str]:
    flaky = metrics["flaky"]
    if not flaky:
        return ["  flaky     none: every case passed in all of its trials or in none"]
    shown = metrics["flaky_cases"][:_MOST_FLAKY]
    found = [f"  flaky     {flaky:,} of {metrics['cases']:,} cases passed in some trials, not in others:"]
    found += [trim(f"    {case['passed']:,} of {case['tried']:,}  {safe_text(case['id'])}", _WIDTH) for case in shown]
    if flaky > len(shown):
        found.append(f"    and {flaky - len(shown):,} more")
    return found


def _score(name: str, score: Mapping[str, Any], *, several: bool) -> list[str]:
    """A score's spread between trials and, where a judge was asked, whose it is."""
    variance = score["variance"]
    said = textwrap.wrap(variance["says"], _WIDTH - 4) if variance["judged"] and variance["says"] else []
    shown = f"  score {trim(safe_text(name), _LONGEST_NAME)}"
    if several and score["spread"] is not None:
        return [f"{shown}: spread {score['spread']:.2f} between trials", *(f"    {line}" for line in said)]
    return [shown, *(f"    {line}" for line in said)] if said else []


def _percent(rate: float | None) -> str:
    return _MISSING if rate is None else f"{rate:.1%}"
