"""From an upload to class scores: decoded beside the event loop, then batched with others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from fastapi import HTTPException
from PIL import Image

from ..data.images import why
from .batcher import Batcher
from .body import Upload
from .decoding import (
    decode_heavy,
    decode_light,
    error_kind,
    finish_light,
    known_formats,
    open_light,
)
from .engine import Engine, Scores

TINY_FILE, TINY_IMAGE = 16_384, 16_384
"""Bytes and pixels up to which a thread would cost more than it saves."""
LONGEST = 8
"""Times its shorter side, of a tiny image: resizing makes a strip as much larger."""


class Inference:
    """Decodes images in threads and submits them to the batcher."""

    def __init__(self, engine: Engine, batcher: Batcher, threads: int) -> None:
        self.engine, self.batcher = engine, batcher
        self._light_pool = ThreadPoolExecutor(threads, thread_name_prefix="hvt-decode")
        # Threads that wait for a process, so that no light image waits behind a heavy one.
        self._heavy_pool = ThreadPoolExecutor(threads, thread_name_prefix="hvt-decode-heavy")

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
        try:
            pixels = await self._decode(upload.content)
        except Exception as error:  # damaged files raise all sorts
            raise decode_error(error, upload.label) from error
        return await self.batcher.submit(pixels, top)

    async def _decode(self, content: bytes) -> np.ndarray:
        engine, limits = self.engine, self.engine.limits
        if len(content) <= TINY_FILE:
            opened = open_light(content, limits)
            if opened is not None and _is_tiny(opened):
                image = finish_light(opened, limits)
                if image is not None:
                    return engine.pixels(image)
        loop = asyncio.get_running_loop()
        pixels = await loop.run_in_executor(self._light_pool, self._decode_light, content)
        if pixels is None:
            pixels = await loop.run_in_executor(self._heavy_pool, self._decode_heavy, content)
        return pixels

    def _decode_light(self, content: bytes) -> np.ndarray | None:
        image = decode_light(content, self.engine.limits)
        return None if image is None else self.engine.pixels(image)

    def _decode_heavy(self, content: bytes) -> np.ndarray:
        return self.engine.pixels(decode_heavy(content, self.engine.limits))

    def close(self) -> None:
        """End the threads; a decoder that is busy is left behind, and nobody waits for it."""
        self._light_pool.shutdown(wait=False, cancel_futures=True)
        self._heavy_pool.shutdown(wait=False, cancel_futures=True)
        self.batcher.close()


def decode_error(error: Exception, label: str) -> HTTPException:
    """What a client is told about an image that cannot be decoded."""
    kind = error_kind(error)
    if kind == "format":
        formats = ", ".join(known_formats())
        return HTTPException(415, f"{label} is not in a known format: use {formats}")
    if kind == "too large":
        return HTTPException(413, f"{label} is too large: {why(error)}")
    return HTTPException(422, f"{label} is damaged: {why(error)}")


def _is_tiny(image: Image.Image) -> bool:
    """Whether it is decoded so soon that the event loop can wait for it."""
    short, long = sorted(image.size)
    return short * long <= TINY_IMAGE and long <= LONGEST * short
