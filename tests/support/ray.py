"""Ray clusters of the tests' own: small, on this machine, gone when they are."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.engine import wait_for

patiently = pytest.mark.timeout(300)
"""Starting a cluster is a dozen processes: with another beside it on a busy machine that alone may take a minute."""

_SMALL = {"object_store_memory": 80_000_000}
_AUTOSCALED_HEAD = "f" * 51 + "00000"
AUTOSCALER_SETTINGS = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": _AUTOSCALED_HEAD,
    "RAY_NODE_TYPE_NAME": "ray.head.default",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _AUTOSCALED_HEAD,
}
"""The environment of a head whose autoscaler uses Ray's fake provider."""
_QUIET = {"log_to_driver": False, "configure_logging": False}


@contextlib.contextmanager
def local_cluster(cpus: int) -> Iterator[None]:
    """This process as the driver of a cluster of one node."""
    with clean_place() as place:
        import ray

        ray.init(
            "local",
            num_cpus=cpus,
            include_dashboard=False,
            _temp_dir=place,
            _node_ip_address="127.0.0.1",
            **_SMALL,
            **_QUIET,
        )
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def cluster_of_nodes(count: int) -> Iterator[Any]:
    """... and of several nodes, with CPUs for all workers of a test; its `others` are those that can be removed."""
    with clean_place() as place:
        import ray
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 4, "include_dashboard": False, "temp_dir": place, **_SMALL}
        # Wherever its own files are, a Cluster writes its address to Ray's default folder, which it does not make.
        os.makedirs(os.path.join(tempfile.gettempdir(), "ray"), exist_ok=True)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            ray.init(cluster.address, **_QUIET)
            cluster.add_one = functools.partial(cluster.add_node, num_cpus=4, **_SMALL)
            cluster.others = [cluster.add_one() for _ in range(count - 1)]
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextlib.contextmanager
def clean_place() -> Iterator[str]:
    """A folder for a cluster, and everything that Ray changes in this process put back.

    The folder lies directly below the system's own: the paths of Ray's sockets must be short.
    """
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    handler = signal.getsignal(signal.SIGTERM)
    place = tempfile.mkdtemp(prefix="sy-ray-")
    try:
        yield place
    finally:
        signal.signal(signal.SIGTERM, handler)
        shutil.rmtree(place, ignore_errors=True)


def autoscaler_configuration(
    address: str, *, head_cpus: int, node_cpus: int, least: int, most: int, idle_seconds: float = 300
) -> dict[str, Any]:
    """What makes a real autoscaler start nodes on the head's machine, by the provider that Ray has for tests."""
    unused = (
        "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
        "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter",
    )  # fmt: skip
    nodes = {"resources": {"CPU": node_cpus, **_SMALL}, "node_config": {}, "min_workers": least, "max_workers": most}
    return {
        "cluster_name": "fake",
        "max_workers": most,
        "provider": {
            "type": "external",  # the fake provider's own type needs a file that Ray's wheels do not have
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "launch_multiple": True,
            "head_node_id": _AUTOSCALED_HEAD,
            "gcs_address": address,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": head_cpus}, "node_config": {}, "max_workers": 0},
            "node": nodes,
        },
        "head_node_type": "ray.head.default",
        "idle_timeout_minutes": idle_seconds / 60,
        "auth": {"ssh_user": "nobody"},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in unused},
    }


@contextlib.contextmanager
def autoscaled_cluster() -> Iterator[str]:
    """The address of a cluster with one CPU, to which a real autoscaler adds up to three nodes of one CPU."""
    with clean_place() as place, socket.socket() as taken:
        from ray.util import get_node_ip_address

        taken.bind(("127.0.0.1", 0))
        address = f"{get_node_ip_address()}:{taken.getsockname()[1]}"
        taken.close()
        configuration = autoscaler_configuration(address, head_cpus=1, node_cpus=1, least=0, most=3)
        (Path(place) / "autoscaler.json").write_text(json.dumps(configuration))
        words = ["start", "--head", f"--port={address.rpartition(':')[2]}", "--num-cpus=1", f"--temp-dir={place}"]
        words += ["--include-dashboard=false", f"--autoscaling-config={place}/autoscaler.json"]
        words += [f"--object-store-memory={_SMALL['object_store_memory']}"]
        started = subprocess.run(
            [str(Path(sys.executable).parent / "ray"), *words],
            env={**os.environ, **AUTOSCALER_SETTINGS},
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            if started.returncode:
                pytest.skip(f"Ray's fake provider cannot be used: {started.stderr.strip()[-200:]}")
            wait_for(lambda: _autoscaler_has_reported(address), seconds=60)
            yield address
        finally:
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if any(mark in word for word in process.cmdline() for mark in (place, address)):
                        process.kill()


def _autoscaler_has_reported(address: str) -> bool:
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

    status = GetClusterStatusReply.FromString(GcsClient(address=address).get_cluster_status())
    return bool(status.HasField("autoscaling_state"))
