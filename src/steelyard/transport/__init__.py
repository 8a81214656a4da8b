"""The one HTTP seam: sends requests over pooled connections, reads streams, says what an error means."""

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
        failure,
        request_id,
        retry_after,
    )
    from steelyard.transport.sse import Event, events

_FAULTS = (
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
    "Event": "steelyard.transport.sse",
    "events": "steelyard.transport.sse",
    "error_message": "steelyard.transport.errors",
    "failure": "steelyard.transport.errors",
    "request_id": "steelyard.transport.errors",
    "retry_after": "steelyard.transport.errors",
    **dict.fromkeys(_FAULTS, "steelyard.transport.errors"),
}

__all__ = [
    "CannotConnect",
    "CannotResolve",
    "CertificateRefused",
    "ConnectionLost",
    "CurlTransport",
    "Event",
    "MalformedReply",
    "ProxyFailed",
    "ProxyRefused",
    "RequestRefused",
    "ResponseTooLarge",
    "TimedOut",
    "TlsFailed",
    "error_message",
    "events",
    "failure",
    "request_id",
    "retry_after",
]

# Loading libcurl and its TLS library takes longer than the rest of a start: only a run that goes over a wire pays.
__getattr__ = lazy_exports(__name__, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
