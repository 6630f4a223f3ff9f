"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from .errors import HVTError

# Ours alone: other programs have hidden files that end in .part too.
_SUFFIX = ".hvt.part"
_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}" + re.escape(_SUFFIX))  # eight are mkstemp's


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Give a temporary path to write to; on success it replaces `path`, on failure it vanishes.

    The data is on the disk before the name changes, so a crash leaves the old file or the new one.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_SUFFIX)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp's files are private
        temporary.replace(path)
        temporary = None
        _sync_directory(path.parent)
    except OSError as error:
        if not path.parent.is_dir():
            reason = f"the folder {path.parent} does not exist"
            raise HVTError(f"cannot write {path}: {reason}") from error
        raise HVTError(f"cannot write {path}: {error.strerror or error}") from error
    except SafetensorError as error:  # how safetensors reports a failed write
        raise HVTError(f"cannot write {path}: {error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def leftovers(folder: Path) -> dict[Path, str]:
    """What `whole_file` left in a folder when it was killed → the name each file was to get."""
    names = {path: _TEMPORARY.fullmatch(path.name) for path in folder.glob(f".*{_SUFFIX}")}
    return {path: match[1] for path, match in names.items() if match and path.is_file()}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_directory(directory: Path) -> None:
    if os.name == "nt":  # directories cannot be opened there
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
