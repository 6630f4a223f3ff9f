"""Pictures of different requests that share a batch, because they came within milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from .engine import Row
from .refusals import Busy

Answer = Callable[[Sequence[np.ndarray], int], list[Row]]
Seen = Callable[[int], None]


class Gate:
    """Counts what was accepted and not answered, and refuses what is above the limits.

    `pictures` may be accepted at once, and `size` bytes of what requests have sent. When there is
    no room for more bytes, uploads that have been under way for longer than `patience` seconds
    give way: slow ones must not keep out the quick.
    """

    def __init__(
        self,
        pictures: int,
        size: int,
        show: Callable[[int], None] = lambda held: None,
        patience: float = 5.0,
    ) -> None:
        self.limits, self.held, self.size, self._show = (pictures, size), 0, 0, show
        self.patience = patience
        self.uploads: dict[Ticket, float] = {}  # since when, the oldest first

    def check(self, pictures: int) -> None:
        """Refuse early what could not be accepted anyway."""
        if self.held + pictures > self.limits[0]:
            raise Busy(f"{self.held} pictures are waiting, and {self.limits[0]} may: try again")

    def take(self, pictures: int = 0, size: int = 0, ticket: Ticket | None = None) -> None:
        self.check(pictures)
        if self.size + size > self.limits[1]:
            self._make_room(ticket, size)
        self.held += pictures
        self.size += size
        if pictures:
            self._show(self.held)

    def give(self, pictures: int, size: int) -> None:
        self.held -= pictures
        self.size -= size
        if pictures:
            self._show(self.held)

    def _make_room(self, asking: Ticket | None, size: int) -> None:
        late = time.monotonic() - self.patience
        for ticket, since in list(self.uploads.items()):
            if ticket is asking or since > late:
                break
            ticket.give_way()
            if self.size + size <= self.limits[1]:
                return
        raise Busy(f"{self.size} bytes are waiting, and {self.limits[1]} may: try again")


class Ticket:
    """What one request has taken of a gate; at the end of its context all of it is given back."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._pictures, self._size = gate, 0, 0
        self._task: asyncio.Task[object] | None = None
        self.chunks: list[bytes] = []
        self.gave_way = False
        self.complete = False
        """Whether all of the request has arrived."""

    def check(self, pictures: int) -> None:
        self._gate.check(pictures)

    def take(self, pictures: int = 0, size: int = 0) -> None:
        self._gate.take(pictures, size, self)
        self._pictures += pictures
        self._size += size

    def wait_for_more(self) -> None:
        """From now on the request may have to give way; its task is cancelled then."""
        self._task = asyncio.current_task()
        self._gate.uploads[self] = time.monotonic()

    def arrived(self) -> None:
        """All of the request is here."""
        self.complete = True
        self._gate.uploads.pop(self, None)

    def give_way(self) -> None:
        self.gave_way = True
        self.chunks.clear()
        self._gate.uploads.pop(self, None)
        self._gate.give(0, self._size)
        self._size = 0
        if self._task is not None:
            self._task.cancel()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *failure: object) -> None:
        self._gate.uploads.pop(self, None)
        self._gate.give(self._pictures, self._size)


class Watch:
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
    """Runs prepared pictures through a model in batches, in `runs` threads side by side.

    A batch starts when it is full, or when its first picture has waited `max_wait` seconds, and a
    thread is free. The threads help themselves, so that none is idle while the event loop is busy.
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
        self._waiting: deque[_Item] = deque()
        self._more = threading.Condition()
        self._closed = False
        self.watch = Watch(runs)
        self._threads = [
            threading.Thread(target=self._work, name=f"hvt-run-{number}", daemon=True)
            for number in range(runs)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        """Pictures that wait for a run."""
        return len(self._waiting)

    def submit(self, image: np.ndarray, top: int) -> asyncio.Future[Row]:
        """The answer to come, for the event loop's thread; who no longer wants it cancels it."""
        future = asyncio.get_running_loop().create_future()
        with self._more:
            self._waiting.append(_Item(image, top, future, time.monotonic() + self._max_wait))
            if len(self._waiting) in (1, self._max_batch):
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
                with self.watch:
                    rows = self._answer([one.image for one in batch], max(o.top for o in batch))
            except Exception as failed:
                error = failed
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all who asked with it
                batch[0].future.get_loop().call_soon_threadsafe(_tell, batch, rows, error)

    def _take(self) -> list[_Item]:
        """Wait for the next batch; there is none once all is closed."""
        with self._more:
            while self._waiting or not self._closed:
                if not self._waiting:
                    self._more.wait()
                    continue
                left = self._waiting[0].due - time.monotonic()
                if len(self._waiting) < self._max_batch and left > 0 and not self._closed:
                    self._more.wait(left)
                    continue
                batch: list[_Item] = []
                while self._waiting and len(batch) < self._max_batch:
                    item = self._waiting.popleft()
                    if not item.future.done():
                        batch.append(item)
                if self._waiting:  # for another thread
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


def _tell(batch: Sequence[_Item], rows: Sequence[Row], error: Exception | None) -> None:
    for place, item in enumerate(batch):
        if item.future.done():
            continue
        if error is not None:
            item.future.set_exception(error)
        else:
            values, classes = rows[place]
            item.future.set_result((values[: item.top], classes[: item.top]))
