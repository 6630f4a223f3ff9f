"""Embeddings of the images of a folder, computed once and kept on disk by content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..data.evaluation import eval_transform
from ..data.images import FileImages, UnreadableImageError
from ..files import atomic_write, expanded
from ..model import HVT
from ..training.state import weights_digest

BATCH = 32
Progress = Callable[[Iterable[Any], int], Iterable[Any]]
"""Wraps what is worked through, given its length, as a progress bar does."""


def cache_folder() -> Path:
    """Where embeddings are kept: `HVT_CACHE`, or a folder in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(os.environ.get("HVT_CACHE") or f"{home}/hvt") / "embeddings"


@dataclass(frozen=True)
class Embedded:
    """Features of the readable images of a folder, in its order."""

    features: Tensor  # (N, D)
    digests: list[str]
    """Of the files' content."""
    kept: list[int]
    """The places of the readable images among all."""
    broken: list[str]
    """Why each of the others cannot be read."""


class EmbeddingCache:
    """Features by content digest, one file per model and preprocessing."""

    def __init__(self, model: HVT, folder: Path | None = None) -> None:
        cfg = model.pretrained_cfg
        shown = [cfg[name] for name in ("mean", "std", "interpolation", "crop_pct", "crop_mode")]
        key = f"{weights_digest(model)} {model.config.to_dict()} {shown}"
        name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        self.path = (folder or cache_folder()) / f"{name}.npz"
        self.rows: dict[str, np.ndarray] = {}
        try:
            with np.load(self.path, allow_pickle=False) as file:
                self.rows = dict(zip(file["digests"].tolist(), file["features"], strict=True))
        except (OSError, ValueError, KeyError):  # none yet, or damaged: computed anew
            pass

    def write(self) -> None:
        """Keep what is there; a folder that cannot be written is no reason to stop."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path) as temporary, temporary.open("wb") as file:
                digests, features = np.array(list(self.rows)), np.stack(list(self.rows.values()))
                np.savez(file, digests=digests, features=features)
        except OSError:
            pass


@torch.inference_mode()
def embed(
    model: HVT,
    images: FileImages,
    cache: EmbeddingCache,
    device: torch.device,
    progress: Progress = lambda items, total: items,
) -> Embedded:
    """The features of all images; those whose content the cache knows are not computed again."""
    transform = eval_transform(model)
    paths = images.paths
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        digests = list(threads.map(_digest, paths))
        missing = [i for i, digest in enumerate(digests) if digest not in cache.rows]
        broken: dict[int, str] = {}

        def read(index: int) -> Tensor | None:
            try:
                return _shown(transform, images[index][0], paths[index])
            except UnreadableImageError as error:
                broken[index] = str(error)
                return None

        for chunk, tensors in progress(_ahead(threads, read, missing), -(-len(missing) // BATCH)):
            readable = [(i, t) for i, t in zip(chunk, tensors, strict=True) if t is not None]
            if readable:
                batch = torch.stack([tensor for _, tensor in readable]).to(device)
                features = model.forward_head(model.forward_features(batch), pre_logits=True)
                for (index, _), row in zip(readable, features.float().cpu().numpy(), strict=True):
                    cache.rows[digests[index]] = row
    if missing:
        cache.write()
    kept = [index for index in range(len(paths)) if index not in broken]
    rows = [cache.rows[digests[index]] for index in kept]
    width = model.config.width
    features = torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, width)
    found = [reason for _, reason in sorted(broken.items())]
    return Embedded(features, [digests[i] for i in kept], kept, found)


def _ahead(
    threads: ThreadPoolExecutor, read: Callable[[int], Any], indices: list[int]
) -> Iterator[tuple[list[int], list[Any]]]:
    """Chunks of images, the next of which is decoded while one is in use."""
    chunks = [indices[i : i + BATCH] for i in range(0, len(indices), BATCH)]
    waiting = [threads.map(read, chunk) for chunk in chunks[:1]]
    for number, chunk in enumerate(chunks):
        if number + 1 < len(chunks):
            waiting.append(threads.map(read, chunks[number + 1]))
        yield chunk, list(waiting.pop(0))


def _shown(transform: Any, image: Image.Image, path: Path) -> Tensor:
    try:
        return transform(image)
    except UnreadableImageError as error:  # the transform does not know its name
        raise UnreadableImageError.of(str(path), error.reason) from error


def _digest(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError:  # said by name when it is decoded
        return str(path)
