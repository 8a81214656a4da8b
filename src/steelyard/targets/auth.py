"""Auth of an endpoint: its address, API key and headers, and the checks of its arguments before anything is called.

Keys, passwords in URLs and header values are secrets: they are sent, never shown, and removed from error messages.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from steelyard.errors import ConfigurationError, TargetError
from steelyard.masking import Masker, Secret
from steelyard.records import InvocationResponse
from steelyard.targets.keys import KeyFunction, KeySource

Headers: TypeAlias = tuple[tuple[str, str], ...]

_is_header_name = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch

_is_tag = re.compile(r"[\w:|-]+").fullmatch

_DEFAULT_PORTS = {"http": 80, "https": 443}
_LOCAL_ENDINGS = (".localhost", ".local", ".internal", ".lan", ".home", ".home.arpa", ".test", ".svc")

_AUTH_HEADERS = frozenset({"authorization", "api-key", "x-api-key", "x-goog-api-key", "cookie"})
"""Headers that replace an API key."""
_names_secret = re.compile(r"key|token|secret|auth|password|cookie|credential", re.IGNORECASE).search


def check_texts(*, model: object, **others: object) -> None:
    """Refuse values that are not text; only the model is required. Not shown, as a proxy may hold a password."""
    if not isinstance(model, str) or not model.strip():
        raise ConfigurationError(f"model must be a text that is not empty, got {model!r}")
    for name, value in others.items():
        if value is not None and not isinstance(value, str):
            raise ConfigurationError(f"{name} must be text, got {type(value).__name__}: put it in quotes")


def check_counts(**counts: object) -> None:
    """Refuse values that are not whole numbers >= 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigurationError(f"{name} must be >= 1, got {value!r}")


def check_switches(**switches: object) -> None:
    """Refuse values that are neither true nor false: the text `"false"` would count as true."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name} must be true or false, got {value!r}")


def checked_tags(tags: object) -> tuple[str, ...]:
    """Return the names of the tags around reasoning; refused unless they are a list of plain names."""
    if isinstance(tags, str) or not isinstance(tags, Sequence):
        raise ConfigurationError(f"reasoning_tags must be a list of names, such as [think], got {tags!r}")
    for tag in tags:
        if not isinstance(tag, str) or not _is_tag(tag):
            raise ConfigurationError(f"reasoning_tags has {tag!r}: write the name alone, think for <think>…</think>")
    return tuple(tags)


def checked_params(params: Mapping[str, Any] | None, reserved: Collection[str]) -> dict[str, Any]:
    """Return extra fields of the body as plain JSON; fields that have their own argument are refused."""
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
    """Return the extra headers, checked. Values may be secrets, so errors name only the header."""
    if headers is not None and not isinstance(headers, Mapping):
        raise ConfigurationError(f"headers must be a mapping of names to texts, got {type(headers).__name__}")
    checked = []
    for name, value in (headers or {}).items():
        if not isinstance(name, str) or not _is_header_name(name):
            raise ConfigurationError(f"headers has an invalid name: {name!r}")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigurationError(f"headers[{name!r}] must be text, got {type(value).__name__}")
        text = str(value).strip()
        if not all(character == "\t" or character.isprintable() for character in text):
            raise ConfigurationError(f"headers[{name!r}] contains a line break or another control character")
        checked.append((name, text))
    return tuple(checked)


def _alone_too(secrets: Iterable[str]) -> list[str]:
    """Return the secrets, and of one like `Bearer …` also the part after the blank."""
    return [part for secret in secrets for part in dict.fromkeys((secret, secret.rpartition(" ")[2]))]


def _is_auth_header(name: str) -> bool:
    return name.lower() in _AUTH_HEADERS or _names_secret(name) is not None


class Address:
    """A parsed base URL. Its possible secrets (`user:password@`, the query) are only sent, never shown."""

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
        """Return the URL of a call: the base, the call's path, both queries."""
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
        """Whether the host is public: not this machine, not a private address, not a bare name."""
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
        raise ConfigurationError(f"base_url is not a URL: {error}") from error
    if parts.scheme not in _DEFAULT_PORTS:
        raise ConfigurationError(f"base_url must begin with http:// or https://, got {_without_secrets(text)!r}")
    if not parts.hostname or not text.isprintable() or " " in text:
        raise ConfigurationError(f"base_url must name a host, got {_without_secrets(text)!r}")
    if not _has_good_port(parts):
        raise ConfigurationError(f"base_url must have a port from 1 to 65535, or none, got {_without_secrets(text)!r}")
    return parts


def _has_good_port(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:  # no number, or too large a one
        return False


def _without_secrets(url: str) -> str:
    """Return what may be shown of a mistyped URL: before an @ there may be a password, in the query a key."""
    return url.partition("?")[0].rpartition("@")[2]


def _basic(parts: SplitResult) -> Secret | None:
    """Return `user:password@` as the value of a basic auth header."""
    if parts.username is None:
        return None
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return Secret("Basic " + base64.b64encode(pair.encode()).decode())


def _secrets(parts: SplitResult) -> tuple[Secret, ...]:
    """Return the possible secrets of a base URL, encoded and decoded: servers repeat either."""
    values = [pair.partition("=")[2] for pair in parts.query.split("&")]
    if parts.password is not None:
        values.append(parts.password)
    return tuple(Secret(text) for value in values for text in dict.fromkeys((value, unquote(value))) if text)


def find_key(given: Secret | None, named: str | None, usual: Sequence[str]) -> Secret | None:
    """Return the API key: as given, else from the named variable, else from the first usual one that is set."""
    if given is not None:
        return given
    if named is not None:
        value = os.environ.get(named, "").strip()
        if not value:
            raise ConfigurationError(f"api_key_env names {named}, which is not set in the environment", topic="api-key")
        return Secret(value)
    for name in usual:
        if value := os.environ.get(name, "").strip():
            return Secret(value)
    return None


def checked_key(api_key: str | Secret | None) -> Secret | None:
    """Return the key from an argument or a suite file, wrapped so that nothing prints it."""
    if api_key is None or isinstance(api_key, Secret):
        return api_key
    if not isinstance(api_key, str) or not api_key.strip():
        raise ConfigurationError(f"api_key must be a text that is not empty, got {type(api_key).__name__}")
    return Secret(api_key.strip())


def key_source(
    api_key: object, api_key_env: str | None, api_key_command: object, api_key_life: object
) -> KeySource | None:
    """Return what gives a key that expires, if one of the arguments does; refused when two say where the key is."""
    given = {"api_key": api_key, "api_key_env": api_key_env, "api_key_command": api_key_command}
    if api_key_command is not None and len(named := [name for name, value in given.items() if value is not None]) > 1:
        raise ConfigurationError(f"{' and '.join(named)} cannot be used together: each says where the key is")
    if api_key_command is not None:
        return KeySource(command=api_key_command, life=api_key_life)  # type: ignore[arg-type]
    if callable(api_key):
        return KeySource(function=api_key, life=api_key_life)
    if api_key_life is not None:
        raise ConfigurationError("api_key_life goes with api_key_command, or with a function as api_key")
    return None


class Auth:
    """The API key and extra headers of an endpoint. Pickled, it holds only a key that was passed as an argument."""

    def __init__(
        self,
        address: Address,
        key_names: Sequence[str],
        *,
        api_key: str | Secret | KeyFunction | None,
        api_key_env: str | None,
        headers: Mapping[str, str] | None,
        api_key_command: Sequence[str] | None = None,
        api_key_life: str | float | None = None,
    ) -> None:
        self._address = address
        self._key_names = tuple(key_names)
        self.source = key_source(api_key, api_key_env, api_key_command, api_key_life)
        """Gives a key that expires; None for one that does not."""
        self._given_key = None if callable(api_key) else checked_key(api_key)
        self._key_variable = api_key_env
        self._extra = checked_headers(headers)
        self._hidden: tuple[str, ...] = ()
        self._set_secrets(())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_masker", "_error_masker")} | {
            "_hidden": ()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_secrets(())

    @property
    def header_names(self) -> list[str]:
        """Names of the extra headers; their values may be secrets."""
        return sorted(name.lower() for name, _ in self._extra)

    def check(self) -> None:
        """Raise ConfigurationError when the endpoint is public and there are no credentials for it.

        A key that expires is fetched: a program that cannot give one is found out before anything is called.
        """
        if self.source is not None:
            self.source.check()
            return
        if self.find_key() is not None or self._has_other_credentials() or not self._address.is_public:
            return
        raise ConfigurationError(
            f"no key for {self._address.shown}: set {' or '.join(self._key_names)} in the environment, "
            "name another variable as api_key_env, a program that prints the key as api_key_command, "
            "or pass an auth header in headers",
            topic="api-key",
        )

    def headers(
        self,
        own: Sequence[tuple[str, str]],
        key_header: Callable[[str], tuple[str, str]],
        fetched: Secret | None = None,
        *,
        keyless: bool = False,
    ) -> Headers:
        """Return all headers of a request; the extra ones override ours. `fetched` is a key that its source gave.

        With `keyless` there is none: the request is signed.
        """
        key, basic = None if keyless else fetched or self.find_key(), self._address.authorization
        ours = list(own)
        if basic is not None:
            ours.append(("authorization", basic.reveal()))
        elif key is not None:
            ours.append(key_header(key.reveal()))
        known = () if self.source is None else self.source.known
        self._set_secrets([secret for secret in (key, basic, *self._address.secrets, *known) if secret is not None])
        extra = set(self.header_names)
        return (*(pair for pair in ours if pair[0] not in extra), *self._extra)

    def hide(self, *secrets: str) -> None:
        """Mask these texts too, where a server repeats them; from the next `headers` on."""
        self._hidden = tuple(secret for secret in secrets if secret)

    def _set_secrets(self, secrets: Iterable[Secret]) -> None:
        """Prepare to mask these and the values of headers: in an error all of them, in an answer those of auth."""
        texts = [*self._hidden, *(secret.reveal() for secret in secrets)]
        of_auth = [value for name, value in self._extra if _is_auth_header(name)]
        self._masker = Masker(_alone_too([*texts, *of_auth]))
        self._error_masker = Masker(_alone_too([*texts, *(value for _, value in self._extra)]), cut=True)

    def remove_secrets(self, error: TargetError) -> None:
        """Mask keys and header values in an error's message: some servers repeat what they were sent."""
        error.args = (self._error_masker.text(str(error)),)

    def mask_response(self, response: InvocationResponse) -> None:
        """Mask keys in all that is kept of a server's reply; quick where there is none, as in most."""
        masker = self._masker
        text, messages = response.response_text, response.messages
        if text and masker.finds(text):
            response.response_text = masker.text(text)
        # Most answers are one message with the text that was just looked at.
        plain = messages and len(messages) == 1 and len(messages[0]) == 2 and messages[0].get("content") is text
        if not plain or response.response_text is not text:
            response.messages = masker.value(messages)
        if response.request_id:
            response.request_id = masker.text(response.request_id)
        if response.stop_reason:
            response.stop_reason = masker.text(response.stop_reason)
        if response.fields_left_out:
            response.fields_left_out = masker.value(response.fields_left_out)

    def masked(self, value: Any) -> Any:
        """Return a text, or a list or mapping of texts, with keys masked."""
        return self._masker.value(value)

    def find_key(self) -> Secret | None:
        """Return the key that does not expire: as given, or from the environment."""
        return None if self.source is not None else find_key(self._given_key, self._key_variable, self._key_names)

    def _has_other_credentials(self) -> bool:
        names = self.header_names
        return not _AUTH_HEADERS.isdisjoint(names) or self._address.authorization is not None or self._address.has_query
