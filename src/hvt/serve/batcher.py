"""Dynamic batching: queued images of different requests that came within milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from .engine import Row

Answer = Callable[[Sequence[np.ndarray], int], list[Row]]
Prediction = Callable[[int], None]


class Watchdog:
    """Knows since when each of some threads has been busy with one thing."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._since: dict[int, float] = {}

    def stuck(self, seconds: float) -> bool:
        """Whether all of them have been for longer than this."""
        before = time.monotonic() - seconds
        since = list(self._since.values())
        return len(since) == self._threads and all(start < before for start in since)

    def __enter__(self) -> None:
        self._since[threading.get_ident()] = time.monotonic()

    def __exit__(self, *failure: object) -> None:
        del self._since[threading.get_ident()]


class Batcher:
    """Runs prepared images through a model in batches, in `runs` threads side by side.

    A batch starts when it is full, or when its first image has waited `max_wait` seconds, and a
    thread is free. The threads help themselves, so that none is idle while the event loop is busy.
    """

    def __init__(
        self,
        answer: Answer,
        max_batch: int,
        max_wait: float,
        runs: int = 1,
        seen: Prediction = lambda size: None,
    ) -> None:
        self._answer, self._seen = answer, seen
        self._max_batch, self._max_wait = max_batch, max_wait
        self._queue: deque[_Item] = deque()
        self._more = threading.Condition()
        self._closed = False
        self.watchdog = Watchdog(runs)
        self._threads = [
            threading.Thread(target=self._work, name=f"hvt-run-{number}", daemon=True)
            for number in range(runs)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        """Images in the queue, not yet in a batch."""
        return len(self._queue)

    def submit(self, image: np.ndarray, top: int) -> asyncio.Future[Row]:
        """The answer to come, for the event loop's thread; who no longer wants it cancels it."""
        future = asyncio.get_running_loop().create_future()
        with self._more:
            self._queue.append(_Item(image, top, future, time.monotonic() + self._max_wait))
            if len(self._queue) in (1, self._max_batch):
                self._more.notify()
        return future

    def close(self, patience: float = 1.0) -> None:
        """Give the threads back, once they have run what waits; one that is stuck is left."""
        with self._more:
            self._closed = True
            self._more.notify_all()
        end = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        """What each thread does."""
        while batch := self._take():
            self._seen(len(batch))
            rows: list[Row] = []
            error: Exception | None = None
            try:
                with self.watchdog:
                    rows = self._answer([one.image for one in batch], max(o.top for o in batch))
            except Exception as failed:
                error = failed
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all who asked with it
                batch[0].future.get_loop().call_soon_threadsafe(_resolve, batch, rows, error)

    def _take(self) -> list[_Item]:
        """Wait for the next batch; there is none once all is closed."""
        with self._more:
            while self._queue or not self._closed:
                if not self._queue:
                    self._more.wait()
                    continue
                left = self._queue[0].due - time.monotonic()
                if len(self._queue) < self._max_batch and left > 0 and not self._closed:
                    self._more.wait(left)
                    continue
                batch: list[_Item] = []
                while self._queue and len(batch) < self._max_batch:
                    item = self._queue.popleft()
                    if not item.future.done():
                        batch.append(item)
                if self._queue:  # for another thread
                    self._more.notify()
                if batch:
                    return batch
        return []


class _Item:
    __slots__ = ("due", "future", "image", "top")

    def __init__(
        self, image: np.ndarray, top: int, future: asyncio.Future[Row], due: float
    ) -> None:
        self.image, self.top, self.future, self.due = image, top, future, due


def _resolve(batch: Sequence[_Item], rows: Sequence[Row], error: Exception | None) -> None:
    for place, item in enumerate(batch):
        if item.future.done():
            continue
        if error is not None:
            item.future.set_exception(error)
        else:
            values, classes = rows[place]
            item.future.set_result((values[: item.top], classes[: item.top]))
