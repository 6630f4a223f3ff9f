"""Being asked to stop, by Ctrl-C or by a scheduler's SIGTERM."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

GRACE = 25.0
"""Seconds from SIGTERM to the end, whatever the step at hand waits for. Kubernetes gives 30."""


class Interrupted(Exception):
    """The run was asked to stop and has saved itself; the message has the command that resumes."""


class StopSignals:
    """While it is entered, a signal sets `asked` and the step at hand may end.

    A step that does not end, because a reading process hangs say, is ended after SIGTERM by a
    thread: Python's own handlers do not run while the main thread waits in C. A wakeup file
    descriptor tells the thread of the signal.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self  # signals are somebody else's
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        self._awake, self._signalled = socket.socketpair()
        self._signalled.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._before:
            return
        signal.set_wakeup_fd(self._fd)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._over.set()
        self._signalled.close()  # which ends the thread's wait

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C means now
        self.asked = True

    def _watch(self) -> None:
        with self._awake:
            while received := self._awake.recv(1):
                if received[0] == signal.SIGTERM and not self._over.wait(GRACE):
                    print(
                        f"hvt: stopped {GRACE:g} s after SIGTERM without a new checkpoint: the "
                        "step did not end",
                        file=sys.stderr,
                        flush=True,
                    )
                    for child in multiprocessing.active_children():
                        child.kill()
                    os._exit(130)
