"""Images in, embeddings out: the features that a model's classifier sees."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError
from ..model import HVT
from .inputs import ImageInput, is_one, source_of
from .predict import ImageModel, raise_unreadable
from .runtime import INPUT, NOT_FINITE, OUTPUT, OnnxModel, import_extra, read_onnx


@dataclass(frozen=True)
class Embedding:
    """The embedding of one image, or its error."""

    source: str | None
    """The image's path; None where it has none."""
    vector: np.ndarray | None = None  # (D,), float32
    error: str | None = None


class Embedder(ImageModel):
    """A checkpoint that embeds images: `Embedder()("IMAGES")` is an array with one row per image.

    Accepts the same models as `Predictor`; no classifier is needed.
    """

    def __call__(self, images: ImageInput | Iterable[ImageInput]) -> np.ndarray:
        """`(D,)` for one image, `(N, D)` for many; an image that cannot be read raises an error."""
        rows = []
        for embedding in self.stream(images):
            if embedding.vector is None:
                raise_unreadable(embedding.source, embedding.error)
            rows.append(embedding.vector)
        return rows[0] if is_one(images) else np.stack(rows)

    @torch.inference_mode()
    def stream(self, images: ImageInput | Iterable[ImageInput]) -> Iterator[Embedding]:
        """Embeddings one by one, in the order of the images; unreadable images have an `error`."""
        for batch, tensors, errors in self.batches(images):
            vectors = self._features(tensors) if len(tensors) else tensors
            rows = iter(vectors.float().cpu().numpy())
            for image, error in zip(batch, errors, strict=True):
                vector = next(rows) if error is None else None
                if vector is not None and not np.isfinite(vector).all():
                    vector, error = None, NOT_FINITE
                yield Embedding(source_of(image), vector, error)

    @functools.cached_property
    def _features(self) -> Callable[[Tensor], Tensor]:
        """What computes `(B, C, H, W)` → `(B, D)`."""
        model = self.model
        if not isinstance(model, HVT):
            return _onnx_features(model)

        def features(images: Tensor) -> Tensor:
            tokens = model.forward_features(images.to(self.device, model.pos_embed.dtype))
            return model.forward_head(tokens, pre_logits=True)

        return features


def _onnx_features(model: OnnxModel) -> Callable[[Tensor], Tensor]:
    """What runs an exported model up to the input of its classifier, its last multiplication."""
    onnx, runtime = import_extra("onnx"), import_extra("onnxruntime")
    proto = onnx.load_model_from_string(read_onnx(model.path)[0])
    makers = {name: node for node in proto.graph.node for name in node.output}
    weights = {tensor.name for tensor in proto.graph.initializer}
    name = OUTPUT
    while name in makers and makers[name].op_type not in ("Gemm", "MatMul"):
        name = next((n for n in makers[name].input if n not in weights), "")
    if name not in makers:
        raise CheckpointError(f"{model.path} has no classifier to take the input of")
    features = makers[name].input[0]
    proto.graph.output.append(onnx.helper.make_empty_tensor_value_info(features))
    options = runtime.SessionOptions()
    options.intra_op_num_threads = model.session.get_session_options().intra_op_num_threads
    providers = model.session.get_providers()
    session = runtime.InferenceSession(proto.SerializeToString(), options, providers=providers)
    return lambda images: torch.from_numpy(session.run([features], {INPUT: images.numpy()})[0])
