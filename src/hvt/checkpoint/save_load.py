"""Checkpoints in and out: our own files whole, others' read safely, all at any size."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from timm.models import adapt_input_conv
from torch import Tensor

from ..config import HVTConfig
from ..errors import CheckpointError, HVTError
from ..fields import check_value
from ..files import atomic_write
from ..model import HVT
from ..resize import resize_patches, resize_positions
from ..zoo import MODELS, find_checkpoint, get_config
from . import checksum
from .archive import is_archive, read_archive
from .container import file_size
from .description import (
    MAX_TEXT,
    NOT_AS_EXPECTED,
    check_names,
    check_preprocessing,
    describe,
    read_description,
    read_json,
    shown,
)
from .foreign import (
    block_numbers,
    from_transformers,
    infer_config,
    read_pickle,
    stripped,
    transformers_config,
    transformers_preprocessing,
)
from .timm_vit import is_timm_name, named_config

MAX_TENSORS = 100_000
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass
class Checkpoint:
    """What a weights file says, whoever wrote it."""

    path: Path
    config: HVTConfig
    tensors: dict[str, Tensor]
    preprocessing: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] | None = None
    dtype: torch.dtype = torch.float32
    """The precision to give the model back in; others' files are widened."""
    origin: dict[str, str] = field(default_factory=dict)
    """Where the weights come from, such as `source`, `license` and `command`."""
    described: bool = False
    """Whether the file itself says its architecture; that of others' files is read off them."""


def save(
    model: HVT,
    path: str | Path,
    class_names: Sequence[str] | None = None,
    preprocessing: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write weights, config, class names and preprocessing to one safetensors file, atomically.

    Names and preprocessing (mean, std, interpolation, crop_pct, crop_mode) default to the model's.
    `dtype` is what the file holds its weights in: `torch.float16` halves it, and `load` still gives
    the model in its own precision. The same model gives the same bytes.
    What `model.pretrained_cfg["origin"]` says of where the weights come from goes along.
    A model that is no longer what its config says, such as a pruned one, is refused.
    """
    described = describe(model, class_names, preprocessing)
    _compare(
        model.state_dict(),
        parameter_shapes(model.config),
        f"{path} was not written, as the model is not what its config says",
    )
    metadata = {"format": "pt", "hvt": described}
    if origin := model.pretrained_cfg.get("origin"):
        metadata["origin"] = json.dumps(origin)
    tensors = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    if dtype is not None:
        metadata["dtype"] = _dtype_name(model.pos_embed.dtype)
        tensors = {name: _stored(name, tensor, dtype) for name, tensor in tensors.items()}
    metadata[checksum.KEY] = checksum.checksum(checksum.tensor_parts(metadata, tensors))
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)
        _sort_metadata(temporary)


def _stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in the precision of a file, refused where that has no room for its values."""
    if dtype not in DTYPES:
        raise HVTError(f"dtype={dtype} must be one of {', '.join(map(str, DTYPES))}")
    narrow = tensor.to(dtype)
    if not narrow.isfinite().all() and tensor.isfinite().all():
        largest = tensor.abs().max().item()
        raise HVTError(f"{name} has the value {largest:g}, beyond {dtype}: use another dtype")
    return narrow


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sort_metadata(path: Path) -> None:
    """Rewrite a safetensors header in place: the library writes metadata in a random order."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size  # written as the library does, and padded with spaces
        file.seek(8)
        file.write(text.ljust(size))


def load(path: str | Path, device: str | torch.device = "cpu", **overrides: Any) -> HVT:
    """The model of a checkpoint, in evaluation mode.

    Reads our files, the weights of our `.pt2` exports, the authors' `.pth`, DeiT's and timm's plain
    ViTs (`.pth` or safetensors) and Hugging Face directories. `overrides` are fields of
    `HVTConfig`: another `img_size`, `patch_size` or `in_chans` resizes the weights, another
    `num_classes` gets a new head.
    """
    checkpoint = read(path, overrides)
    config = checkpoint.config.replace(**overrides)
    tensors = _fitted(checkpoint, config)
    model = HVT(config).to(checkpoint.dtype)
    model.load_state_dict(tensors, strict=False)  # a new head is not in them
    model.pretrained_cfg.update(checkpoint.preprocessing)
    if checkpoint.class_names and len(checkpoint.class_names) == model.num_classes:
        model.pretrained_cfg["label_names"] = tuple(checkpoint.class_names)
    if checkpoint.origin:
        model.pretrained_cfg["origin"] = checkpoint.origin
    return model.to(device).eval()


def load_into(model: HVT, path: str | Path) -> None:
    """Take a checkpoint's weights into a model of the same architecture, resizing them to it."""
    checkpoint = read(path, model.config.to_dict(), {}, weights_alone=True)
    tensors = _fitted(checkpoint, model.config)
    if checkpoint.described:
        _check_alike(checkpoint, model.config)
    model.load_state_dict(tensors, strict=False)


_RESIZED = ("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "init_values")
"""Fields that weights can follow, or that are told by others."""


def _check_alike(checkpoint: Checkpoint, config: HVTConfig) -> None:
    """Refuse weights for other answers: shapes do not tell heads, activations or kinds of pooling.

    How much is dropped in training is no part of the answers, and stages may be given as blocks.
    """
    sizes = {name: getattr(config, name) for name in ("img_size", "patch_size")}
    theirs, ours = checkpoint.config.replace(**sizes), config
    if theirs.pool_blocks == ours.pool_blocks:
        theirs = theirs.replace(pool_after=ours.pool_after, stages=ours.stages)
    theirs, ours = (one.replace(global_pool=one.head_pool) for one in (theirs, ours))
    for name, value in theirs.to_dict().items():
        wanted = getattr(ours, name)
        if name in _RESIZED or name.endswith("_rate") or value == wanted:
            continue
        raise CheckpointError(
            f"{checkpoint.path} is of another architecture: its {name} is {value!r}, the model's "
            f"is {wanted!r}"
        )


def read(
    path: str | Path,
    hints: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    *,
    weights_alone: bool = False,
) -> Checkpoint:
    """What a file or directory says; `hints` settle what a foreign file leaves open.

    `arguments` are what is said of the file elsewhere, and count as if it said them itself. With
    `weights_alone` nothing needs to tell the preprocessing.
    """
    alone = arguments is None
    path, hints, arguments = find_checkpoint(path), hints or {}, arguments or {}
    if os.path.isdir(path):  # noqa: PTH112 - False for a name that cannot be
        return _read_directory(path, hints, weights_alone)
    if path.suffix.lower() == ".onnx":
        raise CheckpointError(
            f"{path} is an exported model, which hvt predict, hvt eval and hvt.Predictor run: "
            "here name the checkpoint that it was exported from"
        )
    file_size(path)  # refuses what is not a regular file
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if start[8:9] == b"{":
        checkpoint = _read_safetensors(path, hints, arguments)
    elif start[:4] == b"PK\x03\x04" and is_archive(path):
        tensors, description = read_archive(path)
        checkpoint = _described(path, description, tensors)
    elif start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
        tensors, own = read_pickle(path)
        checkpoint = _foreign(path, tensors, arguments | own, hints)
    else:
        raise CheckpointError(
            f"{path} is neither a safetensors nor a PyTorch file, or its beginning is damaged"
        )
    part = alone and not checkpoint.described and path.name in WEIGHTS
    if part and os.path.isfile(path.parent / "config.json"):  # noqa: PTH113 - False for what cannot be
        raise CheckpointError(
            f"{path} is one file of a folder whose config.json says what tensors do not tell: "
            f"name the folder, {path.parent}"
        )
    return checkpoint


WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""What Hugging Face's directories call them."""


# ── reading ─────────────────────────────────────────────────────────────────────────────────────


def _read_safetensors(path: Path, hints: dict[str, Any], arguments: dict[str, Any]) -> Checkpoint:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()
            if len(names) > MAX_TENSORS:
                raise ValueError(f"it names {len(names)} tensors, more than any model has")
            tensors = {name: file.get_tensor(name) for name in names}
    except Exception as error:  # SafetensorError, and whatever torch makes of damaged shapes
        raise CheckpointError(
            f"{path} is damaged or cut short and cannot be read ({shown(error)}): "
            "fetch or copy it again"
        ) from error
    checksum.check(path, metadata, checksum.tensor_parts(metadata, tensors))
    if "hvt" not in metadata:
        return _foreign(path, stripped(tensors, path), arguments, hints)
    checkpoint = _described(path, metadata["hvt"], tensors)
    if "dtype" in metadata:
        checkpoint.dtype = _read_dtype(path, metadata["dtype"])
    checkpoint.origin = _read_origin(path, metadata.get("origin", "{}"))
    return checkpoint


def _read_dtype(path: Path, name: str) -> torch.dtype:
    for dtype in DTYPES:
        if _dtype_name(dtype) == name:
            return dtype
    known = ", ".join(map(_dtype_name, DTYPES))
    raise CheckpointError(f"{path} is of a model in {shown(name)!r}, which is none of {known}")


def _read_origin(path: Path, text: str) -> dict[str, str]:
    try:
        origin = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise CheckpointError(f"{path} says where it comes from, but not in JSON") from error
    if not isinstance(origin, dict) or not all(isinstance(v, str) for v in origin.values()):
        raise CheckpointError(f"{path} must say where it comes from by texts with names")
    return origin


def _described(path: Path, description: str, tensors: dict[str, Tensor]) -> Checkpoint:
    """One of our own files, from what it says of itself."""
    described = read_description(path, description, blocks=len(block_numbers(tensors)))
    dtypes = {tensor.dtype for tensor in tensors.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return Checkpoint(
        path,
        described.config,
        tensors,
        described.preprocessing,
        described.class_names,
        dtype,
        described=True,
    )


def _read_directory(path: Path, hints: dict[str, Any], weights_alone: bool) -> Checkpoint:
    files = [path / name for name in WEIGHTS]
    weights = next((file for file in files if os.path.exists(file)), None)  # noqa: PTH110
    if weights is None:
        raise CheckpointError(f"{path} has no {' or '.join(WEIGHTS)} in it")
    try:
        config, own = _timm_config(_read_json(path / "config.json")), None
        if "pretrained_cfg" in config:  # timm's
            arguments, own = _named(config), _our_config(config)
            # Names are at the top, as timm writes them, or where earlier versions of hvt did.
            preprocessing = config["pretrained_cfg"]
            names = config.get("label_names") or preprocessing.get("label_names")
        else:
            preprocessing = {}
            arguments, names = transformers_config(config)
        if own is not None:
            arguments = own.to_dict()
        checkpoint = read(weights, hints, arguments)
        if "pretrained_cfg" not in config and not checkpoint.described:
            preprocessing = _transformers_preprocessing(path, config, weights_alone)
        if own is not None and not checkpoint.described:
            verdict = f"{path} holds no {config['architecture']} with the model_args of config.json"
            _compare(checkpoint.tensors, parameter_shapes(own), verdict)
            checkpoint.config = own
        preprocessing = check_preprocessing(preprocessing, checkpoint.config)
        classes = checkpoint.config.num_classes
        names = check_names(names, classes) if names and classes else None
    except CheckpointError:
        raise
    except NOT_AS_EXPECTED as error:
        raise CheckpointError(
            f"the JSON files in {path} are not understood: {shown(error)}"
        ) from error
    if not checkpoint.preprocessing:
        checkpoint.preprocessing = preprocessing
    checkpoint.class_names = checkpoint.class_names or names
    return checkpoint


def _timm_config(config: dict[str, Any]) -> dict[str, Any]:
    """timm's earlier form, in which everything lies at the top, as its present one."""
    if "architecture" not in config or "pretrained_cfg" in config:
        return config
    names = config.get("label_names") or config.get("labels")
    kept = ("architecture", "num_classes", "global_pool")
    top = {key: config[key] for key in kept if key in config}
    return top | {"label_names": names, "pretrained_cfg": config}


def _transformers_preprocessing(
    path: Path, config: dict[str, Any], weights_alone: bool
) -> dict[str, Any]:
    """Refused where nothing tells it: ViT's mean and std are not those of DeiT."""
    if weights_alone:
        return {}
    file = path / "preprocessor_config.json"
    if not file.exists():
        if not config:
            return {}
        raise CheckpointError(
            f"{path} has no {file.name}, so nothing tells how its images are normalised: save "
            "the image processor that the model was trained with there too "
            "(processor.save_pretrained)"
        )
    return transformers_preprocessing(_read_json(file))


def _named(config: dict[str, Any]) -> dict[str, Any]:
    """What the name of a timm model tells that tensors do not, from its `config.json`."""
    name, arguments = config.get("architecture"), config.get("model_args") or {}
    if not isinstance(name, str) or not is_timm_name(name):
        return {}
    unread = [name for name in arguments if name not in (*_ASKED, *_TOLD)]
    if unread:
        raise ValueError(f"model_args has {unread[0]}, which is not read from there")
    asked = {name: arguments[name] for name in _ASKED if arguments.get(name) is not None}
    for name_, value in asked.items():
        check_value(name_, value, _ASKED[name_])
    named = named_config(name, **asked)
    names = ("num_heads", "act_layer", "norm_eps", "no_embed_class", "global_pool")
    known = {key: getattr(named, key) for key in names}
    if "img_size" in arguments:
        known["img_size"] = arguments["img_size"]
    pool = arguments.get("global_pool", config.get("global_pool"))
    return known | ({} if pool is None else {"global_pool": pool})


_ASKED = {
    "global_pool": str, "no_embed_class": bool, "pool_include_prefix": bool, "final_norm": bool
}  # fmt: skip
"""Arguments of timm's plain ViTs that change the answers and that no tensor tells."""
_TOLD = (
    "img_size", "patch_size", "in_chans", "num_classes", "depth", "embed_dim", "mlp_ratio",
    "qkv_bias", "init_values", "class_token", "reg_tokens", "pre_norm", "fc_norm", "qk_norm",
    "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate",
    "drop_path_rate", "dynamic_img_size", "dynamic_img_pad", "strict_img_size", "weight_init",
)  # fmt: skip
"""Those that tensors tell, or that are for training."""


def _our_config(config: dict[str, Any]) -> HVTConfig | None:
    """The architecture of one of our models that timm saved."""
    name = config.get("architecture")
    if name not in MODELS:
        return None
    arguments = dict(config.get("model_args") or {})
    if "num_classes" in config:
        arguments["num_classes"] = config["num_classes"]
    return get_config(name, **arguments)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    if file_size(path) > MAX_TEXT:
        raise ValueError(f"{path.name} is larger than {MAX_TEXT // 2**20} MB")
    return read_json(path.read_text(encoding="utf-8"))


def _foreign(
    path: Path, tensors: dict[str, Tensor], arguments: dict[str, Any], hints: dict[str, Any]
) -> Checkpoint:
    tensors = from_transformers(tensors, path)
    config = infer_config(tensors, arguments, hints, path)
    try:
        check_preprocessing({}, config)  # the size of its input
    except HVTError as error:
        raise CheckpointError(f"{path} does not describe a usable model: {error}") from error
    return Checkpoint(path, config, tensors)


# ── fitting ─────────────────────────────────────────────────────────────────────────────────────


@functools.lru_cache(maxsize=64)
def parameter_shapes(config: HVTConfig) -> Mapping[str, tuple[int, ...]]:
    """The parameters of a config's model, which is built on the meta device and takes no memory."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in HVT(config).state_dict().items()}


def _fitted(checkpoint: Checkpoint, config: HVTConfig) -> dict[str, Tensor]:
    """The tensors as a model of `config` takes them, without the head where the classes differ."""
    old, tensors, path = checkpoint.config, checkpoint.tensors, checkpoint.path
    verdict = f"{path} is incomplete or of an unknown architecture"
    _compare(tensors, parameter_shapes(old), verdict)
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{path} holds {name} as {tensor.dtype}, not as weights")
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{path} holds {name} with NaN or infinite weights, as a training that diverged "
                "leaves it: use an earlier checkpoint"
            )
    tensors = _resized(checkpoint, config)
    shapes = parameter_shapes(config)
    if config.num_classes != old.num_classes:
        heads = ("head.", "head_dist.")
        tensors = {k: v for k, v in tensors.items() if not k.startswith(heads)}
        shapes = {k: v for k, v in shapes.items() if not k.startswith(heads)}
    _compare(tensors, shapes, f"{path} has another architecture than asked for")
    return tensors


def _compare(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], verdict: str
) -> None:
    missing = [k for k in shapes if k not in tensors]
    surplus = [k for k in tensors if k not in shapes]
    misfits = [k for k in shapes if k in tensors and tensors[k].shape != shapes[k]]
    for what, names in (("lacks", missing), ("has", surplus), ("has another shape of", misfits)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{verdict}: it {what} {names[0]}{more}")


def _resized(checkpoint: Checkpoint, new: HVTConfig) -> dict[str, Tensor]:
    """The tensors at another image size, patch size or channel count."""
    old, tensors = checkpoint.config, dict(checkpoint.tensors)
    filters = "patch_embed.proj.weight"
    tensors[filters] = resize_patches(tensors[filters], new.patch_size)
    if new.in_chans != old.in_chans:
        if old.in_chans != 3:
            raise CheckpointError(
                f"{checkpoint.path} takes {old.in_chans} channels and cannot be turned to "
                f"{new.in_chans}: only weights for 3 channels can"
            )
        tensors[filters] = adapt_input_conv(new.in_chans, tensors[filters])
    alike = ("pool_blocks", "num_prefix_tokens", "no_embed_class", "pool_dims")
    if all(getattr(new, name) == getattr(old, name) for name in alike):
        names = ["pos_embed", *(f"blocks.{i}.pos_embed" for i in new.pool_blocks)]
        for stage, name in enumerate(names):
            tensors[name] = resize_positions(tensors[name], old, new, stage)
    return tensors
