"""Dynamic batching: queued images of different requests that came within milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .engine import Scores


class Batcher:
    """Runs prepared images through a model in batches, in several threads side by side.

    `predict` takes a batch of images and how many classes to return for each. A batch starts when
    it is full, or when its first image has waited `max_wait` seconds, and a thread is free. The
    threads help themselves, so that none is idle while the event loop is busy. Images of different
    `group`s do not share a batch.
    """

    def __init__(
        self,
        predict: Callable[[Sequence[np.ndarray], int], list[Scores]],
        max_batch_size: int,
        max_wait: float,
        threads: int = 1,
        observe: Callable[[int], None] = lambda size: None,
        group: Callable[[np.ndarray], int] = lambda image: 0,
    ) -> None:
        self._predict, self._observe, self._group = predict, observe, group
        self._max_batch_size, self._max_wait = max_batch_size, max_wait
        self._queue: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._closed = False
        for _ in range(threads):
            threading.Thread(target=self._run, name="hvt-batch", daemon=True).start()

    def submit(self, image: np.ndarray, top: int) -> asyncio.Future[Scores]:
        """The scores to come, for the event loop's thread; cancel it to leave the queue."""
        future = asyncio.get_running_loop().create_future()
        with self._changed:
            self._queue.append(_Item(image, top, future, time.monotonic() + self._max_wait))
            if len(self._queue) in (1, self._max_batch_size):
                self._changed.notify()
        return future

    def close(self) -> None:
        """Let the threads end once they have run what waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        """What each thread does."""
        while batch := self._next_batch():
            self._observe(len(batch))
            scores: list[Scores] = []
            error: Exception | None = None
            try:
                scores = self._predict([one.image for one in batch], max(one.top for one in batch))
            except Exception as failed:
                error = failed
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all who asked with it
                batch[0].future.get_loop().call_soon_threadsafe(_resolve, batch, scores, error)

    def _next_batch(self) -> list[_Item]:
        """Wait for the next batch; an empty one once all is closed."""
        with self._changed:
            while self._queue or not self._closed:
                if not self._queue:
                    self._changed.wait()
                    continue
                left = self._queue[0].due - time.monotonic()
                if len(self._queue) < self._max_batch_size and left > 0 and not self._closed:
                    self._changed.wait(left)
                    continue
                batch: list[_Item] = []
                group = self._group(self._queue[0].image)
                while self._queue and len(batch) < self._max_batch_size:
                    if self._group(self._queue[0].image) != group:
                        break
                    item = self._queue.popleft()
                    if not item.future.done():
                        batch.append(item)
                if self._queue:  # for another thread
                    self._changed.notify()
                if batch:
                    return batch
        return []


class _Item(NamedTuple):
    image: np.ndarray
    top: int
    future: asyncio.Future[Scores]
    due: float


def _resolve(batch: Sequence[_Item], scores: Sequence[Scores], error: Exception | None) -> None:
    for place, item in enumerate(batch):
        if item.future.done():
            continue
        if error is not None:
            item.future.set_exception(error)
        else:
            values, classes, *more = scores[place]
            item.future.set_result((values[: item.top], classes[: item.top], *more))
