"""Connecting to a Ray cluster or starting one, and disconnecting; each failure becomes a ConfigurationError."""

from __future__ import annotations

import atexit
import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from steelyard.errors import ConfigurationError, describe

_CONNECT_SECONDS = 3.0
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first bytes of a gRPC client, with an empty SETTINGS frame."""
_FRAME_HEADER, _SETTINGS_FRAME = 9, 4
_POLL_SECONDS = 0.1
"""How often a thread that waits for the connection checks whether it was given up."""
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The environment variable by which Ray tells a job's program what was submitted with it."""
_LOST_CLOSE_SECONDS = 2.0
_NODE_TABLE_SECONDS = 20.0
_NODE_TABLE = (
    "import json, sys; from ray._raylet import GcsClient; "
    "nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10).values(); "
    "print(json.dumps([node.node_manager_address for node in nodes if node.state == 0]))"
)
"""Prints the addresses of a cluster's nodes. Ray may abort the process that asks, so it is not this one."""
_EXCLUDED_FILES = ("runs/", ".git/", ".venv/", "venv/", "__pycache__/", "*.sqlite")
"""Files next to a suite that are of no use to a worker."""
_FILES_WITH_KEYS = (
    ".env", ".env.*", "*.env", ".envrc", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.gpg",
    "*.asc", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass",
    ".git-credentials", ".htpasswd", "*credentials*", "*credential.json", "*service?account*.json", "*secret*.json",
    "*secret*.y*ml", "*secret*.toml", "*secret*.txt", "token.json", "*_token.json", "*-token.json", "*tokens.json",
    ".aws/", ".azure/", ".gcloud/", ".ssh/",
    ".gnupg/", ".kube/", ".docker/", ".config/",
)  # fmt: skip
"""Files that may hold keys: they never leave this machine. In gitignore's syntax, as Ray reads it."""


def check_installed() -> None:
    """Raise ConfigurationError, with the name of the extra, where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError("the ray engine needs Ray: pip install 'steelyard[ray]'", topic="extra")


class RayConnection:
    """This process's connection to a Ray cluster. A connection that exists already is used and stays open."""

    def __init__(
        self, address: str | None, working_dir: str | Path | None, runtime_env: Mapping[str, Any] | None = None
    ) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS") or None
        self._working_dir = working_dir
        self._runtime_env = dict(runtime_env or {})
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
            _check_is_node(self._address)
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

    def close(self, *, lost: bool = False) -> None:
        """Disconnect from the cluster, if `open` connected to it; from a `lost` one, without waiting for it."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join(_LOST_CLOSE_SECONDS if lost else None)
            self._thread = None
        if lost:
            import ray

            atexit.unregister(ray._private.worker.shutdown)  # it would wait for the head

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
        # Ray ends a process whose head is gone for 60 s, with exit code 1. The pool notices first, and ends the run.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "120")
        logging.getLogger("ray").setLevel(logging.ERROR)
        settings: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
        if self._address is None:  # without "local" Ray would use any cluster that it finds on this machine
            return {**settings, "address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        settings["address"] = self._address
        if runtime_env := self._whole_runtime_env():
            settings["runtime_env"] = runtime_env
        return settings

    def _whole_runtime_env(self) -> dict[str, Any]:
        """The caller's runtime environment, and the folder to send; without what a job has brought along already."""
        folder = {} if self._working_dir is None else {"working_dir": str(self._working_dir)}
        ours: dict[str, Any] = {**folder, **self._runtime_env}
        if "working_dir" in ours or "py_modules" in ours:
            # After the caller's own, which may let files in again: those with keys stay here whatever they say.
            ours["excludes"] = [*_EXCLUDED_FILES, *(ours.get("excludes") or ()), *_FILES_WITH_KEYS]
        job = json.loads(os.environ.get(_JOB_CONFIG) or "{}").get("runtime_env") or {}
        if "working_dir" in job:
            ours.pop("excludes", None)
        for key in set(ours) & set(job):
            if isinstance(ours[key], dict) and isinstance(job[key], dict):
                ours[key] = {name: value for name, value in ours[key].items() if name not in job[key]}
            else:
                del ours[key]
        return ours

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
            f"ray address {address!r}: only host:port or auto; run on a node of the cluster, not through Ray's client",
            topic="ray",
        )
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    if not port.isdigit() or not host:
        raise ConfigurationError(f"ray address must be host:port or auto, got {address!r}")
    try:
        probe((host.strip("[]"), int(port)))
    except (OSError, OverflowError) as error:
        raise _connect_error(address, describe(error)) from error


def _check_is_node(address: str) -> None:
    """Refuse to drive a cluster from a machine that is none of its nodes: Ray would abort the process.

    Where the nodes cannot be found out, Ray is left to say why.
    """
    if ":" not in address:
        return
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _NODE_TABLE, address],
            capture_output=True,
            timeout=_NODE_TABLE_SECONDS,
            env=environment,
            check=True,
        )
        nodes: list[str] = json.loads(asked.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        logging.getLogger("steelyard").debug("the nodes of %s are not known: %s", address, error)
        return
    if nodes and not any(_is_own_address(node) for node in nodes):
        raise ConfigurationError(
            f"this machine is not a node of the Ray cluster at {address!r}: run this on a node, or submit it as a job "
            "(ray job submit --working-dir . -- steelyard run ...)",
            topic="ray",
        )


def _is_own_address(host: str) -> bool:
    """Whether this machine has the address: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        try:
            bound.bind((host, 0))
        except OSError:
            return False
    return True


def probe(address: tuple[str, int]) -> None:
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
