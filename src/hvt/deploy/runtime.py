"""What runs a model: PyTorch for a checkpoint, ONNX Runtime for an ONNX file."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint import checksum
from ..checkpoint.description import read_description
from ..config import default_cfg
from ..device import find_device
from ..errors import CheckpointError, HVTError, first_line
from ..model import HVT
from ..resolve import build, resolve

INPUT, OUTPUT = "pixel_values", "logits"  # as in Hugging Face's exports
METADATA = "hvt"
"""The key under which an ONNX file carries our description of its model."""
LEAST_SHARED = 4096  # bytes of a tensor
MAX_BYTES = 2**31 - 1  # protobuf's own
NOT_FINITE = "the model's output is not finite: its file may be damaged, so use another"
"""The error of an image for which a model computes NaN or infinity."""


class OnnxModel:
    """An ONNX file that runs like a model: images in, logits out, from any number of threads.

    It runs on CUDA where ONNX Runtime can and `device` allows, else on the CPU; tensors may be
    anywhere. `threads` are those of one call; 0 takes as many as torch. Sessions that are given the
    same `shared` hold weights that they have in common once.
    It pickles as its path and these options: the file is read again where it is unpickled.
    """

    def __init__(
        self,
        path: str | Path,
        device: str | torch.device = "auto",
        threads: int = 0,
        shared: dict[bytes, Any] | None = None,
    ) -> None:
        self.path, self._options = Path(path), (str(device), threads)
        runtime = import_extra("onnxruntime")
        content, metadata = read_onnx(self.path)
        described = read_description(self.path, metadata[METADATA])
        self.config = described.config
        self.num_classes = described.config.num_classes
        self.pretrained_cfg = default_cfg(described.config) | described.preprocessing
        names = described.class_names
        self.class_names = None if names is None else tuple(names)
        self.int8 = metadata.get("precision") == "int8"
        """Whether `hvt export --int8` wrote it."""
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.log_severity_level = 3  # errors come as exceptions
        if shared is not None:
            _share_weights(content, options, shared)
            self._shared = shared  # which must live as long as the session
        providers = _providers(runtime, str(device))
        fallback = int(len(providers) > 1)  # from the CPU to the CPU would only print a banner
        try:
            # From the content that was checked: the path may be another file's by now.
            self.session = runtime.InferenceSession(
                content, options, providers=providers, enable_fallback=fallback
            )
        except Exception as error:  # ONNX Runtime has a class for each kind, and no common one
            raise _not_onnx(self.path, error) from error
        self._input_shape = (self.config.in_chans, *self.config.image)
        self._check_shapes()

    def __reduce__(self) -> tuple[Any, ...]:
        return OnnxModel, (self.path.absolute(), *self._options)

    def __call__(self, images: Tensor) -> Tensor:
        """Logits of a batch of any size: float `(B, C, H, W)` → float32 `(B, classes)`.

        As a model's, they may be NaN or infinite, for which its callers look.
        """
        want = self._input_shape
        if tuple(images.shape[1:]) != want:
            raise HVTError(
                f"images of shape {tuple(images.shape)} do not fit: this model takes "
                f"(batch, {want[0]}, {want[1]}, {want[2]})"
            )
        array = np.ascontiguousarray(images.detach().float().cpu().numpy())
        try:
            (logits,) = self.session.run([OUTPUT], {INPUT: array})
        except Exception as error:  # see above
            raise _not_onnx(self.path, error) from error
        return torch.from_numpy(logits).to(images.device)

    def _check_shapes(self) -> None:
        """Raise an error if the graph's inputs and outputs are not those of its description."""
        config = self.config
        want = {INPUT: [config.in_chans, *config.image], OUTPUT: [self.num_classes]}
        values = (*self.session.get_inputs(), *self.session.get_outputs())
        has = {x.name: x.shape[1:] for x in values if x.type == "tensor(float)"}
        if has != want or len(values) != 2:
            raise CheckpointError(
                f"{self.path} has inputs and outputs {has} where its description says "
                f"{want} (each after the batch): export it again"
            )


def read_onnx(path: Path) -> tuple[bytes, dict[str, str]]:
    """The content of a file that `hvt export` wrote, and its metadata; nothing of it runs.

    What a graph computes is not bounded by this: sizes can follow from its inputs.
    """
    onnx = import_extra("onnx")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} is above 2 GB, more than one ONNX file can hold")
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's
        raise _not_onnx(path, error) from error
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    checksum.check(path, metadata, [memoryview(content)[: -len(sealed(b""))]])
    if METADATA not in metadata:
        raise CheckpointError(
            f"{path} was not written by hvt export: its classes and preprocessing are unknown"
        )
    graph = model.graph
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    tensors = [*graph.initializer, *(t for a in attributes for t in (a.t, *a.tensors))]
    if any(tensor.external_data for tensor in tensors):
        raise CheckpointError(f"{path} has weights in another file: export it again")
    nested = any(a.HasField("g") or a.graphs or a.HasField("sparse_tensor") for a in attributes)
    if nested or model.functions or graph.sparse_initializer:
        raise CheckpointError(
            f"{path} has loops, functions or sparse weights, which hvt export never writes"
        )
    return content, metadata


def _share_weights(content: bytes, options: Any, shared: dict[bytes, Any]) -> None:
    """Let a session use weights of other sessions that are the same, byte by byte."""
    onnx, runtime = import_extra("onnx"), import_extra("onnxruntime")
    # Prepacking would copy them for each session; without it a run takes some 5 % longer.
    options.add_session_config_entry("session.disable_prepacking", "1")
    for tensor in onnx.load_model_from_string(content).graph.initializer:
        if len(tensor.raw_data) >= LEAST_SHARED:
            key = hashlib.blake2b(tensor.raw_data + str(tensor.dims).encode()).digest()
            if key not in shared:
                array = onnx.numpy_helper.to_array(tensor).copy()
                shared[key] = runtime.OrtValue.ortvalue_from_numpy(array)
            options.add_initializer(tensor.name, shared[key])


def sealed(content: bytes) -> bytes:
    """An ONNX file's content with its checksum at the end: protobuf joins the two parts."""
    onnx = import_extra("onnx")
    entry = onnx.StringStringEntryProto(key=checksum.KEY, value=checksum.checksum([content]))
    return content + onnx.ModelProto(metadata_props=[entry]).SerializeToString()


def _not_onnx(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is not an ONNX model, or is damaged, and cannot be run ({first_line(error)})"
    )


def open_model(
    model: str | Path | HVT | OnnxModel,
    device: str | torch.device = "auto",
    threads: int = 0,
    gflops: float | None = None,
) -> HVT | OnnxModel:
    """A model on a device; of a path, its checkpoint in float32 or its ONNX file.

    `gflops` asks for the largest setting of an elastic model within that cost.
    """
    if isinstance(model, OnnxModel):
        return model
    if not isinstance(model, HVT):
        source = resolve(model)
        if source.kind == "onnx":
            return OnnxModel(source.name, device, threads)
        if source.kind != "checkpoint":
            raise HVTError(
                f"{model} is a model without weights: name a checkpoint, or train it first"
            )
        opened = build(source)
        assert isinstance(opened, HVT)
        model = opened
    if gflops is not None:
        model = model.at(gflops)
    return model.to(find_device(device)).eval()


def check_classifier(model: HVT | OnnxModel, what: str | Path) -> None:
    """Raise an error for a model that does not classify images."""
    if not model.num_classes:
        raise HVTError(f"{what} has no classifier, so it cannot classify images")
    if model.config.head_pool == "":
        raise HVTError(
            f"{what} has global_pool='', so it classifies each token and not the image: "
            "use one with global_pool='avg' or 'token'"
        )


def import_extra(name: str) -> Any:
    """A module of the `export` extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise HVTError(
            f"exported models need {name.partition('.')[0]}: pip install 'hvt[export]'"
        ) from error


def _providers(runtime: Any, device: str) -> list[str]:
    cuda = "CUDAExecutionProvider" in runtime.get_available_providers()
    kind, _, _ = device.partition(":")
    if kind == "cuda" and not cuda:
        raise HVTError(
            f"this ONNX Runtime does not support the device {device!r}: "
            "pip install onnxruntime-gpu instead of onnxruntime, or use cpu"
        )
    if kind not in ("auto", "cpu", "cuda"):
        raise HVTError(f"exported models do not run on {device!r}: use auto, cpu or cuda")
    return [*(["CUDAExecutionProvider"] if cuda and kind != "cpu" else []), "CPUExecutionProvider"]
