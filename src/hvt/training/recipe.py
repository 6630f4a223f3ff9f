"""What a training is: one frozen dataclass, filled from a small file and from flags."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import FIELDS, HVTConfig, check_fields
from ..errors import HVTError, did_you_mean
from ..fields import MAX_THREADS, check_some, check_values, field
from ..zoo import get_config, is_config_file, read_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parents[1] / "recipes"
MAX_EPOCHS = 10**9
"""Epochs; with 1e308 of them the steps would have no number."""


@dataclass(frozen=True)
class Recipe:
    """All settings of a training; the defaults are DeiT's recipe, as in the paper."""

    model: str | None = field(
        None, "name of a model (hvt models) or .json config (hvt plan --save), instead of --init"
    )
    init: str | None = field(None, "checkpoint to start from: a path or a built-in name")
    pretrained: bool = field(False, "start from the published weights of the named model")
    data: str | None = field(None, "digits, cifar10, cifar100, imagenet or a folder")
    root: str | None = field(None, "folder that contains the named dataset")
    download: bool = field(False, "download the named dataset if missing")
    val_fraction: float = field(0.1, "validation fraction of a folder without splits", gt=0, lt=1)
    holdout: float = field(0.0, "validate on this fraction of the training data", ge=0, lt=1)
    train_fraction: float = field(
        1.0, "use this fraction of the training images of each class", gt=0, le=1
    )
    skip_broken: bool = field(False, "skip unreadable images and count them")
    output: str | None = field(None, "folder of the run (default: a new one in runs/)")

    epochs: float = field(
        300, "passes over the training data; fractions end within an epoch", gt=0, le=MAX_EPOCHS
    )
    minutes: float | None = field(
        None, "time limit in minutes; the learning rate follows the clock", gt=0
    )
    patience: int | None = field(None, "stop after this many evaluations without improvement", ge=1)
    batch_size: int = field(
        1024, "images per step over all processes; 0 chooses by the number of images", ge=0
    )
    accumulate: int = field(1, "gradient accumulation: microbatches per process and step", ge=1)
    optimizer: str = field(
        "adamw",
        "adamw, or muon, which learns more per step from few images",
        choices=("adamw", "muon"),
    )
    lr: float = field(5e-4, "learning rate for a batch of 512; scales with the batch", gt=0)
    warmup_lr: float = field(1e-6, "learning rate at the first step", ge=0)
    min_lr: float = field(1e-5, "learning rate at the last step", ge=0)
    warmup_epochs: float = field(5, "epochs of linear warm-up", ge=0, le=MAX_EPOCHS)
    weight_decay: float = field(0.025, "weight decay, not of biases, norms and positions", ge=0)
    layer_decay: float | None = field(None, "rate of a block relative to the next", gt=0, le=1)
    clip_grad: float | None = field(None, "maximum gradient norm", gt=0)
    freeze: int = field(0, "freeze the embedding and this many first blocks", ge=0)
    balance: bool = field(False, "weight classes equally, regardless of their number of images")

    smoothing: float = field(0.1, "label smoothing", ge=0, lt=1)
    mixup: float = field(0.8, "mixup alpha; 0 disables it", ge=0)
    cutmix: float = field(1.0, "CutMix alpha; 0 disables it", ge=0)
    mixup_prob: float = field(1.0, "probability that a batch is mixed", ge=0, le=1)
    mixup_switch: float = field(0.5, "probability of CutMix in a mixed batch", ge=0, le=1)
    rand_augment: str = field("rand-m9-mstd0.5-inc1", "timm's RandAugment policy; '' disables it")
    color_jitter: float = field(0.4, "colour jitter without RandAugment", ge=0)
    erase: float = field(0.25, "probability of random erasing", ge=0, le=1)
    repeats: int = field(3, "repeated augmentation: copies of an image in an epoch", ge=1)
    min_crop: float = field(0.08, "smallest area of a random crop", gt=0, le=1)
    flip: float = field(0.5, "probability of a horizontal flip", ge=0, le=1)
    padding: int = field(4, "padding of random crops, for images up to 64 pixels", ge=0)
    interpolation: str = field(
        "bicubic", "resizing: bicubic or bilinear", choices=("bicubic", "bilinear")
    )
    ema: float = field(0.99996, "EMA decay of the weights; 0 disables it", ge=0, lt=1)

    elastic: tuple[int, ...] | None = field(
        None, "train one elastic model with a setting per number of stages, such as 0,2,4", ge=0
    )

    teacher: str | None = field(None, "teacher to distil from: a checkpoint or a timm model's name")
    distill: str = field(
        "soft", "distillation with a teacher: soft or hard", choices=("soft", "hard")
    )
    distill_alpha: float = field(
        0.5, "weight of the teacher, or of the largest setting, against the labels", ge=0, le=1
    )
    distill_tau: float = field(3.0, "temperature of soft distillation", gt=0)

    device: str = field("auto", "auto, cpu, cuda, mps …")
    amp: str = field(
        "auto",
        "mixed precision: auto (bfloat16 on GPUs), off, bfloat16, float16",
        choices=("auto", "off", "bfloat16", "float16"),
    )
    compile: bool = field(False, "torch.compile the model")
    grad_checkpointing: bool = field(False, "recompute blocks in the backward pass")
    workers: int = field(-1, "reading processes; -1 chooses", ge=-1, le=MAX_THREADS)
    threads: int | None = field(None, "CPU threads per process", ge=1, le=MAX_THREADS)
    processes: int | None = field(
        None, "local CPU processes that share each batch (default: 1)", ge=1, le=MAX_THREADS
    )
    seed: int = field(0, "seed of weights, order, augmentation and splits", ge=0)
    eval_every: int = field(
        1, "epochs between evaluations, besides the last; 0 for a fifth of all", ge=0
    )
    checkpoint_minutes: float = field(10.0, "minutes between checkpoints within an epoch", ge=0)
    max_bad_steps: int = field(5, "stop after this many non-finite losses in a row", ge=1)
    tensorboard: bool = field(True, "write TensorBoard logs if it is installed")

    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `HVTConfig` to replace."""

    def __post_init__(self) -> None:
        check_values(self)
        for name in ("model", "init", "data", "root", "output", "teacher"):
            if getattr(self, name) == "":  # which would be the working folder
                raise HVTError(f"{name} is empty: name one, or leave it out")
        if self.elastic is not None and len(set(self.elastic)) < 2:
            raise HVTError(f"elastic={self.elastic} needs two numbers of stages, such as 0,2,4")
        check_fields(self.overrides)
        check_some(HVTConfig, self.overrides)

    @property
    def scaled_lr(self) -> float:
        """The learning rate for this batch: 5e-4 at 512 and in proportion."""
        return self.lr * self.batch_size / 512

    def total_steps(self, per_epoch: int) -> int:
        """Steps of the whole training; a last epoch of 0.4 has 0.4 times the steps of one."""
        return max(1, round(self.epochs * per_epoch))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def replace(self, overrides: dict[str, Any] | None = None, **values: Any) -> Recipe:
        """The same recipe with other values of its fields or the model's, which are merged.

        A config file describes the whole model, so it replaces the recipe's overrides.
        """
        values, fields = split_fields(_tuples(values))
        overrides = fields | _tuples(overrides or {})
        merged = self.overrides | overrides
        model = values.get("model", self.model)
        if isinstance(model, (str, Path)) and is_config_file(model):
            values["model"], merged = _from_file(model, overrides if "model" in values else merged)
        return dataclasses.replace(self, overrides=merged, **values)


RECIPE_FIELDS = tuple(f.name for f in dataclasses.fields(Recipe) if f.name != "overrides")


def list_recipes() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_recipe(name: str | Path) -> Recipe:
    """A built-in recipe by name, or a recipe file by path."""
    text = recipe_text(name)
    try:
        values = tomllib.loads(text)
    except ValueError as error:
        raise HVTError(f"the recipe {name} is not valid TOML: {error}") from error
    return from_dict(values, f"the recipe {name}")


def read_recipe(folder: str | Path) -> Recipe:
    """The recipe of a run."""
    described = Path(folder) / "recipe.json"
    try:
        values = dict(json.loads(described.read_bytes()))
    except (OSError, TypeError, ValueError) as error:
        raise HVTError(
            f"{described.parent} is not the folder of a run: it has no readable recipe.json"
        ) from error
    return from_dict(values, str(described))


def recipe_text(name: str | Path) -> str:
    """The file of a recipe, as it is written."""
    path = FOLDER / f"{name}.toml"
    if str(name) not in list_recipes():
        path = Path(name)
        if path.suffix != ".toml":
            raise HVTError(
                f"unknown recipe {str(name)!r}: {did_you_mean(str(name), list_recipes())} "
                "(or give the path of a .toml file)"
            )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", error)
        raise HVTError(f"cannot read the recipe {name}: {why}") from error


def from_dict(values: dict[str, Any], where: str) -> Recipe:
    """A recipe from plain values; a mistyped name is answered with the nearest right one."""
    overrides = values.get("overrides", {})
    if not isinstance(overrides, dict):
        raise HVTError(f"{where}: overrides={overrides!r} must be a table of the model's fields")
    try:
        return Recipe().replace(**values)
    except HVTError as error:
        raise HVTError(f"{where}: {error}") from error


def split_fields(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of a recipe's fields, and those of a model's."""
    known = (*RECIPE_FIELDS, *FIELDS)
    for name in values:
        if name not in known:
            raise HVTError(f"unknown field {name!r}: {did_you_mean(name, known)}")
    ours = {name: value for name, value in values.items() if name in RECIPE_FIELDS}
    return ours, {name: value for name, value in values.items() if name in FIELDS}


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """TOML, JSON and people have lists where fields are tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def _from_file(path: str | Path, overrides: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A config file as a named model and what tells the config from it.

    So a run that is resumed does not need the file.
    """
    config = read_config(path).replace(**overrides)
    name = "deit_s" if config.class_token else "hvt_s_0"
    named = get_config(name)
    fields = {field: getattr(config, field) for field in FIELDS if field != "num_classes"}
    return name, {k: value for k, value in fields.items() if value != getattr(named, k)}
