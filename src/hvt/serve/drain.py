"""How a worker stops: `/healthz` turns 503 first, and `--drain` seconds later uvicorn shuts down.

uvicorn then closes its socket and idle connections and answers what it has accepted, for up to
`--timeout` seconds. Whatever still hangs in the process ends with it a moment later.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import parent_process
from types import FrameType
from typing import Any

import uvicorn

MARGIN = 5.0  # seconds beyond drain and timeout, for what comes after the last answer


@contextlib.contextmanager
def drained(state: Any) -> Iterator[None]:
    """Put a delay of `--drain` seconds before what uvicorn does on SIGTERM and SIGINT.

    Entered in uvicorn's lifespan, after it has installed its own handlers; under another server,
    or in a thread, nothing is changed.
    """
    handler: Any = signal.getsignal(signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    if not main or not isinstance(getattr(handler, "__self__", None), uvicorn.Server):
        yield
        return
    loop = asyncio.get_running_loop()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not state.draining:
            state.draining = True
            # Whatever hangs, even with Python's lock: where it does is printed, and exit code 1.
            grace = state.settings.drain + state.settings.timeout + MARGIN
            faulthandler.dump_traceback_later(grace, exit=True)
            delay = functools.partial(loop.call_later, state.settings.drain)
            loop.call_soon_threadsafe(delay, handler, number, None)
        elif number == signal.SIGINT:  # impatience; a worker may get both for one Ctrl-C
            handler(number, None)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    parent = parent_process()
    if parent is not None:  # a worker must not outlive the process that started it
        loop.add_reader(parent.sentinel, _orphaned, loop, parent.sentinel)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handler)


def _orphaned(loop: asyncio.AbstractEventLoop, sentinel: int) -> None:
    loop.remove_reader(sentinel)
    os.kill(os.getpid(), signal.SIGTERM)
