"""One stored response as bytes: it says whose it is, and shows when a bit of it has changed."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from steelyard.records import InvocationResponse

ENTRY_VERSION = 1


class UnwritableResponse(ValueError):
    """A response that would not be read back as it is; it is not stored."""


class BadEntry(ValueError):
    """Bytes that are not the entry they should be; they count as a miss."""


class _Entry(msgspec.Struct):
    v: int
    eval_set_id: str
    case_id: str
    key: str
    digest: str
    response: msgspec.Raw


_encoder = msgspec.json.Encoder()
_read_entry = msgspec.json.Decoder(_Entry).decode
_read_response = msgspec.json.Decoder(InvocationResponse).decode


def encode_entry(eval_set_id: str, case_id: str, key: str, response: InvocationResponse) -> bytes:
    """The entry as JSON; UnwritableResponse for lone surrogates, NaN and whatever else JSON would change."""
    try:
        said = _encoder.encode(response)
        reads_back = bool(_read_response(said) == response)
        entry = _Entry(ENTRY_VERSION, eval_set_id, case_id, str(key), _digest(said), msgspec.Raw(said))
        data = _encoder.encode(entry)
    except Exception as error:  # whatever a payload does when it is looked at, it is only not stored
        raise UnwritableResponse(f"{type(error).__name__}: {error!s:.200}") from error
    if not reads_back:
        raise UnwritableResponse("it holds values that JSON would change")
    return data


def decode_entry(data: bytes, eval_set_id: str, case_id: str, key: str) -> InvocationResponse:
    """The response of an entry; BadEntry when it is damaged, or another's than the one asked for."""
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
