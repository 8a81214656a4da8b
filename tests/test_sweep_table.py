"""The table of a sweep: aligned, complete, and honest about levels that say little."""

from __future__ import annotations

import pytest

from steelyard.report.sweep_table import sweep_table
from support_sweep import level, swept


def test_the_table_has_a_row_for_each_level_and_the_advice_under_it() -> None:
    slo = "ttft_p99<1s,error_rate<=1%"
    levels = [
        level(1, 9.5, slo=slo),
        level(1000, 12_345, slo=slo, first=0.3),
        level(2000, 13_000, slo=slo, errors=0.12),
    ]
    assert sweep_table(swept(levels, slo=slo), "runs/x").splitlines() == [
        "capitals on gpt-4.1: 3 levels measured, complete",
        "",
        "                                time to first token      time to last token    output",
        "   level  answers/s  errors     p50     p90     p99     p50     p90     p99  tokens/s   passed",
        "       1       9.50    0.0%   0.10s   0.15s   0.20s   0.40s   0.60s   0.80s       228    90.0%",
        "*  1,000     12,345    0.0%   0.30s   0.45s   0.60s    1.2s    1.8s    2.4s   296,280    90.0%",
        "   2,000     13,000   12.0%   0.10s   0.15s   0.20s   0.40s   0.60s   0.80s   312,000    90.0%",
        "",
        "  2,000: the error rate is 12 % (limit 1 %)",
        "",
        "  recommended: 1,000: at 2,000 the error rate is 12 % (limit 1 %)",
        "",
        "results in runs/x",
    ]


def test_levels_that_say_little_are_marked_and_explained() -> None:
    levels = [level(1, 10, requests=4), level(10, 90, reached=False), level(20, 200, busy=True)]
    lines = sweep_table(swept(levels)).splitlines()
    assert [line[:8] for line in lines if line[2:8].strip().isdigit()] == ["*      1", "!     10", "!     20"]
    assert "  1: only 4 requests: too few for steady figures, give it more time" in lines
    assert "  10: not reached: at most 5 were in flight at once" in lines
    assert "  20: not valid: this client was the bottleneck: its event loop was busy 97 % of the time" in lines


def test_what_was_not_measured_is_a_dash() -> None:
    table = sweep_table(swept([level(1, 0, errors=1.0, first=None, pass_rate=None)]))
    row = next(line for line in table.splitlines() if line.startswith("       1"))
    assert row.split() == ["1", "0", "100.0%", *["–"] * 6, "0", "–"]
    assert "no level can be recommended: at 1 the error rate is 100 % (limit 1 %)" in table


def test_an_interrupted_sweep_says_why_it_stopped() -> None:
    lines = sweep_table(swept([level(1, 10)], stopped="SIGINT")).splitlines()
    assert lines[:2] == ["capitals on gpt-4.1: 1 level measured, not complete", "  stopped: SIGINT"]


def test_a_sweep_without_a_level_has_no_table() -> None:
    assert sweep_table(swept([], stopped="SIGINT")).splitlines() == [
        "capitals on gpt-4.1: 0 levels measured, not complete",
        "  stopped: SIGINT",
    ]


@pytest.mark.parametrize("suite", ["\x1b[31mred", "two\nlines"])
def test_names_cannot_steer_the_terminal(suite: str) -> None:
    table = sweep_table(swept([level(1, 10)], suite=suite))
    assert "\x1b" not in table
    assert "two\nlines" not in table
