"""Files: written whole or not at all, read only where they end, named so that all can read it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from .errors import HVTError

# Ours alone: other programs have hidden files that end in .part too.
_SUFFIX = ".hvt.part"
_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}" + re.escape(_SUFFIX))  # eight are mkstemp's


def expanded(path: str | Path) -> Path:
    """A path with `~` as the home; of an unknown user it stays, where pathlib raises."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Give a temporary path to write to; on success it replaces `path`, on failure it vanishes.

    The data is on the disk before the name changes, so a crash leaves the old file or the new one.
    A link stays one, to the new file; what is no file, such as a named pipe, is refused.
    """
    target = _target(path)
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name}.", suffix=_SUFFIX
        )
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp's files are private
        temporary.replace(target)
        temporary = None
        _sync_directory(target.parent)
    except OSError as error:
        raise HVTError(f"cannot write {path}: {error.strerror or error}") from error
    except SafetensorError as error:  # how safetensors reports a failed write
        raise HVTError(f"cannot write {path}: {error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def check_new(path: Path) -> None:
    """Refuse a file that is there or cannot be made, before hours are spent on what is for it."""
    if os.path.lexists(path):
        raise HVTError(f"{path} already exists: choose another name, or remove it")
    check_writable(path)


def check_folder(path: Path) -> None:
    """Refuse a file whose folder is not there."""
    if not os.path.isdir(path.parent):  # noqa: PTH112 - False for a name that cannot be
        raise HVTError(f"cannot write {path}: the folder {path.parent} does not exist")


def check_writable(path: str | Path) -> None:
    """Refuse, before any work, a file that `atomic_write` could not write."""
    target = _target(path)
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise HVTError(f"cannot write {path}: the folder {target.parent} is not writable")
    try:
        os.lstat(target.with_name(f".{target.name}.12345678{_SUFFIX}"))  # which is longer
    except FileNotFoundError:
        pass
    except OSError as error:
        raise HVTError(f"cannot write {path}: {error.strerror}") from error


def _target(path: str | Path) -> Path:
    """The file that is written: that of a link, and none that is there and not regular."""
    path = Path(path)
    try:
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        check_folder(target)
        with contextlib.suppress(FileNotFoundError):
            mode = target.stat().st_mode
            if not stat.S_ISREG(mode):
                raise HVTError(f"cannot write {path}: it is {_kind(mode)}")
    except OSError as error:
        raise HVTError(f"cannot write {path}: {error.strerror or error}") from error
    return target


def stale_temp_files(folder: Path) -> dict[Path, str]:
    """What `atomic_write` left in a folder when it was killed → the name each file was to get."""
    names = {path: _TEMPORARY.fullmatch(path.name) for path in folder.glob(f".*{_SUFFIX}")}
    return {path: match[1] for path, match in names.items() if match and path.is_file()}


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file to read; `OSError` for a named pipe or a device, which may hang or never end."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)  # without O_NONBLOCK, opening a pipe waits for its writer
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, f"it is {_kind(mode)}, not a file")


def _kind(mode: int) -> str:
    """What is not a regular file, in words."""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def encodable(name: str | Path) -> str:
    """A file's name as text that can be encoded: bytes that are not UTF-8 are shown as `\\xe9`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


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
