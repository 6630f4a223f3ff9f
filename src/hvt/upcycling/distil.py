"""How a source is distilled into its own pooled copy: losses, a learner, and its measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.loader import Batch
from ..distributed import DistributedContext, collective_device
from ..elastic import replica
from ..model import HVT
from ..training.learner import Learner
from ..training.optimize import seed_all, seed_dropout
from ..training.sandwich import divergence
from .photos import Normalise, Size, unpack
from .settings import Settings
from .student import Outputs, Student


def distillation_loss(outputs: Outputs, target: Outputs, head: bool) -> Tensor:
    """The features' squared difference over the target's square; of a head, the logits' KL too."""
    ours, theirs = outputs.feature.float(), target.feature.float()
    loss = (ours - theirs).square().sum() / theirs.square().sum().clamp(min=1e-12)
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
        self, *learner: Any, source: HVT, sizes: Sequence[Size], settings: Settings
    ) -> None:
        self.source, self.sizes, self.settings = source.eval(), sizes, settings
        self.source.requires_grad_(False)
        super().__init__(*learner)
        self.normalise = Normalise(source, self.device)

    def _network(self) -> nn.Module:
        return Student(self.model)

    def _loss(self, batch: Batch, update: int) -> Tensor:
        seed_all(self.recipe.seed, update, self.device)
        mixup, size = self.settings.mixup, self.recipe.batch_size
        if mixup:  # how much of each crop stays, drawn for the whole batch
            kept = torch.where(torch.rand(size) < mixup, torch.rand(size), 1.0)
            kept = kept if batch.rows is None else kept[batch.rows]
        seed_dropout(self.recipe.seed, update, batch.shard, self.device)
        views = unpack(batch.images, self.model.config.in_chans, self.sizes)
        if mixup:
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

    def _trial(self, size: int) -> Tensor:
        """A step on zeros, the source's part included."""
        configs = (self.model.config, self.source.config)
        shapes = [(size, config.in_chans, *config.image) for config in configs]
        return self._taught(*(torch.zeros(shape, device=self.device) for shape in shapes))


# ── how alike they are ──────────────────────────────────────────────────────────────────────────


class HoldoutAgreement:
    """Held-out photos with the source's outputs, on which models are compared with it.

    `views` are this process's photos, by image size.
    """

    def __init__(
        self,
        source: HVT,
        views: Mapping[Size, Tensor],
        processes: DistributedContext,
        device: torch.device,
    ) -> None:
        self.processes, self.device, self.views = processes, device, views
        self.normalise = Normalise(source, device)
        self.head = source.num_classes > 0
        self.names = ("kl", "agreement") if self.head else ("distance", "cosine")
        self.outputs = self._outputs(source)
        self.photos = int(self._total(torch.tensor([len(self.outputs)])).item())

    @torch.inference_mode()
    def _outputs(self, model: HVT) -> Tensor:
        """Logits, or features where there is no head."""
        images, model = self.views[model.config.image], replica(model)
        return torch.cat([model(self.normalise(part)).float().cpu() for part in images.split(32)])

    def figures(self, model: HVT) -> dict[str, float]:
        """KL(source ‖ model) and per cent of the same top-1 class, by `names`, see `compare`.

        Averaged over the photos of all processes.
        """
        rows = compare(self._outputs(model), self.outputs, self.head).double()
        same, kl = (self._total(rows.sum(dim=0)) / self.photos).tolist()
        return dict(zip(self.names, (kl, 100 * same), strict=True))

    def _total(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        return self.processes.all_reduce(values.to(collective_device(self.device)))


def compare(outputs: Tensor, target: Tensor, head: bool) -> Tensor:
    """For each image whether the top-1 class is the same, and KL: `(B, 2)`.

    Without a head it is the features' cosine similarity, and what it lacks of one.
    """
    if not head:
        alike = F.cosine_similarity(outputs.float(), target.float(), dim=1)
        return torch.stack((alike, 1 - alike), dim=1)
    same = outputs.argmax(dim=1).eq(target.argmax(dim=1))
    return torch.stack((same.float(), divergence(outputs, target)), dim=1)
