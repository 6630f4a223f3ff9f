"""Pictures in, answers out."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from .data.pictures import BrokenPicture, read_picture
from .errors import HVTError
from .model import HVT
from .train.pipeline import eval_transform
from .weights import load

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

    Without a checkpoint it is the model that comes with the package, trained on CIFAR-100.
    """

    def __init__(
        self,
        checkpoint: str | Path | HVT | None = None,
        device: str | torch.device | None = None,
        top: int = 5,
        batch_size: int = 64,
    ) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device, self.top, self.batch_size = torch.device(device), top, batch_size
        if isinstance(checkpoint, HVT):
            self.model = checkpoint.to(self.device).eval()
        else:
            self.model = load(checkpoint or built_in(), self.device)
        if not self.model.num_classes:
            raise HVTError(f"{checkpoint} has no classifier, so it cannot name what it sees")
        self.transform = eval_transform(self.model)
        names = self.model.class_names
        self.class_names = names or tuple(str(i) for i in range(self.model.num_classes))

    def __call__(self, pictures: Picture | Sequence[Picture]) -> Answer | list[Answer]:
        """The answer for one picture, or a list for many; pictures are paths or PIL images."""
        if isinstance(pictures, (str, Path, Image.Image)):
            return next(self.stream([pictures]))
        return list(self.stream(pictures))

    def stream(self, pictures: Sequence[Picture]) -> Iterator[Answer]:
        """Answers as they come, in the order of the pictures; a broken one stops nothing."""
        for start in range(0, len(pictures), self.batch_size):
            yield from self._batch(pictures[start : start + self.batch_size])

    @torch.inference_mode()
    def _batch(self, pictures: Sequence[Picture]) -> list[Answer]:
        answers: list[Answer | None] = []
        tensors = []
        for picture in pictures:
            try:
                tensors.append(self.transform(self._open(picture)))
                answers.append(None)
            except BrokenPicture as error:
                answers.append(Answer(str(picture), error=str(error)))
        if tensors:
            logits = self.model(torch.stack(tensors).to(self.device)).float()
            best = logits.softmax(dim=1).topk(min(self.top, logits.shape[1]), dim=1)
            rows = iter(zip(best.values.tolist(), best.indices.tolist(), strict=True))
        done = []
        for picture, answer in zip(pictures, answers, strict=True):
            if answer is None:
                values, indices = next(rows)
                source = "picture" if isinstance(picture, Image.Image) else str(picture)
                names = tuple(self.class_names[i] for i in indices)
                answer = Answer(source, names, tuple(values))
            done.append(answer)
        return done

    def _open(self, picture: Picture) -> Image.Image:
        channels = self.model.config.in_chans
        if isinstance(picture, Image.Image):
            return picture.convert("RGB" if channels == 3 else "L")
        return read_picture(picture, channels)


def built_in() -> Path:
    """The checkpoint that comes with the package: an HVT trained on CIFAR-100."""
    path = Path(__file__).parent / "assets" / "cifar100.safetensors"
    if not path.is_file():
        raise HVTError("no checkpoint is given, and this installation has no built-in model")
    return path


def is_checkpoint(path: str) -> bool:
    """Whether a command's argument names weights rather than a picture, by its form."""
    found = Path(path)
    if found.suffix.lower() in (".safetensors", ".pth", ".pt", ".bin", ".onnx"):
        return True
    return any((found / name).is_file() for name in ("model.safetensors", "pytorch_model.bin"))


def find_pictures(patterns: Sequence[str]) -> list[str]:
    """The files behind paths, folders and glob patterns, in order; each must give some."""
    extensions = Image.registered_extensions()
    found: list[str] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            files = [p for p in sorted(path.rglob("*")) if p.suffix.lower() in extensions]
            if not files:
                raise HVTError(f"the folder {path} has no pictures in it")
            found += map(str, files)
        elif path.exists() or not glob.has_magic(pattern):
            if not path.exists():
                raise HVTError(f"there is no file {pattern}")
            found.append(pattern)
        else:
            matches = sorted(glob.glob(pattern, recursive=True))
            if not matches:
                raise HVTError(f"no file matches {pattern}")
            found += [m for m in matches if Path(m).is_file()]
    return found
