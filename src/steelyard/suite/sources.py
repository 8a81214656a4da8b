"""Where a suite's cases come from: JSONL, CSV or memory, read lazily, one case at a time.

A source yields each case with the file's line it starts on (None in memory), and says where a problem is.
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

from steelyard.errors import ConfigurationError, SuiteError
from steelyard.records import EvalCase
from steelyard.suite.columns import (
    CASE_FIELDS,
    Arrange,
    by_name,
    case_from,
    checked,
    described,
    found,
    from_cells,
    json_text,
    plain_case,
)
from steelyard.suite.digests import Marks
from steelyard.suite.identity import BadCase
from steelyard.suite.keys import reject_unknown

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LARGEST_CELL = 64 * 2**20
_BLOCK = 1 << 16  # bytes

Placed: TypeAlias = tuple[int | None, EvalCase]
Cases: TypeAlias = Iterable[EvalCase | Mapping[str, Any]] | Callable[[], Iterable[EvalCase | Mapping[str, Any]]]


class Source(Protocol):
    """Cases in order, and the words for where each one stands."""

    @property
    def path(self) -> Path | None: ...

    @property
    def one_shot(self) -> bool: ...

    @property
    def settled(self) -> bool: ...

    def read(self, marks: Marks | None = None) -> Iterator[Placed]: ...

    def problem(self, message: str, index: int, line: int | None) -> SuiteError: ...


class FileSource(ABC):
    """The cases of a file, one row each, with its columns arranged as asked."""

    one_shot = False
    settled = False

    def __init__(self, path: str | Path, arrange: Arrange) -> None:
        self.path = Path(path)
        self._arrange = arrange
        open_file(self.path).close()  # a missing file is an error now, not when the first case is wanted

    @abstractmethod
    def read(self, marks: Marks | None = None) -> Iterator[Placed]:
        """The cases, each with its line; SuiteError with the line at the first that is none.

        A source that reads its file in blocks tells `marks` of each one before it yields the block's cases.
        """

    def problem(self, message: str, index: int, line: int | None) -> SuiteError:  # noqa: ARG002 - a line says more
        """A problem with one case as an error that says where it stands."""
        return SuiteError(message, path=self.path, line=line)


class JsonlSource(FileSource):
    """One JSON object a line; blank lines, a byte order mark and CRLF are all fine."""

    def read(self, marks: Marks | None = None) -> Iterator[Placed]:
        """The cases, each with its line."""
        plain = self._arrange is by_name
        with open_file(self.path) as file:
            for line, text in enumerate(_lines(file, marks), 1):
                if line == 1:
                    text = text.removeprefix(BYTE_ORDER_MARK)
                case = plain_case(text) if plain else None
                if case is None:
                    if not text or text.isspace():
                        continue
                    plain = False  # of one file's rows, mostly all have columns of their own or none has
                    case = self._placed_case(text, line)
                yield line, case

    def _placed_case(self, text: bytes, line: int) -> EvalCase:
        try:
            return self._case(text)
        except BadCase as error:
            raise SuiteError(_with_hint(str(error), text, line), path=self.path, line=line) from error

    def _case(self, text: bytes) -> EvalCase:
        row = json_text(text)
        if not isinstance(row, dict):
            raise BadCase(f"a row must be an object, got {found(row)}")
        try:
            return case_from(self._arrange(row))
        except BadCase as error:
            raise BadCase(described(error, row)) from error


class CsvSource(FileSource):
    """A CSV file with a header; a row's line is the one it starts on, whatever newlines its cells hold.

    Columns without a name (a data frame's index, a trailing comma) are left out.
    """

    def read(self, marks: Marks | None = None) -> Iterator[Placed]:  # noqa: ARG002 - a row may span blocks
        """The cases, each with its line."""
        if csv.field_size_limit() < LARGEST_CELL:  # 128 KiB by default: less than a long prompt
            csv.field_size_limit(LARGEST_CELL)
        with open_file(self.path) as file:
            reader = csv.reader(self._lines(file), strict=True)
            header: list[str] | None = None
            for line, cells in self._rows(reader):
                if header is None:
                    header = self._header(cells, line)
                else:
                    yield line, self._case(header, cells, line)
            if header is None:
                raise SuiteError("has no header row", path=self.path)

    def _lines(self, file: BinaryIO) -> Iterator[str]:
        for line, text in enumerate(file, 1):
            try:
                yield (text.removeprefix(BYTE_ORDER_MARK) if line == 1 else text).decode("utf-8")
            except UnicodeDecodeError as error:
                message = f"is not UTF-8: byte {text[error.start]:#04x} at byte {error.start + 1}"
                raise SuiteError(_with_hint(message, text, line), path=self.path, line=line) from error

    def _rows(self, reader: Any) -> Iterator[tuple[int, list[str]]]:
        line = 1
        try:
            for cells in reader:
                if cells:
                    yield line, cells
                line = reader.line_num + 1
        except csv.Error as error:
            message = f"is not valid CSV: {error} (in the row that starts here; is a quote left open?)"
            raise SuiteError(message, path=self.path, line=line) from error

    def _header(self, cells: list[str], line: int) -> list[str]:
        names = [name.strip() for name in cells]
        twice = next((name for name in names if name and names.count(name) > 1), None)
        if twice is not None:
            raise SuiteError(f"has two columns named {twice!r}", path=self.path, line=line)
        return names

    def _case(self, header: list[str], cells: list[str], line: int) -> EvalCase:
        if len(cells) != len(header):
            message = f"has {len(cells)} cells, the header has {len(header)}: {', '.join(header)}"
            raise SuiteError(message, path=self.path, line=line)
        row = {name: cell for name, cell in zip(header, cells, strict=True) if name}
        try:
            return case_from(from_cells(self._arrange(row)))
        except BadCase as error:
            raise SuiteError(described(error, row), path=self.path, line=line) from error


class MemorySource:
    """Cases from Python or from a suite file: a sequence, any iterable, or a function that makes one.

    An iterator can be read once only. `path` and `lines` say where the cases stand, if in a file.
    """

    def __init__(
        self,
        cases: Cases,
        *,
        arrange: Arrange | None = None,
        path: Path | None = None,
        lines: list[int] | None = None,
    ) -> None:
        if isinstance(cases, str | bytes | Mapping) or not (isinstance(cases, Iterable) or callable(cases)):
            raise ConfigurationError(
                f"cases must be an iterable of cases or a function that returns one, got {found(cases)}"
            )
        self.path = path
        self.one_shot = isinstance(cases, Iterator)
        self.settled = isinstance(cases, list | tuple)
        self._cases = cases
        self._arrange = arrange
        self._lines = lines
        self._taken = False

    def read(self, marks: Marks | None = None) -> Iterator[Placed]:  # noqa: ARG002 - there is no file
        """The cases, each with its line if that is known."""
        if self.one_shot and self._taken:
            raise SuiteError(
                "the cases come from a one-shot iterator that was read already; give a list, or a function "
                "that returns a fresh iterator, or spool() them before the first reading"
            )
        self._taken = True
        cases = self._cases if isinstance(self._cases, Iterable) else self._cases()
        if not isinstance(cases, Iterable):
            raise ConfigurationError(f"the function for cases must return an iterable, got {found(cases)}")
        for index, row in enumerate(cases):
            line = self._lines[index] if self._lines else None
            try:
                case = checked(row) if type(row) is EvalCase else self._case(row, index, line)
            except BadCase as error:
                raise self.problem(str(error), index, line) from error
            yield line, case

    def problem(self, message: str, index: int, line: int | None) -> SuiteError:
        """A problem with one case as an error that says where it stands."""
        return SuiteError(f"cases[{index}]: {message}", path=self.path, line=line)

    def _case(self, row: Any, index: int, line: int | None) -> EvalCase:
        if isinstance(row, EvalCase):
            return checked(row)
        if not isinstance(row, Mapping):
            raise BadCase(f"must be an EvalCase or an object, got {found(row)}")
        if self._arrange is not None:
            return case_from(self._arrange(dict(row)))
        reject_unknown(row, CASE_FIELDS, f"cases[{index}]", file=self.path, line=line)
        return case_from(by_name(dict(row)))


def _lines(file: BinaryIO, marks: Marks | None) -> Iterator[bytes]:
    """The lines of a file without their ends, read in blocks of whole ones."""
    while block := file.read(_BLOCK):
        if not block.endswith(b"\n"):
            block += file.readline()
        if marks is not None:
            marks.meet(block)
        yield from block.removesuffix(b"\n").split(b"\n")


def open_file(path: Path) -> BinaryIO:
    """A file open for reading bytes; SuiteError if there is no such file or it may not be read."""
    if path.is_dir():
        raise SuiteError("is a directory, not a file", path=path)
    if path.exists() and not path.is_file():
        raise SuiteError("is not a regular file, and cases are read twice: write them to one first", path=path)
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise SuiteError("no such file", path=path) from None
    except OSError as error:
        raise SuiteError(f"cannot be read: {error.strerror or error}", path=path) from error


def _with_hint(message: str, text: bytes, line: int) -> str:
    """The message, and what the file probably is when its first line is not of the expected kind."""
    if line == 1 and text[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return f"{message}; the file looks like UTF-16: save it as UTF-8"
    if line == 1 and text.lstrip()[:1] == b"[":
        return f"{message}; the file looks like one JSON document: write one object a line"
    return message
