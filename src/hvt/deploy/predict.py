"""Pictures in, answers out."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from PIL import Image, ImageOps

from ..data.pictures import BrokenPicture, picture_extensions, read_picture, to_channels
from ..device import find_device
from ..errors import HVTError
from ..model import HVT
from ..train.pipeline import eval_transform
from .runtime import OnnxModel, open_model

Picture = str | Path | Image.Image


@dataclass(frozen=True)
class Answer:
    """What a model says of one picture; an unreadable one has an error and no classes."""

    source: str
    classes: tuple[str, ...] = ()
    """The likeliest classes, best first."""
    probabilities: tuple[float, ...] = ()
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        top = [
            {"class": c, "probability": p}
            for c, p in zip(self.classes, self.probabilities, strict=True)
        ]
        return {"source": self.source, "top": top} | ({"error": self.error} if self.error else {})


class Predictor:
    """A checkpoint that answers: `Predictor("model.safetensors")("cat.jpg")`.

    An exported file, `model.onnx`, does as well. Without either it is the built-in model, which
    knows CIFAR-100's classes. `threads` are those of ONNX Runtime; torch has its own setting.
    """

    def __init__(
        self,
        checkpoint: str | Path | HVT | OnnxModel | None = None,
        device: str | torch.device = "auto",
        top: int = 5,
        batch_size: int = 64,
        threads: int = 0,
    ) -> None:
        for name, value in (("top", top), ("batch_size", batch_size)):
            if value < 1:
                raise HVTError(f"{name}={value} must be at least 1")
        self.top, self.batch_size = top, batch_size
        self.model: HVT | OnnxModel
        if isinstance(checkpoint, HVT):
            self.model = checkpoint.to(find_device(device)).eval()
        elif isinstance(checkpoint, OnnxModel):
            self.model = checkpoint
        else:
            self.model = open_model(checkpoint or built_in(), device, threads)
        # Where pictures are put; ONNX Runtime takes them from the CPU wherever it runs.
        self.device = find_device(device if isinstance(self.model, HVT) else "cpu")
        if not self.model.num_classes:
            what = "the model" if isinstance(checkpoint, HVT | OnnxModel) else checkpoint
            raise HVTError(f"{what} has no classifier, so it cannot name what it sees")
        self.transform = eval_transform(self.model)
        names = self.model.class_names
        self.class_names = names or tuple(str(i) for i in range(self.model.num_classes))

    @overload
    def __call__(self, pictures: Picture) -> Answer: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, pictures: Sequence[Picture]) -> list[Answer]: ...
    def __call__(self, pictures: Picture | Sequence[Picture]) -> Answer | list[Answer]:
        """The answer for one picture, or a list for many; pictures are paths or PIL images."""
        if isinstance(pictures, str | Path | Image.Image):
            return next(self.stream([pictures]))
        return list(self.stream(pictures))

    def stream(self, pictures: Sequence[Picture]) -> Iterator[Answer]:
        """Answers as they come, in the order of the pictures; a broken one stops nothing."""
        for start in range(0, len(pictures), self.batch_size):
            yield from self._batch(pictures[start : start + self.batch_size])

    @torch.inference_mode()
    def _batch(self, pictures: Sequence[Picture]) -> list[Answer]:
        errors: list[str | None] = []
        tensors = []
        for picture in pictures:
            try:
                tensors.append(self.transform(self._open(picture)))
                errors.append(None)
            except BrokenPicture as error:
                errors.append(error.reason)
        rows: Iterator[tuple[list[float], list[int]]] = iter(())
        if tensors:
            dtype = self.model.pos_embed.dtype if isinstance(self.model, HVT) else None
            logits = self.model(torch.stack(tensors).to(self.device, dtype)).float()
            best = logits.softmax(dim=1).topk(min(self.top, logits.shape[1]), dim=1)
            rows = iter(zip(best.values.tolist(), best.indices.tolist(), strict=True))
        answers = []
        for picture, reason in zip(pictures, errors, strict=True):
            if reason is not None:
                answers.append(Answer(_name(picture), error=reason))
            else:
                values, places = next(rows)
                names = tuple(self.class_names[place] for place in places)
                answers.append(Answer(_name(picture), names, tuple(values)))
        return answers

    def _open(self, picture: Picture) -> Image.Image:
        channels = self.model.config.in_chans
        if not isinstance(picture, Image.Image):
            return read_picture(picture, channels)
        try:  # what was opened and not yet read may be broken too
            return to_channels(ImageOps.exif_transpose(picture), channels)
        except (OSError, SyntaxError, ValueError) as error:
            if isinstance(error, HVTError):
                raise
            raise BrokenPicture.of(_name(picture), " ".join(str(error).split())) from error


def _name(picture: Picture) -> str:
    if isinstance(picture, Image.Image):
        return str(getattr(picture, "filename", "")) or "picture"
    return str(picture)


def built_in() -> Path:
    """The checkpoint that comes with the package."""
    return Path(__file__).parents[1] / "assets" / "cifar100.safetensors"


def is_checkpoint(path: str) -> bool:
    """Whether a command's argument names weights rather than a picture, by its form."""
    found = Path(path)
    if found.suffix.lower() in (".safetensors", ".pth", ".pt", ".pt2", ".bin", ".onnx"):
        return True
    return any((found / name).is_file() for name in ("model.safetensors", "pytorch_model.bin"))


def find_pictures(patterns: Sequence[str]) -> list[str]:
    """The files behind paths, folders and glob patterns, in order; each must give some."""
    found: list[str] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            files = _below(path)
            if not files:
                raise HVTError(f"the folder {path} has no pictures in it")
        elif path.exists():
            files = [path]
        elif not glob.has_magic(pattern):
            raise HVTError(f"there is no file {pattern}")
        else:
            files = _matching(path)
            if not files:
                raise HVTError(f"no picture matches {pattern}")
        found += map(str, files)
    return found


def _below(folder: Path) -> list[Path]:
    """Every picture below a folder, without what is hidden."""
    paths = sorted(path for path in folder.rglob("*") if _is_picture(path))
    return [p for p in paths if not any(n.startswith(".") for n in p.relative_to(folder).parts)]


def _matching(pattern: Path) -> list[Path]:
    """What a glob pattern stands for; of folders it is the pictures below them."""
    # Path.glob takes no absolute patterns, and hidden files, which no shell does.
    matches = [Path(path) for path in glob.glob(str(pattern), recursive=True)]  # noqa: PTH207
    files = [path for path in matches if path.is_file()]
    if not pattern.suffix:  # it does not say itself which files it means
        files = [path for path in files if _is_picture(path)]
        files += [path for folder in matches if folder.is_dir() for path in _below(folder)]
    return sorted(set(files))


def _is_picture(path: Path) -> bool:
    known = path.suffix.lower() in picture_extensions()
    return known and not path.name.startswith(".") and path.is_file()
