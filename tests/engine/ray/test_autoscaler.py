"""Clusters with an autoscaler: what real ones reported, and one that adds nodes on this machine."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from steelyard import EvalCase, Runner
from steelyard.engine.ray.autoscaler import can_grow
from tests.support.engine import make_suite
from tests.support.ray import autoscaled_cluster, patiently

pytestmark = pytest.mark.ray

NODE = "548b21d45b726b593a8d972457218e3b59642e22457cc6152c8a9950"


@pytest.fixture
def head(monkeypatch) -> Any:
    """What the head answers; at first that of a cluster whose monitor has reported nothing."""
    from ray._private import worker
    from ray._private.state import state
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
    from ray.experimental import internal_kv

    made = SimpleNamespace(status=None, state=GetClusterStatusReply(), most=None)
    client = SimpleNamespace(get_cluster_status=lambda: made.state.SerializeToString())
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key: made.status)
    monkeypatch.setattr(worker, "global_worker", SimpleNamespace(gcs_client=client))
    monkeypatch.setattr(state, "get_max_resources_from_cluster_config", lambda: made.most)
    return made


def test_a_cluster_of_which_nothing_is_known_does_not_grow(head) -> None:
    assert not can_grow(2)
    head.status = b"not JSON"
    assert not can_grow(2)


@pytest.mark.parametrize(("kind", "grows"), [(f"node_{NODE}", False), ("ray.head.default", True)])
def test_the_first_autoscaler_reports_node_types_of_its_configuration(head, kind, grows) -> None:
    head.status = json.dumps({"autoscaler_report": {"node_type_mapping": {NODE: kind}}}).encode()
    assert can_grow(2) is grows


@pytest.mark.parametrize(("kind", "grows"), [("", False), ("workers", True)])
def test_the_second_autoscaler_knows_the_types_of_its_nodes(head, kind, grows) -> None:
    head.state.cluster_resource_state.node_states.add(ray_node_type_name=kind)
    assert not can_grow(2)  # a type may be in a node's environment where no autoscaler runs
    head.state.autoscaling_state.autoscaler_state_version = 2
    assert can_grow(2) is grows


def test_the_second_autoscaler_reports_the_nodes_that_it_is_about_to_add(head) -> None:
    head.state.autoscaling_state.pending_instance_requests.add(ray_node_type_name="workers", count=1)
    assert can_grow(0)


@pytest.mark.parametrize(("cpus", "grows"), [(7, True), (8, False)])
def test_a_configuration_that_is_reported_says_how_far(head, cpus, grows) -> None:
    head.most = {"CPU": 8}
    assert can_grow(cpus) is grows


async def whose(_: EvalCase) -> str:
    """Answer with the number of the worker's process."""
    await asyncio.sleep(0.1)
    return str(os.getpid())


@pytest.mark.slow
@patiently
def test_an_autoscaler_adds_the_nodes_that_a_number_of_workers_needs(tmp_path) -> None:
    """A load run begins when all its workers are there: one is on the head, the other two need a node each."""
    import ray

    from steelyard.engine.ray.engine import RayEngine

    with autoscaled_cluster() as address, RayEngine(address, workers=3) as engine:
        runner = Runner(whose, make_suite(10), engine=engine, parallelism=6, progress="off")
        result = runner.run_sync(requests=60, output_path=tmp_path / "run")
        cpus = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    assert result.metrics["counts"]["ok"] == 60
    assert len(Counter(record.response_text for record in result.load_responses())) == 3
    assert cpus == [1, 1, 1]
