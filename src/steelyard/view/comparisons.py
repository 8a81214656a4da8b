"""Comparisons of the runs in the folder, made when asked for and kept while their runs stay as they are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from steelyard.report.compare import compare
from steelyard.report.compare_page import markup, title
from steelyard.view.runs import Signature, signature_of

MOST_COMPARED = 5
_MOST_KEPT = 8


class Comparisons:
    """Titles and markup of comparisons."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[tuple[Path, Signature], ...], tuple[str, str]] = OrderedDict()

    def of(self, runs: Sequence[Path]) -> tuple[str, str]:
        """The title and the markup of the first run against each of the others; all that is not ours is escaped."""
        key = tuple((run, signature_of(run)) for run in runs)
        made = self._kept.pop(key, None)
        if made is None:
            comparison = compare(runs)
            made = (title(comparison), "\n".join(markup(comparison)))
        self._kept[key] = made
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return made
