"""Whom to look at: one of our models by name, a checkpoint, or any model of timm."""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch
from torch import Tensor, nn

from ..checkpoint.save_load import load, read
from ..costs import Cost, cost
from ..data.evaluation import RefuseStrips, eval_transform
from ..data.images import UnreadableImageError
from ..errors import HVTError, did_you_mean
from ..files import expanded
from ..model import HVT
from ..registry import create_model
from ..zoo import BUILT_IN as BUILT_IN_NAMES
from ..zoo import DEFAULT, MODELS, find_checkpoint, get_config, is_checkpoint

if TYPE_CHECKING:
    from ..deploy.inputs import ImageInput

TIMM = "timm:"
BUILT_IN = "built-in model"
# Names that say nothing without the folder they are in.
_PLAIN = ("best", "model", "pytorch_model")


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode, its name for a title, and its own way to prepare an image."""

    name: str
    note: str
    """Where its weights are from, if the name does not say."""
    model: nn.Module
    transform: Any
    in_chans: int

    @property
    def title(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name

    def prepare(self, source: ImageInput) -> Tensor:
        """An image as the model takes it, `(C, H, W)`."""
        from ..deploy.inputs import open_image, source_of

        image = open_image(source, self.in_chans)
        try:
            return self.transform(image)
        except UnreadableImageError as error:  # the transform does not know its name
            raise UnreadableImageError.of(source_of(source) or error.path, error.reason) from error

    def shown(self, image: Tensor) -> Tensor:
        """A prepared image for the eye: `(C, H, W)` → `(H, W, 3)` from 0 to 1."""
        for step in self.transform.transforms:
            if hasattr(step, "mean") and hasattr(step, "std"):
                mean, std = (torch.as_tensor(v).view(-1, 1, 1) for v in (step.mean, step.std))
                image = image * std + mean
        return image.clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0)


def open_model(name: str | None = None, pretrained: bool = False, seed: int = 0) -> Subject:
    """The model of a name or of a checkpoint's path; None is the built-in one.

    A name of ours comes before one of timm's, which `timm:` before it asks for. A named model has
    random weights, the same for the same seed, or with `pretrained` the published ones.
    """
    if not 0 <= seed < 2**63:
        raise HVTError(f"seed={seed} must be a whole number from 0 to 2⁶³ - 1")
    if has_own_weights(name):
        path, label = _checkpoint(name)
        return _ours(label, "", load(path).float())
    assert name is not None
    weights = "published weights" if pretrained else f"random weights, seed {seed}"
    if name in MODELS:
        with _seeded(seed):
            return _ours(name, weights, create_model(name, pretrained))
    plain = name.removeprefix(TIMM)
    if not timm.is_model(plain):
        raise _unknown(name, plain)
    model = _from_timm(plain, pretrained, seed)
    if isinstance(model, HVT):  # timm knows ours too
        return _ours(plain, weights, model)
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    if config["crop_mode"] == "center":
        side = math.ceil(max(config["input_size"][1:]) / config["crop_pct"])
        transform.transforms.insert(0, RefuseStrips(side))
    return Subject(plain, f"timm, {weights}", model.eval(), transform, config["input_size"][0])


def open_price(name: str | None = None) -> tuple[str, Cost]:
    """A title and what the model costs, without building it; names as in `open_model`."""
    if has_own_weights(name):
        path, label = _checkpoint(name)
        return label, cost(read(path).config)
    assert name is not None
    plain = name.removeprefix(TIMM)
    if plain in MODELS:
        return plain, cost(get_config(plain))
    if not timm.is_model(plain):
        raise _unknown(name, plain)
    raise HVTError(
        f"{name} is timm's, and only models of this family are priced block by block: "
        "choose from hvt models"
    )


def names_model(text: str) -> bool:
    """Whether a command's argument is a model's name or has the form of a checkpoint."""
    return is_checkpoint(text) or timm.is_model(text.removeprefix(TIMM))


def _ours(name: str, note: str, model: HVT) -> Subject:
    return Subject(name, note, model.eval(), eval_transform(model), model.config.in_chans)


def has_own_weights(name: str | None) -> bool:
    """Whether it is the built-in model or a checkpoint.

    Names win over files of the same name, which `./` before them asks for.
    """
    if name is None:
        return True
    if name in MODELS or name.startswith(TIMM):
        return False
    if timm.is_model(name) and (Path(name).is_dir() or not is_checkpoint(name)):
        return False
    return is_checkpoint(name) or "/" in name or os.path.exists(name)  # noqa: PTH110 - any name


def _checkpoint(name: str | None) -> tuple[Path, str]:
    """A checkpoint's path, and a title for it."""
    if name is None or name in BUILT_IN_NAMES:
        return find_checkpoint(name or DEFAULT), BUILT_IN if name is None else name
    path = expanded(name)
    label = path.name if path.is_dir() else path.stem
    return path, f"{path.resolve().parent.name}/{label}" if label in _PLAIN else label


def _from_timm(name: str, pretrained: bool, seed: int) -> nn.Module:
    try:
        with _seeded(seed), _quiet_hub():
            return timm.create_model(name, pretrained=pretrained)
    except HVTError:
        raise
    # What a missing network raises depends on the HTTP library, what a bad tag does on the model.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        if pretrained:
            raise HVTError(
                f"timm's weights of {name} could not be fetched ({reason}): check the network, "
                "or look at the model with random weights"
            ) from error
        raise HVTError(f"timm cannot build {name} ({reason})") from error


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from a seed here, and leave the caller's randomness as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    """The hub's library reports each of its attempts; the sentence at the end is enough."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _unknown(name: str, plain: str) -> HVTError:
    close: Iterable[str] = MODELS
    for known in (list(MODELS), timm.list_models()):
        if difflib.get_close_matches(plain, known):
            close = known
            break
    return HVTError(f"{name!r} is neither a model nor a checkpoint: {did_you_mean(plain, close)}")
