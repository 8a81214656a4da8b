"""File names of ids: never one for two, never outside the root, on any file system."""

from __future__ import annotations

import itertools
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.cache.files import file_name

AWKWARD = [
    "a/b", "a\\b", "a:b", "..", ".", "", "...", "../../etc/passwd", "/etc/passwd", "C:\\x", "\\\\host\\share",
    "CON", "con", "nul.txt", "COM1", "lpt9.log", "aux", "a.", "a ", " a", "a..", ".hidden", "-rf", "--", "~", "~root",
    "a\0b", "\0", "a\nb", "x" * 300, "x" * 299 + "y", "X" * 300, "Case", "case", "CASE", "é", "e\u0301", "ﬁ", "fi",
    "İ", "\u0131", "ß", "SS", "😀", "שלום", "\u202eabc", "\ud800", "\udfff", "a*b?", 'a"b', "a|b", "<a>",
    "%2e%2e", "a%00",
]  # fmt: skip
PLAIN = ["a", "case-1", "gsm8k_0042", "0", "_", "x.y.z", "v1.2-rc", "console", "com10", "x" * 100]


def folded(name: str) -> str:
    """What the most forgetful of file systems would keep of a name."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def is_portable(name: str) -> bool:
    stem = name.partition(".")[0]
    return (
        re.fullmatch(r"[a-z0-9_.~-]{1,120}", name) is not None
        and name[0] not in ".-"
        and name[-1] != "."
        and stem not in ("con", "prn", "aux", "nul", *(f"{kind}{n}" for kind in ("com", "lpt") for n in range(10)))
    )


@pytest.mark.parametrize("identifier", PLAIN)
def test_a_plain_id_is_its_own_name(identifier):
    assert file_name(identifier) == identifier
    assert is_portable(identifier)


@pytest.mark.parametrize("identifier", AWKWARD)
def test_an_awkward_id_gets_a_portable_name(identifier):
    assert is_portable(file_name(identifier))


def test_awkward_ids_do_not_meet_even_where_case_and_unicode_forms_are_one():
    every = [*AWKWARD, *PLAIN, *(file_name(identifier) for identifier in AWKWARD)]
    names = {folded(file_name(identifier)): identifier for identifier in every}
    assert len(names) == len(set(every))


def test_the_readable_part_is_kept():
    assert re.fullmatch(r"gsm8k_test_0042~[0-9a-f]{32}", file_name("GSM8K/test 0042"))


@settings(max_examples=500)
@given(st.text(st.characters(), max_size=400))
def test_any_text_gets_a_portable_name(identifier):
    assert is_portable(file_name(identifier))


def test_a_million_ids_have_a_million_names():
    """Each pair of a stem and a way to write it down, so that thousands look alike once folded or cleaned."""
    ways = [
        "{}", "{}/", "/{}", "{}\\", "{} ", " {}", "{}.", ".{}", "-{}", "{}-", "{}~", "~{}", "{}\0", "{}\u0301",
        "{}\u202e", "{}😀", "A{}", "a{}", "Á{}", "A\u0301{}", "{}_", "{}:", "../{}", "..\\{}", "{}/..",
    ]  # fmt: skip
    identifiers = (way.format(number) for way, number in itertools.product(ways, range(40_000)))
    names = {file_name(identifier) for identifier in identifiers}
    assert len(names) == len(ways) * 40_000 == 1_000_000
    assert all(map(re.compile(r"[a-z0-9_~][a-z0-9_.~-]*").fullmatch, names))  # so folding cannot join any two
