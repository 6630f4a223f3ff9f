"""What runs a model: PyTorch for a checkpoint, ONNX Runtime for an exported file."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.description import read_description, shown
from ..config import default_cfg
from ..device import find_device
from ..errors import CheckpointError, HVTError
from ..model import HVT
from ..resolve import build, resolve
from .graph import not_onnx, read_graph

INPUT, OUTPUT = "images", "logits"
METADATA = "hvt"
"""The key under which an ONNX file carries our description of its model."""
NOT_FINITE = "the model's answer is not a finite number: its file may be damaged, so use another"
"""What is said of an image for which a model computes NaN or infinity."""


class OnnxModel:
    """An ONNX file that answers like a model: images in, logits out, from any number of threads.

    It runs on CUDA where ONNX Runtime can and `device` allows, else on the CPU; tensors may be
    anywhere. `threads` are those of one call; 0 takes `OMP_NUM_THREADS`, or a thread per core.
    """

    def __init__(
        self, path: str | Path, device: str | torch.device = "auto", threads: int = 0
    ) -> None:
        path = Path(path)
        runtime = import_extra("onnxruntime")
        content, metadata = read_graph(path, import_extra("onnx"))
        if METADATA not in metadata:
            raise CheckpointError(
                f"{path} was not written by hvt export: it does not say which classes it knows "
                "and how images are prepared for it"
            )
        described = read_description(path, metadata[METADATA])
        self.path, self.config = path, described.config
        self.num_classes = described.config.num_classes
        self.pretrained_cfg = default_cfg(described.config) | described.preprocessing
        names = described.class_names
        self.class_names = None if names is None else tuple(names)
        self.int8 = metadata.get("precision") == "int8"
        """Whether `hvt export --int8` wrote it."""
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads or _asked_threads()
        options.log_severity_level = 3  # errors come as exceptions
        providers = _providers(runtime, str(device))
        try:
            # From what was checked, not from the name, which may be another file's by now.
            self.session = runtime.InferenceSession(content, options, providers=providers)
        except Exception as error:  # ONNX Runtime has a class for each kind, and no common one
            raise not_onnx(path, error) from error
        self._check_shapes()

    @property
    def provider(self) -> str:
        """What ONNX Runtime runs it on, such as `CPUExecutionProvider`."""
        return self.session.get_providers()[0]

    def __call__(self, images: Tensor) -> Tensor:
        """Logits of a batch of any size: float `(B, C, H, W)` → float32 `(B, classes)`."""
        logits = self.logits(images)
        if not logits.isfinite().all():
            raise CheckpointError(
                f"{self.path} answers {len(images)} images with NaN or infinity: export it again"
            )
        return logits

    def logits(self, images: Tensor) -> Tensor:
        """The same, finite or not: for those who judge a batch image by image."""
        want = (self.config.in_chans, *self.config.image)
        if images.ndim != 4 or tuple(images.shape[1:]) != want:
            raise HVTError(
                f"images of shape {tuple(images.shape)} do not fit: this model takes "
                f"(batch, {want[0]}, {want[1]}, {want[2]})"
            )
        array = np.ascontiguousarray(images.detach().float().cpu().numpy())
        try:
            (logits,) = self.session.run([OUTPUT], {INPUT: array})
        except Exception as error:  # see above
            raise not_onnx(self.path, error) from error
        if logits.shape != (len(array), self.num_classes):
            raise CheckpointError(
                f"{self.path} answers {len(array)} images with logits of shape {logits.shape}: "
                "export it again"
            )
        return torch.from_numpy(logits).to(images.device)

    def _check_shapes(self) -> None:
        """Refuse a file whose graph is not what its description says."""
        config = self.config
        want = {INPUT: [config.in_chans, *config.image], OUTPUT: [self.num_classes]}
        values = (*self.session.get_inputs(), *self.session.get_outputs())
        has = {x.name: (x.type, x.shape) for x in values}
        for name, shape in want.items():
            kind, dims = has.get(name, ("", ()))
            if len(has) != 2 or kind != "tensor(float)" or list(dims[1:]) != shape:
                raise CheckpointError(
                    f"{self.path} takes and gives {shown(has)}, which is not what it says of "
                    f"itself (batch, then {shape} for {name}): export it again"
                )


def open_model(
    path: str | Path, device: str | torch.device = "auto", threads: int = 0
) -> HVT | OnnxModel:
    """The model of a checkpoint or of an exported file, in float32 and ready to answer."""
    source = resolve(path)
    if source.kind == "onnx":
        return OnnxModel(source.name, device, threads)
    if source.kind != "checkpoint":
        raise HVTError(f"{path} is a model without weights: name a checkpoint, or train it first")
    model = build(source)
    assert isinstance(model, HVT)
    return model.to(find_device(device))


def check_classifier(model: HVT | OnnxModel, what: str | Path) -> None:
    """Refuse a model that could not name what it sees."""
    if not model.num_classes:
        raise HVTError(f"{what} has no classifier, so it cannot name what it sees")
    if model.config.head_pool == "":
        raise HVTError(
            f"{what} has global_pool='', so it names each token and not the image: "
            "use one with global_pool='avg' or 'token'"
        )


def is_onnx(path: str | Path) -> bool:
    """Whether a name is that of an ONNX file, by its form; protobuf has no mark to know it by."""
    return Path(path).suffix.lower() == ".onnx"


def import_extra(name: str) -> Any:
    """A module of the `export` extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise HVTError(
            f"exported models need {name.partition('.')[0]}: pip install 'hvt[export]'"
        ) from error


def _asked_threads() -> int:
    """OpenMP's own setting, of which a list is one number for each level; 0 leaves it open."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def _providers(runtime: Any, device: str) -> list[str]:
    cuda = "CUDAExecutionProvider" in runtime.get_available_providers()
    kind, _, _ = device.partition(":")
    if kind == "cuda" and not cuda:
        raise HVTError(
            f"this ONNX Runtime does not know the device {device!r}: "
            "pip install onnxruntime-gpu in place of onnxruntime, or use cpu"
        )
    if kind not in ("auto", "cpu", "cuda"):
        raise HVTError(f"exported models do not run on {device!r}: use auto, cpu or cuda")
    return [*(["CUDAExecutionProvider"] if cuda and kind != "cpu" else []), "CPUExecutionProvider"]
