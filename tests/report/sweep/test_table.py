"""The table of a sweep: aligned, complete, and honest about levels that say little."""

from __future__ import annotations

import msgspec
import pytest

from steelyard.report.sweep.table import sweep_table
from tests.support.sweep import level, swept


def test_the_table_has_a_row_for_each_level_and_the_advice_under_it() -> None:
    slo = "ttft_p99<1s,error_rate<=1%"
    levels = [
        level(1, 9.5, slo=slo, goodput=9.5),
        level(1000, 12_345, slo=slo, first=0.3, goodput=12_000),
        level(2000, 13_000, slo=slo, errors=0.12, goodput=8_000),
    ]
    assert sweep_table(swept(levels, slo=slo), "runs/x").splitlines() == [
        "capitals on gpt-4.1: 3 levels measured, complete",
        "",
        "                                              first token    last token",
        "    level  answers/s  95 %  goodput  errors    p50    p99    p50    p99  passed",
        "        1       9.50   ±5%     9.50    0.0%  100ms  200ms  400ms  800ms   90.0%",
        "*   1,000     12,345   ±5%   12,000    0.0%  300ms  600ms  1.20s  2.40s   90.0%",
        "x   2,000     13,000   ±5%    8,000   12.0%  100ms  200ms  400ms  800ms   90.0%",
        "",
        "  2,000: the error rate is 12% (limit 1%)",
        "",
        "  recommended: 1,000: at 2,000 the error rate is 12% (limit 1%)",
        "",
        "results in runs/x",
    ]


def test_without_an_objective_on_a_time_there_is_no_goodput() -> None:
    assert "goodput" not in sweep_table(swept([level(1, 9.5)]))


def test_an_objective_that_is_open_is_marked() -> None:
    levels = [level(1, 10), level(10, 90, undecided=("time to first token p99: cannot tell",))]
    lines = sweep_table(swept(levels)).splitlines()
    assert [line[:9] for line in lines if line[2:9].strip().isdigit()] == ["*       1", "?      10"]
    assert "  10: time to first token p99: cannot tell" in lines
    assert lines[-1].endswith("cannot tell; undecided")


def test_a_broken_objective_is_marked_so_whatever_else_is_open() -> None:
    levels = [level(1, 10), level(10, 90, errors=0.9, undecided=("time to first token p99: cannot tell",))]
    lines = sweep_table(swept(levels)).splitlines()
    assert [line[:9] for line in lines if line[2:9].strip().isdigit()] == ["*       1", "x      10"]


def test_levels_that_say_little_are_marked_and_explained() -> None:
    levels = [level(1, 10, requests=4), level(10, 90, reached=False), level(20, 200, busy=True)]
    lines = sweep_table(swept(levels)).splitlines()
    assert [line[:9] for line in lines if line[2:9].strip().isdigit()] == ["*       1", "!      10", "!      20"]
    assert "  1: only 4 requests: too few answers for a steady state, send more" in lines
    assert "  10: not reached: at most 5 were in flight at once" in lines
    assert "20: not valid: this client was the bottleneck: its event loop was busy 97% of the time" in " ".join(
        " ".join(lines).split()
    )
    assert max(map(len, lines)) <= 80


def test_what_was_not_measured_is_a_dash() -> None:
    table = sweep_table(swept([level(1, 0, errors=1.0, first=None, pass_rate=None)]))
    row = next(line for line in table.splitlines() if line.startswith("x       1"))
    assert row.split() == ["x", "1", "0", "–", "100.0%", *["–"] * 4, "0", "–"]
    assert "no level can be recommended: at 1 the error rate is 100% (limit 1%)" in table


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


def test_the_errors_of_a_level_are_told_by_kind_with_the_words_of_one() -> None:
    kinds = {"429 rate limited": 1200, "timeout": 30, "a": 3, "b": 2, "c": 1}
    broken = msgspec.structs.replace(
        level(1, 10, errors=0.5), error_kinds=kinds, worst_error="TransientError: HTTP 429: slow down", broken=[]
    )
    table = sweep_table(swept([broken]))
    assert "1: 1,200 × 429 rate limited, 30 × timeout, 3 × a, 2 × b and 1 others;" in table
    assert "mostly TransientError: HTTP 429: slow down" in " ".join(table.split())


def test_a_level_of_an_older_sweep_has_no_kinds() -> None:
    old = swept([level(1, 10, errors=0.5)])
    del old["levels"][0]["error_kinds"]
    old["levels"][0]["worst_error"] = "ValueError: bad"
    assert "mostly ValueError: bad" in sweep_table(old)
