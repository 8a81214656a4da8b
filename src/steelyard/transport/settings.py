"""Settings of a transport's connections (HTTP version, proxy, certificates, timeouts), and checks of requests."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pycurl

from steelyard._version import __version__
from steelyard.errors import ConfigurationError
from steelyard.protocols import HttpRequest
from steelyard.transport.errors import RequestRefused, origin

_CA_VARIABLES = ("SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
_CA_PLACES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_SUPPRESS_CONNECT_HEADERS = 265  # libcurl's own number: pycurl has no name for it
_DNS_SECONDS = 300
MAX_IDLE_SECONDS = 4
"""A connection idle for longer is not reused: many servers close theirs after five seconds, and a request sent at that
moment is lost. Whether the server read it is unknown, so it is not resent unless the run retries."""

_URL = re.compile(r"https?://[^\x00-\x20\x7f\ud800-\udfff]+", re.IGNORECASE)
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]*")
_METHODS = frozenset({"DELETE", "GET", "PATCH", "POST", "PUT"})
_USER_AGENT = f"steelyard/{__version__}"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests of one transport share."""

    proxy: str | None = None
    """A proxy's URL; empty for no proxy; None for the environment's."""
    ca_bundle: str | None = None
    verify: bool = True
    connect_timeout: float = 30.0
    max_response_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        if not self.connect_timeout > 0:
            raise ConfigurationError(f"connect_timeout must be > 0, got {self.connect_timeout}")
        if self.max_response_bytes < 1:
            raise ConfigurationError(f"max_response_bytes must be >= 1, got {self.max_response_bytes}")
        if self.ca_bundle is not None and not Path(self.ca_bundle).exists():
            raise ConfigurationError(f"ca_bundle is neither a file nor a folder: {self.ca_bundle}")

    def options(self) -> Iterator[tuple[int, Any]]:
        """Yield libcurl's options for a reusable handle."""
        # HTTP/1.1: streams on one HTTP/2 connection share a flow-control window and block each other, so that times
        # would be mixed, and the number of connections would not be the parallelism.
        yield pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1
        yield pycurl.HTTP09_ALLOWED, 0
        yield pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS
        yield pycurl.FOLLOWLOCATION, 0  # a key must not follow a redirect to another host
        yield pycurl.NOSIGNAL, 1
        yield pycurl.TCP_NODELAY, 1
        yield pycurl.TCP_KEEPALIVE, 1
        yield pycurl.DNS_CACHE_TIMEOUT, _DNS_SECONDS
        yield pycurl.MAXAGE_CONN, MAX_IDLE_SECONDS
        yield pycurl.CONNECTTIMEOUT_MS, max(1, int(self.connect_timeout * 1000))
        yield pycurl.MAXFILESIZE_LARGE, self.max_response_bytes
        # No compression, as it delays tokens; a reply that is compressed all the same is decoded.
        yield pycurl.ACCEPT_ENCODING, "identity"
        yield _SUPPRESS_CONNECT_HEADERS, 1
        if self.proxy is not None:
            yield pycurl.PROXY, self.proxy.encode()
            yield pycurl.NOPROXY, ""  # an explicit proxy overrides the environment's exceptions
        yield from self._trust()

    def _trust(self) -> Iterator[tuple[int, Any]]:
        if not self.verify:
            for option in (pycurl.SSL_VERIFYPEER, pycurl.PROXY_SSL_VERIFYPEER):
                yield option, 0
            for option in (pycurl.SSL_VERIFYHOST, pycurl.PROXY_SSL_VERIFYHOST):
                yield option, 0
            return
        place = self.ca_bundle or trusted_certificates()
        if place is not None:
            folder = os.path.isdir(place)
            yield (pycurl.CAPATH if folder else pycurl.CAINFO), os.fsencode(place)
            yield (pycurl.PROXY_CAPATH if folder else pycurl.PROXY_CAINFO), os.fsencode(place)


def trusted_certificates() -> str | None:
    """Return where this machine keeps its trusted certificates: libcurl's wheel brings OpenSSL, but no certificates.

    A path from the environment is used unchecked: if it does not exist, no connection is trusted.
    """
    named = next((os.environ[name] for name in _CA_VARIABLES if os.environ.get(name)), None)
    if named:
        return named
    paths = ssl.get_default_verify_paths()
    places = (paths.cafile, *_CA_PLACES, paths.capath)
    return next((place for place in places if place and os.path.exists(place)), None)


def checked_url(url: str) -> bytes:
    """Encode a URL for libcurl; refused when it is not plain http(s), or could inject a line."""
    if _URL.fullmatch(url) is None:
        raise RequestRefused(f"a URL must begin with http:// or https:// and contain no spaces, got {_shown(url)!r}")
    return url.encode()


def check_method(request: HttpRequest) -> None:
    """Refuse a method that this transport does not know, or a body that would not be sent."""
    if request.method not in _METHODS:
        raise RequestRefused(f"a method must be one of {', '.join(sorted(_METHODS))}, got {request.method!r}")
    if request.body and request.method == "GET":
        raise RequestRefused(f"a GET is sent without a body, got one of {len(request.body):,} bytes")


def _shown(url: str) -> str:
    return origin(url) if "://" in url else url.partition("?")[0].rpartition("@")[2][:50]


def checked_headers(headers: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """Return the headers with the one that all requests have; refused when one could inject another.

    Values are never shown.
    """
    for name, value in headers:
        if _HEADER_NAME.fullmatch(name) is None:
            raise RequestRefused(f"a header's name must be letters, digits and dashes, got {name!r}")
        if _HEADER_VALUE.fullmatch(value) is None:
            raise RequestRefused(f"the header {name} contains a line break or another control character")
    return [*headers, *_missing(headers, ("User-Agent", _USER_AGENT))]


def curl_headers(headers: tuple[tuple[str, str], ...]) -> list[bytes]:
    """Encode header lines for libcurl. It adds some by itself, unless it is told not to."""
    # libcurl removes a header with an empty value; with a semicolon it is sent empty.
    lines = [f"{name}: {value}" if value.strip() else f"{name};" for name, value in checked_headers(headers)]
    # `Expect: 100-continue` would add a round trip, or a second of waiting, to every long prompt; and libcurl would
    # call every body a form.
    lines += [f"{name}:" for name, _ in _missing(headers, ("Expect", ""), ("Content-Type", ""))]
    return [line.encode() for line in lines]


def plain_headers(headers: tuple[tuple[str, str], ...], own: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers of a request that does not go through libcurl, with those that libcurl would add."""
    return [*_missing(headers, *own, ("Accept", "*/*"), ("Accept-Encoding", "identity")), *checked_headers(headers)]


def _missing(headers: tuple[tuple[str, str], ...], *wanted: tuple[str, str]) -> list[tuple[str, str]]:
    """Return those of the wanted headers whose name is not there."""
    names = {name.lower() for name, _ in headers}
    return [(name, value) for name, value in wanted if name.lower() not in names]
