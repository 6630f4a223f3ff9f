"""Learning all settings of an elastic model at once: the sandwich rule.

Each step runs the largest setting, the smallest and one in between. The largest learns from labels
or another model, the others from labels and from the largest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.loader import Batch
from ..elastic import OWN, ElasticSettings, configs_of, label, make_elastic, plain
from ..model import HVT
from .learner import Learner


class Sandwich(nn.Module):
    """Some settings of an elastic model, each on its own view of a batch."""

    def __init__(self, model: HVT) -> None:
        super().__init__()
        assert isinstance(model.settings, ElasticSettings)
        self.own = list(model.settings.parameters())
        count = len(configs_of(model))
        self.all = [model, *(plain(model, place) for place in range(1, count))]
        self.models = nn.ModuleList(self.all)

    def forward(self, views: Sequence[Tensor], chosen: Sequence[int]) -> list[Tensor]:
        """Logits of the chosen settings, the largest first; `views` has a batch for each."""
        outputs = [self.all[i](view) for i, view in zip(chosen, views, strict=True)]
        # Or DDP would wait for the gradients of settings that have no turn.
        idle = torch.stack([parameter.sum() for parameter in self.own]).sum()
        outputs[0] = outputs[0] + 0 * idle
        return outputs


def chosen_settings(count: int, seed: int, update: int) -> list[int]:
    """Which of the settings, largest first, have their turn in a step."""
    chosen = sorted({0, count - 1})
    if count > 2:
        chosen.insert(1, random.Random(f"{seed}/{update}").randrange(1, count - 1))
    return chosen


def divergence(logits: Tensor, target: Tensor) -> Tensor:
    """KL(teacher ‖ student) of each image: `(B, classes)` twice → `(B,)`."""
    ours, theirs = F.log_softmax(logits.float(), dim=1), F.log_softmax(target.float(), dim=1)
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=1)


def sandwich_loss(largest: Tensor, cheaper: Sequence[Tensor], weight: float) -> Tensor:
    """The mean of losses, of which the largest setting's counts `weight` times."""
    return torch.stack([weight * largest, *cheaper]).sum() / (weight + len(cheaper))


class ElasticLearner(Learner):
    """A learner of all settings of a model, from labels."""

    sandwich: Sandwich

    def _network(self) -> nn.Module:
        self.sandwich = Sandwich(self.model)
        return self.sandwich

    def _models(self) -> list[HVT]:
        return self.sandwich.all

    def _loss(self, batch: Batch, update: int) -> Tensor:
        images, target = self._prepare(batch, update)
        chosen = chosen_settings(len(self.sandwich.all), self.recipe.seed, update)
        with self._autocast():
            outputs = self.network([images] * len(chosen), chosen)
            largest = self._objective(outputs[0], images, target)
            teacher, alpha = outputs[0].detach(), self.recipe.distill_alpha
            taught = [
                (1 - alpha) * self._label_loss(one, target)
                + alpha * divergence(one, teacher).mean()
                for one in outputs[1:]
            ]
            return sandwich_loss(largest, taught, weight=1.0)

    def _trial(self, size: int) -> Tensor:
        config = self.model.config
        images = torch.zeros(size, config.in_chans, *config.image, device=self.device)
        chosen = chosen_settings(len(self.sandwich.all), 0, 0)
        outputs = self.network([images] * len(chosen), chosen)
        return torch.stack([one.float().logsumexp(1).mean() for one in outputs]).sum()


def give_stages(model: HVT, stages: Sequence[int]) -> None:
    """Make a model elastic, with a setting for each number of stages; its own are the fewest."""
    cheaper = sorted(set(stages))[1:]
    make_elastic(model, [model.config.replace(stages=number) for number in cheaper], OWN)


def evaluate_settings(
    model: HVT, evaluate: Callable[[HVT], dict[str, float]], weight: float = 1.0
) -> dict[str, float]:
    """A model's figures; of an elastic one the settings', as in `top1_0.7G`, and their means.

    The largest setting counts `weight` times.
    """
    configs = configs_of(model)
    if len(configs) == 1:
        return evaluate(model)
    figures: dict[str, float] = {}
    total = weight + len(configs) - 1
    for place, config in enumerate(configs):
        times = 1.0 if place else weight
        for name, value in evaluate(plain(model, place)).items():
            figures[name] = figures.get(name, 0.0) + times * value / total
            figures[f"{name}_{label(config)}"] = value
    return figures
