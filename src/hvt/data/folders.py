"""Folders of class folders: which layouts are understood, and which images they hold."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import HVTError, did_you_mean
from ..files import encodable
from .images import FileImages, image_extensions

_TRAIN = ("train", "training")
_VAL = ("val", "validation", "valid", "test")


def find_layout(folder: Path) -> tuple[Path | None, Path | None]:
    """The training and the validation part: `train/` and `val/` (or validation, valid, test).

    A folder without them is the training part itself. `test` may be without labels and is then
    ignored.
    """
    parts = {name.lower(): folder / name for name in class_folders(folder)}
    if "test" in parts and not class_folders(parts["test"]):
        del parts["test"]
    train = next((parts[name] for name in _TRAIN if name in parts), None)
    val = next((parts[name] for name in _VAL if name in parts), None)
    if train is not None and (val is not None or class_folders(train)):
        return train, val
    if train is None and val is not None and set(parts) <= set(_VAL):
        return None, val
    return folder, None


def class_folders(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted, without hidden ones."""
    try:
        return sorted(p.name for p in folder.iterdir() if p.name[0] != "." and p.is_dir())
    except OSError as error:
        raise _unreadable(error) from error


def open_folder(
    folder: Path, in_chans: int, need_train: bool
) -> tuple[FileImages | None, FileImages | None, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The training and the validation part, class names, ignored files, and what is wrong.

    As torchvision's `ImageFolder`, but for hidden files, which are no data (macOS has a `._a.jpg`
    for each `a.jpg` on foreign disks). All that is wrong is collected: `hvt check` lists it.
    """
    train, val = find_layout(folder)
    names = class_folders(train or val or folder)
    ignored: list[str] = []
    problems: list[str] = []

    def read(part: Path) -> FileImages:
        paths: list[str] = []
        labels: list[int] = []
        for name in _classes_of(part, ignored):
            files = files_below(part / name)
            images = [file for file in files if _is_image(file)]
            ignored.extend(file for file in files if not _is_image(file))
            if not images:
                problems.append(f"{part / name} has no images: add some or remove the folder")
                continue
            if name not in names:
                problems.append(
                    f"{part / name} is a class that is not in the training data: rename or "
                    f"remove it; {did_you_mean(name, names)}"
                )
                names.append(name)
            paths += images
            labels += [names.index(name)] * len(images)
        return FileImages(paths, labels, in_chans)

    train_images = read(train) if train and (need_train or not val) else None
    val_images = read(val) if val else None
    return train_images, val_images, tuple(map(encodable, names)), tuple(ignored), tuple(problems)


def _classes_of(folder: Path, ignored: list[str]) -> list[str]:
    """The class folders of a part, which must have some; files beside them are ignored."""
    names = class_folders(folder)
    loose = sorted(str(p) for p in folder.iterdir() if p.name[0] != "." and not p.is_dir())
    ignored += loose
    if not names and any(map(_is_image, loose)):
        raise HVTError(
            f"{folder} has images but no class folders: put the images of each class into "
            f"a folder of its own, such as {folder / 'cat' / 'image.jpg'}"
        )
    if not names:
        raise HVTError(f"{folder} is empty: expected class folders such as {folder / 'cat'}")
    return names


def _is_image(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in image_extensions()  # noqa: PTH122 - 10× faster


def files_below(folder: Path) -> list[str]:
    """The files below a folder, sorted by path, without what is hidden; links are followed once."""

    def stop(error: OSError) -> None:
        raise _unreadable(error) from error

    files: list[str] = []
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=stop):
        real = os.path.realpath(place)
        if real in seen:  # links that lead back would keep it busy for ever
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name[0] != ".")
        files += [f"{place}{os.sep}{name}" for name in names if name[0] != "."]
    return sorted(files, key=lambda path: path.replace(os.sep, "\0"))  # folder by folder


def _unreadable(error: OSError) -> HVTError:
    return HVTError(
        f"cannot read the folder {error.filename}: {error.strerror}; "
        "give a readable folder of class folders"
    )
