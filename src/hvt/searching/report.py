"""What a search leaves: tables, the best config, and a page with the frontier and what mattered."""

from __future__ import annotations

import base64
import csv
import html
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import HVTConfig
from ..costs import arrow
from ..files import atomic_write
from ..plot import new_figure
from ..zoo import write_config
from .halving import frontier
from .study import SETTINGS, import_optuna

COLUMNS = (
    "trial", "top1", "gflops", "params_m", "epochs", "finished", "seconds", "again", "rungs",
    "params", "config",
)  # fmt: skip
FILES = ("trials.json", "trials.csv", "best.json", "report.png", "report.html")
BLUE, GREY, LINE = "#0969da", "#afb8c1", "#57606a"
LEAST = 4
"""Trials below which nothing can be said of what mattered."""


def write_report(folder: Path, study: Any, rows: Sequence[dict[str, Any]], gflops: float) -> None:
    """All files of a search; each is written whole, so that another process may read them.

    First the one that tells that the folder is a search's.
    """
    done = [row for row in rows if row["complete"]]
    mattered = importance(study)
    best = frontier(done)
    described = {
        "study": study.study_name, "settings": study.user_attrs.get(SETTINGS),
        "gflops": gflops, "importance": mattered,
        "frontier": [row["trial"] for row in best], "trials": done,
    }  # fmt: skip
    with atomic_write(folder / "trials.json") as temporary:
        temporary.write_text(json.dumps(described, indent=1) + "\n")
    with atomic_write(folder / "trials.csv") as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in done:
            writer.writerow(
                [
                    json.dumps(row[name]) if name in ("rungs", "params", "config") else row[name]
                    for name in COLUMNS
                ]
            )
    if best:
        write_config(HVTConfig.from_dict(best[-1]["config"]), folder / "best.json")
    draw(folder / "report.png", done, best, mattered, gflops)
    page = render(study.study_name, done, best, mattered, (folder / "report.png").read_bytes())
    with atomic_write(folder / "report.html") as temporary:
        temporary.write_text(page, encoding="utf-8")


def importance(study: Any) -> dict[str, float]:
    """How much each parameter mattered to the accuracy on the first rung, which all trials have.

    By Optuna's fANOVA: shares of the variance. Empty where there are too few trials.
    """
    optuna = import_optuna()
    trained = [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state.name == "COMPLETE" and trial.user_attrs.get("rungs")
    ]
    if len(trained) < LEAST:
        return {}
    alone = optuna.create_study(directions=["maximize"])
    for trial in trained:
        alone.add_trial(
            optuna.trial.create_trial(
                params=trial.params,
                distributions=trial.distributions,
                value=float(trial.user_attrs["rungs"][0][1]),
            )
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shares = optuna.importance.get_param_importances(
                alone, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
            )
    except (RuntimeError, ValueError, ImportError):  # such as trials that are all alike
        return {}
    return {name: float(share) for name, share in shares.items()}


def draw(
    path: Path,
    rows: Sequence[dict[str, Any]],
    best: Sequence[dict[str, Any]],
    mattered: dict[str, float],
    gflops: float,
) -> None:
    """Top-1 against GFLOPs with the frontier, and what mattered beside it."""
    figure = new_figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for finished, colour, label in (
        (False, GREY, "stopped early"), (True, BLUE, "trained to the end"),
    ):  # fmt: skip
        some = [row for row in rows if row["finished"] == finished]
        left.plot([r["gflops"] for r in some], [r["top1"] for r in some], "o", color=colour,
                  ms=4, label=label)  # fmt: skip
    left.step([r["gflops"] for r in best], [r["top1"] for r in best], where="post", color=BLUE,
              lw=1, label="frontier")  # fmt: skip
    left.axvline(gflops, color=LINE, ls="--", lw=0.8, label="budget")
    left.set(xlabel="multiply-adds of an image (G)", ylabel="top-1 on images held out (%)")
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    names = list(reversed(mattered))
    right.barh(names, [mattered[name] for name in names], color=BLUE)
    right.set(xlabel="share of what mattered on the first rung", xlim=(0, 1))
    if not names:
        right.set_title(f"too few trials to say what mattered (of {LEAST})", fontsize=9)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def render(
    name: str,
    rows: Sequence[dict[str, Any]],
    best: Sequence[dict[str, Any]],
    mattered: dict[str, float],
    figure: bytes,
) -> str:
    """One page that loads nothing."""
    ahead = {row["trial"] for row in best}
    lines = []
    for row in sorted(rows, key=lambda row: (not row["finished"], -row["top1"])):
        config = HVTConfig.from_dict(row["config"])
        kernel, stride = config.pool_kernel, config.pool_stride
        cells = [
            f"{row['trial']}{' ★' if row['trial'] in ahead else ''}",
            f"{row['top1']:.2f}",
            f"{row['epochs']:g}{'' if row['finished'] else ' (stopped)'}",
            f"{row['gflops']:.4g}",
            f"{row['params_m']:.3g}",
            f"{config.image[0]} px, patch {config.patch_size}",
            f"{config.width}",
            f"{config.depth}",
            ", ".join(map(str, config.pool_blocks)) or "never",
            f"{config.pool_dims}D {kernel}/{stride}" if config.pool_blocks else "",
            arrow(list(config.tokens)),
        ]
        lines.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    headings = ("trial", "top-1 %", "epochs", "GFLOPs", "params (M)", "image", "width", "blocks",
                "pool after", "window", "tokens")  # fmt: skip
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    shares = ", ".join(f"{html.escape(n)} {share:.0%}" for n, share in mattered.items())
    image = base64.b64encode(figure).decode()
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(name)}</title>
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em }}
table {{ border-collapse: collapse }} th, td {{ padding: .2em .7em; text-align: left }}
tr:nth-child(even) {{ background: #f6f8fa }} img {{ max-width: 100% }}
</style></head><body>
<h1>{html.escape(name)}</h1>
<p>{len(rows)} trials, {sum(bool(r["finished"]) for r in rows)} trained to the end.
Accuracy is that of training images held out. ★ is on the frontier.</p>
<img alt="Top-1 against multiply-adds, and what mattered" src="data:image/png;base64,{image}">
<p>What mattered to the accuracy on the first rung: {shares or "too few trials to say"}.</p>
<table><thead><tr>{head}</tr></thead><tbody>
{chr(10).join(lines)}
</tbody></table></body></html>
"""
