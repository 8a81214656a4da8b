"""The APIs that the mock serves: which one is at a path, how it encodes answers, and its error bodies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from http import HTTPStatus

import msgspec

from steelyard.mock.answers import ParsedRequest, SimulatedAnswer, parse_request
from steelyard.mock.dialects import bedrock, gemini, messages, openai
from steelyard.transport.sse import MEDIA_TYPE

EVENTS = b"text/event-stream; charset=utf-8"
_OPENAI_ERRORS = {
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("invalid_request_error", "model_not_found"),
    429: ("requests", "rate_limit_exceeded"),
}
_ANTHROPIC_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def openai_failure(status: int, message: str, request_id: str) -> bytes:  # noqa: ARG001 - OpenAI has it in a header only
    """Encode an error body in OpenAI's format."""
    kind, code = _OPENAI_ERRORS.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


def anthropic_failure(status: int, message: str, request_id: str) -> bytes:
    """Encode an error body in Anthropic's format."""
    kind = _ANTHROPIC_ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": message}
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})


def reason_phrase(status: int) -> str:
    """Return the phrase after a status on its line."""
    if status == 529:
        return "Overloaded"
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


class Dialect(msgspec.Struct, frozen=True):
    """How one API encodes answers and errors."""

    path: str
    id_header: bytes
    whole: Callable[[SimulatedAnswer], bytes]
    frames: Callable[[SimulatedAnswer], Iterator[bytes]]
    broken: Callable[[str], bytes]
    failure: Callable[[int, str, str], bytes]
    parse: Callable[[bytes], ParsedRequest] = parse_request
    stream_type: bytes = EVENTS


class MockRoute(msgspec.Struct, frozen=True):
    """What is at a path: an API, or one of the mock's own pages."""

    path: str
    methods: tuple[str, ...]
    dialect: Dialect | None = None
    model: str | None = None
    """The model that the path names: Azure's deployment, Gemini's or Bedrock's model, one of `/v1/models`."""
    stream: bool | None = None
    """Whether the path asks for a stream; None where the body says so."""
    counts: bool = False
    """Whether it counts a request's tokens instead of answering it."""


_OPENAI = (b"x-request-id", openai_failure)
CHAT = Dialect(
    "/v1/chat/completions", _OPENAI[0], openai.chat_whole, openai.chat_frames, openai.chat_broken, _OPENAI[1]
)
RESPONSES = Dialect(
    "/v1/responses", _OPENAI[0], openai.response_whole, openai.response_frames, openai.response_broken, _OPENAI[1]
)
MESSAGES = Dialect("/v1/messages", b"request-id", messages.whole, messages.frames, messages.broken, anthropic_failure)

COMPLETIONS = Dialect(
    "/v1/completions", _OPENAI[0], openai.completion_whole, openai.completion_frames, openai.chat_broken, _OPENAI[1]
)
GEMINI = Dialect(
    "/v1beta/models:generateContent",
    b"x-request-id",
    gemini.whole,
    gemini.frames,
    gemini.broken,
    gemini.failure,
    gemini.parse,
)
BEDROCK = Dialect(
    "/model/converse",
    b"x-amzn-requestid",
    bedrock.whole,
    bedrock.frames,
    bedrock.broken,
    bedrock.failure,
    bedrock.parse,
    MEDIA_TYPE.encode(),
)

_APIS = {"chat/completions": CHAT, "completions": COMPLETIONS, "responses": RESPONSES, "messages": MESSAGES}
_API = re.compile(
    r"(?:/v1|/openai/v1|/openai/deployments/(?P<model>[^/]+)|/openai|/anthropic/v1|/models)?"
    r"/(?P<api>chat/completions|completions|responses|messages(?P<counts>/count_tokens)?)"
)
_GEMINI = re.compile(
    r"(?:/v1(?:beta1?|alpha)?)?(?:/projects/[^/]+/locations/[^/]+)?(?:/publishers/[^/]+)?"
    r"/(?:models|tunedModels|endpoints)/(?P<model>[^/:]+):(?P<stream>stream)?[gG]enerateContent"
)
_BEDROCK = re.compile(r"/model/(?P<model>.+)/converse(?P<stream>-stream)?")
_MODELS = re.compile(r"(?:/openai)?/v1/models(?:/(?P<model>.+))?")
_PAGES = {"/stats": ("GET", "HEAD"), "/health": ("GET", "HEAD"), "/stats/reset": ("POST",)}


@lru_cache(maxsize=1024)
def route(path: str) -> MockRoute | None:
    """Find what is at a path; None if there is nothing."""
    if found := _API.fullmatch(path):
        dialect = _APIS[found["api"].removesuffix("/count_tokens")]
        counts = found["counts"] is not None
        return MockRoute(dialect.path + (found["counts"] or ""), ("POST",), dialect, found["model"], counts=counts)
    for pattern, dialect in ((_GEMINI, GEMINI), (_BEDROCK, BEDROCK)):
        if found := pattern.fullmatch(path):
            return MockRoute(dialect.path, ("POST",), dialect, found["model"], stream=found["stream"] is not None)
    if found := _MODELS.fullmatch(path):
        return MockRoute("/v1/models", ("GET", "HEAD"), None, found["model"])
    return MockRoute(path, _PAGES[path]) if path in _PAGES else None
