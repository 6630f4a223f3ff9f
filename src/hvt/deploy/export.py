"""Models for use without this package: ONNX, ONNX in int8, and `torch.export` programs."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..checkpoint.description import describe
from ..data.sample import drawn_images
from ..elastic import largest_setting
from ..errors import HVTError
from ..files import atomic_write, check_writable
from ..model import HVT
from .calibrate import BATCH, Calibration, calibrate
from .quantise import quantise
from .runtime import INPUT, METADATA, OUTPUT, OnnxModel, import_extra, sealed

FORMS = {"onnx": ".onnx", "int8": ".onnx", "torch": ".pt2"}
"""What a model can be exported to, and how such a file's name ends."""

# LayerNormalization came with 17 and Gelu with 20, which ONNX Runtime reads since 1.17. 23 has
# Attention too, but is read by few, and is not faster on a CPU.
OPSET = 20
TOLERANCE = 1e-4
"""The largest difference of a float32 export's logits, over the largest logit."""
MAX_ERROR = 0.1
"""The relative error of an int8 file's logits above which it is not written, unless asked to."""
LEAST_IMAGES = 32  # for int8: half of them to calibrate on, half to compare on


@dataclass(frozen=True)
class Comparison:
    """An exported file beside the PyTorch model it came from, on the same images."""

    form: str
    images: int
    real: bool
    """Whether the images were real, or drawn because there were none."""
    difference: float
    """The largest difference of a logit, over the largest logit."""
    relative_error: float
    """The differences' norm over the logits' norm."""
    agreement: float
    """Per cent of the images with the same top-1 class."""
    bytes: int
    torch_bytes: int
    """Of the model's parameters in float32."""
    kept: tuple[str, ...] = ()
    """The layers that an int8 file keeps in float32 for accuracy."""


def export(
    model: HVT,
    path: str | Path,
    form: str = "onnx",
    images: Tensor | None = None,
    max_error: float = MAX_ERROR,
) -> Comparison:
    """Export a model to a file that runs without hvt, and compare the two.

    `form` is `onnx`, `int8` (ONNX too) or `torch` (a `torch.export` program). `images`, prepared
    as the model's inputs, are used for the comparison; the default is random images. int8
    needs real ones: it is calibrated on every second one and compared on the others. A float32 file
    whose logits differ is not written, nor an int8 file with a relative error above
    `max_error`.
    """
    path = Path(path)
    check_name(path, form)
    for needed in () if form == "torch" else ("onnx", "onnxscript", "onnxruntime"):
        import_extra(needed)
    if not model.num_classes or model.global_pool == "":
        raise HVTError("only a model with a classifier over pooled tokens can be exported")
    model = copy.deepcopy(largest_setting(model)).cpu().float().eval().requires_grad_(False)
    config, real = model.config, images is not None
    calibration = None
    if form == "int8":
        images, calibration = _calibrate(model, images)
    elif images is None:
        images = drawn_images(BATCH, config.in_chans, config.image)
    with atomic_write(path) as temporary:
        if form == "torch":
            _write_program(model, temporary)
        else:
            write_onnx(model, temporary, calibration)
        errors = _compare(model, open_exported(temporary, form), images)
        if form == "int8" and not errors["relative_error"] <= max_error:
            raise HVTError(
                f"the relative error of int8 is {errors['relative_error']:.3f}, above the limit "
                f"of {max_error:g}, so {path} was not written: export in float32, or raise the "
                "limit with --max-error (max_error in Python)"
            )
        if form != "int8" and not errors["difference"] <= TOLERANCE:
            raise HVTError(
                f"the exported model's logits differ by {errors['difference']:.1e} of the largest, "
                f"so {path} was not written: try another version of torch or onnxruntime"
            )
        size = temporary.stat().st_size
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    kept = () if calibration is None else calibration.kept
    return Comparison(
        form, len(images), real, bytes=size, torch_bytes=parameters, kept=kept, **errors
    )


def check_name(path: Path, form: str) -> None:
    """Raise an error for an unknown form, a suffix that does not fit it, or an unwritable path."""
    if form not in FORMS:
        raise HVTError(f"unknown form {form!r}: use {', '.join(FORMS)}")
    check_writable(path)
    if path.suffix.lower() != FORMS[form]:
        better = path.with_suffix(FORMS[form]).name
        raise HVTError(f"{path} should end in {FORMS[form]}, as {better} does")


def _calibrate(model: HVT, images: Tensor | None) -> tuple[Tensor, Calibration]:
    """The images to compare on, and the calibration on the others."""
    count = 0 if images is None else len(images)
    if model.config.merge is not None:
        raise HVTError("a model that merges tokens cannot be calibrated: export it in float32")
    if images is None or count < LEAST_IMAGES:
        raise HVTError(
            f"int8 needs at least {LEAST_IMAGES} real images to calibrate and compare on, not "
            f"{count}: name them with --data (images in Python)"
        )
    # Every second one, as their order may be that of the classes.
    return images[1::2], calibrate(model, images[::2])


def write_onnx(model: HVT, path: Path, calibration: Calibration | None = None) -> None:
    """Write a float32 model in evaluation mode without comparing anything; calibrated, in int8."""
    model = largest_setting(model)
    if calibration is None:
        graph = to_onnx(model)
    else:
        # Retention looks at the attention weights and merging at the keys, which the fused operator
        # keeps to itself; it takes no bias of the keys, and needs one of the projection.
        config = model.config
        fused = config.kept is None and not config.proportional_attention and config.qkv_bias
        heads = config.num_heads if fused else None
        graph = quantise(to_onnx(calibration.model), calibration.ranges, calibration.kept, heads)
    helper = import_extra("onnx").helper
    graph.producer_name, graph.producer_version = "hvt", __version__
    precision = "float32" if calibration is None else "int8"
    helper.set_model_props(graph, {METADATA: describe(model), "precision": precision})
    try:
        content = graph.SerializeToString()
    except (ValueError, RuntimeError) as error:  # protobuf's EncodeError is a ValueError
        raise HVTError("the model is above 2 GB, more than one ONNX file can hold") from error
    path.write_bytes(sealed(content))


def to_onnx(model: HVT) -> Any:
    """The graph of a model in evaluation mode as an `onnx.ModelProto`, for batches of any size."""
    config = model.config
    example = torch.zeros(2, config.in_chans, *config.image)
    with _quiet():
        program = torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            opset_version=OPSET,
            verbose=False,
            custom_translation_table={
                torch.ops.aten.scaled_dot_product_attention.default: _attention(config.head_dim)
            },
        )
    assert program is not None
    graph = program.model_proto
    # Where each node was traced, with paths of this machine; and shapes that any reader can infer,
    # which the quantiser would not bring up to date.
    for node in graph.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*graph.graph.input, *graph.graph.output):
        del value.metadata_props[:]
    del graph.graph.value_info[:]
    del graph.graph.metadata_props[:]
    del graph.metadata_props[:]
    graph.doc_string = graph.graph.doc_string = ""
    return graph


def _attention(head_dim: int) -> Callable[..., Any]:
    """Attention in which transposing the keys is one copy for ONNX Runtime, not two.

    The exporter's own is for unknown shapes, and transposes them through a reshape.
    """
    op = import_extra("onnxscript").opset20

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *options: Any, **more: Any
    ) -> Any:
        scale = op.Constant(value_float=head_dim**-0.5)
        scores = op.Mul(op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2])), scale)
        if attn_mask is not None:  # the bias of pooled or merged keys
            scores = op.Add(scores, attn_mask)
        return op.MatMul(op.Softmax(scores, axis=-1), value)

    return attention


def _write_program(model: HVT, path: Path) -> None:
    config = model.config
    example = torch.zeros(2, config.in_chans, *config.image)
    content = io.BytesIO()  # torch's own writer does not say why it failed, such as a full disk
    with _quiet():
        program = torch.export.export(
            model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},)
        )
        torch.export.save(program, content)
    path.write_bytes(content.getbuffer())


def open_exported(path: Path, form: str) -> Callable[[Tensor], Tensor]:
    """A file that this process has just written, ready to run; a `.pt2` is unpickled."""
    if form != "torch":
        return OnnxModel(path, "cpu")
    with _quiet(), path.open("rb") as file:
        return torch.export.load(file).module()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the logs and warnings of torch's exporters."""
    shown = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(shown)


@torch.inference_mode()
def _compare(model: HVT, run: Callable[[Tensor], Tensor], images: Tensor) -> dict[str, Any]:
    pieces = images.split(BATCH)
    truth = torch.cat([model(piece) for piece in pieces])
    logits = torch.cat([run(piece) for piece in pieces])
    largest = truth.abs().max().clamp(min=1e-12)
    same = truth.argmax(dim=1) == logits.argmax(dim=1)
    return {
        "difference": ((logits - truth).abs().max() / largest).item(),
        "relative_error": ((logits - truth).norm() / truth.norm().clamp(min=1e-12)).item(),
        "agreement": 100 * same.float().mean().item(),
    }
