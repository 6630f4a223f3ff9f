"""Batch augmentation: PIL's and timm's results, from each picture's key and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from timm.data import auto_augment, transforms_factory
from torchvision.transforms import functional

from hvt.data import augment, ops
from hvt.data.augment import Augmentation, BatchAugment, RandAugment, keys_for, normalise, uniform
from hvt.data.ops import CODE, NOTHING, OPS
from hvt.errors import HVTError

PAPER = "rand-m9-mstd0.5-inc1"
GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
MEAN, STD = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)
FILL = (129, 124, 112)
EVERYTHING = Augmentation(size=32, rand_augment=PAPER, erase=0.5, mean=MEAN, std=STD)


@pytest.fixture(scope="module")
def photos() -> NDArray[np.uint8]:
    """48 patches of real photographs (scikit-learn's) at CIFAR's size: (48, 32, 32, 3)."""
    datasets = pytest.importorskip("sklearn.datasets")
    found = []
    for picture in datasets.load_sample_images().images:
        for top in range(0, 4 * 96, 96):
            for left in range(0, 6 * 96, 96):
                patch = Image.fromarray(picture[top : top + 96, left : left + 96])
                found.append(np.asarray(patch.resize((32, 32), Image.Resampling.BICUBIC)))
    return np.stack(found)


@pytest.fixture(scope="module")
def images(photos: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(photos)


def keys(number: int, seed: int = 0) -> NDArray[np.uint64]:
    return keys_for(seed, 3, np.arange(number))


def planar(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return pictures.transpose(0, 3, 1, 2).copy()


def as_pil(picture: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture)


def from_pil(picture: Image.Image) -> NDArray[np.uint8]:
    return np.array(picture).reshape(*picture.size[::-1], -1)


def timm_op(picture: NDArray[np.uint8], name: str, argument: float) -> NDArray[np.uint8]:
    """timm's own operation on one picture (H, W, C), with bilinear sampling."""
    arguments: tuple[Any, ...] = (argument,)
    if name in ("AutoContrast", "Equalize", "Invert"):
        arguments = ()
    elif name in ("Posterize", "Solarize", "SolarizeAdd"):
        arguments = (int(argument),)
    fill = FILL if picture.shape[-1] == 3 else FILL[0]
    kwargs = {"fillcolor": fill, "resample": Image.Resampling.BILINEAR}
    return from_pil(auto_augment.NAME_TO_OP[name](as_pil(picture), *arguments, **kwargs))


def assert_like_pil(ours: NDArray[np.uint8], theirs: NDArray[np.uint8], name: str) -> None:
    """Colour operations to the bit; geometric ones to a grey level but for a stray edge pixel."""
    if name not in GEOMETRIC:
        np.testing.assert_array_equal(ours, theirs)
    else:
        far = np.abs(ours.astype(int) - theirs.astype(int)) > 1
        assert far.mean() < 1e-3


# ── the operations ──────────────────────────────────────────────────────────────────────────────


def test_the_operations_are_timms() -> None:
    assert list(OPS) == auto_augment._RAND_TRANSFORMS
    increasing = auto_augment._RAND_INCREASING_TRANSFORMS
    assert list(OPS) == [name.removesuffix("Increasing") for name in increasing]


STRENGTHS = {
    "AutoContrast": [0],
    "Equalize": [0],
    "Invert": [0],
    "Rotate": [-30, -27.3, -1, 0, 0.5, 27, 30],
    "Posterize": [1, 2, 3, 4, 8],
    "Solarize": [0, 1, 26, 128, 255, 256],
    "SolarizeAdd": [0, 1, 99, 110, 128],
    "ShearX": [-0.3, -0.27, 0, 0.01, 0.3],
    "ShearY": [-0.3, -0.27, 0, 0.01, 0.3],
    "TranslateXRel": [-0.45, -0.405, 0, 0.03125, 0.44],
    "TranslateYRel": [-0.45, -0.405, 0, 0.03125, 0.44],
    "Color": [0.1, 0.19, 0.5, 1.0, 1.37, 1.81, 1.9],
    "Contrast": [0.1, 0.19, 0.5, 1.0, 1.37, 1.81, 1.9],
    "Brightness": [0.1, 0.19, 0.5, 1.0, 1.37, 1.81, 1.9],
    "Sharpness": [0.1, 0.19, 0.5, 1.0, 1.37, 1.81, 1.9],
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPS)
def test_each_operation_is_pils(photos: NDArray[np.uint8], name: str, channels: int) -> None:
    pictures = photos[..., :channels]
    strengths = np.resize(np.array(STRENGTHS[name], float), len(pictures))
    changed = planar(pictures)
    ops.apply(changed, np.full(len(pictures), CODE[name]), strengths, FILL[:channels])
    for ours, picture, strength in zip(changed, pictures, strengths, strict=True):
        assert_like_pil(ours.transpose(1, 2, 0), timm_op(picture, name, strength), name)


@pytest.mark.parametrize("name", ["AutoContrast", "Equalize", "Contrast", "Sharpness", "Rotate"])
@pytest.mark.parametrize("shape", [(8, 8, 1), (1, 1, 3), (2, 5, 3), (17, 40, 3)])
def test_odd_pictures(name: str, shape: tuple[int, int, int]) -> None:
    """Flat, almost flat, tiny and oblong ones."""
    pictures = np.random.default_rng(0).integers(0, 256, (3, *shape), dtype=np.uint8)
    pictures[0] = 77
    pictures[1] = 77
    pictures[1, 0, 0] = 80
    changed = planar(pictures)
    ops.apply(changed, np.full(3, CODE[name]), np.full(3, 1.5), FILL[: shape[2]])
    for ours, picture in zip(changed, pictures, strict=True):
        assert_like_pil(ours.transpose(1, 2, 0), timm_op(picture, name, 1.5), name)


@pytest.mark.parametrize("name", GEOMETRIC)
def test_sampling_of_the_hardest_contrast(name: str) -> None:
    """Black beside white, a hair's breadth from whole pixels, and anywhere: no channel spills."""
    generator = np.random.default_rng(2)
    strengths = [k / 32 + d for k in range(4) for d in (-1e-4, -4e-6, -2e-6, 2e-6, 4e-6, 1e-4)]
    strengths += generator.uniform(-0.4, 0.4, 100).tolist()
    pictures = generator.choice(np.array([0, 255], np.uint8), (len(strengths), 32, 32, 3))
    scale = 70 if name == "Rotate" else 1
    changed = planar(pictures)
    ops.apply(changed, np.full(len(strengths), CODE[name]), scale * np.array(strengths), FILL)
    for ours, picture, strength in zip(changed, pictures, strengths, strict=True):
        assert_like_pil(ours.transpose(1, 2, 0), timm_op(picture, name, scale * strength), name)


def test_no_bits_are_black(photos: NDArray[np.uint8]) -> None:
    """Level 10 keeps no bit, which newer versions of PIL refuse (and so timm stops there)."""
    changed = planar(photos)
    ops.apply(changed, np.full(len(photos), CODE["Posterize"]), np.zeros(len(photos)), FILL)
    assert not changed.any()


def test_pictures_with_no_operation_stay(photos: NDArray[np.uint8]) -> None:
    changed = planar(photos)
    codes = np.where(np.arange(len(photos)) % 2, CODE["Invert"], NOTHING)
    ops.apply(changed, codes, np.zeros(len(photos)), FILL)
    np.testing.assert_array_equal(changed[::2], planar(photos)[::2])
    np.testing.assert_array_equal(changed[1::2], 255 - planar(photos)[1::2])


# ── RandAugment ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("negate", [False, True])
def test_arguments_are_timms(
    monkeypatch: pytest.MonkeyPatch, increasing: bool, negate: bool
) -> None:
    monkeypatch.setattr(auto_augment, "_randomly_negate", lambda v: -v if negate else v)
    names = (
        auto_augment._RAND_INCREASING_TRANSFORMS if increasing else auto_augment._RAND_TRANSFORMS
    )
    levels = np.array([0, 0.3, 2.5, 5, 8.37, 9, 9.999, 10, 12])
    for code, name in enumerate(names):
        rule = auto_augment.LEVEL_TO_ARG[name]
        expected = [rule(level, {})[0] if rule else 0 for level in levels.tolist()]
        codes = np.full(len(levels), code)
        ours = RandAugment(increasing=increasing).arguments(codes, levels, np.full(9, negate))
        np.testing.assert_allclose(ours, expected, rtol=1e-14, err_msg=name)


@pytest.mark.parametrize(
    "text", [PAPER, "rand", "rand-m7", "rand-n3-p0.8-m12-mmax15", "rand-mstd101-inc0", "rand-mmax0"]
)
def test_the_string_means_what_it_means_to_timm(text: str) -> None:
    ours, theirs = RandAugment.parse(text), auto_augment.rand_augment_transform(text)
    op = theirs.ops[0]
    assert ours.layers == theirs.num_layers
    assert ours.probability == op.prob
    assert ours.magnitude == op.magnitude
    assert ours.std == op.magnitude_std
    assert ours.limit == (op.magnitude_max or 10)
    assert ours.increasing == any("Increasing" in op.name for op in theirs.ops)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("rand-m9-tweights", "tweights"),
        ("rand-m9-w0", "w0"),
        ("rand-mfoo", "mfoo"),
        ("rand-m9.5", "m9.5"),
        ("rand-m9--inc1", "''"),
        ("augmix-m3", "augmix"),
        ("rand-p1.5", "p must be"),
    ],
)
def test_unknown_parts_are_refused_by_name(text: str, part: str) -> None:
    with pytest.raises(HVTError, match=part):
        Augmentation(size=32, rand_augment=text)


Recorded = list[tuple[NDArray[np.intp], NDArray[np.float64]]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """What each layer asks of `ops.apply`, which still does it."""
    calls: Recorded = []
    real: Callable[..., None] = ops.apply

    def apply(pictures: Any, codes: Any, arguments: Any, fill: Any) -> None:
        calls.append((codes, arguments))
        real(pictures, codes, arguments, fill)

    monkeypatch.setattr(ops, "apply", apply)
    return calls


def test_the_whole_follows_timm_step_by_step(
    photos: NDArray[np.uint8], images: torch.Tensor, recorded: Recorded
) -> None:
    """The same draws, carried out picture by picture with PIL, give the same pictures."""
    given_ = Augmentation(size=32, padding=0, flip=0, rand_augment=PAPER, mean=MEAN, std=STD)
    ours = BatchAugment(given_)(images, keys(len(images)))
    assert len(recorded) == 2
    far = 0
    for number, picture in enumerate(photos):
        geometric = 0
        for codes, arguments in recorded:
            if codes[number] != NOTHING:
                geometric += OPS[codes[number]] in GEOMETRIC
                picture = timm_op(picture, OPS[codes[number]], arguments[number])
        theirs = functional.normalize(functional.to_tensor(picture), MEAN, STD)
        if geometric == 0:
            assert torch.equal(ours[number], theirs)
        far += int((ours[number] - theirs).abs().gt(1.5 / 255 / min(STD)).sum())
    # A grey level off before Equalize or Solarize is more than one after it.
    assert far / ours.numel() < 0.02


def test_operations_are_drawn_as_in_timm(recorded: Recorded) -> None:
    number = 40_000
    pictures = torch.zeros(number, 1, 1, 3, dtype=torch.uint8)
    BatchAugment(Augmentation(size=1, padding=0, rand_augment=PAPER))(pictures, keys(number))
    for codes, arguments in recorded:
        share = np.bincount(codes + 1, minlength=16) / number
        assert share[0] == pytest.approx(0.5, abs=0.01)
        np.testing.assert_allclose(share[1:], 0.5 / 15, atol=0.005)
        angle = arguments[codes == CODE["Rotate"]]
        assert (angle < 0).mean() == pytest.approx(0.5, abs=0.05)
        level = np.abs(angle) / 3
        assert level.max() <= 10
        assert np.median(level) == pytest.approx(9, abs=0.05)
        assert np.quantile(level, 0.1587) == pytest.approx(8.5, abs=0.07)  # one σ below
    first, second = recorded[0][0], recorded[1][0]
    assert (first == second)[first != NOTHING].mean() == pytest.approx(0.5 / 15, abs=0.01)


def test_uniform_magnitude(recorded: Recorded) -> None:
    pictures = torch.zeros(30_000, 1, 1, 3, dtype=torch.uint8)
    given_ = Augmentation(size=1, padding=0, rand_augment="rand-m8-mstd101-n1-p1")
    BatchAugment(given_)(pictures, keys(30_000))
    ((codes, arguments),) = recorded
    assert not (codes == NOTHING).any()
    level = np.abs(arguments[codes == CODE["Rotate"]]) / 3
    np.testing.assert_allclose(np.quantile(level, [0.25, 0.5, 0.75, 1]), [2, 4, 6, 8], atol=0.25)


def test_colour_jitter_is_torchvisions(
    photos: NDArray[np.uint8], images: torch.Tensor, recorded: Recorded
) -> None:
    given_ = Augmentation(size=32, padding=0, flip=0, color_jitter=0.4, mean=MEAN, std=STD)
    ours = BatchAugment(given_)(images, keys(len(images)))
    adjust = {
        "Brightness": functional.adjust_brightness,
        "Contrast": functional.adjust_contrast,
        "Color": functional.adjust_saturation,
    }
    orders = set()
    for number, photo in enumerate(photos):
        picture = Image.fromarray(photo)
        order = tuple(OPS[codes[number]] for codes, _ in recorded)
        for name, (_, factors) in zip(order, recorded, strict=True):
            assert 0.6 <= factors[number] < 1.4
            picture = adjust[name](picture, factors[number])
        assert sorted(order) == sorted(adjust)
        orders.add(order)
        theirs = functional.normalize(functional.to_tensor(picture), MEAN, STD)
        assert torch.equal(ours[number], theirs)
    assert len(orders) == 6


def test_colour_jitter_waits_for_rand_augment_to_be_off(images: torch.Tensor) -> None:
    both = BatchAugment(Augmentation(size=32, rand_augment=PAPER, color_jitter=0.4))
    alone = BatchAugment(Augmentation(size=32, rand_augment=PAPER))
    assert torch.equal(both(images, keys(48)), alone(images, keys(48)))


# ── crops, flips, erasing ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["zero", "reflect"])
@pytest.mark.parametrize("shape", [(32, 32, 3), (8, 8, 1), (9, 12, 3)])
def test_crop_and_flip_one_by_one(mode: str, shape: tuple[int, int, int]) -> None:
    """Every result is one of the windows of the padded picture, and all of them come up."""
    height, width, channels = shape
    number, pad = 600, 2
    pictures = np.random.default_rng(1).integers(0, 256, (number, *shape), dtype=np.uint8)
    given_ = Augmentation(
        size=height, padding=pad, padding_mode=mode, mean=(0.5,) * channels, std=(1,) * channels
    )
    augmented = BatchAugment(given_)
    cropped = augmented._crop(pictures.transpose(0, 3, 1, 2), keys(number))
    augmented._flip(cropped, keys(number))
    seen = set()
    fill = {"zero": "constant", "reflect": "reflect"}[mode]
    for ours, picture in zip(cropped, pictures, strict=True):
        padded = np.pad(picture, ((pad, pad), (pad, pad), (0, 0)), mode=fill)  # type: ignore[call-overload]
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


def test_no_crop_no_flip_is_evaluation(images: torch.Tensor) -> None:
    given_ = Augmentation(size=32, padding=0, flip=0, mean=MEAN, std=STD)
    assert torch.equal(BatchAugment(given_)(images, keys(48)), normalise(images, MEAN, STD))


def test_flip_always_and_half(images: torch.Tensor) -> None:
    still = normalise(images, MEAN, STD)
    given_ = Augmentation(size=32, padding=0, flip=1.0, mean=MEAN, std=STD)
    assert torch.equal(BatchAugment(given_)(images, keys(48)), still.flip(3))
    many = torch.arange(2, dtype=torch.uint8).view(1, 1, 2, 1).expand(10_000, 2, 2, 1)
    given_ = Augmentation(size=2, padding=0, flip=0.3, mean=(0.0,), std=(1.0,))
    share = BatchAugment(given_)(many, keys(10_000))[:, 0, 0, 0].gt(0).float().mean()
    assert share == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("side", [8, 32, 64])
def test_erased_rectangles(side: int) -> None:
    number = 4000
    pictures = torch.zeros(number, side, side, 3, dtype=torch.uint8)
    given_ = Augmentation(size=side, padding=0, erase=0.25, mean=(0.0,) * 3, std=(1.0,) * 3)
    result = BatchAugment(given_)(pictures, keys(number)).numpy()
    erased = result != 0  # a normal number is hardly ever 0
    assert (erased[:, 0] == erased[:, 1]).all()
    assert (erased[:, 0] == erased[:, 2]).all()
    chosen = np.flatnonzero(erased.any(axis=(1, 2, 3)))
    assert len(chosen) / number == pytest.approx(0.25, abs=0.02)
    areas, aspects, tops = [], [], set()
    for mask in erased[chosen, 0]:
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        high, wide = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert mask.sum() == high * wide  # one full rectangle
        assert high < side
        assert wide < side
        areas.append(high * wide / side**2)
        aspects.append(high / wide)
        tops.add(rows[0])
    slack = 1.5 / side  # each side is rounded to a pixel
    assert 0.02 - slack < min(areas) < 0.05
    assert 0.28 < max(areas) < 1 / 3 + slack
    assert np.mean(areas) == pytest.approx(0.17, abs=0.02)
    assert np.median(np.log(aspects)) == pytest.approx(0, abs=0.15)
    if side == 64:
        assert 0.2 < min(aspects) < 0.4
        assert 2.5 < max(aspects) < 5
    assert {0, side // 4, side // 2} <= tops
    noise = result[erased]
    assert noise.mean() == pytest.approx(0, abs=0.02)
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert abs(noise).max() < 4.5
    first, second = result[:, 0][erased[:, 0]], result[:, 1][erased[:, 0]]
    assert np.corrcoef(first, second)[0, 1] == pytest.approx(0, abs=0.02)


# ── nothing but the key ─────────────────────────────────────────────────────────────────────────

KINDS = {
    "plain": Augmentation(size=32),
    "reflect": Augmentation(size=32, padding_mode="reflect"),
    "paper": EVERYTHING,
    "three": Augmentation(size=32, rand_augment="rand-m12-mmax15-n3-p0.9", erase=1.0),
    "jitter": Augmentation(size=32, color_jitter=0.4, erase=0.25),
    "larger": Augmentation(size=48, rand_augment=PAPER, erase=0.5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_alone_is_the_picture_in_a_batch(images: torch.Tensor, kind: str) -> None:
    augmented, key = BatchAugment(KINDS[kind]), keys(48)
    together = augmented(images, key)
    for number in range(48):
        alone = augmented(images[number : number + 1], key[number : number + 1])
        assert torch.equal(alone[0], together[number])
    order = np.random.default_rng(0).permutation(48)[:31]
    assert torch.equal(augmented(images[torch.from_numpy(order)], key[order]), together[order])


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
    pictures = generator.integers(0, 256, (number, side, side, channels), dtype=np.uint8)
    mean, std = (0.5,) * channels, (0.25,) * channels
    given_ = Augmentation(size=size, padding=3, rand_augment=PAPER, erase=0.5, mean=mean, std=std)
    key = keys_for(seed, 0, np.arange(number))
    before = pictures.copy()
    result = BatchAugment(given_)(torch.from_numpy(pictures), key)
    assert result.shape == (number, channels, size, size)
    assert result.dtype == torch.float32
    assert result.is_contiguous()
    assert result.abs().le(4.5).all()
    np.testing.assert_array_equal(pictures, before)
    again = [
        BatchAugment(given_)(torch.from_numpy(pictures[i : i + 1]), key[i : i + 1])
        for i in range(number)
    ]
    assert not number or torch.equal(torch.cat(again), result)


def test_same_keys_same_pictures_other_keys_others(images: torch.Tensor) -> None:
    augmented = BatchAugment(EVERYTHING)
    first = augmented(images, keys(48))
    assert torch.equal(first, BatchAugment(EVERYTHING)(images, keys(48)))
    for other in (keys_for(1, 3, np.arange(48)), keys_for(0, 4, np.arange(48))):
        same = (first == augmented(images, other)).flatten(1).all(dim=1)
        assert same.sum() <= 1


def test_global_random_state_is_neither_read_nor_changed(images: torch.Tensor) -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]

    augmented, results = BatchAugment(EVERYTHING), []
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = states()
        results.append(augmented(images, keys(48)))
        assert states() == before
    assert torch.equal(*results)


def test_one_decision_does_not_disturb_another(images: torch.Tensor) -> None:
    """Erasing leaves what it does not cover as it would have been without."""
    plain = BatchAugment(Augmentation(size=32, rand_augment=PAPER))(images, keys(48))
    erased = BatchAugment(Augmentation(size=32, rand_augment=PAPER, erase=0.5))(images, keys(48))
    assert 0.6 < (plain == erased).float().mean() < 1


# ── keys and numbers ────────────────────────────────────────────────────────────────────────────


def test_keys_differ_in_seed_epoch_and_position() -> None:
    found = [keys_for(s, e, np.arange(2000)) for s in (-1, 0, 1, 2**63) for e in range(5)]
    assert all(k.dtype == np.uint64 for k in found)
    assert len(np.unique(np.concatenate(found))) == 20 * 2000
    part = keys_for(0, 2, np.array([7, 1999, 3]))
    np.testing.assert_array_equal(part, found[7][[7, 1999, 3]])


@pytest.mark.parametrize("change", ["seed", "epoch", "position"])
def test_neighbouring_keys_share_half_their_bits(change: str) -> None:
    at = np.arange(2000)
    one = keys_for(0, 0, at)
    other = {
        "seed": keys_for(1, 0, at),
        "epoch": keys_for(0, 1, at),
        "position": keys_for(0, 0, at + 1),
    }[change]
    bits = np.unpackbits((one ^ other).view(np.uint8)).reshape(-1, 64)
    np.testing.assert_allclose(bits.mean(axis=0), 0.5, atol=0.06)


def test_numbers_are_uniform_and_unrelated() -> None:
    found = uniform(keys(50_000), 3)
    assert found.shape == (50_000, 3)
    assert found.min() >= 0
    assert found.max() < 1
    other = uniform(keys(50_000), 1, stream=1)
    columns = np.concatenate([found, other, np.roll(found[:, :1], 1, axis=0)], axis=1)
    for column in columns.T:
        np.testing.assert_allclose(np.histogram(column, 20, (0, 1))[0] / 50_000, 0.05, atol=0.005)
    related = np.corrcoef(columns.T) - np.eye(5)
    assert abs(related).max() < 0.02


def test_signed_keys_are_the_same_words() -> None:
    np.testing.assert_array_equal(uniform(keys(9).view(np.int64), 4), uniform(keys(9), 4))


def test_a_number_depends_on_its_place_not_on_how_many() -> None:
    np.testing.assert_array_equal(uniform(keys(5), 9, 2)[:, :4], uniform(keys(5), 4, 2))


def test_the_first_keys_never_change() -> None:
    """A run must go on after an upgrade as it began: these words are part of the format."""
    assert [hex(k) for k in keys_for(0, 0, np.arange(2))] == [
        "0x33fe8bd4f9c57863",
        "0x568a9b0b1a2c05ec",
    ]
    assert uniform(keys_for(0, 0, np.arange(1)), 2).tolist() == [
        [0.5183655288211702, 0.9947330745442915]
    ]


# ── evaluation and refusals ─────────────────────────────────────────────────────────────────────


def test_normalise_is_timms_evaluation(photos: NDArray[np.uint8], images: torch.Tensor) -> None:
    transform = transforms_factory.transforms_imagenet_eval(
        img_size=32, crop_pct=1.0, interpolation="bicubic", mean=MEAN, std=STD
    )
    theirs = torch.stack([transform(Image.fromarray(photo)) for photo in photos])
    assert torch.equal(normalise(images, MEAN, STD), theirs)
    assert torch.equal(normalise(images, MEAN, STD, size=32), theirs)


@pytest.mark.parametrize("size", [16, 24, 80])
def test_normalise_resizes_as_timm(
    photos: NDArray[np.uint8], images: torch.Tensor, size: int
) -> None:
    transform = transforms_factory.transforms_imagenet_eval(
        img_size=size, crop_pct=1.0, interpolation="bicubic", mean=(0.0,) * 3, std=(1.0,) * 3
    )
    theirs = torch.stack([transform(Image.fromarray(photo)) for photo in photos])
    ours = normalise(images, (0.0,) * 3, (1.0,) * 3, size=size)
    assert ours.shape == (48, 3, size, size)
    off = (ours - theirs).abs() * 255
    assert off.max() < 2.5
    assert off.gt(0.5).float().mean() < 0.01


def test_values_lie_between_black_and_white(images: torch.Tensor) -> None:
    given_ = Augmentation(size=32, rand_augment=PAPER, mean=MEAN, std=STD)
    result = BatchAugment(given_)(images, keys(48))
    black, white = (normalise(torch.full((1, 1, 1, 3), v).byte(), MEAN, STD) for v in (0, 255))
    assert (result >= black).all()
    assert (result <= white).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", 0),
        ("padding", -1),
        ("padding_mode", "edge"),
        ("flip", 1.1),
        ("erase", -0.1),
        ("color_jitter", -1.0),
        ("mean", (0.5,)),
        ("std", (0.2, 0.0, 0.2)),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(HVTError, match=field):
        Augmentation(**({"size": 32} | {field: value}))


def test_wrong_pictures_are_refused(images: torch.Tensor) -> None:
    augmented = BatchAugment(Augmentation(size=32, padding=40, padding_mode="reflect"))
    with pytest.raises(HVTError, match="key"):
        augmented(images, keys(47))
    with pytest.raises(HVTError, match="uint8"):
        augmented(images.float(), keys(48))
    with pytest.raises(HVTError, match=r"\(B, H, W, 3\)"):
        augmented(images.permute(0, 3, 1, 2), keys(48))
    with pytest.raises(HVTError, match="reflect padding of 40"):
        augmented(images, keys(48))


def test_every_field_explains_itself() -> None:
    for field in augment.dataclasses.fields(Augmentation):
        assert field.metadata["help"]
