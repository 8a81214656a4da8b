"""Which path means what: the three APIs, at the providers' own paths and at Azure's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache

import msgspec

from steelyard.mock import chat, failures, messages, responses
from steelyard.mock.answer import Answer


class Dialect(msgspec.Struct, frozen=True):
    """One provider's way of answering."""

    path: str
    id_header: bytes
    whole: Callable[[Answer], bytes]
    frames: Callable[[Answer], Iterator[bytes]]
    broken: Callable[[str], bytes]
    failure: Callable[[int, str, str], bytes]


class Route(msgspec.Struct, frozen=True):
    """What is at a path: an API, or a page of the mock's own."""

    path: str
    methods: tuple[str, ...]
    dialect: Dialect | None = None
    model: str | None = None
    """The deployment that an Azure path names, or the model that is asked about."""


_OPENAI = (b"x-request-id", failures.openai_failure)
CHAT = Dialect("/v1/chat/completions", _OPENAI[0], chat.whole, chat.frames, chat.broken, _OPENAI[1])
RESPONSES = Dialect("/v1/responses", _OPENAI[0], responses.whole, responses.frames, responses.broken, _OPENAI[1])
MESSAGES = Dialect(
    "/v1/messages", b"request-id", messages.whole, messages.frames, messages.broken, failures.anthropic_failure
)

_APIS = {"chat/completions": CHAT, "responses": RESPONSES, "messages": MESSAGES}
_API = re.compile(
    r"(?:/v1|/openai/v1|/openai/deployments/(?P<model>[^/]+)|/openai|/anthropic/v1)?/(?P<api>chat/completions|responses|messages)"
)
_MODELS = re.compile(r"(?:/openai)?/v1/models(?:/(?P<model>.+))?")
_PAGES = {"/stats": ("GET", "HEAD"), "/health": ("GET", "HEAD"), "/stats/reset": ("POST",)}


@lru_cache(maxsize=1024)
def route(path: str) -> Route | None:
    """What is at this path; None where nothing is."""
    if found := _API.fullmatch(path):
        dialect = _APIS[found["api"]]
        return Route(dialect.path, ("POST",), dialect, found["model"])
    if found := _MODELS.fullmatch(path):
        return Route("/v1/models", ("GET", "HEAD"), None, found["model"])
    return Route(path, _PAGES[path]) if path in _PAGES else None
