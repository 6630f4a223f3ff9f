"""Images in, predictions out."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, overload

import torch
from torch import Tensor

from ..data.evaluation import eval_transform
from ..data.images import UnreadableImageError
from ..device import find_device
from ..errors import HVTError
from ..fields import check_whole
from ..model import HVT
from ..training.state import weights_digest
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
    """The top classes of one image, or its error.

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


class ImageModel:
    """A model that takes images of any kind in batches, the next of which threads decode."""

    def __init__(
        self,
        checkpoint: str | Path | HVT | OnnxModel | None = None,
        device: str | torch.device = "auto",
        batch_size: int = 64,
        threads: int = 0,
        gflops: float | None = None,
    ) -> None:
        check_whole(batch_size=batch_size)
        self.batch_size = batch_size
        checkpoint = DEFAULT if checkpoint is None else checkpoint
        self.model = open_model(checkpoint, device, threads, gflops)
        # Where images are put; ONNX Runtime takes them from the CPU wherever it runs.
        self.device = find_device(device if isinstance(self.model, HVT) else "cpu")
        self.transform = eval_transform(self.model)

    @property
    def digest(self) -> str:
        """A digest of the model: its weights, config and preprocessing, or its ONNX file."""
        if not isinstance(self.model, HVT):
            return hashlib.blake2b(self.model.path.read_bytes(), digest_size=16).hexdigest()
        cfg = sorted(self.model.pretrained_cfg.items())
        return f"{weights_digest(self.model)} {self.model.config} {cfg}"

    def batches(
        self, images: ImageInput | Iterable[ImageInput]
    ) -> Iterator[tuple[list[ImageInput], Tensor, list[str | None]]]:
        """Images, the tensor `(B, C, H, W)` of those that can be read, and each one's error."""
        each = each_image(images)
        with ThreadPoolExecutor(min(8, torch.get_num_threads())) as threads:

            def start() -> tuple[list[ImageInput], Iterator[Tensor | UnreadableImageError]]:
                batch = list(itertools.islice(each, self.batch_size))
                return batch, threads.map(self._read, batch)

            batch, waiting = start()
            while batch:
                following = start()
                read = list(waiting)
                good = [tensor for tensor in read if isinstance(tensor, Tensor)]
                errors = [x.reason if isinstance(x, UnreadableImageError) else None for x in read]
                yield batch, torch.stack(good) if good else torch.empty(0), errors
                batch, waiting = following

    def _read(self, image: ImageInput) -> Tensor | UnreadableImageError:
        try:
            return self.transform(open_image(image, self.model.config.in_chans))
        except UnreadableImageError as error:
            return error


def raise_unreadable(source: str | None, error: str | None) -> NoReturn:
    """Raise the error of an image that stands alone."""
    if error == NOT_FINITE:
        raise HVTError(f"{source or 'the image'} cannot be classified: {NOT_FINITE}")
    raise UnreadableImageError.of(source or "the image", str(error))


class Predictor(ImageModel):
    """A checkpoint that classifies images: `Predictor("model.safetensors")("cat.jpg")`.

    Also accepts an ONNX file, the name of a built-in model or a model; the default is the built-in
    ImageNet model. `threads` are those of ONNX Runtime; 0 uses as many as torch.
    `gflops` selects the largest setting of an elastic model within that cost.
    """

    def __init__(
        self,
        checkpoint: str | Path | HVT | OnnxModel | None = None,
        device: str | torch.device = "auto",
        top: int = 5,
        batch_size: int = 64,
        threads: int = 0,
        gflops: float | None = None,
    ) -> None:
        check_whole(top=top)
        self.top = top
        super().__init__(checkpoint, device, batch_size, threads, gflops)
        named = isinstance(checkpoint, str | Path)
        check_classifier(self.model, str(checkpoint) if named else "the model")
        names = self.model.class_names
        self.class_names = names or tuple(str(i) for i in range(self.model.num_classes))

    @overload
    def __call__(self, images: InMemory) -> Prediction: ...  # type: ignore[overload-overlap]
    # A path is of one image or of many, depending on what is on the disk.
    @overload
    def __call__(self, images: str | os.PathLike[str]) -> Any: ...
    @overload
    def __call__(self, images: Iterable[ImageInput]) -> list[Prediction]: ...
    def __call__(self, images: ImageInput | Iterable[ImageInput]) -> Prediction | list[Prediction]:
        """The prediction for one image, or a list of predictions for many.

        One image is a path, a PIL image, a uint8 array `(H, W, C)`, a tensor `(C, H, W)` of uint8
        or of floats from 0 to 1, bytes or a binary file; many are a folder, a glob pattern, or a
        list or generator of any of these. C is 3 (RGB) or 1 (grey). Anything else, a missing file
        too, raises an `HVTError`. So does one image that cannot be read, or whose logits are not
        finite; among many it gets a prediction with an `error`.
        """
        predictions = self.stream(images)
        if not is_one(images):
            return list(predictions)
        prediction = next(predictions)
        if prediction.error is not None:
            raise_unreadable(prediction.source, prediction.error)
        return prediction

    def stream(self, images: ImageInput | Iterable[ImageInput]) -> Iterator[Prediction]:
        """Predictions one by one, in the order of the images; unreadable images have an `error`."""
        return itertools.chain.from_iterable(
            itertools.starmap(self._predictions, self.batches(images))
        )

    @torch.inference_mode()
    def _predictions(
        self, images: list[ImageInput], tensors: Tensor, errors: list[str | None]
    ) -> list[Prediction]:
        rows: Iterator[Any] = iter(())
        model = self.model
        if len(tensors):
            dtype = model.pos_embed.dtype if isinstance(model, HVT) else torch.float32
            logits = model(tensors.to(self.device, dtype)).float()
            best = logits.softmax(dim=1).topk(min(self.top, logits.shape[1]), dim=1)
            finite = logits.isfinite().all(dim=1).tolist()
            rows = zip(best.indices.tolist(), best.values.tolist(), finite, strict=True)
        predictions = []
        for image, error in zip(images, errors, strict=True):
            labels, probabilities, good = next(rows) if error is None else ((), (), False)
            if not good:
                predictions.append(Prediction(source_of(image), error=error or NOT_FINITE))
                continue
            scores = tuple(
                ClassScore(label, self.class_names[label], probability)
                for label, probability in zip(labels, probabilities, strict=True)
            )
            first = dataclasses.asdict(scores[0])
            predictions.append(Prediction(source_of(image), **first, top=scores))
        return predictions
