"""Fit the regression by which `hvt plan` ranks configs, and report how good it is.

    python benchmarks/fit_quality.py
    python benchmarks/fit_quality.py --study benchmarks/results/search/trials.csv

reads the trainings of the paper's rows and the trials of `hvt search`, and writes
`src/hvt/planning/quality.json`. `--check` writes nothing and exits 1 if the file is stale.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from sklearn.linear_model import Ridge
from sklearn.model_selection import LeaveOneGroupOut, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from hvt.config import HVTConfig
from hvt.costs import cost
from hvt.files import atomic_write
from hvt.planning.quality import FILE, MEASURES, Quality, features_of, flags_of, measures_of

HERE = Path(__file__).parent
PAPER = HERE / "results/paper/cpu"
STUDIES = HERE / "results/search"
PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
NUISANCE = {"epochs": 0.0, "epochs²": 0.0, "search": 0.0}
"""Features of a training rather than of a model, with the value at which models are compared."""


@dataclass(frozen=True)
class TrainingRun:
    """One training, or the mean of several that differ in their seed."""

    config: HVTConfig
    epochs: float
    top1: float
    source: str
    """The training's key, or the study and the trial."""
    seeds: int = 1
    search: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the regression behind hvt plan's ranking.")
    parser.add_argument("--paper", type=Path, default=PAPER, help="results of the paper's rows")
    parser.add_argument(
        "--study",
        type=Path,
        action="append",
        help="trials.csv of hvt search (default: those in results/search)",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it is stale")
    args = parser.parse_args()
    paper = list(paper_runs(args.paper))
    if not paper:
        sys.exit(f"{args.paper} has no results of the paper's rows: name their folder by --paper")
    studies = args.study or sorted(STUDIES.glob("*.csv"))
    runs = [*paper, *(run for path in studies for run in study_runs(path))]
    quality = fit(runs, "CIFAR-100, 24 to 56 pixels, mostly one epoch")
    print(quality.summary(), file=sys.stderr)
    print(f"error {quality.error:.2f} points, penalty {quality.penalty:g}", file=sys.stderr)
    fitted = asdict(quality)
    if args.check:
        stored = json.loads(FILE.read_text(encoding="utf-8"))
        same = stored["runs"] == fitted["runs"] and stored["features"] == fitted["features"]
        if not same or not np.allclose(stored["weights"], fitted["weights"], rtol=1e-6):
            sys.exit(f"{FILE} was fitted to other trainings: python {sys.argv[0]}")
        return
    with atomic_write(FILE) as temporary:
        text = json.dumps(fitted, indent=1, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def paper_runs(folder: Path) -> Iterable[TrainingRun]:
    """Trainings of the paper's rows, averaged over seeds; evaluated on the test images."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    by_key: dict[str, list[dict[str, Any]]] = {}
    for one in files:
        if one["config"].get("retention") is None and not one["key"].startswith("power"):
            by_key.setdefault(one["key"], []).append(one)
    for key, ones in by_key.items():
        config, epochs = HVTConfig.from_dict(ones[0]["config"]), float(ones[0]["epochs"])
        top1 = statistics.fmean(one["top1"] for one in ones)
        yield TrainingRun(config, epochs, top1, key, seeds=len(ones))


def study_runs(path: Path) -> Iterable[TrainingRun]:
    """Trials of a study that were trained to the end; evaluated on held-out images.

    Pruned trials carry less information: including them makes the cross-validated ranking worse.
    """
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["finished"] == "True":
                config = HVTConfig.from_dict(json.loads(row["config"]))
                name = f"{path.stem} trial {row['trial']}"
                yield TrainingRun(
                    config, float(row["epochs"]), float(row["top1"]), name, search=True
                )


def fit(runs: Sequence[TrainingRun], about: str) -> Quality:
    """Fit a ridge regression; its penalty minimises the error on configs that are left out."""
    rows = [_features(run) for run in runs]
    features = [name for name in rows[0] if len({round(row[name], 12) for row in rows}) > 1]
    x = np.array([[row[name] for name in features] for row in rows])
    y = np.array([run.top1 for run in runs])
    configs = [run.config.replace(num_classes=1, drop_path_rate=0.0) for run in runs]
    groups = [configs.index(config) for config in configs]
    models = {p: make_pipeline(StandardScaler(), Ridge(alpha=p)) for p in PENALTIES}
    predicted = {
        p: cross_val_predict(model, x, y, groups=groups, cv=LeaveOneGroupOut())
        for p, model in models.items()
    }
    errors = {p: float(np.sqrt(np.mean((guess - y) ** 2))) for p, guess in predicted.items()}
    penalty = min(errors, key=lambda p: errors[p])
    scaler, ridge = (step for _, step in models[penalty].fit(x, y).steps)
    # The rank correlation is among trainings of one length: longer ones are better in any case.
    lengths = [(run.epochs, run.search) for run in runs]
    common = max(set(lengths), key=lengths.count)
    alike = np.array([length == common for length in lengths])
    measured = {name: [measures_of(run.config)[name] for run in runs] for name in MEASURES}
    columns = zip(ridge.coef_, scaler.mean_, scaler.scale_, strict=True)
    terms = dict(zip(features, columns, strict=True))
    offset = sum(
        weight * (NUISANCE[name] - mean) / scale
        for name, (weight, mean, scale) in terms.items()
        if name in NUISANCE
    )
    kept = {name: list(map(float, term)) for name, term in terms.items() if name not in NUISANCE}
    return Quality(
        features=list(kept),
        weights=[weight for weight, _, _ in kept.values()],
        mean=[mean for _, mean, _ in kept.values()],
        scale=[scale for _, _, scale in kept.values()],
        low={name: min(values) for name, values in measured.items()},
        high={name: max(values) for name, values in measured.items()},
        max_gflops=max(cost(run.config).gflops for run in runs),
        intercept=float(ridge.intercept_ + offset),
        penalty=penalty,
        rank_correlation=float(spearmanr(predicted[penalty][alike], y[alike]).statistic),
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


def _features(run: TrainingRun) -> dict[str, float]:
    length = math.log(run.epochs)
    of_training = {"epochs": length, "epochs²": length**2, "search": float(run.search)}
    return features_of(measures_of(run.config), flags_of(run.config)) | of_training


if __name__ == "__main__":
    main()
