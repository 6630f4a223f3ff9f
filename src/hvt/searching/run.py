"""`hvt.search`: short trainings of many models, the better ones longer, until enough are done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..config import FIELDS, HVTConfig
from ..data.fingerprint import identity
from ..errors import HVTError, did_you_mean
from ..fields import check_value, check_whole
from ..planning.budget import rounded_up, tolerance
from ..training.pipeline import build_model
from ..training.recipe import RECIPE_FIELDS, Recipe, load_recipe
from ..zoo import get_config
from .halving import RUNGS, frontier, rung_epochs
from .report import FILES, write_report
from .study import (
    HEARTBEAT,
    default_storage,
    differences,
    import_optuna,
    open_study,
    rows_of,
)
from .suggest import Choices, choices_of
from .worker import PROMISING, Worker, file_name

HOLDOUT = 0.1
"""The share of the training images that trials are compared on; no test image is seen."""


@dataclass(frozen=True)
class SearchResult:
    """What a search has found so far."""

    folder: Path
    """With `trials.csv`, `trials.json`, `report.html`, `report.png` and `best.json`."""
    best: HVTConfig
    """The most accurate of those trained to the end."""
    top1: float
    frontier: list[dict[str, Any]]
    trials: list[dict[str, Any]]


def search(
    recipe: str | Path | Recipe,
    gflops: float,
    trials: int = 40,
    *,
    study: str | None = None,
    storage: str | None = None,
    output: str | Path | None = None,
    seed: int | None = None,
    heartbeat: int = HEARTBEAT,
    promising: int = PROMISING,
    rungs: int = RUNGS,
    configs: Sequence[str | Path | HVTConfig] = (),
    quiet: bool = False,
    **values: Any,
) -> SearchResult:
    """Search for the models that learn most within a budget: `hvt.search("digits", 0.005)`.

    Every trial is a training by `recipe`, of whose training images a share (`holdout`, a tenth
    unless it is set) is held out to compare by; the test images are not touched. `values` are
    fields of the recipe, or fields of `HVTConfig` that are not to be searched. `trials` are those
    of the whole study: a study that has some goes on, and several processes with the same
    `storage` and `study` share the work. `output` is the folder for the report. `seed`, the
    recipe's unless it is set, is that of the trainings and of what is suggested. The first
    `promising` trials are those that the regression of `hvt.plan` expects most of. With `rungs=1`
    every trial is trained for all of the epochs; otherwise the poorer ones for a part of them.
    `configs` (`.json` files, model names or `HVTConfig`s) are trials before any other.
    """
    for argument, given in (("study", study), ("storage", storage)):
        check_value(argument, given, str | None)
    check_value("gflops", gflops, float, gt=0, lt=1e9)
    check_whole(trials=trials, heartbeat=heartbeat, rungs=rungs)
    check_whole(0, promising=promising)
    import_optuna()  # says what to install before anything else is done
    base, fixed, name = _recipe(recipe, values | ({} if seed is None else {"seed": seed}))
    epochs = rung_epochs(base.epochs, rungs)
    name = study or name
    folder = Path(output or f"runs/search-{file_name(name)}")
    settings = {
        "recipe": _identity(base), "gflops": gflops, "fixed": fixed, "rungs": epochs,
        "seed": base.seed,
    }  # fmt: skip
    console = Console(quiet=quiet)
    model, data, _ = build_model(base)  # refuses a recipe or data that no trial could use
    settings["images"] = {"classes": data.class_names, **identity(data)}
    _check_folder(folder, name, settings)
    choices = choices_of(model.config, float(gflops), fixed)
    _check_budget(choices)
    first = _given(configs, choices)
    console.print(
        f"{data.name}: {len(data.train)} images to learn from, {len(data.val)} held out to "
        f"compare by; rungs of {', '.join(f'{e:g}' for e in epochs)} epochs",
        highlight=False,
        soft_wrap=True,
    )
    del model, data
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HVTError(f"cannot write {folder}: {error.strerror}") from error
    opened = open_study(name, storage or default_storage(folder), settings, heartbeat)
    _check_trials(folder, name, rows_of(opened))
    worker = Worker(base, choices, opened, folder, trials, console, epochs, promising, first)
    try:
        worker.work()
    finally:
        rows = rows_of(opened)
        if any(row["complete"] for row in rows):
            write_report(folder, opened, rows, gflops)
    best = frontier(rows)
    if not best:
        raise HVTError(f"no trial of the study was trained to the end: raise trials={trials}")
    config = HVTConfig.from_dict(best[-1]["config"])
    return SearchResult(folder, config, best[-1]["top1"], best, rows)


def _recipe(
    recipe: str | Path | Recipe, values: dict[str, Any]
) -> tuple[Recipe, dict[str, Any], str]:
    """The recipe of every trial, the fields that are fixed, and a name.

    What is fixed may not go with the recipe's own shape, which is searched, so it is not in it.
    """
    for field in values:
        if field not in RECIPE_FIELDS and field not in FIELDS:
            hint = did_you_mean(field, [*RECIPE_FIELDS, *FIELDS])
            raise HVTError(f"unknown field {field!r}: {hint}")
    base = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    name = "run" if isinstance(recipe, Recipe) else Path(recipe).name.removesuffix(".toml")
    fixed = {field: value for field, value in values.items() if field in FIELDS}
    base = base.replace(**{k: v for k, v in values.items() if k in RECIPE_FIELDS})
    for field in ("init", "pretrained", "teacher"):
        if getattr(base, field):
            raise HVTError(f"a search trains new weights by labels alone: leave {field} out")
    if values.get("processes") not in (None, 1):
        raise HVTError("a trial has one process: leave processes out, and start the search twice")
    if values.get("holdout") == 0:
        raise HVTError("holdout=0 leaves a search nothing to compare by: leave it out, or raise it")
    read = {field: value for field, value in fixed.items() if field == "in_chans"}  # by the data
    return base.replace(read, holdout=base.holdout or HOLDOUT, processes=None), fixed, name


def _check_folder(folder: Path, study: str, settings: dict[str, Any]) -> None:
    """Refuse a folder with the results of another study, which would be written over.

    A study of the same name may be another one, in another storage: its settings tell, where they
    were written.
    """
    report = _read_report(folder)
    if report is None:
        for file in FILES:
            if (folder / file).exists():
                raise HVTError(
                    f"{folder} has a {file} of something else, which a search would replace: use "
                    "another --output"
                )
        return
    theirs = report["study"]
    if theirs != study:
        raise HVTError(
            f"{folder} has the results of the study {theirs}: use another --output, or its --study"
        )
    known = report.get("settings")
    if isinstance(known, dict) and (differing := differences(known, settings)):
        raise HVTError(
            f"{folder} has the results of a study {study} that was begun with other settings "
            f"({differing}): use the same, or another --output and --study"
        )


def _check_trials(folder: Path, study: str, rows: list[dict[str, Any]]) -> None:
    """Refuse a folder with trials that the study does not have: it is in another storage."""
    report = _read_report(folder) or {}
    configs = {row["trial"]: row["config"] for row in rows}
    for row in report.get("trials", []):
        if configs.get(row["trial"]) != row["config"]:
            raise HVTError(
                f"{folder} has the results of another study {study}: its trial {row['trial']} is "
                "not in this storage; use the other --storage, or another --output"
            )


def _read_report(folder: Path) -> dict[str, Any] | None:
    """What a search has left in a folder; None where there is nothing, or nothing of ours."""
    try:
        report = json.loads((folder / "trials.json").read_text())
        known = isinstance(report["study"], str)
        known = known and all({"trial", "config"} <= row.keys() for row in report.get("trials", []))
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError):
        return None
    return report if known else None


def _identity(recipe: Recipe) -> dict[str, Any]:
    """What makes trials comparable; where and how they are computed may differ by process."""
    elsewhere = (
        "root", "download", "output", "device", "compile", "grad_checkpointing", "workers",
        "threads", "accumulate", "checkpoint_minutes", "tensorboard", "eval_every", "skip_broken",
    )  # fmt: skip
    return {k: v for k, v in recipe.to_dict().items() if k not in elsewhere and v is not None}


def _given(configs: Sequence[str | Path | HVTConfig], choices: Choices) -> list[dict[str, Any]]:
    """The parameters of configs that a study is to try."""
    if isinstance(configs, (str, Path, HVTConfig)):
        raise HVTError("configs is to be a list of configs: put the one in brackets")
    given = []
    for number, one in enumerate(configs, 1):
        config = one if isinstance(one, HVTConfig) else get_config(one)
        name = f"config {number}" if isinstance(one, HVTConfig) else str(one)
        given.append(choices.params_of(config, name))
    return given


def _check_budget(choices: Choices) -> None:
    """Refuse a budget that no config of the space meets."""
    cheapest = choices.cheapest()
    if cheapest is None:
        raise HVTError(
            "no config of the search has blocks and tokens enough for the poolings that are fixed: "
            "fix fewer, or a larger depth or image"
        )
    if cheapest > tolerance(choices.gflops):
        raise HVTError(
            f"gflops={choices.gflops:g} cannot be met: the least that any config of the search "
            f"takes is {rounded_up(cheapest)}"
        )
