"""Levels of a sweep made up from a few figures, and an endpoint with a limit of calls at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from steelyard.errors import TransientError
from steelyard.load.levels import PERCENTILES, Level, parse_slo
from steelyard.load.search import Recommendation, found_so_far, recommend
from steelyard.load.sweep import SweepResult
from steelyard.protocols import InvocationContext
from steelyard.records import EvalCase, InvocationResponse
from steelyard.stats.client_load import ClientLoad
from tests.support.report import HOSTILE

QUIET = ClientLoad(
    seconds=1.0,
    loop_lag_p50=0.0,
    loop_lag_p99=0.001,
    loop_lag_max=0.002,
    loop_lag_sustained=0.001,
    cpu_share=0.1,
    loop_cpu_share=0.1,
)
BUSY = msgspec.structs.replace(
    QUIET, bottleneck=True, reason="its event loop was busy 97% of the time", loop_cpu_share=0.97
)


def level(
    number: int,
    per_second: float,
    *,
    slo: str = "error_rate<=1%",
    reached: bool = True,
    busy: bool = False,
    requests: int | None = None,
    errors: float = 0.0,
    first: float | None = 0.1,
    pass_rate: float | None = 0.9,
    goodput: float | None = None,
    undecided: tuple[str, ...] = (),
) -> Level:
    """A level that brought so many answers a second; objectives are checked against its figures as they are."""
    sent = 10 * number if requests is None else requests
    figures: dict[str, float | None] = {"error_rate": errors, "pass_rate": pass_rate}
    for metric, scale in (("time_to_first_token", 1.0), ("time_to_last_token", 4.0)):
        for name, factor in (("p50", 1.0), ("p90", 1.5), ("p99", 2.0)):
            figures[f"{metric}-{name}"] = None if first is None else first * scale * factor
    checked = [(one, figures.get(one.figure)) for one in parse_slo(slo)]
    client = BUSY if busy else QUIET
    return Level(
        level=number,
        run=f"level-{number}",
        runs=[f"level-{number}"],
        requests=sent,
        active_seconds=sent / per_second if per_second else 1.0,
        requests_per_second=per_second,
        requests_per_second_ci95=(per_second * 0.95, per_second * 1.05) if sent >= 10 * number else None,
        goodput=goodput,
        error_rate=errors,
        pass_rate=pass_rate,
        pass_rate_ci95=None if pass_rate is None else (pass_rate - 0.05, pass_rate + 0.05),
        output_tps=per_second * 24,
        time_to_first_token={name: figures[f"time_to_first_token-{name}"] for name in PERCENTILES},
        time_to_last_token={name: figures[f"time_to_last_token-{name}"] for name in PERCENTILES},
        peak_in_flight=number if reached else number // 2,
        client=client,
        invalid=client.reason,
        broken=[one.describe(value) for one, value in checked if not one.holds(value)],
        undecided=list(undecided),
        reached=reached,
    )


def advice(levels: list[Level]) -> Recommendation:
    """What a sweep would recommend whose answers all took as long as the levels' throughput says."""
    latencies = {
        one.level: [np.full(max(one.requests, 20), one.level / one.requests_per_second)]
        for one in levels
        if one.requests_per_second > 1e-6
    }
    for one in levels:
        latencies.setdefault(one.level, [])
    return recommend(levels, *found_so_far(levels, latencies))


class LimitedTarget:
    """A target that answers in `seconds`, and refuses at once what goes beyond `places` calls in flight."""

    model_id = "limited"
    default_parallelism = 1

    def __init__(self, places: int, seconds: float = 0.02) -> None:
        self.places = places
        self.seconds = seconds
        self.in_flight = 0
        self.asked = 0

    def identity(self) -> dict[str, Any]:
        return {"kind": "limited", "places": self.places}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        self.asked += 1
        if self.in_flight >= self.places:
            await asyncio.sleep(self.seconds / 4)
            raise TransientError("429: too many", overloaded=True)
        self.in_flight += 1
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.in_flight -= 1
        return InvocationResponse(
            response_text=(case.prompt or "").upper(),
            time_to_first_token=self.seconds / 2,
            time_to_last_token=self.seconds,
            num_tokens_output=5,
        )


def swept(levels: list[Level], *, slo: str = "error_rate<=1%", suite: str = "capitals", **more: Any) -> dict[str, Any]:
    """What sweep.json would say of these levels."""
    result = SweepResult(
        suite=suite,
        model_id="gpt-4.1",
        asked={},
        objectives=parse_slo(slo),
        levels=levels,
        recommendation=advice(levels),
        path=Path("out"),
        **more,
    )
    return result.to_metrics()


def mixed_sweep() -> dict[str, Any]:
    """Three levels that grow, one that breaks, one that was not reached, one at which the client was the bottleneck."""
    slo = "ttft_p99<1s,error_rate<=1%"
    grows = [level(number, number * 9.0, slo=slo) for number in (1, 4, 16)]
    breaks = level(32, 150, slo=slo, errors=0.2)
    weak = [level(48, 160, slo=slo, reached=False), level(64, 170, slo=slo, busy=True)]
    return swept([*grows, breaks, *weak], slo=slo)


def hostile_sweep() -> dict[str, Any]:
    """A sweep whose every text tries to be something else."""
    sweep = swept([level(number + 1, 10.0 + number) for number in range(len(HOSTILE))], suite=HOSTILE[0])
    sweep["model_id"] = HOSTILE[3]
    sweep["recommendation"] |= {"reason": HOSTILE[1], "says": HOSTILE[18]}
    sweep["objectives"][0]["text"] = HOSTILE[4]
    for one, text in zip(sweep["levels"], HOSTILE, strict=True):
        one |= {"invalid": text, "broken": [text], "worst_error": text, "error_rate": 0.5, "run": text}
    return sweep
