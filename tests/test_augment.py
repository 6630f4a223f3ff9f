"""Crops and flips of batches, from each image's key and nothing else; what timm adds to them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from timm.data import transforms_factory
from torchvision.transforms.functional import pil_to_tensor
from training import PLAIN, tiny

from hvt.data.arrays import ArrayImages
from hvt.data.augment import BatchAugment, keys_for, normalise, uniform
from hvt.data.evaluation import eval_batches, eval_transform
from hvt.data.loader import TrainBatches
from hvt.distributed import DistributedContext
from hvt.errors import HVTError
from hvt.registry import create_model
from hvt.training.pipeline import build_model, open_batches

MEAN, STD = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)


@pytest.fixture(scope="module")
def photos() -> NDArray[np.uint8]:
    """48 patches of real photographs (scikit-learn's) at CIFAR's size: (48, 32, 32, 3)."""
    datasets = pytest.importorskip("sklearn.datasets")
    results = []
    for image in datasets.load_sample_images().images:
        for top in range(0, 4 * 96, 96):
            for left in range(0, 6 * 96, 96):
                patch = Image.fromarray(image[top : top + 96, left : left + 96])
                results.append(np.asarray(patch.resize((32, 32), Image.Resampling.BICUBIC)))
    return np.stack(results)


@pytest.fixture(scope="module")
def images(photos: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(photos)


def keys(number: int, seed: int = 0) -> NDArray[np.uint64]:
    return keys_for(seed, 3, np.arange(number))


# ── crops and flips ─────────────────────────────────────────────────────────────────────────────


def augmenter(size: int = 32, padding: int = 4, flip: float = 0.5) -> BatchAugment:
    return BatchAugment(size, MEAN, STD, padding, flip)


@pytest.mark.parametrize("shape", [(32, 32, 3), (8, 8, 1), (9, 12, 3)])
def test_crop_and_flip_one_by_one(shape: tuple[int, int, int]) -> None:
    """Every result is one of the windows of the padded image, and all of them come up."""
    height, width, channels = shape
    number, pad = 600, 2
    images = np.random.default_rng(1).integers(0, 256, (number, *shape), dtype=np.uint8)
    augmented = BatchAugment(height, (0.5,) * channels, (1,) * channels, padding=pad)
    cropped = augmented._crop(images.transpose(0, 3, 1, 2), keys(number))
    augmented._flip(cropped, keys(number))
    seen = set()
    for ours, image in zip(cropped, images, strict=True):
        padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0)), mode="constant")
        matches = []
        for top in range(2 * pad + 1):
            for left in range(2 * pad + 1):
                window = padded[top : top + height, left : left + width]
                for flipped in (False, True):
                    expected = window[:, ::-1] if flipped else window
                    if np.array_equal(ours, expected.transpose(2, 0, 1)):
                        matches.append((top, left, flipped))
        assert len(matches) == 1
        seen.update(matches)
    assert len(seen) == 2 * 5 * 5


# ── nothing but the key ─────────────────────────────────────────────────────────────────────────


@settings(max_examples=25, deadline=None)
@given(
    side=st.integers(4, 40),
    channels=st.sampled_from([1, 3]),
    size=st.integers(4, 40),
    number=st.integers(0, 9),
    seed=st.integers(-(2**70), 2**70),
)
def test_any_shape(side: int, channels: int, size: int, number: int, seed: int) -> None:
    generator = np.random.default_rng(side)
    images = generator.integers(0, 256, (number, side, side, channels), dtype=np.uint8)
    augmented = BatchAugment(size, (0.5,) * channels, (0.25,) * channels, padding=3)
    key = keys_for(seed, 0, np.arange(number))
    before = images.copy()
    result = augmented(torch.from_numpy(images), key)
    assert result.shape == (number, channels, size, size)
    assert result.dtype == torch.float32
    assert result.is_contiguous()
    assert result.abs().le(2).all()
    np.testing.assert_array_equal(images, before)
    again = [augmented(torch.from_numpy(images[i : i + 1]), key[i : i + 1]) for i in range(number)]
    assert not number or torch.equal(torch.cat(again), result)


def test_global_random_state_is_neither_read_nor_changed(images: torch.Tensor) -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]

    augmented, results = augmenter(), []
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = states()
        results.append(augmented(images, keys(48)))
        assert states() == before
    assert torch.equal(*results)


# ── keys and numbers ────────────────────────────────────────────────────────────────────────────


def test_keys_differ_in_seed_epoch_and_position() -> None:
    results = [keys_for(s, e, np.arange(2000)) for s in (-1, 0, 1, 2**63) for e in range(5)]
    assert all(k.dtype == np.uint64 for k in results)
    assert len(np.unique(np.concatenate(results))) == 20 * 2000
    part = keys_for(0, 2, np.array([7, 1999, 3]))
    np.testing.assert_array_equal(part, results[7][[7, 1999, 3]])


def test_the_first_keys_never_change() -> None:
    """A run must go on after an upgrade as it began: these words are part of the format."""
    assert [hex(k) for k in keys_for(0, 0, np.arange(2))] == [
        "0x33fe8bd4f9c57863",
        "0x568a9b0b1a2c05ec",
    ]
    assert uniform(keys_for(0, 0, np.arange(1)), 2).tolist() == [
        [0.5183655288211702, 0.9947330745442915]
    ]


# ── what timm does to images in memory ────────────────────────────────────────────────────────

PAPER = "rand-m9-mstd0.5-inc1"


def batches(workers: int = 0, in_chans: int = 3, **values: Any) -> TrainBatches:
    """The digits' training images under a recipe that is plain but for `values`."""
    overrides = {"in_chans": in_chans, "img_size": values.pop("img_size", 8)}
    values = PLAIN | {"batch_size": 24, "workers": workers} | values
    recipe = tiny(Path("unused"), **values, overrides=overrides)
    model, data, _ = build_model(recipe)
    return open_batches(recipe, model, data, DistributedContext(), torch.device("cpu"))[0]


@pytest.mark.parametrize(("in_chans", "img_size"), [(1, 12), (3, 8)])
@pytest.mark.parametrize(
    "values", [{"rand_augment": PAPER, "erase": 0.5}, {"color_jitter": 0.4}, {"erase": 1.0}]
)
def test_the_rest_is_timms_by_key(in_chans: int, img_size: int, values: dict[str, Any]) -> None:
    train = batches(0, in_chans, img_size=img_size, padding=1, flip=0.5, **values)
    first = next(train.epoch(0))
    assert first.images.shape == (24, in_chans, img_size, img_size)
    assert torch.equal(first.images, next(train.epoch(0)).images)  # whatever was drawn before
    kinds = [type(step).__name__ for part in train.augment.transforms for step in part.transforms]
    expected = ["RandomCrop", "RandomHorizontalFlip"]
    expected += ["RandAugment" if "rand_augment" in values else "ColorJitter"]
    expected += ["Resize", "MaybeToTensor", "Normalize"]
    expected += ["RandomErasing"] if "erase" in values else []
    assert kinds == expected


def test_small_images_are_resized_as_the_recipe_says() -> None:
    """By both ways, a batch at once and timm's."""
    both = [{"color_jitter": jitter, "img_size": 12} for jitter in (0.0, 1e-9)]
    bicubic, bilinear = (
        [next(batches(interpolation=name, **values).epoch(0)).images for values in both]
        for name in ("bicubic", "bilinear")
    )
    for ours, theirs in (bicubic, bilinear):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3 / 255 / 0.2)
    assert (bicubic[0] - bilinear[0]).abs().max() > 0.1


def test_a_policy_that_timm_does_not_know_is_an_error() -> None:
    for policy in ("foo", "rand-mfoo"):
        with pytest.raises(HVTError, match=f"rand_augment='{policy}' is not one of timm's"):
            batches(rand_augment=policy)


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────


def test_normalise_is_timms_evaluation(photos: NDArray[np.uint8], images: torch.Tensor) -> None:
    transform = transforms_factory.transforms_imagenet_eval(
        img_size=32, crop_pct=1.0, interpolation="bicubic", mean=MEAN, std=STD
    )
    theirs = torch.stack([transform(Image.fromarray(photo)) for photo in photos])
    assert torch.equal(normalise(images, MEAN, STD, size=32), theirs)


@pytest.mark.parametrize("size", [16, 24, 80])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_small_images_are_shown_as_the_checkpoint_says(
    photos: NDArray[np.uint8], images: torch.Tensor, size: int, interpolation: str
) -> None:
    model = create_model("hvt_ti_1", img_size=size, patch_size=8, num_heads=1, depth=2)
    model.pretrained_cfg.update(interpolation=interpolation, mean=(0.0,) * 3, std=(1.0,) * 3)
    ours = eval_transform(model, arrays=True)(images)
    resampling = Image.Resampling[interpolation.upper()]
    resized = [Image.fromarray(photo).resize((size, size), resampling) for photo in photos]
    off = (ours * 255 - torch.stack(list(map(pil_to_tensor, resized)))).abs()
    assert off.max() < 2.5
    assert off.gt(0.5).float().mean() < 0.01


def test_what_only_pillow_resizes_is_evaluated_image_by_image(images: torch.Tensor) -> None:
    model = create_model("hvt_ti_1", img_size=16, patch_size=8, num_heads=1, depth=2)
    model.pretrained_cfg.update(interpolation="lanczos", crop_pct=1.0)
    (batch,) = eval_batches(model, ArrayImages(images, torch.zeros(48, dtype=torch.int64)))
    first = Image.fromarray(images[0].numpy())
    assert torch.equal(batch.images[0], eval_transform(model)(first))
