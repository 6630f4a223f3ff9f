"""What a search writes: tables, the best config, and Optuna's figures."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..config import HVTConfig
from ..files import atomic_write
from ..zoo import write_config
from .halving import frontier
from .study import ID, SETTINGS, import_optuna

MIN_TRIALS = 4
"""Trials below which importances say nothing."""
LOCK = ".lock"


def write_report(folder: Path, study: Any, gflops: float, rows: Sequence[dict[str, Any]]) -> None:
    """Write all files of a search, each atomically, for other processes may read them."""
    with FileLock(folder / LOCK):  # the writers of one study take turns
        _tables(folder, study, gflops, [row for row in rows if row["complete"]])
        _figures(folder, study)


def _tables(folder: Path, study: Any, gflops: float, rows: Sequence[dict[str, Any]]) -> None:
    best = frontier(rows)
    described = {
        "study": study.study_name, "id": study.user_attrs.get(ID),
        "settings": study.user_attrs.get(SETTINGS), "gflops": gflops,
        "frontier": [row["trial"] for row in best], "trials": rows,
    }  # fmt: skip
    with atomic_write(folder / "trials.json") as temporary:
        temporary.write_text(json.dumps(described, indent=1) + "\n")
    with atomic_write(folder / "trials.csv") as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            nested = {name: json.dumps(row[name]) for name in ("rungs", "params", "config")}
            writer.writerow(row | nested)
    if best:
        write_config(HVTConfig.from_dict(best[-1]["config"]), folder / "best.json")


def _figures(folder: Path, study: Any) -> None:
    """Optuna's plots: the Pareto front of trials trained to the end, and importances by fANOVA.

    These are for the accuracy on the first rung, which all trials have.
    """
    import matplotlib
    from matplotlib import pyplot

    optuna = import_optuna()
    plots = optuna.visualization.matplotlib
    with matplotlib.rc_context():  # Optuna sets a style for the whole process
        names = ["top-1 on held-out images (%)", "GFLOPs"]
        axes = {"frontier": plots.plot_pareto_front(_copy(study, "finished"), target_names=names)}
        trained = _copy(study, "rungs")
        if len(trained.trials) >= MIN_TRIALS:
            axes["importances"] = plots.plot_param_importances(
                trained,
                optuna.importance.FanovaImportanceEvaluator(seed=0),
                target=lambda trial: trial.user_attrs["rungs"][0][1],
                target_name="top-1 on the first rung",
            )
        for name, one in axes.items():
            with atomic_write(folder / f"{name}.png") as temporary:
                one.figure.savefig(temporary, format="png", dpi=110, bbox_inches="tight")
            pyplot.close(one.figure)


def _copy(study: Any, attribute: str) -> Any:
    """A study in memory with the complete trials that have parameters and an attribute."""
    copy = import_optuna().create_study(directions=study.directions)
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name == "COMPLETE" and trial.params and trial.user_attrs.get(attribute):
            copy.add_trial(trial)
    return copy
