"""The paper's models by name, here and in timm, meeting timm's contract."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from torch import Tensor, nn

import hvt
from hvt import HVT, HVTError
from hvt.zoo import MODELS, WEIGHT_URLS

# After hvt: it makes torchvision, which timm imports, load where its operators are missing.
import timm  # isort: skip
from timm.data import resolve_model_data_config  # isort: skip
from torchvision.ops import FeaturePyramidNetwork  # isort: skip

NAMES = hvt.list_models()
Build = Callable[..., HVT]


# ── names ───────────────────────────────────────────────────────────────────────────────────────


def test_all_models_of_the_paper_have_names() -> None:
    names = [
        *("deit_ti", "deit_s", "deit_b", "deit_ti_power", "deit_s_power"),
        *("hvt_ti_0", "hvt_ti_1", "hvt_ti_2", "hvt_ti_3", "hvt_ti_4"),
        *("hvt_s_0", "hvt_s_1", "hvt_s_2", "hvt_s_3", "hvt_s_4"),
        *("hvt_b_1", "hvt_b_2", "hvt_b_3", "hvt_b_4"),
        *("scale_hvt_ti_4", "hvt_s_2_2d"),
    ]
    assert hvt.list_models() == names
    assert hvt.list_models("*_4") == ["hvt_ti_4", "hvt_s_4", "hvt_b_4", "scale_hvt_ti_4"]
    assert hvt.list_models("resnet*") == []


@pytest.mark.parametrize(
    ("name", "offer"), [("hvt_s1", "hvt_s_1"), ("deit_tiny", "deit_ti"), ("xyz", "known: ")]
)
def test_an_unknown_model_suggests_the_nearest(name: str, offer: str) -> None:
    with pytest.raises(HVTError, match=f"^unknown model '{name}': .*{offer}"):
        hvt.create_model(name)


@pytest.mark.parametrize("create", [hvt.create_model, timm.create_model], ids=["hvt", "timm"])
def test_an_unknown_override_suggests_the_nearest(create: Callable) -> None:
    with pytest.raises(HVTError, match="unknown override 'num_class': did you mean num_classes"):
        create("hvt_s_1", num_class=10)
    with pytest.raises(HVTError, match="stages=5 does not divide depth=12"):
        create("hvt_s_1", stages=5)


# ── timm's registry ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", NAMES)
def test_timm_creates_them_with_overrides(name: str, small: dict, images: Tensor) -> None:
    model = timm.create_model(name, drop_path_rate=0.2, **small)
    assert isinstance(model, HVT)
    assert model.config == MODELS[name].replace(drop_path_rate=0.2, **small)
    assert model(images).shape == (2, 10)
    cfg = model.default_cfg
    assert cfg is model.pretrained_cfg
    assert (cfg["architecture"], cfg["input_size"]) == (name, (3, 64, 64))
    assert cfg.get("url") == WEIGHT_URLS.get(name)
    assert model.get_submodule(cfg["classifier"]) is model.get_classifier()
    assert isinstance(model.get_submodule(cfg["first_conv"]), nn.Conv2d)


def test_the_data_config_is_deits_evaluation_at_the_model_s_size(build: Build) -> None:
    model = build("hvt_s_1", img_size=(64, 96), in_chans=1)
    assert resolve_model_data_config(model) == {
        "input_size": (1, 64, 96),
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "crop_pct": 0.875,
        "crop_mode": "center",
    }
    model.set_input_size(48)
    assert resolve_model_data_config(model)["input_size"] == (1, 48, 48)


# ── features and head ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["hvt_s_2", "hvt_s_2_2d", "deit_s"])
def test_forward_is_head_of_features(name: str, build: Build, images: Tensor) -> None:
    model = build(name)
    with torch.no_grad():
        features = model.forward_features(images)
        before = model.forward_head(features, pre_logits=True)
        logits = model(images)
    assert features.shape == (2, model.config.tokens[-1], model.num_features)
    pooled = features[:, 0] if model.config.class_token else features.mean(1)
    assert torch.equal(before, pooled)
    assert torch.equal(model.get_classifier()(before), logits)
    assert torch.equal(model.forward_head(features), logits)
    assert (before.shape, logits.shape) == ((2, model.head_hidden_size), (2, model.num_classes))


def test_reset_classifier(build: Build, images: Tensor) -> None:
    model, images = build("hvt_s_2", depth=2).double(), images.double()  # new heads follow
    model.pretrained_cfg["label_names"] = tuple("abcdefghij")
    assert model.class_names == tuple("abcdefghij")
    with torch.no_grad():
        features = model.forward_features(images)
        model.reset_classifier(10)
        assert model.class_names is None  # they went with the old head
        model.reset_classifier(5)
        assert isinstance(model.get_classifier(), nn.Linear)
        assert model(images).shape == (2, 5)
        assert (model.num_classes, model.config.num_classes) == (5, 5)
        assert torch.equal(model.forward_features(images), features)

        model.reset_classifier(0)
        assert isinstance(model.get_classifier(), nn.Identity)
        assert torch.equal(model(images), features.mean(1))

        model.reset_classifier(0, global_pool="")
        assert torch.equal(model(images), features)
        with pytest.raises(HVTError, match="global_pool='token' needs class_token=True"):
            model.reset_classifier(5, global_pool="token")
        assert torch.equal(model(images), features)


# ── intermediates ───────────────────────────────────────────────────────────────────────────────

# hvt_s_4 at 64 tokens, 12 blocks: the length after each.
LENGTHS = [31] * 3 + [15] * 3 + [7] * 3 + [3] * 3


@pytest.mark.parametrize(
    ("indices", "blocks"),
    [
        (None, list(range(12))),
        (3, [9, 10, 11]),
        ((2, -1), [2, 11]),
        ([5, 1], [1, 5]),
        ([4, 4], [4]),
    ],
)
@pytest.mark.parametrize("norm", [False, True])
def test_intermediates_are_the_blocks_outputs(
    indices: Any, blocks: list[int], norm: bool, build: Build, images: Tensor
) -> None:
    model = build("hvt_s_4")
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _m, _i, y: seen.append(y))
    with torch.no_grad():
        final, outputs = model.forward_intermediates(images, indices, norm=norm, output_fmt="NLC")
        want = [model.norm(seen[i]) if norm else seen[i] for i in blocks]
        assert torch.equal(final, model.norm(seen[11]))
    assert [y.shape[1] for y in outputs] == [LENGTHS[i] for i in blocks]
    torch.testing.assert_close(outputs, want, rtol=0, atol=0)


def test_a_pooled_sequence_is_one_row(build: Build, images: Tensor) -> None:
    model = build("hvt_s_4", pool_after=(1, 4))
    take = {"indices": [0, 1, 4], "intermediates_only": True}
    grid, row, shorter = model.forward_intermediates(images, **take)
    assert (grid.shape, row.shape, shorter.shape) == ((2, 24, 8, 8), (2, 24, 1, 31), (2, 24, 1, 15))
    tokens = model.forward_intermediates(images, output_fmt="NLC", **take)
    for image, sequence in zip((grid, row, shorter), tokens, strict=True):
        assert image.is_contiguous()
        assert torch.equal(image.flatten(2).transpose(1, 2), sequence)


def test_a_pooled_grid_stays_a_grid(build: Build, images: Tensor) -> None:
    model = build("hvt_s_2_2d", img_size=(64, 32))
    images = images[..., :32]
    shapes = [y.shape[2:] for y in model.forward_intermediates(images, intermediates_only=True)]
    assert shapes == [(4, 2)] * 6 + [(2, 1)] * 6
    with pytest.raises(HVTError, match="output_fmt='NHWC' must be 'NCHW' or 'NLC'"):
        model.forward_intermediates(images, output_fmt="NHWC")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"indices": 2},
        {"indices": [0, 2], "norm": True},
        {"indices": [1], "stop_early": True},
        {"output_fmt": "NLC"},
        {"return_prefix_tokens": True},
        {"return_prefix_tokens": True, "output_fmt": "NLC", "intermediates_only": True},
        {"intermediates_only": True},
    ],
    ids=str,
)
def test_every_option_means_what_it_means_in_timm(
    options: dict, build: Build, images: Tensor
) -> None:
    shape = {"img_size": 64, "patch_size": 8, "depth": 3, "num_heads": 3}
    theirs = timm.create_model("deit_tiny_patch16_224", embed_dim=24, num_classes=10, **shape)
    ours = build("deit_ti", depth=3)
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(
            ours.forward_intermediates(images, **options),
            theirs.eval().forward_intermediates(images, **options),
            rtol=1e-4,
            atol=1e-5,
        )


# ── timm's feature extraction ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [name for name in NAMES if "power" not in name])
def test_features_only_gives_a_level_per_stage_as_large_as_it_says(
    name: str, small: dict, images: Tensor
) -> None:
    net = timm.create_model(name, features_only=True, **small)
    last = [block - 1 for block in (*MODELS[name].pool_blocks[1:], 12)]
    assert net.feature_info.module_name() == [f"blocks.{i}" for i in last]
    maps = net(images)
    for y, reduction in zip(maps, net.feature_info.reduction(), strict=True):
        assert y.shape == (2, 24, 64 // reduction, 64 // reduction)
    fpn = FeaturePyramidNetwork(net.feature_info.channels(), 8)
    out = fpn({str(i): y for i, y in enumerate(maps)})
    assert [y.shape[2:] for y in out.values()] == [y.shape[2:] for y in maps]
    assert resolve_model_data_config(net)["input_size"] == (3, 64, 64)


@pytest.mark.parametrize(
    ("name", "options", "blocks", "reductions"),
    [
        ("hvt_s_2_2d", {"feature_cls": "getter"}, (5, 11), [16, 32]),  # the default, in timm's word
        ("hvt_s_2_2d", {"pool_after": (2, 6)}, (1, 5, 11), [8, 16, 32]),
        ("hvt_s_2_2d", {"out_indices": (-1, 2, 2)}, (2, 11), [16, 32]),
        ("hvt_s_4", {"out_indices": 2}, (10, 11), [8, 8]),
        ("hvt_s_2", {"depth": 2}, (0, 1), [8, 8]),
        ("hvt_s_2", {"depth": 24}, (11, 23), [8, 8]),
    ],
)
def test_levels_of_features_only(
    name: str, options: dict, blocks: tuple, reductions: list, small: dict, images: Tensor
) -> None:
    net = timm.create_model(name, features_only=True, **small | options)
    assert net.feature_info.out_indices == blocks
    assert net.feature_info.reduction() == reductions
    assert [64 // y.shape[2] for y in net(images)] == reductions


def test_tokens_that_lost_their_places_are_no_map(small: dict) -> None:
    with pytest.raises(HVTError, match="no map after block 11: tokens were dropped"):
        timm.create_model("deit_s_power", features_only=True, **small)
    kept = (65, 65) + (9,) * 10
    early = {"features_only": True, "retention": kept, **small}
    assert timm.create_model("deit_s_power", out_indices=(0, 1), **early)
    with pytest.raises(HVTError, match="after block 2"):
        timm.create_model("deit_s_power", out_indices=(0, 2), **early)


def test_features_only_drops_what_it_does_not_need(small: dict, images: Tensor) -> None:
    whole = timm.create_model("hvt_s_4", **small).eval()
    net = timm.create_model("hvt_s_4", features_only=True, out_indices=(1, 4), **small).eval()
    assert len(net.model.blocks) == 5
    assert isinstance(net.model.norm, nn.Identity)
    assert isinstance(net.model.head, nn.Identity)
    assert net.model.load_state_dict(whole.state_dict(), strict=False).missing_keys == []
    rows = whole.forward_intermediates(images, [1, 4], intermediates_only=True)
    for got, row in zip(net(images), rows, strict=True):
        linear = nn.functional.interpolate(row.squeeze(2), 64, mode="linear")
        torch.testing.assert_close(got.flatten(2), linear)


# ── published weights ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and no way out."""

    def fail(*_: Any, **__: Any) -> None:
        raise URLError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "urlopen", fail)


def authors_file(path: Path, model: HVT) -> Path:
    """Weights as the authors' training script saves them."""
    content = {
        "model": model.state_dict(),
        "optimizer": {"state": {}, "param_groups": [{"lr": 1e-4}]},
        "epoch": 299,
        "args": argparse.Namespace(num_heads=3, head_dim=8, input_size=64, pool_stride=2),
    }
    torch.save(content, path)
    return path


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("create", [hvt.create_model, timm.create_model], ids=["hvt", "timm"])
@pytest.mark.parametrize("name", ["hvt_ti_1", "deit_ti"])
def test_pretrained_without_a_network_is_an_error(create: Callable, name: str) -> None:
    with pytest.raises(HVTError, match=r"could not be fetched .* check the network") as caught:
        create(name, pretrained=True)
    assert WEIGHT_URLS[name] in str(caught.value)
    assert "no route to host" in str(caught.value)


@pytest.mark.parametrize("create", [hvt.create_model, timm.create_model], ids=["hvt", "timm"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - set(WEIGHT_URLS)))
def test_pretrained_where_nothing_is_published_is_an_error(create: Callable, name: str) -> None:
    with pytest.raises(HVTError, match=f"no weights are published for {name}: .*hvt_ti_1"):
        create(name, pretrained=True)


@pytest.mark.parametrize("name", ["hvt_s_1", "hvt_ti_4"])
def test_pretrained_from_the_authors_file(
    name: str,
    build: Build,
    small: dict,
    images: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether or not weights are published under the name."""
    trained = build(name, depth=4)
    file = str(authors_file(tmp_path / "weights.pth", trained))
    source = {"pretrained": True, "pretrained_cfg_overlay": {"file": file}}
    model = timm.create_model(name, depth=4, **source, **small).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(images), trained(images))

    fewer = timm.create_model(name, depth=4, **source, **small | {"num_classes": 3})
    assert fewer(images).shape == (2, 3)
    assert torch.equal(fewer.norm.weight, trained.norm.weight)

    # The same path as the published addresses take, from an address on this disk.
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    fetched = {"pretrained": True, "pretrained_cfg_overlay": {"url": Path(file).as_uri()}}
    larger = timm.create_model(name, depth=4, **fetched, **small | {"img_size": 96})
    trained.set_input_size(96)
    torch.testing.assert_close(dict(larger.state_dict()), dict(trained.state_dict()))
