"""Secrets: text that must not be shown, logged, written or sent anywhere but to its endpoint.

Also what a record keeps of an exception: the frames of the user's code, bounded in size, with secrets masked.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import TracebackType
from typing import Any
from urllib.parse import quote, quote_plus

from steelyard.errors import describe

MASK = "***"
MIN_SECRET = 8
"""Shorter texts are not masked: they would be found in any answer."""
_CUT = 16
"""Characters that are enough to know a secret by its beginning; many keys share the first ten."""


class Secret:
    """A text that repr, str and tracebacks do not show."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text itself, only to be sent."""
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"


class Masker:
    """Replaces secrets in text, also where they are written as base64, percent-encoded or escaped for JSON.

    With `cut` also the beginnings of secrets: for texts that were shortened before they came here.
    """

    def __init__(self, secrets: Iterable[str], *, cut: bool = False) -> None:
        forms = {form for secret in secrets if len(secret) >= MIN_SECRET for form in _forms(secret)}
        ordered = sorted(forms, key=len, reverse=True)
        patterns = [re.escape(form) for form in ordered]
        if cut:
            patterns += [re.escape(form[:_CUT]) + r"[\w+/=%.~-]*" for form in ordered if len(form) > _CUT]
        self._pattern = re.compile("|".join(patterns), re.IGNORECASE) if forms else None
        self._lowered = tuple({form[:_CUT].lower() if cut else form.lower() for form in forms})
        self._shortest = min(map(len, self._lowered), default=0)
        self.longest = len(ordered[0]) if ordered else 0
        """Characters of the longest form of a secret; 0 where nothing is masked."""

    def finds(self, text: str) -> bool:
        """Whether a secret may be in the text: a quick look, as in most texts there is none."""
        if len(text) < self._shortest or not self._lowered:
            return False
        lowered = text.lower()
        for form in self._lowered:  # noqa: SIM110 - done for every answer, and quicker than `any`
            if form in lowered:
                return True
        return False

    def text(self, text: str) -> str:
        """The text with each secret in it masked; the same object where there is none."""
        return text if self._pattern is None or not self.finds(text) else self._pattern.sub(MASK, text)

    def value(self, value: Any) -> Any:
        """Text, lists and mappings (their keys too) with each secret masked; the same object where there is none."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            masked = {self.value(key): self.value(part) for key, part in value.items()}
            return masked if masked != value else value
        if isinstance(value, (list, tuple)):
            parts = [self.value(part) for part in value]
            return type(value)(parts) if any(a is not b for a, b in zip(parts, value, strict=True)) else value
        return value


_SECRET_NAME = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)


def environment_masker() -> Masker:
    """A masker of what the environment holds under names such as `OPENAI_API_KEY` or `DB_PASSWORD`."""
    return _masker_of(environment_secrets())


def environment_secrets() -> tuple[str, ...]:
    """What the environment holds under names of secrets."""
    return tuple(sorted(value for name, value in os.environ.items() if _SECRET_NAME.search(name)))


@lru_cache(maxsize=4)
def _masker_of(secrets: tuple[str, ...]) -> Masker:
    return Masker(secrets)


def _forms(secret: str) -> Iterator[str]:
    """How a secret may be written."""
    yield secret
    yield json.dumps(secret)[1:-1]
    yield quote(secret, safe="")
    yield quote_plus(secret)
    yield from _base64_forms(secret.encode("utf-8", "surrogatepass"))


def _base64_forms(secret: bytes) -> Iterator[str]:
    """The characters of base64 that the secret alone decides, at each of the three places where it may begin."""
    for shift in range(3):
        encoded = base64.b64encode(bytes(shift) + secret).decode()
        first, last = -(-shift * 8 // 6), (shift + len(secret)) * 8 // 6
        yield encoded[first:last]
        yield encoded[first:last].replace("+", "-").replace("/", "_")


MAX_TRACEBACK = 8_000
"""Characters that are kept of a traceback: its end, where the cause is."""

_MAX_FRAMES = 200
_MAX_CHAIN = 20
_CUT_LINES = "…\n"
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib")})


def user_traceback(error: BaseException) -> str | None:
    """The traceback of an exception and of its causes without Steelyard's own frames.

    None when there is no frame of anyone else's code: an endpoint's error is trace by its message.
    """
    try:
        if not _has_user_frame(error):
            return None
        trace = traceback.TracebackException.from_exception(error, limit=-_MAX_FRAMES, compact=True)
        _drop_own_frames(trace)
        text = environment_masker().text("".join(trace.format()).rstrip("\n"))
    except Exception:  # noqa: BLE001 - whatever an exception does when it is looked at, its record is written
        return None
    return text if len(text) <= MAX_TRACEBACK else _CUT_LINES + text[len(_CUT_LINES) - MAX_TRACEBACK :]


def masked_description(error: BaseException, max_length: int | None = None) -> str:
    """`Type: message` of an exception with secrets of the environment masked, cut to `max_length` if there is one."""
    return environment_masker().text(describe(error))[:max_length]


def _has_user_frame(error: BaseException) -> bool:
    """Whether code that is neither ours nor the standard library's was running, in it or in what caused it."""
    seen: list[BaseException] = [error]
    for one in seen:  # grows while it is read
        if _is_user_code(one.__traceback__):
            return True
        inner = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        for cause in (one.__cause__, one.__context__, *inner):
            if cause is not None and len(seen) < _MAX_CHAIN and not any(cause is known for known in seen):
                seen.append(cause)
    return False


def _is_user_code(frames: TracebackType | None) -> bool:
    while frames is not None:
        if _is_users(frames.tb_frame.f_code.co_filename):
            return True
        frames = frames.tb_next
    return False


@lru_cache(maxsize=4096)
def _is_users(file: str) -> bool:
    """Whether a file is the user's, or of a package that was installed."""
    if file.startswith(("<frozen", _OURS)):
        return False
    return file.startswith(_INSTALLED) or not file.startswith(_STANDARD)


def _drop_own_frames(trace: traceback.TracebackException) -> None:
    left = [trace]
    while left:
        one = left.pop()
        one.stack = traceback.StackSummary.from_list(
            [frame for frame in one.stack if not frame.filename.startswith(_OURS)]
        )
        left += [part for part in (one.__cause__, one.__context__, *(one.exceptions or ())) if part is not None]
