"""Transport errors, from libcurl's codes and from HTTP statuses: which are retryable, and after how long.

TransportError (retryable)
├── CannotResolve        no address for the host: more often a busy resolver than a host that does not exist
├── CannotConnect        connection refused, no route, or no more sockets
├── TlsFailed            the handshake broke off
├── ProxyFailed          the proxy could not be reached, or could not reach the host
├── TimedOut             no connection within `connect_timeout`
├── ConnectionLost       closed before the reply was complete; `reply` is the part that arrived
└── MalformedReply       the reply is not HTTP
TargetError (final: a retry would fail in the same way)
├── CertificateRefused   the server's certificate is not trusted, or the CA bundle cannot be read
├── ProxyRefused         the proxy requires other credentials, or does not allow the host
├── ResponseTooLarge     longer than `max_response_bytes`
└── RequestRefused       a URL or header that must not be sent

An HTTP error status is a TransientError (408, 409, 425, 429, 5xx) or a TargetError: see `status_error`.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import msgspec

from steelyard.errors import TargetError, TransientError, TransportError
from steelyard.protocols import HttpReply
from steelyard.transport.sse import events

_CREDENTIALS = re.compile(r"//[^/\s@]*@")

_KEPT_CONNECTION_DIED = 65
_MALFORMED_CHUNK = re.compile(r"chunk", re.IGNORECASE)

_RETRYABLE_STATUSES = frozenset({408, 409, 425, 429, 498})
_OVERLOADED_STATUSES = frozenset({429, 498, 503, 529})
"""498 is Groq's: no capacity left for the flex tier."""
_NO_CREDIT = frozenset({"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"})
"""Error codes sent with status 429 that are not retryable: the account has no credit left."""
_PER_DAY = re.compile(r"per[-_ ]?day", re.IGNORECASE)
_FILTERED = frozenset({"content_filter", "content_policy_violation", "responsibleaipolicyviolation"})
"""Names of a refusal by a content filter: Azure's and OpenAI's."""
_FILTERED_KINDS = frozenset({"data_inspection_failed", "datainspectionfailed"})
"""Alibaba's name for it."""
_FILTERED_MESSAGES = ("content exists risk", "flagged by our content filter", "considered high risk")
"""What DeepSeek, Azure's gateways and Moonshot say where they have no code for it."""
_REQUEST_IDS = ("x-request-id", "request-id", "apim-request-id", "x-ms-request-id", "x-amzn-requestid")

_MAX_TEXT = 300
_MAX_MESSAGE = 2_000
_MAX_PAGE = 100_000
_TAG = re.compile(r"<(/?)([a-z]*)[^<>]*>", re.IGNORECASE)
_UNSEEN = frozenset({"script", "style"})


class CannotResolve(TransportError):
    """No address was found for the host."""


class CannotConnect(TransportError):
    """No connection could be made."""


class TlsFailed(TransportError):
    """The TLS handshake broke off."""


class ProxyFailed(TransportError):
    """The proxy could not be reached, or could not reach the host."""


class TimedOut(TransportError):
    """No connection within the connect timeout."""


class ConnectionLost(TransportError):
    """The connection was closed before the reply was complete."""


class MalformedReply(TransportError):
    """The reply is not HTTP."""


class CertificateRefused(TargetError):
    """The server's certificate is not trusted."""

    topic = "certificate"


class ProxyRefused(TargetError):
    """The proxy refuses to forward this request."""


class ResponseTooLarge(TargetError):
    """The reply was longer than `max_response_bytes`."""


class RequestRefused(TargetError):
    """The request has a URL, method or header that must not be sent."""


# libcurl's numbers, which never change: pycurl names only some of them.
_RETRYABLE_CODES: dict[int, tuple[type[TransportError], str]] = {
    6: (CannotResolve, "cannot resolve"),  # COULDNT_RESOLVE_HOST
    7: (CannotConnect, "cannot connect to"),  # COULDNT_CONNECT
    35: (TlsFailed, "no TLS connection with"),  # SSL_CONNECT_ERROR
    5: (ProxyFailed, "no proxy to"),  # COULDNT_RESOLVE_PROXY
    97: (ProxyFailed, "the proxy failed on the way to"),  # PROXY
    28: (TimedOut, "no connection in time with"),  # OPERATION_TIMEDOUT
    52: (ConnectionLost, "no answer from"),  # GOT_NOTHING
    65: (ConnectionLost, "no answer from"),  # SEND_FAIL_REWIND: libcurl wanted to resend the body, and could not
    18: (ConnectionLost, "the answer broke off from"),  # PARTIAL_FILE
    56: (ConnectionLost, "the connection was lost with"),  # RECV_ERROR
    55: (ConnectionLost, "the connection was lost with"),  # SEND_ERROR
    1: (MalformedReply, "not HTTP from"),  # UNSUPPORTED_PROTOCOL
    8: (MalformedReply, "not HTTP from"),  # WEIRD_SERVER_REPLY
    61: (MalformedReply, "an answer that cannot be decoded from"),  # BAD_CONTENT_ENCODING
}


_FINAL_CODES: dict[int, tuple[type[TargetError], str]] = {
    60: (CertificateRefused, "will not trust"),  # PEER_FAILED_VERIFICATION
    77: (CertificateRefused, "cannot read the CA bundle to check"),  # SSL_CACERT_BADFILE
    83: (CertificateRefused, "will not trust"),  # SSL_ISSUER_ERROR
    63: (ResponseTooLarge, "too long an answer from"),  # FILESIZE_EXCEEDED
    3: (RequestRefused, "cannot use the URL of"),  # URL_MALFORMAT
}


def curl_error(code: int, words: str, url: str, reply: HttpReply | None, *, proxy_status: int = 0) -> TargetError:
    """Return the error for libcurl's code, with the host but no credentials in its message."""
    words = _CREDENTIALS.sub("//", words) or f"error {code} of libcurl"
    if code == _KEPT_CONNECTION_DIED:
        words = "it closed a kept-alive connection when the request was sent"
    if reply is None and proxy_status >= 300:
        return _proxy_error(proxy_status, words, url)
    if code in _FINAL_CODES:
        final, lead = _FINAL_CODES[code]
        return final(f"{lead} {origin(url)}: {words}")
    kind, lead = _RETRYABLE_CODES.get(code, (TransportError, "no whole answer from"))
    if kind is ConnectionLost and _MALFORMED_CHUNK.search(words):
        kind, lead = MalformedReply, "not HTTP from"
    return kind(f"{lead} {origin(url)}: {words}{_so_far(reply)}", reply=reply)


def _proxy_error(status: int, words: str, url: str) -> TargetError:
    message = f"the proxy answered {status} on the way to {origin(url)}: {words}"
    return ProxyFailed(message) if status >= 500 or status in (408, 429) else ProxyRefused(message)


def _so_far(reply: HttpReply | None) -> str:
    if reply is None:
        return ""
    return f" (after status {reply.status} and {sum(map(len, reply.chunks)):,} bytes)"


def origin(url: str) -> str:
    """Return scheme, host and port of a URL: the part that may be shown."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "that URL"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def status_error(reply: HttpReply, *, provider_message: str | None = None) -> TargetError | TransientError:
    """Return the error for a reply with an error status; `provider_message` replaces the body's message.

    408, 409, 425, 429, 498 and every 5xx are retryable, unless the account is out of credit, a quota of the day is used
    up, or the server says whether to retry (`x-should-retry`). Of these 429, 498, 503 and 529 mean that the endpoint
    is overloaded.
    """
    payload = _payload(reply.body)
    kind = _kind(payload) or reply.headers.get("x-amzn-errortype", "").partition(":")[0] or None
    message = provider_message or _redirect(reply) or _message(payload) or _plain(reply.body) or "no message"
    identifier = request_id(reply.headers)
    text = f"HTTP {reply.status}{f' ({kind})' if kind else ''}: {message}"
    fields = [name for name in _named_fields(_error_object(payload)) if name not in message]
    if fields and reply.status in (400, 422):
        text += f" (parameter {', '.join(fields)})"
    if identifier:
        text += f" [request id {identifier}]"
    wait = retry_after(reply.headers)
    if not _is_retryable(reply, kind) or (wait is None and _is_daily_quota(reply.status, payload, message)):
        return TargetError(text)
    wait = _retry_delay(payload) if wait is None else wait
    return TransientError(text, retry_after=wait, overloaded=reply.status in _OVERLOADED_STATUSES)


def content_filter_message(reply: HttpReply) -> str | None:
    """Return what a content filter said that refused the request with status 400 or 403; None for any other reply."""
    if reply.status not in (400, 403):
        return None
    error = _error_object(_payload(reply.body))
    inner = error.get("innererror") or error.get("inner_error")
    kinds = {str(one.get(key)).lower() for one in (error, inner) if isinstance(one, dict) for key in ("code", "type")}
    message = _message(error) or ""
    metadata = error.get("metadata")
    moderated = isinstance(metadata, dict) and "reasons" in metadata and "flagged_input" in metadata  # OpenRouter's
    if (
        moderated
        or not kinds.isdisjoint(_FILTERED | _FILTERED_KINDS)
        or any(words in message.lower() for words in _FILTERED_MESSAGES)
    ):
        return message or "refused by a content filter"
    return None


def named_problem(body: bytes) -> str:
    """Return what an error body says of the request's fields: its message, and the field that it names."""
    payload = _payload(body)
    error = _error_object(payload)
    return " ".join([_message(payload) or _plain(body) or "", *_named_fields(error)])


def _named_fields(error: dict[str, Any]) -> list[str]:
    """Return the request's fields that an error names beside its message; Google's are among its details."""
    named = [str(error[key]) for key in ("param", "field", "failed_field") if error.get(key)]
    for detail in _google_details(error):
        violations = detail.get("fieldViolations")
        for one in violations if isinstance(violations, list) else ():
            if isinstance(one, dict) and one.get("field"):
                named.append(str(one["field"]))
    return list(dict.fromkeys(name[:200] for name in named))


def _error_object(payload: Any) -> dict[str, Any]:
    inner = payload.get("error") if isinstance(payload, dict) else None
    return inner if isinstance(inner, dict) else payload if isinstance(payload, dict) else {}


def _google_details(payload: Any) -> list[dict[str, Any]]:
    details = _error_object(payload).get("details")
    return [detail for detail in details if isinstance(detail, dict)] if isinstance(details, list) else []


def _retry_delay(payload: Any) -> float | None:
    """Return the seconds of Google's `RetryInfo`: `"retryDelay": "34.07s"`."""
    for detail in _google_details(payload):
        delay = detail.get("retryDelay")
        if isinstance(delay, str) and (seconds := _seconds(delay.removesuffix("s"))) is not None:
            return seconds
    return None


def _is_daily_quota(status: int, payload: Any, message: str) -> bool:
    """Whether a quota of the day is used up: no retry within a run would help."""
    if status != 429:
        return False
    violations = [detail.get("violations") for detail in _google_details(payload)]
    names = [
        str(one.get("quotaId"))
        for some in violations
        if isinstance(some, list)
        for one in some
        if isinstance(one, dict)
    ]
    return any(map(_PER_DAY.search, [*names, message]))


def _is_retryable(reply: HttpReply, kind: str | None) -> bool:
    should_retry = reply.headers.get("x-should-retry", "").lower()
    if should_retry in ("true", "false"):
        return should_retry == "true"
    if kind in _NO_CREDIT:
        return False
    return reply.status in _RETRYABLE_STATUSES or reply.status >= 500


def request_id(headers: Mapping[str, str]) -> str | None:
    """Return the provider's request id, if it sent one."""
    for name in _REQUEST_IDS:
        if found := headers.get(name):
            return found[:200]
    return None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait before a retry, as the endpoint asked; None without a valid `Retry-After`.

    A date is taken relative to the reply's `Date` where there is one, so that a wrong local clock does no harm.
    """
    milliseconds = _seconds(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    seconds = _seconds(value)
    if seconds is not None or value is None:
        return seconds
    moment, now = _moment(value), _moment(headers.get("date")) or datetime.now(UTC)
    return (moment - now).total_seconds() if moment is not None and moment >= now else None


def _seconds(value: str | None) -> float | None:
    try:
        seconds = float(value) if value is not None else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _moment(value: str | None) -> datetime | None:
    try:
        moment = parsedate_to_datetime(value) if value else None
    except (ValueError, OverflowError):
        return None
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment


def error_message(body: bytes) -> str | None:
    """Return the message of an error body from any provider: JSON in its many shapes, plain text, or HTML."""
    return _message(_payload(body)) or _plain(body)


def _payload(body: bytes) -> Any:
    """Decode the body as JSON, or return None; of a list, as some gateways send, its first element.

    A server that was asked for a stream may send its error as an event.
    """
    if body.lstrip().startswith((b"data:", b"event:")):
        body = next((event.data for event in events([body], [0.0]) if event.data.lstrip().startswith(b"{")), body)
    try:
        payload = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return payload[0] if isinstance(payload, list) and payload else payload


def _message(payload: Any) -> str | None:
    """Return the message inside a JSON error body: under `error`, `message` or `detail`, at any depth."""
    if isinstance(payload, str):
        return payload.strip()[:_MAX_MESSAGE] or None
    if not isinstance(payload, dict):
        return None
    for key in ("error", "message", "detail", "msg"):
        message = _details(payload[key]) if isinstance(payload.get(key), list) else _message(payload.get(key))
        if message:
            return message
    return None


def _details(problems: list[Any]) -> str | None:
    """Return a validator's list of problems in one line: the place and message of each."""
    parts = []
    for problem in problems[:5]:
        message = _message(problem)
        place = problem.get("loc") if isinstance(problem, dict) else None
        if message:
            parts.append(f"{'.'.join(map(str, place))}: {message}" if isinstance(place, list) else message)
    return "; ".join(parts)[:_MAX_MESSAGE] or None


def _kind(payload: Any) -> str | None:
    """Return the provider's name for the kind of error: its code where that is a word, else its type."""
    inner = payload.get("error", payload) if isinstance(payload, dict) else None
    if not isinstance(inner, dict):
        inner = payload if isinstance(payload, dict) else {}
    kinds = [inner.get("code"), inner.get("type"), inner.get("status"), inner.get("__type")]
    return next((kind[:100] for kind in kinds if isinstance(kind, str) and kind and not kind.isdigit()), None)


def _plain(body: bytes) -> str | None:
    """Return the first words of a body that is not JSON, without HTML tags."""
    text = body[:_MAX_PAGE].decode("utf-8", "replace")
    if "<" in text:
        text = html.unescape(_without_tags(text))
    return " ".join(text.split())[:_MAX_TEXT] or None


def _without_tags(page: str) -> str:
    """Return the text of an HTML page, without scripts and style sheets."""
    words = []
    position, unseen = 0, False
    for tag in _TAG.finditer(page):
        if not unseen:
            words.append(page[position : tag.start()])
        position = tag.end()
        if tag[2].lower() in _UNSEEN:
            unseen = not tag[1]
    return " ".join([*words, "" if unseen else page[position:]])


def _redirect(reply: HttpReply) -> str | None:
    """Return the redirect's message: redirects are not followed, as the key would be sent along."""
    place = reply.headers.get("location")
    if not 300 <= reply.status < 400 or place is None:
        return None
    return f"redirected to {place.partition('?')[0][:_MAX_TEXT]}, which is not followed: put it in base_url"
