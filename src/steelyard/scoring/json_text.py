"""JSON as models write it: alone, in a fence, or somewhere in prose; and when two JSON values are the same."""

from __future__ import annotations

import json
import re
from typing import Any

# Each failed try costs a count of the lines before it; prose with more brackets than this holds no JSON we can find.
_TRIES = 500
_FENCED = re.compile(r"```[\w+-]{0,20}\s{0,20}(?=[\[{])")
_OPENING = re.compile(r'\{(?=\s{0,1000}["}])|\[(?=\s{0,1000}(?:["\[{\]\d-]|true|false|null))')


class NoJson(ValueError):
    """A text without JSON that can be read."""


def _refuse(constant: str) -> Any:
    raise NoJson(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def read_json(text: str) -> Any:
    """The value of a text that is JSON, else of its first fence that is, else of its first whole object or array.

    Time is linear in the text: after a failure the search goes on from where the failed value broke off, so that
    the inside of a truncated object is not taken for the answer either.
    """
    text = text.strip()
    try:
        return _whole(text)
    except json.JSONDecodeError:
        pass
    except (RecursionError, ValueError) as error:
        raise NoJson(f"the JSON cannot be read: {error}") from error
    for pattern in (_FENCED, _OPENING):
        found, value = _first(pattern, text)
        if found:
            return value
    raise NoJson("no JSON in it")


def _whole(text: str) -> Any:
    value, end = _DECODER.raw_decode(text)
    if end != len(text):
        raise json.JSONDecodeError("more after it", text, end)
    return value


def _first(pattern: re.Pattern[str], text: str) -> tuple[bool, Any]:
    """Whether a value could be read where the pattern points, and the first such value."""
    position = 0
    for _ in range(_TRIES):
        match = pattern.search(text, position)
        if match is None:
            break
        start = match.end() if pattern is _FENCED else match.start()
        try:
            return True, _DECODER.raw_decode(text, start)[0]
        except json.JSONDecodeError as error:
            position = max(error.pos, start + 1)
        except (RecursionError, ValueError):  # too deep, a number without end, NaN
            break
    return False, None


def same_json(left: Any, right: Any) -> bool:
    """Equality as JSON has it: 1 is 1.0, but true is not 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_json(item, right[key]) for key, item in left.items())
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same_json, left, right))
    return bool(left == right)
