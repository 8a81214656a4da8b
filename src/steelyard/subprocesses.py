"""Child processes: written to, read from, and always ended with everything they started.

Built on Popen and the loop's readers rather than on asyncio's own subprocesses: those wait for every pipe to close
(a leftover grandchild would hang the call) and depend on the loop and the thread they run in.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from steelyard import reaper
from steelyard.protocols import StartedPrograms
from steelyard.shutdown import PROGRAM_DRAIN_SECONDS as DRAIN_SECONDS
from steelyard.shutdown import PROGRAM_GRACE_SECONDS as GRACE_SECONDS
from steelyard.shutdown import PROGRAM_REAP_SECONDS as REAP_SECONDS

STDERR_BYTES = 4096
_ALLOWED = frozenset(
    {"PATH", "LANG", "LANGUAGE", "TZ", "TERM", "USER", "LOGNAME", "SHELL", "SSL_CERT_FILE", "SSL_CERT_DIR",
     "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"}
)  # fmt: skip
"""What a program is given of our environment; all else only by name."""
_CHUNK_BYTES = 1 << 18

_alive: set[ChildProcess] = set()
"""Programs started and not reaped yet: as each has its own session, they would outlive this process."""


def kill_all() -> None:
    """Kill every program that still runs: for a process that exits without cleaning up."""
    for child in list(_alive):
        child._signal(signal.SIGKILL)  # only the signal: its pipes belong to a loop in another thread


def allowed_environment(*names: str) -> dict[str, str]:
    """What of our environment a program is given: where programs are, language, proxies, and what is named."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _ALLOWED or name.startswith(("LC_", reaper.MARKER_PREFIX)) or name in names
    }


def ending_of(returncode: int) -> str:
    """How a program ended, in words."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


class Reaper:
    """This process's reaper: it hears of each program that starts and ends, and kills the rest if this process dies.

    It is started with the first program, or earlier by the command line, which has it watch for signals too. Where
    there is no /proc (macOS) there is none, and programs are ended only by the code that started them.
    """

    def __init__(self) -> None:
        self.marker = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._pid = 0
        self._pipe: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._has_programs = False

    @property
    def environment(self) -> dict[str, str]:
        """What each program's environment carries, so that the reaper knows its descendants."""
        return {f"{reaper.MARKER_PREFIX}{self.marker}": "1"}

    def start(self) -> int | None:
        """Have the reaper running; the pipe it reads, which `signal.set_wakeup_fd` takes too. None where it cannot."""
        with self._lock:
            if self._pid != os.getpid():  # a forked copy has its own programs, and needs its own reaper
                self._pid, self.marker = os.getpid(), secrets.token_hex(8)
                self._pipe = self._launch()
            return self._pipe

    def _launch(self) -> int | None:
        if not os.path.exists("/proc/self/environ") or not hasattr(os, "pidfd_open"):
            return None
        reading, writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), self.marker],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        except OSError:
            os.close(writing)
            return None
        finally:
            os.close(reading)
        os.set_blocking(writing, False)
        return writing

    def started(self, pid: int) -> None:
        """Report a program, which leads a process group."""
        self._has_programs = True
        self._report(f"+ {pid} {reaper.start_time(pid) or 0}\n")

    def ended(self, pid: int) -> None:
        """Report that a program's group has been ended."""
        self._report(f"- {pid}\n")

    def calm(self) -> None:
        """Report that the signals that came were dealt with: this process goes on."""
        self._report("calm\n")

    def _report(self, line: str) -> None:
        if self._pipe is not None and self._pid == os.getpid():
            with suppress(OSError):  # the reaper was killed: what it would do is left to the next launch
                os.write(self._pipe, line.encode())

    def close(self) -> None:
        """Let the reaper end what is left, and wait for it if there were programs."""
        with self._lock:
            pipe, self._pipe = self._pipe, None
            if pipe is not None and self._pid == os.getpid():
                os.close(pipe)
                if self._process is not None and self._has_programs:
                    with suppress(subprocess.TimeoutExpired):
                        self._process.wait(timeout=REAP_SECONDS)
                elif self._process is not None:
                    self._process.returncode = 0  # ends by itself: Popen need not warn that it was not waited for
            self._pid = 0


REAPER = Reaper()
atexit.register(REAPER.close)


class ProcessLog:
    """`processes.jsonl`: the programs of a run, so that its next launch can end what a lost reaper left behind."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def started(self, pid: int) -> None:
        """Write down a program that was started."""
        self._append({**_this_machine(), "pid": pid, "start": reaper.start_time(pid), "marker": REAPER.marker})

    def ended(self, pid: int) -> None:
        """Write down that it was ended."""
        self._append({**_this_machine(), "pid": pid, "ended": True})

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        with suppress(OSError):  # a worker's machine without the run directory, a full disk: the reaper is there still
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)

    def end_leftovers(self) -> list[int]:
        """End the programs of earlier launches that still run here; their process ids. The log begins again."""
        here, running, markers = _this_machine(), dict[int, dict[str, Any]](), set[str]()
        for entry in _entries(self._path):
            if {name: entry.get(name) for name in here} != here or not isinstance(entry.get("pid"), int):
                continue
            if entry.get("ended"):
                running.pop(entry["pid"], None)
            else:
                running[entry["pid"]] = entry
                markers.add(str(entry.get("marker")))
        left = [pid for pid, entry in running.items() if reaper.start_time(pid) == entry.get("start") is not None]
        for pid in left:
            reaper.kill_group(pid, int(running[pid]["start"]))
        for marker in markers - {REAPER.marker}:
            reaper.end_all({}, marker)
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        return left

    def remove_if_all_ended(self) -> None:
        """Remove the log of a launch that leaves no program behind, on any machine."""
        running = set()
        for entry in _entries(self._path):
            known = (entry.get("host"), entry.get("pid_namespace"), entry.get("pid"))
            running.discard(known) if entry.get("ended") else running.add(known)
        if not running:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the readable lines of a process log."""
    with suppress(OSError), open(path, "rb") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                yield entry


def _this_machine() -> dict[str, Any]:
    """What tells whether a process id means the same process here: the host, its boot, the pid namespace."""
    boot = namespace = None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return {"host": socket.gethostname(), "boot": boot, "pid_namespace": namespace}


def output_of(argv: list[str], *, timeout: float, max_bytes: int) -> tuple[int, bytes, bytes]:
    """Run a program without a shell or input; its exit code, output and error output. Blocks: not for the event loop.

    TimeoutError when it takes longer, with everything that it started ended; OSError when it cannot be started.
    """
    REAPER.start()
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **REAPER.environment},
        start_new_session=True,
    )
    REAPER.started(child.pid)
    try:
        output, errors = child.communicate(timeout=timeout)
    except BaseException as error:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"{argv[0]} took longer than {timeout:g} s") from None
        raise
    finally:
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        REAPER.ended(child.pid)
    return child.returncode, output[:max_bytes], errors[-STDERR_BYTES:]


class ProgramResult(msgspec.Struct, frozen=True):
    """How a program ended, and what it printed."""

    returncode: int
    stdout: bytes
    stderr: bytes
    """Its end."""
    seconds: float
    timed_out: bool = False
    overflowed: bool = False


async def run_program(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None,
    timeout: float | None,
    stdin: bytes = b"",
    max_output_bytes: int = 64 << 20,
    programs: StartedPrograms | None = None,
) -> ProgramResult:
    """Run a program to its end, or until its time is up or it prints too much; everything it started is ended.

    OSError when it cannot be started.
    """
    child = ChildProcess(list(argv), stdin=stdin, env=env, cwd=cwd, max_output_bytes=max_output_bytes, log=programs)
    timed_out = False
    try:
        async with asyncio.timeout(timeout) as limit:
            await child.finished()
    except TimeoutError:
        if not limit.expired():
            raise
        timed_out = True
    except GeneratorExit:  # the event loop is gone: waiting is impossible
        child.kill()
        raise
    finally:
        await child.end()
    return ProgramResult(
        child.returncode if child.returncode is not None else -signal.SIGKILL,
        bytes(child.stdout),
        child.stderr_tail,
        perf_counter() - child.started_at,
        timed_out,
        child.overflowed,
    )


class ChildProcess:
    """A running program in a new session. The caller must await `end()`, whatever happens."""

    def __init__(
        self,
        argv: list[str],
        *,
        stdin: bytes,
        env: Mapping[str, str],
        cwd: Path | None,
        max_output_bytes: int | None,
        log: StartedPrograms | None = None,
        on_output: Callable[[bytes, str], None] | None = None,
    ) -> None:
        """`on_output` gets each piece as it comes, with "out" or "err".

        Without `max_output_bytes`, stdout is not collected here.
        """
        self._log = log
        self._on_output = on_output
        self.usage: resource.struct_rusage | None = None
        """What the program and those that it waited for have used, after its end."""
        self._loop = asyncio.get_running_loop()
        self._unsent = memoryview(stdin)
        self._max_output_bytes = max_output_bytes
        self.stdout = bytearray()
        self.stderr_tail = b""
        self.overflowed = False
        self.first_byte_at: float | None = None
        self.exited_at: float | None = None
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._drained: asyncio.Future[None] = self._loop.create_future()
        self._flooded: asyncio.Future[None] = self._loop.create_future()
        REAPER.start()
        self.started_at = perf_counter()
        self._popen = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**env, **REAPER.environment},
            cwd=cwd,
            start_new_session=True,
        )
        _alive.add(self)
        REAPER.started(self._popen.pid)
        if log is not None:
            log.started(self._popen.pid)
        try:
            self._begin()
        except BaseException:
            self.kill()
            raise

    def _begin(self) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._stdin = self._popen.stdin.fileno()
        self._stdout = self._popen.stdout.fileno()
        self._stderr = self._popen.stderr.fileno()
        self._open = {self._stdin, self._stdout, self._stderr}
        for descriptor in self._open:
            os.set_blocking(descriptor, False)
        threading.Thread(target=self._watch, name="steelyard-child", daemon=True).start()
        self._loop.add_reader(self._stdout, self._read_stdout)
        self._loop.add_reader(self._stderr, self._read_stderr)
        self._loop.add_writer(self._stdin, self._write_stdin)

    @property
    def pid(self) -> int:
        """The program's process id, which is also its group's."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, the negative number of the signal that ended it, or None before `end()`."""
        return self._popen.returncode

    async def finished(self) -> None:
        """Wait until the program has ended and its output is read, or until the output exceeds its limit."""
        await asyncio.wait({self._exited, self._flooded}, return_when=asyncio.FIRST_COMPLETED)
        if not self.overflowed:
            await asyncio.wait(
                {self._drained, self._flooded}, timeout=DRAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )

    async def end(self, grace: float = GRACE_SECONDS) -> None:
        """End the whole group with SIGTERM, then SIGKILL, then reap it; a second cancellation skips the wait."""
        try:
            if not (self._exited.done() and self._drained.done()):
                self._signal(signal.SIGTERM)
                await asyncio.wait({self._exited, self._drained}, timeout=grace)
        finally:
            self._signal(signal.SIGKILL)
            try:
                await asyncio.wait({self._exited}, timeout=REAP_SECONDS)
            finally:
                self._reap()

    def kill(self) -> None:
        """Kill the group at once, without waiting on the event loop."""
        self._signal(signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        _alive.discard(self)
        REAPER.ended(self._popen.pid)
        if self._log is not None:
            self._log.ended(self._popen.pid)
        for descriptor in tuple(self._open):
            self._close(descriptor)
        if self._exited.done() and self._popen.returncode is None and hasattr(os, "waitid"):
            with suppress(ChildProcessError):
                _, status, self.usage = os.wait4(self._popen.pid, 0)
                self._popen.returncode = os.waitstatus_to_exitcode(status)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=0 if self._exited.done() else GRACE_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the group. Its number cannot have been reused: the program is reaped only in `_reap`."""
        if self._popen.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, number)

    def _watch(self) -> None:
        """Wait in a thread until the program has ended, and leave it to be reaped."""
        if hasattr(os, "waitid"):
            with suppress(ChildProcessError):  # reaped already: ended in a hurry
                os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        else:  # macOS before Python 3.13
            self._popen.wait()
        ended_at = perf_counter()
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._on_exit, ended_at)

    def _on_exit(self, ended_at: float) -> None:
        self.exited_at = ended_at
        _settle(self._exited)

    def _read_stdout(self) -> None:
        chunk = self._read(self._stdout)
        if chunk and self.first_byte_at is None:
            self.first_byte_at = perf_counter()
        if self._on_output is not None and chunk:
            self._on_output(chunk, "out")
        if self._max_output_bytes is None:
            return
        if len(self.stdout) + len(chunk) > self._max_output_bytes:
            self.overflowed = True
            _settle(self._flooded)
        elif not self.overflowed:
            self.stdout += chunk

    def _read_stderr(self) -> None:
        chunk = self._read(self._stderr)
        if self._on_output is not None and chunk:
            self._on_output(chunk, "err")
        self.stderr_tail = (self.stderr_tail + chunk)[-STDERR_BYTES:]

    def _read(self, descriptor: int) -> bytes:
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return b""
        if not chunk:
            self._close(descriptor)
        return chunk

    def _write_stdin(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._stdin, self._unsent) :]
        except BlockingIOError:
            return
        except OSError:  # it does not read its input; its answer still counts
            self._unsent = self._unsent[:0]
        if not self._unsent:
            self._close(self._stdin)

    def _close(self, descriptor: int) -> None:
        if descriptor not in self._open:
            return
        self._open.remove(descriptor)
        if not self._loop.is_closed():
            self._loop.remove_reader(descriptor)
            self._loop.remove_writer(descriptor)
        for stream in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if stream is not None and not stream.closed and stream.fileno() == descriptor:
                stream.close()
        if self._open <= {self._stdin}:
            _settle(self._drained)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done() and not future.get_loop().is_closed():
        future.set_result(None)
