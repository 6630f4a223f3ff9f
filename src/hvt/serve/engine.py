"""The model behind a service: images to pixels, pixels to inputs, inputs to class scores."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
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
from ..deploy.export import write_onnx
from ..deploy.runtime import OnnxModel, check_classifier
from ..errors import HVTError
from ..model import HVT
from ..resolve import resolve
from ..zoo import DEFAULT, find_checkpoint
from .decoding import Limits
from .settings import Settings

Scores = tuple[Any, ...]
"""The probabilities of an image's top classes, best first, the classes, and of an elastic model the
setting that computed them."""

_log = logging.getLogger(__name__)


class Engine:
    """A checkpoint or an exported file that runs in ONNX Runtime, from any thread.

    A checkpoint is exported first, unless `exported` is its export already. `model` is then the
    PyTorch model too, for those who want to look inside; for an exported file it is None.
    """

    def __init__(
        self,
        source: str | Path | None = None,
        settings: Settings | None = None,
        exported: str | Path | None = None,
    ) -> None:
        self.settings = settings = settings or Settings()
        path = find_checkpoint(DEFAULT if source is None else source)
        self.name = valid_text(path.name or path.resolve().name)
        _log.info("loading %s", self.name)
        self.model: HVT | None = None if resolve(path).kind == "onnx" else _load(path)
        self.session = self._open(path, exported)
        self.config = self.session.config
        names = self.session.class_names
        numbers = map(str, range(self.session.num_classes))
        self.class_names = tuple(map(valid_text, names or numbers))
        mode_of(self.config.in_chans)  # raises an error for what no image has
        self._crop, self._table, self._as_is = steps_of(eval_transform(self.session))
        self.limits = Limits(
            self.config.in_chans,
            settings.max_pixels,
            resized_side(self.session),
            settings.decode_timeout,
        )
        # The first run sets up what later ones find ready, such as memory arenas. A model whose
        # outputs are not finite even for black raises an error here.
        _log.info("warming up")
        self.session(self.inputs([np.zeros((*self.config.image, self.config.in_chans), np.uint8)]))

    def _open(self, path: Path, exported: str | Path | None) -> Any:
        """What computes logits: an `OnnxModel`, or what has its attributes."""
        with contextlib.ExitStack() as stack:
            if self.model is not None:
                path = Path(exported or write(self.model, stack.enter_context(temporary_folder())))
            return OnnxModel(path, self.settings.device, self.settings.threads)

    def pixels(self, image: Any) -> np.ndarray:
        """The part of an image that the model sees, in its size: uint8 `(H, W, C)`."""
        return self._pixels(image, self._crop, self._as_is)

    def _pixels(self, image: Any, crop: Any, as_is: tuple[int, int] | None) -> np.ndarray:
        pixels = np.asarray(image if image.size == as_is else crop(image))
        return pixels.reshape(*pixels.shape[:2], -1)  # grey ones have no last axis

    def inputs(self, pixels: Sequence[np.ndarray]) -> Tensor:
        """A batch for the model, `(B, C, H, W)`, bit for bit as in `hvt predict`."""
        return self._inputs(pixels, self._table)

    def _inputs(self, pixels: Sequence[np.ndarray], table: np.ndarray) -> Tensor:
        planes = np.stack(pixels).transpose(3, 0, 1, 2)  # (B, H, W, C) → (C, B, H, W)
        batch = np.empty((planes.shape[1], len(planes), *planes.shape[2:]), np.float32)
        for channel, (plane, row) in enumerate(zip(planes, table, strict=True)):
            batch[:, channel] = row.take(plane)
        return torch.from_numpy(batch)

    def predict(self, pixels: Sequence[np.ndarray], top: int) -> list[Scores]:
        """The top classes of some images' pixels, computed as one batch.

        The probabilities of an image whose logits are not finite are NaN.
        """
        return self._top(self.session.logits(self.inputs(pixels)).numpy(), top)

    def shown(self, pixels: np.ndarray) -> tuple[HVTConfig, HVT | None, Tensor | None]:
        """What to look into: the config, and where it is known the model and its input."""
        image = None if self.model is None else self.inputs([pixels])[0]
        return self.config, self.model, image

    def _top(self, logits: np.ndarray, top: int) -> list[Scores]:
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
    return None if resolve(path).kind == "onnx" else write(_load(path), Path(folder))


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that vanishes with the service; a full disk is one clear error."""
    try:
        with tempfile.TemporaryDirectory(prefix="hvt-serve-") as folder:
            yield Path(folder)
    except OSError as error:
        raise HVTError(
            f"cannot write to {tempfile.gettempdir()}: {error.strerror or error}; set TMPDIR to a "
            "folder with room for the exported model, or serve a file that hvt export has written"
        ) from error


def _load(path: Path) -> HVT:
    model = load(path).float().eval()
    check_classifier(model, path)
    return model


def write(model: HVT, folder: Path) -> Path:
    """A model's export in a folder."""
    _log.info("exporting to ONNX")
    write_onnx(model.requires_grad_(False), folder / "model.onnx")
    return folder / "model.onnx"


def steps_of(transform: Any) -> tuple[Any, np.ndarray, tuple[int, int] | None]:
    """An evaluation transform as its part on images and a table of what each value becomes.

    Conversion and normalisation look at one value at a time, so that 256 inputs for each channel
    say everything of them: float32 `(C, 256)`. The last is the size of images that the first
    part leaves unchanged, if there is one.
    """
    _, *resize_and_crop, convert, normalise = transform.transforms  # decoding refuses long strips
    channels = len(normalise.mean)
    ramp = np.arange(256, dtype=np.uint8)[None, :, None].repeat(channels, axis=2)
    table = normalise(convert(Image.fromarray(ramp.squeeze(2) if channels == 1 else ramp)))

    def crop(image: Image.Image) -> Image.Image:
        for step in resize_and_crop:
            image = step(image)
        return image

    size = crop(Image.new("L", (64, 64))).size
    probe = Image.effect_noise(size, 100)
    untouched = np.array_equal(np.asarray(crop(probe)), np.asarray(probe))
    return crop, table[:, 0].numpy().copy(), size if untouched else None
