"""Fingerprints and cache keys: what a cached response depends on. A change calls the target again."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from steelyard.attachments import attached, identity, messages_by_content
from steelyard.records import CaseLimits, EvalCase

FINGERPRINT_VERSION = 1
"""Part of every key. Raise it when the content of fingerprints changes: old entries are then never found again."""

_is_key = re.compile(r"[0-9a-f]{64}").fullmatch

_SOMETIMES = ("metadata", "trial", "workspace", "limits", "attachments")


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
