"""File names for ids: readable, and never one name for two ids, whatever the file system folds together."""

from __future__ import annotations

import re
from hashlib import blake2b

_LONGEST = 100
_LONGEST_READABLE = 60

# Lower-case ASCII only: some file systems take A for a, and é for e with an accent.
_is_plain = re.compile(rf"[a-z0-9_](?:[a-z0-9_.-]{{0,{_LONGEST - 2}}}[a-z0-9_-])?").fullmatch
_is_device = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?").fullmatch
_others = re.compile(r"[^a-z0-9_-]+")  # dots too: `nul.txt~…` would still be a device


def file_name(identifier: str) -> str:
    """The id itself where it is safe as a file name everywhere; else its readable part, `~` and a digest of it."""
    if _is_plain(identifier) and not _is_device(identifier):
        return identifier
    # A long id is cut before it is looked at; `~` is in no plain name, so that the two kinds never meet.
    readable = _others.sub("_", identifier[:_LONGEST_READABLE].lower()).strip("_-")
    digest = blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{readable[:_LONGEST_READABLE]}~{digest}"
