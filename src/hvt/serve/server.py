"""How the application is run: by uvicorn, in one process or several, until they are stopped."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
import os
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from ..errors import HVTError
from .app import create_app
from .engine import Engine, temporary_folder
from .metrics import SHARED
from .settings import Settings

BACKLOG = 2048  # connections that wait to be accepted
SWITCH = 5e-4  # seconds; Python's own is ten times that
WORKER_TIMEOUT = 60  # seconds for a worker to import what it needs, on a busy machine


def serve(source: str | Path | None, settings: Settings) -> int:
    """Answer until stopped by SIGTERM or SIGINT, then what was accepted; returns the exit code."""
    _show_log()
    sock = bind(settings)
    if settings.workers > 1:
        return _serve_workers(source, settings, sock)
    run(create_app(Engine(source, settings)), sock)
    return 0


def run(app: FastAPI, sock: socket.socket | None = None) -> None:
    """Serve an application of `create_app`, which may have more middleware, in this process."""
    settings: Settings = app.state.settings
    if settings.workers > 1:
        raise HVTError(f"workers={settings.workers} must be 1 for an application that is passed in")
    with sock or bind(settings) as sock:
        _announce(sock, settings)
        _tune()
        # uvicorn raises the signal again once it has shut down, which would then end the process.
        before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(_config(app, settings)).run([sock])
        signal.signal(signal.SIGTERM, before)


def _serve_workers(source: str | Path | None, settings: Settings, sock: socket.socket) -> int:
    """uvicorn's own supervisor; workers share a socket, and a folder of exports and metrics."""
    with sock, temporary_folder() as folder:
        os.environ[SHARED] = str(folder)
        Engine(source, settings, folder)  # what is wrong with it is an error here, once
        _announce(sock, settings)
        factory = functools.partial(_worker_app, source, settings, folder)
        supervisor = _Supervisor(_config(factory, settings, factory=True), [sock])
        supervisor.run()
    failed = any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes)
    return 2 if failed else 0


class _Supervisor(Multiprocess):
    """uvicorn's own; once it stops, its copy of the socket must not keep connections waiting."""

    def terminate_all(self) -> None:
        for sock in self.sockets:
            sock.close()
        super().terminate_all()


def _worker_app(source: str | Path | None, settings: Settings, folder: Path) -> FastAPI:
    _tune()
    _show_log()
    try:
        return create_app(Engine(source, settings, folder))
    except HVTError as error:
        print(f"hvt: {error}", file=sys.stderr, flush=True)
        raise SystemExit(STARTUP_FAILURE) from None


def _config(app: Any, settings: Settings, factory: bool = False) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        factory=factory,
        workers=settings.workers,
        # Its headers are bounded, and it reads the body of a request that asks for an upgrade.
        http="h11",
        ws="none",
        lifespan="on",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        limit_concurrency=settings.limit_concurrency,
        timeout_keep_alive=settings.timeout_keep_alive,
        timeout_graceful_shutdown=math.ceil(settings.timeout) + 1,
        timeout_worker_healthcheck=WORKER_TIMEOUT,
    )


def bind(settings: Settings) -> socket.socket:
    """A socket that listens at the address of the settings; clients wait until a model is ready."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (settings.host, settings.port), family=family, backlog=BACKLOG, dualstack_ipv6=dual
        )
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        reason = (error.strerror or str(error)).partition(" (")[0]  # the address is said already
        raise HVTError(
            f"cannot listen on {where}: {reason}; choose another --host or --port"
        ) from error


def _announce(sock: socket.socket, settings: Settings) -> None:
    """Print where it listens, on standard output for whoever chose port 0."""
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    notes = [f"{settings.workers} workers"] if settings.workers > 1 else []
    if not settings.allow_host and host in ("0.0.0.0", "::"):
        notes.append("reachable by address only: --allow-host NAME allows a host name")
    notes.append("Ctrl-C stops")
    print(f"listening on http://{shown}:{port} ({', '.join(notes)})", flush=True)


def _show_log() -> None:
    """Show on standard error what is being done until the service listens."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hvt.serve").setLevel(logging.INFO)


def _tune() -> None:
    # A batch that has ended waits this long for a busy event loop before the next can start.
    sys.setswitchinterval(SWITCH)
    gc.freeze()  # what is imported stays: no collection needs to walk over it again
    # About untrusted images and forms, of which a client may send any number.
    warnings.filterwarnings("ignore", module="PIL")
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
