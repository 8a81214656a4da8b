"""The arguments of an endpoint, checked before anything is called."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

from steelyard.errors import ConfigurationError

Headers: TypeAlias = tuple[tuple[str, str], ...]

_SECRET_LENGTH = 8
"""Shorter values are too common to be taken out of a text: `1`, `true`, `beta`."""

_is_header_name = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch


def check_texts(*, model: object, **others: object) -> None:
    """Refuse what is no text; only the model must be there. A proxy may have a password in it, and is not shown."""
    if not isinstance(model, str) or not model.strip():
        raise ConfigurationError(f"model must be a text that is not empty, got {model!r}")
    for name, value in others.items():
        if value is not None and not isinstance(value, str):
            raise ConfigurationError(f"{name} must be text, got {type(value).__name__}: put it in quotes")


def check_counts(**counts: object) -> None:
    """Refuse what is no whole number from 1 on."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigurationError(f"{name} must be >= 1, got {value!r}")


def check_switches(**switches: object) -> None:
    """Refuse what is neither true nor false: `"false"`, for one, would count as true."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name} must be true or false, got {value!r}")


def checked_params(params: Mapping[str, Any] | None, reserved: Collection[str]) -> dict[str, Any]:
    """More fields of the body, as plain JSON; those that have a place of their own are refused."""
    if params is not None and not isinstance(params, Mapping):
        raise ConfigurationError(f"params must be a mapping, got {params!r}")
    for name in params or {}:
        if name in reserved:
            raise ConfigurationError(f"params cannot set {name!r}: it comes from the target's arguments or the case")
    try:
        checked: dict[str, Any] = json.loads(json.dumps(dict(params or {}), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"params cannot be written as JSON: {error}") from error
    return checked


def checked_headers(headers: Mapping[str, str] | None) -> Headers:
    """Extra headers; their values may be secrets, so that errors name only the header."""
    if headers is not None and not isinstance(headers, Mapping):
        raise ConfigurationError(f"headers must be a mapping of names to texts, got {type(headers).__name__}")
    checked = []
    for name, value in (headers or {}).items():
        if not isinstance(name, str) or not _is_header_name(name):
            raise ConfigurationError(f"headers has an impossible name: {name!r}")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigurationError(f"headers[{name!r}] must be text, got {type(value).__name__}")
        text = str(value).strip()
        if not all(character == "\t" or character.isprintable() for character in text):
            raise ConfigurationError(f"headers[{name!r}] has a line break or another control character in it")
        checked.append((name, text))
    return tuple(checked)


def scrubbed(text: str, secrets: Iterable[str]) -> str:
    """The text with each secret in it blotted out, also where only its part after `Bearer ` stands there."""
    for secret in secrets:
        for part in {secret, secret.rpartition(" ")[2]}:
            if len(part) >= _SECRET_LENGTH:
                text = text.replace(part, "***")
    return text
