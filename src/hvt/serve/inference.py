"""From an upload to class scores: decoded beside the event loop, then batched with others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from fastapi import HTTPException

from .batcher import Batcher
from .body import Upload
from .decoding import DecodeError, decode_heavy, decode_light
from .engine import Engine, Scores

TINY_FILE, TINY_IMAGE = 16_384, 65_536
"""Bytes and pixels up to which a thread would cost more than it saves."""


class Decoded(NamedTuple):
    """What the model sees of an image, and the width and height that all of it has."""

    pixels: np.ndarray
    size: tuple[int, int]


class Inference:
    """Decodes images in threads and submits them to the batcher."""

    def __init__(self, engine: Engine, batcher: Batcher, decoders: int) -> None:
        self.engine, self.batcher = engine, batcher
        # Light images wait neither behind heavy ones nor behind what the page draws.
        self._pools = {
            name: ThreadPoolExecutor(threads, thread_name_prefix=f"hvt-{name}")
            for name, threads in (("light", decoders), ("heavy", decoders), ("explain", 1))
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

    async def decode(self, upload: Upload) -> Decoded:
        """An image, decoded in a thread unless it is tiny; raises an `HTTPException` for errors."""
        content = upload.content
        try:
            decoded = None
            if len(content) <= TINY_FILE:
                decoded = self._decode(decode_light, content, TINY_IMAGE)
            if decoded is None:
                decoded = await self.run("light", self._decode, decode_light, content)
            if decoded is None:
                decoded = await self.run("heavy", self._decode, decode_heavy, content)
            return decoded
        except Exception as error:
            failed = DecodeError.of(error)
            raise HTTPException(failed.status, f"{upload.label} {failed.reason}") from error

    def run(self, pool: str, function: Callable[..., Any], *arguments: object) -> Awaitable[Any]:
        """What a function returns in a thread for `light`, `heavy` or `explain`."""
        return asyncio.get_running_loop().run_in_executor(self._pools[pool], function, *arguments)

    def close(self) -> None:
        """End the threads; a decoder that is busy is left behind, and nobody waits for it."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        self.batcher.close()

    async def _predict(self, upload: Upload, top: int) -> Scores:
        return await self.batcher.submit((await self.decode(upload)).pixels, top)

    def _decode(self, decode: Callable[..., Any], content: bytes, *limit: int) -> Decoded | None:
        image = decode(content, self.engine.limits, *limit)
        return None if image is None else Decoded(self.engine.pixels(image), image.size)
