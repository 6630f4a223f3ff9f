"""What a training is: one frozen dataclass, filled from a small file and from flags."""

from __future__ import annotations

import dataclasses
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import FIELDS, HVTConfig, check_fields
from ..errors import HVTError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parents[1] / "recipes"


def _field(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Recipe:
    """A training from beginning to end; the defaults are DeiT's recipe, which the paper uses."""

    model: str | None = _field(None, "model's name (hvt models); the checkpoint's own with --init")
    init: str | None = _field(None, "checkpoint to start from, or 'pretrained'")
    data: str | None = _field(None, "digits, cifar10, cifar100, imagenet or a folder")
    root: str | None = _field(None, "folder that has the named data set in it")
    download: bool = _field(False, "fetch the named data set if it is absent")
    val_fraction: float = _field(0.1, "validation share of a folder that has no split")
    holdout: float = _field(0.0, "validate on this share of the training pictures instead")
    skip_broken: bool = _field(False, "pass over unreadable pictures and count them")
    output: str | None = _field(None, "the run's folder (default: runs/RECIPE-MODEL)")

    epochs: int = _field(300, "passes over the training data")
    batch_size: int = _field(1024, "pictures per step over all processes")
    accumulate: int = _field(1, "pieces a process cuts its share of a batch into, to save memory")
    lr: float = _field(5e-4, "learning rate at a batch of 512; scales with the batch")
    warmup_lr: float = _field(1e-6, "learning rate at the first step")
    min_lr: float = _field(1e-5, "learning rate at the last step")
    warmup_epochs: float = _field(5, "epochs of linear warm-up")
    weight_decay: float = _field(0.025, "AdamW's; none on biases, norms and positions")
    layer_decay: float | None = _field(None, "rate of a block over that of the next one")
    clip_grad: float | None = _field(None, "largest gradient norm")

    smoothing: float = _field(0.1, "label smoothing")
    mixup: float = _field(0.8, "mixup's alpha; 0 is off")
    cutmix: float = _field(1.0, "CutMix's alpha; 0 is off")
    mixup_prob: float = _field(1.0, "share of batches that are mixed")
    mixup_switch: float = _field(0.5, "share of mixed batches that use CutMix")
    rand_augment: str = _field("rand-m9-mstd0.5-inc1", "timm's RandAugment; '' is off")
    color_jitter: float = _field(0.4, "colour jitter where RandAugment is off")
    erase: float = _field(0.25, "share of pictures with a random patch of noise")
    repeats: int = _field(3, "augmented copies of a picture in an epoch of equal length")
    flip: float = _field(0.5, "share of pictures flipped left to right")
    padding: int = _field(4, "padding of random crops, for pictures up to 64 pixels")
    interpolation: str = _field("bicubic", "resizing: bicubic, bilinear or random")
    ema: float = _field(0.99996, "decay of the averaged weights; 0 is off")

    teacher: str | None = _field(
        None, "teacher to distil from: a checkpoint or a timm model's name"
    )
    distill: str = _field("soft", "distillation with a teacher: soft or hard")
    distill_alpha: float = _field(0.5, "weight of the teacher against the labels")
    distill_tau: float = _field(3.0, "temperature of soft distillation")

    device: str = _field("auto", "auto, cpu, cuda, mps …")
    amp: str = _field("auto", "mixed precision: auto (bfloat16 on GPUs), off, bfloat16, float16")
    compile: bool = _field(False, "torch.compile the model")
    grad_checkpointing: bool = _field(False, "recompute blocks in the backward pass")
    workers: int = _field(-1, "processes that read pictures; -1 chooses")
    threads: int | None = _field(None, "CPU threads of each process")
    seed: int = _field(0, "seed of weights, order, augmentation and splits")
    eval_every: int = _field(1, "epochs between evaluations; the last is always evaluated")
    checkpoint_minutes: float = _field(10.0, "minutes between checkpoints within an epoch")
    max_bad_steps: int = _field(5, "stop after so many losses in a row that are not finite")
    tensorboard: bool = _field(True, "write TensorBoard logs where it is installed")

    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `HVTConfig` to replace."""

    def __post_init__(self) -> None:
        check_fields(self.overrides)
        self._check()

    def _check(self) -> None:
        least: dict[str, float] = {
            "epochs": 1, "batch_size": 2, "accumulate": 1, "repeats": 1, "padding": 0,
            "eval_every": 1, "max_bad_steps": 1, "workers": -1,
        }  # fmt: skip
        for name, bound in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < bound:
                raise HVTError(f"{name}={value!r} must be a whole number of at least {bound}")
        for name in ("val_fraction", "holdout", "smoothing", "ema", "erase", "flip",
                     "mixup_prob", "mixup_switch", "distill_alpha"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise HVTError(f"{name}={value!r} must be a number from 0 to 1")
        for name in ("lr", "warmup_lr", "min_lr", "warmup_epochs", "weight_decay", "mixup", "cutmix",
                     "color_jitter", "distill_tau", "checkpoint_minutes"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or value < 0:
                raise HVTError(f"{name}={value!r} must be a number of at least 0")
        choices = {
            "distill": ("soft", "hard"),
            "amp": ("auto", "off", "bfloat16", "float16"),
            "interpolation": ("bicubic", "bilinear", "random"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise HVTError(f"{name}={getattr(self, name)!r} must be {' or '.join(allowed)}")

    @property
    def scaled_lr(self) -> float:
        """The learning rate for this batch: 5e-4 at 512 and in proportion."""
        return self.lr * self.batch_size / 512

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def replace(self, overrides: dict[str, Any] | None = None, **values: Any) -> Recipe:
        """The same recipe with other values; model overrides are merged."""
        merged = self.overrides | (overrides or {})
        return dataclasses.replace(self, overrides=merged, **values)


RECIPE_FIELDS = tuple(f.name for f in dataclasses.fields(Recipe) if f.name != "overrides")


def list_recipes() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_recipe(name: str) -> Recipe:
    """A built-in recipe by name, or a recipe file by path."""
    path = FOLDER / f"{name}.toml"
    if not path.is_file():
        path = Path(name)
        if path.suffix != ".toml" or not path.is_file():
            raise HVTError(
                f"unknown recipe {name!r}: {nearest(name, list_recipes())} "
                "(or give the path of a .toml file)"
            )
    try:
        values = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise HVTError(f"recipe {path} is not valid TOML: {error}") from error
    return from_dict(values, str(path))


def from_dict(values: dict[str, Any], where: str) -> Recipe:
    """A recipe from plain values; a mistyped name is answered with the nearest right one."""
    values = dict(values)
    overrides = values.pop("overrides", {})
    hints = typing.get_type_hints(Recipe)
    for name, value in values.items():
        if name not in RECIPE_FIELDS:
            hint = nearest(name, RECIPE_FIELDS)
            if name in FIELDS:
                hint = "it belongs under [overrides], beside the model's other fields"
            raise HVTError(f"{where} has an unknown field {name!r}: {hint}")
        _check_type(name, value, hints[name], where)
    model_hints = typing.get_type_hints(HVTConfig)
    for name, value in overrides.items():
        if name not in FIELDS:
            raise HVTError(f"{where} has an unknown override {name!r}: {nearest(name, FIELDS)}")
        if isinstance(value, list):
            overrides[name] = value = tuple(value)
        _check_type(name, value, model_hints[name], where)
    return Recipe(**values, overrides=overrides)


def _check_type(name: str, value: Any, hint: Any, where: str) -> None:
    allowed = typing.get_args(hint) or (hint,)
    kinds = tuple(tuple if typing.get_origin(a) is tuple else a for a in allowed)
    if float in kinds:
        kinds += (int,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(getattr(k, "__name__", str(k)) for k in kinds)
        raise HVTError(f"{where}: {name} = {value!r} is not of type {wanted}")
