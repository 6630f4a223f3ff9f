"""The search of a retention: a DeiT learns with soft extraction until it meets a budget.

The penalty's weight λ is steered. The cost of the retention that r stands for is to fall in a
straight line to the budget over the first part of the search and to stay there; above that line λ
rises, below it λ falls. What is left to the budget at the end is settled token by token.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from .. import distributed
from ..checkpoint.save_load import read, save
from ..costs import cost
from ..data.classes import ClassMatch, match_classes
from ..data.loader import Batch, TrainBatches
from ..data.sources import Data
from ..errors import HVTError
from ..evaluation import evaluate
from ..files import check_new
from ..model import HVT
from ..terminal import print_line
from ..training.interrupt import Interrupted, StopSignals
from ..training.learner import Learner
from ..training.optimize import seed_all
from ..training.pipeline import build_model, open_batches
from ..training.recipe import Recipe
from .retention import Retention, check_budget, fit_retention, min_tokens, retention_of
from .soft import SoftDeiT, harden, mass, penalty, soften

R_CROSSINGS = 5
"""How often r can cross [0, 1] in a search at its default learning rate."""
MAX_R_LR = 0.05
"""The largest default learning rate of r: λ must be able to follow it."""
FALLING = 0.7
"""The fraction of a search in which the cost is to fall."""
AHEAD = 10
"""Steps to look ahead in steering λ: as long as the optimizer's momentum lasts."""
MAX_FACTOR = 1000.0
"""How many times its first value λ may grow or shrink to."""


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """A model with hard extraction, to be retrained."""

    model: HVT
    retention: Retention
    gflops: float
    top1: float
    """Validation top-1 with hard extraction, before retraining."""


def search(
    recipe: Recipe,
    gflops: float,
    *,
    r_lr: float | None = None,
    match_by_order: bool = False,
    output: str | Path | None = None,
    console: Console | None = None,
) -> SearchResult:
    """Search the retention of a budget for the DeiT in `recipe.init`, on the recipe's data.

    Of the recipe, averaged weights, checkpoints and evaluations are not used. `r_lr` is the
    learning rate of r; the default lets it cross [0, 1] a few times. The classes of the data must
    be the checkpoint's by name, or by order with `match_by_order`. `output` is the file to write.
    """
    if recipe.init is None:
        raise HVTError("PoWER starts from a trained DeiT: give its checkpoint with init=FILE")
    if output is not None:  # before hours are spent on searching
        output = Path(output)
        check_new(output)
    with distributed.process_group(recipe.device) as (processes, device):
        if recipe.threads:
            torch.set_num_threads(recipe.threads)
        seed_all(recipe.seed, -1, device)
        model, data, match = _open(recipe, gflops, match_by_order)
        batches, val_batches = open_batches(recipe, model, data, processes, device)
        screen = processes.console(console)
        log = functools.partial(print_line, screen)
        config = model.config
        log(
            f"{recipe.init}: {cost(config).gflops:.4g} GFLOPs with all {config.tokens[0]} tokens, "
            f"{gflops:.4g} wanted; {batches.steps} steps per epoch on {device}"
        )
        log(match.describe())
        searcher = Searcher(recipe, soften(model), batches, processes, device, gflops, r_lr)
        searcher.run(log)
        retention = fit_retention(config, mass(searcher.model), gflops)
        hard = harden(searcher.model, retention)
        score = evaluate(hard, val_batches, hard.num_classes, device, processes, searcher.amp)
        result = SearchResult(hard.eval(), retention, cost(hard).gflops, score.top1)
        log(f"retention {','.join(map(str, retention))}: {result.gflops:.4g} GFLOPs")
        if output is not None and processes.is_main_process:
            save(hard, output)
        summary = f"top-1 {score.top1:.2f} % before retraining"
        log(summary if output is None else f"{summary}; weights in {output}")
        return result


def _open(recipe: Recipe, gflops: float, match_by_order: bool) -> tuple[HVT, Data, ClassMatch]:
    path = str(recipe.init)
    checkpoint = read(path)
    config = checkpoint.config
    if config.retention is not None:
        raise HVTError(f"{path} already has a retention: search from the DeiT it was made from")
    check_budget(config, gflops)
    model, data, _ = build_model(recipe, keep_classifier=True)
    if model.num_classes != config.num_classes:
        raise HVTError(
            f"{path} has {config.num_classes} classes, {data.name} has {model.num_classes}: "
            f"fine-tune it first, with hvt train finetune --init {path} --data {recipe.data}"
        )
    # The classifier is kept, so the labels must be its own. Matched by order, the classes take the
    # data's names, by which retraining matches them again.
    known = checkpoint.class_names or ()
    match = match_classes(
        data.class_names,
        known if len(known) == config.num_classes else None,
        config.num_classes,
        data.name,
        match_by_order,
    )
    names = match.model_names if match.by == "name" else match.data_names
    model.pretrained_cfg["label_names"] = names
    train, val = data.train.relabel(match.places), data.val.relabel(match.places)
    return model, dataclasses.replace(data, train=train, val=val, class_names=names), match


class Searcher(Learner):
    """A learner of weights and r, which steers λ by what the present retention costs."""

    model: SoftDeiT

    def __init__(
        self,
        recipe: Recipe,
        model: SoftDeiT,
        batches: TrainBatches,
        processes: distributed.DistributedContext,
        device: torch.device,
        gflops: float,
        r_lr: float | None = None,
    ) -> None:
        super().__init__(recipe.replace(ema=0.0), model, batches, processes, device)
        self.total = recipe.total_steps(batches.steps)
        self.whole, self.budget = self.price(), gflops
        self.last_price, self.trend = self.whole, 0.0
        # λ. The penalty counts 1 at first.
        self.first_strength = self.strength = 1 / penalty(model).item()
        if r_lr is None:
            r_lr = min(MAX_R_LR, R_CROSSINGS / self.total)
        own = list(model.r)
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if not any(p is r for r in own)]
        # The schedule knows only the groups that were there before, so r's rate is constant.
        self.optimizer.add_param_group({"params": own, "lr": r_lr, "weight_decay": 0.0})

    def run(self, log: Callable[[str], None]) -> None:
        """All epochs, with a line for each and for every minute."""
        steps, printed, bad = self.batches.steps, time.monotonic(), 0
        batches: Iterator[Batch] = iter(())
        with StopSignals() as signals:
            for update in range(self.total):
                epoch, number = divmod(update, steps)
                if not number:
                    batches = self.batches.epoch(epoch, 0)
                step = self.step(batches, update, lambda: (signals.asked,))
                for r in self.model.r:
                    r.data.clamp_(0, 1)
                self._steer(update + 1)
                bad = 0 if step.taken else bad + 1
                if bad >= self.recipe.max_bad_steps:
                    raise HVTError(
                        f"the loss was not finite {bad} times in a row (epoch {epoch + 1}, step "
                        f"{number + 1}): lower --lr or set --clip-grad"
                    )
                if any(step.flags):
                    raise Interrupted("the search was stopped; nothing was written")
                last = number == steps - 1 or update == self.total - 1
                if last or time.monotonic() - printed > 60:
                    printed = time.monotonic()
                    log(
                        f"epoch {epoch + 1}/{math.ceil(self.total / steps)}  "
                        f"step {number + 1}/{steps}  loss {step.loss:.4f}  λ {self.strength:.2e}  "
                        f"{self.price():.4g} GFLOPs"
                    )

    def price(self) -> float:
        """GFLOPs of the retention that r stands for."""
        retention = retention_of(mass(self.model), min_tokens(self.model.config))
        return cost(self.model.config, retention=retention).gflops

    def _loss(self, batch: Batch, update: int) -> Tensor:
        return super()._loss(batch, update) + self.strength * penalty(self.model)

    def _steer(self, done: int) -> None:
        """Raise λ where the cost is on its way to end up above the line, lower it where below."""
        price = self.price()
        self.trend += (price - self.last_price - self.trend) / AHEAD
        self.last_price = price
        fall = min(1.0, (done + AHEAD) / (FALLING * self.total))
        line = self.whole + fall * (self.budget - self.whole)
        over = (price + AHEAD * self.trend - line) / max(self.whole - self.budget, 1e-12)
        factor = math.exp(max(-1.0, min(1.0, over)))
        low, high = self.first_strength / MAX_FACTOR, self.first_strength * MAX_FACTOR
        self.strength = min(high, max(low, self.strength * factor))
