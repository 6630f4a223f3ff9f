"""Shards of images as WebDataset and timm read them."""

import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image


def write_shards(
    folder: Path, parts: dict[str, Sequence[int]], label: Callable[[int], int] = int
) -> Path:
    """For each part, shards of so many images; image i of a part is of shade i."""
    info = {}
    for part, lengths in parts.items():
        names = [f"{part}-{number}.tar" for number in range(len(lengths))]
        shades = iter(range(sum(lengths)))
        for name, length in zip(names, lengths, strict=True):
            with tarfile.open(folder / name, "w") as shard:
                for _, shade in zip(range(length), shades, strict=False):
                    file = io.BytesIO()
                    Image.new("RGB", (20, 16), (shade, 255, 0)).save(file, "PNG")
                    for ending, content in (
                        ("png", file.getvalue()),
                        ("cls", b"%d" % label(shade)),
                    ):
                        entry = tarfile.TarInfo(f"{shade:03}.{ending}")
                        entry.size = len(content)
                        shard.addfile(entry, io.BytesIO(content))
        info[part] = {
            "name": part, "num_samples": sum(lengths), "filenames": names, "shard_lengths": lengths,
        }  # fmt: skip
    (folder / "_info.json").write_text(json.dumps({"splits": info}))
    return folder
