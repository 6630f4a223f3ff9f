"""From an upload to class scores: decoded beside the event loop, then batched with others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from fastapi import HTTPException
from PIL import Image

from ..data.images import why
from .batcher import Batcher
from .body import Upload
from .decoding import decode_heavy, decode_light, error_status, known_formats
from .engine import Engine, Scores

TINY_FILE, TINY_IMAGE = 16_384, 65_536
"""Bytes and pixels up to which a thread would cost more than it saves."""


class Decoded(NamedTuple):
    """What the model sees of an image, and the width and height that all of it has."""

    pixels: np.ndarray
    size: tuple[int, int]


class Inference:
    """Decodes images in threads and submits them to the batcher."""

    def __init__(self, engine: Engine, batcher: Batcher, threads: int) -> None:
        self.engine, self.batcher = engine, batcher
        self._light_pool = ThreadPoolExecutor(threads, thread_name_prefix="hvt-decode")
        # Threads that wait for a process, so that no light image waits behind a heavy one.
        self._heavy_pool = ThreadPoolExecutor(threads, thread_name_prefix="hvt-decode-heavy")
        # One thread: what the page draws must not keep predictions waiting.
        self._explain_pool = ThreadPoolExecutor(1, thread_name_prefix="hvt-explain")

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

    def explain(self, function: Callable[..., Any], *arguments: object) -> Awaitable[Any]:
        """What a function returns, run in the thread of explanations."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._explain_pool, function, *arguments)

    def close(self) -> None:
        """End the threads; a decoder that is busy is left behind, and nobody waits for it."""
        for pool in (self._light_pool, self._heavy_pool, self._explain_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self.batcher.close()

    async def decode(self, upload: Upload) -> Decoded:
        """An image, decoded in a thread unless it is tiny; raises an `HTTPException` for errors."""
        try:
            return await self._decode(upload.content)
        except Exception as error:  # damaged files raise all sorts
            raise _decode_error(error, upload.label) from error

    async def _predict(self, upload: Upload, top: int) -> Scores:
        return await self.batcher.submit((await self.decode(upload)).pixels, top)

    async def _decode(self, content: bytes) -> Decoded:
        if len(content) <= TINY_FILE:
            image = decode_light(content, self.engine.limits, TINY_IMAGE)
            if image is not None:
                return self._prepared(image)
        loop = asyncio.get_running_loop()
        decoded = await loop.run_in_executor(self._light_pool, self._decode_light, content)
        if decoded is None:
            decoded = await loop.run_in_executor(self._heavy_pool, self._decode_heavy, content)
        return decoded

    def _decode_light(self, content: bytes) -> Decoded | None:
        image = decode_light(content, self.engine.limits)
        return None if image is None else self._prepared(image)

    def _decode_heavy(self, content: bytes) -> Decoded:
        return self._prepared(decode_heavy(content, self.engine.limits))

    def _prepared(self, image: Image.Image) -> Decoded:
        return Decoded(self.engine.pixels(image), image.size)


def _decode_error(error: Exception, label: str) -> HTTPException:
    """What a client is told about an image that cannot be decoded."""
    status = error_status(error)
    reasons = {
        413: f"is too large: {why(error)}",
        415: f"is not in a known format: use {', '.join(known_formats())}",
        422: f"is damaged: {why(error)}",
    }
    return HTTPException(status, f"{label} {reasons[status]}")
