"""Cases from other kinds of data: JSON, YAML and Parquet files, Hugging Face datasets, data frames, and tasks.

Tasks are those of SWE-bench's JSONL, and the task folders of harbor and terminal-bench. What an agent must not see (the
reference patch, the hidden tests' patch, the names of the tests) becomes `expected`, which no program of an agent gets.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from steelyard.attachments import AttachmentFolder
from steelyard.errors import SuiteError, reject_unknown
from steelyard.suite.identity import BadCase, Marks
from steelyard.suite.sources import (
    Arrange,
    CaseColumns,
    CsvSource,
    FileSource,
    JsonlSource,
    Placed,
    case_from,
    described,
    found,
    json_text,
    open_file,
)

_ROWS = 1024
_HF_KEYS = ("path", "split", "name", "revision")
MakeSource = Callable[[Path, Arrange, AttachmentFolder], FileSource]
FORMATS = ("swebench", "harbor")
_HIDDEN = ("patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
_NEEDED = ("instance_id", "repo", "base_commit", "problem_statement")
_SHOWN = 5


class RowSource(FileSource):
    """Cases from rows that a library reads: an error names the row, counted from 1."""

    def read(self, marks: Marks | None = None) -> Iterator[Placed]:  # noqa: ARG002 - not read in blocks of lines
        """Yield the cases, each with its line where that is known."""
        for index, (line, row) in enumerate(self._rows()):
            try:
                yield line, self._case(row)
            except BadCase as error:
                raise self.problem(str(error), index, line) from error

    def _rows(self) -> Iterator[tuple[int | None, Any]]:
        raise NotImplementedError

    def _case(self, row: Any) -> Any:
        if not isinstance(row, Mapping):
            raise BadCase(f"a row must be an object, got {found(row)}")
        fields = {str(name): value for name, value in row.items()}
        try:
            return case_from(_without_missing(self._arrange(fields)), self._folder)
        except BadCase as error:
            raise BadCase(described(error, fields)) from error

    def problem(self, message: str, index: int, line: int | None) -> SuiteError:
        """Return a problem with one case as an error that names its place."""
        return SuiteError(message if line is not None else f"row {index + 1}: {message}", path=self.path, line=line)


class JsonSource(RowSource):
    """A JSON file that is one list of objects. It is read as a whole: JSONL is better for many cases."""

    def _rows(self) -> Iterator[tuple[int | None, Any]]:
        with open_file(self.path) as file:
            content = file.read()
        try:
            rows = json_text(content.removeprefix(b"\xef\xbb\xbf"))
        except BadCase as error:
            raise SuiteError(str(error), path=self.path) from error
        if not isinstance(rows, list):
            raise SuiteError(f"must be a list of objects, got {found(rows)}", path=self.path)
        yield from ((None, row) for row in rows)


class YamlSource(RowSource):
    """A YAML file that is one list of mappings, by the rules of suite files. It is read as a whole."""

    def _rows(self) -> Iterator[tuple[int | None, Any]]:
        from steelyard.suite.suite_file import load_list

        rows, lines = load_list(self.path)
        yield from zip(lines, rows, strict=True)


class ParquetSource(RowSource):
    """A Parquet file, read by pyarrow some rows at a time. A cell without a value is absent."""

    def _rows(self) -> Iterator[tuple[int | None, Any]]:
        parquet = _imported("pyarrow.parquet", "parquet", self.path)
        try:
            with parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(batch_size=_ROWS):
                    yield from ((None, _present(row)) for row in batch.to_pylist())
        except (OSError, ValueError) as error:
            raise SuiteError(f"cannot be read as Parquet: {error}", path=self.path) from error


class HuggingFaceSource(RowSource):
    """A dataset of the `datasets` package: from its hub, or saved to disk. Images and audio come as their bytes."""

    def __init__(self, path: Path, about: Mapping[str, Any], arrange: Arrange, folder: AttachmentFolder) -> None:
        reject_unknown(about, _HF_KEYS, "cases.hf", file=path)
        for key, value in about.items():
            if value is not None and not isinstance(value, str):
                raise SuiteError(f"cases.hf.{key} must be text, got {found(value)}", path=path)
        if not about.get("path"):
            raise SuiteError("cases.hf needs a path: a dataset's name, or the folder of a saved one", path=path)
        super().__init__(path, arrange, folder)
        self._about = about
        self._loaded: Any = None

    def _rows(self) -> Iterator[tuple[int | None, Any]]:
        if self._loaded is None:
            self._loaded = self._load()
        yield from ((None, _present(row)) for row in self._loaded)

    def _load(self) -> Any:
        datasets = _imported("datasets", "hf", self.path)
        place, split = self.path.parent / self._about["path"], self._about.get("split")
        try:
            if any((place / name).is_file() for name in ("state.json", "dataset_dict.json")):
                data = datasets.load_from_disk(str(place))
            else:
                options = {key: self._about.get(key) for key in ("name", "split", "revision")}
                data = datasets.load_dataset(self._about["path"], **options)
        except Exception as error:  # the package raises errors of many others
            raise SuiteError(
                f"the dataset {self._about['path']!r} cannot be loaded: {error}", path=self.path
            ) from error
        if isinstance(data, datasets.DatasetDict):
            if split not in data:
                given = "no split is given" if split is None else f"there is no split {split!r}"
                raise SuiteError(f"cases.hf: {given}; there are: {', '.join(data)}", path=self.path)
            data = data[split]
        for column, feature in (data.features or {}).items():
            if isinstance(feature, datasets.Image | datasets.Audio):
                data = data.cast_column(column, type(feature)(decode=False))
        return data


ENDINGS: dict[str, MakeSource] = {
    ".jsonl": JsonlSource, ".jsonl.gz": JsonlSource, ".ndjson": JsonlSource, ".csv": CsvSource, ".csv.gz": CsvSource,
    ".tsv": CsvSource, ".tsv.gz": CsvSource, ".json": JsonSource, ".json.gz": JsonSource, ".yaml": YamlSource,
    ".yml": YamlSource, ".parquet": ParquetSource,
}  # fmt: skip
"""How a file of cases is read, by the ending of its name."""


def file_source(path: Path, arrange: Arrange, folder: AttachmentFolder | None = None) -> FileSource:
    """Return the source of a file by the ending of its name; SuiteError for one that is not known."""
    name = path.name.lower()
    ending = next((one for one in sorted(ENDINGS, key=len, reverse=True) if name.endswith(one)), None)
    if ending is None:
        raise SuiteError(f"cases must be a file whose name ends in {', '.join(ENDINGS)}; got {path.name!r}")
    return ENDINGS[ending](path, arrange, folder or AttachmentFolder(path.parent, (path.parent,)))


class FrameRows:
    """The rows of a data frame as mappings, read again with each iteration; missing values are None."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if hasattr(self._frame, "iter_rows"):  # polars
            rows: Iterable[Any] = self._frame.iter_rows(named=True)
        elif hasattr(self._frame, "to_batches"):  # pyarrow
            rows = (row for batch in self._frame.to_batches(_ROWS) for row in batch.to_pylist())
        else:
            frame = self._frame
            rows = (row for at in range(0, len(frame), _ROWS) for row in frame.iloc[at : at + _ROWS].to_dict("records"))
        return (_present({str(name): value for name, value in row.items()}) for row in rows)


def is_frame(value: Any) -> bool:
    """Whether a value is a data frame of pandas or polars, or a table of pyarrow; none of them is imported."""
    kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    return kind in ("pandas.DataFrame", "polars.DataFrame", "pyarrow.Table")


def frame_columns(arrange: Arrange) -> Arrange:
    """Return how a frame's columns become a case's fields: missing values are None for templates, absent in cases."""
    return lambda row: _without_missing(arrange(row))


def _without_missing(columns: CaseColumns) -> CaseColumns:
    values, rest = ({name: value for name, value in one.items() if value is not None} for one in columns)
    return CaseColumns(values, rest)


def _present(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in Python's own values; None for NaN, and for what pandas has for missing ones."""
    return {name: None if _is_missing(value) else _plain(value) for name, value in row.items()}


def _is_missing(value: Any) -> bool:
    return (
        value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")
    )


def _plain(value: Any) -> Any:
    """Return a value of numpy as Python's own."""
    return value.tolist() if hasattr(value, "tolist") else value


def _imported(module: str, extra: str, path: Path) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise SuiteError(
            f"needs {package}: pip install 'steelyard[{extra}]' ({error})", path=path, topic="extra"
        ) from error


def swebench_cases(path: Path) -> Iterator[dict[str, Any]]:
    """A case for each line of a SWE-bench file: the problem is the prompt, repository and commit are metadata.

    `metadata.repository` is the repository's name with `__` for `/`: the folder in which a local clone is looked for.
    """
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _instance(path, number, line)
    except OSError as error:
        raise SuiteError(f"cannot be read: {error.strerror}", path=path) from error
    except UnicodeDecodeError as error:
        raise SuiteError(f"is not UTF-8: {error.reason} at byte {error.start}", path=path) from error


def _instance(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise SuiteError(f"not JSON: {error}", path=path, line=number) from error
    if not isinstance(found, dict):
        raise SuiteError(f"a task must be an object, got {type(found).__name__}", path=path, line=number)
    for name in _NEEDED:
        if not isinstance(found.get(name), str) or not found[name]:
            raise SuiteError(f"a SWE-bench task needs {name}, got {found.get(name)!r:.100}", path=path, line=number)
    expected = {name: _tests(found[name]) if name.isupper() else found[name] for name in _HIDDEN if name in found}
    shown = {name: value for name, value in found.items() if name not in (*_HIDDEN, "instance_id", "problem_statement")}
    return {
        "id": found["instance_id"],
        "prompt": found["problem_statement"],
        "metadata": {**shown, "repository": found["repo"].replace("/", "__")},
        "expected": expected or None,
    }


def _tests(listed: Any) -> Any:
    """A list of tests, which SWE-bench has as JSON text in a field."""
    if not isinstance(listed, str):
        return listed
    try:
        return json.loads(listed)
    except ValueError:
        return [listed]


def harbor_cases(folder: Path, *, skip_containers: bool = False) -> Iterator[dict[str, Any]]:
    """A case for each folder with `instruction.md` and `task.toml`: the instruction is the prompt.

    Tasks that need a container are refused by name, or left out with `skip_containers`.
    """
    try:
        places = sorted(place for place in folder.iterdir() if (place / "task.toml").is_file())
    except OSError as error:
        raise SuiteError(f"cannot be read: {error.strerror}", path=folder) from error
    if not places:
        raise SuiteError("has no task: a folder with task.toml and instruction.md", path=folder)
    settings = {place: _settings(place) for place in places}
    containers = [place.name for place in places if _needs_container(place, settings[place])]
    if containers and not skip_containers:
        named = ", ".join(containers[:_SHOWN]) + (
            f" and {len(containers) - _SHOWN:,} more" if containers[_SHOWN:] else ""
        )
        raise SuiteError(
            f"{len(containers):,} of {len(places):,} tasks need a container, which Steelyard does not start: {named}. "
            f"`skip_containers: true` leaves them out",
            path=folder,
        )
    for place in places:
        if place.name not in containers:
            yield _task(place, settings[place])


def _settings(place: Path) -> dict[str, Any]:
    try:
        with open(place / "task.toml", "rb") as file:
            return tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SuiteError(f"cannot be read: {error}", path=place / "task.toml") from error


def _needs_container(place: Path, settings: dict[str, Any]) -> bool:
    environment = settings.get("environment")
    names = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml")
    described = any((place / "environment" / name).exists() or (place / name).exists() for name in names)
    return described or (isinstance(environment, dict) and "docker_image" in environment)


def _task(place: Path, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        instruction = (place / "instruction.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"cannot be read: {error}", path=place / "instruction.md") from error
    metadata = settings.get("metadata")
    case: dict[str, Any] = {
        "id": place.name,
        "prompt": instruction,
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "task": place.name},
    }
    agent = settings.get("agent")
    seconds = agent.get("timeout_sec") if isinstance(agent, dict) else None
    if isinstance(seconds, (int, float)) and seconds > 0:
        case["limits"] = {"time": float(seconds)}
    return case
