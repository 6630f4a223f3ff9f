"""The model behind a service: images to pixels, pixels to inputs, inputs to class scores.

An elastic model has several settings, the largest first: the longer the queue, the cheaper the one
that answers. Every other model is a single setting.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..checkpoint.save_load import load
from ..costs import cost
from ..data.evaluation import eval_transform, per_channel, resized_side
from ..data.images import mode_of
from ..deploy.export import write_onnx
from ..deploy.runtime import OnnxModel, check_classifier
from ..elastic import configs_of, label, plain
from ..errors import HVTError
from ..model import HVT
from ..resolve import resolve
from ..terminal import printable
from ..zoo import DEFAULT, find_checkpoint
from .decoding import Limits
from .settings import Settings

_log = logging.getLogger(__name__)


class Pixels(NamedTuple):
    """The part of an image that a setting sees, in its size."""

    values: np.ndarray
    """uint8 `(C, H, W)`."""
    setting: int
    size: tuple[int, int]
    """Width and height of the whole image."""


class Scores(NamedTuple):
    """The top classes of an image, best first, and the name of the setting that computed them."""

    probabilities: list[float]
    labels: list[int]
    setting: str


class Setting:
    """A plain model and how images become its inputs, bit for bit as in `hvt predict`.

    `model` is the same in PyTorch, to look inside; None for an exported file.
    """

    def __init__(self, session: HVT | OnnxModel, model: HVT | None, name: str) -> None:
        self.session: Any = session
        self.config, self.model, self.name = session.config, model, name
        self._transform = eval_transform(session, normalize=False)
        del self._transform.transforms[0]  # decoding rejects long strips
        channels, cfg = session.config.in_chans, session.pretrained_cfg
        mean, std = (per_channel(cfg[name], channels) for name in ("mean", "std"))
        self._mean, self._std = np.array((mean, std), np.float32)[..., None, None]

    def pixels(self, image: Image.Image) -> np.ndarray:
        """An image resized and cropped: uint8 `(C, H, W)`."""
        return self._transform(image).numpy()

    def inputs(self, pixels: Sequence[np.ndarray]) -> Tensor:
        """A batch for the model, `(B, C, H, W)`."""
        # In numpy, here and below: torch would wake threads for this, which then spin for a while.
        batch = np.stack(pixels).astype(np.float32, order="C")
        batch /= 255
        batch -= self._mean
        batch /= self._std
        return torch.from_numpy(batch)


class Controller:
    """Chooses a setting by how many images wait.

    Each `high` images that wait make it one smaller, at once. It gets larger by one for every
    `hold` seconds in which fewer waited than half of what made it that cheap.
    """

    def __init__(self, count: int, high: int, hold: float) -> None:
        self.count, self.high, self.hold = count, high, hold
        self.place, self._since = 0, 0.0
        self._lock = threading.Lock()

    def choose(self, waiting: int, now: float) -> int:
        """The setting for the next image."""
        with self._lock:
            while 2 * waiting < self.place * self.high and now - self._since >= self.hold:
                self.place, self._since = self.place - 1, self._since + self.hold
            if 2 * waiting >= self.place * self.high:
                wanted = min(self.count - 1, waiting // self.high)
                self.place, self._since = max(wanted, self.place), now
            return self.place


class Engine:
    """A checkpoint or an exported file that runs in ONNX Runtime, from any thread.

    A checkpoint is exported first. `folder` keeps its exports for other processes, which find them
    there; without it they are temporary.
    """

    def __init__(
        self,
        source: str | Path | None = None,
        settings: Settings | None = None,
        folder: Path | None = None,
    ) -> None:
        self.settings = settings = settings or Settings()
        path = find_checkpoint(DEFAULT if source is None else source)
        self.name = printable(path.name or path.resolve().name)
        _log.info("loading %s", self.name)
        self.variants = list(self._open(path, folder))
        self.session = session = self.variants[0].session
        self.config = session.config
        names = session.class_names or map(str, range(session.num_classes))
        self.class_names = tuple(map(printable, names))
        mode_of(channels := self.config.in_chans)  # raises an error for what no image has
        side, seconds = resized_side(session), settings.decode_timeout
        self.limits = Limits(channels, settings.max_pixels, side, seconds)
        hold = settings.elastic_hold_ms / 1e3
        self._controller = Controller(len(self.variants), settings.elastic_queue, hold)
        self.waiting: Callable[[], int] = lambda: 0
        # The first run sets up what later ones find ready, such as memory arenas. A model whose
        # outputs are not finite even for black raises an error here.
        _log.info("warming up")
        for each in self.variants:
            black = np.zeros((each.config.in_chans, *each.config.image), np.uint8)
            each.session(each.inputs([black]))

    def _open(self, path: Path, folder: Path | None) -> Iterator[Setting]:
        shared: dict[bytes, Any] | None = {} if self.settings.elastic else None
        for number, model in enumerate(_models(path, self.settings)):
            with contextlib.ExitStack() as stack:
                file = path
                if model is not None:
                    file = (folder or stack.enter_context(temporary_folder())) / f"{number}.onnx"
                    if not file.exists():
                        _log.info("exporting to ONNX")
                        write_onnx(model, file)
                session = OnnxModel(file, self.settings.device, self.settings.threads, shared)
            name = label(session.config) if self.settings.elastic else ""
            yield Setting(session, model, name)

    def pixels(self, image: Image.Image) -> Pixels:
        """What the model sees of an image; of an elastic one the setting that is due."""
        place = 0
        if len(self.variants) > 1:
            place = self._controller.choose(self.waiting(), time.monotonic())
        return Pixels(self.variants[place].pixels(image), place, image.size)

    def predict(self, pixels: Sequence[Pixels], top: int) -> list[Scores]:
        """The top classes of some images' pixels, all of one setting, computed as one batch.

        The probabilities of an image whose logits are not finite are NaN.
        """
        setting = self.variants[pixels[0].setting]
        logits = setting.session(setting.inputs([one.values for one in pixels])).numpy()
        logits[~np.isfinite(logits).all(axis=1)] = np.nan
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        best = np.argsort(-odds, axis=1, kind="stable")[:, :top]
        values = np.take_along_axis(odds, best, axis=1) / odds.sum(axis=1, keepdims=True)
        rows = zip(values.tolist(), best.tolist(), strict=True)
        return [Scores(*row, setting.name) for row in rows]


def _models(path: Path, settings: Settings) -> Sequence[HVT | None]:
    """A checkpoint's settings within the limits of cost, largest first; of a plain one itself."""
    model = None
    if resolve(path).kind != "onnx":
        model = load(path).float().eval().requires_grad_(False)
        check_classifier(model, path)
    if not settings.elastic:
        return [model]
    if model is None or model.settings is None:
        raise HVTError(f"{path} is not elastic: leave --elastic out, or name one that is")
    configs, low, high = configs_of(model), settings.min_gflops, settings.max_gflops
    within = [place for place, each in enumerate(configs) if low <= cost(each).gflops <= high]
    if not within:
        raise HVTError(
            f"no setting costs from {low:g} to {high:g} GFLOPs: there are "
            f"{', '.join(map(label, configs))}"
        )
    return [plain(model, place) for place in within]


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
