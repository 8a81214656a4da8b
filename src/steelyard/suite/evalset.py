"""EvalSet: a suite's id and its cases, in order, read lazily, each with a unique id."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from copy import copy
from itertools import islice
from pathlib import Path
from typing import Any

from steelyard.attachments import AttachmentFolder
from steelyard.disk import sync_directory
from steelyard.errors import ConfigurationError, SuiteError
from steelyard.records import EvalCase
from steelyard.suite.data_files import FrameRows, file_source, frame_columns, is_frame
from steelyard.suite.identity import BadCase, Marks, Occurrences, as_json, content_digest
from steelyard.suite.prompts import CasePrompt, Examples
from steelyard.suite.sources import Arrange, Cases, CsvSource, JsonlSource, MemorySource, Placed, Source, by_name


class EvalSet:
    """A suite: cases in order. Each iteration reads them again, with ids and the system prompt filled in.

    `cases` is a sequence of EvalCase (or of dictionaries in its shape), any iterable, a function without
    arguments that returns a fresh iterator, or an iterator, which can be read once (`one_shot`); or a data frame of
    pandas or polars. `fields` maps the columns of rows, `examples` go before each question.
    """

    def __init__(
        self,
        id: str,
        cases: Cases,
        *,
        system_prompt: str | None = None,
        fields: Mapping[str, str] | None = None,
        examples: Examples | None = None,
    ) -> None:
        rows: Any = cases
        if is_frame(cases):
            source = MemorySource(FrameRows(cases), arrange=frame_columns(arrangement(fields)))
        else:
            source = MemorySource(rows, arrange=None if fields is None else arrangement(fields))
        self._set_up(id, source, system_prompt, examples)

    def _set_up(self, id: str, source: Source, system_prompt: str | None, examples: Examples | None) -> None:
        if not isinstance(id, str) or not id:
            raise ConfigurationError(f"a suite's id must be text and not empty, got {id!r}")
        if system_prompt is not None and not isinstance(system_prompt, str):
            raise ConfigurationError(f"system_prompt must be text, got {system_prompt!r}")
        self.id = id
        self.system_prompt = system_prompt
        self._source = source
        self._examples = examples
        self._prompt: CasePrompt | None = None

    @classmethod
    def from_source(
        cls, id: str, source: Source, system_prompt: str | None = None, examples: Examples | None = None
    ) -> EvalSet:
        """Create a suite over any source of cases."""
        suite = cls.__new__(cls)
        suite._set_up(id, source, system_prompt, examples)
        return suite

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        id: str | None = None,
        fields: Mapping[str, str] | None = None,
        system_prompt: str | None = None,
    ) -> EvalSet:
        """Read the cases of a file of any known kind, by the ending of its name; the id is its stem unless given."""
        source = file_source(Path(path), arrangement(fields))
        return cls.from_source(Path(path).name.partition(".")[0] if id is None else id, source, system_prompt)

    @classmethod
    def from_jsonl(
        cls,
        path: str | Path,
        id: str | None = None,
        fields: Mapping[str, str] | None = None,
        system_prompt: str | None = None,
    ) -> EvalSet:
        """Read the cases of a JSONL file, one object a line; the id is the file's stem unless given."""
        source = JsonlSource(path, arrangement(fields))
        return cls.from_source(Path(path).stem if id is None else id, source, system_prompt)

    @classmethod
    def from_csv(
        cls,
        path: str | Path,
        id: str | None = None,
        fields: Mapping[str, str] | None = None,
        system_prompt: str | None = None,
    ) -> EvalSet:
        """Read the cases of a CSV file with a header; the id is the file's stem unless given."""
        source = CsvSource(path, arrangement(fields))
        return cls.from_source(Path(path).stem if id is None else id, source, system_prompt)

    @classmethod
    def from_spool(cls, path: Path, id: str) -> EvalSet:
        """Read cases that `spool` wrote: what they attach was checked when they were read first."""
        return cls.from_source(id, JsonlSource(path, by_name, AttachmentFolder(path.parent)))

    @classmethod
    def from_yaml(cls, path: str | Path) -> EvalSet:
        """Read the cases of a suite file, with its id and system prompt; its target and scorers are ignored."""
        from steelyard.suite.suite_file import read_suite_file

        return read_suite_file(path).cases

    @property
    def one_shot(self) -> bool:
        """Whether the cases can be read only once."""
        return self._source.one_shot

    @property
    def settled(self) -> bool:
        """Whether reading twice is sure to give the same cases."""
        return self._source.settled

    @property
    def path(self) -> Path | None:
        """The file the cases come from, if any."""
        return self._source.path

    def __repr__(self) -> str:
        return f"EvalSet(id={self.id!r}, cases from {self.path or 'memory'})"

    def __iter__(self) -> Iterator[EvalCase]:
        return (case for _, case in self.numbered(Occurrences()))

    def numbered(self, occurrences: Occurrences, marks: Marks | None = None) -> Iterator[Placed]:
        """Yield the cases with ids, each with its line if it has one; `occurrences` numbers equal ones.

        `marks` collects digests of the blocks that are read, if the source reads blocks.
        """
        as_read = self._examples is None and self._prompt is None
        for index, placed in enumerate(self._source.read(marks)):
            line, case = placed
            if case.id and (self.system_prompt is None or case.system_prompt is not None) and as_read:
                yield placed
                continue
            try:
                complete = self._completed(case, occurrences)
            except BadCase as error:
                raise self.problem(str(error), index, line) from error
            yield line, complete

    def with_prompt(self, prompt: CasePrompt) -> EvalSet:
        """The same cases, with the same ids, asked with this prompt."""
        suite = copy(self)
        suite._prompt = prompt
        if prompt.system_prompt is not None:
            suite.system_prompt = prompt.system_prompt
        return suite

    def problem(self, message: str, index: int, line: int | None) -> SuiteError:
        """Return a problem with one case as an error that names its place."""
        return self._source.problem(message, index, line)

    def spool(self, path: str | Path, limit: int | None = None) -> EvalSet:
        """Write the cases (or the first `limit`), complete with ids, atomically to a JSONL file; return its EvalSet."""
        path = Path(path)
        draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
        try:
            with draft.open("wb") as file:
                for index, (line, case) in enumerate(islice(self.numbered(Occurrences()), limit)):
                    try:
                        file.write(as_json(case).encode() + b"\n")
                    except BadCase as error:
                        raise self.problem(str(error), index, line) from error
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        sync_directory(path.parent)
        return EvalSet.from_spool(path, self.id)

    def _completed(self, case: EvalCase, occurrences: Occurrences) -> EvalCase:
        """Return a copy of the case with an id and a system prompt.

        An automatic id leaves the suite's prompts out, so that runs with others can be compared.
        """
        complete = copy(case)
        if not case.id:
            digest = content_digest(case)
            complete.id = f"{digest:012x}-{occurrences.count(digest)}"
        if case.system_prompt is None:
            complete.system_prompt = self.system_prompt
        if self._examples is not None:
            complete = self._examples.add_to(complete)
        return complete if self._prompt is None else self._prompt.apply(complete)


def arrangement(fields: Mapping[str, str] | None) -> Arrange:
    """Return how a row's columns become a case's fields: by name, or by the templates in `fields`."""
    if fields is None:
        return by_name
    from steelyard.suite.templates import FieldTemplates

    return FieldTemplates(fields)
