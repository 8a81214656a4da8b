"""Matrices made by hand: a variant a run, a letter a case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steelyard.records import Record
from steelyard.report.matrix.table import VariantRuns, variants_in
from steelyard.run.matrix import Matrix, make_variants, write_matrix
from tests.support.compare import outcome
from tests.support.journal import write_journal


def matrix(folder: Path, letters: Mapping[str, str], **changes: Any) -> VariantRuns:
    """A matrix of targets, each with a journal of one record a letter; `.` is a case that it does not have."""
    records = {
        name: [outcome(letter, number, **changes) for number, letter in enumerate(word) if letter != "."]
        for name, word in letters.items()
    }
    return matrix_of(folder, records)


def matrix_of(folder: Path, records: Mapping[str, Sequence[Record]]) -> VariantRuns:
    """A matrix of targets with these records."""
    axes = {"target": list(records)}
    variants = make_variants(axes)
    folder.mkdir(parents=True, exist_ok=True)
    write_matrix(folder, Matrix(suite="letters", axes=axes, variants=variants))
    for variant in variants:
        write_journal(folder / variant.directory, list(records[variant.name]))
    return variants_in(folder)
