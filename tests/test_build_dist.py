"""The description of the package: no link in it leads nowhere, wherever the repository is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.scripts import script

build_dist = script("build_dist")
check_wheel = script("check_wheel")

README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT = """![A chart](docs/images/a.png)

See [runs](docs/runs.md#the-files), [below](#more) and [Ray](https://docs.ray.io).
It is fast ([how](docs/peers.md#speed)).

<!-- file: a.yaml -->
```sh
echo '[not a link](docs/a.md)'
```
"""


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/acme/steelyard.git\n", "https://github.com/acme/steelyard"),
        ("https://github.com/acme/steelyard/", "https://github.com/acme/steelyard"),
        ("https://user:secret@gitlab.com/a/b/c.git", "https://gitlab.com/a/b/c"),
        ("git@git.example.com:acme/steelyard.git", "https://git.example.com/acme/steelyard"),
        ("https://git.example.com:8443/acme/steelyard", "https://git.example.com:8443/acme/steelyard"),
        ("/srv/git/steelyard.git", None),
        ("file:///srv/git/steelyard.git", None),
        ("http://github.com/acme/steelyard", None),
        ("", None),
    ],
)
def test_a_remote_has_a_web_address_without_the_password_in_it(remote: str, address: str | None) -> None:
    assert build_dist.web_address(remote) == address


def test_the_repository_that_is_named_comes_before_that_of_the_workflow_and_the_remote() -> None:
    workflow = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "acme/fork"}
    named = {**workflow, "STEELYARD_REPOSITORY": "https://gitlab.com/acme/steelyard"}
    remote = "git@github.com:acme/origin.git"
    assert build_dist.repository_address(named, remote) == "https://gitlab.com/acme/steelyard"
    assert build_dist.repository_address(workflow, remote) == "https://github.com/acme/fork"
    assert build_dist.repository_address({}, remote) == "https://github.com/acme/origin"
    assert build_dist.repository_address({}, "") is None
    with pytest.raises(SystemExit, match="STEELYARD_REPOSITORY is not an address"):
        build_dist.repository_address({"STEELYARD_REPOSITORY": "acme/steelyard"}, remote)


@pytest.mark.parametrize(
    ("address", "page", "raw"),
    [
        ("https://github.com/a/b", "https://github.com/a/b/blob/v1.0/", "https://raw.githubusercontent.com/a/b/v1.0/"),
        ("https://gitlab.com/a/b", "https://gitlab.com/a/b/-/blob/v1.0/", "https://gitlab.com/a/b/-/raw/v1.0/"),
        ("https://git.acme.com/a/b", "https://git.acme.com/a/b/blob/v1.0/", "https://git.acme.com/a/b/raw/v1.0/"),
    ],
)
def test_links_and_images_lead_to_the_files_of_the_version(address: str, page: str, raw: str) -> None:
    text = build_dist.published(TEXT, build_dist.Repository(address, "v1.0"))
    assert f"![A chart]({raw}docs/images/a.png)" in text
    assert f"[runs]({page}docs/runs.md#the-files)" in text
    assert f"([how]({page}docs/peers.md#speed))" in text
    assert "[below](#more) and [Ray](https://docs.ray.io)" in text
    assert "'[not a link](docs/a.md)'" in text
    assert "<!--" not in text


def test_without_a_repository_links_to_files_are_text_and_images_are_left_out() -> None:
    text = build_dist.published(TEXT, None)
    assert text.startswith("\n\nSee runs, [below](#more) and [Ray](https://docs.ray.io).\nIt is fast.\n")
    assert "'[not a link](docs/a.md)'" in text


@pytest.mark.parametrize("repository", [None, build_dist.Repository("https://github.com/acme/steelyard", "v1.0")])
def test_the_readme_as_it_is_published_has_no_relative_link(repository: object) -> None:
    assert check_wheel.relative_links(README) != []
    text = build_dist.published(README, repository)
    assert check_wheel.relative_links(text) == []


def test_every_tracked_file_is_built_from(tmp_path: Path) -> None:
    build_dist.copy_tracked(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == README
    assert (tmp_path / "src" / "steelyard" / "py.typed").is_file()
    assert not (tmp_path / ".git").exists()
