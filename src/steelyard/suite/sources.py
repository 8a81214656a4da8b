"""Sources of cases: JSONL and CSV files and Python iterables, and how a row's columns become a checked EvalCase."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import logging
import re
import traceback
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from math import isfinite
from pathlib import Path
from reprlib import Repr
from typing import Any, BinaryIO, NamedTuple, NoReturn, Protocol, TypeAlias, cast

import msgspec

from steelyard.attachments import AttachmentFolder, BadAttachment, anywhere, has_attachments, resolved
from steelyard.errors import ConfigurationError, SteelyardError, SuiteError, describe, nearest, reject_unknown
from steelyard.records import EvalCase
from steelyard.suite.identity import BadCase, Marks
from steelyard.units import read_case_limits

CASE_FIELDS: tuple[str, ...] = EvalCase.__struct_fields__
JSON_FIELDS = ("messages", "tools", "expected_trajectory", "metadata", "limits")
"""The fields whose text, in a CSV cell or from a template, is JSON."""

SHOWN = 60  # characters of a value that an error quotes

_short = Repr()  # unlike repr(), safe for huge or deeply nested values
_short.maxlevel, _short.maxstring, _short.maxother = 3, SHOWN, SHOWN

log = logging.getLogger("steelyard")

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_CELL = 64 * 2**20
_BLOCK = 1 << 16  # bytes

Placed: TypeAlias = tuple[int | None, EvalCase]
Cases: TypeAlias = Iterable[EvalCase | Mapping[str, Any]] | Callable[[], Iterable[EvalCase | Mapping[str, Any]]]


class _Row(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A row that has only the fields of a case, with their types."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    id: str = ""
    system_prompt: str | None = None
    tools: list[dict[str, Any]] | None = None
    expected: Any = None
    expected_trajectory: Any = None
    metadata: dict[str, Any] = {}
    attachments: Any = None
    group: str | None = None


_decode_row = msgspec.json.Decoder(_Row).decode


class CaseColumns(NamedTuple):
    """A row's columns: the values of a case's fields, and the rest, which becomes metadata."""

    values: dict[str, Any]
    rest: dict[str, Any]


Arrange = Callable[[dict[str, Any]], CaseColumns]


def by_name(row: dict[str, Any]) -> CaseColumns:
    """Map columns by name: those named like a case's fields; all others are metadata."""
    values = {name: row[name] for name in CASE_FIELDS if name in row}
    return CaseColumns(values, {name: value for name, value in row.items() if name not in values})


def grouped_by(column: str, arrange: Arrange) -> Arrange:
    """Take the group of each case from a column, which is arranged as it would be anyway."""

    def arranged(row: dict[str, Any]) -> CaseColumns:
        columns = arrange(row)
        metadata = row.get("metadata")
        known = row if column in row else metadata if isinstance(metadata, dict) else {}
        if column not in known:
            raise BadCase(f"has no {column!r}, by which the suite groups its cases")
        group = known[column]
        return columns if group in (None, "") else CaseColumns({**columns.values, "group": group}, columns.rest)

    return arranged


def from_cells(columns: CaseColumns) -> CaseColumns:
    """Convert the cells of a CSV row: an empty cell is absent, and some fields hold JSON."""
    values = {name: value for name, value in columns.values.items() if value != ""}
    for name in JSON_FIELDS:
        if isinstance(values.get(name), str):
            values[name] = json_text(values[name], name)
    attached = values.get("attachments")
    if isinstance(attached, str) and attached.lstrip()[:1] in ("[", "{"):  # else it is one path
        values["attachments"] = json_text(attached, "attachments")
    return CaseColumns(values, columns.rest)


def case_from(columns: CaseColumns, folder: AttachmentFolder) -> EvalCase:
    """Build the case of a row, checked; its attachments are in `folder`."""
    values = dict(columns.values)
    if values.get("attachments") is None:
        values.pop("attachments", None)
    own = values.pop("metadata", None)
    if own is not None and not isinstance(own, dict):
        raise BadCase(f"metadata must be an object, got {found(own)}")
    metadata = {**columns.rest, **own} if own else columns.rest
    return checked(EvalCase(**values, metadata=metadata), folder)


def plain_case(text: bytes) -> EvalCase | None:
    """Return the case of a JSON row that has only a case's fields; None where more checks are needed."""
    try:
        row = _decode_row(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if (row.prompt is None and not row.messages) or row.attachments:
        return None
    case = EvalCase(
        id=row.id,
        prompt=row.prompt,
        messages=row.messages,
        system_prompt=row.system_prompt,
        tools=row.tools,
        expected=row.expected,
        expected_trajectory=row.expected_trajectory,
        metadata=row.metadata,
        group=row.group,
    )
    return None if row.messages and has_attachments(case) else case


def checked(case: EvalCase, folder: AttachmentFolder | None = None) -> EvalCase:
    """Return the case, its id as text and its attachments found; BadCase when a field has the wrong type."""
    plain = type(case.id) is type(case.prompt) is str and case.id.isascii() and type(case.metadata) is dict
    if (
        plain
        and case.messages is None is case.tools
        and not case.attachments
        and (case.system_prompt is None or type(case.system_prompt) is str)
        and case.limits is None
        and (case.group is None or (type(case.group) is str and case.group.isascii()))
    ):
        return case  # the common case: one check instead of one per field
    if type(case.id) is not str:
        case = copy(case)
        case.id = _name_text("id", case.id)
    if case.group is not None and type(case.group) is not str:
        case = copy(case)
        case.group = _name_text("group", case.group)
    for name, text in (("id", case.id), ("group", case.group)):
        if text and not text.isascii():
            _check_unicode(name, text)
    for name in ("prompt", "system_prompt"):
        value = getattr(case, name)
        if value is not None and not isinstance(value, str):
            raise BadCase(f"{name} must be text, got {found(value)}")
    _check_objects("messages", case.messages)
    _check_objects("tools", case.tools)
    if not isinstance(case.metadata, dict):
        raise BadCase(f"metadata must be an object, got {found(case.metadata)}")
    if case.prompt is None and not case.messages:
        raise BadCase("has neither prompt nor messages")
    if case.limits is not None:
        case = _with_limits(case)
    if not has_attachments(case):
        return case
    try:
        return resolved(case, folder or anywhere())
    except BadAttachment as error:
        raise BadCase(str(error)) from error


def _with_limits(case: EvalCase) -> EvalCase:
    """A copy of the case with its limits read."""
    case = copy(case)
    try:
        case.limits = read_case_limits(case.limits, "limits")
    except ConfigurationError as error:
        raise BadCase(str(error)) from error
    return case


def _name_text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadCase(f"{name} must be text or a number, got {found(value)}")
    if isinstance(value, float) and not isfinite(value):
        raise BadCase(f"{name} must be text or a number, got {value}")
    return str(value)


def _check_unicode(name: str, text: str) -> None:
    """Refuse an id or group that cannot be written as UTF-8: its records could not be found again."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadCase(f"{name} must be Unicode text, got {text!r} with a lone surrogate") from None


def _check_objects(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, list):
        raise BadCase(f"{name} must be a list of objects, got {found(value)}")
    for place, item in enumerate(value):
        if not isinstance(item, dict):
            raise BadCase(f"{name} must be a list of objects, got {found(item)} as {name}[{place}]")


def described(error: BadCase, row: Mapping[str, Any]) -> str:
    """Describe what is wrong with a row, with its columns and the one that may be meant."""
    names = [str(name) for name in row]
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    message = f"{error}; columns: {shown or 'none'}"
    for name in names:
        meant = None if name in CASE_FIELDS else nearest(name, CASE_FIELDS)
        if meant and meant not in names:
            return f"{message}; is {name!r} meant as {meant!r}? Rename it, or map it with `fields`"
    return message if "prompt" in names else f"{message}; `fields` maps other columns"


def found(value: Any) -> str:
    """Return a value as an error shows it: its JSON type and its beginning."""
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    if value is None:
        return "null"
    return f"{kinds.get(type(value), type(value).__name__)} ({_short.repr(value)})"


def json_text(text: str | bytes, name: str = "") -> Any:
    """Decode JSON text; BadCase where it is not JSON, or holds NaN or an infinity."""
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise BadCase(f"{name} is nested too deeply".strip()) from None
    except (
        msgspec.DecodeError,
        UnicodeError,
    ):  # msgspec is stricter: it also refuses lone surrogates, which are allowed
        return _json_with_surrogates(text, name)


def _json_with_surrogates(text: str | bytes, name: str) -> Any:
    try:
        plain = text if isinstance(text, str) else text.decode("utf-8")
        return json.loads(plain.rstrip(), parse_constant=_no_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise BadCase(f"is not UTF-8: byte {error.object[error.start]:#04x} at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise BadCase(f"{name} is not valid JSON: {error.msg} at column {error.pos + 1}".strip()) from None
    except RecursionError:
        raise BadCase(f"{name} is nested too deeply".strip()) from None
    except ValueError as error:
        raise BadCase(f"{name} is not valid JSON: {error}".strip()) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"the number {text[:SHOWN]} is out of range")
    return number


class Source(Protocol):
    """Cases in order, and errors that name the place of each."""

    @property
    def path(self) -> Path | None: ...

    @property
    def one_shot(self) -> bool: ...

    @property
    def settled(self) -> bool: ...

    def read(self, marks: Marks | None = None) -> Iterator[Placed]: ...

    def problem(self, message: str, index: int, line: int | None) -> SuiteError: ...


class FileSource(ABC):
    """The cases of a file, one per row, with its columns mapped by `arrange`."""

    one_shot = False
    settled = False
    _warned = False

    def __init__(self, path: str | Path, arrange: Arrange, folder: AttachmentFolder | None = None) -> None:
        self.path = Path(path)
        self._arrange = arrange
        self._folder = folder or AttachmentFolder(self.path.parent, (self.path.parent,))
        open_file(self.path).close()  # a missing file is an error now, not at the first case

    @abstractmethod
    def read(self, marks: Marks | None = None) -> Iterator[Placed]:
        """Yield the cases, each with its line; SuiteError with the line at the first invalid one.

        A source that reads its file in blocks adds each one to `marks` before it yields the block's cases.
        """

    def problem(self, message: str, index: int, line: int | None) -> SuiteError:  # noqa: ARG002 - a line says more
        """Return a problem with one case as an error that names its place."""
        return SuiteError(message, path=self.path, line=line)


class JsonlSource(FileSource):
    """One JSON object a line; blank lines, a byte order mark and CRLF are all fine."""

    def read(self, marks: Marks | None = None) -> Iterator[Placed]:
        """Yield the cases, each with its line."""
        plain = self._arrange is by_name
        with open_file(self.path) as file:
            for line, text in enumerate(_lines(file, marks), 1):
                if line == 1:
                    text = text.removeprefix(BYTE_ORDER_MARK)
                case = plain_case(text) if plain else None
                if case is None:
                    if not text or text.isspace():
                        continue
                    plain = False  # in one file, either most rows have extra columns or none has
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
            return case_from(self._arrange(row), self._folder)
        except BadCase as error:
            raise BadCase(described(error, row)) from error


class CsvSource(FileSource):
    """A CSV file with a header; a row's line is the one it starts on, whatever newlines its cells hold.

    Cells are separated by commas; by tabs in a .tsv file; by semicolons or tabs where the header has no comma.
    CaseColumns without a name (a data frame's index, a trailing comma) are left out.
    """

    def read(self, marks: Marks | None = None) -> Iterator[Placed]:  # noqa: ARG002 - a row may span blocks
        """Yield the cases, each with its line."""
        if csv.field_size_limit() < MAX_CELL:  # 128 KiB by default: less than a long prompt
            csv.field_size_limit(MAX_CELL)
        with open_file(self.path) as file:
            lines = self._lines(file)
            first = next(lines, "")
            reader = csv.reader(itertools.chain((first,), lines), strict=True, delimiter=self._separator(first))
            header: list[str] | None = None
            for line, cells in self._rows(reader):
                if header is None:
                    header = self._header(cells, line)
                else:
                    yield line, self._case(header, cells, line)
            if header is None:
                raise SuiteError("has no header row", path=self.path)

    def _separator(self, header: str) -> str:
        """Return what separates the cells; one that was found rather than known is reported, once."""
        if self.path.name.lower().removesuffix(".gz").endswith(".tsv"):
            return "\t"
        bare = re.sub(r'"[^"]*"', "", header)
        found = next((one for one in ";\t" if "," not in bare and one in bare), ",")
        if found != "," and not self._warned:
            self._warned = True
            name = "tabs" if found == "\t" else "semicolons"
            log.warning("%s: its cells are separated by %s, as its header has no comma", self.path, name)
        return found

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
            return case_from(from_cells(self._arrange(row)), self._folder)
        except BadCase as error:
            raise SuiteError(described(error, row), path=self.path, line=line) from error


class MemorySource:
    """Cases from Python or from a suite file: a sequence, any iterable, or a function that makes one.

    An iterator can be read once only. `path` and `lines` are the place of the cases, if they are in a file.
    """

    def __init__(
        self,
        cases: Cases,
        *,
        arrange: Arrange | None = None,
        path: Path | None = None,
        lines: list[int] | None = None,
        folder: AttachmentFolder | None = None,
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
        self._folder = folder or (anywhere() if path is None else AttachmentFolder(path.parent))
        self._taken = False

    def read(self, marks: Marks | None = None) -> Iterator[Placed]:  # noqa: ARG002 - there is no file
        """Yield the cases, each with its line if that is known."""
        if self.one_shot and self._taken:
            raise SuiteError(
                "the cases come from a one-shot iterator that was already read; pass a list, or a function "
                "that returns a new iterator, or spool() them before the first reading"
            )
        self._taken = True
        for index, row in enumerate(self._cases if self.settled else self._produced()):  # type: ignore[arg-type]
            line = self._lines[index] if self._lines else None
            try:
                case = checked(row, self._folder) if type(row) is EvalCase else self._case(row, index, line)
            except BadCase as error:
                raise self.problem(str(error), index, line) from error
            yield line, case

    def _produced(self) -> Iterator[Any]:
        """Yield what the user's own code makes; what it raises is a problem of the suite, and says where it is."""
        count = 0
        try:
            cases = self._cases if isinstance(self._cases, Iterable) else self._cases()
            if not isinstance(cases, Iterable):
                raise ConfigurationError(f"the function for cases must return an iterable, got {found(cases)}")
            for row in cases:
                yield row
                count += 1
        except SteelyardError:
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if len(frames) > 1 else ""
            message = f"the code that makes the cases failed after {count:,} of them: {describe(error)}{place}"
            raise SuiteError(message) from error

    def problem(self, message: str, index: int, line: int | None) -> SuiteError:
        """Return a problem with one case as an error that names its place."""
        return SuiteError(f"cases[{index}]: {message}", path=self.path, line=line)

    def _case(self, row: Any, index: int, line: int | None) -> EvalCase:
        if isinstance(row, EvalCase):
            return checked(row, self._folder)
        if not isinstance(row, Mapping):
            raise BadCase(f"must be an EvalCase or an object, got {found(row)}")
        if self._arrange is not None:
            return case_from(self._arrange(dict(row)), self._folder)
        reject_unknown(row, CASE_FIELDS, f"cases[{index}]", file=self.path, line=line)
        return case_from(by_name(dict(row)), self._folder)


def _lines(file: BinaryIO, marks: Marks | None) -> Iterator[bytes]:
    """Yield the lines of a file without their ends, read in blocks of whole lines."""
    while block := file.read(_BLOCK):
        if not block.endswith(b"\n"):
            block += file.readline()
        if marks is not None:
            marks.meet(block)
        yield from block.removesuffix(b"\n").split(b"\n")


class _GzipFile(gzip.GzipFile):
    """A compressed file; one that is damaged or cut off is a problem of the suite."""

    def read(self, size: int | None = -1) -> bytes:
        return self._checked(super().read, size)

    def readline(self, size: int | None = -1) -> bytes:
        return self._checked(super().readline, size)

    def _checked(self, read: Callable[[Any], bytes], size: int | None) -> bytes:
        try:
            return read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise SuiteError(f"cannot be decompressed: {error}", path=Path(self.name)) from error


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading bytes, decompressed if it is a .gz; SuiteError if it is not there or cannot be read."""
    if path.is_dir():
        raise SuiteError("is a directory, not a file", path=path)
    if path.exists() and not path.is_file():
        raise SuiteError(
            "is not a regular file, and cases are read twice: write them to a regular file first", path=path
        )
    try:
        if path.name.lower().endswith(".gz"):
            return cast(BinaryIO, _GzipFile(path, "rb"))
        return path.open("rb")
    except FileNotFoundError:
        raise SuiteError("no such file", path=path) from None
    except OSError as error:
        raise SuiteError(f"cannot be read: {error.strerror or error}", path=path) from error


def _with_hint(message: str, text: bytes, line: int) -> str:
    """Add to the message what the file probably is when its first line is not of the expected kind."""
    if line == 1 and text[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return f"{message}; the file looks like UTF-16: save it as UTF-8"
    if line == 1 and text.lstrip()[:1] == b"[":
        return f"{message}; the file looks like one JSON document: write one object a line, or name it .json"
    return message
