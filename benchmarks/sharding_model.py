"""Where one driver saturates, and what sharded journals would do: the model behind docs/sharding.md.

    python -m benchmarks.sharding_model             # the tables, with the constants below
    python -m benchmarks.sharding_model --measure   # measure the driver's constants on this machine first (starts Ray)

Three parts: a queueing model of today's driver, the load of a coordinator with a shard per node, and the protocol of
leases and fencing tokens under random partitions and crashes, in which each case must count exactly once.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter

import msgspec
import numpy as np

_STEP = 0.005
_SECONDS = 40.0


class Constants(msgspec.Struct, frozen=True):
    """What a case costs. `measured` ones come from `--measure`, on one core of this machine; the others are assumed."""

    driver: float = 65e-6
    """Measured: CPU of the driver per case of 4 KB over Ray, journal and statistics included."""
    record: float = 32e-6
    """Measured: CPU of a case in one process, the call of a function included: what a shard pays for bookkeeping."""
    merge: float = 235e-6
    """Measured: CPU to merge the statistics of one shard into another's."""
    lease: float = 500e-6
    """Assumed: CPU of the coordinator for a lease: one message, one line on disk that is flushed to it."""
    report: float = 200e-6
    """Assumed: CPU of the coordinator for a progress report, without its statistics."""


def one_driver(nodes: int, in_flight: int, latency: float, constants: Constants) -> tuple[float, float, float]:
    """Simulate a closed loop through one driver; returns cases/s, the share of calls in flight, the driver's load.

    A node has a quarter of its share waiting in addition, and begins one of those when a call ends; the driver takes
    in what ended, first come first served, and sends as many new jobs.
    """
    chance = np.random.default_rng(1)
    active = np.full(nodes, in_flight, dtype=np.int64)
    ahead = np.full(nodes, in_flight // 4, dtype=np.int64)
    queue = np.zeros(nodes, dtype=np.int64)
    done = flying = busy = 0.0
    budget = 0.0
    warm = int(10 / _STEP)
    steps = int(_SECONDS / _STEP)
    for step in range(steps):
        ended = chance.binomial(active, 1 - np.exp(-_STEP / latency))
        active -= ended
        queue += ended
        begun = np.minimum(ahead, in_flight - active)
        active += begun
        ahead -= begun
        budget = min(budget, 1.0) + _STEP / constants.driver if queue.any() else 0.0
        taken = np.zeros(nodes, dtype=np.int64)
        if (total := int(queue.sum())) and budget >= 1:
            take = min(total, int(budget))
            taken = chance.multivariate_hypergeometric(queue, take)
            budget -= take
        queue -= taken
        ahead += taken
        if step >= warm:
            done += taken.sum()
            flying += active.mean() / in_flight
            busy += taken.sum() * constants.driver
    counted = (steps - warm) * _STEP
    return done / counted, flying / (steps - warm), busy / counted


def coordinator(nodes: int, rate: float, constants: Constants, lease_seconds: float = 10.0) -> tuple[float, float]:
    """Return the load of a coordinator, and of the busiest shard, as shares of a core.

    Each node holds two leases, of so many seconds' work each, and reports its progress and statistics each second.
    """
    leases = nodes / lease_seconds
    load = leases * constants.lease + nodes * (constants.report + constants.merge)
    return load, rate / nodes * constants.record


# The protocol


class Lease(msgspec.Struct):
    """A range of cases that one shard may ask, under a token that counts up each time the range is leased again."""

    cases: range
    token: int
    shard: int
    until: float
    accepted: set[int]


class Shard:
    """A node: asks the cases of its leases, writes them to its own journal, reports when it can."""

    def __init__(self) -> None:
        self.journal: list[tuple[int, int, int]] = []
        """(case, lease, token) of each record."""
        self.leases: dict[int, tuple[list[int], int, float]] = {}
        """By lease: the cases left, the token, and until when anything may be begun by the shard's own clock."""
        self.unreported: list[tuple[int, int, int]] = []
        self.in_flight: list[tuple[float, int, int, int]] = []
        self.reachable = True


def protocol(seed: int, shards: int = 5, cases: int = 2000, term: float = 3.0) -> tuple[int, int]:
    """Run leases under random partitions and crashes; returns how many cases were asked twice and how many counted.

    Raises AssertionError unless the union of the shards' journals, read with the coordinator's own, has each once.
    """
    chance = random.Random(seed)
    workers = [Shard() for _ in range(shards)]
    ranges = [range(start, min(start + 50, cases)) for start in range(0, cases, 50)]
    table: dict[int, Lease] = {}
    accepted: dict[int, int] = {}
    """The coordinator's journal: under which token each case was accepted."""
    tokens: Counter[int] = Counter()
    asked: Counter[int] = Counter()
    now = 0.0
    while len(accepted) < cases:
        now += 0.1
        for place, shard in enumerate(workers):
            if chance.random() < 0.01:
                shard.reachable = not shard.reachable
            if chance.random() < 0.002:  # a crash: the journal stays, all else is gone
                workers[place] = reborn = Shard()
                reborn.journal = shard.journal
                continue
            for end, case, lease, token in [one for one in shard.in_flight if one[0] <= now]:
                shard.in_flight.remove((end, case, lease, token))
                shard.journal.append((case, lease, token))
                shard.unreported.append((case, lease, token))
            for lease, (left, token, until) in shard.leases.items():
                while left and now < until and len(shard.in_flight) < 8:
                    case = left.pop()
                    asked[case] += 1
                    shard.in_flight.append((now + chance.uniform(0.1, 1.5), case, lease, token))
            if not shard.reachable:
                continue
            for case, lease, token in shard.unreported:  # accepted only under the token that is current now
                if lease in table and table[lease].token == token and table[lease].shard == place:
                    table[lease].accepted.add(case)
                    accepted.setdefault(case, token)
            shard.unreported.clear()
            held = {number for number, lease in table.items() if lease.shard == place and lease.until > now}
            shard.leases = {number: kept for number, kept in shard.leases.items() if number in held}
            for number in held & shard.leases.keys():
                table[number].until = now + term
                left, token, _ = shard.leases[number]
                shard.leases[number] = (left, token, now + term * 0.8)  # its clock may run fast: it stops earlier
            if len(shard.leases) < 2:
                free = [
                    number
                    for number, cases_of in enumerate(ranges)
                    if (number not in table or table[number].until < now) and not accepted.keys() >= set(cases_of)
                ]
                if free:
                    number = free[0]
                    tokens[number] += 1
                    known = {case for case in ranges[number] if case in accepted}
                    table[number] = Lease(ranges[number], tokens[number], place, now + term, known)
                    left = [case for case in ranges[number] if case not in accepted]
                    shard.leases[number] = (left, tokens[number], now + term * 0.8)
        if now > 3600:
            raise AssertionError("the protocol does not end")
    union = Counter(case for shard in workers for case, _, token in shard.journal if accepted.get(case) == token)
    assert union == Counter(range(cases)), "a case is missing, or counts twice"
    return sum(times - 1 for times in asked.values()), len(union)


# Constants


def measure() -> Constants:
    """Measure what can be: a real run on two Ray workers here, the recorder by itself, a merge of statistics."""
    import asyncio
    import tempfile
    from pathlib import Path

    from steelyard import EvalCase, EvalSet, Runner
    from steelyard.engine.ray.engine import RayEngine
    from steelyard.records import InvocationResponse
    from steelyard.stats.running import RunningStats

    text = "word " * 800

    async def answer(case: EvalCase) -> str:  # noqa: ARG001 - a target takes a case
        await asyncio.sleep(0.05)
        return text

    def cost(engine: RayEngine | None, count: int) -> float:
        suite = EvalSet("s", [EvalCase(id=f"c{n}", prompt="p") for n in range(count)])
        with tempfile.TemporaryDirectory() as folder:
            runner = Runner(answer, suite, engine=engine, parallelism=200, progress="off")
            began = time.process_time()
            runner.run_sync(output_path=Path(folder) / "run", low_memory=True)
            return time.process_time() - began

    def per_case(engine: RayEngine | None) -> float:
        return (cost(engine, 12_000) - cost(engine, 2_000)) / 10_000  # without what a run costs however small it is

    with RayEngine(workers=2) as engine:
        engine.check()
        driver = per_case(engine)
    record = per_case(None)
    one, other = RunningStats(), RunningStats()
    for number in range(20_000):
        other.update(InvocationResponse(time_to_last_token=number / 1000, time_to_first_token=number / 3000))
    began = time.process_time()
    for _ in range(200):
        one.merge(other)
    merge = (time.process_time() - began) / 200
    return Constants(driver=driver, record=record, merge=merge)


def main(words: list[str]) -> None:
    """Print the constants and the tables."""
    constants = measure() if "--measure" in words else Constants()
    for name in constants.__struct_fields__:
        kind = "assumed" if name in ("lease", "report") else "measured" if "--measure" in words else "measured earlier"
        print(f"{name:8} {getattr(constants, name) * 1e6:8.1f} µs  {kind}")
    print(f"\none driver sustains at most {1 / constants.driver:,.0f} cases/s\n")
    print("nodes  latency  wanted/s | one driver: cases/s  in flight  load | shards: coordinator  busiest shard")
    for latency in (2.0, 20.0):
        for nodes in (5, 10, 20, 50, 100):
            wanted = nodes * 1000 / latency
            rate, flying, load = one_driver(nodes, 1000, latency, constants)
            lead, busiest = coordinator(nodes, wanted, constants)
            print(
                f"{nodes:5} {latency:7.0f} s {wanted:9,.0f} | {rate:19,.0f} {flying:9.0%} {load:6.0%}"
                f" | {lead:19.1%} {busiest:14.1%}"
            )
    twice, counted = zip(*(protocol(seed) for seed in range(20)), strict=True)
    print(
        f"\nleases under partitions and crashes, 20 runs of 2,000 cases: each counted once ({min(counted):,} of 2,000);"
        f" {sum(twice) / len(twice):.0f} asked twice on average, {max(twice)} at most"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
