"""The tables of cases that were asked for lately, and what was found in them: a bounded number, the newest stay."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import msgspec
import numpy as np

from steelyard.journal.files import OUTPUTS
from steelyard.journal.index import ROWS, Rows
from steelyard.journal.reader import index_rows
from steelyard.view.cases import CaseTable
from steelyard.view.figures import in_case_order
from steelyard.view.runs import stat_of
from steelyard.view.search import Found, search, terms_of

_MOST_TABLES = 8
_MOST_RECORDS = 2_000_000
"""Records in all tables together."""
_MOST_SEARCHES = 16


class _Kept(msgspec.Struct):
    table: CaseTable
    seen: object
    """What the journal's file was when the table was made: another one, or more of it, gives another table."""


class Tables:
    """Tables of cases by run and version."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._searches: OrderedDict[tuple[Path, str, tuple[str, ...]], Found] = OrderedDict()

    def known(self, run: Path, version: str | None, figures: bool) -> CaseTable | None:
        """The table of that version, else the present one; None unless it was made before."""
        tables = [kept for kept in self._kept if kept.table.run == run and (kept.table.has_figures or not figures)]
        for kept in tables:
            if kept.table.version == version:
                return kept.table
        now = stat_of(run / OUTPUTS)
        return next((kept.table for kept in tables if kept.seen == now), None)

    def from_index(self, run: Path) -> CaseTable:
        """The table as the index has it, completed from the journal where it is behind; writes nothing."""
        seen = stat_of(run / OUTPUTS)
        rows = index_rows(run) if seen is not None else np.empty(0, dtype=ROWS)
        return self._keep(CaseTable(run, in_case_order(rows)), seen)

    def from_rows(self, run: Path, rows: Rows, seen: object) -> CaseTable:
        """The table of rows in case order that have figures; `seen` is what the journal was before they were read."""
        return self._keep(CaseTable(run, rows), seen)

    def search(self, table: CaseTable, query: str) -> Found | None:
        """Which records hold these words; None when there are no words."""
        terms = terms_of(query)
        if not terms or not len(table):
            return None
        key = (table.run, table.version, terms)
        found = self._searches.pop(key, None) or search(table.run, table.records, terms)
        self._searches[key] = found
        while len(self._searches) > _MOST_SEARCHES:
            self._searches.popitem(last=False)
        return found

    def _keep(self, table: CaseTable, seen: object) -> CaseTable:
        kept = [_Kept(table, seen), *self._kept][:_MOST_TABLES]
        while len(kept) > 1 and sum(len(one.table.records) for one in kept) > _MOST_RECORDS:
            kept.pop()
        self._kept = kept
        return table
