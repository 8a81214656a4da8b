"""The answer book: what the right answer to a prompt is, from a JSONL file such as a suite's own cases."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from steelyard.errors import SuiteError
from steelyard.mock.asked import texts

_PROMPTS = ("prompt", "question", "messages")
_ANSWERS = ("answer", "expected")
_WRONG = ("I do not know.", "?", "-")


class AnswerBook:
    """Finds the answer to a prompt: one that is known, or one that contains a known prompt, as templates make them."""

    def __init__(self, answers: dict[str, str]) -> None:
        self._answers = answers
        self._longest_first = sorted(answers, key=len, reverse=True)

    def right(self, prompt: str) -> str | None:
        """The right answer, where the book has one."""
        prompt = prompt.strip()
        found = self._answers.get(prompt)
        if found is None and prompt:
            known = next((one for one in self._longest_first if one in prompt), None)
            return None if known is None else self._answers[known]
        return found


def wrong_answer(right: str) -> str:
    """An answer that does not contain the right one, so that a lenient scorer finds it wrong as well."""
    folded = right.casefold()
    return next((one for one in _WRONG if not folded or folded not in one.casefold()), "#")


def read_book(path: str | os.PathLike[str]) -> AnswerBook:
    """The book in a file: one JSON object a line, with `prompt` and `answer`, or a case's `expected`."""
    return AnswerBook(dict(_entries(Path(path))))


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _entry(line, path, number)
    except OSError as error:
        raise SuiteError(f"cannot read the answers: {error.strerror}", path=path) from error


def _entry(line: bytes, path: Path, number: int) -> tuple[str, str]:
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SuiteError(f"not a JSON object: {error}", path=path, line=number) from error
    prompt = next((record[name] for name in _PROMPTS if record.get(name)), None)
    answer = next((record[name] for name in _ANSWERS if record.get(name) is not None), None)
    if isinstance(prompt, list):
        prompt = next(("".join(texts(turn.get("content"))) for turn in reversed(prompt) if _is_users(turn)), None)
    if not isinstance(prompt, str) or answer is None:
        raise SuiteError("an answer needs `prompt` (text) and `answer` or `expected`", path=path, line=number)
    if isinstance(answer, list) and answer:
        answer = answer[0]
    return prompt.strip(), answer if isinstance(answer, str) else msgspec.json.encode(answer).decode()


def _is_users(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "user"
