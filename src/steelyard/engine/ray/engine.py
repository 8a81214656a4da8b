"""The engine that spreads a run over the workers of a Ray cluster, and the actors that it runs cases on.

Actors are started at once, checked, replaced and ended, never on the event loop: any call to Ray's head may block for
as long as the head is frozen or out of reach, so all of them run in threads.

Ray does not report how a worker's process ended: its raylet is the parent and throws the exit status away. So each
worker starts a small process that waits for its end, asks the kernel how it was (Linux 6.15 and later), and leaves a
note on the node. The next worker on that node brings the notes to the driver. A SIGKILL while the kernel killed
processes for lack of memory is said to be that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from steelyard.daemon_threads import DaemonThreads
from steelyard.engine.ray.autoscaler import can_grow, free_cpus
from steelyard.engine.ray.connect import RayConnection, check_installed, probe
from steelyard.engine.workers.driver import NoPlaceForWorker
from steelyard.engine.workers.engine import WorkersEngine, check_workers
from steelyard.engine.workers.messages import Batch, Message, WorkerInfo, check_same_versions
from steelyard.engine.workers.worker import Worker
from steelyard.errors import ConfigurationError, WorkersLost
from steelyard.shutdown import ENGINE_GRACE_SECONDS
from steelyard.subprocesses import ending_of

log = logging.getLogger("steelyard")

_FIRST_WORKER_SECONDS = 60.0
_GROWTH_SECONDS = 600.0
"""The same for a cluster with an autoscaler, which may have to start a machine first."""
_MAX_LOST_STARTS = 3
"""How often a worker that dies while it starts, with its node perhaps, is started again before a run."""
_GROWTH_REPORTED_SECONDS = 10.0
"""How long there may be no worker before the log says that the cluster has to grow."""
_WAIT_SECONDS = 1.0
"""How often a start that waits for workers checks whether it was given up."""
_OTHER_WORKERS_SECONDS = 10.0
"""How long the other workers of a cluster may take before a run begins without having checked their versions."""
_MAX_CONCURRENT_CALLS = 1000
"""Actor calls at once: messages, exchanges and handshakes, never the cases themselves."""
_ROUND_TRIPS = 8
"""How often a worker is asked for its clock."""
_LOOK_SECONDS = 5.0
"""How often the nodes of the cluster are counted."""
_PROBE_SECONDS = 3.0
"""How often the head is asked whether it is there."""
_HEAD_SECONDS = 45.0
"""How long the head may be silent. Ray ends the process without a word after 60 seconds."""
_CLOSE_SECONDS = 3.0
"""How long ending the workers may take: those that are left end when their driver is gone."""
_CAUSES = (
    ("NODE_OUT_OF_MEMORY", "Ray killed it because its node ran out of memory"),
    ("memory monitor", "Ray killed it because its node ran out of memory"),
    ("its node has died", "its node is gone"),
    ("cancelled before it started", "its node is gone"),
    ("node was terminated", "its node is gone"),
    ("killed by `ray.kill`", "it was ended by ray.kill"),
    ("INTENDED_USER_EXIT", "its code called exit()"),
    ("INTENDED_SYSTEM_EXIT", "Ray ended it"),
    ("connection error code 2", "its process ended without a word: killed (SIGKILL, perhaps for memory) or crashed"),
)
"""What Ray's words about a dead actor mean; those that are not here are shown as they are."""
_MAX_NOTES = 100
_WATCH = """
import fcntl, os, select, struct, sys
pid, note = int(sys.argv[1]), sys.argv[2]
def oom_kills():
    with open("/proc/vmstat") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
before = oom_kills()
watched = os.pidfd_open(pid)
waiting = select.poll()
waiting.register(watched, select.POLLIN | select.POLLHUP)
print("ready", flush=True)
size, wanted = 64, 1 << 3
request = (3 << 30) | (size << 16) | (0xFF << 8) | 11
for _ in range(100):
    waiting.poll()
    answer = bytearray(struct.pack("<Q", wanted).ljust(size, b"\\0"))
    fcntl.ioctl(watched, request, answer)
    if struct.unpack_from("<Q", answer)[0] & wanted:
        status = struct.unpack_from("<i", answer, 60)[0]
        with open(note + ".new", "w") as file:
            file.write("%d %d" % (status, oom_kills() - before))
        os.rename(note + ".new", note)
        break
    select.select([], [], [], 0.05)
"""
"""Waits for a process: the status is known once its parent has let go of it."""


class RayEngine(WorkersEngine):
    """Runs work on the actors of a Ray cluster; the same contract as LocalEngine.

    `address` is `host:port` or `auto`; without it a cluster is started on this machine. `workers` is how many actors;
    when None, one for each free CPU of the cluster, those of nodes that join later included. A case whose worker dies
    is assigned again at most `max_reschedules` times. `working_dir` is sent along to a cluster at an address: a suite's
    module and the files next to it, without those that may hold keys. `runtime_env` is Ray's, merged with that of a
    job. A node that does not match this process is left out with a warning; with `strict_workers` it is an error.

    Workers stay until `close()`, or the end of a `with` block, so that the next run finds them ready.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        max_reschedules: int = 3,
        grace: float = ENGINE_GRACE_SECONDS,
        working_dir: str | Path | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        strict_workers: bool = False,
    ) -> None:
        if workers is not None:
            check_workers(workers)
        super().__init__(max_reschedules=max_reschedules, grace=grace)
        check_installed()
        self._connection = RayConnection(address, working_dir, runtime_env)
        self._workers = workers
        self._strict_workers = strict_workers
        self._pool: RayWorkerPool | None = None

    def check(self, *, pace: bool = False) -> None:  # noqa: ARG002 - arrivals are shared, too
        """Connect to the cluster and start the workers; raises ConfigurationError for what cannot be done.

        Takes seconds: not for the event loop.
        """
        self._open().start()

    def check_workspaces(self) -> None:
        """Refuse: a workspace is a folder of this machine, and is graded, kept and resumed from here."""
        raise ConfigurationError(
            "a suite with workspaces cannot run on Ray yet: its folders, logs and graders are on this machine; "
            "use the local engine"
        )

    def close(self) -> None:
        """End the workers, and the cluster if this engine started it."""
        self._connection.give_up()
        with self._opening:
            lost = False
            if self._pool is not None:
                self._pool.close()
                lost = self._pool.failure is not None
                self._pool = None
            self._connection.close(lost=lost)

    def _open(self) -> RayWorkerPool:
        with self._opening:
            if self._pool is None:
                self._connection.open()
                self._pool = RayWorkerPool(self._workers, strict=self._strict_workers)
            return self._pool


class RayWorker(Worker):
    """The actor's class."""

    def __init__(self, paths: Sequence[str]) -> None:
        import ray

        # Several nodes may share a host name, and a node's id alone means nothing to a reader.
        node = f"{socket.gethostname()}/{ray.get_runtime_context().get_node_id()[:8]}"
        super().__init__(node, ray_version=ray.__version__)
        sys.path.extend(path for path in paths if path not in sys.path and os.path.isdir(path))
        self._watching = watch_own_end()

    async def introduce(self) -> dict[str, Any]:
        """Report node and versions, and how workers before this one ended; as a dict, which any version can read."""
        info: dict[str, Any] = msgspec.to_builtins(await self.handshake())
        return {**info, "deaths": take_notes()}


class ActorConnection:
    """A worker's actor, called as the driver calls any worker."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def begin(self, run: int, work: bytes, parallelism: int, grace: float, paced: bool) -> Awaitable[None]:
        called: Awaitable[None] = self._actor.begin.remote(run, work, parallelism, grace, paced)
        return called

    async def clock_offset(self) -> float:
        """Compare the two clocks by the quickest of some round trips: right to half of what that took."""
        took, offset = float("inf"), 0.0
        for _ in range(_ROUND_TRIPS):
            before = time.monotonic()
            there = await self._actor.clock.remote()
            after = time.monotonic()
            if after - before < took:
                took, offset = after - before, there - (before + after) / 2
        return offset

    def send(self, run: int, message: Message) -> Awaitable[None]:
        called: Awaitable[None] = self._actor.receive.remote(run, message)
        return called

    def exchange(self, run: int, message: Message) -> Awaitable[Batch]:
        called: Awaitable[Batch] = self._actor.exchange.remote(run, message)
        return called

    def close(self) -> None:
        """Nothing is open: Ray keeps the connections."""


class RayWorkerPool:
    """The actors of an engine, by worker number. Without a number of `workers`, one for each free CPU of the cluster.

    A node whose versions differ, or on which no worker starts, is left out with a warning; with `strict`, an error.
    """

    def __init__(self, workers: int | None, *, strict: bool = False) -> None:
        import ray

        self.failure: Exception | None = None
        self.size = 1
        self._workers = workers
        self._strict = strict
        self._actor_class = ray.remote(RayWorker)  # once: each call of `ray.remote` sends the class to the head
        self._cpus_each = 1.0
        self._actors: dict[int, Any] = {}
        self._infos: dict[int, WorkerInfo] = {}
        self._left_out: dict[str, str] = {}
        """Why a node is not used, by its id."""
        self._lost: dict[tuple[str | None, int], str] = {}
        """The names of workers that were lost, by node and process: how each ended may be known later."""
        self._nodes = 1
        self._can_grow = False
        self._lock = threading.Lock()
        self._threads = DaemonThreads()
        self._closed = threading.Event()
        self._count_cpus()
        for watch in (self._follow_cluster, self._watch_head):
            threading.Thread(target=watch, name="steelyard-ray-watch", daemon=True).start()

    @property
    def start_seconds(self) -> float:
        """How long the cluster may take for a worker when there is none."""
        return _GROWTH_SECONDS if self._can_grow else _FIRST_WORKER_SECONDS

    # Before a run

    def start(self) -> None:
        """Start all workers and check their versions; of a cluster with one node, wait only for the first."""
        import ray

        if self._infos:
            return
        began, reported = time.monotonic(), False
        calls = {self._actor(number).introduce.remote(): number for number in range(self.size)}
        waiting, first_error, lost = list(calls), None, Counter[int]()
        while waiting and not self._closed.is_set():
            patience = self.start_seconds if not self._infos else _OTHER_WORKERS_SECONDS
            if self._infos and self._nodes == 1:
                break
            left = began + patience - time.monotonic()
            ready, waiting = ray.wait(waiting, timeout=min(max(0.1, left), _WAIT_SECONDS))
            if not ready:
                if left <= 0:
                    break
                if not (self._infos or reported) and time.monotonic() - began > _GROWTH_REPORTED_SECONDS:
                    reported = True
                    log.info("no worker could be started yet: waiting up to %.0f s for a CPU", self.start_seconds)
            for call in ready:
                try:
                    self._register(calls[call], msgspec.convert(ray.get(call), WorkerInfo))
                except NoPlaceForWorker as error:
                    if str(error) != first_error:  # several workers may be on one node
                        log.warning("%s", error)
                    first_error = str(error)
                except ray.exceptions.RayError as error:
                    number = calls[call]
                    if self._died(error) and lost[number] < _MAX_LOST_STARTS:
                        log.warning("a worker was lost while it started: %s; starting another", self.why_lost(error))
                        lost[number] += 1
                        self.lose(number)
                        again = self._actor(number).introduce.remote()
                        calls[again] = number
                        waiting.append(again)
                    else:
                        first_error = first_error or self._left_out_after(number, error)
        if not self._infos:
            raise ConfigurationError(
                first_error
                or f"the cluster started no worker within {self.start_seconds:.0f} s: are all its CPUs taken?",
                topic="ray",
            )
        if self._left_out:
            self._renumber()

    def _renumber(self) -> None:
        """Number the workers that are left from 0 on, and count again how many there are to be."""
        order = sorted(self._actors, key=lambda number: (number not in self._infos, number))
        self._actors = {place: self._actors[number] for place, number in enumerate(order)}
        self._infos = {place: self._infos[number] for place, number in enumerate(order) if number in self._infos}
        self.size = len(self._actors)
        self._count_cpus()

    def _left_out_after(self, number: int, error: Exception) -> str:
        """Leave out the node on which an actor could not be created; ConfigurationError when that may not be."""
        message = f"no worker could be started: {_last_line(error)}"
        actor = self._actors.pop(number, None)
        node = _node_of(actor)
        if self._strict or node is None:
            raise ConfigurationError(message) from error
        message = f"no worker could be started on node {node[:8]}, which is left out: {_last_line(error)}"
        if node not in self._left_out:
            self._left_out[node] = message
            log.warning("%s", message)
        return message

    # During a run

    async def worker(self, number: int) -> tuple[ActorConnection, WorkerInfo]:
        """Return the worker of a number, started and checked."""
        actor = await self._threads.run(self._actor, number)
        if number not in self._infos:
            try:
                info = msgspec.convert(await actor.introduce.remote(), WorkerInfo)
            except Exception as error:
                if not self._is_unfit(error):
                    raise
                raise NoPlaceForWorker(await self._threads.run(self._left_out_after, number, error)) from error
            self._register(number, info)
        return ActorConnection(actor), self._infos[number]

    def lose(self, number: int) -> None:
        """Forget a worker that is gone, so that the next call of `worker` starts another.

        One that is only out of reach is ended too: its cases are assigned again, and must not also run there.
        """
        if (info := self._infos.pop(number, None)) is not None:
            self._lost[info.node, info.pid] = info.name
        if (actor := self._actors.pop(number, None)) is not None:
            self._kill([actor])

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error means that a worker is gone, and not that its code raised."""
        import ray

        return isinstance(error, ray.exceptions.RayError) and not isinstance(error, ray.exceptions.RayTaskError)

    def is_broken_connection(self, error: BaseException) -> bool:
        """Whether Ray cannot reach an actor now, and does not know it to be dead."""
        import ray

        return isinstance(error, ray.exceptions.ActorUnavailableError)

    def cause(self, error: Exception) -> Exception:
        """Return what a worker raised, without Ray's wrapper."""
        cause = getattr(error, "cause", None)
        return cause if isinstance(cause, Exception) else error

    def why_lost(self, error: Exception) -> str:
        """Say in a line how a worker died."""
        text = str(error)
        return next(
            (meaning for words, meaning in _CAUSES if words in text), f"{type(error).__name__}: {_last_line(error)}"
        )

    def close(self) -> None:
        """End all workers; does not wait for a head that is gone."""
        self._closed.set()
        killing = self._kill(list(self._actors.values()))
        self._actors.clear()
        self._infos.clear()
        if self.failure is None:
            killing.join(_CLOSE_SECONDS)

    # The cluster

    def _actor(self, number: int) -> Any:
        with self._lock:
            if number not in self._actors:
                if self._left_out:
                    strategy: Any = self._other_node(number)
                else:
                    strategy = "SPREAD"
                options = {
                    "num_cpus": self._cpus_each,
                    "max_concurrency": _MAX_CONCURRENT_CALLS,
                    "scheduling_strategy": strategy,
                }
                paths = [path for path in sys.path if path]
                self._actors[number] = self._actor_class.options(**options).remote(paths)
            return self._actors[number]

    def _other_node(self, number: int) -> Any:
        """Return where a worker goes when some nodes are left out."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        good = [node["NodeID"] for node in ray.nodes() if self._is_used(node)]
        if not good:
            raise ConfigurationError("; ".join(self._left_out.values()))
        return NodeAffinitySchedulingStrategy(good[number % len(good)], soft=False)

    def _is_used(self, node: dict[str, Any]) -> bool:
        has_cpu = node.get("Resources", {}).get("CPU", 0) > 0
        return bool(node["Alive"]) and has_cpu and node["NodeID"] not in self._left_out

    def _register(self, number: int, info: WorkerInfo) -> None:
        try:
            check_same_versions(info)
        except ConfigurationError as error:
            node = _node_of(self._actors[number])
            if self._strict or node is None:
                raise
            self.lose(number)
            self._left_out[node] = f"{error}; this node is left out"
            raise NoPlaceForWorker(self._left_out[node]) from error
        self._infos[number] = info
        for pid, how in info.deaths.items():
            if (name := self._lost.pop((info.node, pid), None)) is not None:
                log.warning("%s that was lost, process %d, %s", name, pid, how)

    def _is_unfit(self, error: BaseException) -> bool:
        """Whether no actor can be made there, because Steelyard is not installed, say, or is quite another version."""
        import ray

        return isinstance(error, ray.exceptions.RayTaskError) or bool(getattr(error, "_actor_init_failed", False))

    def _died(self, error: BaseException) -> bool:
        """Whether an actor is gone for another reason than that it could not be made."""
        import ray

        return isinstance(error, ray.exceptions.RayActorError) and not self._is_unfit(error)

    def _count_cpus(self) -> None:
        """Find how many workers there are to be, and how much of a CPU each asks for.

        Where the cluster can grow, whole ones: those that find no place make it grow. Elsewhere a fixed number of
        workers shares what there is. Without a number, a CPU that something else uses is not counted: a worker
        that waits for one would make an autoscaler add a node, whose CPUs would be counted next, and so on.
        """
        import ray

        used = [node for node in ray.nodes() if self._is_used(node)]
        cpus = sum(node["Resources"]["CPU"] for node in used)
        self._nodes = max(1, len(used))
        if not self._infos:
            self._can_grow = can_grow(cpus)
        if self._workers is None:
            free = free_cpus()
            self.size = max(self.size, len(self._infos) + sum(int(free.get(node["NodeID"], 0)) for node in used))
            return
        self.size = self._workers
        shared = 0 < cpus < self.size and not self._can_grow
        self._cpus_each = cpus / self.size if shared else 1.0
        if self._left_out:
            self._cpus_each = 0.0  # those on the other nodes have taken all there is

    def _follow_cluster(self) -> None:
        """Count the nodes again and again: one that joins is used, where the number of workers is not fixed."""
        while not self._closed.wait(_LOOK_SECONDS):
            if self._workers is not None:
                return
            try:
                self._count_cpus()
            except Exception as error:  # noqa: BLE001 - the head may be busy, or gone: that is found elsewhere
                log.debug("the nodes could not be counted: %s", error)

    def _watch_head(self) -> None:
        """Find out in time that the cluster's head is gone."""
        import ray

        address = ray.get_runtime_context().gcs_address
        host, _, port = address.rpartition(":")
        answered_at = time.monotonic()
        while not self._closed.wait(_PROBE_SECONDS):
            try:
                probe((host.strip("[]"), int(port)))
                answered_at = time.monotonic()
            except OSError as error:
                silent = time.monotonic() - answered_at
                log.debug("the head at %s does not answer: %s", address, error)
                if silent > _HEAD_SECONDS:
                    self.failure = WorkersLost(f"the cluster's head at {address} has not answered for {silent:.0f} s")
                    return

    def _kill(self, actors: list[Any]) -> threading.Thread:
        """End actors in a thread: while the head does not answer, that blocks."""
        import ray

        def kill() -> None:
            for actor in actors:
                try:
                    ray.kill(actor)
                except Exception as error:  # noqa: BLE001 - it is gone, or the cluster is
                    log.debug("an actor could not be ended: %s", error)

        thread = threading.Thread(target=kill, name="steelyard-ray-kill", daemon=True)
        thread.start()
        return thread


def _node_of(actor: Any) -> str | None:
    """The id of the node on which an actor is or was."""
    if actor is None:
        return None
    try:
        from ray._private import state

        found = state.actors(actor._actor_id.hex())
        return str(found["Address"]["NodeID"]) or None
    except Exception:  # noqa: BLE001 - a table of Ray's own, which may change
        return None


def _last_line(error: BaseException) -> str:
    return str(getattr(error, "cause", None) or error).strip().splitlines()[-1]


def _notes_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"steelyard-deaths-{os.getuid()}"


def watch_own_end() -> subprocess.Popen[bytes] | None:
    """Have the end of this process noted; None where the system cannot tell."""
    if not hasattr(os, "pidfd_open"):
        return None
    with contextlib.suppress(OSError):
        _notes_folder().mkdir(mode=0o700, exist_ok=True)
        return start_watching(os.getpid(), _notes_folder() / str(os.getpid()))
    return None


def start_watching(pid: int, note: Path) -> subprocess.Popen[bytes]:
    """Start the process that writes the note; it prints a line when it watches, and ends with the one it watches."""
    return subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _WATCH, str(pid), str(note)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def take_notes() -> dict[int, str]:
    """Return how processes of this node ended, by their number, and remove the notes."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for path in sorted(_notes_folder().iterdir())[:_MAX_NOTES]:
            with contextlib.suppress(OSError, ValueError):
                status, oom_kills = map(int, path.read_text().split())
                path.unlink()
                found[int(path.name)] = describe_end(status, oom_kills)
    return found


def describe_end(status: int, oom_kills: int) -> str:
    """Say how a process ended, by its wait status and how many processes were killed for memory meanwhile."""
    code = os.waitstatus_to_exitcode(status)
    is_out_of_memory = code == -signal.SIGKILL and oom_kills > 0
    return ending_of(code) + (": its node ran out of memory" if is_out_of_memory else "")
