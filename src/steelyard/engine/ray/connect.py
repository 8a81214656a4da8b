"""Connecting to a Ray cluster or starting one, and disconnecting; each failure becomes a ConfigurationError."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steelyard.errors import ConfigurationError, describe

_CONNECT_SECONDS = 3.0
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first bytes of a gRPC client, with an empty SETTINGS frame."""
_FRAME_HEADER, _SETTINGS_FRAME = 9, 4
_POLL_SECONDS = 0.1
"""How often a thread that waits for the connection checks whether it was given up."""
_EXCLUDED_FILES = ["runs/", ".git/", ".venv/", "venv/", "__pycache__/", "*.sqlite"]
"""Files next to a suite that are of no use to a worker."""


def check_installed() -> None:
    """Raise ConfigurationError, with the name of the extra, where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError("the ray engine needs Ray: pip install 'steelyard[ray]'")


class RayConnection:
    """This process's connection to a Ray cluster. A connection that exists already is used and stays open."""

    def __init__(self, address: str | None, working_dir: str | Path | None) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS") or None
        self._working_dir = working_dir
        self._stop = threading.Event()
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Connect, or start a cluster on this machine when no address was given. Takes seconds: not for the loop.

        Raises at once when another thread calls `give_up`.
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
        self._stop, self._given_up = stop, given_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._keep_open, args=(opened, stop, failures.append), name="steelyard-ray", daemon=True
        )
        self._thread.start()
        while not opened.wait(_POLL_SECONDS):
            if given_up.is_set():
                stop.set()  # nothing makes Ray stop trying: should it succeed, that thread disconnects at once
                self._thread = None
                raise ConfigurationError("the connection to the cluster was given up before there was one")
        if failures:
            self._thread = None
            raise self._open_error(failures[0]) from failures[0]

    def give_up(self) -> None:
        """Make a concurrent `open` stop waiting; an open connection is not affected."""
        self._given_up.set()

    def close(self) -> None:
        """Disconnect from the cluster, if `open` connected to it."""
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
        if self._address is None:  # without "local" Ray would use any cluster that it finds on this machine
            return {**settings, "address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        settings["address"] = self._address
        if self._working_dir is not None:
            settings["runtime_env"] = {"working_dir": str(self._working_dir), "excludes": _EXCLUDED_FILES}
        return settings

    def _open_error(self, error: BaseException) -> ConfigurationError:
        """Turn an error of `ray.init` into one that names the cause."""
        reason = describe(error)
        if type(error).__name__ == "RuntimeEnvSetupError":
            return ConfigurationError(f"the folder {self._working_dir} cannot be sent to the workers: {reason}")
        if "Version mismatch" in reason:
            return ConfigurationError(f"the cluster at {self._address!r} does not match this process: {reason}")
        if self._address is not None and isinstance(error, ConnectionError):
            reason += "; where the cluster wants a token, set RAY_AUTH_MODE=token here too"
        return _connect_error(self._address, reason)


def _let_ray_print(allowed: bool) -> None:
    """Set whether Ray prints lost workers to stdout, where a run's result belongs; the driver logs them itself."""
    import ray

    ray._private.worker._worker_logs_enabled = allowed  # no setting of ray.init's reaches these


def _check_reachable(address: str) -> None:
    """Refuse at once an address that Ray would try for a minute."""
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
        _probe((host.strip("[]"), int(port)))
    except (OSError, OverflowError) as error:
        raise _connect_error(address, describe(error)) from error


def _probe(address: tuple[str, int]) -> None:
    """Raise OSError unless an HTTP/2 server listens there, as Ray's do: with any other, Ray would never stop trying."""
    with socket.create_connection(address, timeout=_CONNECT_SECONDS) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return
        connection.sendall(_HTTP2_PREFACE)
        answer = connection.recv(_FRAME_HEADER, socket.MSG_WAITALL)
    if len(answer) < _FRAME_HEADER or answer[3] != _SETTINGS_FRAME:
        raise ConnectionError("what listens there is not Ray")


def _connect_error(address: str | None, why: str) -> ConfigurationError:
    if address is None:
        return ConfigurationError(f"Ray could not be started on this machine: {why}")
    return ConfigurationError(f"no Ray cluster at {address!r}: {why}")
