"""What a search writes: tables, the best config, and a page with the frontier and importances."""

from __future__ import annotations

import base64
import csv
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..config import HVTConfig
from ..costs import arrow
from ..files import atomic_write, stale_temp_files
from ..zoo import write_config
from .halving import frontier
from .study import ID, SETTINGS, import_optuna

MIN_TRIALS = 4
"""Trials below which importances say nothing."""
LOCK = ".lock"


def write_report(folder: Path, study: Any, gflops: float, rows: Sequence[dict[str, Any]]) -> None:
    """Write all files of a search, each atomically, for other processes may read them."""
    with FileLock(folder / LOCK):  # the writers of one study take turns
        for stale in stale_temp_files(folder):  # of one that was killed
            stale.unlink(missing_ok=True)
        _write(folder, study, gflops, [row for row in rows if row["complete"]])


def _write(folder: Path, study: Any, gflops: float, rows: Sequence[dict[str, Any]]) -> None:
    best, shares = frontier(rows), importances(study)
    described = {
        "study": study.study_name, "id": study.user_attrs.get(ID),
        "settings": study.user_attrs.get(SETTINGS), "gflops": gflops, "importances": shares,
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
    figures = draw(folder, study, bool(shares))
    page = render(study.study_name, rows, best, figures)
    with atomic_write(folder / "report.html") as temporary:
        temporary.write_text(page, encoding="utf-8")


def _copy(study: Any, attribute: str) -> Any:
    """A study in memory with the complete trials that have parameters and an attribute."""
    copy = import_optuna().create_study(directions=study.directions)
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name == "COMPLETE" and trial.params and trial.user_attrs.get(attribute):
            copy.add_trial(trial)
    return copy


def _first_rung(trial: Any) -> float:
    return float(trial.user_attrs["rungs"][0][1])


def importances(study: Any) -> dict[str, float]:
    """Importance of each parameter for the accuracy on the first rung, which all trials have.

    By Optuna's fANOVA: shares of the variance. Empty with too few trials.
    """
    optuna, trained = import_optuna().importance, _copy(study, "rungs")
    if len(trained.trials) < MIN_TRIALS:
        return {}
    evaluator = optuna.FanovaImportanceEvaluator(seed=0)
    try:
        return dict(optuna.get_param_importances(trained, evaluator=evaluator, target=_first_rung))
    except (RuntimeError, ValueError):  # such as trials that are all alike
        return {}


def draw(folder: Path, study: Any, with_importances: bool) -> dict[str, bytes]:
    """Optuna's plots: the Pareto front of trials trained to the end, and the importances."""
    import matplotlib
    from matplotlib import pyplot

    optuna = import_optuna()
    plots, drawn = optuna.visualization.matplotlib, dict[str, bytes]()
    with matplotlib.rc_context():  # Optuna sets a style for the whole process
        names = ["top-1 on held-out images (%)", "GFLOPs"]
        axes = {"frontier": plots.plot_pareto_front(_copy(study, "finished"), target_names=names)}
        if with_importances:
            axes["importances"] = plots.plot_param_importances(
                _copy(study, "rungs"), optuna.importance.FanovaImportanceEvaluator(seed=0),
                target=_first_rung, target_name="top-1 on the first rung",
            )  # fmt: skip
        for name, one in axes.items():
            with atomic_write(folder / f"{name}.png") as temporary:
                one.figure.savefig(temporary, format="png", dpi=110, bbox_inches="tight")
            pyplot.close(one.figure)
            drawn[name] = (folder / f"{name}.png").read_bytes()
    return drawn


def render(
    study: str,
    rows: Sequence[dict[str, Any]],
    best: Sequence[dict[str, Any]],
    figures: dict[str, bytes],
) -> str:
    """One page without external resources."""
    starred = {row["trial"] for row in best}
    ordered = sorted(rows, key=lambda row: (not row["finished"], -row["top1"]))
    cells = [_cells(row, row["trial"] in starred) for row in ordered]
    head = "".join(f"<th>{heading}</th>" for heading in (cells[0] if cells else ()))
    lines = [
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line.values()) + "</tr>"
        for line in cells
    ]
    images = "".join(
        f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(figure).decode()}">'
        for name, figure in figures.items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(study)}</title>
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em }}
table {{ border-collapse: collapse }} th, td {{ padding: .2em .7em; text-align: left }}
tr:nth-child(even) {{ background: #f6f8fa }} img {{ max-width: 48% }}
</style></head><body>
<h1>{html.escape(study)}</h1>
<p>{len(rows)} trials, {sum(bool(r["finished"]) for r in rows)} trained to the end.
Accuracy is that on held-out training images. ★ is on the frontier.</p>
{images}
<table><thead><tr>{head}</tr></thead><tbody>
{chr(10).join(lines)}
</tbody></table></body></html>
"""


def _cells(row: dict[str, Any], star: bool) -> dict[str, str]:
    """A trial as a line of the page's table, by heading."""
    config = HVTConfig.from_dict(row["config"])
    window = f"{config.pool_dims}D {config.pool_kernel}/{config.pool_stride}"
    return {
        "trial": f"{row['trial']}{' ★' if star else ''}",
        "top-1 %": f"{row['top1']:.2f}",
        "epochs": f"{row['epochs']:g}{'' if row['finished'] else ' (stopped)'}",
        "GFLOPs": f"{row['gflops']:.4g}",
        "params (M)": f"{row['params_m']:.3g}",
        "image": f"{config.image[0]} px, patch {config.patch_size}",
        "width": f"{config.width}",
        "blocks": f"{config.depth}",
        "pool after": ", ".join(map(str, config.pool_blocks)) or "never",
        "window": window if config.pool_blocks else "",
        "tokens": arrow(list(config.tokens)),
    }
