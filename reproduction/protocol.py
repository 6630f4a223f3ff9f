"""What each row of the paper trains, at the paper's own size or at one that suits two CPU cores.

A protocol is a recipe per data set. `full` is the paper's: the recipes `cifar100` and `imagenet`.
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
the paper has it. `compute`: as many multiply-adds for all rows, those that the recipe's own model
takes in the recipe's epochs, so that a cheap model sees more images. Figure 4's rows have
epochs alone, in the CPU protocol three times those of a table.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvt.config import HVTConfig
from hvt.costs import cost
from hvt.errors import HVTError, did_you_mean
from hvt.paper.tables import Row, Table
from hvt.training.recipe import Recipe, load_recipe
from hvt.zoo import get_config

from .rows import FIGURE4

BUDGETS = ("epochs", "compute")
"""Two readings of a table: equal passes over the data, or equal multiply-adds of training."""

FILES = {name: Path(__file__).parent / f"{name}.toml" for name in ("cpu", "long")}
PROTOCOLS = (*FILES, "full")

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

TRAINING = 3
"""Multiply-adds of a training step over those of its forward pass: once forward, twice backward."""

SAME = 0.03
"""Costs that differ by less are one: the row's two readings share a training."""

# The paper's size of each field that a protocol scales.
_PAPER = {"img_size": 224, "patch_size": 16, "head_dim": 64, "depth": 12}

# What a recipe in place of a protocol's may not set.
_OF_ROWS = (
    "num_heads", "embed_dim", "stages", "pool_after", "pool", "pool_dims",
    "class_token", "global_pool", "retention", "merge", "num_classes",
)  # fmt: skip
_OF_WEIGHTS = ("init", "pretrained", "holdout")

# What changes neither the model nor what it learns, beyond rounding.
_NO_EFFECT = (
    "model", "overrides", "root", "download", "output", "seed", "device", "amp", "compile",
    "grad_checkpointing", "accumulate", "workers", "threads", "processes", "eval_every",
    "checkpoint_minutes", "max_bad_steps", "tensorboard", "skip_broken", "val_fraction",
)  # fmt: skip


@dataclass(frozen=True)
class Protocol:
    """A name and a recipe for each data set that rows can be trained on."""

    name: str
    recipes: dict[str, Recipe]

    def data_of(self, table: Table, asked: str | None = None) -> str:
        """The data set for a table: the one asked for, or the first with a figure for all rows."""
        if asked is not None:
            if asked not in self.recipes:
                hint = did_you_mean(asked, self.recipes)
                raise HVTError(f"the protocol {self.name} has no data {asked!r}: {hint}")
            return asked
        known = [data for data in self.recipes if all(data in row.top1 for row in table.rows)]
        return (known or list(self.recipes))[0]


def load_protocol(name: str, file: str | Path | None = None) -> Protocol:
    """A protocol by name; a recipe file can stand in for its recipes."""
    if name not in PROTOCOLS:
        raise HVTError(f"unknown protocol {name!r}: {did_you_mean(name, PROTOCOLS)}")
    if file is None and name == "full":
        return Protocol(name, {data: load_recipe(data) for data in ("cifar100", "imagenet")})
    file = file or FILES.get(name, FILES["cpu"])
    recipe = load_recipe(file)
    if recipe.data not in SOURCES or recipe.model is None:
        raise HVTError(
            f"{file} is not a protocol: it must name a model, whose cost is the compute "
            f"budget, and data, one of {', '.join(SOURCES)}"
        )
    taken = [field for field in (*_OF_ROWS, *_OF_WEIGHTS) if _sets(recipe, field)]
    if taken:
        raise HVTError(
            f"{file} is not a protocol: it sets {taken[0]}, which "
            + (
                "is what the tables' rows differ in"
                if taken[0] in _OF_ROWS
                else "every row has alike, from new weights and tested on the test images"
            )
        )
    return Protocol(name, {recipe.data: recipe})


def _sets(recipe: Recipe, field: str) -> bool:
    if field in _OF_ROWS:
        return field in recipe.overrides
    return bool(getattr(recipe, field) != getattr(Recipe(), field))


# ── what a row becomes ──────────────────────────────────────────────────────────────────────────


def adapt(config: HVTConfig, recipe: Recipe) -> HVTConfig:
    """The paper's config at the recipe's size."""
    small = recipe.overrides
    assert recipe.data is not None
    patch = _scaled(config, small, "patch_size")
    side = _scaled(config, small, "img_size")
    depth = _scaled(config, small, "depth")
    if depth % 1 or patch % 1:
        name, value = ("depth", depth) if depth % 1 else ("patch_size", patch)
        raise HVTError(
            f"{name}={getattr(config, name)} of the paper would become {value:g} with the "
            f"protocol's {name}={small[name]}: choose one that scales to whole numbers"
        )
    fields = {k: v for k, v in small.items() if k not in _PAPER} | {
        "num_classes": SOURCES[recipe.data][0],
        "img_size": math.ceil(side / patch) * int(patch),
        "patch_size": int(patch),
        "head_dim": small.get("head_dim", config.head_dim),
        "depth": int(depth),
    }
    if not config.stages:
        return config.replace(**fields)
    blocks = _even(config.stages, int(depth))
    for kept in range(len(blocks), 0, -1):
        try:
            pooled = config.replace(**fields, pool_after=blocks[:kept])
        except HVTError:  # no token left
            continue
        if pooled.tokens[-1] - pooled.num_prefix_tokens >= 2:
            even = kept == config.stages and depth % config.stages == 0
            return config.replace(**fields) if even else pooled
    return config.replace(**fields, stages=0)


def _even(stages: int, depth: int) -> tuple[int, ...]:
    """Blocks to pool after, as in the paper; with fewer blocks than stages, some stages have none.

    >>> _even(4, 12), _even(4, 3)
    ((0, 3, 6, 9), (0, 1, 2))
    """
    return tuple(sorted({stage * depth // stages for stage in range(stages)}))


def _scaled(config: HVTConfig, small: dict[str, Any], name: str) -> float:
    """A field of the paper in proportion to the protocol's."""
    return float(getattr(config, name) * small.get(name, _PAPER[name]) / _PAPER[name])


# ── trainings and budgets ───────────────────────────────────────────────────────────────────────


@functools.cache
def macs_of(config: HVTConfig) -> int:
    """Multiply-adds of one image; a plan of all tables asks for the same few again and again."""
    return cost(config).macs


@dataclass(frozen=True)
class PowerSteps:
    """What DeiT with PoWER needs beside DeiT itself, whose epochs are the recipe's."""

    share: float
    """Of DeiT's multiply-adds that are to be left, as in the paper."""
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
    def image_macs(self) -> float:
        """MACs per image, of forward passes only, over all epochs."""
        epochs = float(self.recipe.epochs)
        if self.power:
            epochs += self.power.search + self.power.share * self.power.retrain
        return macs_of(self.config) * epochs

    @property
    def training_macs(self) -> float:
        """Multiply-adds of the whole training."""
        return TRAINING * self.image_macs * self.images

    @functools.cached_property
    def key(self) -> str:
        """A name that is the same for the same training, on any machine; without the seed.

        Only what differs from the defaults counts, so a new field changes no name.
        """
        recipe, plain = self.recipe, Recipe()
        identity = {
            "config": _unlike(self.config, HVTConfig()),
            "recipe": {
                name: value
                for name, value in _unlike(recipe, plain).items()
                if name not in _NO_EFFECT
            },
            "power": dataclasses.asdict(self.power) if self.power else None,
        }
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
        config = self.config
        kind = "power" if self.power else "deit" if config.class_token else "hvt"
        size = f"w{config.width}_l{config.depth}_m{len(config.pool_blocks)}_n{config.tokens[0]}"
        return f"{kind}_{size}-{self.epochs:g}ep-{digest}"


def _unlike(value: Any, plain: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from another one's."""
    fields = dataclasses.asdict(value)
    return {k: v for k, v in fields.items() if v != getattr(plain, k)}


@dataclass(frozen=True)
class Plan:
    """A row in one reading."""

    row: Row
    budget: str
    training: Training
    ratio: float
    """What is spent over what the budget allows: near 1, and for PoWER's three parts 0.9."""


def plan(protocol: Protocol, row: Row, budget: str, data: str) -> Plan:
    """What to train for a row in one reading."""
    if budget not in BUDGETS:
        raise HVTError(f"unknown budget {budget!r}: {did_you_mean(budget, BUDGETS)}")
    recipe = protocol.recipes[data]
    if row.table == FIGURE4:
        times = CURVE_EPOCHS.get(protocol.name, 1)
        recipe = dataclasses.replace(recipe, epochs=times * recipe.epochs)
        budget = "epochs"
    config = adapt(get_config(row.model.removesuffix("_power"), **row.overrides), recipe)
    assert recipe.model is not None
    budget_macs = recipe.epochs * macs_of(adapt(get_config(recipe.model), recipe))
    epochs = recipe.epochs
    if budget == "compute" and abs(budget_macs / macs_of(config) / epochs - 1) >= SAME:
        epochs = budget_macs / macs_of(config)
    if row.power:  # at equal compute its three parts together have DeiT's budget
        training = power_training(
            row, config, recipe, epochs if budget == "epochs" else 0.6 * epochs
        )
    else:
        training = training_of(row.model, config, recipe, round(epochs, 3))
    if budget == "epochs":
        return Plan(row, budget, training, 1.0)
    return Plan(row, budget, training, training.image_macs / budget_macs)


def training_of(model: str, config: HVTConfig, recipe: Recipe, epochs: float) -> Training:
    """The recipe of one config: its overrides are what tells it from the named model."""
    named = get_config(model)
    overrides = {k: v for k, v in _unlike(config, named).items() if k != "num_classes"}
    whole = int(epochs) if epochs == int(epochs) else epochs  # 4.0 would make another key than 4
    own = dataclasses.replace(recipe, model=model, overrides=overrides, epochs=whole)
    return Training(config, own)


def power_training(row: Row, config: HVTConfig, recipe: Recipe, base: float) -> Training:
    """DeiT with `base` epochs, and a third of them each for the search and after it."""
    share = row.gflops / cost(row.model.removesuffix("_power"), num_classes=1000).gflops
    extra = round(base / 3, 3)
    deit = training_of(row.model.removesuffix("_power"), config, recipe, round(base, 3))
    return dataclasses.replace(deit, power=PowerSteps(round(share, 4), extra, extra))
