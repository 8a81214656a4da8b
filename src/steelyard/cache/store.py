"""Stores of responses: the protocol, which responses may be stored, their keys and format, and `open_store`."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from steelyard.attachments import attached, identity, messages_by_content
from steelyard.errors import ConfigurationError, SteelyardError, describe
from steelyard.plugins import BUILT_IN, find, is_known, load_object, make_importable, unknown
from steelyard.records import STOP_REASONS, CaseLimits, EvalCase, InvocationResponse

_CUT_SHORT = frozenset(
    {
        "length", "max_tokens", "max_output_tokens", "max_completion_tokens", "max_turns", "max_steps",
        "model_context_window_exceeded", "context_length_exceeded", "incomplete", "pause_turn",
        "content_filter", "content_filtered", "safety", "recitation", "blocklist", "prohibited_content", "spii",
        "refusal", "guardrail_intervened", "malformed_function_call",
        "cancelled", "canceled", "abort", "aborted", "interrupted",
        "timeout", "timed_out", "error", "failed", *STOP_REASONS.values(),
    }
)  # fmt: skip
"""Providers' stop reasons of answers that were not ended by the model itself."""

ENTRY_VERSION = 1

_encoder = msgspec.json.Encoder()

_read_response = msgspec.json.Decoder(InvocationResponse).decode

DATABASE_ENDINGS = (".sqlite", ".sqlite3", ".db")
FINGERPRINT_VERSION = 1
"""Part of every key. Raise it when the content of fingerprints changes: old entries are then never found again."""

_is_key = re.compile(r"[0-9a-f]{64}").fullmatch

_SOMETIMES = ("metadata", "trial", "workspace", "limits", "attachments")


class StoreError(SteelyardError):
    """A store failed. A run logs a warning and calls the target instead."""

    topic = "cache"


class StoreInfo(msgspec.Struct, frozen=True):
    """How much a store holds."""

    entries: int
    bytes: int


@runtime_checkable
class EvaluationDataStore(Protocol):
    """Where responses are kept. `get` is called on the event loop and should take well under a millisecond;
    `put` is called in a thread. Both raise StoreError when the store fails; a miss is None.
    """

    def get(self, eval_set_id: str, case_id: str, key: str) -> InvocationResponse | None: ...

    def put(self, eval_set_id: str, case_id: str, key: str, response: InvocationResponse) -> None: ...


@runtime_checkable
class ManagedStore(EvaluationDataStore, Protocol):
    """A store that `steelyard cache` can inspect and clear."""

    def info(self) -> StoreInfo:
        """Return the number of entries, and their bytes on disk."""
        ...

    def clear(self, eval_set_id: str | None = None) -> int:
        """Remove the entries of one eval set, or all of them; returns how many."""
        ...

    def close(self) -> None: ...


def is_cacheable(response: object) -> bool:
    """Whether a response completed normally: an answer, no error, not cancelled, not cut short by a limit or filter."""
    if not isinstance(response, InvocationResponse):
        return False
    if response.error is not None or response.error_type is not None:
        return False
    if response.response_text is None and not response.messages:
        return False  # empty: a placeholder, not an answer
    reason = response.stop_reason
    return reason is None or (isinstance(reason, str) and _spelled(reason) not in _CUT_SHORT)


def check_cacheable(response: InvocationResponse) -> None:
    """Raise StoreError for a response that must not be stored; callers check `is_cacheable` first."""
    if not is_cacheable(response):
        shown = type(response).__name__
        if isinstance(response, InvocationResponse):
            shown = f"error={response.error!r:.200}, stop_reason={response.stop_reason!r:.50}"
        raise StoreError(f"only a response that completed normally may be stored, got {shown}")


def _spelled(reason: str) -> str:
    return reason.strip().lower().replace("-", "_").replace(" ", "_")


class UnwritableResponse(ValueError):
    """A response that would not be read back unchanged; it is not stored."""


class BadEntry(ValueError):
    """Bytes that are not the expected entry; they count as a miss."""


class _Entry(msgspec.Struct):
    v: int
    eval_set_id: str
    case_id: str
    key: str
    digest: str
    response: msgspec.Raw


_read_entry = msgspec.json.Decoder(_Entry).decode


def encode_entry(eval_set_id: str, case_id: str, key: str, response: InvocationResponse) -> bytes:
    """Encode an entry as JSON; UnwritableResponse for lone surrogates, NaN and other values that JSON would change."""
    try:
        encoded = _encoder.encode(response)
        reads_back = bool(_read_response(encoded) == response)
        entry = _Entry(ENTRY_VERSION, eval_set_id, case_id, str(key), _digest(encoded), msgspec.Raw(encoded))
        data = _encoder.encode(entry)
    except Exception as error:  # whatever goes wrong with a payload, it is only not stored
        raise UnwritableResponse(f"{type(error).__name__}: {error!s:.200}") from error
    if not reads_back:
        raise UnwritableResponse("it holds values that JSON would change")
    return data


def decode_entry(data: bytes, eval_set_id: str, case_id: str, key: str) -> InvocationResponse:
    """Decode the response of an entry; BadEntry when it is damaged or belongs to another key."""
    try:
        entry = _read_entry(data)
        if entry.v != ENTRY_VERSION:
            raise BadEntry(f"its version is {entry.v}, not {ENTRY_VERSION}")
        if (entry.eval_set_id, entry.case_id, entry.key) != (eval_set_id, case_id, str(key)):
            raise BadEntry(f"it belongs to case {entry.case_id!r:.100} of {entry.eval_set_id!r:.100}")
        if entry.digest != _digest(bytes(entry.response)):
            raise BadEntry("its digest does not match")
        return _read_response(entry.response)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadEntry(str(error)) from error


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


_REFERENCE = re.compile(r"(?P<name>(?:.*/)?[\w.-]+\.py|[A-Za-z_][\w.-]+):(?P<rest>.*)", re.S)
_OBJECT = re.compile(r"(?P<object>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?::(?P<place>.*))?", re.S)
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.*\.py", re.S)


def parse_store(value: object, name: str = "cache") -> str | Path:
    """A path; or `STORE:PLACE`, `file.py:Name` and `package.module:Name`, checked as far as their names go.

    A text with a colon is one of the latter unless a `/` is before it: a folder called `a:b` is written `./a:b`.
    """
    if isinstance(value, os.PathLike):
        return Path(value)
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{name} must be a path or a store, got {value!r}")
    found = _REFERENCE.fullmatch(value)
    if found is None:
        return Path(value)
    if is_known("stores", found["name"]):
        return value
    if _MODULE.fullmatch(found["name"]) and _OBJECT.fullmatch(found["rest"]):
        return value
    raise ConfigurationError(f"{name}: {unknown('stores', found['name'])}. A folder of that name is written ./{value}")


def relative_store(value: str | Path, folder: Path) -> str | Path:
    """What a suite file in `folder` means by a cache: paths and Python files are relative to that folder."""
    found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return folder / value
    if found["name"].endswith(".py"):
        return f"{folder.resolve() / found['name']}:{found['rest']}"
    if found["name"] in BUILT_IN["stores"]:
        return f"{found['name']}:{folder / found['rest']}"
    if not is_known("stores", found["name"]):
        make_importable(folder)
    return str(value)


def path_of(cache: object) -> Path | None:
    """Where the files of a built-in store are; None for a store of another kind."""
    if not isinstance(cache, str | os.PathLike):
        return None
    cache = parse_store(cache)
    if isinstance(cache, Path):
        return cache
    name, _, place = cache.partition(":")
    return Path(place) if name in BUILT_IN["stores"] else None


def open_store(cache: object) -> EvaluationDataStore | None:
    """The store at a path, by its ending a database or else a folder of files, or the one that a text names.

    A store as it is; None for None.
    """
    if cache is None:
        return None
    if isinstance(cache, str | os.PathLike):
        cache = parse_store(cache)
        store = _at_path(cache) if isinstance(cache, Path) else _named(cache)
        if not isinstance(store, EvaluationDataStore):
            raise ConfigurationError(f"cache: {cache} must have get and put, got {type(store).__name__}")
        return store
    if isinstance(cache, EvaluationDataStore):
        return cache
    raise ConfigurationError(f"cache must be a path or have get and put, got {type(cache).__name__}")


def _at_path(path: Path) -> object:
    return find("stores", "sqlite" if path.suffix.lower() in DATABASE_ENDINGS else "files")(path)


def _named(text: str) -> object:
    """The store that a package adds, or a class of the user's own, made with the place if one is given."""
    found = _REFERENCE.fullmatch(text)
    assert found is not None
    name, place = found["name"], found["rest"]
    if is_known("stores", name):
        return _made(find("stores", name), text, place)
    own = _OBJECT.fullmatch(found["rest"])
    assert own is not None
    try:
        store = load_object(f"{name}:{own['object']}", Path())
    except ConfigurationError as error:
        raise ConfigurationError(
            f"cache {text!r}: {error}; and {unknown('stores', name)}. A folder of that name is written ./{text}"
        ) from error
    if not callable(store):
        return store
    return _made(store, text) if own["place"] is None else _made(store, text, own["place"])


def _made(maker: Callable[..., object], text: str, *place: str) -> object:
    try:
        return maker(*place)
    except SteelyardError:
        raise
    except Exception as error:
        raise ConfigurationError(f"cache {text!r}: {describe(error)}") from error


class CacheKey(str):
    """The SHA-256 of a fingerprint, as 64 lower-case hex digits: always safe as a file name."""

    __slots__ = ()

    def __new__(cls, text: str) -> CacheKey:
        if not _is_key(text):
            raise ValueError(f"a cache key is 64 lower-case hex digits, got {text!r:.100}")
        return super().__new__(cls, text)

    @classmethod
    def of(cls, fingerprint: CaseFingerprint) -> CacheKey:
        """Return the key of a fingerprint; ValueError when it holds what JSON cannot, such as NaN."""
        material = {"v": FINGERPRINT_VERSION, **{name: getattr(fingerprint, name) for name in _ALWAYS}}
        material |= {name: value for name in _SOMETIMES if (value := getattr(fingerprint, name))}
        return cls(hashlib.sha256(_canonical(material)).hexdigest())


class CaseFingerprint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that decides a target's answer to a case. A new field must not change keys at its default."""

    case_id: str
    system_prompt: str | None = None
    user_messages: list[Any] = []
    """The case's messages, then its prompt as plain text: a function target sees the difference."""
    initial_session: Any = None
    tool_set_hash: str = ""
    agent_model: str
    parameters: dict[str, Any] = {}
    """The sampling parameters that the target would send, and the rest of its identity."""
    metadata: dict[str, Any] = {}
    """Functions and commands see it, so their answers may depend on it. Left out of the key when empty."""
    trial: int = 0
    """Left out of the key when 0."""
    workspace: str = ""
    """The content of the workspace's template. Left out of the key when empty, as are limits."""
    limits: dict[str, Any] = {}
    attachments: list[list[str]] = []
    """Name, type and digest of each file that goes with the prompt. Left out of the key when empty."""

    @property
    def key(self) -> CacheKey:
        return CacheKey.of(self)


_ALWAYS = tuple(name for name in CaseFingerprint.__struct_fields__ if name not in _SOMETIMES)


def fingerprint_of(
    case: EvalCase,
    *,
    session: Any = None,
    target_parameters: Mapping[str, Any],
    model_id: str | None,
    tools: Iterable[Any] = (),
    trial: int = 0,
    workspace: str = "",
    limits: CaseLimits | None = None,
) -> CaseFingerprint | None:
    """Return what the answer to a case depends on; None when the model is not known: that is never cached.

    `tools` are the target's own; the case's are added.
    """
    if not model_id:
        return None
    prompt = [] if case.prompt is None else [case.prompt]
    return CaseFingerprint(
        case_id=case.id,
        system_prompt=case.system_prompt,
        user_messages=[*(messages_by_content(case.messages) or ()), *prompt],
        initial_session=session,
        tool_set_hash=tool_set_hash([*tools, *(case.tools or ())]),
        agent_model=model_id,
        parameters=dict(target_parameters),
        metadata=case.metadata,
        trial=trial,
        workspace=workspace,
        limits={} if limits is None else msgspec.to_builtins(limits),
        attachments=[identity(one) for one in attached(case)] if case.attachments else [],
    )


def tool_set_hash(tools: Iterable[Any] | None) -> str:
    """Return the SHA-256 of a set of tools in any order; empty text when there are none."""
    spelled = sorted(_canonical(tool) for tool in tools or ())
    # JSON contains no raw newline, so two different lists never join to the same bytes.
    return hashlib.sha256(b"\n".join(spelled)).hexdigest() if spelled else ""


def _canonical(value: Any) -> bytes:
    """Return the canonical JSON of a value: keys sorted, UTF-8, no NaN or infinity (ValueError).

    Python's encoder on purpose: keys are stored, and its format of numbers is stable.
    """
    try:
        # Sorts keys, and also sets, whose order differs between processes.
        plain = msgspec.to_builtins(value, str_keys=True, order="deterministic", enc_hook=_from_numpy)
        text = json.dumps(plain, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"no cache key: a value cannot be written as JSON: {error}") from error
    return text.encode("utf-8", "surrogatepass")


def _from_numpy(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
