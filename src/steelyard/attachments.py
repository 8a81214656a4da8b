"""Attachments of cases: images, documents and audio, found and checked, identified by content, read when sent.

A suite's files are read by the process that owns the run: their contents travel to workers with the case.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import msgspec

from steelyard.errors import TargetError
from steelyard.records import EvalCase

MAX_FILE = 50 * 2**20
"""Bytes of one attachment. Providers take less, or no more."""
MAX_CASE = 100 * 2**20
"""Bytes of all attachments of a case."""

_SHOWN = 80
_MIN_HIDDEN = 256
_FIELDS = frozenset({"path", "url", "data", "bytes", "media_type", "name", "sha256", "size"})
_REMOTE = ("http", "https", "gs", "s3")
_CONTENT_FIELDS = frozenset({"url", "image_url", "data", "bytes", "file_data"})
_scheme = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):").match
_data_url = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*)(;base64)?,(.*)", re.DOTALL).fullmatch
_is_base64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}").fullmatch

_KNOWN = {
    "png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "gif": "image/gif", "webp": "image/webp",
    "bmp": "image/bmp", "tif": "image/tiff", "tiff": "image/tiff", "heic": "image/heic", "heif": "image/heif",
    "avif": "image/avif", "svg": "image/svg+xml", "pdf": "application/pdf", "wav": "audio/wav", "mp3": "audio/mpeg",
    "flac": "audio/flac", "ogg": "audio/ogg", "oga": "audio/ogg", "opus": "audio/ogg", "m4a": "audio/mp4",
    "aac": "audio/aac", "aiff": "audio/aiff", "aif": "audio/aiff", "weba": "audio/webm", "mp4": "video/mp4",
    "mov": "video/quicktime", "webm": "video/webm", "mkv": "video/x-matroska", "txt": "text/plain",
    "md": "text/markdown", "csv": "text/csv", "html": "text/html", "htm": "text/html", "json": "application/json",
    "xml": "text/xml", "doc": "application/msword", "xls": "application/vnd.ms-excel",
    "docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    "xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    "pptx": "application/vnd.openxmlformats-officedocument.presentationml.presentation",
}  # fmt: skip
"""Media types by the ending of a file's name; the same on every machine, unlike those that the system knows."""

_BEGINNINGS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"), (b"%PDF-", "application/pdf"), (b"ID3", "audio/mpeg"), (b"\xff\xfb", "audio/mpeg"),
    (b"\xff\xf3", "audio/mpeg"), (b"fLaC", "audio/flac"), (b"OggS", "audio/ogg"), (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
)  # fmt: skip
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}
_FTYP = {b"heic": "image/heic", b"heix": "image/heic", b"mif1": "image/heif", b"avif": "image/avif",
         b"M4A ": "audio/mp4", b"M4B ": "audio/mp4"}  # fmt: skip


class Attachment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file that goes with a question: its name and type, and where its content is. `EvalCase` takes a path or URL."""

    name: str
    """The path as it was written, or a file's name."""
    media_type: str
    sha256: str | None = None
    """The digest of its content; None for one behind a URL, which is not fetched."""
    size: int | None = None
    path: str | None = None
    url: str | None = None
    data: bytes | None = None

    def read(self) -> bytes:
        """Return the content; TargetError where the file has changed or cannot be read, or is behind a URL."""
        if self.data is not None:
            return self.data
        if self.path is None:
            raise TargetError(f"the attachment {self.url} is not fetched: its URL is sent")
        try:
            with open(self.path, "rb") as file:
                content = file.read()
        except OSError as error:
            raise TargetError(f"the attachment {self.name} cannot be read: {error.strerror or error}") from error
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise TargetError(f"the attachment {self.name} changed while the suite was being run: run it again")
        return content

    def __deepcopy__(self, memo: Any) -> Attachment:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Take the content along: a worker may be on another machine. A file that cannot be read is an error there."""
        data = self.data
        if self.path is not None:
            with suppress(TargetError):
                data = self.read()
        return _attachment, (self.name, self.media_type, self.sha256, self.size, self.path, self.url, data)


def _attachment(*values: Any) -> Attachment:
    return Attachment(**dict(zip(Attachment.__struct_fields__, values, strict=True)))


class BadAttachment(ValueError):
    """An attachment that cannot be used; the caller, which knows the case, adds the place."""


class AttachmentFolder:
    """Finds the files that cases name, relative to a folder.

    `within` are the folders that a path may not leave, symbolic links included: for cases from a data file, which
    somebody else may have written. None: the paths are the user's own, and may lead anywhere.
    """

    def __init__(self, folder: Path, within: Sequence[Path] | None = None) -> None:
        self._folder = folder
        self._within = within

    def file(self, written: str) -> tuple[str, str]:
        """Return the absolute path of a file, and its name as records show it; BadAttachment where it may not be."""
        path = self._folder / written
        shown = _short(written)
        real = os.path.realpath(path)
        if self._within is not None and not any(_is_under(real, folder) for folder in self._within):
            where = " or ".join(str(folder) for folder in dict.fromkeys(self._within))
            raise BadAttachment(
                f"the attachment {shown} is outside {where}, and cases from a data file may only attach what is in "
                "there: copy it, or name its folder as `attachments_from` in the suite file"
            )
        return real, Path(written).name if os.path.isabs(written) else written


def _is_under(path: str, folder: Path) -> bool:
    return Path(path).is_relative_to(os.path.realpath(folder))


def anywhere() -> AttachmentFolder:
    """Return the folder for cases made in Python: relative to the working directory, and not limited."""
    return AttachmentFolder(Path.cwd())


def has_attachments(case: EvalCase) -> bool:
    """Whether a case has attachments, or parts of messages that may be some."""
    return bool(case.attachments) or (case.messages is not None and _any_part(case.messages))


def _any_part(messages: Iterable[Mapping[str, Any]]) -> bool:
    return any(
        isinstance(part, Mapping) and ("attachment" in part or _local_place(part) is not None)
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    )


def _local_place(part: Mapping[str, Any]) -> Any:
    """Return the URL of an image part that is a file of ours, or is one that was found before; else None."""
    if part.get("type") not in ("image_url", "input_image"):
        return None
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) and "url" in image else image
    if isinstance(url, Attachment | Mapping):
        return url
    if not isinstance(url, str) or not is_local(url):
        return None
    return url if url[:5].lower() == "file:" or _by_ending(url) is not None else None


def is_local(url: str) -> bool:
    """Whether a URL means a file of this machine: a path, or a `file:` URL."""
    scheme = _scheme(url)
    return scheme is None or scheme[1].lower() == "file"


def resolved(case: EvalCase, folder: AttachmentFolder) -> EvalCase:
    """Return a copy of the case whose attachments are found, with type, size and digest; BadAttachment where not."""
    written = case.attachments
    if isinstance(written, str | bytes | Mapping | Attachment):
        written = [written]
    if not isinstance(written, list | tuple):
        raise BadAttachment(f"attachments must be a list of paths or URLs, got {_short(written)}")
    found: list[Any] = [_found(one, folder) for one in written]
    messages = case.messages and [_resolved_message(message, folder) for message in case.messages]
    every = [*found, *_in_messages(messages or ())]
    size = sum(one.size or 0 for one in every)
    if size > MAX_CASE:
        raise BadAttachment(f"the attachments are {size:,} bytes together; at most {MAX_CASE:,} are sent")
    return msgspec.structs.replace(case, attachments=found, messages=messages)


def attached(case: EvalCase) -> list[Attachment]:
    """Return the case's own attachments, not those in its messages; what is not found yet is found here."""
    if all(isinstance(one, Attachment) for one in case.attachments):
        return list(case.attachments)
    return cast(list[Attachment], resolved(case, anywhere()).attachments)


def all_attached(case: EvalCase) -> list[Attachment]:
    """Return all attachments of a case, those in its messages too."""
    if not has_attachments(case):
        return []
    found = resolved(case, anywhere())
    return [*found.attachments, *_in_messages(found.messages or ())]


def _in_messages(messages: Iterable[Mapping[str, Any]]) -> Iterable[Attachment]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            for value in part.values() if isinstance(part, Mapping) else ():
                inner = value.get("url") if isinstance(value, Mapping) else value
                if isinstance(inner, Attachment):
                    yield inner


def _resolved_message(message: dict[str, Any], folder: AttachmentFolder) -> dict[str, Any]:
    return _with_parts(message, lambda written: _found(written, folder))


def _with_parts(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the message with each attachment in its parts replaced by what `change` makes of it."""
    content = message.get("content")
    if not isinstance(content, list) or not _any_part((message,)):
        return message
    return {**message, "content": [_with_part(part, change) for part in content]}


def _with_part(part: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(part, Mapping):
        return part
    if "attachment" in part:
        return {"type": "attachment", **part, "attachment": change(part["attachment"])}
    place = _local_place(part)
    if place is None:
        return part
    image = part["image_url"]
    inside = isinstance(image, Mapping) and "url" in image
    return {**part, "image_url": {**image, "url": change(place)} if inside else change(place)}


def _found(written: Any, folder: AttachmentFolder) -> Attachment:
    """Return an attachment from what a case says: a path, a URL, bytes, or a mapping with one of these."""
    if isinstance(written, Attachment):
        return written
    if isinstance(written, str):
        written = {"path" if is_local(written) else "url": written}
    elif isinstance(written, bytes):
        written = {"data": written}
    if not isinstance(written, Mapping):
        raise BadAttachment(f"an attachment must be a path, a URL or a mapping with one, got {_short(written)}")
    unknown = sorted(map(str, written.keys() - _FIELDS))
    if unknown:
        raise BadAttachment(f"unknown key {unknown[0]!r} of an attachment; known: path, url, data, media_type, name")
    data = written.get("data") if written.get("data") is not None else written.get("bytes")
    given = [name for name in ("path", "url") if written.get(name) is not None]
    kind, name = written.get("media_type"), written.get("name")
    for what, value in (*((one, written[one]) for one in given), ("media_type", kind), ("name", name)):
        if value is not None and not isinstance(value, str):
            raise BadAttachment(f"{what} of an attachment must be text, got {_short(value)}")
    if data is not None:
        return _from_bytes(_decoded(data), kind, name or written.get("path"))
    if len(given) != 1 or not written[given[0]]:
        raise BadAttachment("an attachment needs either a path, a url or data")
    if given == ["path"] or is_local(written[given[0]]):
        return _from_file(written[given[0]], kind, name, folder)
    return _from_url(written["url"], kind, name)


def _decoded(data: Any) -> bytes:
    if isinstance(data, bytes):
        return data
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise BadAttachment(f"data of an attachment must be bytes or their base64, got {_short(data)}") from None


def _from_url(url: str, kind: str | None, name: str | None) -> Attachment:
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        parts = _data_url(url)
        if parts is None:
            raise BadAttachment(f"{_short(url)} is not a data URL: data:image/png;base64,…")
        content = _decoded("".join(unquote(parts[4]).split())) if parts[3] else unquote_to_bytes(parts[4])
        return _from_bytes(content, kind or parts[1], name)
    if scheme not in _REMOTE:
        raise BadAttachment(f"an attachment's URL must be {', '.join(_REMOTE)} or data, got {_short(url)}")
    if scheme in ("http", "https") and not urlsplit(url).hostname:
        raise BadAttachment(f"the attachment's URL {_short(url)} has no host")
    last = Path(unquote(urlsplit(url).path)).name
    kind = kind or _by_ending(last)
    if kind is None:
        raise BadAttachment(f"what {_short(url)} is cannot be told from its name: add media_type, such as image/png")
    return Attachment(name=name or last or "attachment", media_type=kind, url=url)


def _from_bytes(content: bytes, kind: str | None, name: str | None) -> Attachment:
    _check_size(len(content), "an attachment")
    kind = kind or media_type_of(content, name or "")
    if kind is None:
        raise BadAttachment("what an attachment's data is cannot be told: add media_type, such as image/png")
    digest = hashlib.sha256(content).hexdigest()
    return Attachment(name=name or digest[:12], media_type=kind, sha256=digest, size=len(content), data=content)


def _from_file(written: str, kind: str | None, name: str | None, folder: AttachmentFolder) -> Attachment:
    if written[:5].lower() == "file:":
        written = unquote(urlsplit(written).path)
    path, shown = folder.file(written)
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            raise BadAttachment(f"the attachment {_short(shown)} is not a regular file")
        _check_size(about.st_size, f"the attachment {_short(shown)}")
        digest, detected = _digest(path, (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns))
    except OSError as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise BadAttachment(f"the attachment {_short(shown)} cannot be read ({path}): {problem}") from error
    kind = kind or detected
    if kind is None:
        raise BadAttachment(
            f"what the attachment {_short(shown)} is cannot be told: write it as a mapping, with path and media_type"
        )
    return Attachment(name=name or shown, media_type=kind, sha256=digest, size=about.st_size, path=path)


def _check_size(size: int, what: str) -> None:
    if size > MAX_FILE:
        raise BadAttachment(f"{what} is {size:,} bytes; at most {MAX_FILE:,} are sent")
    if not size:
        raise BadAttachment(f"{what} is empty")


@lru_cache(maxsize=1 << 16)
def _digest(path: str, state: tuple[int, ...]) -> tuple[str, str | None]:  # noqa: ARG001 - a changed file is read again
    """Return the digest of a file's content, and what it is."""
    with open(path, "rb") as file:
        beginning = file.read(64)
        digest = hashlib.sha256(beginning)
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest(), media_type_of(beginning, path)


def media_type_of(beginning: bytes, name: str) -> str | None:
    """Return what a file is by its first bytes, else by the ending of its name; None where neither tells."""
    for start, kind in _BEGINNINGS:
        if beginning.startswith(start):
            return kind
    if beginning.startswith(b"RIFF") and beginning[8:12] in _RIFF:
        return _RIFF[beginning[8:12]]
    if beginning[4:8] == b"ftyp" and beginning[8:12] in _FTYP:
        return _FTYP[beginning[8:12]]
    return _by_ending(name)


def _by_ending(name: str) -> str | None:
    return _KNOWN.get(Path(name).suffix.lower().removeprefix("."))


def with_contents(case: EvalCase) -> EvalCase:
    """Return the case with its attachments' contents as parts of its messages, in the shape of OpenAI's chat API.

    Those of the case itself go before its prompt, or, without one, into its last message.
    """
    try:
        case = resolved(case, anywhere())
    except BadAttachment as error:
        raise TargetError(str(error)) from error
    messages = [_native_message(message) for message in case.messages or ()]
    parts = [native_part(one) for one in case.attachments]
    if case.prompt is not None:
        last: dict[str, Any] = {"role": "user", "content": case.prompt}
    elif parts:
        is_last = bool(messages) and messages[-1].get("role") == "user"
        last = messages.pop() if is_last else {"role": "user", "content": []}
    else:
        return msgspec.structs.replace(case, messages=messages, attachments=[])
    if parts:
        content = last["content"]
        words = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        last = {**last, "content": [*parts, *words]}
    return msgspec.structs.replace(case, prompt=None, messages=[*messages, last], attachments=[])


def _native_message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list) or not _any_part((message,)):
        return message
    parts = [
        native_part(part["attachment"])
        if isinstance(part, Mapping) and "attachment" in part
        else _with_part(part, lambda one: data_url(one))
        for part in content
    ]
    return {**message, "content": parts}


def native_part(attachment: Attachment) -> dict[str, Any]:
    """Return an attachment as a part of a message in the shape of OpenAI's chat API, which all targets translate."""
    kind, _, ending = attachment.media_type.partition("/")
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": data_url(attachment)}}
    if kind == "audio" and attachment.url is None:
        audio = {"data": base64.b64encode(attachment.read()).decode(), "format": AUDIO_FORMATS.get(ending, ending)}
        return {"type": "input_audio", "input_audio": audio}
    name = Path(attachment.name).name
    if attachment.url is not None:
        url = {"filename": name, "file_url": attachment.url}
        return {"type": "file", "file": url, "media_type": attachment.media_type}
    return {"type": "file", "file": {"filename": name, "file_data": data_url(attachment)}}


def file_url(case: EvalCase) -> str | None:
    """Return the URL of a file in a case with contents that is no image; None where there is none."""
    for message in case.messages or ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            file = part.get("file") if isinstance(part, Mapping) else None
            if isinstance(file, Mapping) and isinstance(file.get("file_url"), str):
                return cast(str, file["file_url"])
    return None


AUDIO_FORMATS = {"mpeg": "mp3", "x-wav": "wav", "wave": "wav", "mp4": "m4a"}
"""What the APIs call the formats whose media type has another name."""


def data_url(attachment: Attachment) -> str:
    """Return the attachment's own URL, or its content as one."""
    if attachment.url is not None:
        return attachment.url
    return f"data:{attachment.media_type};base64,{base64.b64encode(attachment.read()).decode()}"


def identity(attachment: Attachment) -> list[str]:
    """Return what an answer depends on: name and type, as they are sent, and content. A URL counts as it is written."""
    return [Path(attachment.name).name, attachment.media_type, attachment.sha256 or attachment.url or ""]


def messages_by_content(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the messages with the attachments in them replaced by what an answer depends on."""
    if messages is None or not _any_part(messages):
        return messages
    folder = anywhere()
    return [_with_parts(message, lambda written: identity(_found(written, folder))) for message in messages]


def messages_by_name(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the messages with the attachments in them replaced by their names, which decide an automatic id."""
    if messages is None or not _any_part(messages):
        return messages
    folder = anywhere()
    return [_with_parts(message, lambda written: attachment_name(_found(written, folder))) for message in messages]


def attachment_name(attachment: Attachment) -> str:
    """Return what names an attachment: its URL, its path as written, or the digest of data without a name."""
    return attachment.url or attachment.name


def shown(attachment: Any) -> str:
    """Return an attachment in words, for reports and prompts: name, type and size, never its content."""
    if not isinstance(attachment, Attachment):
        return f"[attachment {_short(attachment)}]"
    size = "" if attachment.size is None else f", {attachment.size:,} bytes"
    return f"[attachment {attachment.url or attachment.name}, {attachment.media_type}{size}]"


def without_contents(payload: Any) -> Any:
    """Return a request's body with the contents of files in it replaced by their size and digest."""
    if isinstance(payload, list):
        return [without_contents(one) for one in payload]
    if not isinstance(payload, dict):
        return payload
    return {
        name: _digest_text(value)
        if name in _CONTENT_FIELDS and isinstance(value, str) and len(value) >= _MIN_HIDDEN
        else without_contents(value)
        for name, value in payload.items()
    }


def _digest_text(text: str) -> str:
    parts = _data_url(text) if text.startswith("data:") else None
    encoded = cast(str, parts[4]) if parts is not None else text
    if parts is None and not _is_base64(text):
        return text
    try:
        content = base64.b64decode(encoded, altchars=b"-_" if "-" in encoded or "_" in encoded else None)
    except (binascii.Error, ValueError):
        content = encoded.encode()
    kind = f"{parts[1]}, " if parts is not None and parts[1] else ""
    return f"[{kind}{len(content):,} bytes, sha256 {hashlib.sha256(content).hexdigest()}]"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
