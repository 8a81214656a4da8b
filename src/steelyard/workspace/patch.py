"""What an agent changed in its workspace, as a patch against the template that git can read, and its way back.

The patch has each path that changed since the setup, as its difference from the template. To rebuild a workspace, the
template and its setup are made again, and each path of the patch is set to what the template has there, changed. `.git`
and the caches of Python's tools are left out, as are empty folders.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.workspace.template import Template, TreeEntry, read_entry

LEFT_OUT = frozenset({".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"})
MAX_FILE = 64 << 20
"""Bytes of a changed file that a patch holds; a larger one is named as left out."""
_MAX_DIFFED_LINES = 2000
"""Lines between the first and the last that differ: more are replaced as a whole, which takes no time to compute."""
_NO_NEWLINE = b"\\ No newline at end of file\n"
_ZERO = "0" * 40


class Stamp(NamedTuple):
    """What tells whether a file was touched: a program cannot set its own change time."""

    inode: int
    size: int
    mode: int
    modified: int
    changed: int


class Scan(NamedTuple):
    """The files and links of a folder, by path, and how many bytes they have."""

    stamps: dict[str, Stamp]
    total: int


def scan(folder: Path) -> Scan:
    """Look at all files of a folder, without following links. What cannot be looked at is passed over."""
    stamps: dict[str, Stamp] = {}
    total = 0
    waiting = [""]
    root = os.fspath(folder)
    while waiting:
        prefix = waiting.pop()
        try:
            with os.scandir(f"{root}/{prefix}") as found:
                for one in found:
                    if one.is_dir(follow_symlinks=False):
                        if one.name not in LEFT_OUT:
                            waiting.append(f"{prefix}{one.name}/")
                        continue
                    seen = one.stat(follow_symlinks=False)
                    total += seen.st_size
                    if one.name not in LEFT_OUT:
                        stamp = Stamp(seen.st_ino, seen.st_size, seen.st_mode, seen.st_mtime_ns, seen.st_ctime_ns)
                        stamps[f"{prefix}{one.name}"] = stamp
        except OSError:
            continue
    return Scan(stamps, total)


class PatchSummary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a patch is of; written beside it."""

    template: str
    """The digest of the template."""
    attempt: int = 1
    files: int = 0
    added: int = 0
    removed: int = 0
    restored: list[str] = []
    """Paths that are again what the template has there, after the setup had changed them."""
    deleted: list[str] = []
    """Paths that the setup had made and that are gone."""
    left_out: list[str] = []
    """Paths that the patch does not hold: too large, or neither a file nor a link. Such a case cannot be rebuilt."""


def make_patch(template: Template, before: Scan, after: Scan, folder: Path, attempt: int) -> tuple[bytes, PatchSummary]:
    """The patch of what was changed between two scans of a workspace."""
    summary = PatchSummary(template=template.digest, attempt=attempt)
    parts: list[bytes] = []
    old_stamps, new_stamps = before.stamps, after.stamps
    touched = {path for path, stamp in new_stamps.items() if old_stamps.get(path) != stamp}
    touched |= old_stamps.keys() - new_stamps.keys()
    for path in sorted(touched):
        old = template.read(path)
        if path in new_stamps and (new_stamps[path].size > MAX_FILE or not _is_plain(new_stamps[path])):
            summary.left_out.append(path)
            continue
        try:
            new = read_entry(folder, path) if path in new_stamps else None
        except OSError:
            summary.left_out.append(path)
            continue
        if old == new or (old is not None and new is not None and _same(old, new)):
            if new is None:
                summary.deleted.append(path)
            elif path in old_stamps:
                summary.restored.append(path)
            continue
        parts.extend(_difference(path, old, new, summary))
        summary.files += 1
    return b"".join(parts), summary


def _is_plain(stamp: Stamp) -> bool:
    return stat.S_ISREG(stamp.mode) or stat.S_ISLNK(stamp.mode)


def _same(old: tuple[TreeEntry, bytes], new: tuple[TreeEntry, bytes]) -> bool:
    return _mode(old[0]) == _mode(new[0]) and old[1] == new[1]


def _mode(entry: TreeEntry) -> str:
    return "120000" if entry.is_link else "100755" if entry.executable else "100644"


def blob_id(content: bytes) -> str:
    """The name that git gives to this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _difference(
    path: str, old: tuple[TreeEntry, bytes] | None, new: tuple[TreeEntry, bytes] | None, summary: PatchSummary
) -> Iterator[bytes]:
    if old is not None and new is not None and old[0].is_link != new[0].is_link:  # git has no way to say it in one
        yield from _difference(path, old, None, summary)
        yield from _difference(path, None, new, summary)
        return
    yield f"diff --git {_quoted('a/' + path)} {_quoted('b/' + path)}\n".encode()
    old_mode = None if old is None else _mode(old[0])
    new_mode = None if new is None else _mode(new[0])
    if old is None:
        yield f"new file mode {new_mode}\n".encode()
    elif new is None:
        yield f"deleted file mode {old_mode}\n".encode()
    elif old_mode != new_mode:
        yield f"old mode {old_mode}\nnew mode {new_mode}\n".encode()
    before, after = (b"" if old is None else old[1]), (b"" if new is None else new[1])
    if before == after and old is not None and new is not None:
        return
    names = (_ZERO if old is None else blob_id(before)), (_ZERO if new is None else blob_id(after))
    mode = f" {new_mode}" if old_mode == new_mode else ""
    yield f"index {names[0]}..{names[1]}{mode}\n".encode()
    if not before and not after:
        return
    if b"\0" in before or b"\0" in after:
        yield b"GIT binary patch\n"
        yield _literal(after)
        yield _literal(before)
        return
    yield b"--- %b\n" % (b"/dev/null" if old is None else _quoted("a/" + path).encode())
    yield b"+++ %b\n" % (b"/dev/null" if new is None else _quoted("b/" + path).encode())
    for line in _text_hunks(before, after):
        summary.added += line.startswith(b"+")
        summary.removed += line.startswith(b"-")
        yield line


def _text_hunks(before: bytes, after: bytes) -> Iterator[bytes]:
    """The lines of a unified difference with three lines of context."""
    old, new = _lines(before), _lines(after)
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    middle_old, middle_new = old[start : len(old) - end], new[start : len(new) - end]
    if max(len(middle_old), len(middle_new)) <= _MAX_DIFFED_LINES:
        blocks = difflib.SequenceMatcher(None, middle_old, middle_new).get_opcodes()
    else:
        blocks = [("replace", 0, len(middle_old), 0, len(middle_new))]
    codes = [("equal", 0, start, 0, start)] if start else []
    codes += [(kind, a + start, b + start, c + start, d + start) for kind, a, b, c, d in blocks if (a, c) != (b, d)]
    if end:
        codes.append(("equal", len(old) - end, len(old), len(new) - end, len(new)))
    for group in _grouped(codes, 3):
        first, last = group[0], group[-1]
        yield b"@@ -%b +%b @@\n" % (_range(first[1], last[2]), _range(first[3], last[4]))
        for kind, a, b, c, d in group:
            if kind == "equal":
                yield from _signed(b" ", old[a:b])
            else:
                yield from _signed(b"-", old[a:b])
                yield from _signed(b"+", new[c:d])


def _grouped(
    codes: list[tuple[str, int, int, int, int]], context: int
) -> Iterator[list[tuple[str, int, int, int, int]]]:
    """The codes in groups of changes, each with a few equal lines around it."""
    group: list[tuple[str, int, int, int, int]] = []
    for place, (kind, a, b, c, d) in enumerate(codes):
        if kind != "equal":
            group.append((kind, a, b, c, d))
            continue
        lead, trail = place > 0, place < len(codes) - 1
        if lead and trail and b - a > 2 * context:
            yield [*group, (kind, a, a + context, c, c + context)]
            group = [(kind, b - context, b, d - context, d)]
        elif lead and not trail:
            kept = min(context, b - a)
            group.append((kind, a, a + kept, c, c + kept))
        elif trail and not lead:
            kept = min(context, b - a)
            group.append((kind, b - kept, b, d - kept, d))
        else:
            group.append((kind, a, b, c, d))
    if any(kind != "equal" for kind, *_ in group):
        yield group


def _range(start: int, end: int) -> bytes:
    length = end - start
    return b"%d,%d" % (start + 1 if length else start, length)


def _signed(sign: bytes, lines: Iterable[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield sign + line if line.endswith(b"\n") else sign + line + b"\n" + _NO_NEWLINE


def _lines(content: bytes) -> list[bytes]:
    """The lines of a text, each with its end."""
    lines = [line + b"\n" for line in content.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _literal(content: bytes) -> bytes:
    packed = zlib.compress(content)
    lines = [b"literal %d\n" % len(content)]
    for start in range(0, len(packed), 52):
        piece = packed[start : start + 52]
        length = bytes([len(piece) + (64 if len(piece) <= 26 else 70)])
        lines.append(length + base64.b85encode(piece, pad=True) + b"\n")
    return b"".join(lines) + b"\n"


def _quoted(path: str) -> str:
    """A path as git writes it: in quotes with escapes where it is not plain."""
    raw = path.encode("utf-8", "surrogateescape")
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in raw):
        return path
    escaped = "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:03o}" for b in raw)
    return f'"{escaped}"'


_ESCAPED = re.compile(rb"\\([0-7]{3})")


def _unquoted(text: bytes) -> str:
    if text.startswith(b'"') and text.endswith(b'"'):
        text = _ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), text[1:-1])
    return text.decode("utf-8", "surrogateescape")


class _Change(NamedTuple):
    path: str
    mode: str | None
    """The new mode; None for a deleted file, empty where it stays."""
    is_new: bool
    content_id: str | None
    body: list[bytes]


def apply_patch(patch: bytes, summary: PatchSummary, template: Template, folder: Path) -> None:
    """Make a folder with the template and its setup into the workspace that the patch was made of."""
    if template.digest != summary.template:
        raise ConfigurationError("its template was edited since")
    if summary.left_out:
        raise ConfigurationError(f"the patch does not hold {', '.join(summary.left_out[:3])}")
    changes = list(_changes(patch))
    for path in (*summary.deleted, *(change.path for change in changes if change.mode is None)):
        _remove(folder, path)
    for path in summary.restored:
        found = template.read(path)
        if found is not None:
            _write(folder, path, _mode(found[0]), found[1])
    for change in changes:
        if change.mode is not None:
            _apply(change, template, folder)


def _apply(change: _Change, template: Template, folder: Path) -> None:
    old = None if change.is_new else template.read(change.path)
    if not change.is_new and old is None:
        raise ConfigurationError(f"the template has no {change.path}")
    content = _patched(b"" if old is None else old[1], change)
    if change.content_id is not None and blob_id(content) != change.content_id:
        raise ConfigurationError(f"the patch of {change.path} does not fit the template")
    _write(folder, change.path, change.mode or _mode(old[0] if old is not None else TreeEntry(change.path)), content)


def _changes(patch: bytes) -> Iterator[_Change]:
    """The files of a patch that `make_patch` made."""
    lines = _lines(patch)
    starts = _entry_starts(lines)
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=False):
        head, body_at = lines[start][len(b"diff --git ") :].rstrip(b"\n"), start + 1
        path = _new_path(head)
        mode: str | None = ""
        is_new, content_id = False, None
        while body_at < end and not lines[body_at].startswith((b"@@", b"GIT binary")):
            word = lines[body_at].rstrip(b"\n")
            if word.startswith((b"new file mode ", b"new mode ")):
                mode, is_new = word.rpartition(b" ")[2].decode(), word.startswith(b"new file")
            elif word.startswith(b"deleted file mode "):
                mode = None
            elif word.startswith(b"index "):
                content_id = word[len(b"index ") :].split(b" ")[0].partition(b"..")[2].decode()
            body_at += 1
        yield _Change(path, mode, is_new, content_id, lines[body_at:end])


def _entry_starts(lines: list[bytes]) -> list[int]:
    """Where each file's part begins; lines of content begin with a sign, those of binaries with a length."""
    starts, in_binary = [], False
    for place, line in enumerate(lines):
        if line.startswith(b"diff --git ") and not (in_binary and lines[place - 1] != b"\n"):
            starts.append(place)
            in_binary = False
        elif line == b"GIT binary patch\n":
            in_binary = True
    return starts


def _new_path(head: bytes) -> str:
    """The path in `a/PATH b/PATH`, whose two halves are the same but for their first letter."""
    half = (len(head) - 1) // 2
    return _unquoted(head[half + 1 :])[2:]


def _patched(old: bytes, change: _Change) -> bytes:
    if not change.body:
        return old if not change.is_new else b""
    if change.body[0] == b"GIT binary patch\n":
        return _from_literal(change.body[1:])
    before, after, place = _lines(old), list[bytes](), 0
    for number, line in enumerate(change.body):
        if line.startswith(b"@@"):
            start, length = (int(part) for part in line.split()[1][1:].split(b","))
            start = start - 1 if length else start
            after += before[place:start]
            place = start
        elif line.startswith(b" "):
            after.append(before[place] if place < len(before) else b"")
            place += 1
        elif line.startswith(b"-"):
            place += 1
        elif line.startswith(b"+"):
            after.append(line[1:])
        elif line == _NO_NEWLINE and after and change.body[number - 1].startswith(b"+"):
            after[-1] = after[-1].removesuffix(b"\n")
    return b"".join([*after, *before[place:]])


def _from_literal(lines: list[bytes]) -> bytes:
    packed = bytearray()
    for line in lines[1:]:
        if line == b"\n":
            break
        length = line[0] - (64 if line[0] <= 90 else 70)
        packed += base64.b85decode(line[1:].rstrip(b"\n"))[:length]
    return zlib.decompress(bytes(packed))


def _place_of(folder: Path, path: str) -> Path:
    """Where a path of a patch is; never through a link, nor outside the folder."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ConfigurationError(f"the patch has the path {path!r}, which is not within a workspace")
    place = folder
    for part in parts[:-1]:
        place = place / part
        if place.is_symlink() or place.is_file():
            place.unlink()
    return folder / path


def _remove(folder: Path, path: str) -> None:
    place = _place_of(folder, path)
    try:
        place.unlink()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
        return
    for parent in place.parents:
        if parent == folder:
            return
        try:
            parent.rmdir()
        except OSError:
            return


def _write(folder: Path, path: str, mode: str, content: bytes) -> None:
    place = _place_of(folder, path)
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink() or place.exists():
        place.unlink()
    if mode == "120000":
        os.symlink(os.fsdecode(content), place)
        return
    place.write_bytes(content)
    place.chmod(0o755 if mode == "100755" else 0o644)
