"""Files before anything in them is believed: regular ones, and zips no larger than they look.

A file that is 1 kB long may not cost gigabytes or hours to read, so sizes are compared with the
file's own before memory is taken.
"""

from __future__ import annotations

import io
import stat
import struct
import zipfile
import zlib
from pathlib import Path

from ..errors import CheckpointError

# Bytes; some 80,000 tensors. Python's record of an entry is 15 times as large as the entry.
MAX_DIRECTORY = 8 * 2**20

BAD_ZIP = (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, struct.error)
"""What a damaged zip raises."""


def file_size(path: Path) -> int:
    """The bytes of a regular file; a FIFO or a device, which may never end, is not opened."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot read {path}: {reason}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "FIFO, socket or device"
        raise CheckpointError(f"cannot read {path}: it is a {kind}, not a regular file")
    return status.st_size


class UnsafeCheckpointError(ValueError):
    """A file that may be whole, but costs more than it is worth, or says what we do not read."""


class StoredZip:
    """A zip whose entries are stored, as torch writes them, and so no larger than the file.

    Names are those below the root folder, which is the writer's choice.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, file_size(path)
        with _Bounded(path) as file, zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        self._entries = {entry.filename.partition("/")[2]: entry for entry in entries}
        if len(self._entries) < len(entries):
            raise UnsafeCheckpointError("two of its entries have the same name")
        if any(e.compress_type != zipfile.ZIP_STORED or e.flag_bits & 1 for e in entries):
            raise UnsafeCheckpointError(
                "its entries are compressed or encrypted, and torch stores them: unzip it and zip "
                "it again with zip -0"
            )
        if any(e.file_size != e.compress_size for e in entries):
            raise UnsafeCheckpointError("the sizes of an entry disagree")
        if sum(e.file_size for e in entries) > self.size:  # or they overlap
            raise UnsafeCheckpointError("its entries are larger than the file")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def length(self, name: str) -> int:
        """The bytes of an entry."""
        return self._entries[name].file_size

    def read(self, name: str) -> bytearray:
        """An entry, with its checksum where there is one: torch can be told to write none."""
        entry = self._entries[name]
        with self.path.open("rb") as file:
            file.seek(entry.header_offset)
            mark, name_length, extra_length = struct.unpack("<4s22xHH", file.read(30))
            if mark != b"PK\x03\x04":
                raise ValueError("an entry is not where the directory says")
            file.seek(name_length + extra_length, io.SEEK_CUR)
            content = bytearray(entry.file_size)
            if file.readinto(content) != len(content):
                raise ValueError("an entry is cut short")
        if entry.CRC and zlib.crc32(content) != entry.CRC:
            raise ValueError(f"{name} has a wrong checksum")
        return content


class _Bounded(io.FileIO):
    """A file whose single reads are limited: `zipfile` reads the whole directory in one."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_DIRECTORY:
            raise UnsafeCheckpointError("its directory is larger than that of any model")
        return super().read(size) or b""
