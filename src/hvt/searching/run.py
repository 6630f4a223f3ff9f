"""`hvt.search`: short trainings of many models, longer ones of the better."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console

from ..config import HVTConfig
from ..costs import cost
from ..data.fingerprint import identity
from ..errors import HVTError
from ..fields import check_value, check_whole
from ..planning.budget import rounded_up, tolerance
from ..terminal import print_line
from ..training.pipeline import build_model
from ..training.recipe import Recipe, load_recipe, split_fields
from ..training.trainer import RESUMABLE_FIELDS
from ..zoo import get_config
from .halving import RUNGS, frontier, rung_epochs
from .report import LOCK, write_report
from .study import HEARTBEAT, ID, IMAGES, default_storage, import_optuna, open_study, queue, rows_of
from .suggest import SearchSpace, search_space
from .worker import Worker

PROMISING = 8
"""The first trials of a study: those with the best scores by `hvt plan`'s regression."""
HOLDOUT = 0.1
"""The share of the training images that trials are evaluated on; test images are not used."""


@dataclass(frozen=True)
class StudyResult:
    """The trials of a study so far."""

    folder: Path
    """With `trials.csv`, `trials.json`, `best.json` and figures."""
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
    allow_changed_data: bool = False,
    quiet: bool = False,
    **values: Any,
) -> StudyResult:
    """Search for the most accurate models within a budget: `hvt.search("digits", 0.005)`.

    Every trial is a training with `recipe`, evaluated on held-out training images
    (`holdout`, a tenth by default); the test images are not used. `values` are fields of the
    recipe, or fields of `HVTConfig` that are not searched. `trials` is the total of the study: an
    existing study is resumed, and several processes with the same `storage` and `study` share the
    work. `output` is the folder of the report. `seed`, by default the recipe's, is that of the
    trainings and of the sampler. The first `promising` trials are those with the best scores by
    the regression of `hvt.plan`. With `rungs=1` every trial is trained for all epochs; otherwise
    most are stopped early. `configs` (`.json` files, model names or `HVTConfig`s) are tried
    before all others. `allow_changed_data` resumes a study even if the images have changed.
    """
    check_value("gflops", gflops, float, gt=0)
    check_whole(trials=trials, heartbeat=heartbeat, rungs=rungs)
    check_whole(0, promising=promising)
    import_optuna()  # or the error that says what to install
    base, fixed, name = _recipe(recipe, values | ({} if seed is None else {"seed": seed}))
    epochs = rung_epochs(base.epochs, rungs)
    name = study or name
    folder = Path(output or "runs/search-" + re.sub(r"[^\w.-]+", "-", name))
    console = Console(quiet=quiet)
    model, data, _ = build_model(base)  # raises an error where no trial could be trained
    # Other fields of the recipe may differ between processes.
    fields = base.to_dict().items()
    common = {k: v for k, v in fields if k not in RESUMABLE_FIELDS and v is not None}
    settings = {
        "recipe": common, "gflops": gflops, "fixed": fixed, "rungs": epochs,
        "seed": base.seed, IMAGES: {"classes": data.class_names, **identity(data)},
    }  # fmt: skip
    space = search_space(model.config, float(gflops), fixed)
    space.check_budget()
    first = _given(configs, space)
    print_line(
        console,
        f"{data.name}: {len(data.train)} training images, {len(data.val)} held out; rungs of "
        f"{', '.join(f'{e:g}' for e in epochs)} epochs",
    )
    del model, data
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HVTError(f"cannot write {folder}: {error.strerror}") from error
    url = storage or default_storage(folder)
    with FileLock(folder / LOCK):  # one process creates the tables
        opened = open_study(name, url, settings, heartbeat, allow_changed_data)
        reported = folder / "trials.json"
        if reported.exists() and opened.user_attrs[ID] not in reported.read_text():
            raise HVTError(
                f"{folder} contains another study: use another --output, or its --study and "
                "--storage"
            )
        new = not opened.get_trials(deepcopy=False)
        count = min(promising, trials) if new else 0
        queue(opened, first, space.promising(count, base.seed) if count else [])
    try:
        Worker(base, space, opened, trials, console, epochs).work()
    finally:
        rows = rows_of(opened)
        if any(row["complete"] for row in rows):
            write_report(folder, opened, gflops, rows)
    best = frontier(rows)
    if not best:
        raise HVTError(f"no trial of the study was trained to the end: raise trials={trials}")
    config = HVTConfig.from_dict(best[-1]["config"])
    return StudyResult(folder, config, best[-1]["top1"], best, rows)


def _recipe(
    recipe: str | Path | Recipe, values: dict[str, Any]
) -> tuple[Recipe, dict[str, Any], str]:
    """The recipe of every trial, the fixed fields of the config, and a name.

    Fixed fields need not fit the recipe's own shape, which is searched, so they are kept apart.
    """
    own, fixed = split_fields(values)
    base = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    name = "run" if isinstance(recipe, Recipe) else Path(recipe).name.removesuffix(".toml")
    base = base.replace(**own)
    for field in ("init", "pretrained", "teacher", "processes"):
        if getattr(base, field):
            raise HVTError(
                f"a search trains from scratch, with labels, in one process: leave {field} out"
            )
    if values.get("holdout") == 0:
        raise HVTError(
            "holdout=0 leaves no images to evaluate trials on: leave it out, or raise it"
        )
    read = {field: value for field, value in fixed.items() if field == "in_chans"}  # by the data
    return base.replace(read, holdout=base.holdout or HOLDOUT), fixed, name


def _given(configs: Sequence[str | Path | HVTConfig], space: SearchSpace) -> list[dict[str, Any]]:
    """The user's own configs as JSON, with the classes of the data and within the budget."""
    given = []
    for one in configs:
        config = one if isinstance(one, HVTConfig) else get_config(one)
        config = config.replace(num_classes=space.space.base.num_classes)
        price = cost(config).gflops
        if price > tolerance(space.gflops):
            raise HVTError(f"{one} costs {rounded_up(price)} GFLOPs, above {space.gflops:g}")
        given.append(json.loads(json.dumps(config.to_dict())))
    return given
