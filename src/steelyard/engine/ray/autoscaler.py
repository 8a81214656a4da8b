"""What a Ray cluster tells about its CPUs: which are free, and whether an autoscaler adds more of them.

Ray has two autoscalers, and neither says so in its public interface. The first writes its status, with the type of each
node, to the head's key-value store. The second reports its state to the head; its nodes know their type, too. Without
either, Ray's monitor reports as well, but its nodes have no type of a configuration.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

log = logging.getLogger("steelyard")


def free_cpus() -> dict[str, float]:
    """Return how many CPUs of each node nobody uses, by the node's id."""
    from ray._private import state

    return {node: free.get("CPU", 0.0) for node, free in state.available_resources_per_node().items()}


def can_grow(cpus: float) -> bool:
    """Whether an autoscaler may add CPUs to a cluster that has this many."""
    signs: tuple[Callable[[], bool], ...] = (
        lambda: _configured_cpus() > cpus,
        _first_autoscaler_runs,
        _second_autoscaler_runs,
    )
    return any(_is_sign(sign) for sign in signs)


def _is_sign(sign: Callable[[], bool]) -> bool:
    try:
        return sign()
    except Exception as error:  # noqa: BLE001 - tables of Ray's own, not the same in every version
        log.debug("whether the cluster can grow is not known: %s", error)
        return False


def _configured_cpus() -> float:
    """Return what a cluster's configuration allows; few clusters report it."""
    from ray._private.state import state

    return float((state.get_max_resources_from_cluster_config() or {}).get("CPU", 0))


def _first_autoscaler_runs() -> bool:
    from ray.experimental.internal_kv import _internal_kv_get

    status = json.loads(_internal_kv_get(b"__autoscaling_status") or b"{}")
    types = (status.get("autoscaler_report") or {}).get("node_type_mapping") or {}
    return any(kind != f"node_{node}" for node, kind in types.items())


def _second_autoscaler_runs() -> bool:
    from ray._private.worker import global_worker
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

    status = GetClusterStatusReply.FromString(global_worker.gcs_client.get_cluster_status())
    if not status.HasField("autoscaling_state"):
        return False
    state = status.autoscaling_state
    return bool(state.pending_instance_requests or state.pending_instances) or any(
        node.ray_node_type_name for node in status.cluster_resource_state.node_states
    )
