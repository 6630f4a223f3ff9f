"""Pictures of different requests that share a batch, because they came within milliseconds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .engine import Row
from .refusals import Busy

Answer = Callable[[Sequence[np.ndarray], int], list[Row]]
Seen = Callable[[int], None]


class Gate:
    """Counts the pictures that were accepted and not answered, and refuses those above a limit."""

    def __init__(self, limit: int, show: Callable[[int], None] = lambda held: None) -> None:
        self.limit, self.held, self._show = limit, 0, show

    def enter(self, pictures: int = 1) -> None:
        if self.held + pictures > self.limit:
            raise Busy(f"{self.held} pictures are waiting, and {self.limit} may: try again")
        self.held += pictures
        self._show(self.held)

    def leave(self, pictures: int) -> None:
        self.held -= pictures
        self._show(self.held)


class Batcher:
    """Runs prepared pictures through a model in batches, `runs` of them at once.

    A batch starts when it is full, or when its first picture has waited `max_wait` seconds and a
    run is free. All methods are for the event loop's thread.
    """

    def __init__(
        self,
        answer: Answer,
        max_batch: int,
        max_wait: float,
        runs: int = 1,
        seen: Seen = lambda size: None,
    ) -> None:
        self._answer, self._seen = answer, seen
        self._max_batch, self._max_wait = max_batch, max_wait
        self._pool = ThreadPoolExecutor(runs, thread_name_prefix="hvt-run")
        self._free = runs
        self._waiting: deque[_Item] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Pictures that wait for a run."""
        return len(self._waiting)

    def submit(self, image: np.ndarray, top: int) -> asyncio.Future[Row]:
        """The answer to come; who no longer wants it cancels the future."""
        loop = asyncio.get_running_loop()
        item = _Item(image, top, loop.create_future(), loop.time())
        self._waiting.append(item)
        self._start(loop)
        return item.future

    def close(self) -> None:
        """Give the threads back; nothing may be waiting any more."""
        self._pool.shutdown()

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start what can be, and see to it that the rest is looked at in time."""
        while self._free and self._waiting:
            due = self._waiting[0].since + self._max_wait
            # Timers go off up to their clock's resolution early.
            if len(self._waiting) < self._max_batch and loop.time() < due - 1e-4:
                if self._timer is None:
                    self._timer = loop.call_at(due, self._wake, loop)
                return
            self._run(loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._start(loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        batch: list[_Item] = []
        while self._waiting and len(batch) < self._max_batch:
            item = self._waiting.popleft()
            if not item.future.done():
                batch.append(item)
        if not batch:
            return
        self._free -= 1
        self._seen(len(batch))
        self._pool.submit(self._work, batch, loop)

    def _work(self, batch: list[_Item], loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of the pool."""
        rows: list[Row] = []
        error: Exception | None = None
        try:
            rows = self._answer([item.image for item in batch], max(item.top for item in batch))
        except Exception as failed:
            error = failed
        loop.call_soon_threadsafe(self._done, batch, rows, error, loop)

    def _done(
        self,
        batch: list[_Item],
        rows: list[Row],
        error: Exception | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._free += 1
        self._start(loop)
        for place, item in enumerate(batch):
            if item.future.done():
                continue
            if error is not None:
                item.future.set_exception(error)
            else:
                values, classes = rows[place]
                item.future.set_result((values[: item.top], classes[: item.top]))


class _Item:
    __slots__ = ("future", "image", "since", "top")

    def __init__(
        self, image: np.ndarray, top: int, future: asyncio.Future[Row], since: float
    ) -> None:
        self.image, self.top, self.future, self.since = image, top, future, since
