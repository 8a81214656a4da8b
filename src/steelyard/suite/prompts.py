"""Prompts that a suite is asked with in turn: another system prompt, or a template around each case's question."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from steelyard.case_templates import CaseTemplate
from steelyard.errors import ConfigurationError, reject_unknown
from steelyard.records import EvalCase
from steelyard.suite.identity import BadCase

KEYS = ("system_prompt", "prompt")
_MAX_FILE = 10_000_000
"""Bytes of a prompt's file."""


class CasePrompt:
    """A way to ask the cases of a suite: a system prompt in place of the suite's, a template for the question, or both.

    The template sees the case: `{{ prompt }}`, `{{ metadata.x }}`. Of a case whose messages end with the user's turn,
    and that has no prompt, that turn is the question.
    """

    def __init__(self, system_prompt: str | None = None, prompt: str | None = None, *, where: str = "prompt") -> None:
        if system_prompt is None and prompt is None:
            raise ConfigurationError(f"{where} must have a system_prompt, a prompt, or both")
        if system_prompt is not None and not isinstance(system_prompt, str):
            raise ConfigurationError(f"{where}.system_prompt must be text, got {system_prompt!r}")
        self.system_prompt = system_prompt
        self._where = where
        self._template = None if prompt is None else CaseTemplate(prompt, f"{where}.prompt")
        if self._template is not None and self._template.is_constant:
            raise ConfigurationError(
                f"{where}.prompt would ask the same of every case: put the case's question in it, as {{{{ prompt }}}}"
            )

    def apply(self, case: EvalCase) -> EvalCase:
        """The case with its question in the template; BadCase where that cannot be done."""
        if self._template is None:
            return case
        if case.prompt is not None:
            return msgspec.structs.replace(case, prompt=self._render(case))
        *before, last = case.messages or [{}]
        if last.get("role") != "user" or not isinstance(last.get("content"), str):
            raise BadCase(f"{self._where}.prompt needs a prompt in the case, or messages that end with the user's text")
        asked = self._render(msgspec.structs.replace(case, prompt=last["content"], messages=before))
        return msgspec.structs.replace(case, messages=[*before, {**last, "content": asked}])

    def _render(self, case: EvalCase) -> str:
        assert self._template is not None
        try:
            return self._template.render(case)
        except ConfigurationError as error:
            raise BadCase(str(error)) from error


def read_prompts(given: object, folder: Path) -> dict[str, CasePrompt]:
    """The prompts of a suite by their names; ConfigurationError says what is wrong with one."""
    if not isinstance(given, Mapping) or not given:
        raise ConfigurationError(f"prompts must be a mapping of names to prompts, got {given!r}")
    return {str(name): _read_prompt(one, f"prompts.{name}", folder) for name, one in given.items()}


def _read_prompt(given: Any, where: str, folder: Path) -> CasePrompt:
    """A prompt: as it is, a mapping, or a text file, which is a template if it has `{{` and else a system prompt."""
    if isinstance(given, CasePrompt):
        return given
    if isinstance(given, Mapping):
        reject_unknown(given, KEYS, where)
        return CasePrompt(given.get("system_prompt"), given.get("prompt"), where=where)
    if not isinstance(given, str | Path):
        raise ConfigurationError(f"{where} must be a text file's path, or a mapping with {' or '.join(KEYS)}")
    text = _read_file(folder / given, where).removesuffix("\n")
    return CasePrompt(prompt=text, where=where) if "{{" in text else CasePrompt(text, where=where)


def _read_file(path: Path, where: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE + 1)
        if len(content) > _MAX_FILE:
            raise ConfigurationError(f"{where}: {path} is larger than {_MAX_FILE:,} bytes")
        return content.decode("utf-8-sig")
    except OSError as error:
        words = "for the words themselves write a mapping, {system_prompt: …} or {prompt: …}"
        raise ConfigurationError(f"{where}: cannot read {path}: {error.strerror}; {words}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{where}: {path} is not UTF-8 text") from error
