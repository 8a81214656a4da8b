"""The client watches itself: lag counts whether or not a tick could run, and the verdict has a reason."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import CancellationToken, EvalCase, EvalSet, Runner
from steelyard.protocols import Tally
from steelyard.run.options import RunOptions
from steelyard.run.send_policy import SendPolicy
from steelyard.stats import client_load
from steelyard.stats.client_load import (
    BUSY,
    LATE,
    LATE_SHARE,
    STOOD_STILL,
    ClientLoad,
    LoopMonitor,
    judge_client,
    judge_driver,
    with_earlier,
)
from steelyard.targets import OpenAIChat


class Timer:
    """What a loop gives back for a callback; never fires by itself."""

    def cancel(self) -> None: ...


class StillLoop:
    """A loop that is told when it runs its timers."""

    def __init__(self) -> None:
        self.delays: list[float] = []

    def call_later(self, delay: float, callback: Any) -> Timer:
        self.delays.append(delay)
        self.callback = callback
        return Timer()


class Clocks:
    """Clocks that stand until they are moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = 1000.0
        self.thread = 5.0
        self.process = 7.0
        self.loop = StillLoop()
        monkeypatch.setattr(client_load.time, "monotonic", lambda: self.wall)
        monkeypatch.setattr(client_load.time, "thread_time", lambda: self.thread)
        monkeypatch.setattr(client_load.time, "process_time", lambda: self.process)
        monkeypatch.setattr(client_load.asyncio, "get_running_loop", lambda: self.loop)

    def tick_at(self, moment: float) -> None:
        """Let the pending timer fire this many seconds after the start."""
        self.wall = 1000.0 + moment
        self.loop.callback()


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def watched(clocks: Clocks, moments: list[float], *, end: float) -> ClientLoad:
    clocks.wall = 1000.0
    monitor = LoopMonitor(tick=0.1)
    monitor.start()
    for moment in moments:
        clocks.tick_at(moment)
    clocks.wall = 1000.0 + end
    return monitor.stop()


def test_the_lag_is_how_much_later_than_due_a_tick_ran(clocks: Clocks) -> None:
    load = watched(clocks, [0.11, 0.22, 0.33], end=0.39)
    assert load.loop_lag_p50 == pytest.approx(0.02, rel=0.01)
    assert load.loop_lag_max == pytest.approx(0.03)


def test_ticks_stay_on_their_grid(clocks: Clocks) -> None:
    """Lateness is made up for, so that it does not add up and nothing drifts."""
    watched(clocks, [0.13, 0.21], end=0.25)
    assert clocks.loop.delays == pytest.approx([0.1, 0.07, 0.09])


def test_a_blocked_loop_counts_for_as_long_as_it_was_blocked(clocks: Clocks) -> None:
    """One late tick stands for all that were due meanwhile: a tenth of the time blocked shows at p99."""
    quiet = [0.1 * number + 0.001 for number in range(1, 91)]
    load = watched(clocks, [*quiet, 10.1], end=10.15)
    assert load.loop_lag_max == pytest.approx(1.0)
    assert load.loop_lag_p99 > 0.85
    assert load.loop_lag_p50 == pytest.approx(0.001, abs=2e-4)


def test_one_hiccup_in_a_short_measurement_is_not_sustained_and_a_third_is(clocks: Clocks) -> None:
    quiet = [0.1 * number for number in range(1, 51)]
    hiccups = [moment + 0.09 if number in (10, 20) else moment for number, moment in enumerate(quiet)]
    twice = watched(clocks, hiccups, end=5.05)
    assert twice.loop_lag_p99 > 0.08
    assert twice.loop_lag_sustained == pytest.approx(0.0, abs=1e-6)
    hiccups[30] += 0.09
    assert watched(clocks, hiccups, end=5.05).loop_lag_sustained == pytest.approx(0.09, rel=0.01)


def test_over_a_long_time_the_sustained_lag_is_the_99th_percentile(clocks: Clocks) -> None:
    load = watched(clocks, [0.1 * number + 0.0001 * (number % 500) for number in range(1, 1000)], end=100.0)
    assert load.loop_lag_sustained == load.loop_lag_p99 > 0.04


def test_a_loop_that_is_blocked_to_the_very_end_counts_too(clocks: Clocks) -> None:
    load = watched(clocks, [0.1], end=3.2)
    assert load.loop_lag_max == pytest.approx(3.0)


def test_a_process_that_stood_still_shows_as_the_maximum_and_is_told_apart(clocks: Clocks) -> None:
    quiet = [0.1 * number for number in range(1, 201)]
    asleep = 20.1 + 600.0
    load = watched(clocks, [*quiet, asleep, *(asleep + 0.1 * number for number in range(1, 201))], end=asleep + 20)
    assert load.stood_still == pytest.approx(600.0)
    assert load.loop_lag_max == pytest.approx(600.0)
    assert load.loop_lag_p99 < 0.01
    assert load.seconds == pytest.approx(40.1)
    assert not judge_client(load, 0.1).bottleneck


def test_a_loop_that_stands_still_again_and_again_is_late(clocks: Clocks) -> None:
    load = watched(clocks, [40.0 * number for number in range(1, 11)], end=400.0)
    assert load.loop_lag_p50 >= STOOD_STILL
    assert judge_client(load, 1.0).bottleneck


def test_shares_are_cpu_time_over_the_time_watched(clocks: Clocks) -> None:
    monitor = LoopMonitor()
    monitor.start()
    clocks.wall, clocks.thread, clocks.process = 1002.0, 5.5, 10.0
    load = monitor.stop()
    assert (load.loop_cpu_share, load.cpu_share) == (0.25, 1.5)


@given(st.lists(st.floats(0.0, 2.0), min_size=1, max_size=60))
def test_every_tick_that_was_due_is_counted_once(gaps: list[float]) -> None:
    monitor = LoopMonitor(tick=0.1)
    monitor._due, now = 0.1, 0.0
    for gap in gaps:
        now = max(now, monitor._due) + gap
        monitor._count(now)
    due = 0.1 * np.arange(1, len(monitor._recent) + 1)
    assert monitor._due >= now - 1e-9
    assert monitor._due - now <= 0.1 + 1e-9
    assert due[-1] + 0.1 == pytest.approx(monitor._due)


def load_of(**figures: Any) -> ClientLoad:
    quiet = {
        "seconds": 10.0,
        "loop_lag_p50": 0.001,
        "loop_lag_p99": 0.002,
        "loop_lag_max": 0.01,
        "loop_lag_sustained": 0.002,
    }
    return ClientLoad(**{"cpu_share": 0.3, "loop_cpu_share": 0.2, **quiet, **figures})


@pytest.mark.parametrize(
    ("figures", "first_token", "bottleneck"),
    [
        ({}, 0.2, False),
        ({"loop_cpu_share": BUSY}, 0.2, True),
        ({"loop_cpu_share": BUSY}, None, True),
        ({"loop_cpu_share": BUSY - 0.01}, 0.2, False),
        ({"cpu_share": 3.0}, 0.2, False),
        ({"loop_lag_sustained": LATE}, LATE / LATE_SHARE, True),
        ({"loop_lag_sustained": LATE}, LATE / LATE_SHARE + 0.001, False),
        ({"loop_lag_sustained": LATE - 0.001}, 0.001, False),
        ({"loop_lag_sustained": 1.0}, None, False),
        ({"loop_lag_max": 5.0, "loop_lag_p99": 5.0}, 0.2, False),
        ({"loop_cpu_share": 1.0, "seconds": 0.1}, 0.2, False),
    ],
)
def test_the_client_was_the_bottleneck_when_busy_or_late(
    figures: dict[str, float], first_token: float | None, bottleneck: bool
) -> None:
    judged = judge_client(load_of(**figures), first_token)
    assert judged.bottleneck is bottleneck
    assert (judged.reason is not None) is bottleneck


def test_the_reason_says_what_was_seen() -> None:
    assert judge_client(load_of(loop_cpu_share=0.97), 0.2).reason == "its event loop was busy 97% of the time"
    assert judge_client(load_of(loop_lag_sustained=0.045), 0.2).reason == (
        "its event loop ran 45ms late, with a median time to first token of 200ms"
    )


def test_the_load_of_several_sittings_is_that_of_all_of_them_and_the_worst_lag() -> None:
    first = load_of(seconds=30.0, cpu_share=0.2, loop_cpu_share=0.1, loop_lag_p99=0.4, loop_lag_max=0.5, peak_rss=5)
    last = load_of(seconds=10.0, cpu_share=0.6, loop_cpu_share=0.5, loop_lag_p99=0.1, loop_lag_max=0.9, peak_rss=None)
    both = with_earlier(first, last)
    assert (both.seconds, both.launches) == (40.0, 2)
    assert (both.cpu_share, both.loop_cpu_share) == (pytest.approx(0.3), pytest.approx(0.2))
    assert (both.loop_lag_p99, both.loop_lag_max, both.peak_rss) == (0.4, 0.9, 5)
    assert not both.bottleneck


@pytest.mark.parametrize(
    ("process", "reason", "remedy"),
    [
        (None, "its event loop was busy 95% of the time", "spread the calls over processes: --workers N"),
        ("worker process 7", "worker process 7's event loop was busy", "over more workers: --workers"),
    ],
)
def test_a_bottleneck_names_its_process_and_offers_workers(process, reason, remedy) -> None:
    busy = load_of(seconds=5.0, loop_cpu_share=0.95, process=process)
    judged = judge_client(busy, None)
    assert reason in (judged.reason or "")
    assert remedy in (judged.remedy or "")
    assert load_of().remedy is None


def test_no_option_takes_work_off_a_driver() -> None:
    judged = client_load.judge_driver(load_of(seconds=5.0, loop_cpu_share=0.95), None)
    assert (judged.bottleneck, judged.process, judged.remedy) == (True, "the driver", None)


def test_a_bottleneck_in_an_earlier_sitting_stays_one_and_says_when() -> None:
    busy = load_of(bottleneck=True, reason="its event loop was busy 97% of the time")
    twice = with_earlier(with_earlier(busy, load_of()), load_of())
    assert (twice.bottleneck, twice.launches) == (True, 3)
    assert twice.reason == "in an earlier launch its event loop was busy 97% of the time"
    assert with_earlier(load_of(), busy).reason == busy.reason


def test_metrics_carry_every_figure_as_json() -> None:
    load = judge_client(load_of(loop_cpu_share=0.97), 0.2)
    assert set(msgspec.json.decode(msgspec.json.encode(load))) == set(ClientLoad.__struct_fields__)
    assert msgspec.json.decode(msgspec.json.encode(load), type=ClientLoad) == load


def test_a_real_loop_that_is_blocked_is_seen_and_one_that_waits_is_not_busy() -> None:
    async def watch() -> tuple[ClientLoad, ClientLoad]:
        monitor = LoopMonitor()
        monitor.start()
        await asyncio.sleep(0.1)
        time.sleep(0.3)  # noqa: ASYNC251 - what a careless target does
        blocked = monitor.stop()
        monitor = LoopMonitor()
        monitor.start()
        await asyncio.sleep(0.3)
        return blocked, monitor.stop()

    blocked, waiting = asyncio.run(watch())
    assert blocked.loop_lag_max >= 0.27
    assert judge_client(blocked, 0.1).bottleneck
    assert waiting.loop_cpu_share < BUSY
    assert waiting.peak_rss is None or waiting.peak_rss > 1_000_000


def test_a_stopped_monitor_leaves_no_timer_behind() -> None:
    async def watch() -> int:
        monitor = LoopMonitor(tick=0.001)
        monitor.start()
        await asyncio.sleep(0.01)
        monitor.stop()
        counted = monitor._sketch.count
        await asyncio.sleep(0.01)
        return len(monitor._recent) + monitor._sketch.count - counted

    assert asyncio.run(watch()) == 0


def test_a_run_of_several_sittings_tells_of_all_that_were_watched_to_their_end(tmp_path: Path) -> None:
    suite = EvalSet(id="s", cases=[EvalCase(id=f"c{number}", prompt="p") for number in range(6)])
    stop_at: dict[str, CancellationToken] = {}

    async def answer(case: EvalCase) -> str:
        if case.id in stop_at:
            stop_at[case.id].cancel("enough")
        if case.id == "c5":
            raise ValueError("told to fail")
        return "a"

    def client(token: CancellationToken | None = None, **entry: bool) -> dict[str, Any]:
        runner = Runner(answer, suite, output_path=tmp_path / "r", token=token, progress="off")
        found: dict[str, Any] = runner.run_sync(**entry).metrics["client"]
        return found

    seen = []
    for case_id in ("c1", "c3", "never"):
        token = stop_at[case_id] = CancellationToken()
        seen.append(client(token))
    assert [client["launches"] for client in seen] == [1, 2, 3]
    assert seen[0]["seconds"] < seen[1]["seconds"] < seen[2]["seconds"]
    assert client(retry_errors=True)["launches"] == 4
    stop_at.clear()
    assert client(force=True)["launches"] == 1


def test_what_an_older_run_says_of_its_client_does_not_hinder_a_resume(tmp_path: Path) -> None:
    suite = EvalSet(id="s", cases=[EvalCase(id="c0", prompt="p")])
    runner = Runner(lambda case: "a", suite, output_path=tmp_path / "r", progress="off")
    runner.run_sync()
    (tmp_path / "r" / "metrics.json").rename(tmp_path / "r" / "partial.json")
    metrics = msgspec.json.decode((tmp_path / "r" / "partial.json").read_bytes())
    metrics["client"] = {"lag": 3}
    (tmp_path / "r" / "partial.json").write_bytes(msgspec.json.encode(metrics))
    assert runner.run_sync().metrics["client"]["launches"] == 1


@pytest.mark.parametrize(
    ("figures", "p50", "reason"),
    [
        ({"loop_lag_sustained": 0.04}, 0.1, None),  # its workers have enough to do meanwhile
        ({"loop_lag_sustained": 0.09}, 0.1, "the driver's event loop ran 90ms late"),
        ({"loop_lag_sustained": 0.09}, 5.0, None),
        ({"loop_lag_sustained": 0.9}, 5.0, "the driver's event loop ran 900ms late"),
        ({"loop_cpu_share": 0.95}, 5.0, "the driver's event loop was busy 95% of the time"),
        ({"loop_cpu_share": 0.95, "seconds": 0.1}, 5.0, None),
    ],
)
def test_a_driver_is_the_bottleneck_when_its_workers_had_to_wait_for_it(figures, p50, reason) -> None:
    judged = judge_driver(load_of(**figures), p50)
    assert judged.bottleneck is (reason is not None)
    assert (judged.reason or "").startswith(reason or "")


@pytest.mark.parametrize(("driver_late", "workers_late"), [(0.2, 0.0), (0.0, 0.2), (0.2, 0.3), (0.4, 0.3)])
def test_the_driver_counts_in_the_verdict_of_a_run_on_workers(monkeypatch, driver_late, workers_late) -> None:
    policy = SendPolicy(OpenAIChat("m", base_url="http://127.0.0.1:9/v1"), [], RunOptions(parallelism=4))
    monkeypatch.setattr(policy._monitor, "stop", lambda: load_of(loop_lag_sustained=driver_late))
    policy.stop_watching([load_of(loop_lag_sustained=workers_late), load_of()])
    times = {"time_to_first_token-p50": 0.1, "time_to_last_token-p50": 0.5}
    client = policy.to_metrics(Tally(), times)["client"]
    assert client.bottleneck
    assert client.reason.startswith("its event loop" if workers_late > driver_late else "the driver's event loop")
