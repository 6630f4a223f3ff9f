"""Being asked to stop, by Ctrl-C or by a scheduler's SIGTERM."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """The run was asked to stop and has saved itself; the message says how to go on."""


class StopSignals:
    """While it is entered, a signal raises `asked` and the step at hand may end."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:  # not in the main thread: signals are somebody else's
                break
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C means now
        self.asked = True
