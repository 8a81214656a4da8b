"""Ray clusters of the tests' own: small, on this machine, gone when they are."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

patiently = pytest.mark.timeout(300)
"""Starting a cluster is a dozen processes: with another beside it on a busy machine that alone may take a minute."""

_SMALL = {"object_store_memory": 80_000_000}
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
