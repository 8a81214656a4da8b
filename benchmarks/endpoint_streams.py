"""How late first tokens are seen with 500 streams at once: a run of Steelyard against a bare aiohttp loop.

The streams start in step over open connections and the mock, in another process, sends each a chunk at a fixed pace:
the quickest that it keeps by itself, found first with a client that only counts. The error is what a client reports
(when it sent, plus its time to first token) less the moment at which the mock says that it wrote that token.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import uvloop

from benchmarks.mock_ceiling import lateness, mock
from benchmarks.mock_times import answered, forget, wall_to_monotonic
from benchmarks.rows import Row
from benchmarks.yardstick import run_yardstick
from steelyard import EvalCase, EvalSet, Runner
from steelyard.targets import OpenAIChat

STREAMS = 500
CHUNKS = 64
IN_A_ROW = 3
FIRST_MS = 100
INTERVALS_MS = (5, 10, 20)
ON_TIME_MS = 5.0
"""The mock keeps a pace when 99 of 100 chunks leave no later than this."""
TRIES = 5
ROUNDS = 7
"""Whatever else the machine does only adds: the best round of each counts."""
LIMITS = ((50, 0.5), (99, 0.75))
SLOWEST = 1.25


@dataclass
class Stream:
    """What a client says of one stream: the moment of its first token, how long it took and its number of tokens."""

    request_id: str
    first: float
    lasted: float
    tokens: int


@dataclass
class Seen:
    """Milliseconds: how late first tokens were reported, and how late the mock sent them; the longest stream."""

    client: npt.NDArray[np.float64]
    mock: npt.NDArray[np.float64]
    longest: float
    cpu: float


Ask = Callable[[str, list[EvalCase], Path], list[Stream]]


def ask_with_steelyard(base_url: str, cases: list[EvalCase], folder: Path) -> list[Stream]:
    target = OpenAIChat("mock", base_url=base_url, api_key="nobody")
    runner = Runner(target, EvalSet("streams", cases), ["exact"], parallelism=STREAMS, progress="off", warmup=STREAMS)
    place, loop = folder / "run", uvloop.new_event_loop
    result = runner.run_sync(force=True, low_memory=True, output_path=place, loop_factory=loop)
    ahead = wall_to_monotonic()
    return [
        Stream(
            one.request_id,
            one.request_time.timestamp() + ahead + one.time_queued + one.time_to_first_token,
            one.time_to_last_token,
            one.num_tokens_output,
        )
        for one in result.iter_responses()
    ]


def ask_with_yardstick(base_url: str, cases: list[EvalCase], folder: Path) -> list[Stream]:
    path, url = folder / "bare.jsonl", f"{base_url}/chat/completions"
    run_yardstick(url, cases, path, parallelism=STREAMS, stream=True, warmup=STREAMS)
    return [
        Stream(
            one["request_id"],
            one["started"] + one["time_to_first_token"],
            one["time_to_last_token"],
            one["usage"]["completion_tokens"],
        )
        for one in map(json.loads, path.open("rb"))
    ]


def seen(ask: Ask, address: str, folder: Path) -> Seen:
    cases = [EvalCase(id=f"case-{n}", prompt=f"Tell of {n}.", expected="") for n in range(STREAMS * IN_A_ROW)]
    forget(address)
    before = time.process_time()
    streams = ask(f"{address}/v1", cases, folder)
    cpu = time.process_time() - before
    if len(streams) != len(cases) or any(stream.tokens != CHUNKS for stream in streams):
        raise AssertionError(f"not all of {len(cases)} streams came whole")
    sent = answered(address)
    errors = [stream.first - sent[stream.request_id].first for stream in streams]
    delays = [sent[stream.request_id].first - sent[stream.request_id].received for stream in streams]
    return Seen(
        np.array(errors) * 1e3,
        np.array(delays) * 1e3 - FIRST_MS,
        max(stream.lasted for stream in streams) * 1e3,
        cpu / ((STREAMS + len(streams)) * CHUNKS) * 1e6,
    )


def quickest_pace() -> tuple[int, str]:
    """Milliseconds from chunk to chunk that the mock can keep for all streams; and how it did at those tried."""
    told = []
    for interval in INTERVALS_MS:
        tries = [np.percentile(lateness(interval)[0], (50, 99)) for _ in range(TRIES)]
        middle, worst = min(tries, key=lambda one: float(one[1]))
        told.append(f"{interval} ms: {middle:.1f}/{worst:.1f} ms late at p50/p99")
        if worst <= ON_TIME_MS:
            break
    return interval, f"the mock alone, a chunk every {', '.join(told)}"


def late_rows(ours: list[Seen], theirs: list[Seen], detail: str) -> list[Row]:
    """How late first tokens were, as a share of the bare loop's."""
    rows = []
    for percent, limit in LIMITS:
        late, bare = (min(float(np.percentile(one.client, percent)) for one in rounds) for rounds in (ours, theirs))
        what = f"{STREAMS} streams: first token p{percent}"
        rows.append(Row(what, late / bare, limit, f"{late:.2f} against {bare:.2f} ms late; {detail}", "× bare loop's"))
    return rows


def longest_row(ours: list[Seen], theirs: list[Seen], due: int) -> Row:
    """How much longer than due the longest stream took: none was starved."""
    longest, bare = (min(one.longest for one in rounds) for rounds in (ours, theirs))
    cpu, bare_cpu = (min(one.cpu for one in rounds) for rounds in (ours, theirs))
    detail = f"{longest:.0f} ms, bare loop {bare:.0f}, due {due}; CPU a chunk {cpu:.1f} against {bare_cpu:.1f} µs"
    return Row(f"{STREAMS} streams, all whole: the longest", longest / due, SLOWEST, detail, "× its due time")


def measure() -> list[Row]:
    """Several rounds, in which the two take turns at going first."""
    interval, ceiling = quickest_pace()
    flags = ("--latency", f"{FIRST_MS}ms", "--chunk-interval", f"{interval}ms", "--output-tokens", str(CHUNKS))
    clients: list[tuple[Ask, list[Seen]]] = [(ask_with_steelyard, []), (ask_with_yardstick, [])]
    with tempfile.TemporaryDirectory() as name, mock(*flags) as (_, (host, port)):
        for number in range(ROUNDS):
            for ask, rounds in clients if number % 2 else reversed(clients):
                rounds.append(seen(ask, f"http://{host}:{port}", Path(name)))
    ours, theirs = (rounds for _, rounds in clients)
    served = np.percentile(np.concatenate([one.mock for one in (*ours, *theirs)]), (50, 99))
    detail = (
        f"best of {ROUNDS}; {CHUNKS} chunks, one every {interval} ms; {ceiling};"
        f" its first tokens here {served[0]:.1f}/{served[1]:.1f} ms late"
    )
    return [*late_rows(ours, theirs, detail), longest_row(ours, theirs, FIRST_MS + (CHUNKS - 1) * interval)]
