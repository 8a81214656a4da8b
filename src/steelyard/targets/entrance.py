"""How an endpoint lets one in: the key, found when it is needed, and the headers that bring it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from steelyard.errors import ConfigurationError, TargetError
from steelyard.masking import Secret
from steelyard.targets.address import Address, checked_key, find_key
from steelyard.targets.arguments import Headers, checked_headers, scrubbed

_LETS_IN = frozenset({"authorization", "api-key", "x-api-key", "x-goog-api-key", "cookie"})
"""Headers that stand in for a key."""


class Entrance:
    """A key and extra headers. A pickled one has no key in it but the one that was given."""

    def __init__(
        self,
        address: Address,
        key_names: Sequence[str],
        *,
        api_key: str | Secret | None,
        api_key_env: str | None,
        headers: Mapping[str, str] | None,
    ) -> None:
        self._address = address
        self._key_names = tuple(key_names)
        self._given_key = checked_key(api_key)
        self._key_variable = api_key_env
        self._extra = checked_headers(headers)
        self._secrets: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_secrets": ()}

    @property
    def header_names(self) -> list[str]:
        """The names of the extra headers: their values may be secrets."""
        return sorted(name.lower() for name, _ in self._extra)

    def check(self) -> None:
        """ConfigurationError when the endpoint is out in the world and there is nothing to let us in."""
        if self._find_key() is not None or self._brings_its_own_key() or not self._address.is_public:
            return
        raise ConfigurationError(
            f"no key for {self._address.endpoint}: set {' or '.join(self._key_names)} in the environment, "
            "name another variable as api_key_env, or give the header that lets you in"
        )

    def headers(self, own: Sequence[tuple[str, str]], key_header: Callable[[str], tuple[str, str]]) -> Headers:
        """All headers of a request; the extra ones take the place of ours."""
        key, basic = self._find_key(), self._address.authorization
        ours = list(own)
        if basic is not None:
            ours.append(("authorization", basic.reveal()))
        elif key is not None:
            ours.append(key_header(key.reveal()))
        secrets = (key, basic, *self._address.secrets)
        self._secrets = tuple(secret.reveal() for secret in secrets if secret is not None)
        extra = set(self.header_names)
        return (*(pair for pair in ours if pair[0] not in extra), *self._extra)

    def keep_secrets(self, error: TargetError) -> None:
        """Take keys and header values out of a message: some servers repeat what they were sent."""
        error.args = (scrubbed(str(error), (*self._secrets, *(value for _, value in self._extra))),)

    def _find_key(self) -> Secret | None:
        return find_key(self._given_key, self._key_variable, self._key_names)

    def _brings_its_own_key(self) -> bool:
        names = self.header_names
        return not _LETS_IN.isdisjoint(names) or self._address.authorization is not None or self._address.has_query
