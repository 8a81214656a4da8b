"""Where one driver saturates, and what sharded journals would do: the model behind docs/sharding.md.

    python -m benchmarks.sharding_model             # the tables, with the constants below
    python -m benchmarks.sharding_model --measure   # measure the constants on this machine first (starts Ray)

Three parts: a queueing model of today's driver, the load of a coordinator with a shard per node, and the protocol of
leases and fencing tokens under random partitions and crashes, in which each case must count exactly once.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from typing import IO

import msgspec
import numpy as np

from benchmarks.ray_scale import long_answer, seconds
from steelyard.engine.ray.engine import RayEngine
from steelyard.engine.workers.process import read_frame, write_frame
from steelyard.records import InvocationResponse
from steelyard.stats.running import RunningStats

_STEP = 0.005
_SECONDS = 40.0
_FIRST_CASES, _CASES, _ROUNDS = 2_000, 40_000, 3


class Constants(msgspec.Struct, frozen=True):
    """CPU seconds, as measured by `--measure` on an Intel Xeon at 2.5 GHz, two cores, with other work beside."""

    driver: float = 105e-6
    """The driver over Ray, for a case of 4 KB, journal and statistics included."""
    record: float = 50e-6
    """A case of 4 KB in one process, the call of a function included: what a shard pays for bookkeeping."""
    merge: float = 600e-6
    """Merging the statistics of one shard into another's."""
    lease: float = 140e-6
    """The coordinator, for a lease: a message, and a line that is flushed to the disk."""
    report: float = 80e-6
    """The coordinator, for a progress report, without its statistics and its cases."""
    accepted: float = 0.1e-6
    """The coordinator, for each case of a report."""


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
    load = leases * constants.lease + nodes * (constants.report + constants.merge) + rate * constants.accepted
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


# A prototype of the two messages that a coordinator handles


class LeaseMessage(msgspec.Struct, array_like=True, gc=False):
    """A range of cases for a shard; also a line of `leases.jsonl`."""

    number: int
    start: int
    stop: int
    shard: int
    token: int
    seconds: float


class ReportMessage(msgspec.Struct, array_like=True, gc=False):
    """The cases of a lease that a shard has written since its last report."""

    number: int
    shard: int
    token: int
    written: list[int]


_LEASE, _REPORT, _STOP = 1, 2, 3
_LEASES, _REPORTS = 500, 2_000
_FEW, _MANY = 50, 500
"""Cases in a report: what a node writes in a second with 1,000 calls of 20 s, and of 2 s, in flight."""
_TERM = 10.0


async def coordinate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, journal: IO[bytes]) -> None:
    """Answer a shard: a lease is on the disk before it is sent; a report with the current token is accepted."""
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(ReportMessage).decode
    to_line = msgspec.json.Encoder().encode
    table: dict[int, tuple[LeaseMessage, set[int], float]] = {}
    while True:
        kind, content = await read_frame(reader)
        if kind == _STOP:
            return
        if kind == _LEASE:
            number = len(table)
            lease = LeaseMessage(number, number * 5000, (number + 1) * 5000, 1, 1, _TERM)
            table[number] = (lease, set(), time.monotonic() + _TERM)
            journal.write(to_line(lease) + b"\n")
            journal.flush()
            os.fdatasync(journal.fileno())
            write_frame(writer, _LEASE, encode(lease))
        else:
            report = decode(content)
            lease, accepted, _ = table[report.number]
            if (report.token, report.shard) == (lease.token, lease.shard):
                accepted.update(report.written)
                journal.write(to_line(report) + b"\n")
                journal.flush()
                table[report.number] = (lease, accepted, time.monotonic() + _TERM)
            write_frame(writer, _REPORT, encode(_TERM))


async def be_shard(port: int, leases: int, reports: int, cases: int) -> None:
    """Ask a coordinator for so many leases, and send so many reports of so many cases, one after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    encode = msgspec.msgpack.Encoder().encode
    for _ in range(leases):
        write_frame(writer, _LEASE, b"")
        await read_frame(reader)
    for number in range(reports):
        first = number % 10 * cases
        write_frame(writer, _REPORT, encode(ReportMessage(0, 1, 1, list(range(first, first + cases)))))
        await read_frame(reader)
    write_frame(writer, _STOP, b"")
    await writer.drain()
    writer.close()


def coordinator_cost(leases: int, reports: int, cases: int) -> tuple[float, float]:
    """CPU and time of a coordinator, this process, with a shard in another one; the disk is a real file's."""

    async def run() -> tuple[float, float]:
        over: asyncio.Future[tuple[float, float]] = asyncio.get_running_loop().create_future()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            began, cpu = time.monotonic(), time.process_time()
            await coordinate(reader, writer, journal)
            over.set_result((time.process_time() - cpu, time.monotonic() - began))
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        words = ["-m", "benchmarks.sharding_model", "shard", *map(str, (port, leases, reports, cases))]
        shard = await asyncio.create_subprocess_exec(sys.executable, *words)
        found = await over
        await shard.wait()
        server.close()
        return found

    with tempfile.TemporaryFile(dir="/var/tmp") as journal:
        return asyncio.run(run())


def measure_coordinator() -> tuple[float, float, float, float]:
    """CPU of a lease, of a report and of each case in it; and how long a lease takes, which is mostly the disk."""
    once, _ = coordinator_cost(1, 0, 0)
    cpu, took = min(coordinator_cost(1 + _LEASES, 0, 0) for _ in range(_ROUNDS))
    lease = (cpu - once) / _LEASES
    few, many = (
        min((coordinator_cost(1, _REPORTS, cases)[0] - once) / _REPORTS for _ in range(_ROUNDS))
        for cases in (_FEW, _MANY)
    )
    accepted = (many - few) / (_MANY - _FEW)
    return lease, few - _FEW * accepted, accepted, took / (1 + _LEASES)


# Constants


def measure() -> Constants:
    """Measure on this machine: a real run on two Ray workers, one in this process, a merge, and the prototype."""

    def cost(engine: RayEngine | None, count: int) -> float:
        before = time.process_time()
        seconds(engine, long_answer, count, 100)
        return time.process_time() - before

    def per_case(engine: RayEngine | None) -> float:
        """Without what a run costs however small it is."""
        return min((cost(engine, _CASES + _FIRST_CASES) - cost(engine, _FIRST_CASES)) / _CASES for _ in range(_ROUNDS))

    with RayEngine(workers=2) as engine:
        engine.check()
        cost(engine, _FIRST_CASES)
        driver = per_case(engine)
    record = per_case(None)
    one, other = RunningStats(), RunningStats()
    for number in range(20_000):
        other.update(InvocationResponse(time_to_last_token=number / 1000, time_to_first_token=number / 3000))
    began = time.process_time()
    for _ in range(200):
        one.merge(other)
    merge = (time.process_time() - began) / 200
    lease, report, accepted, took = measure_coordinator()
    print(f"a lease took {took * 1e3:.2f} ms, the flush to the disk included\n")
    return Constants(driver, record, merge, lease, report, accepted)


def main(words: list[str]) -> None:
    """Print the constants and the tables."""
    constants = measure() if "--measure" in words else Constants()
    for name in constants.__struct_fields__:
        print(f"{name:8} {getattr(constants, name) * 1e6:8.2f} µs")
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
    if sys.argv[1:2] == ["shard"]:
        asyncio.run(be_shard(*map(int, sys.argv[2:])))
    else:
        main(sys.argv[1:])
