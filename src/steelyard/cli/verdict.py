"""How a complete run stands against its gate, as an exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from steelyard.build import Gate, build_gate
from steelyard.cli.main import FAILED_GATE, TOO_MANY_ERRORS
from steelyard.cli.output import say
from steelyard.errors import ConfigurationError
from steelyard.report.figures import figures
from steelyard.report.rules import Leave, check_rule, parse_rule, refuse_misspelt
from steelyard.stats.wording import safe_text


def with_flags(gate: Gate, **flags: float | None) -> Gate:
    """The suite's gate with what was given on the command line put over it."""
    for rule in gate.rules:
        refuse_misspelt(parse_rule(rule))  # a mistake to tell of before anything is asked
    given = {name: value for name, value in flags.items() if value is not None}
    return build_gate({**msgspec.structs.asdict(gate), **given})


def verdict_code(metrics: Mapping[str, Any], gate: Gate, *, remedy: str) -> int:
    """The exit code of a complete run; too many errors outrank a missed gate. `remedy` says what helps against them."""
    # An answer that could not be scored is no better for a gate than one that did not come.
    rate = metrics["error_rate"] + metrics["scoring_errors"] / metrics["n"]
    if rate > gate.max_error_rate:
        kind = "error rate, scoring errors included," if metrics["scoring_errors"] else "error rate"
        say(f"{kind} {rate:.1%} is above {gate.max_error_rate:.1%} (--max-error-rate); {remedy}")
        return TOO_MANY_ERRORS
    if gate.min_pass_rate is not None:
        rate = metrics["pass_rate"]
        if rate is None or rate < gate.min_pass_rate:
            shown = "unknown: nothing was scored" if rate is None else f"{rate:.1%}"
            say(f"pass rate {shown}, below {gate.min_pass_rate:.1%} (--min-pass-rate)")
            return FAILED_GATE
    return _kept(metrics, gate.rules)


def _kept(metrics: Mapping[str, Any], rules: Iterable[str]) -> int:
    """What the suite's own rules say of the figures; every broken one is named."""
    known = figures(metrics)
    broken = []
    for rule in rules:
        try:
            checked = check_rule(parse_rule(rule), metrics, known, Leave())
        except ConfigurationError as error:  # a figure that this run does not have: too late to refuse the run
            broken.append(f"{rule}: {error}")
        else:
            broken += [] if checked.ok else [f"{rule}: {checked.reason}"]
    for line in broken:
        say(f"gate: {safe_text(line)}")
    return FAILED_GATE if broken else 0
