"""`hvt see`: feature maps, kept patches and costs equal what is found by hand, and are drawn."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import Command
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor

import hvt
from hvt.errors import HVTError
from hvt.see import (
    FeatureMap,
    FeatureView,
    draw_costs,
    draw_features,
    feature_maps,
    open_model,
    open_price,
    token_sources,
)
from hvt.see.draw import _mosaic, _owners, _token_colours
from hvt.see.maps import strongest

Build = Callable[..., hvt.HVT]


@pytest.fixture
def image() -> Tensor:
    return torch.randn(3, 64, 64)


@pytest.fixture(scope="session")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A photograph, 640 × 427, that comes with scikit-learn."""
    path = tmp_path_factory.mktemp("images") / "flower.png"
    Image.fromarray(load_sample_image("flower.jpg")).save(path)
    return path


@pytest.fixture
def run(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command in an empty folder; gives the exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    return command


def read(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


# ── feature maps ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("deit_ti", {}),
        ("hvt_ti_2", {"pool": "avg"}),
        ("hvt_ti_2", {"pool": "conv", "class_token": True}),
        ("hvt_ti_4", {"img_size": (32, 96), "in_chans": 1}),
        ("hvt_ti_3", {"pool_after": (2, 7)}),
    ],
)
def test_sequences_are_stretched_back_to_their_grid(
    build: Build, name: str, overrides: dict[str, object]
) -> None:
    model = build(name, **overrides)
    config = model.config
    image = torch.randn(config.in_chans, *config.image)
    rows, cols = config.grid
    maps = feature_maps(model, image)
    assert len(maps) >= 4
    assert [maps[0].name, maps[-1].name] == ["block 0", "block 11"]
    with torch.inference_mode():
        tokens = model.forward_intermediates(image[None], output_fmt="NLC", intermediates_only=True)
    for result in maps:
        sequence = tokens[int(result.name.split()[1])]  # (1, N', D)
        assert result.size == f"{sequence.shape[1]} tokens"
        stretched = F.interpolate(sequence.transpose(1, 2), size=rows * cols, mode="linear")
        torch.testing.assert_close(result.values, stretched.reshape(config.width, rows, cols))


def test_a_pooled_grid_stays_a_grid(build: Build, image: Tensor) -> None:
    model = build("hvt_s_2_2d")
    first, *_, last = feature_maps(model, image)
    assert (first.size, last.size) == ("16 tokens", "4 tokens")
    with torch.inference_mode():
        grid = model.forward_intermediates(image[None], intermediates_only=True)[-1]
    assert grid.shape[2:] == (2, 2)
    torch.testing.assert_close(last.values, grid[0])


@pytest.mark.parametrize("name", ["test_resnet", "cs3darknet_focus_s"])
def test_models_of_timm_at_every_level(name: str) -> None:
    """The maps are those of timm's features_only, also of models that are read by hooks."""
    subject = open_model(f"timm:{name}")
    torch.manual_seed(0)  # as open_model did
    reference = timm.create_model(name, features_only=True).eval()
    image = torch.randn(3, 64, 64)
    maps = feature_maps(subject.model, image)
    with torch.inference_mode():
        expected = reference(image[None])
    assert [level.name for level in maps] == reference.feature_info.module_name()
    for result, level in zip(maps, expected, strict=True):
        torch.testing.assert_close(result.values, level[0])
        assert result.size == f"{level.shape[2]} × {level.shape[3]}"


def test_blocks_of_timm_in_five_places() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=12).eval()
    maps = feature_maps(model, torch.randn(3, 32, 32))
    assert [m.name for m in maps] == [f"block {i}" for i in (0, 2, 5, 8, 11)]
    assert {m.values.shape for m in maps} == {(192, 2, 2)}


def test_no_maps_is_a_sentence(image: Tensor) -> None:
    with pytest.raises(HVTError, match="Linear gives no feature maps"):
        feature_maps(torch.nn.Linear(3, 3), image)
    with pytest.raises(HVTError, match="do not fit: this model takes"):
        feature_maps(hvt.create_model("hvt_ti_1"), image)


def test_the_model_is_left_unchanged(build: Build, image: Tensor) -> None:
    model = build("hvt_ti_2", drop_path_rate=0.5).train()
    first, second = (feature_maps(model, image)[-1].values for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)  # nothing was dropped
    assert model.training
    shares = [token_sources(model, image)[-1].shares for _ in range(2)]
    assert shares[0].equal(shares[1])
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_strongest_channels_vary_over_the_image() -> None:
    values = torch.zeros(4, 10, 10)
    values[1] = torch.arange(100.0).view(10, 10)
    values[2, 0, 0] = 1e6  # one odd token says nothing about the image
    values[3] = 2 * torch.arange(100.0).view(10, 10)
    assert strongest(values, 2).equal(values[[3, 1]])
    assert strongest(values, 9).shape == (4, 10, 10)


# ── where tokens come from ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dims", [1, 2])
@torch.inference_mode()
def test_a_maximum_is_taken_after_its_block(build: Build, image: Tensor, dims: int) -> None:
    model = build("hvt_ti_1", class_token=True, pool_dims=dims)
    (stage,) = token_sources(model, image)
    before = model.blocks[0].unpooled(model._embed(image[None]))[0, 1:]
    outputs = model.forward_intermediates(image[None], [0], output_fmt="NLC")[1][0][0]
    kept = outputs - model.blocks[0].pos_embed[0, 1:]
    assert (stage.block, stage.tokens) == (0, model.config.tokens[1] - 1)
    torch.testing.assert_close(before.gather(0, stage.origins), kept)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("hvt_ti_2", {"depth": 4, "class_token": True}),
        ("hvt_ti_4", {"depth": 4, "img_size": (48, 80), "pool_kernel": 4}),
        ("hvt_ti_3", {"pool_after": (1, 2, 5), "depth": 6, "pool_stride": 1}),
        ("hvt_s_2_2d", {"depth": 4, "img_size": (40, 72)}),
        ("deit_ti", {"retention": (40, 40, 9), "depth": 3}),
        ("deit_ti", {"pool": "avg", "depth": 4, "pool_after": (1,), "pool_dims": 2,
                     "pool_kernel": (2, 1), "pool_stride": (2, 1)}),
        ("deit_ti", {"pool": "avg", "depth": 4, "pool_after": (0, 2), "pool_dims": 2}),
        ("deit_ti", {"pool": "avg", "depth": 4, "pool_after": (0, 1)}),
        ("deit_ti", {"pool": "avg", "depth": 4, "pool_after": (0,), "pool_dims": 2,
                     "pool_kernel": 2, "img_size": 40}),
        ("deit_ti", {"depth": 4, "merge": 5}),
        ("deit_ti", {"depth": 4, "merge": (0, 40, 0, 9), "class_token": False}),
    ],
)  # fmt: skip
@torch.inference_mode()
def test_sources_rebuild_the_tokens(build: Build, name: str, overrides: dict[str, Any]) -> None:
    """Where blocks add nothing and no position is told, tokens are made of patches alone."""
    model = build(name, **overrides)
    for block in model.blocks:
        block.attn.proj.weight.zero_(), block.attn.proj.bias.zero_()
        block.mlp.fc2.weight.zero_(), block.mlp.fc2.bias.zero_()
        if block.pos_embed is not None:
            block.pos_embed.zero_()
    image = torch.randn(3, *model.config.image)
    patches = model._embed(image[None])[0, model.num_prefix_tokens :]
    outputs = model.forward_intermediates(image[None], intermediates_only=True, output_fmt="NLC")
    result = token_sources(model, image)
    lengths = [stage.tokens + model.num_prefix_tokens for stage in result]
    assert lengths == list(model.config.tokens[1:])
    averaged = model.config.pool == "avg" or model.config.merge is not None
    for stage in result:
        assert (stage.origins is None) == averaged
        weights, origins = stage.weights, stage.origins
        tokens = weights @ patches if origins is None else patches.gather(0, origins)
        assert torch.allclose(tokens, outputs[stage.block][0], atol=1e-5)
        assert torch.allclose(weights.sum(1), torch.ones(1))
        if origins is not None:
            counts = torch.stack([row.bincount(minlength=len(patches)) for row in origins])
            assert torch.allclose(weights, counts / origins.shape[1])
        assert torch.allclose(stage.shares.flatten(), weights.mean(0))
        assert stage.shares.shape == model.config.grid


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("deit_ti", {}, "has no pooling, so it keeps all its 65 tokens"),
        ("hvt_ti_2", {"pool": "conv"}, r"pools by convolution \(pool=conv\)"),
    ],
)
def test_what_has_no_sources(
    build: Build, image: Tensor, name: str, overrides: dict[str, object], words: str
) -> None:
    with pytest.raises(HVTError, match=words):
        token_sources(build(name, **overrides), image)


# ── drawing ─────────────────────────────────────────────────────────────────────────────────────


def test_rows_of_unequal_length_are_drawn(tmp_path: Path) -> None:
    """Maps without contrast and narrow ones too."""
    steps, flat = torch.rand(7, 1, 20), torch.full((5, 1, 1), 3.0)
    maps = [FeatureMap("block 0", "4 tokens", steps), FeatureMap("flat", "1 token", flat)]
    views = [
        FeatureView("one", torch.rand(46, 46, 3), maps),
        FeatureView("two $x_", torch.rand(8, 160, 3), maps[:1]),
    ]
    draw_features(tmp_path / "f.png", views, channels=4, dpi=60)
    assert read(tmp_path / "f.png").std() > 0
    draw_costs(tmp_path / "c.png", [open_price(n) for n in ("deit_s", "hvt_s_1")], dpi=72)
    assert read(tmp_path / "c.png").std() > 10


def test_a_mosaic_is_brighter_where_a_channel_is_larger() -> None:
    steps = torch.linspace(0, 1, 4).view(1, 2, 2)
    for values, order in ((steps, 1), (-steps, -1)):
        drawn = _mosaic(values, channels=1).sum(dim=2)
        rows, cols = drawn.shape
        corners = [drawn[rows * y // 4, cols * x // 4] for y in (1, 3) for x in (1, 3)]
        assert corners[::order] == sorted(corners)
    nine = _mosaic(torch.rand(20, 4, 4), channels=9)
    assert (nine == 1).all(dim=2).any(dim=1).all()  # white lines between three columns


def test_patches_of_one_token_have_its_average_colour(build: Build, image: Tensor) -> None:
    tall = {"pool_dims": 2, "pool_kernel": (2, 1), "pool_stride": (2, 1), "pool": "avg"}
    (stage,) = token_sources(build("deit_ti", pool_after=(1,), **tall), image)
    owners = _owners(stage).view(8, 8)
    assert owners[::2].equal(owners[1::2])
    assert owners.unique().tolist() == list(range(32))
    photo = torch.rand(64, 64, 3)
    colours = _token_colours(photo, stage, owners)
    torch.testing.assert_close(colours[0, 0], photo[:16, :8].mean(dim=(0, 1)))
    torch.testing.assert_close(colours[::2], colours[1::2])


# ── which model to look at ────────────────────────────────────────────────────────────────────────


def test_titles_say_where_weights_come_from() -> None:
    assert open_model("hvt_ti_1").title == "hvt_ti_1 (random weights, seed 0)"
    assert open_model("test_vit", seed=7).title == "test_vit (timm, random weights, seed 7)"
    assert open_model("timm:hvt_ti_1").title == "hvt_ti_1 (random weights, seed 0)"


def test_checkpoints_keep_their_preparation(build: Build, flower: Path, tmp_path: Path) -> None:
    model = build("hvt_ti_2", in_chans=1, img_size=(32, 64)).half()
    model.pretrained_cfg.update(mean=(0.2, 0.3, 0.4), std=(0.1, 0.2, 0.3))
    (tmp_path / "run").mkdir()
    hvt.save(model, tmp_path / "run" / "best.safetensors")
    subject = open_model(str(tmp_path / "run" / "best.safetensors"))
    assert subject.title == "run/best.safetensors"
    assert open_price(str(tmp_path / "run" / "best.safetensors")) == (
        subject.title, hvt.cost(model),
    )  # fmt: skip
    image = subject.prepare(flower)
    assert image.shape == (1, 32, 64)
    with Image.open(flower) as opened:
        torch.testing.assert_close(subject.prepare(opened), image)
    shown = subject.shown(image)
    assert shown.shape == (32, 64, 3)
    torch.testing.assert_close(shown[..., 0], (image[0] * 0.2 + 0.3).clamp(0, 1))
    assert token_sources(subject.model, image)[0].shares.shape == (4, 8)


# ── the commands ────────────────────────────────────────────────────────────────────────────────


def test_see_features(run: Command, build: Build, flower: Path, tmp_path: Path) -> None:
    hvt.save(build("hvt_ti_2"), tmp_path / "small.safetensors")
    code, out, err = run("see", "features", "small.safetensors", "timm:test_resnet", flower)
    assert (code, out, err) == (0, "flower-features.png\n", "")
    assert read(tmp_path / "flower-features.png").shape[1] > 1000
    words = ("small.safetensors", "--output", "mine.PNG", flower, "--dpi", 50, "--channels", 1)
    assert run("see", "features", *words)[:2] == (0, "mine.PNG\n")
    assert read(tmp_path / "mine.PNG").shape[1] < 700


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("hvt_ti_4", {}),
        ("deit_ti", {"merge": 4, "depth": 2}),
        ("deit_ti", {"pool_after": (0,), "pool": "avg", "depth": 2}),
    ],
)
def test_see_tokens(
    run: Command, build: Build, flower: Path, tmp_path: Path, name: str, overrides: dict[str, Any]
) -> None:
    hvt.save(build(name, **overrides), tmp_path / "small.safetensors")
    code, out, err = run("see", "tokens", "small.safetensors", flower, "--dpi", 72)
    assert (code, out, err) == (0, "flower-tokens.png\n", "")
    assert read(tmp_path / "flower-tokens.png").std() > 10


@pytest.mark.parametrize("kind", ["tokens", "cost"])
def test_the_built_in_model(run: Command, flower: Path, tmp_path: Path, kind: str) -> None:
    code, out, err = run("see", kind, *([] if kind == "cost" else [flower]))
    assert (code, err) == (0, "")
    assert read(tmp_path / out.strip()).size


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("see features", "required: MODEL… IMAGE"),
        ("see features hvt_ti_1", "no image is given: use hvt see features hvt_ti_1 IMAGE"),
        ("see features hvt_ti_1 none.png", "none.png cannot be read as an image: there is no"),
        ("see tokens hvt_ti_1 strip.png", "strip.png cannot be read as an image: its 1 × 9999"),
        ("see features hvt_s4 IMAGE", "'hvt_s4' is neither a model nor a checkpoint: did you"),
        ("see features cut.png IMAGE", "cut.png is neither a safetensors nor a PyTorch file"),
        ("see features hvt_ti_1 IMAGE --output a.pdf", "a.pdf should end in .png or .svg"),
        ("see tokens hvt_ti_1 IMAGE --output IMAGE", "is the image itself"),
        ("see tokens hvt_ti_1 hvt_ti_2 IMAGE", "'hvt_ti_2' is one model too many"),
        ("see tokens deit_ti IMAGE", "has no pooling"),
        ("see features deit_ti_power IMAGE", "have no place in the image"),
        ("see tokens test_resnet IMAGE", "ResNet is not a model of this family"),
        ("see cost resnet50", "resnet50 is a timm model: only hvt's models have costs per block"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(
    run: Command, flower: Path, tmp_path: Path, line: str, words: str
) -> None:
    (tmp_path / "cut.png").write_bytes(flower.read_bytes()[:300])
    Image.new("L", (1, 9999)).save(tmp_path / "strip.png")
    code, out, err = run(*shlex.split(line.replace("IMAGE", str(flower))))
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.png", "strip.png"]


def test_see_alone_shows_the_help(run: Command) -> None:
    assert run("see") == run("see", "--help")
    assert "traced back" in " ".join(run("see", "tokens", "--help")[1].split())


# ── the page about it ───────────────────────────────────────────────────────────────────────────

PAGE = Path(__file__).parents[1] / "docs" / "see.md"


@pytest.mark.skipif(not PAGE.exists(), reason="a source distribution has no docs/")
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python runs."""
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S):
        exec(compile(block, "see.md", "exec"), scope := {"__name__": "page"})
    assert scope["stages"][-1].origins.shape == (48, 192)
    assert {"features.png", "tokens.png"} < {path.name for path in tmp_path.iterdir()}
