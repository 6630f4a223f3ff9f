"""How images reach the device: global batches, cut into shards, augmented by key.

Nothing here has a state. The order of an epoch follows from (seed, epoch), and what happens to an
image from its key, which follows from (seed, epoch, position). So a run can stop and resume at any
step, with any number of reading processes, and several processes see what one would have seen.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader

from ..errors import HVTError
from .arrays import ArrayImages
from .augment import Item, SeededDataset, keys_for
from .images import UnreadableImageError

READ_TIMEOUT = 600.0  # seconds for a batch, after which a reading process counts as stuck
_PREFETCH = 2  # batches that each reading process is ahead, as is usual in torch
_SHARED_MEMORY = "/dev/shm"  # where reading processes put batches; 64 MB in a container


@dataclass(frozen=True)
class Batch:
    """A microbatch: what a process computes of a global batch at a time."""

    images: Tensor  # float (b, C, H, W)
    labels: Tensor  # int64 (b,)
    broken: int = 0  # unreadable images that were skipped
    shard: int = 0
    """Which of the global batch's shards this is."""
    rows: Tensor | None = None
    """Which rows of the global batch these are, int64 (b,); None where they are all of them."""

    def pin_memory(self) -> Batch:
        """What `DataLoader` calls, so that copies to a GPU need not wait."""
        return replace(self, images=self.images.pin_memory(), labels=self.labels.pin_memory())


def rows_of_shard(batch_size: int, shards: int, shard: int) -> np.ndarray:
    """Which rows of a global batch make one of its shards.

    Mixup pairs row i with row B-1-i. A shard is made of whole such pairs, in mirrored order, so
    that pairing within the shard is pairing within the batch, however many shards there are.
    """
    pairs = np.arange(shard, batch_size // 2, shards)
    return np.concatenate((pairs, (batch_size - 1 - pairs)[::-1]))


@dataclass
class TrainBatches:
    """The training images as global batches, of which this process gets its shards.

    `shard_of` is (first shard, number of shards this process takes, shards in all): the processes
    times the microbatches of each.
    """

    dataset: Any
    augment: Any
    _: KW_ONLY
    batch_size: int
    repeats: int = 1
    seed: int = 0
    shard_of: tuple[int, int, int] = (0, 1, 1)
    workers: int = 0
    skip_broken: bool = False
    prefetch: bool = False
    pin_memory: bool = False

    def __post_init__(self) -> None:
        images, size, unit = len(self.dataset), self.batch_size, 2 * self.shard_of[2]
        if not size or size % unit:
            raise HVTError(
                f"batch_size={size} must be a multiple of {unit} (2 × processes × accumulate)"
            )
        if images < size:
            raise HVTError(
                f"batch_size={size} is more than the {images} training images: use a smaller "
                "batch, or fewer processes and less accumulation"
            )

    @property
    def steps(self) -> int:
        """Global batches in an epoch; images that do not fill the last one wait for another."""
        return len(self.dataset) // self.batch_size

    def order(self, epoch: int) -> np.ndarray:
        """The images of an epoch. With repeats, each comes so many times in a row and the epoch
        keeps its length, so another part of the data is seen each time."""
        shuffled = np.random.default_rng((self.seed, epoch)).permutation(len(self.dataset))
        return np.repeat(shuffled, self.repeats)[: len(shuffled)]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's shards of the global batches from step `start` on, in order."""
        first, count, shards = self.shard_of
        own = {s: rows_of_shard(self.batch_size, shards, s) for s in range(first, first + count)}
        order, plan = self.order(epoch), []
        for step in range(start, self.steps):
            for rows in own.values():
                places = rows + step * self.batch_size
                plan.append((order[places], keys_for(self.seed, epoch, places)))
        turns = itertools.cycle((s, torch.from_numpy(rows)) for s, rows in own.items())
        for batch, (shard, which) in zip(self._read(plan), turns, strict=False):
            yield replace(batch, shard=shard, rows=which if shards > 1 else None)

    def _read(self, plan: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[Batch]:
        if isinstance(self.dataset, ArrayImages):
            batches = (_from_arrays(self.dataset, self.augment, *each) for each in plan)
            return _ahead(batches) if self.prefetch else batches
        seeded = SeededDataset(
            self.dataset, self.augment, skip_broken=self.skip_broken, substitute=True
        )
        return _load(seeded, plan, self.workers, self.pin_memory)


@dataclass
class EvalBatches:
    """Each image exactly once over all processes, in order, without augmentation."""

    dataset: Any
    transform: Any
    _: KW_ONLY
    batch_size: int
    rank: int = 0
    world_size: int = 1
    workers: int = 0
    skip_broken: bool = False

    def __iter__(self) -> Iterator[Batch]:
        indices = np.arange(self.rank, len(self.dataset), self.world_size)
        starts = range(0, len(indices), self.batch_size)
        batches = [indices[i : i + self.batch_size] for i in starts]
        if isinstance(self.dataset, ArrayImages):
            return (_from_arrays(self.dataset, self.transform, each) for each in batches)
        seeded = SeededDataset(self.dataset, self.transform, skip_broken=self.skip_broken)
        return _load(seeded, [(each, None) for each in batches], self.workers)


def _from_arrays(dataset: ArrayImages, transform: Any, indices: np.ndarray, *keys: Any) -> Batch:
    chosen = torch.from_numpy(indices)
    return Batch(transform(dataset.images[chosen], *keys), dataset.labels[chosen])


Plan = Sequence[tuple[np.ndarray, np.ndarray | None]]
"""Image indices of each batch and, in training, their keys."""


def _items(planned: tuple[np.ndarray, np.ndarray | None]) -> list[tuple[int, int | None]]:
    indices, keys = planned
    listed = [None] * len(indices) if keys is None else keys.tolist()
    return list(zip(indices.tolist(), listed, strict=True))


def _load(images: Any, plan: Plan, workers: int, pin_memory: bool = False) -> Iterator[Batch]:
    if workers and plan:
        workers = _workers_with_room(images, workers, _items(plan[0]))
    items: Any = map(_items, plan)  # batch by batch: a million tuples at once would be heavy
    loader: DataLoader[Any] = DataLoader(
        images,
        batch_sampler=items,
        num_workers=workers,
        collate_fn=_collate,
        worker_init_fn=_start_worker,
        timeout=READ_TIMEOUT if workers else 0,
        prefetch_factor=_PREFETCH if workers else None,
        pin_memory=pin_memory,
    )
    batches: Any = iter(loader)
    # Also at exit, where Python asks daemonic processes to end by SIGTERM and waits: ours are deaf.
    end = weakref.finalize(batches, _end, weakref.ref(batches)) if workers else None
    try:
        for batch in batches:
            if isinstance(batch, UnreadableImageError):
                raise batch
            yield batch
    except (RuntimeError, EOFError, ConnectionError) as error:  # the latter while it sent a batch
        if (ours := worker_error(error)) is None:
            raise
        raise ours from error
    finally:
        if end is not None:
            end()


def worker_error(error: Exception) -> HVTError | None:
    """An `HVTError` for torch's error about a reading process that died or is stuck, or None.

    torch also raises it from a signal handler, wherever the program is at the time.
    """
    reason = " ".join(str(error).split()).rstrip(".") or "it sent half a batch"
    if isinstance(error, RuntimeError) and not reason.startswith("DataLoader "):
        return None
    return HVTError(
        f"a reading process died, or took more than {READ_TIMEOUT:.0f} s for a batch: use "
        f"fewer workers, or --workers 0 ({reason})"
    )


def _workers_with_room(images: Any, workers: int, first: list[Any]) -> int:
    """As many reading processes as shared memory has room for: more would die or hang."""
    item = images[first[0]]
    if isinstance(item, UnreadableImageError) or item[0] is None:
        return workers
    try:
        free = shutil.disk_usage(_SHARED_MEMORY).free
    except OSError:  # other systems have none
        return workers
    free //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's; each process has readers
    batch = len(first) * item[0].nbytes
    room = max(0, (free // batch - 1) // _PREFETCH)  # one batch is in use
    if room < workers:
        warnings.warn(
            f"{_SHARED_MEMORY} has {free / 1e6:.0f} MB free, too little for {workers} reading "
            f"processes with batches of {batch / 1e6:.0f} MB: using {room} (in a container, "
            "--shm-size gives it more)",
            stacklevel=2,
        )
    return min(room, workers)


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


def _end(reference: weakref.ref[Any]) -> None:
    """End the reading processes, also one that is stuck."""
    if (batches := reference()) is None:
        return
    if batches._worker_pids_set:  # torch would report an end in the midst of this as a failure
        _remove_worker_pids(id(batches))
        batches._worker_pids_set = False
    processes = list(batches._workers)
    batches._shutdown_workers()  # asks, and waits a little
    for process in processes:
        process.kill()


def _ahead(batches: Iterator[Batch], depth: int = 3) -> Iterator[Batch]:
    """The same batches, made by a thread while the device works."""
    with ThreadPoolExecutor(1, thread_name_prefix="hvt-batches") as pool:
        ready = deque(pool.submit(next, batches, None) for _ in range(depth))
        while (batch := ready.popleft().result()) is not None:
            ready.append(pool.submit(next, batches, None))
            yield batch
