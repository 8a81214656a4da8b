"""The first reading of a suite: meets every bad row before anything is called, and keeps a few bytes a case."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from steelyard.errors import SuiteError
from steelyard.records import EvalCase, id_digest
from steelyard.suite.digests import DigestColumn, Digests, Marks
from steelyard.suite.evalset import EvalSet
from steelyard.suite.identity import BadCase, graded, grading_prefix, seen
from steelyard.suite.occurrences import Occurrences

Selects: TypeAlias = Callable[[str], bool]

CHECK_EVERY = 4096  # rows


class FirstPass:
    """What a first reading keeps: every row's id digest, and the fingerprints of those that are selected."""

    def __init__(self, suite: EvalSet, scorers_digest: bytes, selects: Selects | None) -> None:
        self._suite = suite
        self._selects = selects
        self.occurrences = Occurrences()
        self.marks = Marks()
        self.read = 0
        self.selected = 0
        self._ids = DigestColumn()
        self._kept = array("Q")
        self._seen = DigestColumn()
        self._graded = DigestColumn(grading_prefix(scorers_digest)) if scorers_digest else None

    def read_until(self, limit: int | None, check: Callable[[], None] | None) -> bool:
        """Read the suite until so many cases are selected; whether that was all of it."""
        for index, (line, case) in enumerate(self._suite.numbered(self.occurrences, self.marks)):
            if check is not None and index % CHECK_EVERY == 0:
                check()
            try:
                self._add(case)
            except BadCase as error:
                raise self._suite.problem(f"{error} (case {case.id!r})", index, line) from error
            if self.selected == limit:
                return False
        return True

    def _add(self, case: EvalCase) -> None:
        self._ids.add(case.id.encode())
        self.read += 1
        if self._selects is not None:
            if not self._selects(case.id):
                return
            self._kept.append(self.read - 1)
        self._seen.add(seen(case))
        self.selected += 1
        if self._graded is not None:
            self._graded.add(graded(case))

    def numbers(self) -> tuple[Digests, Digests, Digests | None]:
        """Of the selected rows: their ids' digests, and the fingerprints of what is asked and of how it is graded.

        Refuses two cases of one id, selected or not. The columns give up their memory: this can be asked for once.
        """
        ids = self._ids.numbers()
        _refuse_duplicates(self._suite, ids, self.occurrences.repeated)
        kept = ids if self._selects is None else ids[np.asarray(self._kept)]
        return kept, self._seen.numbers(), None if self._graded is None else self._graded.numbers()

    @property
    def indices(self) -> range | array[int]:
        """The selected rows' places in the suite."""
        return range(self.selected) if self._selects is None else self._kept


def _refuse_duplicates(suite: EvalSet, digests: Digests, repeated: frozenset[int]) -> None:
    """Refuse two cases with one id; digests tell which are suspect, a second reading what they are called."""
    ordered = np.sort(digests)
    suspects = frozenset(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not suspects:
        return
    first: dict[int, tuple[str, int, int | None]] = {}
    for index, (line, case) in enumerate(suite.numbered(Occurrences(repeated))):
        digest = id_digest(case.id)
        if digest in first:
            raise _duplicate(suite, case.id, index, line, first[digest])
        if digest in suspects:
            first[digest] = (case.id, index, line)
    raise SuiteError(f"suite {suite.id!r} changed while it was being read", path=suite.path)


def _duplicate(
    suite: EvalSet, case_id: str, index: int, line: int | None, first: tuple[str, int, int | None]
) -> SuiteError:
    first_id, first_index, first_line = first
    earlier = f"case {first_index + 1}" if first_line is None else f"line {first_line}"
    if first_id != case_id:  # 1 in 36 million for a million cases; a run could not tell the two apart
        message = f"the ids {first_id!r} ({earlier}) and {case_id!r} have the same digest: rename one"
    elif line is None:
        message = f"the id {case_id!r} stands twice: {earlier} and case {index + 1}"
    else:
        message = f"the id {case_id!r} stands twice: {earlier} and line {line}"
    return suite.problem(message, index, line)
