"""Targets on disk: per crop the student's front and the source's outputs, in float16.

A chunk of crops is an atomic .npy file that ends with a digest of its content; so a build can stop
and resume, and several processes can build at once. Crops, and with them their chunk, follow from
(seed, number): a damaged chunk is built again.
"""

from __future__ import annotations

import hashlib
import io
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
DIGEST_BYTES = 16


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
    """All rows of a cache, read from disk on access."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.chunks = [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
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
    """A folder of chunks of rows, built as they are missing."""

    folder: Path
    batches: TrainBatches
    model: HVT
    target: Target
    sizes: Sequence[Size]
    processes: DistributedContext
    device: torch.device
    identity: dict[str, Any]
    """What the rows depend on; a folder with another identity raises an error."""
    note: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self.intact: set[int] = set()  # chunks known to be whole
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
        """Create the folder, or check that it has the same source, placement, photos and crops."""
        described = self.folder / "cache.json"
        identity = json.loads(json.dumps(self.identity))
        if described.exists():
            try:
                same = json.loads(described.read_text()) == identity
            except (OSError, ValueError):
                same = False
            if not same:
                raise HVTError(
                    f"{self.folder} is the cache of another source, placement or folder of photos: "
                    "choose another --cache, or remove it"
                )
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HVTError(f"cannot write {self.folder}: {error.strerror}") from error
        with atomic_write(described) as temporary:
            temporary.write_text(json.dumps(identity, indent=2) + "\n")

    def missing(self, chunks: int) -> list[int]:
        """The chunks that are not there, or are damaged; each is read once, by the main process."""
        if self.processes.is_main_process:
            paths = self.paths(chunks)
            self.intact |= {
                n for n, path in enumerate(paths) if n not in self.intact and self._is_intact(path)
            }
        # A shared disk need not look alike to all.
        intact = self.processes.broadcast(self.intact)
        return [number for number in range(chunks) if number not in intact]

    def _is_intact(self, path: Path) -> bool:
        try:
            content = memoryview(path.read_bytes())
        except FileNotFoundError:
            return False
        intact = _digest(content[:-DIGEST_BYTES]) == content[-DIGEST_BYTES:]
        if not intact:
            self.note(f"{path} is damaged: building it again")
        return intact

    def check_room(self, chunks: int) -> None:
        """Raise an error before starting what the disk has no room for."""
        needed = len(self.missing(chunks)) * self.chunk_bytes
        free = shutil.disk_usage(self.folder).free
        if needed and needed + MARGIN > free:
            raise HVTError(
                f"the cache of {chunks * self.batches.batch_size} crops needs "
                f"{(needed + MARGIN) / 1e9:.2f} GB and the disk of {self.folder} has "
                f"{free / 1e9:.2f} GB free: make room, or use fewer --crops, another --cache, or "
                "--tail-epochs 0, which needs none"
            )

    @torch.inference_mode()
    def build(
        self, chunks: int, progress: Callable[[int, int], None] = lambda done, of: None
    ) -> None:
        """Build the chunks that are missing; with several processes, each builds its part."""
        missing = self.missing(chunks)
        mine = missing[self.processes.rank :: self.processes.world_size]
        done = chunks - len(missing)
        for epoch in sorted({number // self.batches.steps for number in mine}):
            numbers = [n for n in mine if n // self.batches.steps == epoch]
            steps = [number % self.batches.steps for number in numbers]
            images = self.batches.batches(epoch, steps)
            for number, batch in zip(numbers, images, strict=True):
                self._write(self.paths(chunks)[number], batch.images)
                done += self.processes.world_size
                progress(min(done, chunks), chunks)
        self.intact.update(missing)
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
            buffer = io.BytesIO()
            np.save(buffer, content.numpy(), allow_pickle=False)
            file.write(buffer.getbuffer())
            file.write(_digest(buffer.getbuffer()))

    def rows(self, chunks: int) -> CachedRows:
        return CachedRows(self.paths(chunks))


def _digest(content: memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
