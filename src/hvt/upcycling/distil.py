"""How a source is distilled into its own pooled copy: losses, a learner, and its measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.loader import Batch, TrainBatches
from ..distributed import DistributedContext, collective_device
from ..elastic import configs_of, label, plain
from ..model import HVT
from ..training.learner import Learner
from ..training.optimize import seed_all, seed_dropout
from ..training.recipe import Recipe
from ..training.sandwich import divergence
from .photos import Normalise, Size, unpack
from .settings import Settings
from .student import Outputs, Student


def feature_loss(feature: Tensor, target: Tensor) -> Tensor:
    """The squared difference over the target's square."""
    feature, target = feature.float(), target.float()
    return (feature - target).square().sum() / target.square().sum().clamp(min=1e-12)


def distillation_loss(outputs: Outputs, target: Outputs, head: bool) -> Tensor:
    """Of the features and, where there is a head, the KL divergence of the logits."""
    loss = feature_loss(outputs.feature, target.feature)
    return loss + divergence(outputs.logits, target.logits).mean() if head else loss


def mixed(views: Sequence[Tensor], kept: Tensor) -> list[Tensor]:
    """Mixup of bytes: each crop blended with its opposite in the batch, alike at every size.

    `(B, C, H, W)` each, and `(B,)` → float of the same shapes. The source labels what it is shown,
    so the blends need no labels, and few photos overfit less.
    """
    keep = kept.view(-1, 1, 1, 1)
    return [torch.lerp(view.flip(0).float(), view.float(), keep) for view in views]


class Distiller(Learner):
    """A learner whose teacher is the source of its own weights.

    Batches are crops for the source and for the student, as flat bytes.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: HVT,
        batches: TrainBatches,
        processes: DistributedContext,
        device: torch.device,
        *,
        source: HVT,
        sizes: Sequence[Size],
        settings: Settings,
    ) -> None:
        self.source, self.sizes, self.settings = source.eval(), sizes, settings
        self.source.requires_grad_(False)
        self.normalise = Normalise(model, device)
        super().__init__(recipe, model, batches, processes, device)

    def _network(self) -> nn.Module:
        return Student(self.model)

    def _loss(self, batch: Batch, update: int) -> Tensor:
        seed_all(self.recipe.seed, update, self.device)
        kept = self._kept(batch.rows) if self.settings.mixup else None
        seed_dropout(self.recipe.seed, update, batch.shard, self.device)
        views = unpack(batch.images, self.model.config.in_chans, self.sizes)
        if kept is not None:
            on_device = [view.to(self.device, non_blocking=True) for view in views]
            views = mixed(on_device, kept.to(self.device))
        theirs = self.normalise(views[0])
        ours = theirs if len(views) == 1 else self.normalise(views[-1])
        return self._taught(ours, theirs)

    def _taught(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """The loss of the student's images with the source's outputs for its own."""
        with self._autocast():
            with torch.no_grad():
                target = Student(self.source)(theirs)
            outputs = self.network(ours)
        return distillation_loss(outputs, target, self.model.num_classes > 0)

    def _kept(self, rows: Tensor | None) -> Tensor:
        """How much of each crop of a microbatch stays when crops are mixed, drawn for all."""
        size = self.recipe.batch_size
        kept = torch.where(torch.rand(size) < self.settings.mixup, torch.rand(size), 1.0)
        return kept if rows is None else kept[rows]

    def _trial(self, size: int) -> Tensor:
        """A step on zeros, the source's part included."""
        configs = (self.model.config, self.source.config)
        shapes = [(size, config.in_chans, *config.image) for config in configs]
        return self._taught(*(torch.zeros(shape, device=self.device) for shape in shapes))


# ── how alike they are ──────────────────────────────────────────────────────────────────────────


class Agreement(NamedTuple):
    """How close a model is to its source."""

    agreement: float
    """Per cent of the photos with the same top-1 class; cosine similarity without a head."""
    kl: float
    """KL(source ‖ student), averaged; 1 - cosine similarity without a head."""
    photos: int


class HoldoutAgreement:
    """Held-out photos with the source's outputs, on which models are compared with it.

    `views` are this process's photos as the source sees them, then as each setting of the models
    does; the largest setting counts `weight` times.
    """

    def __init__(
        self,
        source: HVT,
        views: Sequence[Tensor],
        processes: DistributedContext,
        device: torch.device,
        weight: float = 1.0,
    ) -> None:
        self.processes, self.device, self.weight = processes, device, weight
        self.normalise = Normalise(source, device)
        self.head = source.num_classes > 0
        self.names = ("kl", "agreement") if self.head else ("distance", "cosine")
        theirs, *self.views = views
        self.outputs = self._outputs(source, theirs)

    @torch.inference_mode()
    def _outputs(self, model: HVT, images: Tensor) -> Tensor:
        """Logits, or features where there is no head."""
        training = model.training
        model.eval()
        pieces = [model(self.normalise(piece)).float().cpu() for piece in images.split(32)]
        model.train(training)
        return torch.cat(pieces)

    def scores(self, model: HVT) -> dict[str, Agreement]:
        """How close each setting is to the source, over the photos of all processes."""
        configs = configs_of(model)
        models = [model] if len(configs) == 1 else [plain(model, i) for i in range(len(configs))]
        parts = zip(configs, models, self.views, strict=True)
        return {label(config): self._measure(one, images) for config, one, images in parts}

    def _measure(self, model: HVT, images: Tensor) -> Agreement:
        rows = compare(self._outputs(model, images), self.outputs, self.head).double()
        sums = torch.cat((rows.sum(dim=0), rows.new_tensor([len(rows)])))
        total = self.processes.all_reduce(sums.to(collective_device(self.device)))
        same, kl, photos = total.tolist()
        return Agreement(100 * same / photos, kl / photos, int(photos))

    def figures(self, model: HVT) -> dict[str, float]:
        """What a training notes: see `means`."""
        return self.means(self.scores(model))

    def means(self, scores: dict[str, Agreement]) -> dict[str, float]:
        """The means over the settings by name; where there are several, each one's too."""
        weights = [self.weight] + [1.0] * (len(scores) - 1)
        found: dict[str, float] = {}
        for name, field in zip(self.names, ("kl", "agreement"), strict=True):
            values = {key: getattr(score, field) for key, score in scores.items()}
            found[name] = sum(map(float.__mul__, weights, values.values())) / sum(weights)
            if len(scores) > 1:
                found |= {f"{name}_{key}": value for key, value in values.items()}
        return found


def compare(outputs: Tensor, target: Tensor, head: bool) -> Tensor:
    """For each image whether the top-1 class is the same, and KL: `(B, 2)`.

    Without a head it is the features' cosine similarity, and what it lacks of one.
    """
    if not head:
        alike = F.cosine_similarity(outputs.float(), target.float(), dim=1)
        return torch.stack((alike, 1 - alike), dim=1)
    same = outputs.argmax(dim=1).eq(target.argmax(dim=1))
    return torch.stack((same.float(), divergence(outputs, target)), dim=1)
