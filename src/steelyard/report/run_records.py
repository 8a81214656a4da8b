"""The records of a run as they count, one in memory at a time, with where each one lies in `outputs.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from steelyard.journal.files import OUTPUTS
from steelyard.journal.index import FAILED, PASSED, ROWS, UNSCORED, Rows, winners
from steelyard.journal.reader import RecordReader, index_rows
from steelyard.records import Record, id_digest
from steelyard.stats.scores import verdict

STATES = ("failed", "passed", "unscored", "error")
"""What became of a record, in words; the position is its number in the page's data."""


class RunRecords:
    """A view of a run's records that stays as it was when it was made, whatever is appended meanwhile."""

    def __init__(self, run: Path) -> None:
        self.run = run
        there = (run / OUTPUTS).exists()
        self._rows: Rows = winners(index_rows(run)) if there else np.empty(0, dtype=ROWS)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        """Each record with the byte at which its line begins, in case order."""
        return self._read(self._rows)

    @property
    def counts(self) -> dict[str, int]:
        """How many there are of each state."""
        ok, said = self._rows["ok"] == 1, self._rows["verdict"]
        counted = {"failed": FAILED, "passed": PASSED, "unscored": UNSCORED}
        return {name: int((ok & (said == code)).sum()) for name, code in counted.items()} | {"error": int((~ok).sum())}

    @property
    def trials(self) -> int:
        """How often a case was asked at the most."""
        return int(self._rows["trial"].max()) + 1 if len(self._rows) else 1

    def of_case(self, case_id: str) -> list[tuple[int, Record]]:
        """The records of one case, a trial after another."""
        found = self._read(self._rows[self._rows["id"] == np.uint64(id_digest(case_id))])
        return [(offset, record) for offset, record in found if record.id == case_id]

    def some_ids(self, most: int) -> list[str]:
        """The ids of the first cases, to suggest one from."""
        return list(dict.fromkeys(record.id for _, record in self._read(self._rows[:most])))

    def _read(self, rows: Rows) -> Iterator[tuple[int, Record]]:
        if not len(rows):
            return
        reader = RecordReader(self.run / OUTPUTS)
        try:
            for offset in rows["offset"].tolist():
                yield offset, reader.at(offset)
        finally:
            reader.close()


def state_of(record: Record) -> str:
    """What became of a record: one of STATES."""
    if record.status != "ok":
        return "error"
    said = verdict(record.scores)
    return "unscored" if said is None else "passed" if said else "failed"


def why_failed(record: Record) -> str:
    """The scores that decided against an answer, each with its reason."""
    against = [score for score in record.scores if score.passed is False and not score.overruled and not score.advisory]
    return "; ".join(f"{score.name}: {score.reason or 'failed'}" for score in against)
