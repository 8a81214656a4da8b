"""`outputs.idx`: where each record lies, so that readers need not scan. Rebuildable from `outputs.jsonl` alone."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from steelyard.journal.files import INDEX, OUTPUTS

_MAGIC = b"SYIDX\x01\0\0"
_HEADER = struct.Struct("<8sQ")
"""Magic, and how many bytes of outputs.jsonl the rows that follow at once account for."""

_ROW = struct.Struct("<QQIIHBBI")
ROWS = np.dtype(
    [
        ("offset", "<u8"),
        ("id", "<u8"),
        ("length", "<u4"),
        ("index", "<u4"),
        ("trial", "<u2"),
        ("ok", "u1"),
        ("verdict", "u1"),
        ("spare", "<u4"),
    ]
)
FAILED, PASSED, UNSCORED = 0, 1, 2

Rows = npt.NDArray[np.void]


def pack_row(offset: int, id_digest: int, length: int, index: int, trial: int, ok: bool, verdict: bool | None) -> bytes:
    """One row as bytes."""
    return _ROW.pack(offset, id_digest, length, index, trial, ok, UNSCORED if verdict is None else int(verdict), 0)


class IndexBuilder:
    """Writes a whole index row by row, and puts it in place of the old one in one step."""

    def __init__(self, run: Path) -> None:
        self._path = run / INDEX
        self._temporary = self._path.with_name(f"{INDEX}.{os.getpid()}.tmp")
        self._file = open(self._temporary, "wb")  # noqa: SIM115 - closed by finish() or abandon()
        self._file.write(_HEADER.pack(_MAGIC, 0))

    def add(self, row: bytes) -> None:
        """Add one row."""
        self._file.write(row)

    def finish(self, covered: int) -> None:
        """Make it the run's index: it accounts for the first `covered` bytes of outputs.jsonl."""
        self._file.seek(0)
        self._file.write(_HEADER.pack(_MAGIC, covered))
        self._file.close()
        os.replace(self._temporary, self._path)

    def abandon(self) -> None:
        """Leave the old index as it is."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def read_index(run: Path) -> tuple[Rows, int]:
    """The rows and how many bytes of outputs.jsonl they account for; no rows when there is no usable index."""
    nothing = np.empty(0, dtype=ROWS)
    try:
        data = (run / INDEX).read_bytes()
        size = os.path.getsize(run / OUTPUTS)
    except FileNotFoundError:
        return nothing, 0
    if len(data) < _HEADER.size or data[:8] != _MAGIC:
        return nothing, 0
    covered = int(_HEADER.unpack_from(data)[1])
    whole = (len(data) - _HEADER.size) // _ROW.size
    rows = np.frombuffer(data, dtype=ROWS, count=whole, offset=_HEADER.size)
    if whole:
        covered = max(covered, int((rows["offset"] + rows["length"]).max()))
    # An index that speaks of bytes that are not there belongs to another file.
    return (nothing, 0) if covered > size else (rows, covered)


def winners(rows: Rows) -> Rows:
    """The row that counts for each (id, trial), in case order: the last ok one, else the last error."""
    if not len(rows):
        return rows
    order = np.lexsort((rows["offset"], rows["ok"], rows["trial"], rows["id"]))
    ranked = rows[order]
    last = np.ones(len(ranked), dtype=bool)
    last[:-1] = (ranked["id"][1:] != ranked["id"][:-1]) | (ranked["trial"][1:] != ranked["trial"][:-1])
    kept = ranked[last]
    return kept[np.lexsort((kept["trial"], kept["index"]))]
