"""Files below a folder that anybody may have written to: links and paths that lead out are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from steelyard.disk import NotAFile, read_beneath


def test_a_file_below_the_folder_is_read_up_to_a_bound(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"0123456789")
    assert read_beneath(tmp_path, "a/b/file", 100) == b"0123456789"
    assert read_beneath(tmp_path, "a/b/file", 4) == b"0123"


@pytest.mark.parametrize(
    "path", ["", ".", "..", "../secret", "a/../../secret", "/etc/passwd", "a//file", "a/./file", "a/file/", "a\0b", "a"]
)
def test_a_path_that_is_not_plain_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_text("x")
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "a" / "file").write_text("x")
    with pytest.raises(OSError):
        read_beneath(root, path, 100)


@pytest.mark.parametrize("link", ["a", "a/file"])
def test_a_link_is_not_followed_wherever_it_is(tmp_path: Path, link: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_text("x")
    root = tmp_path / "root"
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(secret if link == "a" else secret / "file")
    with pytest.raises(OSError):
        read_beneath(root, "a/file", 100)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotAFile):
        read_beneath(tmp_path, "pipe", 100)
