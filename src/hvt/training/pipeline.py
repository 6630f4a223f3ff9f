"""From a recipe to its model and its batches."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from timm.data import create_transform
from torchvision import transforms

from ..checkpoint.save_load import load, read
from ..config import HVTConfig
from ..costs import arrow
from ..data.augment import BatchAugment
from ..data.contact_sheet import draw_worst
from ..data.evaluation import SMALL, as_files, eval_batches, per_channel
from ..data.fingerprint import identity
from ..data.loader import EvalBatches, TrainBatches
from ..data.sources import ArrayImages, Data, open_data
from ..distributed import DistributedContext
from ..errors import HVTError
from ..evaluation import Mistake, evaluate
from ..model import HVT
from ..registry import create_model
from ..terminal import print_line
from .learner import Learner
from .recipe import Recipe
from .state import weights_digest


class Built(NamedTuple):
    """What a recipe starts from."""

    model: HVT
    data: Data
    weights: str
    """Where they are from, or what became of a checkpoint's classifier."""


def build_model(
    recipe: Recipe,
    keep_classifier: bool = False,
    described: dict[str, Any] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Built:
    """The data, and the model for its classes: new, from a checkpoint, or as a state describes it.

    A checkpoint's classifier is fitted to the data's classes by their names, unless it is to be
    kept.
    """
    _check_start(recipe)
    config = None
    if described is not None:
        config = HVTConfig.from_dict(described["config"])
    elif recipe.init is not None:
        config = read(recipe.init, recipe.overrides).config
    say(f"reading the data: {recipe.data}")
    data = _open_data(recipe, config)
    say(f"building the model: {recipe.model or recipe.init}")
    overrides = {**recipe.overrides, "num_classes": len(data.class_names)}
    if described is not None and config is not None:
        model = HVT(config)
        model.pretrained_cfg.update(described["pretrained_cfg"])
        return Built(model, data, "resumed")
    if recipe.init is None or config is None:
        model = create_model(str(recipe.model), pretrained=recipe.pretrained, **overrides)
        weights = "published weights" if recipe.pretrained else "new weights"
    else:
        model, weights = load(recipe.init, **overrides).float().train(), recipe.init
        if not keep_classifier:
            weights = _fit_classifier(model, config.num_classes, tuple(data.class_names))
    _describe_data(model, data)
    return Built(model, data, weights)


def _check_start(recipe: Recipe) -> None:
    """Raise an error unless a recipe names its data and one model or checkpoint."""
    if recipe.data is None:
        raise HVTError("no data is given: use --data with digits, cifar100 or a folder")
    if recipe.model is None and recipe.init is None:
        raise HVTError("no model is given: use --model (see hvt models) or --init CHECKPOINT")
    if recipe.model is not None and recipe.init is not None:
        raise HVTError(f"--model {recipe.model} and --init {recipe.init} are two models: name one")
    if recipe.init is not None and recipe.pretrained:
        raise HVTError(f"{recipe.init} has its own weights: leave --pretrained out, or use --model")


def _open_data(recipe: Recipe, config: HVTConfig | None) -> Data:
    assert recipe.data is not None
    data = open_data(
        recipe.data,
        root=recipe.root,
        val_fraction=recipe.val_fraction,
        holdout=recipe.holdout,
        train_fraction=recipe.train_fraction,
        seed=recipe.seed,
        download=recipe.download,
        in_chans=recipe.overrides.get("in_chans", config.in_chans if config else 3),
    )
    if not data.class_names:
        raise HVTError(
            f"{data.name} does not name its classes: put their names, one per line, into a file "
            "classes.txt beside the shards"
        )
    return data


def _describe_data(model: HVT, data: Data) -> None:
    """Note the data's classes, and how its images are prepared, in the model."""
    cfg, config = model.pretrained_cfg, model.config
    if not config.head_pool:
        raise HVTError(
            "global_pool='' leaves the tokens unpooled, so there are no logits to train: use avg, "
            "or token with a class token"
        )
    cfg["label_names"], cfg["num_classes"] = data.class_names, len(data.class_names)
    if config.image[0] <= SMALL:
        cfg["crop_pct"] = 1.0
    for name in ("mean", "std"):
        cfg[name] = per_channel(tuple(cfg[name]), config.in_chans)


def summary(recipe: Recipe, built: Built) -> str:
    """What is trained on what, in a line."""
    config, data = built.model.config, built.data
    return (
        f"{recipe.model or recipe.init} ({built.weights}): {config.image[0]}×{config.image[1]}, "
        f"tokens {arrow(list(config.tokens))}; {data.name}: {len(data.train)} training and "
        f"{len(data.val)} validation images, {len(data.class_names)} classes"
        + (" (held out of the training data)" if data.held_out else "")
    )


def identity_of(learner: Learner, data: Data) -> dict[str, str]:
    """What makes a run this one beside its recipe: classes, teacher and images."""
    found = {"classes": json.dumps(data.class_names)}
    if learner.teacher is not None:
        found["teacher's weights"] = weights_digest(learner.teacher)
    return found | identity(data)


def _fit_classifier(model: HVT, had: int, names: tuple[str, ...]) -> str:
    """Renew a checkpoint's classifier of `had` classes unless it is of these.

    One that names no classes may be of these, so it stays; as a start it does no harm.
    """
    if had == len(names):  # else it is new already
        if model.class_names in (None, names):
            return "its own classifier"
        model.reset_classifier(len(names))
    return "new classifier"


def fit_to_data(
    recipe: Recipe, data: Data, processes: int, say: Callable[[str], None] = lambda text: None
) -> Recipe:
    """The recipe with what it leaves to the number of images, and no larger batch than there are.

    A batch of 0 becomes a 32nd of them, from 16 to 64; then the warm-up is a tenth of the epochs at
    most, and the averaged weights are over a tenth of the steps at most.
    """
    images, unit = len(data.train), 2 * processes * recipe.accumulate
    size = recipe.batch_size or max(1, max(16, min(64, images // 32)) // unit) * unit
    most = images // unit * unit
    if 0 < most < size:
        if recipe.batch_size:
            say(
                f"batch_size={size} is more than the {images} training images: lowered to {most}, "
                "and the learning rate with it"
            )
        size = most
    fitted: dict[str, Any] = {
        "batch_size": size,
        "eval_every": recipe.eval_every or math.ceil(recipe.epochs / 5),
    }
    if recipe.batch_size == 0:
        steps = recipe.total_steps(max(1, images // size))
        fitted["warmup_epochs"] = min(recipe.warmup_epochs, recipe.epochs / 10)
        fitted["ema"] = max(0.0, min(recipe.ema, 1 - 10 / steps))
    return recipe.replace(**fitted)


def class_weights(recipe: Recipe, data: Data) -> torch.Tensor | None:
    """What each class counts in the loss, one on average over the images; None for equally much."""
    if not recipe.balance:
        return None
    labels = torch.as_tensor(data.train.labels)
    counts = torch.bincount(labels, minlength=len(data.class_names))
    return len(labels) / (len(counts) * counts.clamp(min=1)).float()


def open_batches(
    recipe: Recipe, model: HVT, data: Data, processes: DistributedContext, device: torch.device
) -> tuple[TrainBatches, EvalBatches]:
    """This process's batches to learn from and to measure by."""
    workers = reading_processes(recipe.workers, processes, device)
    height, width = model.config.image
    small = isinstance(data.train, ArrayImages) and height == width <= SMALL
    side = data.train.images.shape[1] if isinstance(data.train, ArrayImages) else None
    # timm's augmentations are PIL's, image by image; crops, flips and resizing alone need no PIL.
    by_image = recipe.rand_augment or recipe.color_jitter or recipe.erase
    augment: Any
    if small and not by_image:
        images: Any = data.train
        cfg, how = model.pretrained_cfg, recipe.interpolation
        mean, std = tuple(cfg["mean"]), tuple(cfg["std"])
        augment = BatchAugment(height, mean, std, recipe.padding, recipe.flip, how)
    else:
        images = as_files(data.train)
        augment = _augmentation(recipe, model, side if small else None)
    train = TrainBatches(
        images,
        augment,
        batch_size=recipe.batch_size,
        repeats=recipe.repeats,
        seed=recipe.seed,
        shard_of=(
            processes.rank * recipe.accumulate,
            recipe.accumulate,
            processes.world_size * recipe.accumulate,
        ),
        workers=workers,
        skip_broken=recipe.skip_broken,
        prefetch=device.type != "cpu",
        pin_memory=device.type == "cuda",
    )
    val = eval_batches(
        model,
        data.val,
        batch_size=min(256, max(16, recipe.batch_size // processes.world_size)),
        rank=processes.rank,
        world_size=processes.world_size,
        workers=workers,
        skip_broken=recipe.skip_broken,
    )
    return train, val


class Validation:
    """Top-1, top-5 and loss on the validation images."""

    def __init__(self, batches: EvalBatches, learner: Learner, console: Console) -> None:
        self.batches, self.learner, self.console = batches, learner, console
        self.worst: dict[int, tuple[Mistake, ...]] = {}
        self.images = len(batches.dataset) // batches.world_size

    def __call__(self, model: HVT) -> dict[str, float]:
        learner = self.learner
        classes, device, processes = model.num_classes, learner.device, learner.processes
        score = evaluate(model, self.batches, classes, device, processes, learner.amp)
        self.worst[id(model)] = score.worst
        if score.skipped and model is learner.model:
            print_line(self.console, f"{score.skipped} unreadable validation images were skipped")
        return {"loss": score.loss, "top1": score.top1, "top5": score.top5}

    def draw_worst(self, model: HVT, folder: Path) -> None:
        """What an evaluated model is most wrong about, as `worst.png`."""
        worst = self.worst.get(id(model), ())
        draw_worst(folder / "worst.png", self.batches.dataset, worst, model.class_names or ())

    def seconds(self, model: HVT) -> float:
        """What an evaluation will take, by the start of its readers and its first batches."""
        batches, began = iter(self.batches), time.perf_counter()
        sample = itertools.chain([next(batches)], itertools.islice(batches, 2))
        started = time.perf_counter() - began
        score = evaluate(
            model, sample, model.num_classes, self.learner.device, amp=self.learner.amp
        )
        return started + score.seconds * self.images / score.images


def reading_processes(workers: int, processes: DistributedContext, device: torch.device) -> int:
    """So many, or what the cores allow where it is -1."""
    if workers >= 0:
        return workers
    spare = (os.cpu_count() or 1) // processes.world_size - (device.type == "cpu")
    return max(1, min(8, spare))


_RAND_AUGMENT = re.compile(r"rand(-((m|mmax|n|inc)\d+|(mstd|p)\d+(\.\d*)?|t\w+))*")


def _augmentation(recipe: Recipe, model: HVT, side: int | None) -> Any:
    """timm's; small images, of `side` pixels, get padded crops instead of resized ones."""
    cfg, config, policy = model.pretrained_cfg, model.config, recipe.rand_augment
    try:
        if policy.startswith("rand") and not _RAND_AUGMENT.fullmatch(policy):
            raise ValueError  # timm ignores what it does not understand
        crop, colours, tensor = create_transform(
            (config.in_chans, *config.image),
            is_training=True,
            color_jitter=recipe.color_jitter,
            auto_augment=policy or None,
            interpolation=recipe.interpolation,
            hflip=recipe.flip,
            scale=(recipe.min_crop, 1.0),
            mean=cfg["mean"],
            std=cfg["std"],
            re_prob=recipe.erase,
            re_mode="pixel",
            separate=True,
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise HVTError(
            f"rand_augment={policy!r} is not one of timm's: write it as in rand-m9-mstd0.5-inc1"
        ) from error
    if side is not None:
        flip = transforms.RandomHorizontalFlip(recipe.flip)
        crop = transforms.Compose([transforms.RandomCrop(side, recipe.padding), flip])
        mode = transforms.InterpolationMode(recipe.interpolation)
        tensor.transforms.insert(0, transforms.Resize(config.image, mode))
    return transforms.Compose([crop, colours, tensor])
