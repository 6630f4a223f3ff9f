"""Several processes that answer on one socket, and the first one, which watches over them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from multiprocessing import connection, get_context
from pathlib import Path
from types import FrameType
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from ..errors import HVTError
from .app import create_app
from .engine import Engine, export_to, temporary_folder, valid_text
from .listening import announce, listen
from .metrics import SHARED
from .process import MARGIN, answer
from .settings import Settings

PATIENCE = 3  # workers in a row that may end before they are ready


class _Fair(socket.socket):
    """A socket that gives asyncio one connection at a time, so that other workers get some too.

    uvloop takes one at a time anyway.
    """

    _given = False

    def accept(self) -> tuple[socket.socket, Any]:
        self._given = not self._given
        if not self._given:
            raise BlockingIOError
        try:
            return super().accept()
        except OSError:
            self._given = False
            raise


def _work(
    source: str | Path | None,
    settings: Settings,
    exported: Path | None,
    sock: socket.socket,
    parent: Any,
) -> None:
    """What a worker does; the model is loaded before the first connection is taken."""
    try:
        app = create_app(engine=Engine(source, settings, exported))
        shared = _Fair(fileno=sock.detach())
        answer(app, shared, ready=lambda: parent.send("ready"), parent=parent)
    except HVTError as error:
        print(f"hvt: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # before it was ready
        raise SystemExit(0) from None


class _Worker:
    def __init__(self, process: Any, pipe: Any) -> None:
        self.process, self.pipe, self.ready = process, pipe, False


class Supervisor:
    """Keeps the workers going; what they share is a socket, an exported file and a folder."""

    def __init__(self, source: str | Path | None, settings: Settings, sock: socket.socket) -> None:
        self.source, self.settings, self.sock = source, settings, sock
        self.context = get_context("spawn")  # torch and ONNX Runtime do not survive a fork
        self.workers: list[_Worker] = []
        self.failures = 0
        self.announced = False

    def run(self) -> int:
        with temporary_folder() as folder, _signals() as stop:
            self.folder = folder
            os.environ[SHARED] = folder
            self.exported = export_to(folder, self.source)
            listen(self.sock, self.settings)
            for _ in range(self.settings.workers):
                self._start()
            try:
                while not self._stop_requested(stop):
                    pass
            finally:
                self._stop()
        return 0

    def _stop_requested(self, stop: socket.socket) -> bool:
        """Wait for something to happen; whether it was the order to stop."""
        pipes = {worker.pipe: worker for worker in self.workers if not worker.ready}
        ends = {worker.process.sentinel: worker for worker in self.workers}
        happened = connection.wait([stop, *pipes, *ends])
        for what in happened:
            if what in pipes:
                self._ready(pipes[what])
        for what in happened:
            if what in ends:
                self._restart(ends[what])
        return stop in happened

    def _start(self) -> None:
        here, there = self.context.Pipe()
        arguments = (self.source, self.settings, self.exported, self.sock, there)
        process = self.context.Process(target=_work, args=arguments)
        process.start()
        there.close()
        self.workers.append(_Worker(process, here))

    def _ready(self, worker: _Worker) -> None:
        with contextlib.suppress(EOFError, OSError):  # or it ended, which is seen elsewhere
            worker.pipe.recv()
            worker.ready, self.failures = True, 0
        if not self.announced and all(worker.ready for worker in self.workers):
            self.announced = True
            name = valid_text(Path(self.source).name) if self.source else "the built-in model"
            announce(name, self.sock, self.settings)

    def _restart(self, worker: _Worker) -> None:
        worker.process.join()
        worker.pipe.close()
        self.workers.remove(worker)
        mark_process_dead(worker.process.pid, self.folder)
        code = worker.process.exitcode
        if not worker.ready:
            self.failures += 1
            if code == 2 or self.failures >= PATIENCE:
                raise HVTError(f"a worker ended before it was ready, with exit code {code}")
            time.sleep(1)
        print(f"hvt: a worker ended with exit code {code}; starting another", file=sys.stderr)
        self._start()

    def _stop(self) -> None:
        self.sock.close()  # or it would stay open after the last worker has closed it
        for worker in self.workers:
            worker.process.terminate()
        end = time.monotonic() + self.settings.drain + self.settings.timeout + 2 * MARGIN
        for worker in self.workers:
            worker.process.join(max(0.0, end - time.monotonic()))
            if worker.process.is_alive():  # it should have left by itself
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket that has something to read once the process was told to stop."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def note(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            writer.send(b".")

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()
