"""How the application is run: one process or several, and what happens when they are to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Coroutine, Iterator
from multiprocessing import connection, get_context
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from prometheus_client.multiprocess import mark_process_dead

from ..errors import HVTError
from .engine import Engine, export_to, temporary_folder
from .metrics import SHARED
from .settings import Settings

BACKLOG = 2048  # connections that wait to be accepted
KEEP_ALIVE = 75  # seconds; longer than proxies keep idle connections, or they race with us
SWITCH = 5e-4  # seconds; Python's own is ten times that
PATIENCE = 3  # workers in a row that may end before they are ready


def serve(source: str | Path | None, settings: Settings) -> int:
    """Answer until told to stop by SIGTERM or SIGINT; then answer what was accepted, and return."""
    sock = bind(settings)
    with contextlib.closing(sock):
        if settings.workers > 1:
            return _Supervisor(source, settings, sock).run()
        engine = Engine(source, settings)
        listen(sock, settings)
        _answer(engine, sock, ready=lambda: announce(engine.name, sock, settings))
    return 0


def bind(settings: Settings) -> socket.socket:
    """A socket at the address of the settings, on which nobody is heard yet."""
    where = f"{settings.host}:{settings.port}"
    try:
        kind = socket.SOCK_STREAM
        found = socket.getaddrinfo(settings.host, settings.port, type=kind, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise HVTError(f"cannot listen on {where}: there is no such address here") from error
    family, *_, address = found[0]
    sock = socket.socket(family, kind)
    try:
        if os.name != "nt":  # there it would let two programs share a port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _unheard(where, error) from error
    return sock


def listen(sock: socket.socket, settings: Settings) -> None:
    """Let connections come, once there is a model to answer them."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:  # another program has bound the same port and was quicker
        raise _unheard(f"{settings.host}:{settings.port}", error) from error


def _unheard(where: str, error: OSError) -> HVTError:
    if error.errno == errno.EADDRINUSE:
        reason = "another program does already: stop it, or choose another --port"
    elif error.errno == errno.EACCES:
        reason = "this user may not: choose a --port above 1023"
    elif error.errno == errno.EADDRNOTAVAIL:
        reason = "this machine has no such address"
    else:
        reason = error.strerror or str(error)
    return HVTError(f"cannot listen on {where}: {reason}")


def announce(name: str, sock: socket.socket, settings: Settings) -> None:
    """Say where to find what, on standard output for whoever chose port 0."""
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    workers = f"{settings.workers} workers, " if settings.workers > 1 else ""
    print(f"serving {name} at http://{shown}:{port} ({workers}Ctrl-C stops)", flush=True)


# ── one process ─────────────────────────────────────────────────────────────────────────────────


class _Server(uvicorn.Server):
    """uvicorn that drains first: it goes on answering for a moment, and says so in /healthz."""

    def __init__(self, config: uvicorn.Config, app: Any, ready: Any) -> None:
        super().__init__(config)
        self._state, self._ready, self._asked = app.state, ready, 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, a second one ends that, a third one drops what is left."""
        if sig == signal.SIGINT or not self._asked:  # Ctrl-C reaches a worker twice, as both
            self._asked += 1
        self._state.draining = True
        self.force_exit = self._asked > 2
        if self._asked > 1 or not self.started:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._loop.call_later(self._state.settings.drain, setattr, self, "should_exit", True)


def _answer(engine: Engine, sock: socket.socket, ready: Any, parent: Any = None) -> None:
    from .app import create_app

    # A run that has ended waits this long for a busy event loop before it can start the next.
    sys.setswitchinterval(SWITCH)
    # What Pillow has to say about strangers' pictures.
    warnings.filterwarnings("ignore", module="PIL")
    settings = engine.settings
    app = create_app(engine=engine)
    config = uvicorn.Config(
        app,
        lifespan="on",
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(settings.timeout) + 1,
    )
    server = _Server(config, app, ready)

    async def run() -> None:
        if parent is not None:  # its end of the pipe closes with it
            loop = asyncio.get_running_loop()

            def orphaned() -> None:
                loop.remove_reader(parent.fileno())
                server.handle_exit(signal.SIGTERM, None)

            loop.add_reader(parent.fileno(), orphaned)
        await server.serve([sock])

    _run(run())
    state = app.state
    print(
        f"stopped: {state.accepted} requests accepted, {state.answered} answered",
        file=sys.stderr,
        flush=True,
    )


def _run(main: Coroutine[Any, Any, None]) -> None:
    """On uvloop, which takes half of asyncio's time; Windows has none."""
    try:
        from uvloop import run
    except ImportError:
        asyncio.run(main)
    else:
        run(main)


# ── several processes ───────────────────────────────────────────────────────────────────────────


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
        engine = Engine(source, settings, exported)
        shared = _Fair(fileno=sock.detach())
        _answer(engine, shared, ready=lambda: parent.send("ready"), parent=parent)
    except HVTError as error:
        print(f"hvt: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # before it was ready
        raise SystemExit(0) from None


class _Worker:
    def __init__(self, process: Any, pipe: Any) -> None:
        self.process, self.pipe, self.ready = process, pipe, False


class _Supervisor:
    """Keeps the workers going; what they share is a socket, an exported file and a folder."""

    def __init__(self, source: str | Path | None, settings: Settings, sock: socket.socket) -> None:
        self.source, self.settings, self.sock = source, settings, sock
        self.context = get_context("spawn")  # torch and ONNX Runtime do not survive a fork
        self.workers: list[_Worker] = []
        self.failures = 0
        self.announced = False

    def run(self) -> int:
        with temporary_folder() as folder, _signals() as told:
            self.folder = folder
            os.environ[SHARED] = folder
            self.exported = export_to(folder, self.source)
            listen(self.sock, self.settings)
            for _ in range(self.settings.workers):
                self._start()
            try:
                while not self._told(told):
                    pass
            finally:
                self._stop()
        return 0

    def _told(self, told: socket.socket) -> bool:
        """Wait for something to happen; whether it was the order to stop."""
        pipes = {worker.pipe: worker for worker in self.workers if not worker.ready}
        ends = {worker.process.sentinel: worker for worker in self.workers}
        happened = connection.wait([told, *pipes, *ends])
        for what in happened:
            if what in pipes:
                self._ready(pipes[what])
        for what in happened:
            if what in ends:
                self._restart(ends[what])
        return told in happened

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
            name = Path(self.source).name if self.source else "the built-in model"
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
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
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
