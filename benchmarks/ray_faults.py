"""Faults of a real Ray cluster, one after the other, with the calls counted by the server that answers them.

    python -m benchmarks.ray_faults                       # all of them, some 20 minutes; needs root on Linux
    python -m benchmarks.ray_faults partition_30 head_lost

Each fault has a fresh cluster: a head without CPUs, on which the driver runs, and two nodes with a worker each. Every
machine is a network, process and mount namespace, so that Ray takes them for machines; two bridges join them, one for
the cluster and one to the provider. A partition cuts a node off from the cluster and not from the provider: what its
worker has begun is answered and counted. All that is made here is removed at the end, also after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import steelyard

_BIN = Path(sys.executable).parent
_PREFIX = "syf"
_CLUSTER, _PROVIDER = "10.77.0", "10.78.0"
_PORT = 8080
_LATENCY = 1.0
_PARALLELISM = 40
_FAULT_AT = 6.0
"""Seconds of answers before the fault."""


# What answers and counts: run in the namespace of the provider.


async def serve() -> None:
    """Answer chat requests after a second, and count them by prompt."""
    asked: Counter[str] = Counter()
    now = peak = 0
    seconds: Counter[int] = Counter()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal now, peak
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                found = re.search(r"content-length: (\d+)", head, re.I)
                body = await reader.readexactly(int(found[1])) if found else b""
                if head.startswith("GET"):
                    reply: Any = {"asked": asked, "peak": peak, "now": now, "seconds": seconds}
                else:
                    asked[json.loads(body)["messages"][-1]["content"]] += 1
                    now += 1
                    peak = max(peak, now)
                    seconds[int(time.time())] += 1
                    await asyncio.sleep(_LATENCY)
                    now -= 1
                    message = {"role": "assistant", "content": "x" * 200}
                    reply = {
                        "id": "1",
                        "object": "chat.completion",
                        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                        "usage": {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10},
                    }
                content = json.dumps(reply).encode()
                headers = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
                writer.write(headers.encode() + content)
        writer.close()

    server = await asyncio.start_server(handle, "0.0.0.0", _PORT, backlog=1000)
    await server.serve_forever()


# The machines


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Machine:
    """A network namespace on both bridges, and a process and mount namespace that ends with its first process."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.space = f"{_PREFIX}{number}"
        self.address = f"{_CLUSTER}.{number}"
        self.folder = folder
        _do("ip", "netns", "add", self.space)
        for kind, net in (("c", _CLUSTER), ("p", _PROVIDER)):
            inside, outside = f"{kind}{number}", f"{_PREFIX}{kind}{number}"
            _do("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", self.space)
            _do("ip", "link", "set", outside, "master", f"{_PREFIX}{kind}", "up")
            _do("ip", "-n", self.space, "addr", "add", f"{net}.{number}/24", "dev", inside)
            _do("ip", "-n", self.space, "link", "set", inside, "up")
        _do("ip", "-n", self.space, "link", "set", "lo", "up")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, words: list[str], **environment: str) -> subprocess.Popen[bytes]:
        """Start a machine's first process: all others end with it."""
        script = (
            f'mount -t tmpfs tmpfs /tmp && mkdir -p /tmp/ray && hostname {self.space} && "$@" && exec sleep infinity'
        )
        inner = [
            "unshare",
            "--pid",
            "--fork",
            "--mount",
            "--mount-proc",
            "--uts",
            "--kill-child",
            "sh",
            "-c",
            script,
            "-",
        ]
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", self.space, *inner, *words],
            stdout=(self.folder / f"{self.space}.log").open("ab"),
            stderr=subprocess.STDOUT,
            env={**_environment(), **environment},
            start_new_session=True,
        )
        return self.process

    def enter(self, words: list[str], **options: Any) -> subprocess.Popen[str]:
        """Start a program on the machine."""
        assert self.process is not None
        first = _children(self.process.pid)[0]
        return subprocess.Popen(
            ["nsenter", "-t", str(first), "-n", "-p", "-m", "-u", f"--wdns={options.pop('cwd')}", *words],
            env={**_environment(), **options.pop("environment", {})},
            text=True,
            **options,
        )

    def processes(self, words: str) -> list[int]:
        """Find the machine's processes by words of their command lines."""
        assert self.process is not None
        return [pid for pid in _descendants(self.process.pid) if words in _command(pid)]

    def cut_off(self, cut: bool) -> None:
        """Take the machine off the cluster's bridge, or put it back: packets vanish, nothing is told."""
        outside = f"{_PREFIX}c{self.number}"
        _do("ip", "link", "set", outside, *(["nomaster"] if cut else ["master", f"{_PREFIX}c"]))

    def remove(self) -> None:
        if self.process is not None:
            for pid in [*_descendants(self.process.pid), self.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
        for kind in "cp":
            subprocess.run(["ip", "link", "del", f"{_PREFIX}{kind}{self.number}"], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", self.space], capture_output=True, check=False)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    return {**kept, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "FAULTS_KEY": "sk-not-a-key"}


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _descendants(pid: int) -> list[int]:
    return [found for child in _children(pid) for found in (child, *_descendants(child))]


class Cluster:
    """A head, two nodes and a provider; `extra` is a third node's environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for kind in "cp":
            _do("ip", "link", "add", f"{_PREFIX}{kind}", "type", "bridge")
            _do("ip", "link", "set", f"{_PREFIX}{kind}", "up")
        self.provider = Machine(100, folder)
        self.head, self.first, self.second = (Machine(number, folder) for number in (1, 2, 3))
        self.third: Machine | None = None

    def start(self) -> None:
        self.provider.start([sys.executable, "-m", "benchmarks.ray_faults", "serve"])
        common = ["--disable-usage-stats", "--object-store-memory=80000000"]
        head = ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"]
        self.head.start([str(_BIN / "ray"), "start", *head, *common, f"--node-ip-address={self.head.address}"])
        self._wait(lambda: self.head.processes("raylet/raylet"))
        for machine in (self.first, self.second):
            self.join(machine)

    def join(self, machine: Machine, **environment: str) -> None:
        """Start a node, and wait for it."""
        words = [str(_BIN / "ray"), "start", f"--address={self.head.address}:6379", "--num-cpus=2"]
        words += ["--disable-usage-stats", "--object-store-memory=80000000", f"--node-ip-address={machine.address}"]
        machine.start(words, **environment)
        self._wait(lambda: machine.processes("raylet/raylet"))
        time.sleep(2)

    def _wait(self, ready: Callable[[], Any], seconds: float = 90) -> None:
        until = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > until:
                raise TimeoutError("the cluster did not start")
            time.sleep(0.2)

    def counts(self) -> dict[str, Any]:
        """Ask the provider what it was asked."""
        script = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{_PORT}/').read().decode())"
        asked = self.provider.enter([sys.executable, "-c", script], cwd="/", stdout=subprocess.PIPE)
        found: dict[str, Any] = json.loads(asked.communicate()[0])
        return found

    def asked(self) -> int:
        with contextlib.suppress(ValueError, IndexError):
            return sum(self.counts()["asked"].values())
        return 0

    def remove(self) -> None:
        for machine in (self.provider, self.head, self.first, self.second, self.third):
            if machine is not None:
                machine.remove()
        for kind in "cp":
            subprocess.run(["ip", "link", "del", f"{_PREFIX}{kind}"], capture_output=True, check=False)


# A run with a fault


class Trial:
    """A run of so many cases by the command line, on the head."""

    def __init__(self, cluster: Cluster, cases: int) -> None:
        self.cluster = cluster
        self.cases = cases
        self.place = cluster.folder / "suite"
        self.place.mkdir()
        (self.place / "cases.jsonl").write_text("".join(f'{{"id": "c{n}", "prompt": "{n}"}}\n' for n in range(cases)))
        url = f"http://{_PROVIDER}.100:{_PORT}/v1"
        target = f"{{openai-chat: {{model: m, base_url: '{url}', api_key_env: FAULTS_KEY, stream: false}}}}"
        (self.place / "suite.yaml").write_text(f"id: faults\ntarget: {target}\ncases: cases.jsonl\n")
        self.outputs = self.place / "run" / "outputs.jsonl"

    def start(self, *more: str, machine: Machine | None = None) -> subprocess.Popen[str]:
        words = [str(_BIN / "steelyard"), "run", "suite.yaml", "--out", "run", "-j", str(_PARALLELISM), "--no-progress"]
        words += ["--engine", "ray", "--ray-address", f"{self.cluster.head.address}:6379", "--workers", "2", *more]
        log = (self.cluster.folder / "driver.log").open("a")
        return (machine or self.cluster.head).enter(words, cwd=self.place, stdout=subprocess.PIPE, stderr=log)

    @staticmethod
    def driver(running: subprocess.Popen[str]) -> int:
        """The driver's own process, below `nsenter`."""
        return _descendants(running.pid)[0]

    def until(self, count: int, running: subprocess.Popen[str]) -> None:
        while running.poll() is None and self.cluster.asked() < count:
            time.sleep(0.3)

    def lines(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in self.outputs.read_bytes().split(b"\n")[:-1]]
        return []

    def report(self, name: str, code: int | None) -> dict[str, Any]:
        counts, lines = self.cluster.counts(), self.lines()
        log = (self.cluster.folder / "driver.log").read_text()
        return {
            "fault": name,
            "exit": code,
            "cases": self.cases,
            "records": len(lines),
            "cases with a record": len({line["id"] for line in lines}),
            "asked": len(counts["asked"]),
            "asked more than once": sum(times - 1 for times in counts["asked"].values()),
            "peak in flight": counts["peak"],
            "messages": [line for line in log.splitlines() if line.strip()][-6:],
        }


def _end(running: subprocess.Popen[str], seconds: float) -> int | None:
    try:
        running.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        running.kill()
        running.communicate()
        return None
    return running.returncode


def _steady(cluster: Cluster, seconds: float, *more: str) -> tuple[Trial, subprocess.Popen[str]]:
    """A run of about so many seconds that has been answered for a while."""
    trial = Trial(cluster, int(_PARALLELISM / _LATENCY * seconds))
    running = trial.start(*more)
    trial.until(int(_PARALLELISM / _LATENCY * _FAULT_AT), running)
    return trial, running


def worker_killed(cluster: Cluster) -> dict[str, Any]:
    trial, running = _steady(cluster, 25)
    os.kill(cluster.first.processes("ray::RayWorker")[0], signal.SIGKILL)
    return trial.report("worker_killed", _end(running, 120))


def node_lost(cluster: Cluster) -> dict[str, Any]:
    trial, running = _steady(cluster, 30)
    cluster.first.remove()
    return trial.report("node_lost", _end(running, 180))


def _partition(cluster: Cluster, seconds: float) -> dict[str, Any]:
    trial, running = _steady(cluster, seconds + 25)
    cluster.first.cut_off(True)
    time.sleep(seconds)
    cluster.first.cut_off(False)
    return trial.report(f"partition_{seconds:.0f}", _end(running, 240))


def partition_8(cluster: Cluster) -> dict[str, Any]:
    return _partition(cluster, 8)


def partition_30(cluster: Cluster) -> dict[str, Any]:
    return _partition(cluster, 30)


def partition_75(cluster: Cluster) -> dict[str, Any]:
    return _partition(cluster, 75)


def head_frozen(cluster: Cluster) -> dict[str, Any]:
    """The head is stopped for 21 seconds, and a worker is killed meanwhile: the other goes on."""
    trial, running = _steady(cluster, 50)
    (head,) = cluster.head.processes("gcs/gcs_server")
    os.kill(head, signal.SIGSTOP)
    time.sleep(2)
    os.kill(cluster.first.processes("ray::RayWorker")[0], signal.SIGKILL)
    time.sleep(3)
    before = cluster.asked()
    time.sleep(10)
    rate = (cluster.asked() - before) / 10
    time.sleep(6)
    os.kill(head, signal.SIGCONT)
    return {**trial.report("head_frozen", _end(running, 180)), "calls/s while frozen": rate}


def head_lost(cluster: Cluster) -> dict[str, Any]:
    trial, running = _steady(cluster, 120)
    (head,) = cluster.head.processes("gcs/gcs_server")
    os.kill(head, signal.SIGKILL)
    began = time.monotonic()
    code = _end(running, 120)
    return {**trial.report("head_lost", code), "seconds to the end": round(time.monotonic() - began)}


def driver_killed(cluster: Cluster) -> dict[str, Any]:
    trial, running = _steady(cluster, 20)
    os.kill(trial.driver(running), signal.SIGKILL)
    _end(running, 30)
    time.sleep(5)
    journalled = {line["id"] for line in trial.lines()}
    before = cluster.counts()["asked"]
    code = _end(trial.start(), 120)
    after = cluster.counts()["asked"]
    again = sum(after[case[1:]] - before.get(case[1:], 0) for case in journalled)
    return {**trial.report("driver_killed", code), "journalled and asked again": again}


def disk_full(cluster: Cluster) -> dict[str, Any]:
    """The run directory is on a disk of 300 KB, which is then made larger."""
    trial = Trial(cluster, 800)
    small = cluster.folder / "suite" / "run"
    small.mkdir()
    assert cluster.head.process is not None
    first = _children(cluster.head.process.pid)[0]
    inside = ["nsenter", "-t", str(first), "-m"]
    _do(*inside, "mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small))
    full = _end(trial.start(), 120)
    _do(*inside, "mount", "-o", "remount,size=50m", str(small))
    code = _end(trial.start(), 120)
    _do(*inside, "cp", str(small / "outputs.jsonl"), str(cluster.folder / "copied.jsonl"))
    trial.outputs = cluster.folder / "copied.jsonl"
    return {**trial.report("disk_full", code), "exit when full": full}


def driver_starved(cluster: Cluster) -> dict[str, Any]:
    """A load run whose driver runs 40 ms of each 500."""
    trial, running = _steady(cluster, 1, "--requests", "1000")
    driver = trial.driver(running)
    until = time.monotonic() + 150
    while running.poll() is None and time.monotonic() < until:
        with contextlib.suppress(ProcessLookupError):
            os.kill(driver, signal.SIGSTOP)
            time.sleep(0.46)
            os.kill(driver, signal.SIGCONT)
            os.kill(running.pid, signal.SIGCONT)  # nsenter stops with what it runs
            time.sleep(0.04)
    report = trial.report("driver_starved", _end(running, 10))
    metrics = json.loads((trial.place / "run" / "metrics.json").read_text())
    return {**report, "bottleneck": metrics["client"]["bottleneck"], "reason": metrics["client"]["reason"]}


def mismatched_node(cluster: Cluster) -> dict[str, Any]:
    """A third node has another version of Steelyard."""
    other = cluster.folder / "other"
    shutil.copytree(Path(steelyard.__file__).parent, other / "steelyard")
    version = other / "steelyard" / "_version.py"
    version.write_text(re.sub(r'"[^"]+"', '"0.0.1"', version.read_text(), count=1))
    cluster.third = Machine(4, cluster.folder)
    cluster.join(cluster.third, PYTHONPATH=str(other))
    trial = Trial(cluster, 300)
    strict = _end(trial.start("--workers", "6", "--strict-workers"), 90)
    asked = cluster.asked()
    report = trial.report("mismatched_node", _end(trial.start("--workers", "6"), 120))
    return {**report, "exit with --strict-workers": strict, "asked by it": asked}


def not_a_node(cluster: Cluster) -> dict[str, Any]:
    """The driver is on a machine that reaches the head and is no node."""
    trial = Trial(cluster, 10)
    return trial.report("not_a_node", _end(trial.start(machine=cluster.provider), 60))


FAULTS: list[Callable[[Cluster], dict[str, Any]]] = [
    not_a_node, worker_killed, partition_8, partition_30, partition_75, node_lost, head_frozen, head_lost,
    driver_killed, disk_full, driver_starved, mismatched_node,
]  # fmt: skip


@contextlib.contextmanager
def _cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/var/tmp") as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.remove()


def main(names: list[str]) -> None:
    """Print a report of each fault, as a line of JSON."""
    known = {fault.__name__: fault for fault in FAULTS}
    for name in names or known:
        began = time.monotonic()
        with _cluster() as cluster:
            try:
                report = known[name](cluster)
            except Exception as error:  # noqa: BLE001 - the next one has another cluster
                log = cluster.folder / "driver.log"
                report = {"fault": name, "failed": repr(error), "messages": log.read_text() if log.exists() else ""}
        print(json.dumps({**report, "took": round(time.monotonic() - began)}, indent=1), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        asyncio.run(serve())
    else:
        main(sys.argv[1:])
