"""Inference for a request: its images are decoded, then batched with those of others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image

from .batcher import Batcher, Watchdog
from .body import Upload
from .decoder import Heavy
from .engine import Engine, Row

SMALL_FILE, SMALL_IMAGE = 16_384, 16_384
"""Bytes and pixels up to which a thread would cost more than it saves."""
LONGEST = 8
"""Times its shorter side, of a small image: resizing makes a strip as much larger."""


class InferencePipeline:
    """Decodes images in threads beside the event loop, and queues them for the model."""

    def __init__(self, engine: Engine, batcher: Batcher, threads: int) -> None:
        self.engine, self.batcher = engine, batcher
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hvt-read")
        # Threads that wait for a process, so that no light image waits behind a heavy one.
        self._heavy_pool = ThreadPoolExecutor(threads, thread_name_prefix="hvt-wait")
        self._watchdogs = (Watchdog(threads), Watchdog(threads), batcher.watchdog)

    async def predict(self, uploads: Sequence[Upload], top: int) -> list[Row]:
        """The answers to a request's images, in order; one that is refused refuses them all."""
        answers: list[asyncio.Future[Row]] = []
        try:
            for place, upload in enumerate(uploads):
                answers.append(self._submit(upload.content, _what(place, uploads), top))
            if len(answers) == 1:
                return [await answers[0]]
            return await asyncio.gather(*answers)
        finally:  # where one is refused, or time is over, nobody wants the others
            for answer in answers:
                answer.cancel()

    def stuck(self) -> bool:
        """Whether nobody gets an answer: all threads have been at one thing for too long."""
        seconds = self.engine.settings.timeout
        return any(watchdog.stuck(seconds) for watchdog in self._watchdogs)

    def close(self) -> None:
        """Give the threads back; a decoder that is busy goes on, and nobody waits for it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._heavy_pool.shutdown(wait=False, cancel_futures=True)
        self.batcher.close()

    def _submit(self, content: bytes, what: str, top: int) -> asyncio.Future[Row]:
        if len(content) <= SMALL_FILE:
            image = self.engine.open(content, what)
            if image is not None and _is_small(image):
                with contextlib.suppress(Heavy):
                    return self.batcher.submit(self._prepare(image, what), top)
        return asyncio.ensure_future(self._submit_in_thread(content, what, top))

    async def _submit_in_thread(self, content: bytes, what: str, top: int) -> Row:
        """The same for a larger image, in a thread that leaves the event loop alone."""
        loop = asyncio.get_running_loop()
        image = await loop.run_in_executor(self._pool, self._read_light, content, what)
        if image is None:
            image = await loop.run_in_executor(self._heavy_pool, self._read, content, what)
        return await self.batcher.submit(image, top)

    def _read_light(self, content: bytes, what: str) -> np.ndarray | None:
        with self._watchdogs[0], contextlib.suppress(Heavy):
            image = self.engine.open(content, what)
            return None if image is None else self._prepare(image, what)
        return None

    def _read(self, content: bytes, what: str) -> np.ndarray:
        with self._watchdogs[1]:
            return self.engine.pixels(self.engine.read(content, what))

    def _prepare(self, image: Image.Image, what: str) -> np.ndarray:
        return self.engine.pixels(self.engine.finish(image, what))


def _what(place: int, uploads: Sequence[Upload]) -> str:
    """What a refusal calls an image."""
    if uploads[place].name:
        return f"the image {uploads[place].name!r}"
    return "the image" if len(uploads) == 1 else f"image {place + 1} of {len(uploads)}"


def _is_small(image: Image.Image) -> bool:
    """Whether it is prepared so soon that the event loop can wait for it."""
    sides = sorted(image.size)
    return sides[0] * sides[1] <= SMALL_IMAGE and sides[1] <= LONGEST * sides[0]
