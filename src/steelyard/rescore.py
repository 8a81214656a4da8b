"""Scoring again what a run has answered: its records stand in for the target, and nothing is called."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

from steelyard.contracts import Identity, InvocationContext
from steelyard.errors import ConfigurationError, TargetError
from steelyard.journal.files import OUTPUTS
from steelyard.journal.index import winners
from steelyard.journal.manifest import Manifest, read_manifest
from steelyard.journal.reader import RecordReader, index_rows
from steelyard.records import EvalCase, InvocationResponse, id_digest


class StoredAnswers:
    """A target that answers each case with what a run has recorded for it, errors included."""

    default_parallelism = 50

    def __init__(self, run: Path) -> None:
        if not (run / OUTPUTS).exists():
            raise ConfigurationError(f"{run} is not a run directory with answers: it has no {OUTPUTS}")
        self.run = run
        self.manifest: Manifest | None = read_manifest(run)
        rows = winners(index_rows(run))
        rows = rows[rows["id"].argsort(kind="stable")]
        self._ids = rows["id"].copy().data
        self._trials = rows["trial"].copy().data
        self._offsets = rows["offset"].copy().data
        self._reader = RecordReader(run / OUTPUTS)

    @property
    def model_id(self) -> str | None:
        return self.manifest.model_id if self.manifest is not None else None

    @property
    def trials(self) -> int:
        """How often each case was asked."""
        return max(self._trials, default=0) + 1

    def identity(self) -> Identity:
        """Who answered then."""
        return self.manifest.target if self.manifest is not None else {"kind": "stored"}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """The recorded answer, with the times of the call that was made then."""
        digest = id_digest(case.id)
        place = bisect_left(self._ids, digest)
        while place < len(self._ids) and self._ids[place] == digest:
            if self._trials[place] == context.trial:
                return self._reader.at(self._offsets[place]).response
            place += 1
        raise TargetError(f"{self.run} has no answer to case {case.id!r}")

    def close(self) -> None:
        self._reader.close()
