"""The tables of docs/peers.md, from what was measured."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.__main__ import machine
from benchmarks.peers.jobs import STREAMS
from benchmarks.peers.tools import TOOLS, Tool

PAGE = Path(__file__).parents[2] / "docs" / "peers.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

Figures = dict[str, Any]
Rows = Iterable[list[str]]


def write_report(results: dict[str, Figures]) -> None:
    """Put the tables between the marks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(results)}\n{END}{after}", encoding="utf-8")


def tables(results: dict[str, Figures]) -> str:
    there = [tool for tool in TOOLS if results.get(tool.adapter, {}).get("measured")]
    parts = [
        f"Measured on {datetime.date.today():%d %B %Y} on {machine()}; {rounds_told(there, results)}.",
        "### Whole answers, 50 in flight",
        table(RATE_HEAD, (rate_row(tool, results[tool.adapter]) for tool in there)),
        "### Time to first token",
        *stream_parts(there, results),
        "### After `kill -9`",
        table(KILL_HEAD, (kill_row(tool, results[tool.adapter]) for tool in there)),
        "### Versions, and what each does besides",
        table(["tool", "versions", "to know"], (version_row(tool, results[tool.adapter]) for tool in there)),
    ]
    return "\n\n".join([*parts, *trouble(results)])


def rounds_told(tools: list[Tool], results: dict[str, Figures]) -> str:
    """How often each job was done."""
    counts = {}
    for job, name in (("whole answers", "rate"), ("streams", "streams-"), ("kills", "kill")):
        counts[job] = {
            len(undisturbed(results[tool.adapter], key))
            for tool in tools
            for key in results[tool.adapter]["measured"]
            if key.startswith(name)
        }
    return ", ".join(f"{job} in {'–'.join(map(str, sorted(count)))} rounds" for job, count in counts.items())


def table(head: list[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def best(results: Figures, name: str, merit: Callable[[Figures], float]) -> Figures | None:
    """The better of the rounds; None where none succeeded."""
    rounds = [one for one in undisturbed(results, name) if "failed" not in one]
    return max(rounds, key=merit, default=None)


def undisturbed(results: Figures, name: str) -> list[Figures]:
    """The rounds of a job beside which the machine had little else to do."""
    return [one for one in results["measured"].get(name, []) if "disturbed" not in one]


RATE_HEAD = [
    "tool",
    "requests/s",
    "in its other rounds",
    "CPU µs each",
    "peak memory",
    "processes",
    "start to end of 250",
    "requests",
]


def rate_row(tool: Tool, results: Figures) -> list[str]:
    figures = best(results, "rate", lambda one: float(one["per_second"]))
    if figures is None:
        return [tool.name, *(["—"] * (len(RATE_HEAD) - 1))]
    return [
        tool.name,
        rounded(figures["per_second"]),
        " · ".join(other_rates(results, figures)),
        rounded(figures["cpu_us"]),
        f"{figures['peak_mb']:,.0f} MB",
        f"{figures['processes']}",
        f"{figures['start_seconds']:.1f} s",
        f"{figures['requests']:,}",
    ]


def other_rates(results: Figures, shown: Figures) -> list[str]:
    """Requests a second of the rounds that are not shown, to see how far they are apart."""
    rounds = [one for one in undisturbed(results, "rate") if one is not shown]
    return ["failed" if "failed" in one else rounded(one["per_second"]) for one in rounds]


STREAM_HEAD = ["tool", "reported p50 / p99", "true", "off by", "open at the mock"]


def stream_parts(tools: list[Tool], results: dict[str, Figures]) -> list[str]:
    """A table for each number of streams and pace."""
    silent = [tool.name for tool in tools if not tool.first_token]
    parts = [f"Milliseconds. No time to first token is reported by {', '.join(silent)}." if silent else "Milliseconds."]
    for parallelism, interval in STREAMS:
        rows = (
            stream_row(tool, results[tool.adapter], f"streams-{parallelism}-{interval}")
            for tool in tools
            if tool.first_token
        )
        parts += [f"{parallelism} streams, a chunk every {interval} ms:", table(STREAM_HEAD, rows)]
    return parts


def stream_row(tool: Tool, results: Figures, name: str) -> list[str]:
    figures = best(results, name, lambda one: -error(one)[1])
    if figures is None:
        return [tool.name, *(["—"] * (len(STREAM_HEAD) - 1))]
    told, true, off = (
        f"{p50:,.0f} / {p99:,.0f}" for p50, p99 in (figures["reported"], figures["true"], error(figures))
    )
    return [tool.name, told, true, off, f"{figures['in_flight']:.0f}"]


def error(figures: Figures) -> tuple[float, float]:
    """By how many ms the reported p50 and p99 are off."""
    told, true = figures["reported"], figures["true"]
    return abs(told[0] - true[0]), abs(told[1] - true[1])


KILL_HEAD = ["tool", "finished at the kill", "found on disk", "sent again by a second start", "which then ended well"]


def kill_row(tool: Tool, results: Figures) -> list[str]:
    figures = best(results, "kill", lambda one: one["found"] / one["finished"])
    if figures is None:
        return [tool.name, *(["—"] * (len(KILL_HEAD) - 1))]
    counts = [f"{figures[name]}" for name in ("finished", "found", "asked_again")]
    return [tool.name, *counts, "yes" if figures["ended_well"] else "no"]


def version_row(tool: Tool, results: Figures) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return [tool.name, versions, tool.note]


def trouble(results: dict[str, Figures]) -> list[str]:
    """What could not be installed or measured, and why."""
    lines = []
    for tool in TOOLS:
        entry = results.get(tool.adapter, {})
        if "not_installed" in entry:
            lines.append(f"- {tool.name} could not be installed: {plain(entry['not_installed'])}")
        for name, rounds in entry.get("measured", {}).items():
            if rounds and all("failed" in one or "disturbed" in one for one in rounds):
                lines.append(f"- {tool.name}, {name}: {why_not(rounds[-1])}")
    return ["\n".join(["Not measured:", "", *lines])] if lines else []


def why_not(figures: Figures) -> str:
    """Why there is no figure."""
    if "failed" in figures:
        return plain(figures["failed"])
    return f"other work took {figures['disturbed']:.0%} of the machine beside it"


def plain(text: str) -> str:
    """One line that cannot be read as markup, without places of this machine in it."""
    return re.sub(r"(/[\w.-]+){2,}", "…", text).replace("|", "/").replace("<", "&lt;")


def rounded(value: float) -> str:
    """Two digits that mean something."""
    digits = 2 - len(f"{value:.0f}")
    return f"{round(value, min(digits, 0)):,.0f}"
