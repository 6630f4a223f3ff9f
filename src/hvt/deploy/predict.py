"""Images in, predictions out."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from ..data.evaluation import eval_transform
from ..data.images import UnreadableImageError
from ..device import find_device
from ..errors import HVTError
from ..fields import check_whole
from ..model import HVT
from ..zoo import DEFAULT
from .inputs import ImageInput, InMemory, each_image, is_one, open_image, source_of
from .runtime import NOT_FINITE, OnnxModel, check_classifier, open_model


@dataclasses.dataclass(frozen=True)
class ClassScore:
    """A class and its probability."""

    label: int
    """The index of the class among the logits."""
    name: str
    """The class by name; its index as text where the model does not know its names."""
    probability: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The top classes of one image, or the error that it has instead.

    `label`, `name` and `probability` are those of the top-1 class, so that
    `pandas.DataFrame(predictions)` has them as columns.
    """

    source: str | None
    """The image's path; None where it has none."""
    label: int | None = None
    name: str | None = None
    probability: float | None = None
    top: tuple[ClassScore, ...] = ()
    """The most probable classes, best first."""
    error: str | None = None
    """Why the image cannot be read, or `NOT_FINITE`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in `hvt predict --json`."""
        return dataclasses.asdict(self) | {"top": [dataclasses.asdict(s) for s in self.top]}


class Predictor:
    """A checkpoint that classifies images: `Predictor("model.safetensors")("cat.jpg")`.

    Also takes an ONNX file, a built-in model's name or a model; the default is the built-in model
    for ImageNet's 1,000 classes. `threads` are those of ONNX Runtime; 0 takes as many as torch.
    """

    def __init__(
        self,
        checkpoint: str | Path | HVT | OnnxModel | None = None,
        device: str | torch.device = "auto",
        top: int = 5,
        batch_size: int = 64,
        threads: int = 0,
    ) -> None:
        check_whole(top=top, batch_size=batch_size)
        self.top, self.batch_size = top, batch_size
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
    def __call__(self, images: InMemory, top: int | None = None) -> Prediction: ...  # type: ignore[overload-overlap]
    # A path is of one image or of many, depending on what is on the disk.
    @overload
    def __call__(self, images: str | os.PathLike[str], top: int | None = None) -> Any: ...
    @overload
    def __call__(
        self, images: Iterable[ImageInput], top: int | None = None
    ) -> list[Prediction]: ...
    def __call__(
        self, images: ImageInput | Iterable[ImageInput], top: int | None = None
    ) -> Prediction | list[Prediction]:
        """The prediction for one image, or a list of predictions for many.

        One image is a path, a PIL image, a uint8 array `(H, W, C)`, a tensor `(C, H, W)` of uint8
        or of floats from 0 to 1, bytes or a binary file; many are a folder, a glob pattern, or a
        list or generator of any of these. C is 3 (RGB) or 1 (grey). Anything else, a missing file
        too, raises an `HVTError`. So does one image that cannot be read, or whose logits are not
        finite; among many it gets a prediction with an `error`. `top` overrides the predictor's.
        """
        predictions = self.stream(images, top)
        if not is_one(images):
            return list(predictions)
        prediction = next(predictions)
        if prediction.error == NOT_FINITE:
            raise HVTError(f"{prediction.source or 'the image'} cannot be classified: {NOT_FINITE}")
        if prediction.error is not None:
            raise UnreadableImageError.of(prediction.source or "the image", prediction.error)
        return prediction

    def stream(
        self, images: ImageInput | Iterable[ImageInput], top: int | None = None
    ) -> Iterator[Prediction]:
        """Predictions one by one, in the order of the images; a broken image stops nothing."""
        count = self.top if top is None else top
        check_whole(top=count)
        each = each_image(images)
        return itertools.chain.from_iterable(
            self._batch(batch, count)
            for batch in iter(lambda: list(itertools.islice(each, self.batch_size)), [])
        )

    @torch.inference_mode()
    def _batch(self, images: list[ImageInput], top: int) -> list[Prediction]:
        predictions, tensors = [], {}
        for place, image in enumerate(images):
            reason = NOT_FINITE  # unless the model says more
            try:
                tensors[place] = self.transform(open_image(image, self.model.config.in_chans))
            except UnreadableImageError as error:
                reason = error.reason
            predictions.append(Prediction(source_of(image), error=reason))
        if not tensors:
            return predictions
        logits = self._logits(torch.stack(list(tensors.values())))
        best = logits.softmax(dim=1).topk(min(top, logits.shape[1]), dim=1)
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        finite = logits.isfinite().all(dim=1).tolist()
        for place, row, good in zip(tensors, rows, finite, strict=True):
            if good:
                scores = tuple(
                    ClassScore(label, self.class_names[label], probability)
                    for label, probability in zip(*row, strict=True)
                )
                first = dataclasses.asdict(scores[0])
                predictions[place] = Prediction(predictions[place].source, **first, top=scores)
        return predictions

    def _logits(self, images: Tensor) -> Tensor:
        """`(B, C, H, W)` → float32 `(B, classes)`, finite or not."""
        model = self.model
        if isinstance(model, HVT):
            return model(images.to(self.device, model.pos_embed.dtype)).float()
        return model.logits(images)
