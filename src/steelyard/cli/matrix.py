"""`steelyard run` on a suite that describes a matrix: all of its variants, in one folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from steelyard.cli.main import TOO_MANY_ERRORS
from steelyard.cli.output import say, show, show_json
from steelyard.cli.output_dir import choose_matrix_place, command_again, does_again, remove_if_unused, warn_if_temporary
from steelyard.cli.run_control import allow_calls, partial_result, run_interruptibly, verdict_code
from steelyard.errors import ConfigurationError
from steelyard.journal.files import RunState, run_state
from steelyard.run.config import Gate
from steelyard.run.directory import OpenMode
from steelyard.run.matrix import Matrix, Variant, look_at_matrix, read_matrix
from steelyard.run.matrix_runner import MatrixResult, MatrixRunner
from steelyard.stats.formatting import counted, safe_text
from steelyard.stats.metrics import marked_pass_rate
from steelyard.stats.prices import format_money

if TYPE_CHECKING:
    from steelyard.cli.dry_run import PlannedRun
    from steelyard.cli.run import RunFlags


def run_matrix(matrix: MatrixRunner, gate: Gate, flags: RunFlags, entry: OpenMode) -> int:
    """Run a matrix, or with --dry-run only say what would be asked; the exit code."""
    if matrix.options.is_load:
        raise ConfigurationError("a matrix evaluates: measure one of its variants under load with a separate suite")
    place = choose_matrix_place(matrix, flags)
    warn_if_temporary(place)
    matrix = matrix.with_changes(output_path=place, low_memory=True)
    if flags.dry_run:
        planned = look_ahead(matrix, entry)
        show_json(planned) if flags.as_json else show(planned.describe())
        return 0
    allow_calls(sum(matrix.parallelism.values()))
    from steelyard.cli.run import traced

    try:
        with traced(matrix.runners.values(), matrix.engine, flags.otel):
            return _run(matrix, gate, flags, entry, place)
    finally:
        remove_if_unused(place)
        if matrix.engine is not None:
            matrix.engine.close()


def _run(matrix: MatrixRunner, gate: Gate, flags: RunFlags, entry: OpenMode, place: Path) -> int:
    again = command_again(place)
    assert matrix.token is not None
    ending = run_interruptibly(
        lambda: matrix.run(**msgspec.structs.asdict(entry)),
        again,
        token=matrix.token,
        read_partial=lambda reason: _partial(matrix, place, reason),
    )
    if ending.result is None:
        say(f"resume with: {command_again(place, begun=False)}", whole=True)
        return ending.signal_code
    result = ending.result
    _show(result, flags, place, interrupted=ending.signal_code != 0)
    if not result.complete:
        stopped = {name: one.typed_metrics.stopped or "" for name, one in result.results.items() if not one.complete}
        for name, reason in stopped.items():
            if not ending.signal_code and "max_cost" not in reason:
                say(f"{safe_text(name)}: {safe_text(reason)}")
        # The same command would stop at once where the budget is spent.
        more = " a larger --max-cost" if any("max_cost" in reason for reason in stopped.values()) else ""
        say(f"resume with{more}: {again}", whole=True)
        return ending.signal_code or TOO_MANY_ERRORS
    return max(_verdict(name, result, gate) for name in result.results)


def _verdict(name: str, result: MatrixResult, gate: Gate) -> int:
    """The exit code of one variant; what it breaks is said with its name."""
    metrics = result[name].typed_metrics
    remedy = f"--retry-errors {does_again(metrics.counts.error, metrics.scoring_errors)}"
    return verdict_code(metrics, gate, remedy=remedy, of=name)


def _partial(matrix: MatrixRunner, place: Path, reason: str | None) -> MatrixResult:
    """The results of a matrix that could not write them itself, from the journals of its variants."""
    described = read_matrix(place)
    chosen = {variant.name for variant in matrix.variants}
    runs = {name: run for name, run in described.runs(place).items() if name in chosen}
    begun = {name: run for name, run in runs.items() if run_state(run) is not RunState.FRESH}
    return MatrixResult(described, place, {name: partial_result(run, reason) for name, run in begun.items()})


def _show(result: MatrixResult, flags: RunFlags, place: Path, *, interrupted: bool) -> None:
    if flags.as_json:
        show_json({"run": str(place), "variants": {name: one.metrics for name, one in result.results.items()}})
    elif interrupted:
        show(_so_far(result, place))
    else:
        from steelyard.report.matrix.leaderboard import leaderboard
        from steelyard.report.matrix.text import leaderboard_text

        show(leaderboard_text(leaderboard(place)), in_colour=True)


def _so_far(result: MatrixResult, place: Path) -> str:
    """How far each variant has come, from what is in memory: after a signal there is no time to compare them."""
    rows: list[tuple[str, ...]] = [("variant", "done", "errors", "pass rate")]
    for name, one in result.results.items():
        counts = one.typed_metrics.counts
        done, rate = f"{counts.ok + counts.error:,}/{counts.planned:,}", marked_pass_rate(one.typed_metrics)
        rows.append((safe_text(name), done, f"{counts.error:,}", rate))
    return "\n".join([*_aligned(rows), f"results in {safe_text(str(place))}"])


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """The rows of a table, the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        f"  {row[0].ljust(widths[0])}"
        + "".join(f"  {cell.rjust(width)}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


class PlannedVariant(msgspec.Struct, frozen=True, kw_only=True):
    """What one variant would ask."""

    name: str
    plan: PlannedRun | None
    """None of a variant that is complete, and stays as it is."""


class PlannedMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """What a matrix would ask, and what that would cost."""

    suite: str
    run: str
    parallelism: dict[str, int | str]
    """How many calls at once, at each endpoint."""
    variants: list[PlannedVariant]
    to_ask: int
    cost: float | None
    """Of all variants; None where that of one is not known."""
    currency: str
    max_cost: float | None

    def describe(self) -> str:
        """The plan in words: a row for each variant, and the sums."""
        from steelyard.cli.dry_run import at_once

        rows: list[tuple[str, ...]] = [("variant", "cases", "done", "cached", "to ask", "input tokens", "cost")]
        for variant in self.variants:
            rows.append((safe_text(variant.name), *_cells(variant.plan)))
        total = "not known" if self.cost is None else format_money(self.cost, safe_text(self.currency))
        rows.append(("all", "", "", "", f"{self.to_ask:,}", "", total))
        limits = ", ".join(f"{at_once(most)} at {safe_text(place)}" for place, most in self.parallelism.items())
        lines = [
            f"{safe_text(self.suite)}: {counted(len(self.variants), 'variant')}, in {safe_text(self.run)}",
            *_aligned(rows),
        ]
        lines.append(f"  {limits}; nothing was called; input tokens are estimated")
        judges = sum(one.plan.judge_calls for one in self.variants if one.plan is not None)
        if judges:
            lines.append(f"  judges: at most {counted(judges, 'call')}, not in the estimate")
        if self.max_cost is not None:
            money = format_money(self.max_cost, safe_text(self.currency))
            lines.append(f"  max_cost: all variants together stop at {money}")
        return "\n".join(lines)


def _cells(plan: PlannedRun | None) -> tuple[str, ...]:
    if plan is None:
        return ("", "complete", "", "0", "", "")
    estimate = plan.estimate
    cost = "not known" if estimate.cost is None else format_money(estimate.cost, safe_text(estimate.currency))
    bound = "" if estimate.cost is None or estimate.cost_bound is None else f"{estimate.cost_bound} "
    done = plan.done + plan.to_score + plan.to_judge
    return (
        f"{plan.cases:,}", f"{done:,}", f"{plan.cached:,}", f"{plan.to_ask or 0:,}", f"{estimate.input_tokens:,}",
        f"{bound}{cost}" if plan.to_ask else "–",
    )  # fmt: skip


def look_ahead(matrix: MatrixRunner, entry: OpenMode) -> PlannedMatrix:
    """What a matrix would do, refusing what it would refuse; reads what is on disk and changes nothing."""
    from steelyard.cli.dry_run import look_ahead as look_at_run

    folder = Path(matrix.options.output_path or ".")
    described, modes = look_at_matrix(
        folder, matrix.suite.id, matrix.axes, [one.name for one in matrix.variants], entry, matrix.check_same
    )
    planned = []
    for variant in _chosen(described, matrix):
        mode = modes[variant.name]
        plan = None if mode.if_complete == "load" else look_at_run(matrix.runner_of(variant), mode)
        planned.append(PlannedVariant(name=variant.name, plan=plan))
    plans = [one.plan for one in planned if one.plan is not None]
    costs = [one.estimate.cost if one.to_ask else 0.0 for one in plans]
    return PlannedMatrix(
        suite=matrix.suite.id,
        run=str(folder),
        parallelism={
            place: "auto" if matrix.options.parallelism == "auto" else most
            for place, most in matrix.parallelism.items()
        },
        variants=planned,
        to_ask=sum(one.to_ask or 0 for one in plans),
        cost=None if None in costs else math.fsum(cost for cost in costs if cost is not None),
        currency=plans[0].estimate.currency if plans else "USD",
        max_cost=matrix.options.max_cost,
    )


def _chosen(described: Matrix, matrix: MatrixRunner) -> list[Variant]:
    names = {variant.name for variant in matrix.variants}
    return [variant for variant in described.variants if variant.name in names]
