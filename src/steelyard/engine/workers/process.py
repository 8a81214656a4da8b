"""A worker process of this machine: what runs in it, and the frames that it exchanges with the driver.

The driver starts it with one end of a socket pair, the control socket. Through that it gets another socket for each
run, and through that the run's work and messages. When the control socket ends, so does the process, at once: however
the driver died, nobody is left to take what it would still do.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from typing import Any

from steelyard.engine.workers.messages import EXIT, Batch
from steelyard.engine.workers.pickling import pickle_error, pickle_item
from steelyard.engine.workers.worker import HostedRun, Worker
from steelyard.errors import ConfigurationError, describe
from steelyard.subprocesses import kill_all

BEGIN, MESSAGE, EXCHANGE, BEGUN, FAILED, BATCH = range(6)
"""The kinds of frames: work, a message, a message that a batch answers; work begun or not, and the batch."""
QUIT = b"q"
"""On the control socket: end in an orderly way. Any other byte comes with the socket of a run."""
BUFFER_BYTES = 4 << 20
"""How much of the other side's frames may be read ahead."""
BATCH_BYTES = 1 << 18
"""A batch is taken as soon as there is this much: there is no detour for large ones, as on Ray."""

_HEAD = struct.Struct("<IB")


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the kind and content of the next frame; IncompleteReadError or OSError when there is none."""
    size, kind = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return kind, await reader.readexactly(size)


def write_frame(writer: asyncio.StreamWriter, kind: int, content: bytes) -> None:
    """Send a frame without waiting."""
    writer.write(_HEAD.pack(len(content), kind))
    writer.write(content)


def send_block(control: socket.socket, content: bytes) -> None:
    """Send some bytes with their length over a control socket, waiting until they are sent."""
    control.sendall(_HEAD.pack(len(content), 0) + content)


def receive_block(control: socket.socket) -> bytes:
    """Receive what `send_block` sent; ConnectionError when the other side has ended."""
    size, _ = _HEAD.unpack(_receive(control, _HEAD.size))
    return _receive(control, size)


def _receive(control: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = control.recv(size - len(received))
        if not part:
            raise ConnectionError("the other side has ended")
        received += part
    return received


def main(descriptor: int) -> None:
    """Run as a worker until the driver says that it is over, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the driver's to handle
    with contextlib.suppress(Exception):  # no stderr
        faulthandler.enable()
    control = socket.socket(fileno=descriptor)
    settings = pickle.loads(receive_block(control))
    _set_log_levels(settings["log_levels"])
    loop = _new_loop(settings["uvloop"])
    asyncio.set_event_loop(loop)
    host = _Host()
    send_block(control, pickle.dumps(loop.run_until_complete(host.worker.handshake())))
    threading.Thread(target=_watch, args=(control, loop, host), name="steelyard-control", daemon=True).start()
    loop.run_forever()


def _watch(control: socket.socket, loop: asyncio.AbstractEventLoop, host: _Host) -> None:
    """Take the sockets of runs, until the driver says that it is over, or is gone.

    In a thread, so that a target that blocks the event loop does not keep the process alive.
    """
    while True:
        try:
            received, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        except OSError:
            received, descriptors = b"", []
        if received == QUIT:
            loop.call_soon_threadsafe(loop.stop)
            return
        if not received:
            kill_all()
            os._exit(1)
        if descriptors:
            loop.call_soon_threadsafe(host.accept, socket.socket(fileno=descriptors[0]))


def _new_loop(wants_uvloop: bool) -> asyncio.AbstractEventLoop:
    if wants_uvloop:
        with contextlib.suppress(ImportError):
            import uvloop

            return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def log_levels() -> dict[str, int]:
    """Return the level of each logger that has one: what a worker sends of its log."""
    loggers = list(logging.root.manager.loggerDict.items())  # at once: other threads may add some
    levels = {name: logger.level for name, logger in loggers if isinstance(logger, logging.Logger)}
    return {"": logging.root.level, **{name: level for name, level in levels.items() if level != logging.NOTSET}}


def _set_log_levels(levels: dict[str, int]) -> None:
    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)


class _Host:
    """The runs of this process, each with its socket."""

    def __init__(self) -> None:
        self.worker = Worker(None)
        self._serving: set[asyncio.Task[None]] = set()

    def accept(self, connection: socket.socket) -> None:
        """Serve a run over its socket."""
        task = asyncio.get_event_loop().create_task(self._serve(connection))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=BUFFER_BYTES)
        hosted: HostedRun | None = None
        sending: asyncio.Task[None] | None = None
        try:
            while True:
                kind, content = await read_frame(reader)
                if kind == BEGIN:
                    hosted = await _begin(writer, *pickle.loads(content))
                elif hosted is not None:
                    _receive_message(hosted, content)
                    if kind == EXCHANGE:
                        sending = asyncio.create_task(_send_batch(writer, hosted))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            if sending is not None:
                sending.cancel()
            if hosted is not None:
                hosted.abandon()
            writer.close()


async def _begin(
    writer: asyncio.StreamWriter, work: bytes, parallelism: int, grace: float, paced: bool
) -> HostedRun | None:
    """Begin a run, and say whether that could be done."""
    hosted = HostedRun(None, parallelism, grace, batch_bytes=BATCH_BYTES, paced=paced)
    try:
        await hosted.begin(work)
    except BaseException as error:  # noqa: BLE001 - raised in the driver
        write_frame(writer, FAILED, pickle_error(error))
        return None
    gc.freeze()  # what was imported stays: a garbage collection that visits all of it would stop the event loop
    write_frame(writer, BEGUN, b"")
    return hosted


def _receive_message(hosted: HostedRun, content: bytes) -> None:
    try:
        message = pickle.loads(content)
    except Exception as error:  # noqa: BLE001 - whatever the classes of a case's objects do
        hosted.fail(ConfigurationError(f"a case cannot be unpickled in a worker process: {describe(error)}"))
    else:
        hosted.receive(message)


async def _send_batch(writer: asyncio.StreamWriter, hosted: HostedRun) -> None:
    batch: Any = await hosted.batch()
    write_frame(writer, BATCH, pickle_item(batch))


def is_last(batch: Batch) -> bool:
    """Whether this is a worker's last batch of a run."""
    return bool(batch.items) and batch.items[-1][0] == EXIT


if __name__ == "__main__":
    main(int(sys.argv[1]))
