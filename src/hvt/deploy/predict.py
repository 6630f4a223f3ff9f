"""Images in, answers out."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator
from numbers import Integral
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from ..data.evaluation import eval_transform
from ..data.images import UnreadableImageError
from ..device import find_device
from ..errors import HVTError
from ..model import HVT
from ..zoo import DEFAULT
from .inputs import ImageInput, InMemory, each_image, is_one, open_image, source_of
from .runtime import NOT_FINITE, OnnxModel, check_classifier, open_model


@dataclasses.dataclass(frozen=True)
class ClassScore:
    """A class and how likely it is."""

    label: int
    """The index of the class among the logits."""
    name: str
    """The class by name; its index as text where the model does not know its names."""
    probability: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model says of one image; without an answer it has an error and no classes.

    `label`, `name` and `probability` are those of the likeliest class, so that
    `pandas.DataFrame(answers)` has them as columns.
    """

    source: str | None
    """The image's path; None where it has none."""
    label: int | None = None
    name: str | None = None
    probability: float | None = None
    top: tuple[ClassScore, ...] = ()
    """The likeliest classes, best first."""
    error: str | None = None
    """Why the image cannot be read, or `NOT_FINITE` where the model computes no number for it."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in `hvt predict --json`."""
        return dataclasses.asdict(self) | {"top": [dataclasses.asdict(g) for g in self.top]}


class Predictor:
    """A checkpoint that answers: `Predictor("model.safetensors")("cat.jpg")`.

    An exported file, `model.onnx`, does as well. Without either it is the built-in model, which
    knows ImageNet's 1,000 classes. `threads` are those of ONNX Runtime; torch has its own setting.
    """

    def __init__(
        self,
        checkpoint: str | Path | HVT | OnnxModel | None = None,
        device: str | torch.device = "auto",
        top: int = 5,
        batch_size: int = 64,
        threads: int = 0,
    ) -> None:
        self.top = _at_least_1("top", top)
        self.batch_size = _at_least_1("batch_size", batch_size)
        self.model: HVT | OnnxModel
        if isinstance(checkpoint, HVT):
            self.model = checkpoint.to(find_device(device)).eval()
        elif isinstance(checkpoint, OnnxModel):
            self.model = checkpoint
        else:
            checkpoint = DEFAULT if checkpoint is None else checkpoint
            self.model = open_model(checkpoint, device, threads)
        # Where images are put; ONNX Runtime takes them from the CPU wherever it runs.
        self.device = find_device(device if isinstance(self.model, HVT) else "cpu")
        named = not isinstance(checkpoint, HVT | OnnxModel)
        check_classifier(self.model, str(checkpoint) if named else "the model")
        self.transform = eval_transform(self.model)
        names = self.model.class_names
        self.class_names = names or tuple(str(i) for i in range(self.model.num_classes))

    @overload
    def __call__(self, images: InMemory, top: int | None = None) -> Answer: ...  # type: ignore[overload-overlap]
    # A path is of one image or of many: an Answer or a list, as the disk has it.
    @overload
    def __call__(self, images: str | os.PathLike[str], top: int | None = None) -> Any: ...
    @overload
    def __call__(self, images: Iterable[ImageInput], top: int | None = None) -> list[Answer]: ...
    def __call__(
        self, images: ImageInput | Iterable[ImageInput], top: int | None = None
    ) -> Answer | list[Answer]:
        """The answer for one image, or a list of answers for many.

        One image is a path, a PIL image, a uint8 array `(H, W, C)`, a tensor `(C, H, W)` of uint8
        or of floats from 0 to 1, bytes or a binary file; many are a folder, a glob pattern, or a
        list or generator of any of these. C is 3 (RGB) or 1 (grey). Anything else, a missing file
        too, is an `HVTError`. So is one image that cannot be read, or whose answer is not finite;
        among many it is an answer with an `error`. `top` is how many classes to name, instead of
        the predictor's own number.
        """
        answers = self.stream(images, top)
        if not is_one(images):
            return list(answers)
        answer = next(answers)
        if answer.error == NOT_FINITE:
            raise HVTError(f"{answer.source or 'the image'} has no answer: {NOT_FINITE}")
        if answer.error is not None:
            raise UnreadableImageError.of(answer.source or "the image", answer.error)
        return answer

    def stream(
        self, images: ImageInput | Iterable[ImageInput], top: int | None = None
    ) -> Iterator[Answer]:
        """Answers as they come, in the order of the images; a broken one stops nothing."""
        count = self.top if top is None else _at_least_1("top", top)
        each = each_image(images)
        return itertools.chain.from_iterable(
            self._batch(batch, count)
            for batch in iter(lambda: list(itertools.islice(each, self.batch_size)), [])
        )

    @torch.inference_mode()
    def _batch(self, images: list[ImageInput], top: int) -> list[Answer]:
        channels = self.model.config.in_chans
        errors: list[str | None] = []
        tensors = []
        for image in images:
            try:
                tensors.append(self.transform(open_image(image, channels)))
                errors.append(None)
            except UnreadableImageError as error:
                errors.append(error.reason)
        rows = iter(self._rows(tensors, top) if tensors else [])
        answers = []
        for image, reason in zip(images, errors, strict=True):
            row = None if reason is not None else next(rows)
            if row is None:
                answers.append(Answer(source_of(image), error=reason or NOT_FINITE))
                continue
            guesses = tuple(
                ClassScore(label, self.class_names[label], probability)
                for probability, label in zip(*row, strict=True)
            )
            first = dataclasses.asdict(guesses[0])
            answers.append(Answer(source_of(image), **first, top=guesses))
        return answers

    def _rows(self, tensors: list[Tensor], top: int) -> list[tuple[list[float], list[int]] | None]:
        """Probabilities and classes of each image, best first; None without a finite answer."""
        model = self.model
        if isinstance(model, HVT):
            logits = model(torch.stack(tensors).to(self.device, model.pos_embed.dtype)).float()
        else:
            logits = model.logits(torch.stack(tensors).to(self.device))
        best = logits.softmax(dim=1).topk(min(top, logits.shape[1]), dim=1)
        rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        finite = logits.isfinite().all(dim=1).tolist()
        return [row if good else None for row, good in zip(rows, finite, strict=True)]


def _at_least_1(name: str, value: int) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise HVTError(f"{name}={value!r} must be a whole number of at least 1")
    return int(value)
