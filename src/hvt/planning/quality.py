"""Which of two models is likely to be more accurate: a ridge regression on short trainings.

Its features are the shape of a model: width, depth, patches and how they are pooled. It was fitted
by `benchmarks/fit_quality.py` to short trainings of small models. Beyond the range of those, larger
values are clipped and smaller ones penalised. It ranks the configs of one budget, roughly, and does
not predict an accuracy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..config import HVTConfig
from ..costs import cost

FILE = Path(__file__).with_name("quality.json")

MEASURES = ("width", "depth", "patches", "pooled")
"""Logarithms of the width, of the depth and of the number of patches, and of the factor by which
pooling reduces the patches of a block on average. The square of each is a feature too."""
EXTRAPOLATION_PENALTY = 5.0
"""Points that a config loses for each factor of e by which it is smaller, or pooled more, than the
training data: a conservative guess, for only clipping them would make such configs free."""


@dataclass(frozen=True)
class Quality:
    """A fitted regression, as `quality.json` stores it."""

    features: list[str]
    weights: list[float]
    """Per feature, in points of top-1, of standardised features."""
    mean: list[float]
    scale: list[float]
    low: dict[str, float]
    high: dict[str, float]
    """The range of each measure in the training data."""
    max_gflops: float
    """Of the largest model in the training data."""
    intercept: float
    penalty: float
    rank_correlation: float
    """Spearman's, of cross-validated predictions, leaving one config out at a time."""
    error: float
    """Root mean square error of these predictions, in points of top-1."""
    configurations: int
    trainings: int
    about: str
    runs: list[dict[str, Any]] = field(default_factory=list)

    def score(self, measures: Mapping[str, Any], flags: Mapping[str, Any]) -> Any:
        """Top-1 after one epoch in per cent, by numbers or arrays that broadcast."""
        clipped = {
            name: np.clip(value, self.low[name], self.high[name])
            for name, value in measures.items()
        }
        values = features_of(clipped, flags)
        terms: list[tuple[str, Any]] = [("intercept", self.intercept)]
        for name, weight, mean, scale in zip(
            self.features, self.weights, self.mean, self.scale, strict=True
        ):
            terms.append((name, weight * (values[name] - mean) / scale))
        for name in MEASURES:
            beyond = measures[name] - clipped[name]
            beyond = np.maximum(beyond if name == "pooled" else -beyond, 0.0)
            terms.append((name, -EXTRAPOLATION_PENALTY * beyond))
        # Widths are an axis of their own in large arrays, which is added last.
        width = sum(term for name, term in terms if name.startswith("width"))
        return sum(term for name, term in terms if not name.startswith("width")) + width

    def summary(self) -> str:
        """How good the ranking is, in one line."""
        return (
            f"Order: a regression on {self.trainings} short trainings of {self.configurations} "
            f"small models ({self.about}); rank correlation in cross-validation "
            f"{self.rank_correlation:.2f}. A hint, not a measurement: short trainings favour "
            "shallow models."
        )


@cache
def load_quality() -> Quality:
    """The regression that comes with the package."""
    return Quality(**json.loads(FILE.read_text(encoding="utf-8")))


# ── features of a config ────────────────────────────────────────────────────────────────────────


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
    """2D pooling, a class token, and pooling other than by the maximum."""
    pools = bool(config.pool_blocks)
    return {
        "grid": float(pools and config.pool_dims == 2),
        "class_token": float(config.class_token),
        "average": float(pools and config.pool == "avg"),
        "convolution": float(pools and config.pool == "conv"),
    }


def features_of(measures: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """All features of the regression: measures, their squares, flags."""
    squares = {f"{name}²": measures[name] ** 2 for name in MEASURES}
    return {**measures, **squares, **flags}
