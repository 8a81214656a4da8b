"""The `crc32` at the end of each line of a journal: every flipped bit is found, and most can be flipped back.

A line is a JSON object whose last key is `crc32`, eight hex digits: the CRC-32 of all bytes before the comma that
precedes the key. A single flipped bit changes it in a way that tells which bit that was. A line in which more differs
was rewritten, by a program or a person: it is edited, not damaged.
"""

from __future__ import annotations

import enum
from functools import cache
from zlib import crc32

import numpy as np
import numpy.typing as npt

_KEY = b',"crc32":"'
_END = b'"}'
SEAL_BYTES = len(_KEY) + 8 + len(_END)
"""How long the end of a line is that holds its checksum, without the newline."""

_DIGITS = slice(len(_KEY), len(_KEY) + 8)
_KEY_SIGNS = np.frombuffer(_KEY, dtype=np.uint8)
_END_SIGNS = np.frombuffer(_END, dtype=np.uint8)
_POLYNOMIAL = 0xEDB88320


class Line(enum.Enum):
    """What the checksum says of a line that is a record."""

    SOUND = "sound"
    OLD = "old"
    """It has none, as those that were written before there were checksums."""
    EDITED = "edited"
    DAMAGED = "damaged"


def seal(encoded: bytes) -> tuple[bytes, int]:
    """The line of an encoded object, with its checksum and newline, and that checksum."""
    content = encoded[:-1]
    crc = crc32(content)
    return b'%b,"crc32":"%08x"}\n' % (content, crc), crc


def sealed(encoded: bytes) -> bytes:
    """The same, only the line."""
    return seal(encoded)[0]


def stored_crc(line: bytes) -> int | None:
    """The checksum that a line, without its newline, carries at its end; None where it carries none."""
    end = line[-SEAL_BYTES:]
    if end[: len(_KEY)] != _KEY or end[-len(_END) :] != _END:
        return None
    digits = end[_DIGITS]
    try:
        crc = int(digits, 16)
    except ValueError:
        return None
    return crc if b"%08x" % crc == digits else None


def is_sound(line: bytes) -> bool:
    """Whether the checksum of a line, without its newline, is that of its bytes."""
    return line[-SEAL_BYTES:] == _seal_of(line[:-SEAL_BYTES])


def judge(line: bytes, version: int) -> Line:
    """What became of a line that can be read as a record of this version."""
    if is_sound(line):
        return Line.SOUND
    if stored_crc(line) is None and version < 2 and b'"crc32":' not in line[-2 * SEAL_BYTES :]:
        return Line.OLD
    return Line.EDITED if repaired(line) is None else Line.DAMAGED


def repaired(line: bytes) -> bytes | None:
    """The line as it was, where a single flipped bit is all that is wrong with it; else None."""
    if len(line) <= SEAL_BYTES:
        return None
    content, end = line[:-SEAL_BYTES], line[-SEAL_BYTES:]
    expected = _seal_of(content)
    wrong = int.from_bytes(expected) ^ int.from_bytes(end)
    if wrong.bit_count() == 1:  # in the checksum itself, or in its key
        return content + expected
    stored = stored_crc(line)
    place = None if stored is None else _flipped_bit(crc32(content) ^ stored, len(content))
    if place is None:
        return None
    byte, bit = divmod(place, 8)
    fixed = bytearray(line)
    fixed[byte] ^= 1 << bit
    return bytes(fixed)


def _seal_of(content: bytes) -> bytes:
    return b"%b%08x%b" % (_KEY, crc32(content), _END)


def _flipped_bit(difference: int, length: int) -> int | None:
    """Which bit of a text of this length changes its CRC-32 by this difference, if one alone does.

    The CRC is linear: a bit at some distance from the end changes it in its own way, whatever the text says.
    """
    table, by_top, single = _tables()
    for distance in range(length):
        if difference in single:
            return (length - 1 - distance) * 8 + single[difference]
        # One step back: what the difference was before the CRC took in one more byte.
        number = by_top[difference >> 24]
        difference = ((difference ^ table[number]) << 8 & 0xFFFFFFFF) | number
    return None


@cache
def _tables() -> tuple[list[int], dict[int, int], dict[int, int]]:
    """The table of CRC-32, its entries by their first byte, and what each bit of the last byte changes."""
    table = []
    for number in range(256):
        value = number
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return (
        table,
        {value >> 24: number for number, value in enumerate(table)},
        {table[1 << bit]: bit for bit in range(8)},
    )


def are_sound(block: memoryview, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> list[int] | None:
    """The checksums of many lines at once; None unless each one has its own and is as it was written."""
    if (lengths < SEAL_BYTES).any():
        return None
    ends = starts + lengths
    crcs = [crc32(block[start:end]) for start, end in zip(starts.tolist(), (ends - SEAL_BYTES).tolist(), strict=True)]
    found = seals_match(np.frombuffer(block, dtype=np.uint8), ends, np.array(crcs, dtype=np.uint32))
    return crcs if bool(found.all()) else None


def seals_match(
    data: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64], crcs: npt.NDArray[np.uint32]
) -> npt.NDArray[np.bool_]:
    """Whether each of the lines that end there carries that checksum."""
    found = data[(ends - SEAL_BYTES)[:, None] + np.arange(SEAL_BYTES)]
    digits = np.frombuffer(crcs.astype(">u4").tobytes().hex().encode(), dtype=np.uint8).reshape(-1, 8)
    same = (found[:, : len(_KEY)] == _KEY_SIGNS).all(axis=1)
    same &= (found[:, _DIGITS] == digits).all(axis=1)
    same &= (found[:, _DIGITS.stop :] == _END_SIGNS).all(axis=1)
    return np.asarray(same, dtype=bool)
