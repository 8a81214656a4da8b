"""Faults of a real Ray cluster, one after the other, with the calls counted by the server that answers them.

    python -m benchmarks.ray_faults                       # all of them, some 30 minutes; needs root on Linux
    python -m benchmarks.ray_faults partition_30 head_lost

Each fault has a fresh cluster: a head without CPUs, on which the driver runs, and two nodes with a worker each. Every
machine is a network, process and mount namespace, so that Ray takes them for machines; two bridges join them, one for
the cluster and one to the provider. A partition cuts a node off from the cluster and not from the provider: what its
worker has begun is answered and counted. All that is made here is removed at the end, also after Ctrl-C.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import steelyard
from benchmarks.machines import (
    BIN,
    DASHBOARD,
    AutoscalingCluster,
    Cluster,
    JobCluster,
    Machine,
    Trial,
    children,
    do,
    end,
    steady,
)


def worker_killed(cluster: Cluster) -> dict[str, Any]:
    trial, running = steady(cluster, 25)
    os.kill(cluster.first.processes("ray::RayWorker")[0], signal.SIGKILL)
    return trial.report("worker_killed", end(running, 120))


def node_lost(cluster: Cluster) -> dict[str, Any]:
    trial, running = steady(cluster, 30)
    cluster.first.remove()
    return trial.report("node_lost", end(running, 180))


def _partition(cluster: Cluster, seconds: float) -> dict[str, Any]:
    trial, running = steady(cluster, seconds + 25)
    cluster.first.cut_off(True)
    time.sleep(seconds)
    cluster.first.cut_off(False)
    return trial.report(f"partition_{seconds:.0f}", end(running, 240))


def partition_8(cluster: Cluster) -> dict[str, Any]:
    return _partition(cluster, 8)


def partition_30(cluster: Cluster) -> dict[str, Any]:
    return _partition(cluster, 30)


def partition_75(cluster: Cluster) -> dict[str, Any]:
    return _partition(cluster, 75)


def head_frozen(cluster: Cluster) -> dict[str, Any]:
    """The head is stopped for 21 seconds, and a worker is killed meanwhile: the other goes on."""
    trial, running = steady(cluster, 50)
    (head,) = cluster.head.processes("gcs/gcs_server")
    os.kill(head, signal.SIGSTOP)
    time.sleep(2)
    os.kill(cluster.first.processes("ray::RayWorker")[0], signal.SIGKILL)
    time.sleep(3)
    before = trial.asked()
    time.sleep(10)
    rate = (trial.asked() - before) / 10
    time.sleep(6)
    os.kill(head, signal.SIGCONT)
    return {**trial.report("head_frozen", end(running, 180)), "calls/s while frozen": rate}


def head_lost(cluster: Cluster) -> dict[str, Any]:
    trial, running = steady(cluster, 120)
    (head,) = cluster.head.processes("gcs/gcs_server")
    os.kill(head, signal.SIGKILL)
    began = time.monotonic()
    code = end(running, 120)
    return {**trial.report("head_lost", code), "seconds to the end": round(time.monotonic() - began)}


def driver_killed(cluster: Cluster) -> dict[str, Any]:
    trial, running = steady(cluster, 20)
    os.kill(cluster.driver(running), signal.SIGKILL)
    end(running, 30)
    time.sleep(5)
    journalled = {line["id"] for line in trial.lines()}
    before = cluster.counts()["asked"]
    code = end(trial.start(), 120)
    after = cluster.counts()["asked"]
    again = sum(after[case[1:]] - before.get(case[1:], 0) for case in journalled)
    return {**trial.report("driver_killed", code), "journalled and asked again": again}


def disk_full(cluster: Cluster) -> dict[str, Any]:
    """The run directory is on a disk of 300 KB, which is then made larger."""
    trial = Trial(cluster, 800)
    small = cluster.folder / "suite" / "run"
    small.mkdir()
    assert cluster.head.process is not None
    first = children(cluster.head.process.pid)[0]
    inside = ["nsenter", "-t", str(first), "-m"]
    do(*inside, "mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small))
    full = end(trial.start(), 120)
    do(*inside, "mount", "-o", "remount,size=50m", str(small))
    code = end(trial.start(), 120)
    do(*inside, "cp", str(small / "outputs.jsonl"), str(cluster.folder / "copied.jsonl"))
    trial.outputs = cluster.folder / "copied.jsonl"
    return {**trial.report("disk_full", code), "exit when full": full}


def driver_starved(cluster: Cluster) -> dict[str, Any]:
    """A load run whose driver runs 40 ms of each 500."""
    trial, running = steady(cluster, 1, "--requests", "1000")
    driver = cluster.driver(running)
    until = time.monotonic() + 150
    while running.poll() is None and time.monotonic() < until:
        with contextlib.suppress(ProcessLookupError):
            os.kill(driver, signal.SIGSTOP)
            time.sleep(0.46)
            os.kill(driver, signal.SIGCONT)
            os.kill(running.pid, signal.SIGCONT)  # nsenter stops with what it runs
            time.sleep(0.04)
    report = trial.report("driver_starved", end(running, 10))
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
    strict = end(trial.start("--workers", "6", "--strict-workers"), 90)
    asked = trial.asked()
    report = trial.report("mismatched_node", end(trial.start("--workers", "6"), 120))
    return {**report, "exit with --strict-workers": strict, "asked by it": asked}


def not_a_node(cluster: Cluster) -> dict[str, Any]:
    """The driver is on a machine that reaches the head and is no node."""
    trial = Trial(cluster, 10)
    return trial.report("not_a_node", end(trial.start(machine=cluster.provider), 60))


def autoscaler_grows(cluster: AutoscalingCluster) -> dict[str, Any]:
    """Six workers on a cluster with two CPUs: it grows by two nodes, and one of those is lost and replaced."""
    before = len(cluster.nodes())
    trial, running = _long_run(cluster, "6")
    most = _until(running, cluster.workers, 6)
    grown = len(cluster.nodes())
    os.kill(cluster.nodes()[-1], signal.SIGKILL)
    lost = _until(running, lambda: -cluster.workers(), -5)
    again = _until(running, cluster.workers, 6)
    report = trial.report("autoscaler_grows", end(running, 240))
    return {
        **report,
        "nodes before and after": [before, grown],
        "workers before, during and after the loss": [most, -lost, again],
        "nodes when idle": _until(None, lambda: -len(cluster.nodes()), -cluster.least) * -1,
    }


def autoscaler_followed(cluster: AutoscalingCluster) -> dict[str, Any]:
    """One worker for each free CPU, on a cluster where another program has one: it grows only when others make it."""
    held = "@ray.remote(num_cpus=1)\nclass Held:\n  def ready(self): return 'ready'\n"
    other = cluster.program(
        held + "held = Held.remote(); print(ray.get(held.ready.remote()), flush=True); time.sleep(600)"
    )
    trial, running = _long_run(cluster, "auto")
    most = _until(running, cluster.workers, 3, seconds=20)
    nodes = len(cluster.nodes())
    asking = "from ray.autoscaler.sdk import request_resources\n"
    asked = cluster.program(asking + "request_resources(num_cpus=6); print('ready', flush=True); time.sleep(600)")
    followed = _until(running, cluster.workers, 5)
    report = trial.report("autoscaler_followed", end(running, 240))
    for program in (other, asked):
        program.kill()
    return {**report, "workers, nodes": [most, nodes], "workers when others made it grow": followed}


def _long_run(cluster: AutoscalingCluster, workers: str) -> tuple[Trial, subprocess.Popen[str]]:
    return steady(cluster, 80, "--workers", workers)


def _until(running: subprocess.Popen[str] | None, count: Callable[[], int], wanted: int, *, seconds: float = 60) -> int:
    """Wait until so many are counted, at most so long and while the run goes on; the most that were."""
    most, stop = count(), time.monotonic() + seconds
    while most < wanted and time.monotonic() < stop and (running is None or running.poll() is None):
        time.sleep(0.5)
        most = max(most, count())
    return most


_SECRET = "sk-of-the-job"
_SENT_ALONG = {"words.txt": "hello", ".env": "A=1", "server.pem": "x", "data/big.bin": "x" * 1000}


def job_submitted(cluster: JobCluster) -> dict[str, Any]:
    """A job from a machine that is no node, over the dashboard, as KubeRay's submitter does it."""
    trial = _job_trial(cluster)
    (trial.place / ".rayignore").write_text("data/\n.env\n*.pem\n")
    environment = json.dumps({"env_vars": {"FAULTS_KEY": _SECRET}})
    words = [str(BIN / "ray"), "job", "submit", "--address", f"http://{cluster.head.address}:{DASHBOARD}"]
    words += ["--submission-id", "rayjob-faults", "--working-dir", ".", "--runtime-env-json", environment, "--"]
    words += [str(BIN / "steelyard"), "run", "suite.yaml", "--out", str(trial.outputs.parent), "-j", "40"]
    words += ["--no-progress", "--engine", "ray", "--workers", "2"]
    log = (cluster.folder / "driver.log").open("a")
    running = cluster.submitter.enter(words, cwd=trial.place, stdout=log, stderr=log)
    trial.until(100, running)
    machines = (cluster.head, cluster.first, cluster.second, cluster.submitter)
    drivers = [machine.space for machine in machines if machine.processes("bin/steelyard run")]
    return {**_job_report(trial, running, cluster, "job_submitted"), "driver on": drivers}


def job_on_the_head(cluster: JobCluster) -> dict[str, Any]:
    """The driver is in the head's pod, with KubeRay's RAY_ADDRESS; nothing says what must not be sent."""
    trial = _job_trial(cluster)
    words = [str(BIN / "steelyard"), "run", "suite.yaml", "--out", "run", "-j", "40", "--no-progress"]
    words += ["--engine", "ray", "--workers", "2"]
    log = (cluster.folder / "driver.log").open("a")
    pod = {**cluster.head_environment, "RAY_JOB_SUBMISSION_ID": "rayjob-faults"}
    running = cluster.head.enter(words, cwd=trial.place, environment=pod, stdout=log, stderr=log)
    return _job_report(trial, running, cluster, "job_on_the_head")


def _job_trial(cluster: JobCluster) -> Trial:
    trial = Trial(cluster, 400)
    for name, content in _SENT_ALONG.items():
        (trial.place / name).parent.mkdir(exist_ok=True)
        (trial.place / name).write_text(content)
    return trial


def _job_report(trial: Trial, running: subprocess.Popen[str], cluster: JobCluster, name: str) -> dict[str, Any]:
    trial.until(100, running)
    workers = [len(machine.processes("ray::RayWorker")) for machine in (cluster.first, cluster.second)]
    sent = cluster.sent_files()
    report = trial.report(name, end(running, 180))
    kept = {space: [file for file in files if file in _SENT_ALONG] for space, files in sent.items()}
    keys = cluster.counts()["keys"]
    return {**report, "workers": workers, "of the folder": kept, "keys": keys}


FAULTS: dict[Callable[[Any], dict[str, Any]], type[Cluster]] = {
    **dict.fromkeys(
        (
            not_a_node, worker_killed, partition_8, partition_30, partition_75, node_lost, head_frozen, head_lost,
            driver_killed, disk_full, driver_starved, mismatched_node,
        ),
        Cluster,
    ),
    autoscaler_grows: AutoscalingCluster,
    autoscaler_followed: AutoscalingCluster,
    job_submitted: JobCluster,
    job_on_the_head: JobCluster,
}  # fmt: skip


@contextlib.contextmanager
def _cluster(kind: type[Cluster]) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/var/tmp") as folder:
        cluster = kind(Path(folder))
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
        with _cluster(FAULTS[known[name]]) as cluster:
            try:
                report = known[name](cluster)
            except Exception as error:  # noqa: BLE001 - the next one has another cluster
                log = cluster.folder / "driver.log"
                report = {"fault": name, "failed": repr(error), "messages": log.read_text() if log.exists() else ""}
        print(json.dumps({**report, "took": round(time.monotonic() - began)}, indent=1), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
