"""Finding a cluster or starting one, and letting go of it: every way in which that fails is said in plain words."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steelyard._version import __version__
from steelyard.engine.workers.messages import Greeting
from steelyard.errors import ConfigurationError, describe

_REACH_SECONDS = 3.0
_OPENING_OF_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a gRPC client says first, with settings that leave all as it is."""
_FRAME_HEADER, _SETTINGS_FRAME = 9, 4
_LOOK_SECONDS = 0.1
"""How often whoever waits for a connection looks whether it is still wanted."""
_LEFT_BEHIND = ["runs/", ".git/", ".venv/", "venv/", "__pycache__/", "*.sqlite"]
"""What lies beside a suite and is of no use to a worker."""


def check_installed() -> None:
    """ConfigurationError naming the extra where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError("the ray engine needs Ray: pip install 'steelyard[ray]'")


class Connection:
    """This process as a driver of a Ray cluster. One that is there already is used and left as it is."""

    def __init__(self, address: str | None, working_dir: str | Path | None) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS") or None
        self._working_dir = working_dir
        self._stop = threading.Event()
        self._unwanted = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Connect, or start a cluster on this machine when no address was given. Takes seconds: not for the loop.

        Ends at once when another thread gives up on it.
        """
        check_installed()
        import ray

        if ray.is_initialized():
            return
        if self._address is not None:
            _check_reachable(self._address)
        # Ray's processes are killed by the kernel when the thread that started them ends: that thread has to stay.
        opened = threading.Event()
        failures: list[BaseException] = []
        self._stop, self._unwanted = stop, unwanted = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._keep_open, args=(opened, stop, failures.append), name="steelyard-ray", daemon=True
        )
        self._thread.start()
        while not opened.wait(_LOOK_SECONDS):
            if unwanted.is_set():
                stop.set()  # Ray cannot be told to stop trying: should it succeed, that thread lets go at once
                self._thread = None
                raise ConfigurationError("the connection to the cluster was given up before there was one")
        if failures:
            self._thread = None
            raise self._not_opened(failures[0]) from failures[0]

    def give_up(self) -> None:
        """Have whoever is just opening this stop waiting; nothing happens to a connection that is open."""
        self._unwanted.set()

    def close(self) -> None:
        """Let go of the cluster, if it was this that connected."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _keep_open(self, opened: threading.Event, stop: threading.Event, fail: Callable[[BaseException], None]) -> None:
        import ray

        try:
            _let_ray_print(False)
            ray.init(**self._settings())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for this one
            fail(error)
            return
        finally:
            opened.set()
        stop.wait()
        ray.shutdown()
        _let_ray_print(True)

    def _settings(self) -> dict[str, Any]:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        logging.getLogger("ray").setLevel(logging.ERROR)
        settings: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
        if self._address is None:  # without "local" Ray would take any cluster that it finds on this machine
            return {**settings, "address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        settings["address"] = self._address
        if self._working_dir is not None:
            settings["runtime_env"] = {"working_dir": str(self._working_dir), "excludes": _LEFT_BEHIND}
        return settings

    def _not_opened(self, error: BaseException) -> ConfigurationError:
        """What Ray failed at, named as what it is."""
        said = describe(error)
        if type(error).__name__ == "RuntimeEnvSetupError":
            return ConfigurationError(f"the folder {self._working_dir} cannot be sent to the workers: {said}")
        if "Version mismatch" in said:
            return ConfigurationError(f"the cluster at {self._address!r} does not match this process: {said}")
        if self._address is not None and isinstance(error, ConnectionError):
            said += "; where the cluster wants a token, set RAY_AUTH_MODE=token here too"
        return _not_connected(self._address, said)


def _let_ray_print(allowed: bool) -> None:
    """Whether Ray writes its own words of each lost worker to stdout, where a run's result belongs; we say it too."""
    import ray

    ray._private.worker._worker_logs_enabled = allowed  # no setting of ray.init's reaches these


def check_same_versions(greeting: Greeting) -> None:
    """ConfigurationError when a worker runs on another Python or package than this process."""
    import ray

    ours = {"Python": platform.python_version(), "steelyard": __version__, "ray": ray.__version__}
    theirs = {"Python": greeting.python, "steelyard": greeting.steelyard, "ray": greeting.ray}
    # Pickles of one Python 3.x are read by every patch release of it.
    alike = {name: _release(name, ours[name]) == _release(name, theirs[name]) for name in ours}
    wrong = [f"{name} {theirs[name]} there, {ours[name]} here" for name in ours if not alike[name]]
    if wrong:
        raise ConfigurationError(f"the worker on {greeting.node} does not match this process: {'; '.join(wrong)}")


def _release(name: str, version: str) -> str:
    return ".".join(version.split(".")[:2]) if name == "Python" else version


def _check_reachable(address: str) -> None:
    """Refuse at once what Ray would try for a minute."""
    if "://" in address:
        raise ConfigurationError(
            f"ray address {address!r}: only host:port or auto; run on a node of the cluster, not through Ray's client"
        )
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    if not port.isdigit() or not host:
        raise ConfigurationError(f"ray address must be host:port or auto, got {address!r}")
    try:
        _greet((host.strip("[]"), int(port)))
    except (OSError, OverflowError) as error:
        raise _not_connected(address, describe(error)) from error


def _greet(place: tuple[str, int]) -> None:
    """OSError unless a server is there that speaks HTTP/2, as Ray's do: with any other Ray would talk for ever."""
    with socket.create_connection(place, timeout=_REACH_SECONDS) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return
        connection.sendall(_OPENING_OF_HTTP2)
        answer = connection.recv(_FRAME_HEADER, socket.MSG_WAITALL)
    if len(answer) < _FRAME_HEADER or answer[3] != _SETTINGS_FRAME:
        raise ConnectionError("what listens there is not Ray")


def _not_connected(address: str | None, why: str) -> ConfigurationError:
    if address is None:
        return ConfigurationError(f"Ray could not be started on this machine: {why}")
    return ConfigurationError(f"no Ray cluster at {address!r}: {why}")
