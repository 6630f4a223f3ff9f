"""Admission control: which requests join the queue, and which are refused because it is full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from .refusals import Busy


class AdmissionControl:
    """Counts the images and bytes that are queued, and refuses more than the limits.

    `images` may be admitted and not yet answered at a time, and `size` bytes of what requests
    have sent. When there is no room for more bytes, uploads that have been under way for longer
    than `patience` seconds are evicted: slow ones must not keep out the quick.
    """

    def __init__(
        self,
        images: int,
        size: int,
        show: Callable[[int], None] = lambda held: None,
        patience: float = 5.0,
    ) -> None:
        self.limits, self.held, self.size, self._show = (images, size), 0, 0, show
        self.patience = patience
        self.uploads: dict[Admission, float] = {}  # since when, the oldest first

    def check(self, images: int) -> None:
        """Refuse early what could not be accepted anyway."""
        if self.held + images > self.limits[0]:
            raise Busy(f"{self.held} images are waiting, and {self.limits[0]} may: try again")

    def acquire(self, images: int = 0, size: int = 0, admission: Admission | None = None) -> None:
        self.check(images)
        if self.size + size > self.limits[1]:
            self._make_room(admission, size)
        self.held += images
        self.size += size
        if images:
            self._show(self.held)

    def release(self, images: int, size: int) -> None:
        self.held -= images
        self.size -= size
        if images:
            self._show(self.held)

    def _make_room(self, asking: Admission | None, size: int) -> None:
        late = time.monotonic() - self.patience
        for admission, since in list(self.uploads.items()):
            if admission is asking or since > late:
                break
            admission.evict()
            if self.size + size <= self.limits[1]:
                return
        raise Busy(f"{self.size} bytes are waiting, and {self.limits[1]} may: try again")


class Admission:
    """What one request has acquired of the queue; the end of its context releases all of it."""

    def __init__(self, control: AdmissionControl) -> None:
        self._control, self._images, self._size = control, 0, 0
        self._task: asyncio.Task[object] | None = None
        self.chunks: list[bytes] = []
        self.evicted = False
        self.complete = False
        """Whether all of the request has arrived."""

    def check(self, images: int) -> None:
        self._control.check(images)

    def acquire(self, images: int = 0, size: int = 0) -> None:
        self._control.acquire(images, size, self)
        self._images += images
        self._size += size

    def wait_for_more(self) -> None:
        """From now on the request may be evicted; its task is cancelled then."""
        self._task = asyncio.current_task()
        self._control.uploads[self] = time.monotonic()

    def arrived(self) -> None:
        """All of the request is here."""
        self.complete = True
        self._control.uploads.pop(self, None)

    def evict(self) -> None:
        self.evicted = True
        self.chunks.clear()
        self._control.uploads.pop(self, None)
        self._control.release(0, self._size)
        self._size = 0
        if self._task is not None:
            self._task.cancel()

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, *failure: object) -> None:
        self._control.uploads.pop(self, None)
        self._control.release(self._images, self._size)
