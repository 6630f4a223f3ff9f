"""How pictures reach the device: global batches, cut into shares, augmented by key.

Nothing here has a state. The order of an epoch follows from (seed, epoch), and what happens to a
picture from its key, which follows from (seed, epoch, position). So a run can stop and go on at any
step, with any number of reading processes, and several processes see what one would have seen.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import HVTError
from .augment import keys_for, normalise
from .pictures import BrokenPicture
from .sources import ArrayPictures


@dataclass(frozen=True)
class Batch:
    """A process's piece of a global batch."""

    images: Tensor  # float (b, C, H, W)
    labels: Tensor  # int64 (b,)
    broken: int = 0
    """Unreadable pictures that were passed over."""


def rows_of_share(batch_size: int, shares: int, share: int) -> np.ndarray:
    """Which rows of a global batch make one of its shares.

    Mixup pairs row i with row B-1-i. A share is made of whole such pairs, in mirrored order, so
    that pairing within the share is pairing within the batch, however many shares there are.
    """
    pairs = np.arange(share, batch_size // 2, shares)
    return np.concatenate((pairs, (batch_size - 1 - pairs)[::-1]))


class TrainBatches:
    """The training pictures as global batches, of which this process gets its shares.

    `share_of` is (first share, number of shares this process takes, shares in all): the processes
    times the pieces each cuts its part into.
    """

    def __init__(
        self,
        dataset: Any,
        augment: Any,
        *,
        batch_size: int,
        repeats: int = 1,
        seed: int = 0,
        share_of: tuple[int, int, int] = (0, 1, 1),
        workers: int = 0,
        skip_broken: bool = False,
        prefetch: bool = False,
        pin_memory: bool = False,
    ) -> None:
        self.dataset, self.augment, self.repeats, self.seed = dataset, augment, repeats, seed
        self.batch_size, self.share_of = batch_size, share_of
        self.workers, self.skip_broken = workers, skip_broken
        self.prefetch, self.pin_memory = prefetch, pin_memory
        unit = 2 * share_of[2]
        if batch_size % unit:
            raise HVTError(
                f"batch_size={batch_size} must be a multiple of {unit} (2 × processes × accumulate)"
            )
        if len(dataset) < batch_size:
            raise HVTError(
                f"batch_size={batch_size} is more than the {len(dataset)} training pictures: "
                f"use at most {len(dataset) // unit * unit}"
            )

    @property
    def steps(self) -> int:
        """Global batches in an epoch; pictures that do not fill the last one wait for another."""
        return len(self.dataset) // self.batch_size

    def order(self, epoch: int) -> np.ndarray:
        """The pictures of an epoch. With repeats, each comes so many times in a row and the epoch
        keeps its length, so another part of the data is seen each time."""
        n = len(self.dataset)
        shuffled = np.random.default_rng((self.seed, epoch)).permutation(n)
        return np.repeat(shuffled, self.repeats)[:n]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's shares of the global batches from step `start` on, in order."""
        plan = self._plan(epoch, start)
        if isinstance(self.dataset, ArrayPictures):
            batches = (self._from_arrays(indices, keys) for indices, keys in plan)
            return _ahead(batches) if self.prefetch else batches
        return self._from_files(plan)

    def _plan(self, epoch: int, start: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Picture indices and keys of each share."""
        order, plan = self.order(epoch), []
        first, count, shares = self.share_of
        for step in range(start, self.steps):
            for share in range(first, first + count):
                rows = rows_of_share(self.batch_size, shares, share) + step * self.batch_size
                plan.append((order[rows], keys_for(self.seed, epoch, rows)))
        return plan

    def _from_arrays(self, indices: np.ndarray, keys: np.ndarray) -> Batch:
        chosen = torch.from_numpy(indices)
        images = self.augment(self.dataset.images[chosen], keys)
        return Batch(images, self.dataset.labels[chosen])

    def _from_files(self, plan: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[Batch]:
        loader = DataLoader(
            _Keyed(self.dataset, self.augment, self.skip_broken),
            batch_sampler=[list(zip(i.tolist(), k.tolist(), strict=True)) for i, k in plan],
            num_workers=self.workers,
            collate_fn=_collate,
            pin_memory=self.pin_memory,
            worker_init_fn=_one_thread,
        )
        return iter(loader)


class EvalBatches:
    """Each picture exactly once over all processes, in order, without augmentation."""

    def __init__(
        self,
        dataset: Any,
        transform: Any,
        *,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        workers: int = 0,
        skip_broken: bool = False,
    ) -> None:
        self.dataset, self.transform, self.batch_size = dataset, transform, batch_size
        self.indices = np.arange(rank, len(dataset), size)
        self.workers, self.skip_broken = workers, skip_broken

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        starts = range(0, len(self.indices), self.batch_size)
        pieces = [self.indices[i : i + self.batch_size] for i in starts]
        if isinstance(self.dataset, ArrayPictures):
            for piece in pieces:
                chosen = torch.from_numpy(piece)
                images = self.transform(self.dataset.images[chosen])
                yield Batch(images, self.dataset.labels[chosen])
            return
        yield from DataLoader(
            _Keyed(self.dataset, self.transform, self.skip_broken, substitute=False),
            batch_sampler=[[(int(i), 0) for i in piece] for piece in pieces],
            num_workers=self.workers,
            collate_fn=_collate,
            worker_init_fn=_one_thread,
        )


class ArrayTransform:
    """Evaluation of pictures in memory: resize where need be, and normalise."""

    def __init__(self, size: int, mean: Sequence[float], std: Sequence[float]) -> None:
        self.size, self.mean, self.std = size, tuple(mean), tuple(std)

    def __call__(self, images: Tensor) -> Tensor:  # uint8 (B, H, W, C) → float (B, C, S, S)
        return normalise(images, self.mean, self.std, self.size)


class _Keyed(Dataset[Any]):
    """A picture by (index, key): all randomness of its transform follows from the key."""

    def __init__(
        self, dataset: Any, transform: Any, skip_broken: bool, substitute: bool = True
    ) -> None:
        self.dataset, self.transform = dataset, transform
        self.skip_broken, self.substitute = skip_broken, substitute

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor | None, int, int]:
        index, key = item
        broken = 0
        while True:
            try:
                picture, label = self.dataset[index]
                break
            except BrokenPicture:
                broken += 1
                if not self.skip_broken or broken > 100:
                    raise
                if not self.substitute:
                    return None, 0, 1
                index = (index + 1) % len(self.dataset)
        random.seed(key)
        np.random.seed(key % 2**32)
        torch.manual_seed(key % 2**63)
        return self.transform(picture), label, broken


def _collate(items: list[tuple[Tensor | None, int, int]]) -> Batch:
    good = [(image, label) for image, label, _ in items if image is not None]
    images = torch.stack([image for image, _ in good]) if good else torch.empty(0)
    labels = torch.tensor([label for _, label in good], dtype=torch.int64)
    return Batch(images, labels, sum(broken for *_, broken in items))


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)


def _ahead(batches: Iterator[Batch], depth: int = 3) -> Iterator[Batch]:
    """The same batches, made by a thread while the device works."""
    ready: queue.Queue[Any] = queue.Queue(depth)
    done, stop = object(), threading.Event()

    def put(item: Any) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def fill() -> None:
        try:
            for batch in batches:
                if not put(batch):
                    return
            put(done)
        except BaseException as error:
            put(error)

    threading.Thread(target=fill, daemon=True).start()
    try:
        while (item := ready.get()) is not done:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
