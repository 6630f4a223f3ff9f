"""Results of many images in files: one file, or parts that processes share and a restart skips."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..data.images import image_extensions
from ..data.packed import tar_members
from ..errors import HVTError
from ..files import atomic_write, check_writable, expanded
from .inputs import ImageInput, find_images, source_of

Row = dict[str, Any]


class StoredImage:
    """An image in a file, or in a part of one, which is opened only when the image is read."""

    def __init__(self, name: str, file: str, offset: int = 0, size: int = -1) -> None:
        self.name, self._place = name, (file, offset, size)

    def seekable(self) -> bool:
        return False

    def read(self) -> bytes:
        path, offset, size = self._place
        with expanded(path).open("rb") as file:
            file.seek(offset)
            return file.read(size)


def many_images(inputs: Iterable[str], listed: str | None = None) -> Iterator[StoredImage]:
    """Images of files, folders, globs, tar files and a list of paths, one by one, in order.

    A file that is missing by the time it is read is an unreadable image, and the others are read.
    """
    paths: Iterable[str] = find_images(list(inputs)) if inputs else ()
    if listed is not None:
        paths = itertools.chain(paths, _lines(listed))
    for path in paths:
        if path.endswith(".tar"):
            yield from _tar_images(path)
        else:
            yield StoredImage(path, path)


def _lines(listed: str) -> Iterator[str]:
    try:
        with Path("/dev/stdin" if listed == "-" else listed).open(encoding="utf-8") as file:
            yield from filter(None, (line.rstrip("\r\n") for line in file))
    except (OSError, UnicodeDecodeError) as error:
        raise HVTError(f"the list {listed} cannot be read: {error}") from error


def _tar_images(path: str) -> Iterator[StoredImage]:
    try:
        for _, member in tar_members(path):
            if member.isfile() and Path(member.name).suffix.lower() in image_extensions():
                yield StoredImage(f"{path}/{member.name}", path, member.offset_data, member.size)
    except (OSError, tarfile.TarError) as error:
        raise HVTError(f"{path} cannot be read as an uncompressed tar file: {error}") from error


def process_rank() -> tuple[int, int]:
    """This process's rank and the number of processes, by torchrun's or Slurm's variables."""
    for rank, count in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and count in os.environ:
            return int(os.environ[rank]), int(os.environ[count])
    return 0, 1


def write_results(
    output: Path,
    images: Iterable[ImageInput],
    rows_of: Callable[[list[ImageInput]], Iterable[Row]],
    key: str,
    *,
    formats: tuple[str, ...],
    part_format: str,
    part_size: int,
) -> int:
    """Write the rows of all images; the number of this process's images.

    A path with the ending of a format is one file. Any other is a folder of parts: `part_size`
    images each, divided among the processes; those that are there already are skipped. The name
    of a part has a digest of `key`, its format and the images' names, so that a part of another
    run is never taken for one of this.
    """
    suffix = output.suffix.lstrip(".").lower()
    rank, processes = process_rank()
    if suffix in formats:
        if processes > 1:
            raise HVTError(
                f"{output} is one file, but {processes} processes write a part each: name a folder"
            )
        check_writable(output)
        every = list(images)
        write_rows(output, rows_of(every))
        return len(every)
    if suffix or output.is_file():
        raise HVTError(f"{output} is neither a folder nor a file of {', '.join(formats)}")
    if part_format not in formats:
        raise HVTError(f"format={part_format!r} is not one of {', '.join(formats)}")
    output.mkdir(parents=True, exist_ok=True)
    each, total = iter(images), 0
    parts = iter(lambda: list(itertools.islice(each, part_size)), [])
    for number, part in enumerate(parts):
        if number % processes == rank:
            path = _part_path(output, number, part, key, part_format)
            if not path.exists():
                write_rows(path, rows_of(part))
            total += len(part)
    return total


def _part_path(
    output: Path, number: int, part: list[ImageInput], key: str, part_format: str
) -> Path:
    """Where a part belongs; raises an error where one of another run is."""
    names = "\n".join(str(source_of(image)) for image in part)
    text = f"{key}\n{part_format}\n{names}".encode(errors="surrogateescape")
    digest = hashlib.blake2b(text, digest_size=4).hexdigest()
    path = output / f"part-{number:05d}-{digest}.{part_format}"
    others = [other for other in output.glob(f"part-{number:05d}-*") if other != path]
    if others:
        raise HVTError(
            f"{others[0]} belongs to another run (images, model or options differ): name another "
            "folder"
        )
    return path


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows in the format of a path's ending; the file appears when it is whole."""
    with atomic_write(path) as temporary:
        _WRITERS[path.suffix.lstrip(".").lower()](temporary, rows)


def _features(rows: Iterable[Row]) -> tuple[list[str], np.ndarray]:
    """Names and `(N, D)` of the rows."""
    kept = list(rows)
    vectors = [row["embedding"] for row in kept]
    return [row["source"] for row in kept], np.stack(vectors) if vectors else np.zeros((0, 0))


def _npz(path: Path, rows: Iterable[Row]) -> None:
    names, features = _features(rows)
    with path.open("wb") as file:
        np.savez(file, names=np.array(names, dtype=np.str_), features=features)


def _npy(path: Path, rows: Iterable[Row]) -> None:
    with path.open("wb") as file:
        np.save(file, _features(rows)[1])


def _csv(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = None
        for row in rows:
            vector = row.pop("embedding", None)
            if vector is not None:
                row |= {f"f{place}": value for place, value in enumerate(vector.tolist())}
            if writer is None:
                writer = csv.DictWriter(file, row)
                writer.writeheader()
            writer.writerow(row)


def _jsonl(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _parquet(path: Path, rows: Iterable[Row]) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise HVTError("Parquet needs pyarrow: pip install pyarrow") from error
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


_WRITERS = {"npz": _npz, "npy": _npy, "csv": _csv, "jsonl": _jsonl, "parquet": _parquet}
