"""timm's plain ViTs in our family: equal logits and costs, and errors that name the part."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import nn

import hvt
from hvt.checkpoint.timm_vit import from_timm, named_config

# One small model of each family: fewer blocks, small images, random weights.
FAMILIES: dict[str, dict[str, Any]] = {
    "deit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "deit3_small_patch16_224": {},  # LayerScale, no position for the class token
    "vit_tiny_patch16_224": {},
    "vit_small_patch14_dinov2": {"img_size": 56},
    "vit_small_patch14_reg4_dinov2": {"img_size": 56},
    "vit_xsmall_patch16_clip_224": {},  # norm before the blocks, patches without bias
    "vit_base_patch32_clip_quickgelu_224": {},
    "vit_medium_patch16_gap_240": {"img_size": 48},  # average head, no class token, no qkv bias
    "vit_wee_patch16_reg1_gap_256": {"img_size": 64},  # registers without a class token
    "vit_base_patch16_224_miil": {"embed_dim": 192, "num_heads": 3},  # no qkv bias
}


@functools.cache
def small(name: str) -> nn.Module:
    """To be read: `from_timm` copies the weights."""
    torch.manual_seed(0)
    kwargs = {"img_size": 64, "depth": 2, "num_classes": 10} | FAMILIES[name]
    model = timm.create_model(name, **kwargs).eval()
    for parameter in model.parameters():  # zeros, such as new biases, would hide a swap
        nn.init.normal_(parameter, std=0.05)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_features_and_bare_files_are_timm_s(name: str, tmp_path: Any) -> None:
    theirs = small(name)
    hvt.save(from_timm(theirs, name), tmp_path / "it.safetensors")
    ours = hvt.load(tmp_path / "it.safetensors")
    assert ours.config == from_timm(theirs, name).config
    assert hvt.cost(ours).params == sum(p.numel() for p in theirs.parameters())
    images = torch.randn(2, 3, *ours.config.image)
    with torch.inference_mode():
        assert torch.allclose(ours(images), theirs(images), atol=1e-5)
        features = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
        assert torch.allclose(
            ours.forward_head(ours.forward_features(images), pre_logits=True), features, atol=1e-5
        )
    # A bare file is known by its tensors.
    save_file(theirs.state_dict(), tmp_path / "bare.safetensors")
    asked: dict[str, Any] = {}
    if ours.config.pre_norm:  # CLIPs differ in what tensors do not tell
        with pytest.raises(hvt.CheckpointError, match="do not determine act_layer and norm_eps"):
            hvt.load(tmp_path / "bare.safetensors")
        asked = {"act_layer": ours.config.act_layer, "norm_eps": ours.config.norm_eps}
    again = hvt.load(tmp_path / "bare.safetensors", **asked)
    with torch.inference_mode():
        assert torch.equal(again(images), ours(images))
    other = hvt.load(tmp_path / "bare.safetensors", num_classes=3, **asked)
    assert other(images).shape == (2, 3)


@pytest.mark.parametrize("name", ["vit_base_patch32_clip_quickgelu_224", "deit3_small_patch16_224"])
def test_a_hub_directory_is_known_by_its_architecture(name: str, tmp_path: Any) -> None:
    theirs = small(name)
    save_for_hf(theirs, tmp_path, safe_serialization=True)
    again = hvt.load(tmp_path)
    images = torch.randn(1, 3, *again.config.image)
    with torch.inference_mode():
        assert torch.allclose(again(images), theirs(images), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"global_pool": "avg", "pool_include_prefix": True}, "its average includes the class"),
        ({"norm_layer": "rmsnorm"}, "its norms are RmsNorm"),
        ({"checkpoint_path": "x.pth"}, "multiple values for keyword argument 'checkpoint_path'"),
        ({"global_pool": 3}, "timm cannot build test_vit with {'global_pool': 3"),
    ],
    ids=str,
)
def test_arguments_of_a_hub_directory_are_used_or_named(
    arguments: dict[str, Any], words: str, tmp_path: Any
) -> None:
    theirs = timm.create_model("test_vit", num_classes=3)
    save_for_hf(theirs, tmp_path, model_args=arguments, safe_serialization=True)
    with pytest.raises(hvt.HVTError, match=words):
        hvt.load(tmp_path)


def test_heads_of_wide_models_are_asked_for(tmp_path: Any) -> None:
    theirs = timm.create_model(
        "vit_huge_patch14_224", img_size=28, depth=1, num_classes=2, mlp_ratio=0.1
    )
    save_file(theirs.state_dict(), tmp_path / "huge.safetensors")
    with pytest.raises(hvt.CheckpointError, match="pass num_heads to load"):
        hvt.load(tmp_path / "huge.safetensors")
    assert hvt.load(tmp_path / "huge.safetensors", num_heads=16, head_dim=80).config.head_dim == 80


def test_preprocessing_comes_along() -> None:
    theirs = copy.deepcopy(small("vit_base_patch32_clip_quickgelu_224"))
    theirs.pretrained_cfg |= {"label_names": [f"class {i}" for i in range(10)]}
    ours = from_timm(theirs)
    assert ours.class_names == tuple(f"class {i}" for i in range(10))
    assert ours.pretrained_cfg["mean"] == pytest.approx((0.4814, 0.4578, 0.4082), abs=1e-3)
    assert ours.pretrained_cfg["crop_pct"] == 0.9


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit_base_patch16_siglip_224", "its head pools by 'map'"),
        ("vit_base_patch16_rope_224", "it is a Eva"),
        ("vit_giant_patch14_dinov2", "its MLP is a GluMlp"),
        ("vit_base_patch16_rpn_224", "its blocks are ResPostBlock"),
        ("resnet18", "it is a ResNet"),
        ("vit_tiny_r_s16_p8_224", "its patch embedding is a HybridEmbed"),
    ],
)
def test_what_does_not_fit_is_named(name: str, reason: str) -> None:
    with pytest.raises(hvt.HVTError, match=f"{name} is not supported: {reason}"):
        named_config(name)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"act_layer": "relu"}, "its activation is ReLU"),
        ({"qk_norm": True}, r"it is not a plain ViT: it has blocks\.0\.attn\.q_norm"),
        ({"proj_bias": False}, r"it is not a plain ViT: it lacks blocks\.0\.attn\.proj\.bias"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(hvt.HVTError, match=f"vit_tiny_patch16_224 is not supported: {reason}"):
        named_config("vit_tiny_patch16_224", **arguments)
