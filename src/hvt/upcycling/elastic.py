"""From a trained ViT to an elastic checkpoint: a setting for each budget, learned together."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checkpoint.save_load import load
from ..config import HVTConfig
from ..costs import cost
from ..data.loader import Batch
from ..elastic import configs_of, label, make_elastic, plain
from ..errors import HVTError
from ..model import HVT
from ..training.optimize import seed_all, seed_dropout
from ..training.recipe import Recipe
from ..training.sandwich import ElasticLearner, chosen_settings, divergence, sandwich_loss
from .distil import Agreement, HoldoutAgreement
from .photos import Normalise, Size, read_views, unpack
from .placement import candidates, describe, drop_unread_patches
from .settings import Settings
from .student import pooled, resized
from .train import distil

if TYPE_CHECKING:
    from .run import Upcycling


# ── which settings ──────────────────────────────────────────────────────────────────────────────


def options(source: HVTConfig, settings: Settings) -> dict[float, list[HVTConfig]]:
    """For each budget, dearest first, the candidates to choose from.

    A budget that the source meets at its own size has only that.
    """
    if not source.num_classes:
        raise HVTError("the source has no classifier to teach an elastic model: use another")
    found: dict[float, list[HVTConfig]] = {}
    whole = drop_unread_patches(source.replace(drop_path_rate=0.0))
    for budget in sorted(set(settings.elastic or ()), reverse=True):
        if float(label(whole)[:-1]) <= budget and not settings.fixed.keys() - {"pool_after"}:
            found[budget] = [whole]
        else:
            found[budget] = candidates(source, budget, settings.fixed)
            if settings.pool_after == ():
                found[budget] = found[budget][-1:]  # the largest images
    return found


def _place(run: Upcycling) -> list[HVTConfig]:
    """The settings' configs, dearest first, ranked by the main process."""
    path = run.folder / "placement.json"
    if not path.exists() and run.processes.is_main_process:
        chosen, tables = [], []
        for budget, configs in options(run.source.config, run.settings).items():
            run.log(f"{budget:g} GFLOPs:")
            config, table = run.choose(configs)
            chosen.append(config.to_dict())
            tables.append(table)
        run.write("placement.json", {"chosen": chosen, "ranked": tables})
    run.processes.barrier()
    written = json.loads(path.read_text())["chosen"]
    return [HVTConfig.from_dict(values) for values in written]


def _student(source: HVT, configs: Sequence[HVTConfig], own: Sequence[str]) -> HVT:
    """The elastic model that a source becomes, untrained; it shares nothing with the source."""
    dearest = max(configs, key=lambda config: cost(config).macs)
    model = copy.deepcopy(pooled(resized(source, dearest.image), dearest))
    return make_elastic(model, [config for config in configs if config != dearest], own)


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
        """The settings' own parameters in groups of their own, for their rate."""
        optimizer, settings = super()._optimizer(), self.settings
        assert self.model.settings is not None
        own = set(self.model.settings.parameters())
        for group in list(optimizer.param_groups) if settings.own_lr else ():
            apart = [p for p in group["params"] if p in own]
            group["params"] = [p for p in group["params"] if p not in own]
            scale = group.get("lr_scale", 1.0) * settings.own_lr / settings.lr
            if apart:
                optimizer.add_param_group(group | {"params": apart, "lr_scale": scale})
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def _loss(self, batch: Batch, update: int) -> Tensor:
        seed_all(self.recipe.seed, update, self.device)
        seed_dropout(self.recipe.seed, update, batch.shard, self.device)
        channels = self.model.config.in_chans
        return self._taught(unpack(batch.images, channels, self.sizes), update)

    def _taught(self, views: Sequence[Tensor], update: int) -> Tensor:
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
            if settings.freeze:
                return torch.stack([divergence(one, target).mean() for one in outputs]).mean()
            teacher = target if settings.teacher == "source" else outputs[0].detach()
            taught = [divergence(one, teacher).mean() for one in outputs[1:]]
            dearest = divergence(outputs[0], target).mean()
            return sandwich_loss(dearest, taught, settings.dearest_weight)

    def _trial(self, size: int) -> Tensor:
        channels = self.model.config.in_chans
        zeros = [torch.zeros(size, channels, *image) for image in self.sizes]
        return self._taught(zeros, 0)


class ElasticHoldout:
    """Held-out photos as each setting sees them, on which they are compared with the source."""

    def __init__(self, run: Upcycling, model: HVT) -> None:
        places = range(len(configs_of(model)))
        shard = run.holdout_shard()
        models = [run.source, *(plain(model, place) for place in places)]
        views = read_views(shard, models, run.workers, run.settings.skip_broken)
        first = HoldoutAgreement(run.source, views[0], views[1], run.processes, run.device)
        self.parts = [copy.copy(first) for _ in places]  # which share the source's outputs
        for part, images in zip(self.parts, views[1:], strict=True):
            part.images = images
        self.names, self.weight = first.names, run.settings.dearest_weight

    def scores(self, model: HVT) -> dict[str, Agreement]:
        """How close each setting is to the source."""
        configs = configs_of(model)
        return {
            label(config): self.parts[place].measure(plain(model, place))
            for place, config in enumerate(configs)
        }

    def figures(self, model: HVT) -> dict[str, float]:
        """The same by name, and the means, the dearest counted as in training."""
        scores = self.scores(model)
        weights = [self.weight] + [1.0] * (len(scores) - 1)
        found: dict[str, float] = {}
        for name, field in zip(self.names, ("kl", "agreement"), strict=True):
            values = {key: getattr(score, field) for key, score in scores.items()}
            found[name] = sum(map(float.__mul__, weights, values.values())) / sum(weights)
            found |= {f"{name}_{key}": value for key, value in values.items()}
        return found


# ── the run ─────────────────────────────────────────────────────────────────────────────────────


def run(upcycling: Upcycling) -> tuple[HVT, dict[str, HVT], dict[str, Agreement], str]:
    """The best elastic model on held-out photos; its settings, how close each is to the source,
    and the name of the dearest.
    """
    settings, source = upcycling.settings, upcycling.source.to(upcycling.device)
    configs = _place(upcycling)
    for config in configs:
        upcycling.log(f"{label(config)}: {describe(config)}")
    untrained = _student(source, configs, settings.own).to(upcycling.device)
    holdout = ElasticHoldout(upcycling, untrained)
    models = {"untrained": untrained}
    sizes = tuple(dict.fromkeys((source.config.image, *(c.image for c in configs_of(untrained)))))
    learner = functools.partial(ElasticDistiller, source=source, sizes=sizes, settings=settings)
    student = copy.deepcopy(untrained)
    path = distil(upcycling, student, learner, sizes, holdout.figures, holdout.names[0])
    if path is not None:
        trained = load(path, upcycling.device).float()
        for fraction in settings.average:
            name = "distilled" if fraction == 1 else f"{fraction:g} distilled"
            models[name] = averaged(untrained, trained, fraction)
    figures = {name: holdout.figures(model) for name, model in models.items()}
    for name, measured in figures.items():
        listed = [f"{key} {value:.4g}" for key, value in measured.items()]
        upcycling.log(f"{name}: {', '.join(listed)}")
    best = min(figures, key=lambda name: figures[name][holdout.names[0]])
    model = models[best]
    plains = {label(config): plain(model, i) for i, config in enumerate(configs_of(model))}
    return model, plains, holdout.scores(model), next(iter(plains))


def averaged(first: HVT, second: HVT, fraction: float) -> HVT:
    """`fraction` of the second's weights and the rest of the first's."""
    model = copy.deepcopy(second)
    theirs = first.state_dict()
    mixed = {k: torch.lerp(theirs[k], v, fraction) for k, v in second.state_dict().items()}
    model.load_state_dict(mixed)
    return model
