"""How work travels: by Ray's own pickle, with the parts left out that belong to one process."""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Iterator
from typing import Any, cast

from steelyard.engine.cancellation import CancellationToken
from steelyard.engine.rate_limit import EndpointLimits
from steelyard.engine.workers.remote_limits import DriverLink
from steelyard.errors import ConfigurationError, SteelyardError, describe
from steelyard.masking import Secret
from steelyard.protocols import DriverCallback, Work

_DEEPEST = 12


class Home:
    """What stays with the driver, by the number under which workers know it."""

    def __init__(self) -> None:
        self.kept: list[DriverCallback | EndpointLimits] = []

    def number_of(self, kept: DriverCallback | EndpointLimits) -> int:
        for number, known in enumerate(self.kept):
            if known is kept:
                return number
        self.kept.append(kept)
        return len(self.kept) - 1


def pack_work(work: Work, home: Home) -> bytes:
    """The work, ready to be sent; ConfigurationError names what cannot travel."""
    try:
        return _packed(work, home)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{_culprit(work)} cannot be sent to a worker: {describe(error)}") from error


def unpack_work(packed: bytes, token: CancellationToken, post: DriverLink) -> Work:
    """The work as it is done here: cancelled by this token, with the driver's parts asked by post."""
    try:
        return cast(Work, _Unpacker(io.BytesIO(packed), token, post).load())
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"the work cannot be unpacked on a worker: {describe(error)}; modules and files that it needs must be "
            "installed there, or lie in the folder that is sent along"
        ) from error


def pack(item: Any) -> bytes:
    """Anything, as bytes. The plain pickle is several times as fast where it will do."""
    try:
        return pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - an object out of a function, say, which only Ray's pickle takes
        from ray import cloudpickle

        return cast(bytes, cloudpickle.dumps(item))


def pack_error(error: BaseException) -> bytes:
    """An exception; one that does not survive the journey goes as its words."""
    try:
        packed = pack(error)
        pickle.loads(packed)
    except Exception:  # noqa: BLE001 - exceptions with a constructor of their own often cannot be unpickled
        return pack(SteelyardError(describe(error)))
    return packed


def _packed(value: Any, home: Home) -> bytes:
    from ray.cloudpickle import CloudPickler

    class Packer(CloudPickler):  # type: ignore[misc]
        def persistent_id(self, kept: Any) -> tuple[Any, ...] | None:
            return _stand_in(kept, home)

    buffer = io.BytesIO()
    Packer(buffer).dump(value)
    return buffer.getvalue()


def _stand_in(kept: Any, home: Home) -> tuple[Any, ...] | None:
    """What goes in place of an object that does not travel; None where it does."""
    if isinstance(kept, CancellationToken):
        return ("token",)
    if isinstance(kept, DriverCallback):
        return ("callback", home.number_of(kept))
    if isinstance(kept, EndpointLimits):
        return ("limits", home.number_of(kept), kept.is_counted, kept.pauses)
    if isinstance(kept, Secret):
        raise ConfigurationError(
            "a key that was given in code or in the suite is not sent to workers, where it would show among a task's "
            "arguments: set it in the environment of the cluster's nodes and name the variable as api_key_env"
        )
    return None


class _Unpacker(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, token: CancellationToken, post: DriverLink) -> None:
        super().__init__(buffer)
        self._token = token
        self._post = post

    def persistent_load(self, stand_in: tuple[Any, ...]) -> Any:
        kind, *rest = stand_in
        if kind == "token":
            return self._token
        if kind == "callback":
            return self._post.callback(*rest)
        return self._post.limits(*rest)


def _culprit(work: Any) -> str:
    """The innermost thing that cannot be packed, and the way to it from the first object of the user's."""
    path: list[tuple[str, Any]] = [("the work", work)]
    while len(path) < _DEEPEST:
        found = next(((name, part) for name, part in _parts(path[-1][1]) if not _travels(part)), None)
        if found is None:
            break
        path.append(found)
    own = next((place for place, (_, part) in enumerate(path) if not _is_ours(part)), len(path) - 1)
    owner = path[own][1]
    name = getattr(owner, "__qualname__", None) or type(owner).__qualname__
    way = "".join(f".{step}" for step, _ in path[own + 1 :])
    return f"{name}{way} ({type(path[-1][1]).__qualname__})" if way else str(name)


def _is_ours(part: Any) -> bool:
    if isinstance(part, (dict, list, tuple)):
        return True
    module = getattr(part, "__module__", None) if isinstance(part, types.FunctionType) else type(part).__module__
    return str(module).startswith("steelyard.")


def _travels(part: Any) -> bool:
    try:
        _packed(part, Home())
    except Exception:  # noqa: BLE001 - that is the question
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value is made of, by name."""
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
