"""Checkpoints in and out: our own files whole, others' read safely, all at any size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from timm.models import adapt_input_conv
from torch import Tensor

from .config import HVTConfig
from .errors import CheckpointError, HVTError
from .files import whole_file
from .foreign import from_transformers, infer_config, read_pickle, strip
from .model import HVT
from .resize import resize_patches, resize_positions

FORMAT = 1
PREPROCESSING = ("mean", "std", "interpolation", "crop_pct", "crop_mode")


@dataclass
class Checkpoint:
    """What a weights file says, whoever wrote it."""

    path: Path
    config: HVTConfig
    tensors: dict[str, Tensor]
    preprocessing: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] | None = None


def save(
    model: HVT,
    path: str | Path,
    class_names: Sequence[str] | None = None,
    preprocessing: dict[str, Any] | None = None,
) -> None:
    """Write weights, config, class names and preprocessing to one safetensors file, atomically.

    Names and preprocessing (mean, std, interpolation, crop_pct, crop_mode) default to the model's.
    """
    names = model.class_names if class_names is None else class_names
    if names is not None and len(names) != model.num_classes:
        raise HVTError(f"{len(names)} class names do not fit {model.num_classes} classes")
    known = model.pretrained_cfg | (preprocessing or {})
    described = {
        "format": FORMAT,
        "config": model.config.to_dict(),
        "class_names": None if names is None else list(names),
        "preprocessing": {key: known[key] for key in PREPROCESSING if key in known},
    }
    tensors = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    with whole_file(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", "hvt": json.dumps(described)})


def load(path: str | Path, device: str | torch.device = "cpu", **overrides: Any) -> HVT:
    """The model of a checkpoint, in evaluation mode.

    Reads our files, the authors' `.pth`, DeiT's and timm's plain ViTs (`.pth` or safetensors) and
    Hugging Face directories. `overrides` are fields of `HVTConfig`: another `img_size`,
    `patch_size` or `in_chans` resizes the weights, another `num_classes` gets a new head.
    """
    checkpoint = read(path, overrides)
    model = HVT(checkpoint.config.replace(**overrides))
    _fill(model, checkpoint)
    model.pretrained_cfg.update(checkpoint.preprocessing)
    if checkpoint.class_names and len(checkpoint.class_names) == model.num_classes:
        model.pretrained_cfg["label_names"] = tuple(checkpoint.class_names)
    return model.to(device).eval()


def load_into(model: HVT, path: str | Path) -> None:
    """Take a checkpoint's weights into a model of the same architecture, resizing them to it."""
    _fill(model, read(path, model.config.to_dict()))


def read(path: str | Path, hints: dict[str, Any] | None = None) -> Checkpoint:
    """What a file or directory says; `hints` settle what a foreign file leaves open."""
    path = Path(path)
    if path.is_dir():
        return _read_directory(path, hints or {})
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if start[8:9] == b"{":
        return _read_safetensors(path, hints or {})
    if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
        tensors, arguments = read_pickle(path)
        return _foreign(path, tensors, arguments | (hints or {}))
    raise CheckpointError(
        f"{path} is neither a safetensors nor a PyTorch file, or its beginning is damaged"
    )


# ── reading ─────────────────────────────────────────────────────────────────────────────────────


def _read_safetensors(path: Path, hints: dict[str, Any]) -> Checkpoint:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged or cut short and cannot be read ({error}): fetch or copy it again"
        ) from error
    if "hvt" not in metadata:
        return _foreign(path, {strip(k): v for k, v in tensors.items()}, hints)
    try:
        described = json.loads(metadata["hvt"])
        if described["format"] > FORMAT:
            raise CheckpointError(f"{path} was written by a newer hvt: upgrade to read it")
        return Checkpoint(
            path,
            HVTConfig.from_dict(described["config"]),
            tensors,
            _tuples(described["preprocessing"]),
            described["class_names"],
        )
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} describes no usable model: {error}") from error


def _read_directory(path: Path, hints: dict[str, Any]) -> Checkpoint:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path / name).is_file():
            checkpoint = read(path / name, hints)
            break
    else:
        raise CheckpointError(f"{path} has no model.safetensors or pytorch_model.bin in it")
    if checkpoint.preprocessing or not (path / "config.json").is_file():
        return checkpoint
    try:
        timm_cfg = json.loads((path / "config.json").read_text()).get("pretrained_cfg", {})
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / 'config.json'} is not valid JSON: {error}") from error
    checkpoint.preprocessing = _tuples({k: timm_cfg[k] for k in PREPROCESSING if k in timm_cfg})
    checkpoint.class_names = checkpoint.class_names or timm_cfg.get("label_names")
    return checkpoint


def _foreign(path: Path, tensors: dict[str, Tensor], arguments: dict[str, Any]) -> Checkpoint:
    tensors = from_transformers(tensors)
    return Checkpoint(path, infer_config(tensors, arguments, path), tensors)


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


# ── fitting ─────────────────────────────────────────────────────────────────────────────────────


def _fill(model: HVT, checkpoint: Checkpoint) -> None:
    tensors = _resized(checkpoint, model.config)
    want = model.state_dict()
    missing = [k for k in want if k not in tensors and not k.startswith("head.")]
    if checkpoint.config.num_classes == model.num_classes:
        missing += [k for k in want if k not in tensors and k.startswith("head.")]
    surplus = [k for k in tensors if k not in want]
    misfits = [k for k in want if k in tensors and tensors[k].shape != want[k].shape]
    for what, names in (("lacks", missing), ("has", surplus), ("has another shape of", misfits)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{checkpoint.path} is of another architecture than asked for: "
                f"it {what} {names[0]}{more}"
            )
    model.load_state_dict(tensors, strict=False)


def _resized(checkpoint: Checkpoint, new: HVTConfig) -> dict[str, Tensor]:
    """The tensors at another image size, patch size, channel or class count."""
    old, tensors = checkpoint.config, dict(checkpoint.tensors)
    if new.num_classes != old.num_classes:
        tensors.pop("head.weight", None)
        tensors.pop("head.bias", None)
    filters = "patch_embed.proj.weight"
    tensors[filters] = resize_patches(tensors[filters], new.patch_size)
    if new.in_chans != old.in_chans:
        if old.in_chans != 3:
            raise CheckpointError(
                f"{checkpoint.path} takes {old.in_chans} channels and cannot be turned to "
                f"{new.in_chans}: only weights for 3 channels can"
            )
        tensors[filters] = adapt_input_conv(new.in_chans, tensors[filters])
    if new.pool_blocks == old.pool_blocks and new.num_prefix_tokens == old.num_prefix_tokens:
        names = ["pos_embed", *(f"blocks.{i}.pos_embed" for i in new.pool_blocks)]
        for stage, name in enumerate(names):
            tensors[name] = resize_positions(tensors[name], old, new, stage)
    return tensors
