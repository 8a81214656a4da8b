"""Workspace: what an agent finds in its folder, from a folder, inline files, a git repository, or nothing.

The content of a template is part of its case's fingerprint: an edited one asks again.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from steelyard.case_templates import CaseTemplate, PathTemplate, ValueTemplate
from steelyard.errors import ConfigurationError, reject_unknown
from steelyard.plugins import make_sandbox
from steelyard.records import EvalCase
from steelyard.units import parse_duration, parse_size
from steelyard.workspace.places import remove_tree

Keep = Literal["failed", "all", "none"]
_LEFT_OUT = ".git"
_CHUNK = 1 << 20
_FICLONE = 0x40049409
_GIT_SECONDS = 600.0


class TreeEntry(msgspec.Struct, frozen=True, gc=False):
    """One file or link of a template: its path with `/`, whether it is a link, and whether it can be executed."""

    path: str
    is_link: bool = False
    executable: bool = False


class Template(ABC):
    """The content of one workspace before anything was done in it."""

    digest: str
    """A digest of all names, modes and contents."""

    @abstractmethod
    def make(self, folder: Path) -> None:
        """Fill a folder that does not exist yet."""

    @abstractmethod
    def read(self, path: str) -> tuple[TreeEntry, bytes] | None:
        """A file's content, or a link's target; None where the template has neither at that path."""


class EmptyTemplate(Template):
    """Nothing: an empty folder."""

    digest = "empty"

    def make(self, folder: Path) -> None:
        """Make the folder."""
        folder.mkdir(mode=0o700)

    def read(self, path: str) -> None:  # noqa: ARG002 - there is none
        """Nothing is there."""
        return


class FilesTemplate(Template):
    """Files given as text, by their paths."""

    def __init__(self, files: Mapping[str, str], where: str) -> None:
        self._files = {_checked_path(path, where): _checked_text(path, text, where) for path, text in files.items()}
        for path in self._files:
            parts = path.split("/")
            for length in range(1, len(parts)):
                if "/".join(parts[:length]) in self._files:
                    raise ConfigurationError(f"{where}: {'/'.join(parts[:length])!r} is both a file and a folder")
        self.digest = _digest_of((path, b"f", text) for path, text in sorted(self._files.items()))

    def make(self, folder: Path) -> None:
        """Write the files."""
        folder.mkdir(mode=0o700)
        for path, text in self._files.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(text)

    def read(self, path: str) -> tuple[TreeEntry, bytes] | None:
        """The file's text."""
        text = self._files.get(path)
        return None if text is None else (TreeEntry(path), text)


class Known(NamedTuple):
    """What is remembered of a folder: what tells whether it was edited, and the digest of its content."""

    signature: str
    digest: str


class FolderTemplate(Template):
    """The files of a folder. `.git` is left out, and a link must lead to something in the folder.

    `known` is what an earlier look at the folder found: ConfigurationError where it was edited since.
    """

    def __init__(self, folder: Path, where: str, known: Known | None = None) -> None:
        self._where = where
        try:
            self.folder = folder.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise ConfigurationError(f"{where}: there is no folder {folder}") from error
        if not self.folder.is_dir():
            raise ConfigurationError(f"{where}: {folder} is not a folder")
        self._signing = hashlib.blake2b(digest_size=16)
        self._entries = list(self._walk())
        signature = self._signing.hexdigest()
        if known is not None and known.signature != signature:
            raise ConfigurationError(f"{where}: {self.folder} was edited while the run used it: start it again")
        if known is None:
            contents = ((entry.path, _kind(entry), self._content(entry)) for entry in self._entries)
            known = Known(signature, _digest_of(contents))
        self.known = known
        self.digest = known.digest

    def _walk(self, prefix: str = "") -> Iterator[TreeEntry]:
        try:
            with os.scandir(self.folder / prefix) as scan:
                found = sorted(scan, key=lambda one: one.name)
        except OSError as error:
            raise ConfigurationError(f"{self._where}: cannot read {error.filename}: {error.strerror}") from error
        for one in found:
            path = f"{prefix}{one.name}"
            if one.name == _LEFT_OUT:
                continue
            if one.is_dir(follow_symlinks=False):
                yield from self._walk(f"{path}/")
                continue
            seen = one.stat(follow_symlinks=False)
            described = f"{path}\0{seen.st_size}\0{seen.st_mtime_ns}\0{seen.st_ino}\0{seen.st_mode}\0"
            self._signing.update(described.encode("utf-8", "surrogateescape"))
            if one.is_symlink():
                self._check_link(path)
                yield TreeEntry(path, is_link=True)
            elif one.is_file(follow_symlinks=False):
                yield TreeEntry(path, executable=bool(seen.st_mode & 0o100))
            else:
                raise ConfigurationError(f"{self._where}: {path} is neither a file, a folder nor a link")

    def _check_link(self, path: str) -> None:
        """Refuse a link that would lead the agent out of its workspace, into the template or the user's files."""
        target = os.readlink(self.folder / path)
        place = os.path.normpath(os.path.join(self.folder, os.path.dirname(path), target))
        real = os.path.realpath(self.folder / path)
        inside = all(Path(one).is_relative_to(self.folder) for one in (place, real))
        if os.path.isabs(target) or not inside:
            raise ConfigurationError(
                f"{self._where}: the link {path} leads out of {self.folder} (to {target}): "
                f"put a copy of what it leads to there, or remove it"
            )

    def _content(self, entry: TreeEntry) -> bytes:
        place = self.folder / entry.path
        if entry.is_link:
            return os.fsencode(os.readlink(place))
        with open(place, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    def make(self, folder: Path) -> None:
        """Copy the folder, each file by reflink where the disk can; never by hard links."""
        folder.mkdir(mode=0o700)
        made = {""}
        for entry in self._entries:
            parent = entry.path.rpartition("/")[0]
            if parent not in made:
                os.makedirs(folder / parent, exist_ok=True)
                made.add(parent)
            copy_entry(self.folder / entry.path, folder / entry.path)

    def read(self, path: str) -> tuple[TreeEntry, bytes] | None:
        """What the folder has at that path."""
        if _LEFT_OUT in path.split("/"):
            return None
        return read_entry(self.folder, path)


def read_entry(folder: Path, path: str) -> tuple[TreeEntry, bytes] | None:
    """A file's content or a link's target, without following links; None where there is neither."""
    place = folder / path
    try:
        mode = os.lstat(place).st_mode
        if stat.S_ISLNK(mode):
            return TreeEntry(path, is_link=True), os.fsencode(os.readlink(place))
        if not stat.S_ISREG(mode):
            return None
        return TreeEntry(path, executable=bool(mode & 0o100)), _read_file(place)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read_file(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        return file.read()


class _Reflinks:
    """Whether the disk can share blocks between files; tried until it says no."""

    possible = True


def copy_entry(source: Path, target: Path) -> None:
    """Copy a file or a link to a path that does not exist. A write to the copy never changes the original."""
    mode = os.lstat(source).st_mode
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(source), target)
        return
    reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 | (mode & 0o111 and 0o100))
        try:
            if not _reflinked(reading, writing):
                while chunk := os.read(reading, _CHUNK):
                    os.write(writing, chunk)
            os.fchmod(writing, (mode & 0o777) | 0o600)
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _reflinked(reading: int, writing: int) -> bool:
    if not _Reflinks.possible:
        return False
    try:
        import fcntl

        fcntl.ioctl(writing, _FICLONE, reading)
    except (ImportError, OSError):
        _Reflinks.possible = False
        return False
    return True


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder as it is, links as links, `.git` included; what is neither file, folder nor link is left out."""
    os.mkdir(target, 0o700)
    waiting = [(os.fspath(source), os.fspath(target))]
    while waiting:
        folder, into = waiting.pop()
        with os.scandir(folder) as found:
            for one in found:
                place = os.path.join(into, one.name)
                if one.is_dir(follow_symlinks=False):
                    os.mkdir(place, 0o700)
                    waiting.append((one.path, place))
                elif one.is_symlink() or one.is_file(follow_symlinks=False):
                    copy_entry(Path(one.path), Path(place))


class GitTemplate(Template):
    """A commit of a local repository: its files with one fresh commit, or with the history up to it.

    It is made once, under `cache`, and copied from there. With history, the copy has the objects that the commit
    needs and nothing else: no other branch, tag, remote, reflog or leftover object from which a fix could be read.
    """

    _lock = threading.Lock()

    def __init__(self, repository: Path, ref: str, *, history: bool, cache: Path, where: str) -> None:
        self._where = where
        self._history = history
        self._repository = repository
        self._git_dir = _git_output(where, "-C", os.fspath(repository), "rev-parse", "--absolute-git-dir")
        self._commit = self._rev_parse(f"{ref}^{{commit}}", ref)
        self._tree = self._rev_parse(f"{self._commit}^{{tree}}", ref)
        if (
            history
            and _git_output(where, "-C", os.fspath(repository), "rev-parse", "--is-shallow-repository") == "true"
        ):
            raise ConfigurationError(
                f"{where}: {repository} has only a part of its history (a shallow clone): fetch the rest with "
                f"`git fetch --unshallow`, or leave `history` out"
            )
        self.digest = f"git-history:{self._commit}" if history else f"git:{self._tree}"
        self._prepared = cache / f"git-{hashlib.sha256(self.digest.encode()).hexdigest()[:16]}"

    def _rev_parse(self, what: str, ref: str) -> str:
        if ref.startswith("-"):
            raise ConfigurationError(f"{self._where}: {ref!r} is not the name of a commit")
        arguments = ("-C", os.fspath(self._repository), "rev-parse", "--verify", "--quiet", "--end-of-options", what)
        return _git_output(self._where, *arguments, missing=f"{self._repository} has no commit {ref!r}")

    def make(self, folder: Path) -> None:
        """Copy what was made of the commit, making it when it is first asked for."""
        copy_tree(self._folder(), folder)

    def read(self, path: str) -> tuple[TreeEntry, bytes] | None:
        """What the commit has at that path."""
        return None if _LEFT_OUT in path.split("/") else read_entry(self._folder(), path)

    def _folder(self) -> Path:
        with self._lock:
            if not self._prepared.exists():
                draft = self._prepared.with_name(f"{self._prepared.name}.{os.getpid()}.tmp")
                if draft.exists():
                    remove_tree(draft)
                draft.mkdir(parents=True, mode=0o700)
                self._prepare(draft)
                draft.rename(self._prepared)
        return self._prepared

    def _prepare(self, folder: Path) -> None:
        here = ("-C", os.fspath(folder))
        _git(self._where, *here, "init", "-q", "--template=", "-b", "main")
        if self._history:
            pack = _git(
                self._where, f"--git-dir={self._git_dir}", "pack-objects", "--revs", "--stdout", "-q",
                stdin=f"{self._commit}\n".encode(),
            )  # fmt: skip
            _git(self._where, *here, "index-pack", "--stdin", stdin=pack)
            _git(self._where, *here, "update-ref", "refs/heads/main", self._commit)
            _git(self._where, *here, "reset", "-q", "--hard")
            return
        index = {"GIT_INDEX_FILE": os.fspath(folder / ".git" / "export-index")}
        source = (f"--git-dir={self._git_dir}", f"--work-tree={folder}")
        _git(self._where, *source, "read-tree", self._commit, env=index, cwd=folder)
        _git(self._where, *source, "checkout-index", "--all", "--force", env=index, cwd=folder)
        (folder / ".git" / "export-index").unlink(missing_ok=True)
        _git(self._where, *here, "add", "--all", "--force")
        _git(self._where, *here, "commit", "-q", "--allow-empty", "--no-verify", "-m", "Task")


_GIT_ENVIRONMENT = {
    **{f"GIT_{who}_{what}": text for who in ("AUTHOR", "COMMITTER") for what, text in
       (("NAME", "steelyard"), ("EMAIL", "steelyard@localhost"), ("DATE", "2000-01-01T00:00:00+0000"))},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}  # fmt: skip
_GIT_OPTIONS = ("-c", "core.logAllRefUpdates=false", "-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0")


def _git(
    where: str, *arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> bytes:
    """Run git apart from the user's configuration; ConfigurationError where it fails."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", *_GIT_OPTIONS, *arguments],
            input=stdin,
            capture_output=True,
            env={**clean, **_GIT_ENVIRONMENT, **(env or {})},
            cwd=cwd,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigurationError(f"{where}: git is not installed, and the template is in a repository") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"{where}: git took longer than {_GIT_SECONDS:g} s") from error
    if done.returncode:
        message = done.stderr.decode("utf-8", "replace").strip()
        raise ConfigurationError(f"{where}: git failed: {message[-500:] or f'exit code {done.returncode}'}")
    return done.stdout


def _git_output(where: str, *arguments: str, missing: str | None = None) -> str:
    try:
        return _git(where, *arguments).decode("utf-8", "surrogateescape").strip()
    except ConfigurationError as error:
        if missing is not None and str(error).endswith("exit code 1"):
            raise ConfigurationError(f"{where}: {missing}") from error
        raise


_GIT_KEYS = ("git", "ref", "history")


class Workspace:
    """A folder for each attempt at a case, and what is kept of it.

    `template` is a folder's path, `{"files": {path: text}}`, `{"git": path, "ref": …, "history": False}` or None for
    an empty folder; paths and the commands of `setup` and `teardown` are templates over the case. Each command is a
    list of words, run without a shell in the workspace. `keep` says which whole workspaces are kept; the changes of
    each are kept always, as are the files that `artifacts` names.
    """

    def __init__(
        self,
        template: str | Path | Mapping[str, Any] | None = None,
        *,
        setup: Sequence[Sequence[str]] = (),
        teardown: Sequence[Sequence[str]] = (),
        setup_timeout: float | str = 600.0,
        setup_retries: int = 0,
        env: Mapping[str, str] | None = None,
        keep: Keep = "failed",
        artifacts: Sequence[str] = (),
        max_disk: int | str = "10G",
        sandbox: Mapping[str, Any] | str | None = None,
        folder: str | Path = ".",
    ) -> None:
        if keep not in get_args(Keep):
            raise ConfigurationError(f"workspace.keep must be one of {', '.join(get_args(Keep))}, got {keep!r}")
        if isinstance(setup_retries, bool) or not isinstance(setup_retries, int) or setup_retries < 0:
            raise ConfigurationError(f"workspace.setup_retries must be a whole number >= 0, got {setup_retries!r}")
        self.keep: Keep = keep
        self.setup = _commands(setup, "workspace.setup")
        self.teardown = _commands(teardown, "workspace.teardown")
        self.setup_timeout = parse_duration(setup_timeout, "workspace.setup_timeout")
        self.setup_retries = setup_retries
        self.env = _environment(env or {}, "workspace.env")
        self.artifacts = _patterns(artifacts)
        self.max_disk = parse_size(max_disk, "workspace.max_disk")
        self.sandbox = make_sandbox(sandbox, "workspace.sandbox", Path(folder).absolute())
        """What confines the commands of setup and teardown; None where nothing does."""
        if self.sandbox is not None and self.sandbox.wants_gateway:
            raise ConfigurationError("workspace.sandbox cannot have network: gateway, which is the agent's alone")
        self._folder = Path(folder)
        self._given = template
        self._kind, self._templates = _read_template(template)
        self._known: dict[Path, Known] = {}
        self._commits: dict[tuple[Path, str, bool], GitTemplate] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuilt, ({**self.__dict__, "_commits": {}},))

    def __repr__(self) -> str:
        return f"Workspace({self._given!r})"

    def identity(self) -> dict[str, Any]:
        """What decides an answer besides the templates' content: how a workspace is made ready."""
        return {
            "setup": [[word.source for word in words] for words in self.setup],
            "env": {name: text.source for name, text in self.env.items()},
            **({} if self.sandbox is None else {"sandbox": self.sandbox.identity()}),
        }

    def template_of(self, case: EvalCase, cache: Path) -> Template:
        """The content of a case's workspace; ConfigurationError where there is none. Blocks: it reads all of it."""
        where = "workspace.from"
        if self._kind == "empty":
            return EmptyTemplate()
        if self._kind == "files":
            return FilesTemplate(self._files_of(case), f"{where}.files")
        if self._kind == "folder":
            path = self._folder / os.path.expanduser(self._templates["folder"].render(case))
            folder = FolderTemplate(path, where, self._known.get(path))
            self._known[path] = folder.known
            return folder
        path = self._folder / os.path.expanduser(self._templates["git"].render(case))
        ref, history = self._templates["ref"].render(case), bool(self._templates["history"])
        key = (path, ref, history)
        if key not in self._commits:
            self._commits[key] = GitTemplate(path, ref, history=history, cache=cache, where=where)
        return self._commits[key]

    def digest_of(self, case: EvalCase, cache: Path) -> str:
        """The digest of a case's template; not computed again where it is known."""
        if self._kind == "folder":
            path = self._folder / os.path.expanduser(self._templates["folder"].render(case))
            if path in self._known:
                return self._known[path].digest
        return self.template_of(case, cache).digest

    def _files_of(self, case: EvalCase) -> dict[str, str]:
        files = self._templates["files"]
        if isinstance(files, ValueTemplate):
            found = files.value(case)
            if not isinstance(found, Mapping):
                raise ConfigurationError(
                    f"workspace.from.files: {files.source} must be a mapping of paths to texts, got {found!r:.100}"
                )
            return dict(found)
        return {path.render(case): text for path, text in files}


def _rebuilt(state: dict[str, Any]) -> Workspace:
    made = Workspace.__new__(Workspace)
    made.__dict__.update(state)
    return made


def _read_template(given: Any) -> tuple[str, dict[str, Any]]:
    where = "workspace.from"
    if given is None:
        return "empty", {}
    if isinstance(given, (str, Path)):
        return "folder", {"folder": PathTemplate(os.fspath(given), where)}
    if not isinstance(given, Mapping) or not ("files" in given) ^ ("git" in given):
        raise ConfigurationError(f"{where} must be a folder, {{files: …}} or {{git: …, ref: …}}, got {given!r}")
    reject_unknown(given, ("files",) if "files" in given else _GIT_KEYS, where)
    if "files" in given:
        files = given["files"]
        if isinstance(files, str):
            return "files", {"files": ValueTemplate(files, f"{where}.files")}
        if not isinstance(files, Mapping):
            raise ConfigurationError(f"{where}.files must be a mapping of paths to texts, got {files!r:.100}")
        return "files", {"files": [(PathTemplate(str(path), f"{where}.files"), text) for path, text in files.items()]}
    if not isinstance(given.get("history", False), bool):
        raise ConfigurationError(f"{where}.history must be true or false, got {given['history']!r}")
    return "git", {
        "git": PathTemplate(os.fspath(given["git"]), f"{where}.git"),
        "ref": CaseTemplate(str(given.get("ref", "HEAD")), f"{where}.ref"),
        "history": given.get("history", False),
    }


def _commands(given: Any, where: str) -> list[list[CaseTemplate]]:
    if not isinstance(given, (list, tuple)) or not all(isinstance(words, (list, tuple)) and words for words in given):
        raise ConfigurationError(f"{where} must be a list of commands, each a list of words, got {given!r}")
    return [[CaseTemplate(str(word), where, ("workspace",)) for word in words] for words in given]


def _environment(given: Any, where: str) -> dict[str, CaseTemplate]:
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where} must be a mapping of names to texts, got {given!r}")
    return {str(name): CaseTemplate(str(text), f"{where}.{name}", ("workspace",)) for name, text in given.items()}


def _patterns(given: Any) -> tuple[str, ...]:
    if not isinstance(given, (list, tuple)) or not all(isinstance(pattern, str) and pattern for pattern in given):
        raise ConfigurationError(f"workspace.artifacts must be a list of file patterns such as logs/**, got {given!r}")
    for pattern in given:
        if os.path.isabs(pattern) or ".." in pattern.split("/"):
            raise ConfigurationError(f"workspace.artifacts must be relative to the workspace, got {pattern!r}")
    return tuple(given)


def _checked_path(path: str, where: str) -> str:
    parts = path.split("/") if isinstance(path, str) else []
    if not parts or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ConfigurationError(f"{where}: {path!r:.100} must be a path within the workspace, such as src/app.py")
    return path


def _checked_text(path: str, text: Any, where: str) -> bytes:
    if not isinstance(text, str):
        raise ConfigurationError(f"{where}: {path} must be text, got {text!r:.100}")
    return text.encode("utf-8", "surrogateescape")


def _kind(entry: TreeEntry) -> bytes:
    return b"l" if entry.is_link else b"x" if entry.executable else b"f"


def _digest_of(parts: Any) -> str:
    digest = hashlib.sha256()
    for path, kind, content in parts:
        name = path.encode("utf-8", "surrogateescape")
        digest.update(b"%d:%b%b%d:" % (len(name), name, kind, len(content)))
        digest.update(content)
    return digest.hexdigest()[:32]
