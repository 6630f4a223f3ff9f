"""Embeddings of the images of a folder, computed once and kept on disk by content."""

from __future__ import annotations

import contextlib
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ..data.images import FileImages, UnreadableImageError
from ..deploy.embed import Embedder
from ..errors import HVTError
from ..files import atomic_write, expanded


def cache_folder() -> Path:
    """Where embeddings are kept: `HVT_CACHE`, or a folder in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(os.environ.get("HVT_CACHE") or f"{home}/hvt") / "embeddings"


@dataclass(frozen=True)
class Embedded:
    """The readable images of a part of the data, in its order."""

    paths: list[Path]
    labels: Tensor  # (N,)
    features: Tensor  # (N, D)
    digests: list[str]
    """Of the files' content."""
    broken: list[str]
    """Why each of the others cannot be read."""


class EmbeddingCache:
    """Features by content digest, one file per key: a model, its preprocessing and its dtype."""

    def __init__(self, key: str, folder: Path) -> None:
        name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        self.path = folder / f"{name}.npz"
        self.rows: dict[str, np.ndarray] = {}
        # Without a file, or with a damaged one, they are computed anew.
        damaged = contextlib.suppress(OSError, ValueError, KeyError)
        with damaged, np.load(self.path, allow_pickle=False) as file:
            self.rows = dict(zip(file["digests"].tolist(), file["features"], strict=True))

    def write(self) -> None:
        """Keep what is there; a folder that cannot be written is no reason to stop."""
        digests, features = np.array(list(self.rows)), np.array(list(self.rows.values()))
        with contextlib.suppress(HVTError, OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path) as temporary, temporary.open("wb") as file:
                np.savez(file, digests=digests, features=features)


def embed(
    embedder: Embedder, images: FileImages, cache: EmbeddingCache, console: Console
) -> Embedded:
    """The features of all images; those whose content the cache knows are not computed again."""
    paths, broken = images.paths, dict[int, str]()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        digests = list(threads.map(_digest, paths))
    missing = [i for i, digest in enumerate(digests) if digest not in cache.rows]
    found = track(
        embedder.stream([paths[i] for i in missing]), "embedding", len(missing), console=console,
        transient=True, disable=not missing or not console.is_terminal,
    )  # fmt: skip
    try:
        for index, one in zip(missing, found, strict=True):
            if one.vector is None:
                broken[index] = str(UnreadableImageError.of(paths[index], str(one.error)))
            else:
                cache.rows[digests[index]] = one.vector
    finally:  # Ctrl-C too
        if missing:
            cache.write()
    kept = [index for index in range(len(paths)) if index not in broken]
    rows = [cache.rows[digests[index]] for index in kept]
    if not rows:
        raise HVTError(f"none of {len(paths)} images can be read; the first: {broken[0]}")
    return Embedded(
        [paths[i] for i in kept],
        torch.tensor([images.labels[i] for i in kept], dtype=torch.int64),
        torch.from_numpy(np.stack(rows)),
        [digests[i] for i in kept],
        list(broken.values()),
    )


def _digest(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError:  # said by name when it is decoded
        return str(path)
