"""A run whose judge is too lenient, what people would say of its answers, and people who say it."""

from __future__ import annotations

import csv
from pathlib import Path

from steelyard.report.labels import LabelItem, LabelSession
from tests.support.judged import Agent, Assessor, run, suite_of

CASES = 160


def right(case_id: str) -> bool:
    """What people would say: all that the scorer passed, and a third of what it failed."""
    number = int(case_id[1:])
    return number % 2 == 0 or number % 3 == 0


def audited_run(folder: Path) -> Path:
    """Half is passed by the scorer; of the other half the judge passes everything but each fifth."""
    agent = Agent(lambda case, context: "yes" if int(case.id[1:]) % 2 == 0 else "=maybe")
    lenient = Assessor(lambda case_id, *_: 0.0 if int(case_id[1:]) % 5 == 0 else 1.0)
    scorers = ["exact", lenient.judge(when="failed")]
    run(agent, suite_of(CASES, expected="yes"), scorers, output_path=folder / "RUN")
    return folder / "RUN"


def label_all(session: LabelSession, most: int | None = None) -> list[LabelItem]:
    """Label what is left of the sample, or this many of it, as people would; what was seen."""
    seen = []
    while (most is None or len(seen) < most) and (item := session.current) is not None:
        session.label((item.id, item.trial), len(session.grades) - 1 if right(item.id) else 0)
        seen.append(item)
    return seen


def write_labels(path: Path, ids: list[str]) -> Path:
    """Labels as somebody would write them by hand."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "label"])
        rows.writerows([case_id, "pass" if right(case_id) else "fail"] for case_id in ids)
    return path
