"""How many workers a cluster gets, and where they go; the cluster is a table of nodes."""

from __future__ import annotations

import platform
import threading
from typing import Any

import msgspec
import pytest

from steelyard._version import __version__
from steelyard.engine.workers.messages import WorkerInfo
from steelyard.errors import ConfigurationError

pytestmark = pytest.mark.ray

A, B = "a" * 56, "b" * 56


def node(name: str, cpus: float, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": cpus} if cpus else {}}


@pytest.fixture
def pool(monkeypatch) -> Any:
    """A pool without a cluster; `nodes` and `free` are what Ray would report."""
    import ray

    from steelyard.engine.ray import engine as engine_module

    made: Any = object.__new__(engine_module.RayWorkerPool)
    made._workers, made._infos, made._left_out, made._actors, made.size = None, {}, {}, {}, 1
    made._lock, made._strict = threading.Lock(), False
    made.nodes = [node("head", 0), node(A, 2), node(B, 4), node("gone", 8, alive=False)]
    monkeypatch.setattr(ray, "nodes", lambda: made.nodes)
    made.free = {A: 2.0, B: 4.0}
    monkeypatch.setattr(engine_module, "can_grow", lambda cpus: made.can_grow)
    monkeypatch.setattr(engine_module, "free_cpus", lambda: made.free)
    made.can_grow = made._can_grow = False
    made._cpus_each = 1.0
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
    pool._infos = dict.fromkeys(range(6), object())
    pool.nodes.append(node("new", 4))
    pool.free = {A: 0.0, B: 0.0, "new": 4.0}
    pool._count_cpus()
    assert pool.size == 10
    pool.nodes.pop()
    pool._count_cpus()
    assert pool.size == 10


def test_cpus_that_something_else_uses_are_not_counted(pool) -> None:
    """A worker that waits for one would make an autoscaler add a node, and its CPUs would be counted next."""
    pool.free = {A: 1.0, B: 2.5}
    pool._count_cpus()
    assert pool.size == 3
    pool._infos, pool.free = dict.fromkeys(range(3), object()), {A: 0.0, B: 0.5}
    pool._count_cpus()
    assert pool.size == 3
    pool.free = {A: 1.0, B: 0.5}
    pool._count_cpus()
    assert pool.size == 4


def test_a_cluster_that_can_grow_has_more_time_for_its_first_worker(pool) -> None:
    pool._count_cpus()
    fixed = pool.start_seconds
    pool.can_grow = True
    pool._count_cpus()
    assert pool.start_seconds > fixed


class Introduced:
    """An actor, whose introduction ends as told."""

    def __init__(self, ending: Any) -> None:
        self.ending = ending
        self.introduce = self

    def remote(self) -> Introduced:
        return self


@pytest.fixture
def starting(pool, monkeypatch) -> Any:
    """A pool whose next actors end as `endings` say."""
    import ray

    def get(call: Introduced) -> Any:
        if isinstance(call.ending, Exception):
            raise call.ending
        return msgspec.to_builtins(call.ending)

    def actor(number: int) -> Introduced:
        pool._actors.setdefault(number, Introduced(pool.endings.pop(0)))
        return pool._actors[number]

    monkeypatch.setattr(ray, "wait", lambda calls, timeout: (calls[:1], calls[1:]))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(pool, "_actor", actor, raising=False)
    monkeypatch.setattr(pool, "_kill", lambda actors: None, raising=False)
    pool._workers, pool.size, pool._nodes, pool._lost = 2, 2, 2, {}
    pool._closed = threading.Event()
    return pool


def ready() -> WorkerInfo:
    return WorkerInfo("n", 1, platform.python_version(), __version__)


def test_a_worker_whose_node_is_lost_while_it_starts_is_started_again(starting) -> None:
    import ray

    starting.endings = [ray.exceptions.ActorDiedError(), ready(), ready()]
    starting.start()
    assert set(starting._infos) == {0, 1}
    assert not starting._left_out


def test_workers_that_die_again_and_again_while_they_start_are_an_error(starting) -> None:
    import ray

    starting.endings = [ray.exceptions.ActorDiedError() for _ in range(8)]
    with pytest.raises(ConfigurationError, match="no worker could be started"):
        starting.start()


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
