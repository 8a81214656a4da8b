"""Machines made of namespaces on this one, Ray clusters of them, and the provider that counts the calls it gets.

    python -m benchmarks.machines serve 8080 127.0.0.1      # the provider alone

Every machine is a network, process and mount namespace, so that Ray takes them for machines; two bridges join them, one
for the cluster and one to the provider. That needs root on Linux. All that is made here is removed at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from tests.support.ray import AUTOSCALER_SETTINGS, autoscaler_configuration

BIN = Path(sys.executable).parent
_KEPT = [path for path in {Path.cwd(), Path(sys.prefix)} if path.is_relative_to("/tmp")]
"""What stays visible below a machine's own /tmp."""
_PREFIX = "syf"
CLUSTER, PROVIDER = "10.77.0", "10.78.0"
PORT = 8080
DASHBOARD = 8265
LATENCY = 1.0
PARALLELISM = 40
_COMMON = ("--disable-usage-stats", "--object-store-memory=80000000")
FAULT_AT = 6.0
"""Seconds of answers before the fault."""


# What answers and counts: run in the namespace of the provider.


async def serve(port: int, host: str = "0.0.0.0") -> None:
    """Answer chat requests after a second, and count them by prompt and by key.

    A call whose caller is gone is not in flight any more.
    """
    asked: Counter[str] = Counter()
    keys: Counter[str] = Counter()
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
                    reply: Any = {"asked": asked, "peak": peak, "now": now, "seconds": seconds, "keys": keys}
                else:
                    asked[json.loads(body)["messages"][-1]["content"]] += 1
                    if key := re.search(r"authorization: Bearer (\S+)", head, re.I):
                        keys[key[1]] += 1
                    now += 1
                    peak = max(peak, now)
                    seconds[int(time.time())] += 1
                    caller = asyncio.ensure_future(reader.read(1))  # nothing comes before the answer but an end
                    await asyncio.wait({caller}, timeout=LATENCY)
                    now -= 1
                    if caller.done():
                        break
                    caller.cancel()
                    await asyncio.wait({caller})
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

    server = await asyncio.start_server(handle, host, port, backlog=1000)
    await server.serve_forever()


# The machines


def do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Machine:
    """A network namespace on both bridges, and a process and mount namespace that ends with its first process."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.space = f"{_PREFIX}{number}"
        self.address = f"{CLUSTER}.{number}"
        self.folder = folder
        do("ip", "netns", "add", self.space)
        for kind, net in (("c", CLUSTER), ("p", PROVIDER)):
            inside, outside = f"{kind}{number}", f"{_PREFIX}{kind}{number}"
            do("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", self.space)
            do("ip", "link", "set", outside, "master", f"{_PREFIX}{kind}", "up")
            do("ip", "-n", self.space, "addr", "add", f"{net}.{number}/24", "dev", inside)
            do("ip", "-n", self.space, "link", "set", inside, "up")
        do("ip", "-n", self.space, "link", "set", "lo", "up")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, words: list[str], **environment: str) -> subprocess.Popen[bytes]:
        """Start a machine's first process: all others end with it."""
        script = (
            "mount --rbind /tmp /mnt && mount -t tmpfs tmpfs /tmp && mkdir -p /tmp/ray && "
            + "".join(f"mkdir -p {kept} && mount --bind /mnt/{kept.relative_to('/tmp')} {kept} && " for kept in _KEPT)
            + f'umount -l /mnt && hostname {self.space} && "$@" && exec sleep infinity'
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
        first = children(self.process.pid)[0]
        return subprocess.Popen(
            ["nsenter", "-t", str(first), "-n", "-p", "-m", "-u", f"--wdns={options.pop('cwd')}", *words],
            env={**_environment(), **options.pop("environment", {})},
            text=True,
            **options,
        )

    def processes(self, words: str) -> list[int]:
        """Find the machine's processes by words of their command lines."""
        assert self.process is not None
        return [pid for pid in descendants(self.process.pid) if words in command(pid)]

    def cut_off(self, cut: bool) -> None:
        """Take the machine off the cluster's bridge, or put it back: packets vanish, nothing is told."""
        outside = f"{_PREFIX}c{self.number}"
        do("ip", "link", "set", outside, *(["nomaster"] if cut else ["master", f"{_PREFIX}c"]))

    def remove(self) -> None:
        if self.process is not None:
            for pid in [*descendants(self.process.pid), self.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
        for kind in "cp":
            subprocess.run(["ip", "link", "del", f"{_PREFIX}{kind}{self.number}"], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", self.space], capture_output=True, check=False)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    return {**kept, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "FAULTS_KEY": "sk-not-a-key"}


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def descendants(pid: int) -> list[int]:
    return [found for child in children(pid) for found in (child, *descendants(child))]


class Cluster:
    """A head without CPUs, two nodes and a provider; a fault may add a third node."""

    head_words: tuple[str, ...] = ("--include-dashboard=false",)
    head_environment: Mapping[str, str] = MappingProxyType({})
    node_environment: Mapping[str, str] = MappingProxyType({})
    url = f"http://{PROVIDER}.100:{PORT}/v1"
    options: tuple[str, ...] = ("--engine", "ray", "--ray-address", f"{CLUSTER}.1:6379", "--workers", "2")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for kind in "cp":
            do("ip", "link", "add", f"{_PREFIX}{kind}", "type", "bridge")
            do("ip", "link", "set", f"{_PREFIX}{kind}", "up")
        self.provider = Machine(100, folder)
        self.head, self.first, self.second = (Machine(number, folder) for number in (1, 2, 3))
        self.third: Machine | None = None

    def start(self) -> None:
        self.provider.start([sys.executable, "-m", "benchmarks.machines", "serve", str(PORT)])
        words = [str(BIN / "ray"), "start", "--head", "--port=6379", "--num-cpus=0", *self.head_words]
        words += [*_COMMON, f"--node-ip-address={self.head.address}"]
        self.head.start(words, **self.head_environment)
        self._wait(lambda: self.head.processes("raylet/raylet"))
        self.add_nodes()

    def add_nodes(self) -> None:
        for machine in (self.first, self.second):
            self.join(machine, **self.node_environment)

    def join(self, machine: Machine, **environment: str) -> None:
        """Start a node, and wait for it."""
        words = [str(BIN / "ray"), "start", f"--address={self.head.address}:6379", "--num-cpus=2"]
        words += [*_COMMON, f"--node-ip-address={machine.address}"]
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
        script = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{PORT}/').read().decode())"
        asked = self.provider.enter([sys.executable, "-c", script], cwd="/", stdout=subprocess.PIPE)
        found: dict[str, Any] = json.loads(asked.communicate()[0])
        return found

    def launch(self, words: list[str], *, machine: Machine | None = None, **options: Any) -> subprocess.Popen[str]:
        return (machine or self.head).enter(words, **options)

    @staticmethod
    def driver(running: subprocess.Popen[str]) -> int:
        """The driver's own process, below `nsenter`."""
        return descendants(running.pid)[0]

    def remove(self) -> None:
        for machine in (self.provider, self.head, self.first, self.second, self.third):
            if machine is not None:
                machine.remove()
        for kind in "cp":
            subprocess.run(["ip", "link", "del", f"{_PREFIX}{kind}"], capture_output=True, check=False)


class AutoscalingCluster(Cluster):
    """A head without CPUs, and an autoscaler with Ray's fake provider, which starts nodes of two CPUs on the head."""

    least, most, idle_seconds = 1, 4, 12

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        configuration = autoscaler_configuration(
            f"{self.head.address}:6379",
            head_cpus=0,
            node_cpus=2,
            least=self.least,
            most=self.most,
            idle_seconds=self.idle_seconds,
        )
        place = folder / "autoscaler.json"
        place.write_text(json.dumps(configuration))
        self.head_words = (*self.head_words, f"--autoscaling-config={place}")
        self.head_environment = AUTOSCALER_SETTINGS
        do("ip", "-n", self.head.space, "route", "add", "default", "dev", "c1")  # else its nodes take 127.0.0.1

    def add_nodes(self) -> None:
        self._wait(lambda: len(self.nodes()) == self.least)
        time.sleep(5)

    def nodes(self) -> list[int]:
        """Find the raylets of the nodes that the autoscaler has started."""
        return [pid for pid in self.head.processes("raylet/raylet") if "--head" not in command(pid).split()]

    def workers(self) -> int:
        return len(self.head.processes("ray::RayWorker"))

    def program(self, source: str, *words: str) -> subprocess.Popen[str]:
        """Start a Python program on the head that is connected to the cluster, and wait for its first line."""
        connected = "import ray, sys, time; ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)\n"
        words = (sys.executable, "-c", connected + source, f"{self.head.address}:6379", *words)
        started = self.head.enter(list(words), cwd="/", stdout=subprocess.PIPE)
        assert started.stdout is not None
        while "ready" not in (line := started.stdout.readline()):
            if not line:
                raise RuntimeError("the program on the head ended")
        return started


def _pod(**more: str) -> Mapping[str, str]:
    """What KubeRay sets in all pods of a cluster."""
    return MappingProxyType(
        {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "RAY_CLUSTER_NAME": "faults", "RAY_PORT": "6379"} | more
    )


class JobCluster(Cluster):
    """A cluster as KubeRay makes one: a dashboard that is reached from elsewhere, and the variables of its pods.

    The machine that submits jobs is no node.
    """

    head_words = ("--include-dashboard=true", "--dashboard-host=0.0.0.0", f"--dashboard-port={DASHBOARD}")
    head_environment = _pod(RAY_ADDRESS="127.0.0.1:6379", RAY_NODE_TYPE_NAME="headgroup")
    node_environment = _pod(RAY_ADDRESS=f"{CLUSTER}.1:6379", RAY_NODE_TYPE_NAME="workers")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.submitter = Machine(5, folder)

    def add_nodes(self) -> None:
        super().add_nodes()
        self.submitter.start(["true"])
        self._wait(lambda: self.submitter.processes("sleep infinity"))

    def sent_files(self) -> dict[str, list[str]]:
        """List what each machine of the cluster has of the suite's folder, by the machine's name."""
        found = {}
        for machine in (self.head, self.first, self.second):
            words = ["sh", "-c", "cd /tmp/ray/session_latest/runtime_resources/working_dir_files/*/ && find . -type f"]
            listing = machine.enter(words, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            found[machine.space] = sorted(line.removeprefix("./") for line in listing.communicate()[0].split())
        return found

    def remove(self) -> None:
        self.submitter.remove()
        super().remove()


# A run with a fault


class Place(Protocol):
    """Where a trial runs, and the provider that it asks."""

    folder: Path
    url: str
    options: tuple[str, ...]
    """What the command line says about workers."""

    def launch(self, words: list[str], **options: Any) -> subprocess.Popen[str]: ...

    def counts(self) -> dict[str, Any]:
        """Ask the provider what it was asked."""


class Trial:
    """A run of so many cases by the command line."""

    def __init__(self, cluster: Place, cases: int, *, target: str | None = None) -> None:
        self.cluster = cluster
        self.cases = cases
        self.place = cluster.folder / "suite"
        self.place.mkdir()
        (self.place / "cases.jsonl").write_text("".join(f'{{"id": "c{n}", "prompt": "{n}"}}\n' for n in range(cases)))
        target = target or (
            f"{{openai-chat: {{model: m, base_url: '{cluster.url}', api_key_env: FAULTS_KEY, stream: false}}}}"
        )
        (self.place / "suite.yaml").write_text(f"id: faults\ntarget: {target}\ncases: cases.jsonl\n")
        self.outputs = self.place / "run" / "outputs.jsonl"

    def start(self, *more: str, **options: Any) -> subprocess.Popen[str]:
        words = [str(BIN / "steelyard"), "run", "suite.yaml", "--out", "run", "-j", str(PARALLELISM), "--no-progress"]
        log = (self.cluster.folder / "driver.log").open("a")
        words += [*self.cluster.options, *more]
        return self.cluster.launch(words, cwd=self.place, stdout=subprocess.PIPE, stderr=log, **options)

    def asked(self) -> int:
        """How often the provider was asked."""
        with contextlib.suppress(ValueError, IndexError, OSError):
            return sum(self.cluster.counts()["asked"].values())
        return 0

    def until(self, count: int, running: subprocess.Popen[str]) -> None:
        while running.poll() is None and self.asked() < count:
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


def end(running: subprocess.Popen[str], seconds: float) -> int | None:
    try:
        running.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        running.kill()
        running.communicate()
        return None
    return running.returncode


def steady(cluster: Place, seconds: float, *more: str) -> tuple[Trial, subprocess.Popen[str]]:
    """A run of about so many seconds that has been answered for a while."""
    trial = Trial(cluster, int(PARALLELISM / LATENCY * seconds))
    running = trial.start(*more)
    trial.until(int(PARALLELISM / LATENCY * FAULT_AT), running)
    return trial, running


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[2]), *sys.argv[3:]))
