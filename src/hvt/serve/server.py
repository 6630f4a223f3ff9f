"""How the application is run: one process or several, until they are told to stop."""

from __future__ import annotations

import contextlib
from pathlib import Path

from fastapi import FastAPI

from ..errors import HVTError
from .app import create_app
from .listening import announce, bind, listen
from .process import answer
from .settings import Settings
from .workers import Supervisor


def serve(source: str | Path | None, settings: Settings) -> int:
    """Answer until told to stop by SIGTERM or SIGINT; then answer what was accepted, and return."""
    sock = bind(settings)
    with contextlib.closing(sock):
        if settings.workers > 1:
            return Supervisor(source, settings, sock).run()
        app = create_app(settings, source)
        listen(sock, settings)
        answer(app, sock, ready=lambda: announce(app.state.engine.name, sock, settings))
    return 0


def run(app: FastAPI) -> None:
    """Answer by an application of `create_app`, which may have more middleware, in this process."""
    settings: Settings = app.state.settings
    if settings.workers > 1:
        raise HVTError(f"workers={settings.workers} must be 1 where the application is given")
    with contextlib.closing(bind(settings)) as sock:
        listen(sock, settings)
        answer(app, sock, ready=lambda: announce(app.state.engine.name, sock, settings))
