"""A run that is killed at any moment, any number of times, ends as one that was left alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from steelyard import Result
from tests.support.crash import CASES, finished_ids, play, readable_lines, runner_in, without_clocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100)]

Told = list[dict[str, Any]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The metrics of the same run, left alone."""
    directory = tmp_path_factory.mktemp("undisturbed")
    runner_in(directory / "run", directory / "calls").run_sync()
    return without_clocks(Result.load(directory / "run").metrics)


def job_in(directory: Path, launches: list[dict[str, Any]]) -> dict[str, Any]:
    """A job in a directory of its own, whose last launch is left to finish."""
    directory.mkdir()
    return {"directory": str(directory / "run"), "log": str(directory / "calls"), "launches": [*launches, {}]}


def check_run(directory: Path, told: Told, undisturbed: dict[str, Any]) -> None:
    """The promises, of one run and all its launches."""
    for launch in told:
        assert launch["killed"] or launch["exit"] == 0
        called, finished = launch["called"], set(launch["finished_before"])
        assert len(called) == len(set(called)), "a case was asked twice in one launch"
        assert finished.isdisjoint(called), "a case that had finished was asked again"
    result = Result.load(directory)
    metrics, counts = result.metrics, result.metrics["counts"]
    assert result.complete
    assert counts["planned"] == CASES == counts["ok"] + counts["error"] + counts["cancelled"] + counts["not_started"]
    assert without_clocks(metrics) == undisturbed
    records = result.load_responses()
    assert [record.id for record in records] == [f"case-{i:03}" for i in range(CASES)]
    assert [record.status for record in records].count("ok") == counts["ok"]
    finished = finished_ids(directory)
    assert len(finished) == len(set(finished)) == counts["ok"], "one ok record a case"
    assert list(directory.glob("*.tmp")) == [], "what a killed launch left half written is cleared away"


def test_a_run_killed_at_random_moments_ends_as_if_it_had_been_left_alone(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """Each of 56 runs is killed one to three times, at moments spread over its whole length, then resumed."""
    rng = random.Random(20240229)
    whole = play([job_in(tmp_path / "timed", [])])[0][0]["seconds"]
    jobs = [
        job_in(
            tmp_path / f"{number}",
            [
                {"seconds": rng.uniform(0.02, 0.8) * whole, "parallelism": rng.randint(8, 20)}
                for _ in range(rng.randint(1, 3))
            ],
        )
        for number in range(56)
    ]
    told = play(jobs)
    for job, launches in zip(jobs, told, strict=True):
        check_run(Path(job["directory"]), launches, undisturbed)
    kills = [launch for launches in told for launch in launches if launch["killed"]]
    amid = [launch for launch in kills if 0 < launch["lines"] < CASES]
    assert len(kills) >= 40
    assert len(amid) >= 15, "the kills must fall into the run, not all before or after it"


WORKING = [
    *((point, nth) for point in ("before append", "in the middle of a line") for nth in (1, 2, 150, CASES)),
    *(("after append, before commit", nth) for nth in (1, 37, CASES)),
    *(("before a commit's sync", nth) for nth in (1, 2)),
    *(("after a commit's sync, before its index rows", nth) for nth in (1, 2)),
    ("in the middle of an index row", 1),
    ("before metrics are composed", 1),
    ("before metrics.json is renamed", 1),
    ("after metrics.json is renamed", 1),
    ("after the lock is taken", 1),
    ("before the index is renamed", 1),
    ("between the index and the writer", 1),
    ("between the writer and the manifest", 1),
    ("before the manifest is renamed", 1),
    ("after the manifest", 1),
]
RECOVERING = [
    ("after the lock is taken", 1),
    ("after the torn line is cut, before the sync", 1),
    ("after the torn line is repaired", 1),
    ("in the middle of the replay", 60),
    ("before the index is renamed", 1),
    ("between the index and the writer", 1),
    ("between the writer and the manifest", 1),
    ("before the manifest is renamed", 1),
    ("after the manifest", 1),
    ("before append", 1),
    ("in the middle of a line", 5),
]
FIRST_HALF = {"point": "in the middle of a line", "nth": 120}


def play_points(
    tmp_path: Path, launches: list[list[dict[str, Any]]], undisturbed: dict[str, Any], *, kills: int
) -> list[Told]:
    """Play one job for each list of launches; every run must end well after exactly so many kills."""
    jobs = [job_in(tmp_path / f"{number}", one) for number, one in enumerate(launches)]
    played = play(jobs)
    for job, told in zip(jobs, played, strict=True):
        assert sum(launch["killed"] for launch in told) == kills, f"the moment never came: {job['launches']}"
        check_run(Path(job["directory"]), told, undisturbed)
    return played


def test_a_first_sitting_killed_at_any_named_point_is_resumed(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    launches = [[{"point": point, "nth": nth}] for point, nth in WORKING]
    play_points(tmp_path, launches, undisturbed, kills=1)


def test_a_recovery_killed_at_any_named_point_is_recovered_from(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """Killed while it worked, then twice at the same point of the recovery."""
    launches = [[FIRST_HALF, *[{"point": point, "nth": nth}] * 2] for point, nth in RECOVERING]
    # Once a torn line is cut off, the second recovery has none to cut: it is killed elsewhere.
    launches = [
        [*one[:-1], {"point": "after the manifest"}] if "torn line is cut" in one[-1]["point"] else one
        for one in launches
    ]
    play_points(tmp_path, launches, undisturbed, kills=3)


def test_a_cancelled_run_killed_while_it_writes_its_partial_or_final_figures_is_resumed(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    cancelled = {"cancel_after": 100}
    launches = [
        [{**cancelled, "point": "before partial.json is renamed"}],
        [{**cancelled, "point": "after partial.json is renamed"}],
        [cancelled, {"point": "before metrics.json is renamed"}],
        [cancelled, {"point": "after metrics.json is renamed"}],
        [cancelled, {"point": "between metrics.json and the end of partial.json"}],
    ]
    play_points(tmp_path, launches, undisturbed, kills=1)


@pytest.mark.parametrize("entry", [{}, {"force": True}], ids=["resumed", "forced again"])
def test_a_start_over_killed_at_any_move_loses_nothing(
    tmp_path: Path, undisturbed: dict[str, Any], entry: dict[str, bool]
) -> None:
    """metrics.json goes first, so what is left never looks complete; every old file is still there afterwards."""
    moves = [*(("after a move", nth) for nth in range(1, 5)), *(("before a move", nth) for nth in range(2, 5))]
    launches = [[{}, {"entry": {"force": True}, "point": point, "nth": nth}, {"entry": entry}] for point, nth in moves]
    jobs = [job_in(tmp_path / f"{number}", one) for number, one in enumerate(launches)]
    for job, told in zip(jobs, play(jobs), strict=True):
        directory = Path(job["directory"])
        assert [launch["killed"] for launch in told] == [False, True, False]
        told[2]["finished_before"] = [] if entry else told[2]["finished_before"]
        check_run(directory, told, undisturbed)
        kept = {path.name for path in directory.glob("previous/*/*")} | {path.name for path in directory.iterdir()}
        assert kept >= {"metrics.json", "outputs.jsonl", "outputs.idx", "run.json"}
        journals = list(directory.rglob("outputs.jsonl"))
        assert any(len(readable_lines(path.parent)) >= CASES for path in journals)


def test_a_salvage_killed_at_any_named_point_is_done_again(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """Only the case whose line was unreadable, those in flight and those never begun are asked again."""
    salvage = {"salvage": True}
    points = [
        ("in the middle of a salvage", 50),
        ("before a salvage is renamed", 1),
        ("after a salvage is renamed", 1),
        ("between the index and the writer", 1),
    ]
    launches = [
        [
            FIRST_HALF,
            {"damage": {"kind": "nul", "line": 30}, "entry": salvage, "point": point, "nth": nth},
            {"entry": salvage},
        ]
        for point, nth in points
    ]
    for number, told in enumerate(play_points(tmp_path, launches, undisturbed, kills=2)):
        damaged = (tmp_path / f"{number}" / "run" / "damaged.jsonl").read_bytes()
        assert damaged.strip(b"\0\n") == b""
        assert damaged
        assert told[2]["lines"] >= 119
