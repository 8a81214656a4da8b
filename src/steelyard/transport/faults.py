"""What can go wrong on the wire, as kinds.

TransportError (transient: asking again may help)
├── CannotResolve        no address for the host: more often a resolver that is busy than a host that is not there
├── CannotConnect        nobody listens there, or no route, or no more sockets
├── TlsFailed            the handshake broke off
├── ProxyFailed          the proxy could not be reached, or could not reach the host
├── TimedOut             no connection within `connect_timeout`
├── ConnectionLost       closed before the answer was whole; `reply` is the part that came
└── MalformedReply       what came is not HTTP
TargetError (final: the next try would end the same way)
├── CertificateRefused   the server's certificate is not trusted, or the CA bundle cannot be read
├── ProxyRefused         the proxy wants other credentials, or does not allow the host
├── ResponseTooLarge     longer than `max_response_bytes`
└── RequestRefused       a URL or header that must not be sent
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from steelyard.contracts import HttpReply
from steelyard.errors import TargetError, TransportError

_CREDENTIALS = re.compile(r"//[^/\s@]*@")


class CannotResolve(TransportError):
    """No address was found for the host."""


class CannotConnect(TransportError):
    """No connection could be made."""


class TlsFailed(TransportError):
    """The TLS handshake broke off."""


class ProxyFailed(TransportError):
    """The proxy could not be reached, or could not reach the host."""


class TimedOut(TransportError):
    """No connection was there in time."""


class ConnectionLost(TransportError):
    """The connection was closed before the answer was whole."""


class MalformedReply(TransportError):
    """What came back is not HTTP."""


class CertificateRefused(TargetError):
    """The server's certificate is not trusted."""


class ProxyRefused(TargetError):
    """The proxy will not pass this request on."""


class ResponseTooLarge(TargetError):
    """The answer was longer than is allowed."""


class RequestRefused(TargetError):
    """A request that must not be sent as it is."""


# By libcurl's numbers, which never change: pycurl has names for some of them only.
_TRANSIENT: dict[int, tuple[type[TransportError], str]] = {
    6: (CannotResolve, "cannot resolve"),  # COULDNT_RESOLVE_HOST
    7: (CannotConnect, "cannot connect to"),  # COULDNT_CONNECT
    35: (TlsFailed, "no TLS connection with"),  # SSL_CONNECT_ERROR
    5: (ProxyFailed, "no proxy to"),  # COULDNT_RESOLVE_PROXY
    97: (ProxyFailed, "the proxy failed on the way to"),  # PROXY
    28: (TimedOut, "no connection in time with"),  # OPERATION_TIMEDOUT
    52: (ConnectionLost, "no answer from"),  # GOT_NOTHING
    65: (ConnectionLost, "no answer from"),  # SEND_FAIL_REWIND: libcurl wanted to send it again, and could not
    18: (ConnectionLost, "the answer broke off from"),  # PARTIAL_FILE
    56: (ConnectionLost, "the connection was lost with"),  # RECV_ERROR
    55: (ConnectionLost, "the connection was lost with"),  # SEND_ERROR
    1: (MalformedReply, "not HTTP from"),  # UNSUPPORTED_PROTOCOL
    8: (MalformedReply, "not HTTP from"),  # WEIRD_SERVER_REPLY
    61: (MalformedReply, "an answer that cannot be decoded from"),  # BAD_CONTENT_ENCODING
}
_FINAL: dict[int, tuple[type[TargetError], str]] = {
    60: (CertificateRefused, "will not trust"),  # PEER_FAILED_VERIFICATION
    77: (CertificateRefused, "cannot read the CA bundle to check"),  # SSL_CACERT_BADFILE
    83: (CertificateRefused, "will not trust"),  # SSL_ISSUER_ERROR
    63: (ResponseTooLarge, "too long an answer from"),  # FILESIZE_EXCEEDED
    3: (RequestRefused, "cannot use the URL of"),  # URL_MALFORMAT
}
_KEPT_CONNECTION_DIED = 65
_MALFORMED_CHUNK = re.compile(r"chunk", re.IGNORECASE)


def fault(code: int, words: str, url: str, reply: HttpReply | None, *, proxy_status: int = 0) -> TargetError:
    """The error that libcurl's code stands for: our words and its own, the host but no credentials."""
    words = _CREDENTIALS.sub("//", words) or f"error {code} of libcurl"
    if code == _KEPT_CONNECTION_DIED:
        words = "it closed a kept connection when the request was sent"
    if reply is None and proxy_status >= 300:
        return _proxy_fault(proxy_status, words, url)
    if code in _FINAL:
        final, lead = _FINAL[code]
        return final(f"{lead} {origin(url)}: {words}")
    kind, lead = _TRANSIENT.get(code, (TransportError, "no whole answer from"))
    if kind is ConnectionLost and _MALFORMED_CHUNK.search(words):
        kind, lead = MalformedReply, "not HTTP from"
    return kind(f"{lead} {origin(url)}: {words}{_so_far(reply)}", reply=reply)


def _proxy_fault(status: int, words: str, url: str) -> TargetError:
    message = f"the proxy answered {status} on the way to {origin(url)}: {words}"
    return ProxyFailed(message) if status >= 500 or status in (408, 429) else ProxyRefused(message)


def _so_far(reply: HttpReply | None) -> str:
    if reply is None:
        return ""
    return f" (after status {reply.status} and {sum(map(len, reply.chunks)):,} bytes)"


def origin(url: str) -> str:
    """Scheme, host and port of a URL: what may be told of it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "that URL"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
