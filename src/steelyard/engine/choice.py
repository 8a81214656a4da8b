"""Which engine a suite or a command line asks for, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from steelyard.contracts import Engine
from steelyard.errors import ConfigurationError

EngineName = Literal["local", "ray"]
ENGINE_KEYS = ("engine", "ray_address", "workers")
"""The keys of a suite's `run`, and the flags, that are about the engine."""


class EngineChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The engine of a run: this process, or the workers of a Ray cluster."""

    engine: EngineName = "local"
    ray_address: str | None = None
    """Where the cluster is: host:port, or auto; None starts one on this machine."""
    workers: int | None = None
    """How many workers; one for each CPU of the cluster when None."""

    def __post_init__(self) -> None:
        if self.engine not in get_args(EngineName):
            raise ConfigurationError(f"engine must be one of {', '.join(get_args(EngineName))}, got {self.engine!r}")
        if self.ray_address is not None and not isinstance(self.ray_address, str):
            raise ConfigurationError(f"ray_address must be text like host:6379, got {self.ray_address!r}")
        if self.engine == "local" and (self.ray_address is not None or self.workers is not None):
            raise ConfigurationError("ray_address and workers go with the engine ray, got the engine local")

    def replace(self, **changes: Any) -> EngineChoice:
        """The same with some of it changed."""
        return msgspec.structs.replace(self, **changes)

    def make(self, working_dir: Path, grace: float) -> Engine | None:
        """The engine; None for the one in this process, which whoever runs makes by itself."""
        if self.engine == "local":
            return None
        from steelyard.engine.cluster.engine import RayEngine

        return RayEngine(self.ray_address, workers=self.workers, grace=grace, working_dir=working_dir.resolve())
