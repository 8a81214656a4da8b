"""Scoring again what a run has answered: its records stand in for the target, and nothing is called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from steelyard.disk import open_regular
from steelyard.errors import ConfigurationError, TargetError
from steelyard.journal.files import OUTPUTS
from steelyard.journal.manifest import Manifest, read_manifest
from steelyard.journal.reader import bad_line, check_line, counted_rows
from steelyard.protocols import Identity, InvocationContext
from steelyard.records import EvalCase, InvocationResponse, id_digest

# A record has the response's fields flat, so that its line can be read as one; all else in it is skipped.
_decode_response = msgspec.json.Decoder(InvocationResponse).decode

_WINDOW = 1 << 18
"""Bytes read at once: records stand in the order in which they were finished, near that of the suite."""


class StoredAnswers:
    """A target that answers each case with what a run has recorded for it, errors included."""

    default_parallelism = 50

    def __init__(self, run: Path) -> None:
        if not (run / OUTPUTS).exists():
            raise ConfigurationError(
                f"{run} is not a run directory with answers: it has no {OUTPUTS}", topic="not-a-run"
            )
        self.run = run
        self.manifest: Manifest | None = read_manifest(run)
        rows = counted_rows(run)
        self._ids, self._trials = rows["id"].copy(), rows["trial"].copy().data
        self._offsets, self._lengths = rows["offset"].copy().data, rows["length"].copy().data
        self._digests = self._ids.data
        self._by_id = np.argsort(self._ids, kind="stable")
        self._next = 0
        self._descriptor = open_regular(run / OUTPUTS)
        self._window, self._begins = b"", 0

    @property
    def model_id(self) -> str | None:
        return self.manifest.model_id if self.manifest is not None else None

    @property
    def trials(self) -> int:
        """How often each case was asked."""
        return max(self._trials, default=0) + 1

    @property
    def selection(self) -> dict[str, Any]:
        """Which cases of the suite were asked, as options of a run: there is no answer to the others."""
        given = {} if self.manifest is None else self.manifest.options
        chosen = {
            name: given[name] for name in ("limit", "match", "failed_in", "sample") if given.get(name) is not None
        }
        if isinstance(where := given.get("where"), list) and where:
            chosen["where"] = tuple(where)
        return chosen | ({"seed": self.manifest.seed} if "sample" in chosen and self.manifest is not None else {})

    def identity(self) -> Identity:
        """Who answered then."""
        return self.manifest.target if self.manifest is not None else {"kind": "stored"}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """The recorded answer, with the times of the call that was made then."""
        # Mostly the row after the one before: both the rows and the cases are in the suite's order.
        row: int | None = self._next
        response = self._read(self._next) if self._next < len(self._digests) else None
        if response is None or response.id != case.id or self._trials[self._next] != context.trial:
            row = self._row_of(id_digest(case.id), context.trial)
            response = None if row is None else self._read(row)
        if row is None or response is None or response.id != case.id:
            raise TargetError(f"{self.run} has no answer to case {case.id!r}")
        self._next = row + 1
        return response

    def _row_of(self, digest: int, trial: int) -> int | None:
        """Where the record of a (case, trial) stands."""
        first = int(np.searchsorted(self._ids, digest, sorter=self._by_id))
        for row in map(int, (self._by_id[place] for place in range(first, len(self._by_id)))):
            if self._digests[row] != digest:
                return None
            if self._trials[row] == trial:
                return row
        return None

    def _read(self, row: int) -> InvocationResponse:
        offset, length = self._offsets[row], self._lengths[row]
        if offset < self._begins or offset + length > self._begins + len(self._window):
            # A call of the system costs more than all else here: what is read reaches a little back and far ahead.
            self._begins = max(offset - _WINDOW // 8, 0)
            self._window = os.pread(self._descriptor, max(offset + length - self._begins, _WINDOW), self._begins)
        place = offset - self._begins
        line = self._window[place : place + length]
        check_line(self.run / OUTPUTS, self._descriptor, offset, line[:-1])
        try:
            return _decode_response(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad_line(self.run / OUTPUTS, self._descriptor, offset) from error

    def close(self) -> None:
        """Let go of the run's file."""
        os.close(self._descriptor)
