"""A process that answers, and how it stops: with the last answer, or when its time is over."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from .connection import KEEP_ALIVE, LAST, Connection, Shared
from .listening import BACKLOG, allow_files, refuse_connections

SWITCH = 5e-4  # seconds; Python's own is ten times that
CHECK = 0.1  # seconds between two looks at the time limits of connections
MARGIN = 3.0  # seconds beyond the grace time, for what comes after the last answer
SPARE_FILES = 200  # open files besides connections


def answer(
    app: FastAPI, sock: socket.socket, ready: Callable[[], None], parent: Any = None
) -> None:
    """Answer on a listening socket until told to stop; `parent` is a pipe that closes with it."""
    # A run that has ended waits this long for a busy event loop before it can start the next.
    sys.setswitchinterval(SWITCH)
    # What Pillow has to say about strangers' images.
    warnings.filterwarnings("ignore", module="PIL")
    allow_files(app.state.settings.max_connections + SPARE_FILES)
    server = _Server(app, sock, ready)

    async def serve() -> None:
        if parent is not None:
            loop = asyncio.get_running_loop()

            def orphaned() -> None:
                loop.remove_reader(parent.fileno())
                server.handle_exit(signal.SIGTERM, None)

            loop.add_reader(parent.fileno(), orphaned)
        await server.serve([sock])

    _run(serve())
    if _busy_threads():
        _leave(app.state)  # Python would wait for a decoder that nobody waits for any more
    _say_goodbye(app.state)


def _busy_threads() -> bool:
    """Whether a thread of ours goes on after a moment in which idle ones end."""
    end = time.monotonic() + 1.0
    ours = [each for each in threading.enumerate() if each.name.startswith("hvt-")]
    for each in ours:
        each.join(max(0.0, end - time.monotonic()))
    return any(each.is_alive() for each in ours)


def _say_goodbye(state: Any) -> None:
    counts = f"{state.accepted} requests accepted, {state.answered} answered"
    print(f"stopped: {counts}", file=sys.stderr, flush=True)


def _leave(state: Any) -> None:
    """End the process here and now; the exit code is 1 if a request is left without an answer."""
    _say_goodbye(state)
    sys.stdout.flush()
    os._exit(0 if state.answered == state.accepted else 1)


def _run(main: Coroutine[Any, Any, None]) -> None:
    """On uvloop, which takes half of asyncio's time; Windows has none."""
    try:
        from uvloop import run
    except ImportError:
        asyncio.run(main)
    else:
        run(main)


class _Server(uvicorn.Server):
    """uvicorn that drains first, and stops without resetting a connection.

    After being told it goes on answering for `drain` seconds, and says so in /healthz. Then it
    lets no new connection begin, takes up those that the kernel has accepted for it, and closes
    each once what its client has sent is answered.
    """

    def __init__(self, app: FastAPI, sock: socket.socket, ready: Callable[[], None]) -> None:
        settings = app.state.settings
        self._shared = Shared(settings, lambda status: app.state.metrics.count("other", status, 0))
        self._grace = math.ceil(settings.timeout) + 1
        config = uvicorn.Config(
            app,
            http=functools.partial(Connection, shared=self._shared),  # type: ignore[arg-type]
            lifespan="on",
            ws="none",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=self._grace,
        )
        super().__init__(config)
        self._state, self._ready, self._asked = app.state, ready, 0
        # The same socket once more, as the event loop closes its own first.
        self._listen_socket = socket.socket(fileno=socket.dup(sock.fileno()))
        self._listen_socket.setblocking(False)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        if self.started:
            self._checks = asyncio.create_task(self._check())
            self._ready()

    async def _check(self) -> None:
        """Keep the time limits of all connections."""
        while True:
            await asyncio.sleep(CHECK)
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                assert isinstance(connection, Connection)
                connection.check(now)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, a second one ends that, a third one drops what is left."""
        if not self._asked:
            self._give_up_later()
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

    def _give_up_later(self) -> None:
        """End the process after the grace time, whatever is still running in it."""
        seconds = self._state.settings.drain + self._grace + MARGIN
        timer = threading.Timer(seconds, _leave, [self._state])
        timer.daemon = True
        timer.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self.force_exit:
            refuse_connections(self._listen_socket)
            await asyncio.sleep(LAST)  # for handshakes that had begun
        for server in self.servers:
            server.close()
        await self._take_up()
        self._listen_socket.close()
        self._shared.stopping = time.monotonic()
        await super().shutdown(sockets)
        self._checks.cancel()

    async def _take_up(self) -> None:
        """Accept what the kernel has accepted already: closing the socket would reset it."""
        loop = asyncio.get_running_loop()
        protocol = functools.partial(
            Connection,
            self.config,
            self.server_state,
            self.lifespan.state,
            loop,
            shared=self._shared,
        )
        for _ in range(BACKLOG):
            try:
                sock, _ = self._listen_socket.accept()
            except OSError:  # there are no more
                return
            sock.setblocking(False)
            with contextlib.suppress(OSError):  # its client has gone
                await loop.connect_accepted_socket(protocol, sock)
