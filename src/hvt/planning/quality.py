"""Which of two models learns more: a ridge regression on trainings, with the runs it came from.

It knows the shape of a model alone: its width, its depth, its patches and how they are pooled. It
was fitted to short trainings of small models. What is larger than these counts as the largest that
was seen, and what is smaller, or pooled more, loses a little more than that. So it orders the
configs of one budget, roughly, and predicts no accuracy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import HVTConfig
from ..costs import cost
from ..files import atomic_write

FILE = Path(__file__).with_name("quality.json")

Floats = NDArray[np.float64]

MEASURES = ("width", "depth", "patches", "pooled")
"""Logarithms of the width, of the depth and of the patches at first, and by how much fewer of them
a block sees on average. Each has a square too, for a best value in between."""
FLAGS = ("grid", "class_token", "average", "convolution")
"""2D pooling, a class token, and other kinds of pooling than the maximum."""
EXTRAPOLATED = 5.0
"""Points that a config loses for each factor of e by which it is below what was seen: a guess, to
the safe side, where the nearest that was seen would be a free lunch."""
PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Run:
    """One training, or the mean of several that differ in their seed."""

    config: HVTConfig
    epochs: float
    top1: float
    source: str
    """The training's key, or the study's and the trial's."""
    seeds: int = 1
    search: bool = False


@dataclass(frozen=True)
class Quality:
    """A fitted regression; everything that `quality.json` has."""

    features: list[str]
    weights: list[float]
    """Per feature, in points of top-1; the features are centred and scaled first."""
    mean: list[float]
    scale: list[float]
    low: dict[str, float]
    high: dict[str, float]
    """The range of each measure in the trainings."""
    intercept: float
    penalty: float
    rank_correlation: float
    """Spearman's, of predictions for configs that were left out of the fit one by one."""
    error: float
    """Root mean square of these predictions, in points of top-1."""
    configurations: int
    trainings: int
    about: str
    runs: list[dict[str, Any]] = field(default_factory=list)

    def score(self, measures: Mapping[str, Any], flags: Mapping[str, Any]) -> Any:
        """Points of top-1 in a training of one epoch, by numbers or arrays that broadcast."""
        clipped = {
            name: np.clip(value, self.low[name], self.high[name])
            for name, value in measures.items()
        }
        total: Any = self.intercept
        of_width: Any = 0.0
        for name in MEASURES:
            away = measures[name] - clipped[name]
            lost = EXTRAPOLATED * np.maximum(away if name == "pooled" else -away, 0.0)
            if name == "width":
                of_width = of_width - lost
            else:
                total = total - lost
        values = _values(clipped, flags)
        for name, weight, mean, scale in zip(
            self.features, self.weights, self.mean, self.scale, strict=True
        ):
            term = weight * (values[name] - mean) / scale
            if name.startswith("width"):  # an axis of its own where there are many: added last
                of_width = of_width + term
            else:
                total = total + term
        return total + of_width

    def outside(self, measures: Mapping[str, float]) -> list[str]:
        """The measures of a config that no training had."""
        slack = 1e-9
        return [
            name
            for name, value in measures.items()
            if not self.low[name] - slack <= value <= self.high[name] + slack
        ]

    def sentence(self) -> str:
        """How good the order is, in one line."""
        return (
            f"Order: a regression on {self.trainings} short trainings of {self.configurations} "
            f"small models ({self.about}); rank correlation on configurations left out "
            f"{self.rank_correlation:.2f}. A hint, not a measurement: short trainings favour few "
            "blocks."
        )


@cache
def load_quality() -> Quality:
    """The regression that comes with the package."""
    return Quality(**json.loads(FILE.read_text(encoding="utf-8")))


def save_quality(quality: Quality, path: Path = FILE) -> None:
    with atomic_write(path) as temporary:
        text = json.dumps(asdict(quality), indent=1, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")


# ── what the regression knows of a config ───────────────────────────────────────────────────────


def measures_of(config: HVTConfig) -> dict[str, float]:
    """The measures of one config."""
    prefix = config.num_prefix_tokens
    seen = [math.log(n - prefix) for n, _ in cost(config).blocks()]
    patches = math.log(config.tokens[0] - prefix)
    return {
        "width": math.log(config.width),
        "depth": math.log(config.depth),
        "patches": patches,
        "pooled": patches - sum(seen) / len(seen),
    }


def flags_of(config: HVTConfig) -> dict[str, float]:
    """The flags of one config; those of a pooling count where there is one."""
    pools = bool(config.pool_blocks)
    return {
        "grid": float(pools and config.pool_dims == 2),
        "class_token": float(config.class_token),
        "average": float(pools and config.pool == "avg"),
        "convolution": float(pools and config.pool == "conv"),
    }


def _values(measures: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    squares = {f"{name}²": measures[name] ** 2 for name in MEASURES}
    return {**measures, **squares, **flags}


# ── the fit ─────────────────────────────────────────────────────────────────────────────────────


def fit(runs: Sequence[Run], about: str) -> Quality:
    """Fit the regression; its penalty is the one with the least error on configs left out."""
    rows = [
        _values(measures_of(run.config), flags_of(run.config))
        | {
            "epochs": math.log(run.epochs),
            "epochs²": math.log(run.epochs) ** 2,
            "search": float(run.search),
        }
        for run in runs
    ]
    features = [
        name
        for name in (*rows[0],)
        if len({round(row[name], 12) for row in rows})
        > 1  # a column that never varies says nothing
    ]
    x = np.array([[row[name] for name in features] for row in rows])
    y = np.array([run.top1 for run in runs])
    groups = [run.config.replace(num_classes=1, drop_path_rate=0.0) for run in runs]
    predictions = {penalty: _left_out(x, y, groups, penalty) for penalty in PENALTIES}
    errors = {p: float(np.sqrt(np.mean((guess - y) ** 2))) for p, guess in predictions.items()}
    penalty = min(errors, key=lambda p: errors[p])
    mean, scale, weights, intercept = _ridge(x, y, penalty)
    at_one = {"epochs": 0.0, "epochs²": 0.0, "search": 0.0}
    # Among trainings of one length, for a longer one learns more whatever the model.
    spans = [(run.epochs, run.search) for run in runs]
    common = max(set(spans), key=spans.count)
    alike = np.array([span == common for span in spans])
    measured = {name: [measures_of(run.config)[name] for run in runs] for name in MEASURES}
    offset = sum(
        weights[features.index(name)]
        * (value - mean[features.index(name)])
        / scale[features.index(name)]
        for name, value in at_one.items()
        if name in features
    )
    kept = [index for index, name in enumerate(features) if name not in at_one]
    return Quality(
        features=[features[index] for index in kept],
        weights=[float(weights[index]) for index in kept],
        mean=[float(mean[index]) for index in kept],
        scale=[float(scale[index]) for index in kept],
        low={name: min(values) for name, values in measured.items()},
        high={name: max(values) for name, values in measured.items()},
        intercept=float(intercept + offset),
        penalty=penalty,
        rank_correlation=spearman(predictions[penalty][alike], y[alike]),
        error=errors[penalty],
        configurations=len(set(groups)),
        trainings=sum(run.seeds for run in runs),
        about=about,
        runs=[
            {"source": run.source, "epochs": run.epochs, "top1": round(run.top1, 3)}
            | ({"seeds": run.seeds} if run.seeds > 1 else {})
            for run in runs
        ],
    )


def _left_out(x: Floats, y: Floats, groups: Sequence[HVTConfig], penalty: float) -> Floats:
    """Predictions for each config by a fit that saw none of its trainings."""
    guesses = np.zeros_like(y)
    for group in set(groups):
        out = np.array([other == group for other in groups])
        mean, scale, weights, intercept = _ridge(x[~out], y[~out], penalty)
        guesses[out] = (x[out] - mean) / scale @ weights + intercept
    return guesses


def _ridge(x: Floats, y: Floats, penalty: float) -> tuple[Floats, Floats, Floats, float]:
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale[scale < 1e-12] = 1.0
    z = (x - mean) / scale
    gram = z.T @ z + penalty * np.eye(x.shape[1])
    return mean, scale, np.linalg.solve(gram, z.T @ (y - y.mean())), float(y.mean())


def spearman(a: Floats, b: Floats) -> float:
    """The correlation of ranks; equal values share theirs."""
    first, second = ([float(np.sum(v < x) + np.sum(v <= x)) for x in v] for v in (a, b))
    return float(np.corrcoef(first, second)[0, 1])
