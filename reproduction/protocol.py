"""What each row of the paper trains, at the paper's own size or at one that suits two CPU cores.

A protocol is a recipe per dataset. `full` is the paper's: the recipes `cifar100` and `imagenet`.
`cpu` is ours: `cpu.toml`, whose model fields say what the paper's sizes become; any other recipe
file can stand in for it. `long` has the same models, trained for 10 to 300 epochs; `long.py` has
its parts.

    the paper's             in the CPU protocol
    224 pixels              the recipe's img_size (32); others in proportion, rounded up to whole
                            patches: 160, 320, 384 become 24, 48, 56
    patches of 16           the recipe's patch_size (4); 8 and 32 become 2 and 8
    heads of 64 channels    the recipe's head_dim (12); the number of heads is as printed
    12 blocks               the recipe's depth (6); 16, 20, 24 in proportion: 8, 10, 12
    M stages                as printed, but a pooling that would leave fewer than two tokens is left
                            out, as attention needs two
    1000 or 100 classes     those of the data

Each row can be trained under two budgets. `epochs`: as many passes over the data for all rows, as
the paper has it. `compute`: as many MACs for all rows, those that the recipe's own model
takes in the recipe's epochs, so that a cheap model sees more images. Figure 4's rows have only
epochs, in the CPU protocol three times those of a table.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from hvt.config import HVTConfig
from hvt.costs import cost
from hvt.errors import HVTError, did_you_mean
from hvt.paper.tables import PaperRow, PaperTable
from hvt.training.recipe import Recipe, load_recipe
from hvt.zoo import get_config

from .rows import FIGURE4

BUDGETS = ("epochs", "compute")
"""What is equal for all rows: passes over the data, or MACs of training."""

FILES = {name: Path(__file__).parent / f"{name}.toml" for name in ("cpu", "long")}

# Classes and training images, so that a plan needs no data.
SOURCES = {
    "cifar10": (10, 50_000),
    "cifar100": (100, 50_000),
    "digits": (10, 1_438),
    "imagenet": (1000, 1_281_167),
}

SEEDS = {"main": (0, 1, 2)}
"""Seeds of a table's rows by default; the other tables have one."""

CURVE_EPOCHS = {"cpu": 3}
"""Figure 4's epochs over a table's, where these are too few for a curve."""

SAME = 0.03
"""Costs that differ by less count as equal: both budgets share a training."""

# The paper's size of each field that a protocol scales.
_PAPER = {"img_size": 224, "patch_size": 16, "head_dim": 64, "depth": 12}

# What changes neither the model nor what it learns, beyond rounding.
_NO_EFFECT = (
    "model", "overrides", "root", "download", "output", "seed", "device", "amp", "compile",
    "grad_checkpointing", "accumulate", "workers", "threads", "processes", "eval_every",
    "checkpoint_minutes", "max_bad_steps", "tensorboard", "skip_broken", "val_fraction",
)  # fmt: skip


@dataclass(frozen=True)
class Protocol:
    """A name and a recipe for each dataset that rows can be trained on."""

    name: str
    recipes: dict[str, Recipe]

    def data_of(self, table: PaperTable, asked: str | None = None) -> str:
        """The dataset for a table: the one asked for, or the first with a figure for all rows."""
        if asked is not None:
            if asked not in self.recipes:
                hint = did_you_mean(asked, self.recipes)
                raise HVTError(f"the protocol {self.name} has no data {asked!r}: {hint}")
            return asked
        known = [data for data in self.recipes if all(data in row.top1 for row in table.rows)]
        return (known or list(self.recipes))[0]


def load_protocol(name: str, file: str | Path | None = None) -> Protocol:
    """A protocol by name; a recipe file can stand in for its recipes."""
    if file is None and name == "full":
        return Protocol(name, {data: load_recipe(data) for data in ("cifar100", "imagenet")})
    file = file or FILES.get(name, FILES["cpu"])
    recipe = load_recipe(file)
    if recipe.data not in SOURCES or recipe.model is None:
        raise HVTError(
            f"{file} is not a protocol: it must name a model, whose cost is the compute "
            f"budget, and data, one of {', '.join(SOURCES)}"
        )
    return Protocol(name, {recipe.data: recipe})


# ── what a row becomes ──────────────────────────────────────────────────────────────────────────


def adapt(config: HVTConfig, recipe: Recipe) -> HVTConfig:
    """The paper's config at the recipe's size."""
    assert recipe.data is not None
    small, patch = recipe.overrides, _scaled(config, recipe, "patch_size")
    fields = {k: v for k, v in small.items() if k not in _PAPER} | {
        "num_classes": SOURCES[recipe.data][0],
        "img_size": math.ceil(_scaled(config, recipe, "img_size") / patch) * patch,
        "patch_size": patch,
        "head_dim": small.get("head_dim", config.head_dim),
        "depth": (depth := _scaled(config, recipe, "depth")),
    }
    if not config.stages:
        return config.replace(**fields)
    # As in the paper; with fewer blocks than stages, some stages have none.
    blocks = sorted({stage * depth // config.stages for stage in range(config.stages)})
    for kept in range(len(blocks), 0, -1):
        try:
            pooled = config.replace(**fields, pool_after=tuple(blocks[:kept]))
        except HVTError:  # no token left
            continue
        if pooled.tokens[-1] - pooled.num_prefix_tokens >= 2:
            even = kept == config.stages and depth % config.stages == 0
            return config.replace(**fields) if even else pooled
    return config.replace(**fields, stages=0)


def _scaled(config: HVTConfig, recipe: Recipe, name: str) -> int:
    """A field of the paper in proportion to the protocol's."""
    own, paper = recipe.overrides.get(name, _PAPER[name]), getattr(config, name)
    size = Fraction(paper * own, _PAPER[name])
    if size.denominator > 1 and name != "img_size":
        raise HVTError(
            f"{name}={paper} of the paper would become {float(size):g} with the protocol's "
            f"{name}={own}: choose one that scales to whole numbers"
        )
    return math.ceil(size)


# ── trainings and budgets ───────────────────────────────────────────────────────────────────────


@functools.cache
def macs_of(config: HVTConfig) -> int:
    """MACs per image; a plan of all tables asks for the same few again and again."""
    return cost(config).macs


@dataclass(frozen=True)
class PowerSteps:
    """What DeiT with PoWER needs beside DeiT itself, whose epochs are the recipe's."""

    share: float
    """Of DeiT's MACs that are to be left, as in the paper."""
    search: float
    """Epochs that look for how many tokens each block keeps."""
    retrain: float
    """Epochs with that many tokens."""
    method: int = 2
    """Of the search. A change that gives other results takes the next number, so that the results
    of the old one are not mistaken for its own; 1 multiplied tokens before the norms."""


@dataclass(frozen=True)
class Training:
    """One thing to train, which rows of several tables may share."""

    config: HVTConfig
    recipe: Recipe
    """With the model, its overrides and the epochs; the seed is the run's."""
    power: PowerSteps | None = None

    @property
    def base(self) -> Training:
        """Without PoWER: the DeiT that it starts from."""
        return Training(self.config, self.recipe)

    @property
    def images(self) -> int:
        """Training images of an epoch: whole batches, of a size that the data can fill."""
        recipe = self.recipe
        assert recipe.data is not None
        share = (1 - recipe.holdout) * recipe.train_fraction
        images, unit = round(SOURCES[recipe.data][1] * share), 2 * recipe.accumulate
        batch = max(1, min(recipe.batch_size, images // unit * unit))
        return images // batch * batch

    @property
    def epochs(self) -> float:
        """Of all steps together."""
        steps = self.power
        return round(self.recipe.epochs + (steps.search + steps.retrain if steps else 0), 3)

    @property
    def training_macs(self) -> float:
        """MACs of the whole training; a step has three times those of its forward pass."""
        epochs = float(self.recipe.epochs)
        if self.power:
            epochs += self.power.search + self.power.share * self.power.retrain
        return 3 * macs_of(self.config) * epochs * self.images

    @functools.cached_property
    def key(self) -> str:
        """A name that is the same for the same training, on any machine; without the seed.

        Only what differs from the defaults counts, so a new field changes no name.
        """
        config, recipe = self.config, _unlike(self.recipe, Recipe())
        identity = {
            "config": _unlike(config, HVTConfig()),
            "recipe": {name: recipe[name] for name in recipe if name not in _NO_EFFECT},
            "power": dataclasses.asdict(self.power) if self.power else None,
        }
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
        kind = "power" if self.power else "deit" if config.class_token else "hvt"
        size = f"w{config.width}_l{config.depth}_m{len(config.pool_blocks)}_n{config.tokens[0]}"
        return f"{kind}_{size}-{self.epochs:g}ep-{digest}"


def _unlike(value: Any, plain: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from another one's."""
    fields = dataclasses.asdict(value)
    return {k: v for k, v in fields.items() if v != getattr(plain, k)}


def plan(protocol: Protocol, row: PaperRow, budget: str, data: str) -> Training:
    """What to train for a row under a budget."""
    recipe = protocol.recipes[data]
    if row.table == FIGURE4:
        times, budget = CURVE_EPOCHS.get(protocol.name, 1), "epochs"
        recipe = dataclasses.replace(recipe, epochs=times * recipe.epochs)
    if budget == "epochs":
        return training_of(row, recipe, recipe.epochs)
    assert recipe.model is not None
    ratio = macs_of(adapt(get_config(recipe.model), recipe)) / macs_of(config_of(row, recipe))
    epochs = recipe.epochs if abs(ratio - 1) < SAME else recipe.epochs * ratio
    # PoWER's three parts together have DeiT's budget.
    return training_of(row, recipe, 0.6 * epochs if row.power else epochs)


def config_of(row: PaperRow, recipe: Recipe) -> HVTConfig:
    """A row's model at the recipe's size; PoWER's starts as a DeiT."""
    return adapt(get_config(row.model.removesuffix("_power"), **row.overrides), recipe)


def training_of(row: PaperRow, recipe: Recipe, epochs: float) -> Training:
    """A row trained by a recipe; PoWER's search and its retraining have a third of the epochs each.

    The recipe's overrides are what tells the config from the named model.
    """
    model, config = row.model.removesuffix("_power"), config_of(row, recipe)
    overrides = {k: v for k, v in _unlike(config, get_config(model)).items() if k != "num_classes"}
    length = round(epochs, 3)
    length = int(length) if length == int(length) else length  # 4.0 would make another key than 4
    own = dataclasses.replace(recipe, model=model, overrides=overrides, epochs=length)
    if not row.power:
        return Training(config, own)
    share, extra = row.gflops / cost(model, num_classes=1000).gflops, round(epochs / 3, 3)
    return Training(config, own, PowerSteps(round(share, 4), extra, extra))
