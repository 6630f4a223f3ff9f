"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from .errors import HVTError

# Other programs have hidden files that end in .part too.
_SUFFIX = ".hvt.part"
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}" + re.escape(_SUFFIX))


def expanded(path: str | Path) -> Path:
    """A path with `~` as the home; of an unknown user it stays, where pathlib raises."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Give a temporary path to write to; on success it replaces `path`, on failure it vanishes.

    The data is on the disk before the name changes, so a crash leaves the old file or the new one.
    A link stays a link, to the new file.
    """
    target = _target(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{_SUFFIX}")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors' files are readable to their owner only
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.replace(target)
        _sync_directory(target.parent)
    except (OSError, SafetensorError) as error:  # the latter is how safetensors reports one
        reason = getattr(error, "strerror", None) or error
        raise HVTError(f"cannot write {path}: {reason}") from error
    finally:
        with contextlib.suppress(OSError):  # a name that cannot be
            if temporary.exists():
                temporary.unlink()


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Give a temporary folder to fill; on success `path`, new or empty, has its content."""
    path = Path(os.path.abspath(expanded(path)))  # noqa: PTH100 - `.` has a name then
    check_empty(path)
    try:
        home = path if path.is_dir() else path.parent  # on the same disk
        with tempfile.TemporaryDirectory(_SUFFIX, f".{path.name}.", home) as temporary:
            yield Path(temporary)
            path.mkdir(exist_ok=True)
            for child in Path(temporary).iterdir():
                child.replace(path / child.name)
    except OSError as error:
        raise HVTError(f"cannot write {path}: {error.strerror or error}") from error


def check_empty(path: Path) -> None:
    """Check, before any work, that a folder is empty or can be made."""
    if path.is_dir():
        if any(path.iterdir()):
            raise HVTError(f"{path} is not empty: name a new folder, or empty this one")
    elif path.exists():
        raise HVTError(f"{path} is a file: name a new folder")
    check_writable(path / "config.json" if path.is_dir() else path)


def check_new(path: Path) -> None:
    """Check, before hours of work, that a file does not exist and can be written."""
    if os.path.lexists(path):
        raise HVTError(f"{path} already exists: choose another name, or remove it")
    check_writable(path)


def check_writable(path: str | Path) -> None:
    """Check, before any work, that `atomic_write` could write a file."""
    folder = _target(path).parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise HVTError(f"cannot write {path}: the folder {folder} is not writable")


def _target(path: str | Path) -> Path:
    """The file that is written: that of a link."""
    path = Path(path)
    try:
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        if not os.path.isdir(target.parent):  # noqa: PTH112 - False for a name that cannot be
            raise HVTError(f"cannot write {target}: the folder {target.parent} does not exist")
        if target.exists() and not target.is_file():
            what = "a folder" if target.is_dir() else "not a regular file"
            raise HVTError(f"cannot write {path}: it is {what}")
    except OSError as error:
        raise HVTError(f"cannot write {path}: {error.strerror or error}") from error
    return target


def stale_temp_files(folder: Path) -> dict[Path, str]:
    """Temporary files that a killed `atomic_write` left in a folder → the names meant for them."""
    names = {path: _TEMPORARY.fullmatch(path.name) for path in folder.glob(f".*{_SUFFIX}")}
    return {path: match[1] for path, match in names.items() if match and path.is_file()}


def encodable(name: str | Path) -> str:
    """A file's name as text that can be encoded: bytes that are not UTF-8 are shown as `\\xe9`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _sync_directory(directory: Path) -> None:
    if os.name == "nt":  # directories cannot be opened there
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
