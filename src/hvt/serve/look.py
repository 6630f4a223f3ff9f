"""From a request's pictures to their answers: read in threads, then batched with others'."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .batcher import Batcher
from .body import Upload
from .engine import Engine, Row

TOGETHER = 65_536
"""Bytes of small pictures that one call of a thread reads; a larger picture has its own."""


class Looker:
    """Reads pictures beside the event loop and the model, and has them answered."""

    def __init__(self, engine: Engine, batcher: Batcher, threads: int) -> None:
        self.engine, self.batcher = engine, batcher
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hvt-read")

    async def look(self, uploads: Sequence[Upload], top: int) -> list[Row]:
        """The answers to a request's pictures, in order; one that is refused refuses them all."""
        named = [(upload.content, _what(place, uploads)) for place, upload in enumerate(uploads)]
        groups = _together(named)
        if len(groups) == 1:
            return await self._group(groups[0], top)
        tasks = [asyncio.ensure_future(self._group(group, top)) for group in groups]
        try:
            return [row for rows in await asyncio.gather(*tasks) for row in rows]
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """Give the threads back."""
        self._pool.shutdown(cancel_futures=True)
        self.batcher.close()

    async def _group(self, group: list[tuple[bytes, str]], top: int) -> list[Row]:
        loop = asyncio.get_running_loop()
        inputs = await loop.run_in_executor(self._pool, self._read, group)
        if len(inputs) == 1:
            return [await self.batcher.submit(inputs[0], top)]
        return await asyncio.gather(*[self.batcher.submit(image, top) for image in inputs])

    def _read(self, group: list[tuple[bytes, str]]) -> list[np.ndarray]:
        """In a thread of the pool."""
        engine = self.engine
        return [engine.array(engine.read(content, what)) for content, what in group]


def _what(place: int, uploads: Sequence[Upload]) -> str:
    """What a refusal calls a picture."""
    if uploads[place].name:
        return f"the picture {uploads[place].name!r}"
    return "the picture" if len(uploads) == 1 else f"picture {place + 1} of {len(uploads)}"


def _together(named: list[tuple[bytes, str]]) -> list[list[tuple[bytes, str]]]:
    """Pictures in groups of about `TOGETHER` bytes, in order."""
    groups: list[list[tuple[bytes, str]]] = []
    size = 0
    for picture in named:
        if not groups or size + len(picture[0]) > TOGETHER:
            groups.append([])
            size = 0
        groups[-1].append(picture)
        size += len(picture[0])
    return groups
