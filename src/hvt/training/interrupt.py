"""Being asked to stop, by Ctrl-C or by a scheduler's SIGTERM."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

GRACE = 25.0
"""Seconds that a step has to end after SIGTERM. Kubernetes gives 30."""


class Interrupted(Exception):
    """The run was asked to stop and has saved itself; the message has the command that resumes."""


class StopSignals:
    """While it is entered, a signal sets `asked` and the step at hand may end.

    One that does not end after SIGTERM, because a reading process hangs say, is given up.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # else they are somebody else's
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
            if sys.platform != "win32":
                self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, _give_up)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before and sys.platform != "win32":
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C means now
        self.asked = True
        if number == signal.SIGTERM and sys.platform != "win32":
            signal.setitimer(signal.ITIMER_REAL, GRACE)


def ignore_sigterm() -> None:
    """Have time to print an error: torchrun ends all processes as soon as one has failed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _give_up(number: int, frame: FrameType | None) -> None:
    how = "without a new checkpoint: the step did not end"
    print(f"hvt: stopped {GRACE:g} s after SIGTERM {how}", file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(130)
