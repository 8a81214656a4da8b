"""The engine that spreads a run over several processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Literal

from steelyard.daemon_threads import DaemonThreads
from steelyard.engine.workers.driver import NoPlaceForWorker
from steelyard.engine.workers.engine import WorkersEngine, check_workers
from steelyard.engine.workers.messages import Batch, Message, WorkerInfo, check_same_versions
from steelyard.engine.workers.pickling import pickle_item
from steelyard.engine.workers.process import (
    BATCH,
    BEGIN,
    BEGUN,
    BUFFER_BYTES,
    EXCHANGE,
    MESSAGE,
    QUIT,
    is_last,
    log_levels,
    read_frame,
    receive_block,
    send_block,
    write_frame,
)
from steelyard.errors import ConfigurationError, describe
from steelyard.shutdown import ENGINE_GRACE_SECONDS, WORKER_EXIT_SECONDS, WORKER_KILL_SECONDS
from steelyard.subprocesses import REAPER, ending_of

log = logging.getLogger("steelyard")

_START_SECONDS = 60.0
"""How long a process may take to start before it counts as one that cannot."""
_DEATH_SECONDS = 2.0
"""How long a process whose connection ended may take to be gone; then it is killed."""
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from steelyard.engine.workers.process import main; main(int(sys.argv[2]))"
)
"""Not multiprocessing's start: that would import the caller's main module again, and needs a guard in it."""


class ProcessEngine(WorkersEngine):
    """Runs work in `workers` processes of this machine; the same contract as LocalEngine.

    "auto" is one process fewer than there are cores, at least one. A case whose process dies is assigned again at most
    `max_reschedules` times. The processes find modules and files as this process does, and have its environment.

    They stay until `close()`, or the end of a `with` block, so that the next run finds them ready.
    """

    sends_keys = True  # over a socket pair, which nobody else can read

    def __init__(
        self,
        workers: int | Literal["auto"] = "auto",
        *,
        max_reschedules: int = 3,
        grace: float = ENGINE_GRACE_SECONDS,
    ) -> None:
        if workers != "auto":
            check_workers(workers)
        super().__init__(max_reschedules=max_reschedules, grace=grace)
        self._size = auto_workers() if workers == "auto" else workers
        self._pool: ProcessPool | None = None

    def check(self, *, pace: bool = False) -> None:  # noqa: ARG002 - arrivals are shared, too
        """Start all processes; raises ConfigurationError for what cannot be done. Not for the event loop."""
        self._open()

    def close(self) -> None:
        """End the processes."""
        with self._opening:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(WORKER_KILL_SECONDS if self._was_cancelled else WORKER_EXIT_SECONDS)

    def _open(self) -> ProcessPool:
        with self._opening:
            if self._pool is None:
                pool = ProcessPool(self._size)
                try:
                    pool.start(range(self._size))
                except BaseException:
                    pool.close(WORKER_KILL_SECONDS)
                    raise
                self._pool = pool
            return self._pool


def auto_workers() -> int:
    """Return how many processes leave one core for the driver."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    return max(1, cores - 1)


class WorkerDied(ConnectionError):
    """A worker process is gone."""


class WorkerProcess:
    """One process, from its start to its end."""

    def __init__(self) -> None:
        if not sys.executable:
            raise ConfigurationError("worker processes cannot be started: Python does not know its own program")
        ours, theirs = socket.socketpair()
        REAPER.start()
        try:
            with theirs:
                self._popen = subprocess.Popen(
                    [
                        sys.executable,
                        *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                        "-c",
                        _BOOTSTRAP,
                        json.dumps(sys.path),
                        str(theirs.fileno()),
                    ],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **REAPER.environment},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise ConfigurationError(f"a worker process cannot be started: {describe(error)}") from error
        self._control = ours
        self.info: WorkerInfo | None = None
        # Should this process be killed, the reaper ends the worker even where the worker cannot: stopped, or stuck.
        REAPER.started(self._popen.pid)
        with contextlib.suppress(OSError):  # it has ended already: `shake_hands` says so
            send_block(ours, pickle.dumps({"log_levels": log_levels(), "uvloop": "uvloop" in sys.modules}))

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def shake_hands(self) -> WorkerInfo:
        """Wait until the process is ready, and check that its versions are this one's."""
        self._control.settimeout(_START_SECONDS)
        try:
            info = pickle.loads(receive_block(self._control))
        except TimeoutError:
            raise ConfigurationError(f"a worker process was not ready within {_START_SECONDS:.0f} s") from None
        except OSError:
            how = self.wait_for_end()
            raise ConfigurationError(f"a worker process {how} before it was ready: see its output above") from None
        self._control.settimeout(None)
        check_same_versions(info)
        self.info = info
        return self.info

    def hand_over(self, connection: socket.socket) -> None:
        """Give the process the socket of a run."""
        try:
            socket.send_fds(self._control, [b"r"], [connection.fileno()])
        except OSError:
            raise WorkerDied(self.wait_for_end()) from None

    def quit(self) -> None:
        """Ask the process to end in an orderly way."""
        with contextlib.suppress(OSError):
            self._control.sendall(QUIT)

    def kill(self) -> None:
        """Kill the process and what is in its group."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def wait_for_end(self, seconds: float = _DEATH_SECONDS) -> str:
        """Wait for the end of the process, which is killed if it takes too long; says how it ended."""
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(_DEATH_SECONDS)
            how = "did not answer any more and was killed"
        else:
            how = _how_it_ended(self._popen.returncode)
        self._control.close()
        REAPER.ended(self._popen.pid)
        return how


def _how_it_ended(code: int) -> str:
    # Nobody but the kernel and people send SIGKILL.
    return ending_of(code) + (": by hand, or because memory ran out" if -code == signal.SIGKILL else "")


class ProcessPool:
    """The processes of an engine, by worker number."""

    failure = None
    start_seconds = _START_SECONDS

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: dict[int, WorkerProcess] = {}
        self._lock = threading.Lock()
        self._closed = False

    def start(self, numbers: Sequence[int]) -> None:
        """Start processes, all at once, and wait until they are ready."""
        with self._lock:
            starting = [number for number in numbers if number not in self._processes]
            for number in starting:
                self._check_open()
                self._processes[number] = WorkerProcess()
            self._check_open()
            for number in starting:
                try:
                    self._processes[number].shake_hands()
                except BaseException:
                    self._processes.pop(number).wait_for_end(0.0)
                    raise

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError("the engine was closed")

    async def worker(self, number: int) -> tuple[ProcessConnection, WorkerInfo]:
        """Return a connection to the process of a number, started if it is not there.

        One that cannot be started again, because Steelyard was updated meanwhile, say, leaves its part to the others.
        """
        if number not in self._processes:
            try:
                await DaemonThreads().run(self.start, [number])
            except ConfigurationError as error:
                self._check_open()
                raise NoPlaceForWorker(f"{error}; the run goes on without it") from error
        process = self._processes[number]
        assert process.info is not None
        return ProcessConnection(process), process.info

    def lose(self, number: int) -> None:
        """Forget a process that is gone, so that the next call of `worker` starts another."""
        process = self._processes.get(number)
        if process is not None and not process.is_running:  # else another run has replaced it already
            del self._processes[number]

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error means that a worker is gone, and not that its code raised."""
        return isinstance(error, WorkerDied)

    def is_broken_connection(self, error: BaseException) -> bool:  # noqa: ARG002
        """Never: a socket pair ends with the process at its other end."""
        return False

    def why_lost(self, error: Exception) -> str:
        """Say in a line how a worker died."""
        return describe(error).partition("\n")[0]

    def cause(self, error: Exception) -> Exception:
        """Return what a worker raised."""
        return error

    def close(self, seconds: float) -> None:
        """End all processes; those that take longer, or are not ready yet, are killed."""
        self._closed = True
        for process in list(self._processes.values()):
            if process.info is None:  # else the thread that starts it would hold the lock until it is ready
                process.kill()
        with self._lock:
            ending = list(self._processes.values())
            self._processes.clear()
        until = time.monotonic() + seconds
        for process in ending:
            process.quit()
        for process in ending:
            process.wait_for_end(max(0.0, until - time.monotonic()))


class ProcessConnection:
    """One run's connection to a worker process, used on the run's event loop."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process
        self._writer: asyncio.StreamWriter | None = None

    async def clock_offset(self) -> float:
        """Return 0: all processes of a machine have one monotonic clock."""
        return 0.0

    async def begin(self, run: int, work: bytes, parallelism: int, grace: float, paced: bool) -> None:  # noqa: ARG002
        """Have the process unpickle the work and open its endpoints; raises what makes that impossible."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process.hand_over(theirs)
            except BaseException:
                ours.close()
                raise
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=BUFFER_BYTES)
        write_frame(self._writer, BEGIN, pickle.dumps((work, parallelism, grace, paced)))
        try:
            kind, content = await self._read()
            if kind != BEGUN:
                raise pickle.loads(content)
        except BaseException:
            self.close()
            raise

    async def exchange(self, run: int, message: Message) -> Batch:  # noqa: ARG002
        """Send a message, and wait for the next batch."""
        assert self._writer is not None
        write_frame(self._writer, EXCHANGE, pickle_item(message))
        kind, content = await self._read()
        assert kind == BATCH
        batch: Batch = pickle.loads(content)
        if is_last(batch):
            self.close()
        return batch

    def send(self, run: int, message: Message) -> None:  # noqa: ARG002
        """Send a message without a batch in return."""
        if self._writer is not None:
            write_frame(self._writer, MESSAGE, pickle_item(message))

    def close(self) -> None:
        """End the connection: the process cancels what it still does for the run."""
        if self._writer is not None:
            self._writer.close()

    async def _read(self) -> tuple[int, bytes]:
        try:
            return await read_frame(self._reader)
        except (asyncio.IncompleteReadError, OSError):
            self.close()
            raise WorkerDied(await DaemonThreads().run(self._process.wait_for_end)) from None
