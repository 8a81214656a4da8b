"""The pictures in the docs: each is shown somewhere, says in words what it shows, and is small enough to clone."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
IMAGES = sorted((DOCS / "images").glob("*.png"))
SHOWN = {
    name: words
    for page in DOCS.glob("*.md")
    for words, name in re.findall(r"!\[([^\]]*)\]\(images/([^)]+)\)", page.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_each_picture_is_small_and_wide_enough_to_be_read(image: Path) -> None:
    assert image.stat().st_size < 200_000
    width, height = struct.unpack(">II", image.read_bytes()[16:24])
    assert width >= 1_000
    assert 0.3 < height / width < 1.6


def test_each_picture_is_shown_with_words_for_those_who_cannot_see_it() -> None:
    assert sorted(SHOWN) == [image.name for image in IMAGES]
    assert [name for name, words in SHOWN.items() if len(words.split()) < 5] == []


def test_the_script_makes_every_picture() -> None:
    source = (DOCS.parent / "scripts" / "screenshots.py").read_text(encoding="utf-8")
    for image in IMAGES:
        stem = re.sub("-(light|dark)$", "", image.stem)
        assert f'"{stem}' in source, image.name
