"""`hvt.search`: short trainings of many models, the better ones longer, until enough are done."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..config import FIELDS, HVTConfig
from ..costs import arrow, cost
from ..errors import HVTError, nearest
from ..fields import check_type, check_whole
from ..plan.answer import limit, rounded_up
from ..terminal import printable
from ..training import engine
from ..training.interrupt import Interrupted
from ..training.pipeline import build_model
from ..training.recipe import RECIPE_FIELDS, Recipe, load_recipe
from ..training.watch import clock
from .halving import RUNGS, Score, frontier, goes_on, reached, rungs
from .report import write_report
from .study import (
    HEARTBEAT,
    default_storage,
    differences,
    import_optuna,
    open_study,
    quietly,
    requeue,
    rows_of,
)
from .suggest import Choices, choices_of

HOLDOUT = 0.1
"""The share of the training pictures that trials are compared on; no test picture is seen."""
MOST_EMPTY = 300
"""Suggestions in a row without a config within the budget, after which a search gives up."""
PROMISING = 8
"""The first trials of a study: those that `hvt plan`'s regression expects most of."""
WAIT = 2.0
"""Seconds between looks at the trials of other processes, when no new one is due."""


@dataclass(frozen=True)
class Found:
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
    quiet: bool = False,
    **values: Any,
) -> Found:
    """Search for the models that learn most within a budget: `hvt.search("digits", 0.005)`.

    Every trial is a training by `recipe`, of whose training pictures a share (`holdout`, a tenth
    unless it is set) is held out to compare by; the test pictures are not touched. `values` are
    fields of the recipe, or fields of `HVTConfig` that are not to be searched. `trials` are those
    of the whole study: a study that has some goes on, and several processes with the same
    `storage` and `study` share the work. `output` is the folder for the report. `seed`, the
    recipe's unless it is set, is that of the trainings and of what is suggested. The first
    `promising` trials are those that the regression of `hvt.plan` expects most of.
    """
    for argument, given in (("study", study), ("storage", storage)):
        check_type(argument, given, str | None)
    if isinstance(gflops, bool) or not isinstance(gflops, (int, float)) or not 0 < gflops < 1e9:
        raise HVTError(f"gflops={gflops!r} must be a finite number above 0")
    check_whole(trials=trials, heartbeat=heartbeat)
    check_whole(0, promising=promising)
    import_optuna()  # says what to install before anything else is done
    base, fixed, name = _recipe(recipe, values | ({} if seed is None else {"seed": seed}))
    name = study or name
    folder = Path(output or f"runs/search-{_file_name(name)}")
    settings = {
        "recipe": _identity(base), "gflops": gflops, "fixed": fixed, "rungs": rungs(base.epochs),
        "seed": base.seed,
    }  # fmt: skip
    _check_folder(folder, name, settings)
    console = Console(quiet=quiet)
    model, data = build_model(base)  # refuses a recipe or data that no trial could use
    choices = choices_of(model.config, float(gflops), fixed)
    _check_budget(choices)
    console.print(
        f"{data.name}: {len(data.train)} pictures to learn from, {len(data.val)} held out to "
        f"compare by; rungs of {', '.join(f'{e:g}' for e in rungs(base.epochs))} epochs",
        highlight=False,
        soft_wrap=True,
    )
    del model, data
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HVTError(f"cannot write {folder}: {error.strerror}") from error
    opened = open_study(name, storage or default_storage(folder), settings, heartbeat)
    worker = Worker(base, choices, opened, folder, trials, console, promising)
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
    return Found(folder, config, best[-1]["top1"], best, rows)


def _recipe(
    recipe: str | Path | Recipe, values: dict[str, Any]
) -> tuple[Recipe, dict[str, Any], str]:
    """The recipe of every trial, the fields that are fixed, and a name.

    What is fixed may not go with the recipe's own shape, which is searched, so it is not in it.
    """
    for field in values:
        if field not in RECIPE_FIELDS and field not in FIELDS:
            hint = nearest(field, [*RECIPE_FIELDS, *FIELDS])
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
    if not rungs(base.epochs)[0]:
        raise HVTError(
            f"epochs={base.epochs:g} is too short for a search, whose first trainings are a ninth "
            "of it: use at least 0.001"
        )
    read = {field: value for field, value in fixed.items() if field == "in_chans"}  # by the data
    return base.replace(read, holdout=base.holdout or HOLDOUT, processes=None), fixed, name


def _check_folder(folder: Path, study: str, settings: dict[str, Any]) -> None:
    """Refuse a folder with the results of another study, which would be written over.

    A study of the same name may be another one, in another storage: its settings tell, where they
    were written.
    """
    try:
        report = json.loads((folder / "trials.json").read_text())
        theirs = report["study"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # none, or none of ours
        return
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


def _identity(recipe: Recipe) -> dict[str, Any]:
    """What makes trials comparable; where and how they are computed may differ by process."""
    elsewhere = (
        "root", "download", "output", "device", "compile", "grad_checkpointing", "workers",
        "threads", "accumulate", "checkpoint_minutes", "tensorboard", "eval_every", "skip_broken",
    )  # fmt: skip
    return {k: v for k, v in recipe.to_dict().items() if k not in elsewhere and v is not None}


def _file_name(study: str) -> str:
    """A study's name as that of a folder."""
    return re.sub(r"[^\w.-]+", "-", study)


def _check_budget(choices: Choices) -> None:
    """Refuse a budget that no config of the space meets."""
    cheapest = choices.cheapest()
    if cheapest is None:
        raise HVTError(
            "no config of the search has blocks and tokens enough for the poolings that are fixed: "
            "fix fewer, or a larger depth or picture"
        )
    if cheapest > limit(choices.gflops):
        raise HVTError(
            f"gflops={choices.gflops:g} cannot be met: the least that any config of the search "
            f"takes is {rounded_up(cheapest)}"
        )


class Worker:
    """One process's part in a study."""

    def __init__(
        self, recipe: Recipe, choices: Choices, study: Any, folder: Path, trials: int,
        console: Console, promising: int = PROMISING,
    ) -> None:  # fmt: skip
        self.recipe, self.choices, self.study = recipe, choices, study
        self.folder, self.trials, self.console = folder, trials, console
        self.rungs = rungs(recipe.epochs, RUNGS)
        self.begins_with, self.promising = promising, list[dict[str, Any]]()
        self.stop_asked = False
        self.began = time.monotonic()
        self.done = self.empty = 0

    def work(self) -> None:
        """Take trials until the study has enough; those of processes that died are taken up."""
        optuna = import_optuna()
        while True:
            with quietly():
                optuna.storages.fail_stale_trials(self.study)
            states = [trial.state.name for trial in self.study.get_trials(deepcopy=False)]
            complete = sum(row["complete"] for row in rows_of(self.study))
            running, waiting = states.count("RUNNING"), states.count("WAITING")
            if complete >= self.trials and not waiting:
                return
            if complete + running >= self.trials and not waiting:
                time.sleep(WAIT)  # others are at the last ones, and may yet fail
                continue
            if not waiting:
                self._queue_promising()
            try:
                with quietly():
                    self.study.optimize(self.objective, n_trials=1)
                if self.stop_asked:
                    raise Interrupted("stopped between two trials")
            except optuna.exceptions.UpdateFinishedTrialError:
                self._say("a trial of this process was given to another, which heard nothing of it")

    def objective(self, trial: Any) -> tuple[float, float]:
        """Accuracy and GFLOPs of a trial, after as many rungs as it is worth."""
        self.study.sampler = self._sampler(trial.number)
        config = self.choices.suggest(trial)
        if config is None:  # nothing to train, so it does not count
            self.empty += 1
            if self.empty > MOST_EMPTY:
                raise HVTError(
                    f"{MOST_EMPTY} trials in a row have no config within "
                    f"gflops={self.choices.gflops:g}: raise it, or fix fewer fields"
                )
            return 0.0, self.choices.gflops
        self.empty = 0
        price = cost(config)
        trial.set_user_attr("config", config.to_dict())
        trial.set_user_attr("gflops", price.gflops)
        trial.set_user_attr("params_m", price.params_m)
        scores = [tuple(pair) for pair in trial.user_attrs.get("rungs", [])]
        # The same config trained again would come to the same end.
        alike = [row["rungs"] for row in rows_of(self.study) if row["config"] == config.to_dict()]
        scores = max([scores, *alike], key=len)
        trial.set_user_attr("rungs", scores)
        began = time.monotonic()
        for rung in range(len(scores), len(self.rungs)):
            try:
                top1 = self._train(config, trial.number, rung)
            except (Interrupted, KeyboardInterrupt):
                requeue(self.study, trial)
                raise
            scores.append((self.rungs[rung], top1))
            trial.set_user_attr("rungs", scores)
            others = [row for row in rows_of(self.study) if row["trial"] != trial.number]
            last = rung + 1 == len(self.rungs)
            if last or not goes_on(Score(price.gflops, top1), reached(others, rung)):
                break
            if self.stop_asked:
                requeue(self.study, trial)
                raise Interrupted("stopped between two rungs of a trial")
        trial.set_user_attr("finished", len(scores) == len(self.rungs))
        trial.set_user_attr("seconds", time.monotonic() - began)
        self._tell(trial, config, price.gflops, scores)
        return float(scores[-1][1]), price.gflops

    def _queue_promising(self) -> None:
        """Queue the next of the trials that a study begins with, until all have been."""
        queued = self.study.user_attrs.get("promising", 0)
        if queued >= self.begins_with:
            return
        self.study.set_user_attr("promising", queued + 1)
        self.promising = self.promising or self.choices.promising(
            self.begins_with, self.recipe.seed
        )
        if queued < len(self.promising):
            self.study.enqueue_trial(self.promising[queued])

    def _sampler(self, number: int) -> Any:
        """What suggests a trial, seeded by its place among those that did not fail.

        So no two processes suggest alike, and a study that was stopped goes on as if it had not
        been: the trial that was cut short has failed, and another stands in for it.
        """
        trials = self.study.get_trials(deepcopy=False)
        place = sum(one.number < number and one.state.name != "FAIL" for one in trials)
        return import_optuna().samplers.TPESampler(
            seed=(self.recipe.seed + place) % 2**32,  # numpy's bound
            n_startup_trials=max(5, self.trials // 4),
            constant_liar=True,  # the trials of other processes count as what they may become
        )

    def _train(self, config: HVTConfig, number: int, rung: int) -> float:
        """Top-1 on the pictures held out; 0 where the loss was not finite."""
        name = f"{_file_name(self.study.study_name)}-{number:04d}-rung{rung}"
        run = self.folder / "trials" / name
        shutil.rmtree(run, ignore_errors=True)
        model = "deit_s" if config.class_token else "hvt_s_0"
        overrides = {field: getattr(config, field) for field in FIELDS if field != "num_classes"}
        recipe = self.recipe.replace(
            overrides, model=model, epochs=self.rungs[rung], output=str(run), tensorboard=False,
            eval_every=10**6, checkpoint_minutes=1e9,
        )  # fmt: skip
        try:
            result = engine.train(recipe, console=Console(quiet=True))
            self.stop_asked = result.stop_asked
            return result.top1
        except HVTError as error:
            if "not finite" not in str(error):
                raise
            return 0.0
        finally:
            shutil.rmtree(run, ignore_errors=True)
            with contextlib.suppress(OSError):  # another process has a trial in it
                run.parent.rmdir()

    # ── what is said ────────────────────────────────────────────────────────────────────────────

    def _tell(self, trial: Any, config: HVTConfig, gflops: float, scores: list[Any]) -> None:
        self.done += 1
        rows = rows_of(self.study)
        complete = sum(row["complete"] for row in rows) + 1  # this one is about to be
        per_trial = (time.monotonic() - self.began) / self.done
        left = max(0, self.trials - complete) * per_trial
        whole = [row["top1"] for row in rows if row["finished"]]
        ended = " → ".join(f"{top1:.1f} % after {epochs:g}" for epochs, top1 in scores)
        again = trial.user_attrs.get("again")
        self._say(
            f"{complete}/{self.trials}  trial {trial.number}"
            + (f" (taken up from {again})" if again is not None else "")
            + f": {gflops:.3g} GFLOPs, width {config.width}, {config.depth} blocks, "
            f"{config.image[0]} px, tokens {arrow(list(config.tokens))}: {ended}"
            + ("" if len(scores) == len(self.rungs) else ", stopped")
            + (f"; best {max(whole):.1f} %" if whole else "")
            + (f"; about {clock(left)} left" if left else "")
        )

    def _say(self, text: str) -> None:
        self.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)
