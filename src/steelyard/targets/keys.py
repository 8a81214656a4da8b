"""Keys that expire: fetched from a program or a Python function when first needed, and again when they have expired.

One fetch serves all calls that wait for it. A fetched key is kept in memory alone; it is never written or pickled.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import inspect
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from datetime import datetime
from typing import Any

from steelyard.errors import ConfigurationError, TransientError, describe
from steelyard.masking import Secret
from steelyard.subprocesses import output_of
from steelyard.units import parse_duration

MAX_FETCH_SECONDS = 60.0
"""How long a program or function may take to give a key."""
MAX_SAFETY_SECONDS = 60.0
"""A key is fetched again so long before it expires, or a tenth of its life before, if that is less."""
WRONG_KEY_SECONDS = 60.0
"""A key refused within this time that has never been accepted is not expired but wrong: another would be too."""
MAX_KEY_CHARACTERS = 1 << 16
_MAX_STDERR = 300

_LONG_WORD = re.compile(r"[A-Za-z0-9_.+=~-]{32,}")
_JWT = re.compile(r"eyJ[\w-]*\.([\w-]+)\.[\w-]*")
_TOKEN_FIELDS = ("access_token", "accessToken", "token", "id_token", "api_key", "key")
_LIFE_FIELDS = ("expires_in", "expiresIn")
_EXPIRY_FIELDS = ("expires_on", "expires_at", "expiry", "token_expiry", "expiration", "Expiration", "expiresOn")

KeyFunction = Callable[[], Any]
"""Returns the key, or the key and the seconds that it lives; may be async."""


def is_access_token(key: str) -> bool:
    """Whether a key looks like an OAuth access token (a JWT, or one of Google's), which goes into `Authorization`."""
    return key.startswith("ya29.") or _JWT.fullmatch(key) is not None


def checked_command(command: object) -> list[str]:
    """Return the arguments of a program that prints a key; refused unless they are a list of texts."""
    if isinstance(command, str):
        raise ConfigurationError(
            "api_key_command must be a list, such as [gcloud, auth, print-access-token]: it is run without a shell"
        )
    parts = list(command) if isinstance(command, Sequence) else []
    if not parts or not parts[0] or not all(isinstance(part, str) and "\0" not in part for part in parts):
        raise ConfigurationError("api_key_command must be a list of texts: the program and its arguments")
    return parts


class KeySource:
    """A program or function that gives the key, and the last key that it gave. Shared by all event loops."""

    def __init__(
        self, *, command: Sequence[str] | None = None, function: KeyFunction | None = None, life: object = None
    ) -> None:
        self._command = None if command is None else checked_command(command)
        self._function = function
        self._life = None if life is None else parse_duration(life, "api_key_life")
        if self._life == 0:
            raise ConfigurationError("api_key_life must be above 0")
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._fetching: Future[Secret] | None = None
        self._key: Secret | None = None
        self._fetched_at = self._expires_at = 0.0
        self._accepted = False
        self.known: tuple[Secret, ...] = ()
        """The last keys, which a server may repeat."""

    def __getstate__(self) -> dict[str, Any]:
        return {"_command": self._command, "_function": self._function, "_life": self._life}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def name(self) -> str:
        """What gives the key, for messages; the program's arguments may be secrets."""
        return f"api_key_command ({self._command[0]})" if self._command is not None else "the api_key function"

    async def key(self, refused: Secret | None = None) -> Secret:
        """Return a key that has not expired, and is another than the refused one."""
        with self._lock:
            key = self._key
            if key is not None and key is not refused and time.monotonic() < self._expires_at:
                return key
            fetching = self._start()
        try:
            waiting = asyncio.shield(asyncio.wrap_future(fetching))
            return await asyncio.wait_for(waiting, MAX_FETCH_SECONDS)
        except TimeoutError:
            self._abandon(fetching)
            raise TransientError(f"{self.name} gave no key within {MAX_FETCH_SECONDS:g} s") from None

    async def another(self, refused: Secret) -> Secret | None:
        """Return the key to use in place of a refused one; None where another would be refused too."""
        with self._lock:
            recent = time.monotonic() - self._fetched_at < WRONG_KEY_SECONDS
            if self._key is refused and recent and not self._accepted:
                return None
        key = await self.key(refused)
        return None if key.reveal() == refused.reveal() else key

    def accepted(self, key: Secret) -> None:
        """Note that a server has accepted the key."""
        if key is self._key:
            self._accepted = True

    def check(self) -> None:
        """Fetch the first key; ConfigurationError when that fails. Not for the event loop."""
        with self._lock:
            if self._key is not None and time.monotonic() < self._expires_at:
                return
            fetching = self._start()
        try:
            fetching.result(MAX_FETCH_SECONDS)
        except FutureTimeout:
            self._abandon(fetching)
            raise ConfigurationError(f"{self.name} gave no key within {MAX_FETCH_SECONDS:g} s") from None
        except TransientError as error:
            raise ConfigurationError(str(error)) from error

    def _start(self) -> Future[Secret]:
        """Start a fetch, or return the one under way; the lock is held."""
        if self._fetching is None:
            self._fetching = Future()
            threading.Thread(target=self._fetch, args=(self._fetching,), name="steelyard-key", daemon=True).start()
        return self._fetching

    def _abandon(self, fetching: Future[Secret]) -> None:
        with self._lock:
            if self._fetching is fetching:
                self._fetching = None

    def _fetch(self, fetching: Future[Secret]) -> None:
        began = time.monotonic()
        try:
            text, life = read_key(self._output())
        except TransientError as error:
            outcome: Secret | Exception = error
        except Exception as error:  # noqa: BLE001 - the user's function: every call that waits for the key gets the error
            outcome = TransientError(f"{self.name} failed: {_without_tokens(describe(error))}")
        else:
            outcome = Secret(text)
        with self._lock:
            if isinstance(outcome, Secret) and self._fetching is fetching:
                self._key, self._accepted, self._fetched_at = outcome, False, began
                self._expires_at = began + _usable_seconds(self._life if life is None else life)
                self.known = (*self.known[-3:], outcome)
            if self._fetching is fetching:
                self._fetching = None
        with suppress(Exception):  # cancelled: nobody waits
            if isinstance(outcome, Secret):
                fetching.set_result(outcome)
            else:
                fetching.set_exception(outcome)

    def _output(self) -> Any:
        if self._function is not None:
            value = self._function()
            return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value
        assert self._command is not None
        try:
            code, output, errors = output_of(self._command, timeout=MAX_FETCH_SECONDS, max_bytes=MAX_KEY_CHARACTERS)
        except TimeoutError:
            raise TransientError(f"{self.name} was ended: it took longer than {MAX_FETCH_SECONDS:g} s") from None
        except OSError as error:
            raise TransientError(f"{self.name} could not be started: {error.strerror}") from None
        if code != 0:
            shown = _without_tokens(errors.decode("utf-8", "replace").strip()[-_MAX_STDERR:])
            raise TransientError(f"{self.name} failed with exit code {code}: {shown or 'it wrote nothing to stderr'}")
        return output.decode("utf-8", "replace")


async def _awaited(value: Any) -> Any:
    return await value


def _without_tokens(text: str) -> str:
    """Mask what may be a token in a message of a program that deals in them."""
    return _LONG_WORD.sub("***", text)


def _usable_seconds(life: float | None) -> float:
    return float("inf") if life is None else life - min(MAX_SAFETY_SECONDS, life / 10)


def read_key(output: Any) -> tuple[str, float | None]:
    """Return the key in what a program printed or a function returned, and how many seconds it lives, if that is said.

    It is said by a field beside the key in JSON, by the second of two values of a function, or inside a JWT. Of AWS
    credentials in JSON the whole text is returned: it is one secret of several parts.
    """
    life: float | None = None
    if isinstance(output, tuple) and len(output) == 2:
        output, life = output[0], _seconds(output[1])
    if isinstance(output, Secret):
        output = output.reveal()
    text = (
        json.dumps(dict(output)) if isinstance(output, Mapping) else output if isinstance(output, str) else ""
    ).strip()
    fields = _json_object(text)
    if fields is not None:
        life = _stated_life(fields) if life is None else life
        if "AccessKeyId" not in fields:
            inner = fields.get("credential")  # gcloud config config-helper
            if isinstance(inner, dict):
                fields, life = inner, _stated_life(inner) if life is None else life
            text = next((fields[name] for name in _TOKEN_FIELDS if isinstance(fields.get(name), str)), "").strip()
    if not text:
        kind = "" if isinstance(output, str | Mapping) else f", got {type(output).__name__}"
        raise TransientError(f"it gave no key: expected text, or JSON with a field such as access_token{kind}")
    if len(text) > MAX_KEY_CHARACTERS or (not text.isprintable() and fields is None):
        raise TransientError("what it gave is not a key: it has several lines or control characters, or is too long")
    return text, _jwt_life(text) if life is None else life


def _json_object(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _stated_life(fields: Mapping[str, Any]) -> float | None:
    for name in _LIFE_FIELDS:
        if (seconds := _seconds(fields.get(name))) is not None:
            return seconds
    for name in _EXPIRY_FIELDS:
        if (moment := _moment(fields.get(name))) is not None:
            return max(0.0, moment - time.time())
    return None


def _seconds(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def _moment(value: Any) -> float | None:
    """Return a moment as seconds since 1970, from a number or an ISO date; a date without a zone is local time."""
    if (number := _seconds(value)) is not None:
        return number / 1000 if number > 1e11 else number
    try:
        return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp() if isinstance(value, str) else None
    except ValueError:
        return None


def _jwt_life(text: str) -> float | None:
    found = _JWT.fullmatch(text)
    if found is None:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(found[1] + "=" * (-len(found[1]) % 4)))
        expiry = _seconds(claims.get("exp")) if isinstance(claims, dict) else None
    except (ValueError, binascii.Error):
        return None
    return None if expiry is None else max(0.0, expiry - time.time())
