"""How images reach the device: global batches, cut into shares, augmented by key.

Nothing here has a state. The order of an epoch follows from (seed, epoch), and what happens to a
image from its key, which follows from (seed, epoch, position). So a run can stop and go on at any
step, with any number of reading processes, and several processes see what one would have seen.
Streams, which have no order to choose from, promise less: see `TrainBatches`.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import queue
import signal
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..errors import HVTError
from .augment import keys_for
from .images import UnreadableImageError
from .keyed import Item, KeyedStream, SeededDataset, stream_length
from .sources import ArrayImages


@dataclass(frozen=True)
class Batch:
    """A process's piece of a global batch."""

    images: Tensor  # float (b, C, H, W)
    labels: Tensor  # int64 (b,)
    broken: int = 0
    """Unreadable images that were passed over."""

    def pin_memory(self) -> Batch:
        """What `DataLoader` calls, so that copies to a GPU need not wait."""
        return replace(self, images=self.images.pin_memory(), labels=self.labels.pin_memory())


def rows_of_share(batch_size: int, shares: int, share: int) -> np.ndarray:
    """Which rows of a global batch make one of its shares.

    Mixup pairs row i with row B-1-i. A share is made of whole such pairs, in mirrored order, so
    that pairing within the share is pairing within the batch, however many shares there are.
    """
    pairs = np.arange(share, batch_size // 2, shares)
    return np.concatenate((pairs, (batch_size - 1 - pairs)[::-1]))


class TrainBatches:
    """The training images as global batches, of which this process gets its shares.

    `share_of` is (first share, number of shares this process takes, shares in all): the processes
    times the pieces each cuts its part into.

    A stream (`wds/…`, `hfids/…`) is shuffled by its own reader and divided among the processes by
    files, so other processes or workers see it in another order, and `start` reads and drops what
    comes before. `repeats` then take each image so many times in a row and end an epoch early.
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
        self.stream = isinstance(dataset, IterableDataset)
        self.num_images = stream_length(dataset) if self.stream else len(dataset)
        unit = 2 * share_of[2]
        if batch_size % unit:
            raise HVTError(
                f"batch_size={batch_size} must be a multiple of {unit} (2 × processes × accumulate)"
            )
        if self.num_images < unit:
            raise HVTError(
                f"{self.num_images} training images are too few for {share_of[2]} shares of two or "
                "more: use more images, fewer processes or less accumulation"
            )
        if self.num_images < batch_size:
            raise HVTError(
                f"batch_size={batch_size} is more than the {self.num_images} training images: "
                f"use at most {self.num_images // unit * unit}"
            )

    @property
    def steps(self) -> int:
        """Global batches in an epoch; images that do not fill the last one wait for another."""
        return self.num_images // self.batch_size

    def share(self, piece: int) -> int:
        """Which share of the global batch a piece of this process is."""
        return self.share_of[0] + piece

    def rows(self, piece: int) -> Tensor | None:
        """Which rows of the global batch a piece is; None where it is the whole."""
        shares = self.share_of[2]
        if shares == 1:
            return None
        rows = rows_of_share(self.batch_size, shares, self.share(piece))
        return torch.from_numpy(np.ascontiguousarray(rows))

    def order(self, epoch: int) -> np.ndarray:
        """The images of an epoch. With repeats, each comes so many times in a row and the epoch
        keeps its length, so another part of the data is seen each time."""
        shuffled = np.random.default_rng((self.seed, epoch)).permutation(self.num_images)
        return np.repeat(shuffled, self.repeats)[: self.num_images]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's shares of the global batches from step `start` on, in order."""
        if self.stream:
            return self._from_stream(epoch, start)
        return self.batches(epoch, range(start, self.steps))

    def batches(self, epoch: int, steps: Sequence[int]) -> Iterator[Batch]:
        """This process's shares of chosen global batches of an epoch; not of a stream."""
        plan = self._plan(epoch, steps)
        if isinstance(self.dataset, ArrayImages):
            batches = (self._from_arrays(indices, keys) for indices, keys in plan)
            return _ahead(batches) if self.prefetch else batches
        return self._from_files(plan)

    def _plan(self, epoch: int, steps: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Image indices and keys of each share."""
        order, plan = self.order(epoch), []
        first, count, shares = self.share_of
        for step in steps:
            for share in range(first, first + count):
                rows = rows_of_share(self.batch_size, shares, share) + step * self.batch_size
                plan.append((order[rows], keys_for(self.seed, epoch, rows)))
        return plan

    def _from_arrays(self, indices: np.ndarray, keys: np.ndarray) -> Batch:
        chosen = torch.from_numpy(indices)
        images = self.augment(self.dataset.images[chosen], keys)
        return Batch(images, self.dataset.labels[chosen])

    def _from_files(self, plan: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[Batch]:
        keyed = SeededDataset(
            self.dataset, self.augment, skip_broken=self.skip_broken, substitute=True
        )
        return _load(keyed, self.workers, batch_sampler=_Sampler(plan), pin_memory=self.pin_memory)

    def _from_stream(self, epoch: int, start: int) -> Iterator[Batch]:
        _, count, shares = self.share_of
        size = self.batch_size // shares
        pieces = _rechunk(self._passes(epoch, size), size)
        return itertools.islice(pieces, start * count, self.steps * count)

    def _passes(self, epoch: int, size: int) -> Iterator[Batch]:
        """A stream over and over: files of unequal length may end before the epoch does."""
        first, count, shares = self.share_of
        rank, processes = first // count, shares // count
        seed_of_workers = int(keys_for(self.seed, epoch, np.array([rank]))[0] >> np.uint64(1))
        while True:
            stream = KeyedStream(
                self.dataset,
                self.augment,
                rank=rank,
                world_size=processes,
                seed=self.seed,
                epoch=epoch,
                repeats=self.repeats,
            )
            workers = stream.workers(self.workers)
            draw = torch.Generator().manual_seed(seed_of_workers)
            images = 0
            for batch in _load(
                stream, workers, batch_size=size, generator=draw, pin_memory=self.pin_memory
            ):
                images += len(batch.labels)
                yield batch
            if not images:
                raise HVTError(
                    f"the stream has no image for process {rank} of {processes}: "
                    "use no more processes than it has files"
                )


class EvalBatches:
    """Each image exactly once over all processes, in order, without augmentation.

    Of a stream every process reads the whole and keeps its part.
    """

    def __init__(
        self,
        dataset: Any,
        transform: Any,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        skip_broken: bool = False,
    ) -> None:
        self.dataset, self.transform, self.batch_size = dataset, transform, batch_size
        self.rank, self.world_size = rank, world_size
        self.workers, self.skip_broken = workers, skip_broken

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self.dataset, IterableDataset):
            stream = KeyedStream(
                self.dataset,
                self.transform,
                rank=self.rank,
                world_size=self.world_size,
                skip_broken=self.skip_broken,
            )
            workers = stream.workers(self.workers)
            return _load(stream, workers, batch_size=self.batch_size)
        indices = np.arange(self.rank, len(self.dataset), self.world_size)
        starts = range(0, len(indices), self.batch_size)
        pieces = [indices[i : i + self.batch_size] for i in starts]
        if isinstance(self.dataset, ArrayImages):
            return map(self._from_arrays, pieces)
        keyed = SeededDataset(self.dataset, self.transform, skip_broken=self.skip_broken)
        plan = [(piece, None) for piece in pieces]
        return _load(keyed, self.workers, batch_sampler=_Sampler(plan))

    def _from_arrays(self, indices: np.ndarray) -> Batch:
        chosen = torch.from_numpy(indices)
        return Batch(self.transform(self.dataset.images[chosen]), self.dataset.labels[chosen])


class _Sampler:
    """A plan as `DataLoader` wants it, batch by batch: a million tuples at once would be heavy."""

    def __init__(self, plan: Sequence[tuple[np.ndarray, np.ndarray | None]]) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[list[tuple[int, int | None]]]:
        for indices, keys in self.plan:
            listed = [None] * len(indices) if keys is None else keys.tolist()
            yield list(zip(indices.tolist(), listed, strict=True))


def _load(images: Any, workers: int, **options: Any) -> Iterator[Batch]:
    loader: DataLoader[Any] = DataLoader(
        images,
        num_workers=workers,
        collate_fn=_collate,
        worker_init_fn=_start_worker,
        **options,
    )
    batches = iter(loader)
    if workers:
        _end_at_exit(batches)
    try:
        for batch in batches:
            if isinstance(batch, UnreadableImageError):
                raise batch
            yield batch
    finally:
        del batches  # the last hold on the reading processes, whatever becomes of the error


def _collate(items: list[Item]) -> Batch | UnreadableImageError:
    good: list[tuple[Tensor, int]] = []
    passed_over = 0
    for item in items:
        if isinstance(item, UnreadableImageError):
            return item
        image, label, broken = item
        passed_over += broken
        if image is not None:
            good.append((image, label))
    images = torch.stack([image for image, _ in good]) if good else torch.empty(0)
    labels = torch.tensor([label for _, label in good], dtype=torch.int64)
    return Batch(images, labels, passed_over)


def _start_worker(_: int) -> None:
    """Reading processes use one core each, and leave Ctrl-C and SIGTERM to the one that trains.

    Both reach the whole group of processes, and a run that is to save itself still needs batches.
    """
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


_reading: weakref.WeakSet[Any] = weakref.WeakSet()
"""The iterators of `DataLoader` whose processes may still run."""


def _end_at_exit(batches: Any) -> None:
    """Have the processes of an iterator ended at exit, should it still be there.

    Python asks daemonic processes to end with SIGTERM and waits for them, and ours do not listen.
    """
    _reading.add(batches)
    _register_exit_hook()


@functools.cache  # once, and not by importing
def _register_exit_hook() -> None:
    atexit.register(_end_readers)


def _end_readers() -> None:
    for batches in list(_reading):
        processes = list(batches._workers)
        batches._shutdown_workers()  # asks, waits a little, and stops torch watching over them
        for process in processes:
            process.kill()


def _rechunk(batches: Iterator[Batch], size: int) -> Iterator[Batch]:
    """The same images in pieces of equal size; a reading process's last one may be smaller."""
    rest: Batch | None = None
    for batch in batches:
        images, labels = batch.images, batch.labels
        if rest is not None:
            images, labels = torch.cat((rest.images, images)), torch.cat((rest.labels, labels))
        while len(labels) >= size:
            yield Batch(images[:size], labels[:size])
            images, labels = images[size:], labels[size:]
        rest = Batch(images, labels) if len(labels) else None


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
