"""Pickling of work for workers, by cloudpickle; objects that belong to the driver are replaced by a reference."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any, cast

from steelyard.engine.base import CancellationToken
from steelyard.engine.rate_limit import EndpointLimits
from steelyard.engine.workers.remote_limits import DriverLink
from steelyard.errors import ConfigurationError, SteelyardError, describe
from steelyard.masking import Secret
from steelyard.protocols import DriverCallback, Work

_MAX_DEPTH = 12
"""How deep the search for an object that cannot be pickled goes."""


class DriverObjects:
    """Objects that stay in the driver, by the number under which workers call them.

    With `sends_keys`, keys that were given in code are pickled like anything else.
    """

    def __init__(self, *, sends_keys: bool = False) -> None:
        self.objects: list[DriverCallback | EndpointLimits] = []
        self.sends_keys = sends_keys

    def number_of(self, wanted: DriverCallback | EndpointLimits) -> int:
        """Return an object's number, adding it if it is new."""
        for number, known in enumerate(self.objects):
            if known is wanted:
                return number
        self.objects.append(wanted)
        return len(self.objects) - 1


def pickle_work(work: Work, driver_objects: DriverObjects) -> bytes:
    """Pickle the work for workers; ConfigurationError names what cannot be pickled."""
    try:
        return _pickled(work, driver_objects)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{_culprit(work)} cannot be sent to a worker: {describe(error)}", topic="workers"
        ) from error


def unpickle_work(pickled: bytes, token: CancellationToken, link: DriverLink) -> Work:
    """Unpickle the work on a worker, with its own token and a link to the objects in the driver."""
    try:
        return cast(Work, _Unpickler(io.BytesIO(pickled), token, link).load())
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"the work cannot be unpickled on a worker: {describe(error)}; modules and files that it needs must be "
            "installed there, or be in the folder that is sent along",
            topic="workers",
        ) from error


def pickle_item(item: Any) -> bytes:
    """Pickle anything. The standard pickle is several times as fast, where it works."""
    try:
        pickled = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - an object defined in a function, say, which only cloudpickle handles
        return cast(bytes, _cloudpickle().dumps(item))
    # Maybe a class of the caller's script, which cloudpickle sends along: the main module of a worker is another one.
    return cast(bytes, _cloudpickle().dumps(item)) if b"__main__" in pickled else pickled


def pickle_error(error: BaseException) -> bytes:
    """Pickle an exception; one that cannot be unpickled is replaced by a SteelyardError with its message."""
    try:
        pickled = pickle_item(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - exceptions with a custom constructor often cannot be unpickled
        return pickle_item(SteelyardError(describe(error)))
    return pickled


def _cloudpickle() -> Any:
    """Ray's copy of cloudpickle where Ray is in use: it knows how to pickle Ray's own objects."""
    if "ray.cloudpickle" in sys.modules:
        return sys.modules["ray.cloudpickle"]
    import cloudpickle  # type: ignore[import-untyped]

    return cloudpickle


def _pickled(value: Any, driver_objects: DriverObjects) -> bytes:
    class Pickler(_cloudpickle().CloudPickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
            return _reference(value, driver_objects)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _reference(value: Any, driver_objects: DriverObjects) -> tuple[Any, ...] | None:
    """Return what replaces an object that is not pickled; None for all others."""
    if isinstance(value, CancellationToken):
        return ("token",)
    if isinstance(value, DriverCallback):
        return ("callback", driver_objects.number_of(value))
    if isinstance(value, EndpointLimits):
        return ("limits", driver_objects.number_of(value), value.is_counted, value.pauses, value.is_rate_only)
    if isinstance(value, Secret) and not driver_objects.sends_keys:
        raise ConfigurationError(
            "a key that was given in code or in the suite is not sent to workers, where it would show among a task's "
            "arguments: set it in the environment of the cluster's nodes and name the variable as api_key_env",
            topic="workers",
        )
    return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, token: CancellationToken, link: DriverLink) -> None:
        super().__init__(buffer)
        self._token = token
        self._link = link

    def persistent_load(self, reference: tuple[Any, ...]) -> Any:
        kind, *rest = reference
        if kind == "token":
            return self._token
        if kind == "callback":
            return self._link.callback(*rest)
        return self._link.limits(*rest)


def _culprit(work: Any) -> str:
    """Name the innermost object that cannot be pickled, with its path from the first object of the user's."""
    path: list[tuple[str, Any]] = [("the work", work)]
    while len(path) < _MAX_DEPTH:
        found = next(((name, part) for name, part in _parts(path[-1][1]) if not _can_be_pickled(part)), None)
        if found is None:
            break
        path.append(found)
    own = next((place for place, (_, part) in enumerate(path) if not _is_ours(part)), len(path) - 1)
    owner = path[own][1]
    name = getattr(owner, "__qualname__", None) or type(owner).__qualname__
    steps = "".join(f".{step}" for step, _ in path[own + 1 :])
    return f"{name}{steps} ({type(path[-1][1]).__qualname__})" if steps else str(name)


def _is_ours(part: Any) -> bool:
    if isinstance(part, (dict, list, tuple)):
        return True
    module = getattr(part, "__module__", None) if isinstance(part, types.FunctionType) else type(part).__module__
    return str(module).startswith("steelyard.")


def _can_be_pickled(part: Any) -> bool:
    try:
        _pickled(part, DriverObjects(sends_keys=True))
    except Exception:  # noqa: BLE001 - that is the question
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the parts of a value, with their names."""
    if isinstance(value, dict):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(number), part) for number, part in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
    elif isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        yield from zip(names, (cell.cell_contents for cell in value.__closure__ or ()), strict=False)
        yield from ((name, value.__globals__[name]) for name in value.__code__.co_names if name in value.__globals__)
    else:
        yield from getattr(value, "__dict__", {}).items()
        for name in getattr(type(value), "__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)
