"""From a trained ViT to an elastic model: a setting for each budget, learned together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import HVTConfig
from ..costs import cost
from ..data.loader import Batch
from ..elastic import configs_of, label, make_elastic
from ..errors import HVTError
from ..model import HVT
from ..training.optimize import seed_all, seed_dropout
from ..training.recipe import Recipe
from ..training.sandwich import ElasticLearner, chosen_settings, divergence, sandwich_loss
from .photos import Normalise, Size, unpack
from .placement import candidates, drop_unread_patches
from .settings import Settings
from .student import pooled, resized

# ── which settings ──────────────────────────────────────────────────────────────────────────────


def options(source: HVTConfig, settings: Settings) -> list[list[HVTConfig]]:
    """The candidates of each budget, largest first.

    A budget that the source meets at its own size has only that.
    """
    if not source.num_classes:
        raise HVTError("the source has no classifier to teach an elastic model: use another")
    found = []
    whole = drop_unread_patches(source.replace(drop_path_rate=0.0))
    for budget in sorted(set(settings.elastic or ()), reverse=True):
        if float(label(whole)[:-1]) <= budget and not settings.fixed.keys() - {"pool_after"}:
            found.append([whole])
            continue
        configs = candidates(source, budget, settings.fixed)
        found.append(configs[-1:] if settings.pool_after == () else configs)  # the largest images
    return found


def make_student(source: HVT, configs: Sequence[HVTConfig], own: Sequence[str]) -> HVT:
    """The model that a source becomes, untrained; it shares nothing with the source.

    With several configs it is elastic.
    """
    largest = max(configs, key=lambda config: cost(config).macs)
    model = copy.deepcopy(pooled(resized(source, largest.image), largest))
    if len(configs) == 1:
        return model
    return make_elastic(model, [config for config in configs if config != largest], own)


# ── learning ────────────────────────────────────────────────────────────────────────────────────


class ElasticDistiller(ElasticLearner):
    """A learner of all settings from the source of their weights.

    Batches are crops at the source's size and at each setting's, as flat bytes.
    """

    def __init__(
        self, recipe: Recipe, model: HVT, *rest: Any, source: HVT, sizes: Sequence[Size],
        settings: Settings,
    ) -> None:  # fmt: skip
        self.source, self.sizes, self.settings = source.eval(), list(sizes), settings
        self.source.requires_grad_(False)
        if settings.freeze:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.startswith("settings."))
        super().__init__(recipe, model, *rest)
        self.normalise = Normalise(model, self.device)

    def _optimizer(self) -> torch.optim.Optimizer:
        """The settings' own parameters in groups of their own, for their learning rate."""
        optimizer, settings = super()._optimizer(), self.settings
        assert self.model.settings is not None
        own = set(self.model.settings.parameters())
        for group in list(optimizer.param_groups) if settings.own_lr else ():
            separate = [p for p in group["params"] if p in own]
            group["params"] = [p for p in group["params"] if p not in own]
            scale = group.get("lr_scale", 1.0) * settings.own_lr / settings.lr
            if separate:
                optimizer.add_param_group(group | {"params": separate, "lr_scale": scale})
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def _loss(self, batch: Batch, update: int) -> Tensor:
        seed_all(self.recipe.seed, update, self.device)
        seed_dropout(self.recipe.seed, update, batch.shard, self.device)
        channels = self.model.config.in_chans
        return self._taught(unpack(batch.images, channels, self.sizes), update)

    def _taught(self, views: Sequence[Tensor], update: int) -> Tensor:
        """The source teaches all settings; a frozen one, the largest, has nothing to learn."""
        settings, configs = self.settings, configs_of(self.model)
        chosen = chosen_settings(len(configs), self.recipe.seed, update)
        if settings.every_setting:
            chosen = list(range(len(configs)))
        if settings.freeze:
            chosen = chosen[1:]
        places = [self.sizes.index(configs[i].image) for i in chosen]
        inputs = {place: self.normalise(views[place]) for place in {0, *places}}
        with self._autocast():
            with torch.no_grad():
                target = self.source(inputs[0])
            outputs = self.network([inputs[place] for place in places], chosen)
            losses = [divergence(one, target).mean() for one in outputs]
            if settings.freeze:
                return torch.stack(losses).mean()
            return sandwich_loss(losses[0], losses[1:], settings.largest_weight)

    def _trial(self, size: int) -> Tensor:
        channels = self.model.config.in_chans
        zeros = [torch.zeros(size, channels, *image) for image in self.sizes]
        return self._taught(zeros, 0)
