"""One process's part in a study: it takes trials and trains each as far as it is worth."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..config import FIELDS, HVTConfig
from ..costs import arrow, cost
from ..errors import HVTError
from ..terminal import printable
from ..training import engine
from ..training.interrupt import Interrupted
from ..training.recipe import Recipe
from ..training.watch import clock
from .halving import Score, goes_on, reached
from .study import import_optuna, quietly, requeue, rows_of
from .suggest import Choices

MOST_EMPTY = 300
"""Suggestions in a row without a config within the budget, after which a search gives up."""
PROMISING = 8
"""The first trials of a study: those that `hvt plan`'s regression expects most of."""
WAIT = 2.0
"""Seconds between looks at the trials of other processes, when no new one is due."""


def file_name(study: str) -> str:
    """A study's name as that of a folder."""
    return re.sub(r"[^\w.-]+", "-", study)


class Worker:
    """One process's part in a study."""

    def __init__(
        self, recipe: Recipe, choices: Choices, study: Any, folder: Path, trials: int,
        console: Console, rungs: list[float], promising: int = PROMISING,
        given: Sequence[dict[str, Any]] = (),
    ) -> None:  # fmt: skip
        self.recipe, self.choices, self.study = recipe, choices, study
        self.folder, self.trials, self.console = folder, trials, console
        self.rungs = rungs
        self.given = given
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
                self._queue_next()
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
        own = trial.user_attrs.get("rungs", [])  # of one that is taken up, and was to go on
        # The same config trained again would come to the same end.
        alike = [row["rungs"] for row in rows_of(self.study) if _has(row, config)]
        scores = [tuple(pair) for pair in max([own, *alike], key=len)]
        going = len(scores) == len(own) or self._goes_on(config, scores)
        trial.set_user_attr("rungs", scores)
        began = time.monotonic()
        while going and len(scores) < len(self.rungs):
            rung = len(scores)
            try:
                top1 = self._train(config, trial.number, rung)
            except (Interrupted, KeyboardInterrupt):
                requeue(self.study, trial)
                raise
            scores.append((self.rungs[rung], top1))
            trial.set_user_attr("rungs", scores)
            going = rung + 1 < len(self.rungs) and self._goes_on(config, scores)
            if going and self.stop_asked:
                requeue(self.study, trial)
                raise Interrupted("stopped between two rungs of a trial")
        trial.set_user_attr("finished", len(scores) == len(self.rungs))
        trial.set_user_attr("seconds", time.monotonic() - began)
        self._tell(trial, config, price.gflops, scores)
        return float(scores[-1][1]), price.gflops

    def _goes_on(self, config: HVTConfig, scores: Sequence[tuple[float, float]]) -> bool:
        """Whether a config is worth the rung after its last; other trials of it do not count."""
        others = [row for row in rows_of(self.study) if not _has(row, config)]
        score = Score(cost(config).gflops, scores[-1][1])
        return goes_on(score, reached(others, len(scores) - 1))

    def _queue_next(self) -> None:
        """Queue the next of the trials that are to be first: what was given, what is promising."""
        taken = self.study.user_attrs.get("given", [])
        if new := [params for params in self.given if params not in taken]:
            self.study.set_user_attr("given", [*taken, new[0]])
            self.study.enqueue_trial(new[0])
            return
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
        """Top-1 on the images held out; 0 where the loss was not finite."""
        name = f"{file_name(self.study.study_name)}-{number:04d}-rung{rung}"
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


def _has(row: dict[str, Any], config: HVTConfig) -> bool:
    """Whether a stored trial is of a config; JSON has lists where there were tuples."""
    return HVTConfig.from_dict(row["config"]) == config
