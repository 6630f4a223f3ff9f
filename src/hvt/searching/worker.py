"""One process's part in a study: it takes trials and trains each as long as it is promoted."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ..config import FIELDS, HVTConfig
from ..costs import arrow, cost
from ..errors import HVTError
from ..terminal import print_line
from ..training import engine
from ..training.interrupt import Interrupted
from ..training.recipe import Recipe
from .halving import is_promoted
from .study import GIVEN, import_optuna, rows_of
from .suggest import SearchSpace

WAIT = 2.0
"""Seconds between checks of the trials of other processes, when no new one is due."""


@dataclass
class Worker:
    """One process's part in a study."""

    recipe: Recipe
    space: SearchSpace
    study: Any
    trials: int
    console: Console
    rungs: list[float]
    stop_asked: bool = False

    def work(self) -> None:
        """Take trials until the study has enough; those of dead processes are retried."""
        optuna = import_optuna()
        while True:
            optuna.storages.fail_stale_trials(self.study)
            states = [trial.state.name for trial in self.study.get_trials(deepcopy=False)]
            complete = sum(row["complete"] for row in rows_of(self.study))
            if complete >= self.trials:
                return
            if complete + states.count("RUNNING") >= self.trials:
                time.sleep(WAIT)  # others train the last ones, and may still fail
                continue
            try:
                self.study.optimize(self.objective, n_trials=1)
                if self.stop_asked:
                    raise Interrupted("stopped between two trials")
            except optuna.exceptions.UpdateFinishedTrialError:
                text = "a trial of this process missed its heartbeats and was given to another"
                print_line(self.console, text)

    def objective(self, trial: Any) -> tuple[float, float]:
        """Accuracy and GFLOPs of a trial, after its last rung."""
        self.study.sampler = self._sampler(trial.number)
        given = trial.user_attrs.get(GIVEN)
        config = HVTConfig.from_dict(given) if given else self.space.suggest(trial)
        if config is None:
            raise import_optuna().TrialPruned
        price = cost(config)
        model = {"gflops": price.gflops, "params_m": price.params_m, "config": config.to_dict()}
        trial.set_user_attr("model", model)
        own = trial.user_attrs.get("rungs", [])  # of a retry, which was promoted from the last
        # Training the same config again would give the same result.
        same = [row["rungs"] for row in rows_of(self.study) if _has(row, config)]
        scores = [tuple(pair) for pair in max([own, *same], key=len)]
        promoted = len(scores) == len(own) or self._is_promoted(config, scores)
        trial.set_user_attr("rungs", scores)
        began = time.monotonic()
        try:
            for epochs in self.rungs[len(scores) :]:
                if not promoted:
                    break
                if self.stop_asked:
                    raise Interrupted("stopped between two rungs of a trial")
                scores.append((epochs, self._train(config, epochs)))
                trial.set_user_attr("rungs", scores)
                promoted = self._is_promoted(config, scores)
        except (Interrupted, KeyboardInterrupt):  # it is queued again, with its finished rungs
            again = import_optuna().storages.RetryHeartbeatStaleTrialCallback()
            again(self.study, self.study.get_trials(deepcopy=False)[trial.number])
            raise
        trial.set_user_attr("finished", len(scores) == len(self.rungs))
        trial.set_user_attr("seconds", time.monotonic() - began)
        self._report(trial.number, config, scores)
        return float(scores[-1][1]), price.gflops

    def _is_promoted(self, config: HVTConfig, scores: Sequence[tuple[float, float]]) -> bool:
        """Whether a config is promoted from its last rung; other trials of it do not count."""
        others = [row for row in rows_of(self.study) if not _has(row, config)]
        return is_promoted(cost(config).gflops, scores[-1][1], len(scores) - 1, others)

    def _sampler(self, number: int) -> Any:
        """The sampler of a trial, seeded by its place among those that did not fail.

        So no two processes suggest the same, and a study that was stopped continues as if it had
        not been: its interrupted trial failed, and a retry takes its place.
        """
        trials = self.study.get_trials(deepcopy=False)
        place = sum(one.number < number and one.state.name != "FAIL" for one in trials)
        return import_optuna().samplers.TPESampler(
            seed=(self.recipe.seed + place) % 2**32,  # numpy's bound
            n_startup_trials=max(5, self.trials // 4),
            constant_liar=True,  # takes running trials of other processes into account
        )

    # ── training ────────────────────────────────────────────────────────────────────────────────

    def _train(self, config: HVTConfig, epochs: float) -> float:
        """Top-1 on the held-out images; 0 where the loss was not finite. No weights are kept."""
        model = "deit_s" if config.class_token else "hvt_s_0"
        overrides = {field: getattr(config, field) for field in FIELDS if field != "num_classes"}
        with tempfile.TemporaryDirectory(prefix="hvt-search-") as folder:
            recipe = self.recipe.replace(
                overrides, model=model, epochs=epochs, output=f"{folder}/run",
                tensorboard=False, eval_every=10**6, checkpoint_minutes=1e9,
            )  # fmt: skip
            try:
                result = engine.train(recipe, console=Console(quiet=True))
            except HVTError as error:
                if "not finite" not in str(error):
                    raise
                return 0.0
        self.stop_asked = result.stop_asked
        return result.top1

    def _report(self, number: int, config: HVTConfig, scores: list[Any]) -> None:
        complete = sum(row["complete"] for row in rows_of(self.study)) + 1  # with this one
        results = " → ".join(f"{top1:.1f} % after {epochs:g}" for epochs, top1 in scores)
        print_line(
            self.console,
            f"{complete}/{self.trials}  trial {number}: {cost(config).gflops:.3g} GFLOPs, width "
            f"{config.width}, {config.depth} blocks, {config.image[0]} px, tokens "
            f"{arrow(list(config.tokens))}: {results}"
            + ("" if len(scores) == len(self.rungs) else ", stopped"),
        )


def _has(row: dict[str, Any], config: HVTConfig) -> bool:
    """Whether a stored trial is of a config; JSON has lists instead of tuples."""
    return HVTConfig.from_dict(row["config"]) == config
