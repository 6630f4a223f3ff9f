"""From an upload to class scores: decoded beside the event loop, then batched with others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from fastapi import HTTPException

from .body import Upload
from .decoding import DecodeError, decode_heavy, decode_light
from .engine import Engine, Pixels, Scores

TINY_FILE, TINY_IMAGE = 16_384, 65_536
"""Bytes and pixels up to which a thread would cost more than it saves."""


class Inference:
    """Decodes images in threads and submits them to the batcher."""

    def __init__(self, engine: Engine, observe: Callable[[int], None]) -> None:
        self._engine, settings = engine, engine.settings
        wait, threads = settings.max_wait_ms / 1e3, settings.batch_threads
        self._batcher = Batcher(engine.predict, settings.max_batch_size, wait, threads, observe)
        # Light images wait neither behind heavy ones nor behind what the page draws.
        sizes = {"light": settings.decoders, "heavy": settings.decoders, "explain": 1}
        self._pools = {
            name: ThreadPoolExecutor(size, thread_name_prefix=f"hvt-{name}")
            for name, size in sizes.items()
        }

    async def predict(self, uploads: Sequence[Upload], top: int) -> list[Scores]:
        """The top classes of each image, in order; one that cannot be read fails them all."""
        if len(uploads) == 1:
            return [await self._predict(uploads[0], top)]
        tasks = [asyncio.ensure_future(self._predict(upload, top)) for upload in uploads]
        try:
            return await asyncio.gather(*tasks)
        finally:  # where one fails, or time is over, nobody wants the others
            for task in tasks:
                task.cancel()

    async def _predict(self, upload: Upload, top: int) -> Scores:
        return await self._batcher.submit(await self.decode(upload), top)

    async def decode(self, upload: Upload) -> Pixels:
        """An image, decoded in a thread unless it is tiny; raises an `HTTPException` for errors."""
        content = upload.content
        try:
            pixels = None
            if len(content) <= TINY_FILE:
                pixels = self._decode(decode_light, content, TINY_IMAGE)
            if pixels is None:
                pixels = await self.run("light", self._decode, decode_light, content)
            if pixels is None:
                pixels = await self.run("heavy", self._decode, decode_heavy, content)
            return pixels
        except Exception as error:
            failed = DecodeError.of(error)
            raise HTTPException(failed.status, f"{upload.label} {failed.reason}") from error

    def _decode(self, decode: Callable[..., Any], content: bytes, *limit: int) -> Pixels | None:
        image = decode(content, self._engine.limits, *limit)
        return None if image is None else self._engine.pixels(image)

    def run(self, pool: str, function: Callable[..., Any], *arguments: object) -> Awaitable[Any]:
        """What a function returns in a thread for `light`, `heavy` or `explain`."""
        return asyncio.get_running_loop().run_in_executor(self._pools[pool], function, *arguments)

    def close(self) -> None:
        """End the threads; a decoder that is busy is left behind, and nobody waits for it."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        self._batcher.close()


class Batcher:
    """Runs images of different requests through a model in batches, in several threads.

    `predict` takes a batch and how many classes to return for each. A batch starts when it is full,
    or when its first image has waited `max_wait` seconds, and a thread is free. The threads help
    themselves, so that none is idle while the event loop is busy. A batch is of one setting.
    """

    def __init__(
        self,
        predict: Callable[[Sequence[Pixels], int], list[Scores]],
        max_batch_size: int,
        max_wait: float,
        threads: int = 1,
        observe: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._predict, self._observe = predict, observe
        self._max_batch_size, self._max_wait = max_batch_size, max_wait
        self._queue: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._closed = False
        for _ in range(threads):
            threading.Thread(target=self._run, name="hvt-batch", daemon=True).start()

    def submit(self, pixels: Pixels, top: int) -> asyncio.Future[Scores]:
        """The scores to come, for the event loop's thread; cancel it to leave the queue."""
        future = asyncio.get_running_loop().create_future()
        with self._changed:
            self._queue.append(_Item(pixels, top, future, time.monotonic() + self._max_wait))
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
            scores: list[Scores] | Exception
            try:
                scores = self._predict([one.pixels for one in batch], max(one.top for one in batch))
            except Exception as error:
                scores = error
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all who asked with it
                batch[0].future.get_loop().call_soon_threadsafe(_resolve, batch, scores)

    def _next_batch(self) -> list[_Item]:
        """Wait for the next batch; an empty one once all is closed."""
        with self._changed:
            while self._queue or not self._closed:
                left = self._queue[0].due - time.monotonic() if self._queue else None
                ready = len(self._queue) >= self._max_batch_size or self._closed
                if left is None or (left > 0 and not ready):
                    self._changed.wait(left)
                    continue
                batch: list[_Item] = []
                setting = self._queue[0].pixels.setting
                while self._queue and len(batch) < self._max_batch_size:
                    if self._queue[0].pixels.setting != setting:
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
    pixels: Pixels
    top: int
    future: asyncio.Future[Scores]
    due: float


def _resolve(batch: Sequence[_Item], scores: Sequence[Scores] | Exception) -> None:
    for place, item in enumerate(batch):
        if item.future.done():
            continue
        if isinstance(scores, Exception):
            item.future.set_exception(scores)
        else:
            item.future.set_result(scores[place])
