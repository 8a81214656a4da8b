"""How many workers a cluster gets, and where they go; the cluster is a table of nodes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from steelyard.errors import ConfigurationError

pytestmark = pytest.mark.ray

A, B = "a" * 56, "b" * 56


def node(name: str, cpus: float, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": cpus} if cpus else {}}


@pytest.fixture
def pool(monkeypatch) -> Any:
    """A pool without a cluster; `nodes` is what Ray would report."""
    import ray

    from steelyard.engine.ray import engine as engine_module

    made: Any = object.__new__(engine_module.RayWorkerPool)
    made._workers, made._infos, made._left_out, made._actors, made.size = None, {}, {}, {}, 1
    made._lock, made._strict = threading.Lock(), False
    made.nodes = [node("head", 0), node(A, 2), node(B, 4), node("gone", 8, alive=False)]
    monkeypatch.setattr(ray, "nodes", lambda: made.nodes)
    monkeypatch.setattr(engine_module, "_can_grow", lambda cpus: made.can_grow)
    made.can_grow = False
    return made


@pytest.mark.parametrize(
    ("workers", "can_grow", "expected"),
    [
        (None, False, (6, 1.0)),
        (3, False, (3, 1.0)),
        (12, False, (12, 0.5)),  # they share what there is
        (12, True, (12, 1.0)),  # those that find no place make the cluster grow
    ],
)
def test_each_worker_asks_for_a_cpu_or_for_its_part_of_those_there_are(pool, workers, can_grow, expected) -> None:
    pool._workers, pool.can_grow = workers, can_grow
    pool._count_cpus()
    assert (pool.size, pool._cpus_each) == expected


def test_a_cluster_without_cpus_is_asked_for_one(pool) -> None:
    pool.nodes = [node("head", 0)]
    pool._count_cpus()
    assert (pool.size, pool._cpus_each) == (1, 1.0)


def test_nodes_that_join_are_counted_and_workers_stay_when_nodes_leave(pool) -> None:
    pool._count_cpus()
    pool._infos[0] = object()
    pool.nodes.append(node("new", 4))
    pool._count_cpus()
    assert pool.size == 10
    pool.nodes.pop()
    pool._count_cpus()
    assert pool.size == 10


def test_a_node_that_is_left_out_gets_no_worker(pool) -> None:
    pool._left_out[B] = "another version"
    pool._count_cpus()
    assert pool.size == 2
    assert {pool._other_node(number).node_id for number in range(4)} == {A}
    pool._left_out[A] = "another version, too"
    with pytest.raises(ConfigurationError, match="another version; another version, too"):
        pool._other_node(0)


def test_workers_that_are_left_are_numbered_again(pool) -> None:
    pool._actors = {number: f"actor {number}" for number in range(6)}
    pool._infos = {1: "info 1", 4: "info 4"}
    del pool._actors[0], pool._actors[2]
    pool._left_out[B] = "another version"
    pool._renumber()
    assert pool._infos == {0: "info 1", 1: "info 4"}
    assert pool._actors[0] == "actor 1"
    assert pool._actors[1] == "actor 4"
