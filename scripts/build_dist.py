"""Builds the wheel and the source archive, with a README whose links work on the page of a package index too.

Links in README.md are relative: they work in the repository and on the site. The copy that is built has absolute ones,
to the tag of this version, and the repository's addresses are in its metadata. The repository is STEELYARD_REPOSITORY,
else that of GITHUB_SERVER_URL and GITHUB_REPOSITORY, else the git remote `origin`. Without one, links to files are
plain text and images are left out.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent

_CODE = re.compile(r"^(```.*?^```)$", flags=re.M | re.S)
_COMMENT = re.compile(r"^<!--.*?-->\n", flags=re.M | re.S)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<to>[^)\s]+)\)")
_ASIDE = re.compile(r"\s+\(\[\w+\]\((?P<to>[^)\s]+)\)\)")
_ELSEWHERE = re.compile(r"[a-z]+:|#")


class Repository(NamedTuple):
    """Where the files of one version can be read."""

    address: str
    ref: str

    def page(self, path: str) -> str:
        """The address that shows a file."""
        return f"{self.address}{self._dash}/blob/{self.ref}/{path}"

    def raw(self, path: str) -> str:
        """The address of a file's content: for images."""
        place = urlsplit(self.address)
        if place.netloc == "github.com":
            return f"https://raw.githubusercontent.com{place.path}/{self.ref}/{path}"
        return f"{self.address}{self._dash}/raw/{self.ref}/{path}"

    @property
    def _dash(self) -> str:
        """What GitLab puts before the name of a view; everybody else is taken to do as GitHub Enterprise does."""
        return "/-" if "gitlab" in urlsplit(self.address).netloc else ""


def repository_address(environment: Mapping[str, str], remote: str) -> str | None:
    """The repository's web address; None where none is known."""
    if named := environment.get("STEELYARD_REPOSITORY"):
        if address := web_address(named):
            return address
        sys.exit(f"STEELYARD_REPOSITORY is not an address like https://host/owner/name: {named}")
    if "GITHUB_SERVER_URL" in environment and "GITHUB_REPOSITORY" in environment:
        return web_address(f"{environment['GITHUB_SERVER_URL']}/{environment['GITHUB_REPOSITORY']}")
    return web_address(remote)


def web_address(remote: str) -> str | None:
    """The web address of a remote such as `https://host/owner/name.git` or `git@host:owner/name.git`; None for others.

    A password in it is left out.
    """
    found = re.fullmatch(r"(?:https://(?:[^/@]+@)?([\w.:-]+)/|git@([\w.-]+):)([\w./~-]+?)(?:\.git)?/?", remote.strip())
    return f"https://{found[1] or found[2]}/{found[3]}" if found else None


def published(readme: str, repository: Repository | None) -> str:
    """The README as a package index shows it: nothing in it is relative."""
    parts = _CODE.split(_COMMENT.sub("", readme))
    return "".join(part if part.startswith("```") else _with_links(part, repository) for part in parts)


def _with_links(text: str, repository: Repository | None) -> str:
    def link(found: re.Match[str]) -> str:
        image, words, to = found["image"], found["text"], found["to"]
        if _ELSEWHERE.match(to):
            return found[0]
        if repository is None:
            return "" if image else words
        return f"{image}[{words}]({repository.raw(to) if image else repository.page(to)})"

    if repository is None:  # an aside that is a link alone says nothing without it
        text = _ASIDE.sub(lambda found: found[0] if _ELSEWHERE.match(found["to"]) else "", text)
    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(link, text))


def project_urls(repository: Repository) -> str:
    """The table of pyproject.toml with the repository's addresses."""
    named = {
        "Source": repository.address,
        "Documentation": repository.page("docs/index.md"),
        "Changelog": repository.page("CHANGELOG.md"),
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{address}"\n' for name, address in named.items())


def copy_tracked(folder: Path) -> None:
    """Copy the files that git tracks, as they are now."""
    tracked = list(filter(None, _git("ls-files", "-z").split("\0")))
    if not tracked:
        sys.exit(f"{ROOT} is not a git checkout: there are no files to build from")
    for name in tracked:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def _git(*words: str) -> str:
    """What git prints; nothing where that fails."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def main(dist: Path) -> None:
    """Build both into `dist`."""
    version = runpy.run_path(str(ROOT / "src/steelyard/_version.py"))["__version__"]
    address = repository_address(os.environ, _git("remote", "get-url", "origin"))
    repository = Repository(address, f"v{version}") if address else None
    if repository:
        sys.stdout.write(f"links in the package's description lead to {repository.page('')}\n")
    else:
        sys.stdout.write(
            "no repository is known (STEELYARD_REPOSITORY, GITHUB_REPOSITORY, git remote origin): the package's "
            "description has no links to files, and no images\n"
        )
    with tempfile.TemporaryDirectory(prefix="steelyard-dist-") as name:
        folder = Path(name)
        copy_tracked(folder)
        readme = folder / "README.md"
        readme.write_text(published(readme.read_text(encoding="utf-8"), repository), encoding="utf-8")
        if repository:
            with (folder / "pyproject.toml").open("a", encoding="utf-8") as file:
                file.write(project_urls(repository))
        build = [sys.executable, "-m", "build", "--outdir", dist.resolve(), folder]
        subprocess.run(build, stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
