"""Answers on disk: per crop what the student's front gives and what the source says, in float16.

A chunk of crops is a file, written whole or not at all; so a build can stop and go on, and several
processes can build at once. Crops, and with them their chunk, follow from (seed, number).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..data.loader import TrainBatches
from ..distributed import DistributedContext
from ..errors import HVTError
from ..files import atomic_write
from ..model import HVT
from .photos import Normalise, Size, unpack
from .student import Answer, Target, front, split_of

CHUNK = 256  # crops in a file
MARGIN = 200e6  # bytes of the disk that stay free


class Layout:
    """Where in a row each tensor is: the front's tokens, logits, feature, tokens to follow."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        self.counts = [math.prod(shape) for shape in self.shapes]
        self.width = sum(self.counts)

    @classmethod
    def of(cls, x: Tensor, answer: Answer) -> Layout:
        parts = (x, answer.logits, answer.feature, *answer.tokens)
        return cls([part.shape[1:] for part in parts])

    def pack(self, x: Tensor, answer: Answer) -> Tensor:
        """→ float16 `(B, width)`."""
        parts = (x, answer.logits, answer.feature, *answer.tokens)
        return torch.cat([part.flatten(1) for part in parts], dim=1).half()

    def unpack(self, rows: Tensor) -> tuple[Tensor, Answer]:
        """The way back, in the type of the rows."""
        parts = [
            part.reshape(-1, *shape)
            for part, shape in zip(rows.split(self.counts, dim=1), self.shapes, strict=True)
        ]
        return parts[0], Answer(parts[1], parts[2], tuple(parts[3:]))


class CachedRows(Dataset[tuple[np.ndarray, int]]):
    """All rows of a cache, read from the disk as they are asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        try:
            self.chunks = [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
        except (OSError, ValueError) as error:
            raise HVTError(
                f"a file of the cache cannot be read ({error}): remove {paths[0].parent}, which is "
                "built again; several machines must share it"
            ) from error
        self.ends = np.cumsum([len(chunk) for chunk in self.chunks])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        place = int(np.searchsorted(self.ends, index, side="right"))
        chunk = self.chunks[place]
        return chunk[index - int(self.ends[place]) + len(chunk)], 0


def as_row(row: np.ndarray) -> Tensor:
    """A row of a cache as a tensor, for `TrainBatches`."""
    return torch.from_numpy(np.array(row))


@dataclass
class Cache:
    """A folder of chunks of `crops` rows each, made as they are missing."""

    folder: Path
    batches: TrainBatches
    model: HVT
    target: Target
    sizes: Sequence[Size]
    processes: DistributedContext
    device: torch.device
    identity: dict[str, Any]
    """What the rows depend on; a folder that says otherwise is refused."""
    named: bool = True
    """Not the run's own, which is made anew where an earlier version made it."""

    def __post_init__(self) -> None:
        self.normalise = Normalise(self.model, self.device)
        self.split = split_of(self.model.config)
        config = self.model.config
        with torch.inference_mode():
            blank = torch.zeros(1, config.in_chans, *config.image, device=self.device)
            theirs = torch.zeros(1, config.in_chans, *self.sizes[0], device=self.device)
            self.layout = Layout.of(front(self.model, blank, self.split), self.target(theirs))

    def paths(self, chunks: int) -> list[Path]:
        return [self.folder / f"chunk-{number:06d}.npy" for number in range(chunks)]

    @property
    def chunk_bytes(self) -> int:
        return 2 * self.layout.width * self.batches.batch_size

    def open(self) -> None:
        """Make the folder, or see that it is of the same source, placement, photos and crops."""
        described = self.folder / "cache.json"
        identity = json.loads(json.dumps(self.identity))
        if described.exists():
            try:
                same = json.loads(described.read_text()) == identity
            except (OSError, ValueError):
                same = False
            if same:
                return
            if self.named:
                raise HVTError(
                    f"{self.folder} is the cache of another source, placement or folder of photos: "
                    "choose another --cache, or remove it"
                )
            old = self.folder.with_name(f"{self.folder.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            try:
                self.folder.replace(old)  # at once: half of a cache would be taken for a whole
            except OSError as error:
                raise HVTError(f"cannot replace {self.folder}: {error.strerror}") from error
            shutil.rmtree(old, ignore_errors=True)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HVTError(f"cannot write {self.folder}: {error.strerror}") from error
        with atomic_write(described) as temporary:
            temporary.write_text(json.dumps(identity, indent=2) + "\n")

    def needs(self, chunks: int) -> int:
        """Bytes that are yet to be written."""
        missing = [path for path in self.paths(chunks) if not path.exists()]
        return len(missing) * self.chunk_bytes

    def check_room(self, chunks: int) -> None:
        """Refuse to begin what the disk has no room for."""
        needed, free = self.needs(chunks), shutil.disk_usage(self.folder).free
        if needed and needed + MARGIN > free:
            raise HVTError(
                f"the cache of {chunks * self.batches.batch_size} crops needs "
                f"{(needed + MARGIN) / 1e9:.2f} GB and the disk of {self.folder} has "
                f"{free / 1e9:.2f} GB free: make room, or use fewer --crops, another --cache, or "
                "--tail-epochs 0, which needs none"
            )

    @torch.inference_mode()
    def build(self, chunks: int, note: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Make the chunks that are missing; with several processes, each makes its part."""
        missing = [n for n, path in enumerate(self.paths(chunks)) if not path.exists()]
        missing = self.processes.broadcast(missing)  # a shared disk need not look alike to all
        mine = missing[self.processes.rank :: self.processes.world_size]
        done = chunks - len(missing)
        for epoch in sorted({number // self.batches.steps for number in mine}):
            numbers = [n for n in mine if n // self.batches.steps == epoch]
            steps = [number % self.batches.steps for number in numbers]
            images = self.batches.batches(epoch, steps)
            for number, batch in zip(numbers, images, strict=True):
                self._write(self.paths(chunks)[number], batch.images)
                done += self.processes.world_size
                note(min(done, chunks), chunks)
        self.processes.barrier()

    def _write(self, path: Path, flat: Tensor) -> None:
        rows = []
        for piece in flat.split(32):
            views = unpack(piece, self.model.config.in_chans, self.sizes)
            theirs = self.normalise(views[0])
            ours = theirs if len(views) == 1 else self.normalise(views[-1])
            x = front(self.model, ours, self.split)
            rows.append(self.layout.pack(x, self.target(theirs)).cpu())
        content = torch.cat(rows)
        if not content.isfinite().all():
            raise HVTError(
                "the source's tokens have numbers that float16 cannot hold, so they are not "
                "cached: use --tail-epochs 0"
            )
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            np.save(file, content.numpy(), allow_pickle=False)

    def rows(self, chunks: int) -> CachedRows:
        return CachedRows(self.paths(chunks))
