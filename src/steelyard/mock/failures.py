"""Errors in the words of the provider whose API was called."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

_OPENAI = {
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("invalid_request_error", "model_not_found"),
    429: ("requests", "rate_limit_exceeded"),
}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def openai_failure(status: int, message: str, request_id: str) -> bytes:  # noqa: ARG001 - theirs is in a header alone
    """An error body as OpenAI writes it."""
    kind, code = _OPENAI.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


def anthropic_failure(status: int, message: str, request_id: str) -> bytes:
    """An error body as Anthropic writes it."""
    kind = _ANTHROPIC.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": message}
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})


def reason_phrase(status: int) -> str:
    """The words after a status on its line."""
    if status == 529:
        return "Overloaded"
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
