"""From a request's pictures to their answers: decoded, then batched with those of others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image

from .batcher import Batcher
from .body import Upload
from .engine import Engine, Row
from .pictures import decode

SMALL_FILE, SMALL_PICTURE = 16_384, 16_384
"""Bytes and pixels up to which a thread would cost more than it saves."""


class Looker:
    """Reads pictures beside the event loop and the model, and has them answered."""

    def __init__(self, engine: Engine, batcher: Batcher, threads: int) -> None:
        self.engine, self.batcher = engine, batcher
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hvt-read")

    async def look(self, uploads: Sequence[Upload], top: int) -> list[Row]:
        """The answers to a request's pictures, in order; one that is refused refuses them all."""
        answers: list[asyncio.Future[Row]] = []
        try:
            for place, upload in enumerate(uploads):
                answers.append(self._ask(upload.content, _what(place, uploads), top))
            if len(answers) == 1:
                return [await answers[0]]
            return await asyncio.gather(*answers)
        finally:  # where one is refused, or time is over, nobody wants the others
            for answer in answers:
                answer.cancel()

    def close(self) -> None:
        """Give the threads back; a decoder that is busy goes on, and nobody waits for it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.batcher.close()

    def _ask(self, content: bytes, what: str, top: int) -> asyncio.Future[Row]:
        if len(content) <= SMALL_FILE:
            image = self.engine.open(content, what)
            if image.width * image.height <= SMALL_PICTURE:
                return self.batcher.submit(self._prepare(image, what), top)
        return asyncio.ensure_future(self._ask_beside(content, what, top))

    async def _ask_beside(self, content: bytes, what: str, top: int) -> Row:
        """The same for a larger picture, in a thread that leaves the event loop alone."""
        loop = asyncio.get_running_loop()
        image = await loop.run_in_executor(self._pool, self._read, content, what)
        return await self.batcher.submit(image, top)

    def _read(self, content: bytes, what: str) -> np.ndarray:
        return self._prepare(self.engine.open(content, what), what)

    def _prepare(self, image: Image.Image, what: str) -> np.ndarray:
        engine = self.engine
        return engine.pixels(decode(image, engine.config.in_chans, what))


def _what(place: int, uploads: Sequence[Upload]) -> str:
    """What a refusal calls a picture."""
    if uploads[place].name:
        return f"the picture {uploads[place].name!r}"
    return "the picture" if len(uploads) == 1 else f"picture {place + 1} of {len(uploads)}"
