"""Checkpoints that others wrote give their logits, and never run their code."""

import argparse
import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from conftest import stir
from data_paths import FIXTURES, real_data
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hvt  # before timm: it makes torchvision importable
from hvt import HVT, CheckpointError, HVTConfig
from hvt.checkpoint.transformers_vit import transformers_preprocessing

REFERENCE = FIXTURES / "reference_hvt.pth"

State = dict[str, Tensor]


def close(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and (ours - theirs).abs().max().item() < 1e-5


# ── the authors' files ──────────────────────────────────────────────────────────────────────────


def reference() -> dict[str, Any]:
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(REFERENCE, weights_only=True)


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    with np.load(FIXTURES / "reference_hvt.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def test_the_reference_agrees_block_by_block(expected: dict[str, Tensor]) -> None:
    model = hvt.load(REFERENCE)
    assert model.config == HVTConfig(
        img_size=64, patch_size=8, num_heads=3, head_dim=8, depth=6, stages=2, num_classes=10
    )
    final, blocks = model.forward_intermediates(expected["images"], output_fmt="NLC")
    for i, block in enumerate(blocks):
        assert close(block, expected[f"block{i}"]), f"block {i}"
    logits = model.forward_head(final)
    assert close(logits, expected["logits"])
    assert logits.abs().max() > 0.01  # far above the tolerance


@pytest.mark.parametrize(
    "change",
    [
        {"pool_stride": 4},  # what the authors' code ignores
        {"input_size": 224},  # before the file was fine-tuned at 64
        {"input_size": [3, 64, 64]},  # timm's has the channels
        {"head_dim": 5},
        {"num_blocks": 99, "patch_size": 16, "nb_classes": 1000},
    ],
)
def test_arguments_that_disagree_with_the_tensors_are_not_trusted(
    tmp_path: Path, expected: dict[str, Tensor], change: dict[str, Any]
) -> None:
    content = reference()
    vars(content["args"]).update(change)
    torch.save(content, tmp_path / "changed.pth")
    model = hvt.load(tmp_path / "changed.pth")
    assert model.config == hvt.load(REFERENCE).config
    assert close(model(expected["images"]), expected["logits"])


@pytest.mark.parametrize(
    "fields",
    [
        {"stages": 3},
        {"pool_after": (1, 2)},
        {"stages": 2, "pool_dims": 2},
        {"stages": 1, "pool_kernel": 5, "pool_stride": 3},
        {"stages": 2, "pool": "conv", "class_token": True},
        {"stages": 0, "num_classes": 0, "mlp_ratio": 2.5, "in_chans": 1},
    ],
)
def test_any_model_of_the_family_is_found_from_its_tensors(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    base = HVTConfig(img_size=128, patch_size=8, num_heads=1, depth=6, num_classes=4)
    model = stir(HVT(base.replace(**fields))).eval()
    torch.save(model.state_dict(), tmp_path / "m.pth")
    told = {name: value for name, value in fields.items() if name in ("pool_kernel", "pool_stride")}
    if told:  # several windows give the same lengths
        with pytest.raises(CheckpointError, match="pass pool_kernel, pool_stride and pool_dims"):
            hvt.load(tmp_path / "m.pth")
    loaded = hvt.load(tmp_path / "m.pth", **told)
    assert loaded.config == model.config
    images = torch.randn(2, model.config.in_chans, 128, 128)
    assert torch.equal(loaded(images), model(images))


def test_the_size_to_load_at_is_not_taken_for_the_files_own(tmp_path: Path) -> None:
    # 8×8 patches: as many as 4×16, and nothing beside the tensors says which.
    model = HVT(HVTConfig(img_size=64, patch_size=8, num_heads=1, depth=1, num_classes=3))
    torch.save(model.state_dict(), tmp_path / "m.pth")
    loaded = hvt.load(tmp_path / "m.pth", img_size=(32, 128))
    model.set_input_size((32, 128))
    assert torch.equal(loaded.pos_embed, model.pos_embed)


def test_what_tensors_leave_open_can_be_said(tmp_path: Path) -> None:
    model = stir(HVT(HVTConfig(img_size=(16, 40), patch_size=8, num_heads=3, head_dim=8, depth=1)))
    torch.save(model.state_dict(), tmp_path / "m.pth")
    with pytest.raises(CheckpointError, match=r"m\.pth .* pass the model's img_size"):
        hvt.load(tmp_path / "m.pth")
    with pytest.raises(CheckpointError, match=r"m\.pth .* width of 24 .* pass num_heads"):
        hvt.load(tmp_path / "m.pth", img_size=(16, 40))
    loaded = hvt.load(tmp_path / "m.pth", img_size=(16, 40), num_heads=3)
    images = torch.randn(1, 3, 16, 40)
    assert torch.equal(loaded(images), model.eval()(images))


# ── timm and DeiT ───────────────────────────────────────────────────────────────────────────────


def timm_vit(name: str = "deit_tiny_patch16_224", **kwargs: Any) -> nn.Module:
    """One of timm's, small but for its width: heads of 64 are what a file leaves unsaid."""
    model = timm.create_model(name, **{"depth": 2, "img_size": 64, "num_classes": 7} | kwargs)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms have a say too
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()


def in_model(state: State, path: Path) -> None:
    torch.save({"model": state, "epoch": 299}, path)


def in_legacy_pickle(state: State, path: Path) -> None:
    torch.save({"model": state}, path, _use_new_zipfile_serialization=False)


WRITERS: dict[str, Callable[[State, Path], None]] = {
    "DeiT's .pth": in_model,
    "legacy .pth": in_legacy_pickle,
    "bare .pth": torch.save,
    "timm's training .pth": lambda s, p: torch.save(
        {"state_dict": s, "arch": "vit", "args": argparse.Namespace(lr=0.1, mean=None)}, p
    ),
    "safetensors": save_file,
    "DDP, compiled": lambda s, p: in_model({f"module._orig_mod.{k}": v for k, v in s.items()}, p),
    "timm's EMA only": lambda s, p: torch.save({"state_dict_ema": s}, p),
}


@pytest.mark.parametrize("form", WRITERS)
def test_timm_weights_give_timm_logits(tmp_path: Path, form: str) -> None:
    theirs, images = timm_vit(), torch.randn(2, 3, 64, 64)
    WRITERS[form](theirs.state_dict(), tmp_path / "weights")
    ours = hvt.load(tmp_path / "weights")
    assert ours.config == hvt.get_config("deit_ti", depth=2, img_size=64, num_classes=7, stages=0)
    assert close(ours(images), theirs(images))


@pytest.mark.parametrize(
    ("dtype", "write"), [(torch.float16, in_model), (torch.bfloat16, save_file)]
)
def test_half_precision_files_are_widened(
    tmp_path: Path, dtype: torch.dtype, write: Callable[[State, Path], None]
) -> None:
    theirs, images = timm_vit().to(dtype), torch.randn(2, 3, 64, 64)
    write(theirs.state_dict(), tmp_path / "weights")
    ours = hvt.load(tmp_path / "weights")
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    assert close(ours(images), theirs.float()(images))


def test_real_deit_tiny_gives_timms_logits() -> None:
    path = real_data("deit_tiny_patch16_224.safetensors")
    theirs = timm.create_model("deit_tiny_patch16_224").eval()
    theirs.load_state_dict(load_file(path))
    ours = hvt.load(path)
    assert ours.config == hvt.get_config("deit_ti", stages=0)
    images = torch.randn(2, 3, 224, 224)
    assert close(ours(images), theirs(images))


# ── transformers ────────────────────────────────────────────────────────────────────────────────


@functools.cache
def vit(**fields: Any) -> nn.Module:
    """One of transformers', which takes two seconds to import."""
    transformers = importlib.import_module("transformers")
    sizes = {"image_size": 64, "hidden_size": 192, "intermediate_size": 96, "num_hidden_layers": 1}
    config = transformers.ViTConfig(**sizes | {"num_attention_heads": 3, "num_labels": 7} | fields)
    model = transformers.ViTForImageClassification(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def transformers_directory(folder: Path, model: nn.Module, **config: Any) -> Path:
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"} | config))
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


def test_transformers_config_tells_heads_classes_and_preprocessing(tmp_path: Path) -> None:
    theirs, images = vit(num_attention_heads=2, hidden_size=24), torch.randn(2, 3, 64, 64)
    names = {str(i): f"class {i}" for i in reversed(range(7))}
    folder = transformers_directory(tmp_path, theirs, num_attention_heads=2, id2label=names)
    processor = {"image_std": [0.2] * 3, "size": {"shortest_edge": 224}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    ours = hvt.load(folder)
    assert close(ours(images), theirs(images).logits)
    assert ours.class_names == tuple(f"class {i}" for i in range(7))
    assert ours.pretrained_cfg["std"] == (0.2, 0.2, 0.2)
    assert ours.pretrained_cfg["crop_mode"] == "center"


@pytest.mark.parametrize(
    ("processor", "told"),
    [
        ({"image_processor_type": "ViTImageProcessor"}, {}),  # what transformers assumes
        ({"feature_extractor_type": "DeiTFeatureExtractor"},
         {"crop_pct": 0.875, "interpolation": "bicubic"}),
        ({"do_center_crop": True, "size": {"shortest_edge": 256}, "crop_size": {"height": 224}},
         {"crop_pct": 0.875, "crop_mode": "center"}),
        ({"image_mean": [0.4] * 3, "rescale_factor": 0.00392156862}, {"mean": [0.4] * 3}),
        ({"image_mean": [0.4] * 3, "do_normalize": False}, {"mean": [0.0] * 3, "std": [1.0] * 3}),
        *(({"resample": number}, {"interpolation": name}) for number, name in enumerate(
            ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"))),
    ],
    ids=str,
)  # fmt: skip
def test_image_processors_in_timms_terms(processor: dict[str, Any], told: dict[str, Any]) -> None:
    usual = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bilinear"}
    usual |= {"crop_pct": 1.0, "crop_mode": "squash"}
    assert transformers_preprocessing(processor) == usual | told


@pytest.mark.parametrize(
    ("config", "processor", "words"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, {}, "2 class names do not fit 7 classes"),
        ({"id2label": {"1": "a", "3": "b"}}, {}, "does not number the classes from 0"),
        ({"id2label": {str(i): i for i in range(7)}}, {}, "class names must be a list of text"),
        ({"hidden_act": "relu"}, {}, "hidden_act='relu'"),
        ({}, {"image_std": [0, 0, 0]}, "must be numbers from 1e-05"),
        ({}, {"resample": 77}, "77"),
        ({}, {"rescale_factor": 1 / 127.5}, "values are not rescaled to 0 … 1"),
    ],
)
def test_what_transformers_files_say_is_checked(
    tmp_path: Path, config: dict[str, Any], processor: dict[str, Any], words: str
) -> None:
    folder = transformers_directory(tmp_path / "vit", vit(), **config)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(CheckpointError, match=r"the JSON files in .*vit are not") as caught:
        hvt.load(folder)
    assert words in str(caught.value)


def test_transformers_need_their_image_processor(tmp_path: Path) -> None:
    """ViT's mean and std are 0.5, those of DeiT are ImageNet's: neither can be assumed."""
    folder = transformers_directory(tmp_path / "vit", vit())
    assert hvt.load(folder).pretrained_cfg["mean"] == (0.5,) * 3  # as an empty one means there
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"vit has no preprocessor_config\.json, so the normal"
    ):
        hvt.load(folder)


def test_timms_earlier_config_has_everything_at_the_top(tmp_path: Path) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=7)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    config: dict[str, Any] = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 7,
        "mean": [0.1, 0.2, 0.3],
    }
    config |= {"std": [0.5, 0.5, 0.5], "crop_pct": 0.9, "labels": list("abcdefg")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = hvt.load(tmp_path)
    assert (model.config.num_heads, model.config.global_pool) == (3, "token")
    assert model.pretrained_cfg["mean"] == (0.1, 0.2, 0.3)
    assert model.class_names == tuple("abcdefg")
    theirs = timm.create_model(
        "vit_tiny_patch16_224", num_classes=7, global_pool="avg", fc_norm=False
    )
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"global_pool": "avg"}))
    images = torch.randn(1, 3, 224, 224)
    assert close(hvt.load(tmp_path)(images), theirs.eval()(images))


def test_a_file_of_a_directory_is_read_with_it(tmp_path: Path) -> None:
    folder = transformers_directory(tmp_path / "vit", vit(), num_attention_heads=2)
    assert hvt.load(folder / "model.safetensors").config.num_heads == 2
    (folder / "config.json").unlink()
    assert hvt.load(folder / "model.safetensors").config.num_heads == 3  # of 64 channels


def test_transformers_tell_the_shape_of_their_images(tmp_path: Path) -> None:
    theirs = vit(image_size=(32, 128))
    for size in ([32, 128], 7):  # one that does not fit is not believed
        folder = transformers_directory(tmp_path / "vit", theirs, image_size=size)
        assert hvt.load(folder).config.image == ((32, 128) if size != 7 else (64, 64))


def test_an_argument_that_means_something_else_is_no_objection(tmp_path: Path) -> None:
    """As MAE's fine-tuning writes it."""
    theirs = timm_vit(global_pool="avg", depth=1)
    for pool in (True, False):
        arguments = argparse.Namespace(global_pool=pool, act_layer=3, norm_eps=True)
        torch.save({"model": theirs.state_dict(), "args": arguments}, tmp_path / "mae.pth")
        assert hvt.load(tmp_path / "mae.pth").config.head_pool == "avg"
        assert hvt.load(tmp_path / "mae.pth", norm_eps=1e-5).config.norm_eps == 1e-5


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("encoder.layer.0.attention.attention.key.weight", None, r"no .*attention\.key\.weight"),
        ("encoder.layer.0.attention.attention.key.weight", torch.zeros(192, 5), r"no .*\.key\."),
        ("pooler.dense.weight", torch.zeros(192, 192), r"it has pooler\.dense\.weight"),
    ],
)
def test_a_transformers_file_of_other_tensors_is_an_error(
    tmp_path: Path, name: str, tensor: Tensor | None, words: str
) -> None:
    state = load_file(transformers_directory(tmp_path / "vit", vit()) / "model.safetensors")
    state.pop(f"vit.{name}", None)
    save_file(state | ({f"vit.{name}": tensor} if tensor is not None else {}), tmp_path / "other")
    with pytest.raises(CheckpointError, match=f"other .*{words}"):
        hvt.load(tmp_path / "other")


@pytest.mark.parametrize("text", ["{", "[]", '{"pretrained_cfg": 3}'])
def test_a_corrupt_config_json_is_one_clear_error(tmp_path: Path, text: str) -> None:
    transformers_directory(tmp_path / "vit", vit())
    (tmp_path / "vit" / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"the JSON files in .*vit are not understood"):
        hvt.load(tmp_path / "vit")
