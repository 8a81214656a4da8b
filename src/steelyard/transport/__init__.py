"""HTTP transport: requests over a pool of connections, server-sent events, and errors as retryable or final."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard._lazy import lazy_exports

if TYPE_CHECKING:
    from steelyard.transport.client import CurlTransport
    from steelyard.transport.errors import (
        CannotConnect,
        CannotResolve,
        CertificateRefused,
        ConnectionLost,
        MalformedReply,
        ProxyFailed,
        ProxyRefused,
        RequestRefused,
        ResponseTooLarge,
        TimedOut,
        TlsFailed,
        error_message,
        request_id,
        retry_after,
        status_error,
    )
    from steelyard.transport.sse import ServerSentEvent, events

_ERRORS = (
    "CannotConnect",
    "CannotResolve",
    "CertificateRefused",
    "ConnectionLost",
    "MalformedReply",
    "ProxyFailed",
    "ProxyRefused",
    "RequestRefused",
    "ResponseTooLarge",
    "TimedOut",
    "TlsFailed",
)
_HOMES = {
    "CurlTransport": "steelyard.transport.client",
    "ServerSentEvent": "steelyard.transport.sse",
    "events": "steelyard.transport.sse",
    "error_message": "steelyard.transport.errors",
    "status_error": "steelyard.transport.errors",
    "request_id": "steelyard.transport.errors",
    "retry_after": "steelyard.transport.errors",
    **dict.fromkeys(_ERRORS, "steelyard.transport.errors"),
}

__all__ = [
    "CannotConnect",
    "CannotResolve",
    "CertificateRefused",
    "ConnectionLost",
    "CurlTransport",
    "MalformedReply",
    "ProxyFailed",
    "ProxyRefused",
    "RequestRefused",
    "ResponseTooLarge",
    "ServerSentEvent",
    "TimedOut",
    "TlsFailed",
    "error_message",
    "events",
    "request_id",
    "retry_after",
    "status_error",
]

# libcurl and its TLS library are slow to import: only a run that uses the network loads them.
__getattr__ = lazy_exports(__name__, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
