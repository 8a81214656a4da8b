"""Where an endpoint is and how one may enter: its base URL, its host, its key."""

from __future__ import annotations

import base64
import ipaddress
import os
from collections.abc import Sequence
from urllib.parse import SplitResult, unquote, urlsplit

from steelyard.errors import ConfigurationError
from steelyard.masking import Secret

_DEFAULT_PORTS = {"http": 80, "https": 443}
_LOCAL_ENDINGS = (".localhost", ".local", ".internal", ".lan", ".home", ".home.arpa", ".test", ".svc")


class Address:
    """A base URL taken apart. What may be secret in it (`user:password@`, the query) is only sent, never shown."""

    def __init__(self, base_url: str) -> None:
        parts = _split(base_url)
        self.host = parts.hostname or ""
        port = parts.port or _DEFAULT_PORTS[parts.scheme]
        shown_host = f"[{self.host}]" if ":" in self.host else self.host
        self.endpoint = f"{parts.scheme}://{shown_host}:{port}"
        place = f"{shown_host}:{parts.port}" if parts.port else shown_host
        self.path = parts.path.rstrip("/")
        self.shown = f"{parts.scheme}://{place}{self.path}"
        self.authorization = _basic(parts)
        self._query = parts.query
        self.secrets = _secrets(parts)

    def url(self, path: str, query: str = "") -> str:
        """The URL of a call: the base, the call's own path, both queries."""
        queries = "&".join(one for one in (self._query, query) if one)
        return f"{self.shown}{path}?{queries}" if queries else f"{self.shown}{path}"

    @property
    def has_query(self) -> bool:
        return bool(self._query)

    @property
    def is_azure(self) -> bool:
        return self.host.endswith((".azure.com", ".azure.us", ".azure.cn"))

    @property
    def is_public(self) -> bool:
        """Whether the host is out in the world: neither this machine, nor a private address, nor a bare name."""
        host = self.host.rstrip(".")
        try:
            return ipaddress.ip_address(host.partition("%")[0]).is_global
        except ValueError:
            return "." in host and not host.endswith(_LOCAL_ENDINGS)


def _split(base_url: str) -> SplitResult:
    if not isinstance(base_url, str):
        raise ConfigurationError(f"base_url must be text, got {base_url!r}")
    text = base_url.strip()
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ConfigurationError(f"base_url is no URL: {error}") from error
    if parts.scheme not in _DEFAULT_PORTS:
        raise ConfigurationError(f"base_url must begin with http:// or https://, got {_harmless(text)!r}")
    if not parts.hostname or not text.isprintable() or " " in text:
        raise ConfigurationError(f"base_url must name a host, got {_harmless(text)!r}")
    if not _has_good_port(parts):
        raise ConfigurationError(f"base_url must have a port from 1 to 65535, or none, got {_harmless(text)!r}")
    return parts


def _has_good_port(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:  # no number, or too large a one
        return False


def _harmless(url: str) -> str:
    """What may be shown of a mistyped URL: before an @ there may be a password, in the query a key."""
    return url.partition("?")[0].rpartition("@")[2]


def _basic(parts: SplitResult) -> Secret | None:
    """`user:password@` as the header that it stands for."""
    if parts.username is None:
        return None
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return Secret("Basic " + base64.b64encode(pair.encode()).decode())


def _secrets(parts: SplitResult) -> tuple[Secret, ...]:
    """What may be secret in a base URL, as it is sent and as it is meant: servers repeat either."""
    values = [pair.partition("=")[2] for pair in parts.query.split("&")]
    if parts.password is not None:
        values.append(parts.password)
    return tuple(Secret(text) for value in values for text in dict.fromkeys((value, unquote(value))) if text)


def find_key(given: Secret | None, named: str | None, usual: Sequence[str]) -> Secret | None:
    """The key that was given, or that stands in the named variable, or in the first of the usual ones that has one."""
    if given is not None:
        return given
    if named is not None:
        value = os.environ.get(named, "").strip()
        if not value:
            raise ConfigurationError(f"api_key_env names {named}, which is not set in the environment")
        return Secret(value)
    for name in usual:
        if value := os.environ.get(name, "").strip():
            return Secret(value)
    return None


def checked_key(api_key: str | Secret | None) -> Secret | None:
    """The key out of a call or a suite file, kept where nothing prints it."""
    if api_key is None or isinstance(api_key, Secret):
        return api_key
    if not isinstance(api_key, str) or not api_key.strip():
        raise ConfigurationError(f"api_key must be a text that is not empty, got {type(api_key).__name__}")
    return Secret(api_key.strip())
