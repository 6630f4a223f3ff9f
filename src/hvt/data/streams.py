"""Streams of images, which have no order to choose from: WebDataset shards, read by timm."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ..errors import HVTError
from .augment import Item, keys_for, transform_by_key
from .images import UnreadableImageError, why


class SeededStream(IterableDataset[Item]):
    """One process's part of one pass over a stream, for training if it has an `epoch`.

    For training, timm's reader gives each process and reading process files of its own. For
    evaluation each rank reads everything and keeps one image in `world_size`, which is exact:
    timm's own division of an evaluation repeats and loses images. Which images of a stream cannot
    be read, and whether it passes over them, is its reader's business.
    """

    def __init__(
        self,
        dataset: Any,
        transform: Any,
        *,
        rank: int,
        world_size: int,
        seed: int = 0,
        epoch: int | None = None,
        repeats: int = 1,
        skip_broken: bool = False,
    ) -> None:
        self.transform, self.seed, self.epoch, self.repeats = transform, seed, epoch, repeats
        self.skip_broken = skip_broken
        self.rank, self.world_size = rank, world_size
        # A reader keeps an opened pipeline, and its random state with it: a copy begins anew.
        self.dataset = copy.copy(dataset)
        reader = self.reader = self.dataset.reader = copy.copy(dataset.reader)
        reader.ds = None
        reader.dist_rank, reader.dist_num_replicas = (0, 1) if epoch is None else (rank, world_size)
        reader.worker_seed = seed + (epoch or 0)  # replaced in reading processes
        if epoch is not None:
            self.dataset.set_epoch(epoch)

    def workers(self, wanted: int) -> int:
        """As many reading processes as have files to read: one too many would wait for ever."""
        files = len(self.reader.split_info.filenames) // self.reader.dist_num_replicas
        wanted = min(wanted, max(1, files))
        self.dataset.set_loader_cfg(num_workers=max(1, wanted))
        return wanted

    def __iter__(self) -> Iterator[Item]:
        first, step = (self.rank, self.world_size) if self.epoch is None else (0, 1)
        try:
            yield from self._items(itertools.islice(self.dataset, first, None, step))
        except HVTError as error:  # a label that has no name
            yield UnreadableImageError(str(error))
        except (OSError, SyntaxError) as error:  # what Pillow raises where the reader lets it
            yield UnreadableImageError.of("an image of the stream", why(error))

    def _items(self, images: Iterator[tuple[Any, Any]]) -> Iterator[Item]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        place, step = worker * self.world_size + self.rank, workers * self.world_size
        for image, label in images:
            for _ in range(self.repeats):
                key = None
                if self.epoch is not None:
                    key = int(keys_for(self.seed, self.epoch, np.array([place]))[0])
                try:
                    yield transform_by_key(self.transform, image, key), int(label), 0
                except UnreadableImageError as error:  # such as too long a strip
                    broken = UnreadableImageError.of("an image of the stream", error.reason)
                    yield (None, 0, 1) if self.skip_broken else broken
                place += step


def stream_length(dataset: Any) -> int:
    """The images of a stream over all processes, as its description tells."""
    return int(dataset.reader.num_samples)
