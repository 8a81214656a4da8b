"""Levels of a sweep made up from a few figures, and an endpoint with a limit of calls at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from steelyard.errors import TransientError
from steelyard.load.levels import Level, make_level, parse_slo
from steelyard.load.search import recommend
from steelyard.load.sweep import SweepResult
from steelyard.protocols import InvocationContext
from steelyard.records import EvalCase, InvocationResponse
from steelyard.stats.client_load import ClientLoad
from steelyard.stats.metrics import Counts, Metrics
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


def metrics_of(
    per_second: float,
    *,
    errors: float = 0.0,
    requests: int = 1000,
    peak: int,
    first: float | None = 0.1,
    pass_rate: float | None = 0.9,
    client: ClientLoad | None = None,
) -> Metrics:
    """The metrics of a run, as far as a sweep looks at them."""
    stats: dict[str, Any] = {"requests_per_minute": per_second * 60, "output_tps": per_second * 24}
    for metric, scale in (("time_to_first_token", 1.0), ("time_to_last_token", 4.0), ("time_per_output_token", 0.05)):
        for name, factor in (("average", 1.1), ("p50", 1.0), ("p90", 1.5), ("p99", 2.0), ("min", 0.5), ("max", 3.0)):
            stats[f"{metric}-{name}"] = None if first is None else first * scale * factor
    return Metrics(
        suite="s",
        n=requests,
        counts=Counts(planned=requests, ok=requests, error=0, cancelled=0, not_started=0),
        scoring_errors=0,
        errors={},
        scores={},
        active_seconds=requests / per_second if per_second else 1.0,
        error_rate=errors,
        pass_rate=pass_rate,
        pass_rate_all=pass_rate,
        pass_rate_ci95=None if pass_rate is None else (pass_rate - 0.05, pass_rate + 0.05),
        peak_in_flight=peak,
        client=client or QUIET,
        stats=stats,
    )


def level(
    number: int,
    per_second: float,
    *,
    slo: str = "error_rate<=1%",
    reached: bool = True,
    busy: bool = False,
    requests: int | None = None,
    **figures: Any,
) -> Level:
    """A level that brought so many answers a second."""
    metrics = metrics_of(
        per_second,
        peak=number if reached else number // 2,
        client=BUSY if busy else None,
        requests=10 * number if requests is None else requests,
        **figures,
    )
    return make_level(number, f"level-{number}", metrics, parse_slo(slo))


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
        recommendation=recommend(levels),
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
