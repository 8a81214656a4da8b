"""Sandboxes by name, for agents, setups and graders: `bubblewrap`, or what a plugin adds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from steelyard.errors import ConfigurationError
from steelyard.plugins import find, takes
from steelyard.protocols import SandboxProvider


def make_sandbox(raw: object, where: str = "sandbox", folder: Path | None = None) -> SandboxProvider | None:
    """The sandbox that a suite names: `bubblewrap`, or `{bubblewrap: {network: gateway}}`; None for none.

    Paths in its arguments are relative to `folder`.
    """
    if raw is None or raw == "none":
        return None
    if isinstance(raw, str):
        raw = {raw: {}}
    if not isinstance(raw, Mapping) or len(raw) != 1:
        raise ConfigurationError(f"{where} must be a name, or a mapping from one name to its arguments, got {raw!r}")
    ((name, options),) = raw.items()
    if options is not None and not isinstance(options, Mapping):
        raise ConfigurationError(f"{where}.{name} takes a mapping of arguments, got {options!r}")
    kind = find("sandboxes", str(name))
    given = dict(options or {})
    if folder is not None and "folder" in (takes(kind) or ()):
        given["folder"] = folder
    try:
        made = kind(**given)
    except TypeError as error:
        raise ConfigurationError(f"{where}.{name}: {error}") from error
    if not isinstance(made, SandboxProvider):
        raise ConfigurationError(f"{where}.{name} is no sandbox: it needs check, start, reap and identity")
    return made
