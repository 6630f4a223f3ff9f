"""The model behind a service: bytes to images, images to inputs, inputs to answers."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..checkpoint.save_load import load
from ..config import HVTConfig
from ..data.evaluation import eval_transform, resized_side
from ..data.images import mode_of
from ..deploy.export import write
from ..deploy.runtime import OnnxModel, check_classifier, is_onnx
from ..errors import HVTError
from ..model import HVT
from ..zoo import DEFAULT, find_checkpoint
from .bounds import Bounds
from .images import finish_safely, known_formats, open_safely, read_safely
from .settings import Settings

Row = tuple[list[float], list[int]]
"""The probabilities of an image's likeliest classes, best first, and the classes."""


class Engine:
    """A checkpoint or an exported file that answers in ONNX Runtime, from any thread.

    A checkpoint is exported first, unless `exported` is its export already. `model` is then the
    PyTorch model too, for those who want to look inside; for an exported file it is None.
    """

    model: HVT | None
    config: HVTConfig
    class_names: tuple[str, ...]
    name: str

    def __init__(
        self,
        source: str | Path | None = None,
        settings: Settings | None = None,
        exported: str | Path | None = None,
    ) -> None:
        self.settings = settings = settings or Settings()
        path = find_checkpoint(DEFAULT if source is None else source)
        self.name = valid_text(path.name or path.resolve().name)
        self.model = None
        if is_onnx(path):
            self.session = OnnxModel(path, settings.device, settings.threads)
        else:
            self.model = load(path).float().eval()
            check_classifier(self.model, path)
            self.session = _session(self.model, settings, exported)
        self.config = self.session.config
        names = self.session.class_names
        numbers = map(str, range(self.session.num_classes))
        self.class_names = tuple(map(valid_text, names or numbers))
        mode_of(self.config.in_chans)  # refuses what no image has
        self._place, self._table, self._as_is = _steps(eval_transform(self.session))
        side = resized_side(self.session)
        self.bounds = Bounds(settings.max_pixels, settings.decode_timeout, side, known_formats())
        # The first time sets up what later ones find ready, such as the arenas of a run. A model
        # that has no finite answer even for black is refused here.
        self.session(self.inputs([np.zeros((*self.config.image, self.config.in_chans), np.uint8)]))

    def open(self, content: bytes, what: str = "the image") -> Image.Image | None:
        """The image of some bytes, not decoded yet, or a `RequestError`, which calls it `what`.

        None if `read` would have it decoded elsewhere.
        """
        return open_safely(content, self.bounds, what)

    def finish(self, image: Image.Image, what: str = "the image") -> Image.Image:
        """An opened image, upright and in the model's channels, or a `RequestError`."""
        return finish_safely(image, self.config.in_chans, what)

    def read(self, content: bytes, what: str = "the image") -> Image.Image:
        """The image of some bytes, upright and in the model's channels, or a `RequestError`."""
        return read_safely(content, self.config.in_chans, self.bounds, what)

    def pixels(self, image: Image.Image) -> np.ndarray:
        """The part of an image that the model sees, in its size: uint8 `(H, W, C)`."""
        pixels = np.asarray(image if image.size == self._as_is else self._place(image))
        return pixels.reshape(*pixels.shape[:2], -1)  # grey ones have no last axis

    def inputs(self, pixels: Sequence[np.ndarray]) -> Tensor:
        """A batch for the model, `(B, C, H, W)`, bit for bit as in `hvt predict`."""
        planes = np.stack(pixels).transpose(3, 0, 1, 2)
        batch = np.empty((planes.shape[1], len(planes), *planes.shape[2:]), np.float32)
        for channel, (plane, row) in enumerate(zip(planes, self._table, strict=True)):
            batch[:, channel] = row.take(plane)
        return torch.from_numpy(batch)

    def answer(self, pixels: Sequence[np.ndarray], top: int) -> list[Row]:
        """The likeliest classes of some images' pixels, computed as one batch.

        The probabilities of an image for which the model computes no finite number are NaN.
        """
        logits = self.session.logits(self.inputs(pixels)).numpy()
        # In numpy: torch would wake threads for this, which then spin for a while.
        logits[~np.isfinite(logits).all(axis=1)] = np.nan
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        best = np.argsort(-odds, axis=1, kind="stable")[:, :top]
        values = np.take_along_axis(odds, best, axis=1) / odds.sum(axis=1, keepdims=True)
        return list(zip(values.tolist(), best.tolist(), strict=True))


def valid_text(text: str) -> str:
    """A name that UTF-8 can say: bytes of a file's name that are not text are written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def export_to(folder: str | Path, source: str | Path | None) -> Path | None:
    """The export of a checkpoint for many processes to share; None if it is exported already."""
    path = find_checkpoint(DEFAULT if source is None else source)
    if is_onnx(path):
        return None
    model = load(path).float().eval()
    check_classifier(model, path)
    return _write(model, Path(folder))


def _session(model: HVT, settings: Settings, exported: str | Path | None) -> OnnxModel:
    if exported is not None:
        return OnnxModel(exported, settings.device, settings.threads)
    with temporary_folder() as folder:
        return OnnxModel(_write(model, Path(folder)), settings.device, settings.threads)


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that vanishes with the service."""
    try:
        return tempfile.TemporaryDirectory(prefix="hvt-serve-")
    except OSError as error:
        raise HVTError(_no_room(error, "a temporary folder")) from error


def _write(model: HVT, folder: Path) -> Path:
    path = folder / "model.onnx"
    try:
        write(model.requires_grad_(False), path, "onnx")
    except OSError as error:
        raise HVTError(_no_room(error, str(path))) from error
    return path


def _no_room(error: OSError, what: str) -> str:
    reason = error.strerror or error
    return (
        f"cannot write {what}: {reason}; name a folder with room for the exported model in TMPDIR, "
        "or serve a file that hvt export has written"
    )


def _steps(transform: Any) -> tuple[Any, np.ndarray, tuple[int, int] | None]:
    """An evaluation transform as its part on images and a table of what each value becomes.

    Conversion and normalisation look at one value at a time, so that 256 inputs for each channel
    say everything of them: float32 `(C, 256)`. The last is the size of images that the first
    part leaves as they are, if there is one.
    """
    *first, convert, normalise = transform.transforms
    channels = len(normalise.mean)
    ramp = np.arange(256, dtype=np.uint8)[None, :, None].repeat(channels, axis=2)
    table = normalise(convert(Image.fromarray(ramp.squeeze(2) if channels == 1 else ramp)))

    def place(image: Image.Image) -> Image.Image:
        for step in first:
            image = step(image)
        return image

    size = place(Image.new("L", (64, 64))).size
    probe = Image.effect_noise(size, 100)
    untouched = np.array_equal(np.asarray(place(probe)), np.asarray(probe))
    return place, table[:, 0].numpy().copy(), size if untouched else None
