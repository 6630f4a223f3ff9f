"""An elastic model behind a service: the longer the queue, the cheaper the setting that answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..config import HVTConfig
from ..costs import cost
from ..data.evaluation import eval_transform
from ..deploy.runtime import OnnxModel
from ..elastic import configs_of, label, plain
from ..errors import HVTError
from ..model import HVT
from .engine import Engine, Scores, steps_of, temporary_folder, write
from .settings import Settings


class Controller:
    """Chooses a setting, 0 is the dearest, by how many images wait.

    Each `high` images that wait make it one cheaper, at once. It gets dearer by one when for `hold`
    seconds fewer waited than half of what made it that cheap.
    """

    def __init__(self, count: int, high: int, hold: float) -> None:
        self.count, self.high, self.hold = count, high, hold
        self.place, self._since = 0, 0.0
        self._lock = threading.Lock()

    def choose(self, waiting: int, now: float) -> int:
        """The setting for the next image."""
        with self._lock:
            wanted = min(self.count - 1, waiting // self.high)
            if wanted >= self.place or 2 * waiting >= self.place * self.high:
                self.place, self._since = max(wanted, self.place), now
            elif now - self._since >= self.hold:
                self.place, self._since = self.place - 1, now
            return self.place


class SettingPixels(np.ndarray):
    """Pixels as one of the settings sees them."""

    setting = 0


def setting_of(pixels: np.ndarray) -> int:
    """Images of one setting can share a batch."""
    return pixels.setting if isinstance(pixels, SettingPixels) else 0


class ElasticEngine(Engine):
    """All settings of an elastic checkpoint, which share their weights in memory."""

    def __init__(self, source: str | Path | None, settings: Settings) -> None:
        super().__init__(source, settings)
        self.names = [label(session.config) for session in self.sessions]
        self._steps = [steps_of(eval_transform(session)) for session in self.sessions]
        self.controller = Controller(
            len(self.sessions), settings.elastic_queue, settings.elastic_hold_ms / 1e3
        )
        self.waiting: Callable[[], int] = lambda: 0
        for session in self.sessions[1:]:  # as the dearest, which is warm already
            config = session.config
            session(torch.zeros(1, config.in_chans, *config.image))

    def _open(self, path: Path, exported: str | Path | None) -> OnnxModel:
        settings = self.settings
        if self.model is None or self.model.settings is None:
            raise HVTError(f"{path} is not elastic: leave --elastic out, or name one that is")
        configs = configs_of(self.model)
        allowed = [i for i, config in enumerate(configs) if _allowed(config, settings)]
        if not allowed:
            raise HVTError(
                f"no setting costs from {settings.min_gflops:g} to {settings.max_gflops:g} GFLOPs: "
                f"there are {', '.join(map(label, configs))}"
            )
        self.models = [plain(self.model, place) for place in allowed]
        self.sessions, shared = [], dict[bytes, object]()
        with temporary_folder() as folder:
            for model in self.models:
                exported = write(model, folder)
                self.sessions.append(OnnxModel(exported, settings.device, settings.threads, shared))
        return self.sessions[0]

    def pixels(self, image: object) -> np.ndarray:
        """What the setting of the moment sees of an image."""
        place = self.controller.choose(self.waiting(), time.monotonic())
        seen = self._pixels(image, *self._steps[place][::2]).view(SettingPixels)
        seen.setting = place
        return seen

    def predict(self, pixels: Sequence[np.ndarray], top: int) -> list[Scores]:
        """As in a plain engine, by the setting of the first; each with the setting's name."""
        place = setting_of(pixels[0])
        inputs = self._inputs(pixels, self._steps[place][1])
        found = self._top(self.sessions[place].logits(inputs).numpy(), top)
        return [(*scores[:2], self.names[place]) for scores in found]

    def shown(self, pixels: np.ndarray) -> tuple[HVTConfig, HVT | None, Tensor | None]:
        place = setting_of(pixels)
        image = self._inputs([pixels], self._steps[place][1])[0]
        return self.sessions[place].config, self.models[place], image


def _allowed(config: HVTConfig, settings: Settings) -> bool:
    return settings.min_gflops <= cost(config).gflops <= settings.max_gflops


def open_engine(
    source: str | Path | None, settings: Settings | None = None, exported: Path | None = None
) -> Engine:
    """What runs the model of a service, by its settings."""
    if settings is not None and settings.elastic:
        return ElasticEngine(source, settings)
    return Engine(source, settings, exported)
