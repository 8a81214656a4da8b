"""The parts of the engine for workers, each by itself: no cluster is started here."""

from __future__ import annotations

import asyncio
import importlib.util
import pickle
import platform
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard._version import __version__
from steelyard.engine.base import CancellationToken
from steelyard.engine.rate_limit import EndpointLimits, RateLimited
from steelyard.engine.retry import Retry, RetryPolicy
from steelyard.engine.workers import worker as worker_module
from steelyard.engine.workers.driver import DriverRun
from steelyard.engine.workers.messages import (
    CALL,
    EMITTED,
    Batch,
    Message,
    MessageQueue,
    WorkerExit,
    WorkerInfo,
    check_same_versions,
)
from steelyard.engine.workers.pending import (
    NOT_YET,
    Assigned,
    PendingJobs,
    WorkerHandle,
    WorkerShare,
    divide_limit,
    lost_record,
)
from steelyard.engine.workers.pickling import DriverObjects, pickle_work, unpickle_work
from steelyard.engine.workers.remote_limits import DriverLink, WorkerCalls
from steelyard.engine.workers.worker import HostedRun
from steelyard.errors import ConfigurationError, SteelyardError, TransientError
from steelyard.journal.reader import decode_entry
from steelyard.journal.writer import encode_record
from steelyard.masking import Secret
from steelyard.protocols import DriverCallback, Emit, InvocationContext, Tally
from steelyard.records import EvalCase, InvocationResponse, Job
from steelyard.report.summary import node_lines as lines
from steelyard.run.config import EngineChoice
from steelyard.stats.running import NodeStats, RunningStats
from steelyard.units import RateLimit
from tests.support.cli import run_cli
from tests.support.engine import drop, make_job, make_jobs, until
from tests.support.journal import a_record


class SimulatedWorker:
    """Receives its share late, and has as many calls in flight as the last share it received allows."""

    def __init__(self) -> None:
        self.share = WorkerShare()
        self.die()

    def die(self) -> None:
        self.share.clear()
        self.received = (0, 0)
        self.in_flight = 0

    def step(self, what: str, number: int) -> None:
        match what:
            case "receive":
                self.received = (self.share.number, self.share.limit)
            case "begin":
                self.in_flight = max(self.in_flight, min(self.received[1], self.in_flight + number))
            case "end":
                self.in_flight = max(0, self.in_flight - number)
            case "report":
                self.share.confirm(self.received[0], self.in_flight)
            case "die":
                self.die()


STEPS = st.tuples(
    st.sampled_from(["total", "receive", "begin", "end", "report", "die"]), st.integers(0, 3), st.integers(1, 40)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=50))
def test_never_more_in_flight_than_is_allowed_whatever_arrives_when(steps) -> None:
    """Shares change, arrive late, are reported late: a share moves only when free, a smaller total binds soon."""
    workers = [SimulatedWorker() for _ in range(4)]
    shares = [worker.share for worker in workers]
    total, bound = 20, 0
    for what, place, number in steps:
        if what == "total":
            total = number
        workers[place].step(what, number)
        divide_limit(total, shares, expected=number % 2)
        reserved = sum(share.reserved for share in shares)
        assert sum(worker.in_flight for worker in workers) <= reserved <= max(total, bound)
        assert sum(share.limit for share in shares) <= total
        bound = reserved


def test_what_one_worker_gives_up_another_gets_only_when_it_is_free() -> None:
    first, second = WorkerShare(), WorkerShare()
    divide_limit(10, [first])
    assert first.limit == 10
    divide_limit(10, [first, second])
    assert (first.limit, second.limit) == (5, 0)
    first.confirm(first.number, 7)
    divide_limit(10, [first, second])
    assert second.limit == 3
    first.confirm(first.number, 2)
    divide_limit(10, [first, second])
    assert (first.limit, second.limit) == (5, 5)


def test_room_is_left_for_workers_that_are_expected_and_goes_to_the_others_when_they_do_not_come() -> None:
    only = WorkerShare()
    divide_limit(9, [only], expected=2)
    assert only.limit == 3
    divide_limit(9, [only])
    assert only.limit == 9


def test_a_share_of_a_worker_that_is_gone_is_free_at_once() -> None:
    first, second = WorkerShare(), WorkerShare()
    divide_limit(8, [first, second])
    second.clear()
    divide_limit(8, [first])
    assert first.limit == 8


def test_a_lost_job_is_assigned_again_a_limited_number_of_times() -> None:
    pending = PendingJobs(make_jobs(1), 2)
    assigned = pending.next(probation=True)
    assert isinstance(assigned, Assigned)
    assert [pending.reschedule(assigned), pending.next(probation=True) is assigned] == [True, True]
    assert [pending.reschedule(assigned), pending.next(probation=True) is assigned] == [True, True]
    assert not pending.reschedule(assigned)
    assert pending.next(probation=True) is None
    assert pending.started == 1


def test_a_worker_has_at_most_one_job_that_may_be_lost_only_once_more() -> None:
    pending = PendingJobs(make_jobs(3), 1)
    first, second = pending.next(probation=True), pending.next(probation=True)
    assert isinstance(first, Assigned)
    assert isinstance(second, Assigned)
    assert pending.reschedule(first)
    assert pending.reschedule(second)
    assert pending.next(probation=True) is first
    third = pending.next(probation=False)
    assert isinstance(third, Assigned)
    assert third.job.index == 2
    assert pending.next(probation=False) is None
    assert not pending.is_empty


def test_a_job_that_is_not_there_yet_does_not_end_the_jobs() -> None:
    def jobs() -> Iterator[Job | None]:
        yield None
        yield make_job(0)

    pending = PendingJobs(jobs(), 3)
    assert pending.next(probation=True) == NOT_YET
    assert isinstance(pending.next(probation=True), Assigned)


def test_the_record_of_a_lost_case_reads_back() -> None:
    record = lost_record(Assigned(make_job(4), time.monotonic(), losses=4), WorkerInfo("host/1", 1, "", ""), "SIGKILL")
    entry = decode_entry(encode_record(record).strip())
    assert entry is not None
    assert (entry.id, entry.status, entry.error_type, entry.node) == ("c4", "error", "WorkerLost", "host/1")
    assert "4 workers died" in (entry.error or "")


def test_a_worker_has_few_jobs_waiting_and_none_when_the_run_nears_its_end() -> None:
    handle = WorkerHandle(0)
    handle.share.set_limit(8)
    assert handle.jobs_wanted(ahead=True) == 8 + 2
    assert handle.jobs_wanted(ahead=False) == 8
    handle.share.set_limit(0)
    assert handle.jobs_wanted(ahead=True) == 0


def test_calls_that_end_in_the_same_moment_do_not_count_as_a_fast_pace(monkeypatch) -> None:
    """20 calls of a second each: a worker that dies, or is stopped, must not have hundreds waiting."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    handle = WorkerHandle(0)
    handle.share.set_limit(20)
    most = 0
    for _ in range(10):
        now += 1.0
        for _ in range(10):  # batches that come right after one another
            now += 0.0001
            handle.update(Batch([], 20, 20, 1), 2)
            most = max(most, handle.jobs_wanted(ahead=True) - 20)
    assert most < 10


def test_a_fast_pace_has_a_tenth_of_a_seconds_work_waiting(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    handle = WorkerHandle(0)
    handle.share.set_limit(20)
    for _ in range(100):
        now += 0.02
        handle.update(Batch([], 20, 20, 1), 100)
    assert handle.jobs_wanted(ahead=True) - 20 == pytest.approx(500, abs=5)


def test_a_queue_gives_batches_in_order_and_reports_when_it_has_room_again() -> None:
    async def main() -> None:
        emptied = []
        queue = MessageQueue(lambda: emptied.append(True))
        for number in range(300):
            queue.put((EMITTED, number, b"x" * 4096))
        assert queue.is_full
        taken: list[int] = []
        while len(taken) < 300:
            batch = await queue.take()
            assert sum(len(item[2]) for item in batch) <= 92 * 1024
            taken += [item[1] for item in batch]
        assert taken == list(range(300))
        assert emptied == [True]
        assert not queue.is_full

    asyncio.run(main())


def test_one_item_larger_than_a_batch_is_sent_all_the_same() -> None:
    async def main() -> None:
        queue = MessageQueue(lambda: None)
        queue.put((EMITTED, 1, b"x" * 10_000_000))
        assert [item[1] for item in await queue.take()] == [1]

    asyncio.run(main())


def test_an_item_waits_a_moment_for_others_unless_it_is_urgent() -> None:
    async def main() -> None:
        queue = MessageQueue(lambda: None)
        taking = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        queue.put(("ended", 1, True))
        await asyncio.sleep(0.001)
        assert not taking.done()
        queue.put(("call", 2, None), urgent=True)
        assert [item[1] for item in await taking] == [1, 2]

    asyncio.run(main())


def overloaded(wait: float | None = None) -> TransientError:
    return TransientError("too many", retry_after=wait, overloaded=True)


def calls_in(items: list[Any]) -> list[tuple[Any, ...]]:
    return [content[1:] for kind, _, content in items if kind == CALL]


def test_a_refusal_is_reported_once_and_other_workers_pause_as_long() -> None:
    async def main() -> None:
        queue = MessageQueue(lambda: None)
        here, there = DriverLink(queue), DriverLink(MessageQueue(lambda: None))
        refused, other = here.limits(0, False, True), there.limits(0, False, True)
        sent = [refused.permit_now(0.0) for _ in range(5)]
        for one in sent:
            refused.failed(one, overloaded(0.2))
        reported = calls_in(await queue.take())
        assert reported == [("overloaded", (0.2,))]
        assert other.permit_now(0.0) is not None
        there.deliver([], [(0, 0.2)])
        assert other.permit_now(0.0) is None
        began = time.monotonic()
        await other.permit(0.0, InvocationContext("c"))
        assert time.monotonic() - began >= 0.15

    asyncio.run(main())


def test_a_worker_asks_the_driver_for_send_permits_and_reports_what_came_of_them() -> None:
    """A worker and the driver with nothing between them but their messages."""

    async def main() -> None:
        limits = EndpointLimits(rate=RateLimit(1000, 1.0), tokens_per_min=60_000)
        queue = MessageQueue(lambda: None)
        link = DriverLink(queue)
        calls = WorkerCalls([limits], lambda call, value: link.deliver([(call, value)], []))
        remote = link.limits(0, True, True)
        waiting = asyncio.create_task(remote.permit(10.0, context := InvocationContext("c")))
        await serve(queue, calls)
        sent = await waiting
        assert context.waiting > 0
        remote.failed(sent, overloaded(5.0))
        remote.ended()
        await serve(queue, calls)
        assert limits.permit_now(1.0) is None  # the refusal reached the driver's own limits
        calls.close()

    asyncio.run(main())


def test_a_refusal_uses_up_no_attempt_while_the_endpoint_answers_other_calls() -> None:
    class Busy:
        model_id, default_parallelism = None, 1
        calls = 0

        async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
            self.calls += 1
            if self.calls > 8:
                return InvocationResponse(response_text="at last")
            remote.answered(0, InvocationResponse(response_text="another's"))
            raise overloaded()

    async def main() -> InvocationResponse:
        nonlocal remote
        queue = MessageQueue(lambda: None)
        link = DriverLink(queue)
        remote = link.limits(0, True, True)

        async def grant() -> None:
            while True:
                items = await queue.take()
                wanted = [call for kind, call, content in items if kind == CALL and content[1] == "permit"]
                link.deliver([(call, True) for call in wanted], [])

        granting = asyncio.create_task(grant())
        target: Any = RateLimited(Busy(), remote)  # type: ignore[arg-type]
        response = await Retry(target, RetryPolicy(attempts=3)).invoke(EvalCase(id="c"), InvocationContext("c"))
        granting.cancel()
        return response

    remote: Any = None
    assert asyncio.run(main()).response_text == "at last"


class SlicedLink:
    """A worker with a rate and the driver that counts it, with nothing between them; it counts the requests."""

    def __init__(self, limits: EndpointLimits) -> None:
        self.queue = MessageQueue(lambda: None)
        self.link = link = DriverLink(self.queue)
        self.calls = WorkerCalls([limits], lambda call, value: link.deliver([(call, value)], []))
        self.remote = link.limits(0, True, True, True)
        self.asked: list[str] = []

    async def serve(self) -> None:
        while True:
            for _, call, content in await self.queue.take():
                self.asked.append(content[1])
                self.calls.handle(call, *content)


def test_a_rate_is_granted_in_slices_not_call_by_call_and_still_holds() -> None:
    async def main() -> None:
        sliced = SlicedLink(EndpointLimits(rate=RateLimit(200, 1.0)))
        serving = asyncio.create_task(sliced.serve())
        times: list[float] = []

        async def call() -> None:
            sent = await sliced.remote.permit(0.0, InvocationContext("c"))
            times.append(time.monotonic())
            sliced.remote.answered(sent, InvocationResponse())
            sliced.remote.ended()

        await asyncio.gather(*(call() for _ in range(101)))
        assert times[-1] - times[0] >= 0.48  # the last may catch up on what timers lose
        assert sliced.asked.count("slice") <= 101 / 10
        await asyncio.sleep(0.15)
        assert "answered" not in sliced.asked
        assert sliced.calls._sent == {}
        serving.cancel()

    asyncio.run(main())


def test_permits_that_nobody_waits_for_any_more_are_given_back_and_the_others_get_theirs() -> None:
    async def main() -> None:
        sliced = SlicedLink(EndpointLimits(rate=RateLimit(50, 1.0)))
        serving = asyncio.create_task(sliced.serve())
        waiting = [asyncio.create_task(sliced.remote.permit(0.0, InvocationContext("c"))) for _ in range(12)]
        await asyncio.wait([waiting[0]])
        for task in waiting[1:11]:
            task.cancel()
        await asyncio.wait_for(waiting[11], 5)
        await asyncio.sleep(0)
        assert sliced.remote._asking is None
        await asyncio.wait(waiting)
        serving.cancel()

    asyncio.run(main())


def test_a_call_that_is_cancelled_as_its_permit_comes_ends_as_cancelled_and_the_next_one_gets_it() -> None:
    async def main() -> None:
        sliced = SlicedLink(EndpointLimits(rate=RateLimit(50, 1.0)))
        waiting = [asyncio.create_task(sliced.remote.permit(0.0, InvocationContext("c"))) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        sliced.remote._grant((1, 0))
        await asyncio.wait(waiting)
        assert waiting[0].cancelled()
        assert waiting[1].result() == (1, 0)

    asyncio.run(main())


@pytest.mark.parametrize("is_rate_only", [True, False])
def test_the_driver_keeps_nothing_of_calls_that_were_cancelled(is_rate_only) -> None:
    class Silent:
        async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
            started.release()
            return await asyncio.Future()

    async def main() -> None:
        nonlocal started
        started = asyncio.Semaphore(0)
        sliced = SlicedLink(EndpointLimits(rate=RateLimit(1000, 1.0)))
        if not is_rate_only:
            sliced.remote = sliced.link.limits(0, True, True)
        serving = asyncio.create_task(sliced.serve())
        target: Any = RateLimited(Silent(), sliced.remote)  # type: ignore[arg-type]
        calls = [asyncio.create_task(target.invoke(EvalCase(id="c"), InvocationContext("c"))) for _ in range(5)]
        for _ in calls:
            await started.acquire()
        assert len(sliced.calls._sent) == 5
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await until(lambda: not sliced.calls._sent)
        serving.cancel()

    started: Any = None
    asyncio.run(main())


def test_an_overload_takes_back_what_was_granted_ahead() -> None:
    async def main() -> None:
        limits = EndpointLimits(rate=RateLimit(100, 1.0))
        sliced = SlicedLink(limits)
        serving = asyncio.create_task(sliced.serve())
        waiting = [asyncio.create_task(sliced.remote.permit(0.0, InvocationContext("c"))) for _ in range(9)]
        await asyncio.wait([waiting[0]])
        sliced.remote.failed(waiting[0].result(), overloaded(0.3))
        began = time.monotonic()
        await asyncio.wait(waiting)
        assert time.monotonic() - began >= 0.25
        serving.cancel()

    asyncio.run(main())


async def serve(queue: MessageQueue, calls: WorkerCalls) -> None:
    await asyncio.sleep(0)
    for kind, call, content in await queue.take():
        if kind == CALL:
            calls.handle(call, *content)
    await asyncio.sleep(0)


def test_send_permits_of_a_lost_worker_are_returned() -> None:
    ended: list[int] = []

    class Limits(EndpointLimits):
        def ended(self) -> None:
            ended.append(1)

    async def main() -> None:
        limits = Limits(rate=RateLimit(1000, 1.0))
        calls = WorkerCalls([limits], lambda call, value: None)
        calls.handle(1, 0, "permit", (0.0,))
        calls.handle(2, 0, "permit", (0.0,))
        await asyncio.sleep(0.01)
        calls.handle(3, 0, "ended", ())
        calls.close()

    asyncio.run(main())
    assert len(ended) == 2


def test_a_permit_that_is_withdrawn_is_returned_to_its_own_endpoint() -> None:
    ended: list[str] = []

    class Limits(EndpointLimits):
        def __init__(self, name: str) -> None:
            super().__init__(rate=RateLimit(1000, 1.0))
            self.name = name

        def ended(self) -> None:
            ended.append(self.name)

    async def main() -> None:
        calls = WorkerCalls([Limits("target"), Limits("judge")], lambda call, value: None)
        calls.handle(1, 0, "permit", (0.0,))
        calls.handle(2, 1, "permit", (0.0,))
        await asyncio.sleep(0.01)
        calls.handle(3, 0, "withdraw", (1,))
        assert ended == ["target"]
        calls.handle(4, 1, "ended", ())
        assert ended == ["target", "judge"]

    asyncio.run(main())


def test_a_driver_callback_is_called_in_the_driver() -> None:
    async def main() -> None:
        costs: list[Any] = []
        queue = MessageQueue(lambda: None)
        DriverLink(queue).callback(0)(0.25)
        calls = WorkerCalls([DriverCallback(costs.append)], lambda call, value: None)
        await serve(queue, calls)
        assert costs == [0.25]

    asyncio.run(main())


@pytest.mark.ray
def test_a_lock_deep_inside_is_named_with_the_path_to_it() -> None:
    lock = threading.Lock()

    async def work(job: Job, emit: Any) -> None:
        assert lock

    with pytest.raises(ConfigurationError, match=r"work\.lock \(lock\) cannot be sent"):
        pickle_work(work, DriverObjects())


class RenamedKey(Secret):
    """A key by any other name."""


@pytest.mark.ray
@pytest.mark.parametrize("kind", [Secret, RenamedKey])
def test_a_key_is_refused_by_its_type_whatever_its_class_is_called(kind: type[Secret]) -> None:
    key = kind("sk-not-for-workers")

    async def work(job: Job, emit: Any) -> None:
        assert key

    with pytest.raises(ConfigurationError, match="not sent to workers") as refused:
        pickle_work(work, DriverObjects())
    assert "sk-not-for-workers" not in str(refused.value)


@pytest.mark.ray
def test_a_token_and_limits_are_not_pickled() -> None:
    async def main() -> None:
        driver_objects, token = DriverObjects(), CancellationToken()
        limits = EndpointLimits(tokens_per_min=5)
        work: Any = {"token": token, "twice": token, "limits": limits, "again": limits}
        pickled = pickle_work(work, driver_objects)
        here = CancellationToken()
        unpickled: Any = unpickle_work(pickled, here, DriverLink(MessageQueue(lambda: None)))
        assert unpickled["token"] is unpickled["twice"] is here
        assert driver_objects.objects == [limits]

    asyncio.run(main())


def test_without_ray_the_extra_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'steelyard\[ray\]'"):
        EngineChoice(engine="ray").make(tmp_path, 1.0)


SUITE = "id: s\ntarget: {simulated: {model: m}}\ncases: [{id: a, prompt: hello}]\n"


@pytest.mark.ray
@pytest.mark.parametrize("command", [("run",), ("sweep", "-j", "1,2")])
def test_a_cluster_that_is_not_there_ends_in_seconds_and_nothing_is_written(tmp_path, command) -> None:
    (tmp_path / "suite.yaml").write_text(SUITE)
    began = time.monotonic()
    words = ("suite.yaml", "--engine", "ray", "--ray-address", "127.0.0.1:1", "--out", "run")
    ended = run_cli(tmp_path, *command, *words)
    assert (ended.code, ended.out) == (2, "")
    assert "no Ray cluster at '127.0.0.1:1'" in ended.err
    assert time.monotonic() - began < 30
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("engine: rya", "engine must be one of local, ray, got 'rya'"),
        ("ray_address: auto", "ray_address goes with the engine ray"),
        ("workers: 0", "workers must be a whole number >= 1 or auto"),
        ("workers: many", "'many' is neither a whole number nor auto"),
    ],
)
def test_a_suite_with_an_unknown_engine_or_options_of_another_is_refused(tmp_path, keys, message) -> None:
    (tmp_path / "suite.yaml").write_text(f"{SUITE}run: {{{keys}}}\n")
    ended = run_cli(tmp_path, "run", "suite.yaml")
    assert ended.code == 2
    assert message in ended.err


@pytest.mark.ray
@pytest.mark.parametrize("reply", [b"", b"HTTP/1.0 400 what?\r\n\r\n", None])
def test_what_listens_at_the_address_and_is_not_ray_is_refused_at_once(monkeypatch, reply) -> None:
    """Ray itself would try for ever. The server closes, speaks another protocol, or sends nothing at all."""
    from steelyard.engine.ray import connect

    monkeypatch.setattr(connect, "_CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            line, _ = server.accept()
            with line:
                line.recv(100)
                if reply is None:
                    line.recv(100)
                line.sendall(reply or b"")

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(ConfigurationError, match=r"no Ray cluster at '127.0.0.1:\d+'"):
            connect.RayConnection(f"127.0.0.1:{server.getsockname()[1]}", None).open()
        answering.join()


class FakeInit:
    """Replaces `ray.init`: keeps its arguments, and raises `error` or waits for `proceed`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.arguments: dict[str, Any] = {}
        self.begun = threading.Event()
        self.proceed = threading.Event()

    def __call__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.begun.set()
        if self.error is not None:
            raise self.error
        self.proceed.wait(60)


@pytest.fixture
def ray_init(monkeypatch) -> FakeInit:
    import ray

    made = FakeInit()
    monkeypatch.setattr(ray, "init", made)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return made


@pytest.mark.ray
def test_an_engine_that_is_closed_while_it_connects_does_not_wait_for_that(ray_init) -> None:
    from steelyard.engine.ray.engine import RayEngine

    engine, failures = RayEngine(workers=1), []

    def check() -> None:
        try:
            engine.check()
        except ConfigurationError as error:
            failures.append(str(error))

    checking = threading.Thread(target=check)
    checking.start()
    assert ray_init.begun.wait(30)
    engine.close()
    checking.join(30)
    ray_init.proceed.set()
    assert failures == ["the connection to the cluster was given up before there was one"]


@pytest.mark.ray
@pytest.mark.parametrize(("variable", "address"), [(None, "local"), ("10.0.0.5:6379", "10.0.0.5:6379")])
def test_without_an_address_no_cluster_is_taken_that_merely_happens_to_run_here(
    monkeypatch, ray_init, variable, address
) -> None:
    """Unless the environment names one, as it does within a job of Ray's."""
    from steelyard.engine.ray import connect

    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setattr(connect, "probe", lambda address: None)
    monkeypatch.setattr(connect, "_check_is_node", lambda address: None)
    ray_init.proceed.set()
    connection = connect.RayConnection(None, None)
    connection.open()
    connection.close()
    assert ray_init.arguments["address"] == address


@pytest.mark.ray
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("Version mismatch: Python: 3.9"), "the cluster at 'host:1' does not match this process: .*3.9"),
        (ConnectionError("no"), "no Ray cluster at 'host:1': ConnectionError: no; .*RAY_AUTH_MODE=token"),
        (ValueError("bad"), "no Ray cluster at 'host:1': ValueError: bad"),
    ],
)
def test_what_ray_fails_at_is_named_as_what_it_is(monkeypatch, ray_init, error, message) -> None:
    from steelyard.engine.ray import connect

    monkeypatch.setattr(connect, "probe", lambda address: None)
    monkeypatch.setattr(connect, "_check_is_node", lambda address: None)
    ray_init.error = error
    with pytest.raises(ConfigurationError, match=message):
        connect.RayConnection("host:1", None).open()


@pytest.mark.ray
def test_a_folder_that_is_too_large_to_be_sent_is_named(monkeypatch, ray_init) -> None:
    from ray.exceptions import RuntimeEnvSetupError

    from steelyard.engine.ray import connect

    monkeypatch.setattr(connect, "probe", lambda address: None)
    monkeypatch.setattr(connect, "_check_is_node", lambda address: None)
    ray_init.error = RuntimeEnvSetupError("600 MB")
    with pytest.raises(ConfigurationError, match=r"^the folder /suites/large cannot be sent to the workers: "):
        connect.RayConnection("host:1", "/suites/large").open()


@pytest.mark.ray
def test_spans_are_refused_with_workers_elsewhere(tmp_path) -> None:
    (tmp_path / "suite.yaml").write_text(SUITE)
    ended = run_cli(tmp_path, "run", "suite.yaml", "--engine", "ray", "--otel", "--out", "run")
    assert (ended.code, ended.out) == (2, "")
    assert "--otel needs the local engine" in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.ray
@pytest.mark.parametrize("address", ["ray://somewhere:10001", "somewhere:port", ":6379"])
def test_a_malformed_address_is_refused(address) -> None:
    from steelyard.engine.ray.connect import RayConnection

    with pytest.raises(ConfigurationError, match="host:port"):
        RayConnection(address, None).open()


@pytest.mark.ray
@pytest.mark.parametrize(("name", "version"), [("python", "3.9.1"), ("steelyard", "0.0.0"), ("ray", "1.13.0")])
def test_a_worker_with_another_version_is_named(name, version) -> None:
    import ray

    ours = {"python": platform.python_version(), "steelyard": __version__, "ray": ray.__version__}
    check_same_versions(WorkerInfo(node="n", pid=1, **ours))
    with pytest.raises(ConfigurationError, match=f"worker on n .*{version} there"):
        check_same_versions(WorkerInfo(node="n", pid=1, **{**ours, name: version}))


def answer(node: str | None, seconds: float, error: str | None = None) -> InvocationResponse:
    return InvocationResponse(node=node, time_to_last_token=seconds, error=error)


def test_figures_by_node_merge_exactly() -> None:
    whole, parts = RunningStats(), [RunningStats(), RunningStats()]
    for number in range(300):
        one = answer(f"n{number % 3}", number / 7, "broken" if number % 10 == 0 else None)
        whole.update(one)
        parts[number % 2].update(one)
    parts[0].merge(parts[1])
    assert parts[0].nodes.to_metrics() == whole.nodes.to_metrics()
    assert whole.nodes.to_metrics()["n0"].requests == 100


def test_without_a_cluster_there_are_no_nodes() -> None:
    stats = RunningStats()
    stats.update(answer(None, 1.0))
    stats.update_all([answer(None, 1.0)])
    assert not stats.nodes


def test_the_summary_shows_a_node_that_is_slow_or_fails() -> None:
    nodes = NodeStats()
    for number in range(300):
        slow = number % 3 == 0
        nodes.update(answer(f"n{number % 3}", 3.0 if slow else 1.0, "broken" if slow and number % 2 else None))
    shown = lines(nodes.to_metrics())
    assert shown[0].strip() == "served by 3 nodes"
    assert shown[1].strip() == (
        "n0 stands out: 50.0% errors, 0.0% elsewhere; its median time to last token is 3.00s, 1.00s elsewhere"
    )
    assert len(shown) == 2


def test_nodes_that_are_alike_are_only_counted() -> None:
    nodes = NodeStats()
    for number in range(100):
        nodes.update(answer(f"n{number % 2}", 1.0 + number % 5))
    assert lines(nodes.to_metrics()) == ["  served by 2 nodes"]


def test_one_node_is_counted_as_one() -> None:
    nodes = NodeStats()
    nodes.update(answer("n0", 1.0))
    assert lines(nodes.to_metrics()) == ["  served by 1 node"]


def test_limits_say_whether_they_must_be_counted_in_one_place() -> None:
    assert not EndpointLimits().is_counted
    assert EndpointLimits(rate=RateLimit(1, 1.0)).is_counted
    assert not EndpointLimits(pauses=False).pauses


class BreaksWhenClosed:
    async def __call__(self, job: Job, emit: Emit) -> None: ...

    async def close(self) -> None:
        raise OSError("the connection is broken")


def test_work_that_cannot_be_closed_on_a_worker_is_reported_to_the_driver() -> None:
    """Else it would wait for the worker's last batch for ever."""

    async def main() -> WorkerExit:
        hosted = HostedRun("n", 8, 1.0)
        await hosted.begin(pickle_work(BreaksWhenClosed(), DriverObjects()))
        hosted.receive(Message(no_more=True))
        while not (items := (await asyncio.wait_for(hosted.batch(), 10)).items):
            assert not hosted._running.done()
        (_, _, ending) = items[-1]
        assert isinstance(ending, WorkerExit)
        return ending

    failure = asyncio.run(main()).failure
    assert failure is not None
    assert str(pickle.loads(failure)) == "the connection is broken"


def test_a_worker_whose_driver_is_silent_begins_nothing(monkeypatch) -> None:
    """Its jobs may have been assigned to others; those in flight continue, the rest after the next message."""

    async def main() -> None:
        now = time.monotonic()
        monkeypatch.setattr(worker_module.time, "monotonic", lambda: now)
        hosted = HostedRun("n", 8, 1.0)
        hosted.receive(Message(jobs=list(enumerate(make_jobs(6))), share=4, share_number=1))
        assert hosted.allowed == 4
        now += 6.0
        assert hosted.allowed == 0
        changes: list[int] = []
        hosted.on_change(lambda: changes.append(hosted.allowed))
        hosted.receive(Message())
        assert changes == [4]

    asyncio.run(main())


class FakeActor:
    """A worker that delivers a record, but not the end of its job, and then dies or stays silent."""

    def __init__(self, dies: bool) -> None:
        self._dies = dies
        self._exchanges = 0
        self.assigned: list[tuple[int, Job]] = []

    async def begin(self, *args: Any) -> None: ...

    def close(self) -> None: ...

    def send(self, run: int, message: Any) -> None:
        self.assigned += message.jobs

    async def exchange(self, run: int, message: Any) -> Batch:
        self._exchanges += 1
        self.send(run, message)
        while not self.assigned:  # noqa: ASYNC110 - as short as can be
            await asyncio.sleep(0.001)
        if self._exchanges == 1:
            ticket, job = self.assigned[0]
            record = a_record(id=job.case.id, index=job.index)
            return Batch([(EMITTED, ticket, pickle.dumps(record))], 1, 1, 1)
        if self._dies:
            raise ConnectionError("gone")
        await asyncio.Event().wait()
        raise AssertionError


class FakePool:
    size = 1
    failure = None
    start_seconds = 60.0

    def __init__(self, dies: bool) -> None:
        self.actor = FakeActor(dies)

    async def worker(self, number: int) -> tuple[Any, WorkerInfo]:
        return self.actor, WorkerInfo("n", 1, "", "", "")

    def lose(self, number: int) -> None: ...

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, ConnectionError)

    def is_broken_connection(self, error: BaseException) -> bool:
        return isinstance(error, BrokenPipeError)

    def why_lost(self, error: Exception) -> str:
        return str(error)

    def cause(self, error: Exception) -> Exception:
        return error


@pytest.mark.parametrize("dies", [True, False])
def test_a_record_that_came_counts_as_finished_whatever_became_of_its_worker(dies) -> None:
    """Otherwise the counts would not add up: it is in the journal."""
    records: list[Any] = []
    token = CancellationToken()

    def take(record: Any) -> None:
        records.append(record)
        token.cancel()

    async def main() -> Tally:
        run = DriverRun(
            1,
            FakePool(dies),
            b"",
            DriverObjects(),
            PendingJobs(make_jobs(5), 3),
            take,
            workers=1,
            parallelism=2,
            token=token,
            permits=None,
            grace=0.01,
        )
        return await run.run()

    tally = asyncio.run(main())
    assert len(records) == tally.finished == 1
    assert tally.started == tally.finished + tally.cancelled


def test_workers_that_die_one_after_the_other_with_nothing_to_do_end_the_run() -> None:
    class NeverStarts(FakePool):
        async def worker(self, number: int) -> tuple[Any, WorkerInfo]:
            raise ConnectionError("out of memory")

    async def main() -> None:
        pending = PendingJobs(make_jobs(5), 3)
        options: dict[str, Any] = {"workers": 1, "parallelism": 2, "permits": None, "grace": 0.01}
        await DriverRun(
            1, NeverStarts(True), b"", DriverObjects(), pending, drop, token=CancellationToken(), **options
        ).run()

    with pytest.raises(SteelyardError, match=r"workers die before they do anything: .*out of memory"):
        asyncio.run(main())
