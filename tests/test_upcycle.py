"""A trained ViT made cheap: placements, crops, distillation, runs that resume, errors."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from rich.console import Console
from training import Interrupting, quiet, said

import hvt
from hvt.cli import main
from hvt.config import HVTConfig
from hvt.data.augment import SeededDataset
from hvt.data.fingerprint import identity
from hvt.distributed import DistributedContext
from hvt.model import HVT
from hvt.training.interrupt import Interrupted
from hvt.training.run_lock import locked
from hvt.upcycling.distil import compare, distillation_loss, mixed
from hvt.upcycling.photos import Crops, Normalise, open_photos, read_views, unpack
from hvt.upcycling.placement import Evaluator, candidates, describe, variants
from hvt.upcycling.run import resume, upcycle
from hvt.upcycling.source import open_source
from hvt.upcycling.student import Student, pooled, resized, split_of, tail

CPU = torch.device("cpu")
SMALL = HVTConfig(
    img_size=64, patch_size=8, num_heads=2, head_dim=8, depth=4, class_token=True, num_classes=6,
    stages=0,
)  # fmt: skip
FIXED: dict[str, Any] = {"img_size": 48, "pool_after": (1,), "pool": "avg", "pool_dims": 2}
QUICK: dict[str, Any] = FIXED | {
    "epochs": 2.0, "batch_size": 8, "workers": 0, "device": "cpu", "threads": 1,
    "rank_photos": 8,
}  # fmt: skip


def small(**fields: Any) -> HVT:
    torch.manual_seed(0)
    model = HVT(SMALL.replace(**fields)).eval()
    for name, parameter in model.named_parameters():  # so that images differ in their outputs
        norm = "norm" in name and name.endswith("weight")
        torch.nn.init.normal_(parameter, mean=float(norm), std=0.3)
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos and a source's file."""
    folder = tmp_path_factory.mktemp("upcycle")
    draw = np.random.default_rng(0)
    for number in range(40):
        coarse = draw.integers(0, 256, (5, 6, 3)).astype(np.uint8)
        path = folder / "photos" / ("a" if number % 2 else "b") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).resize((90, 75), Image.Resampling.BICUBIC).save(path)
    hvt.save(small(), folder / "vit.safetensors", class_names=["a", "b", "c", "d", "e", "f"])
    return folder


def run(place: Path, folder: Path, console: Console | None = None, **values: Any) -> Any:
    folder.mkdir(exist_ok=True)
    return upcycle(
        place / "vit.safetensors",
        folder / "out.safetensors",
        place / "photos",
        run_folder=folder / "run",
        console=console or quiet(),
        **QUICK | values,
    )


def test_mixed_crops_are_alike_at_every_size() -> None:
    views = [torch.randint(0, 256, (4, 3, size, size), dtype=torch.uint8) for size in (8, 6)]
    kept = torch.tensor([1.0, 0.0, 0.25, 1.0])
    for view, blend in zip(views, mixed(views, kept), strict=True):
        assert torch.equal(blend[0], view[0].float())
        assert torch.equal(blend[1], view[2].float())
        assert torch.allclose(blend[2], 0.25 * view[2] + 0.75 * view[1])


def test_a_run_that_mixes_crops(place: Path, tmp_path: Path) -> None:
    """Drawn alike when it is run again."""
    values: dict[str, Any] = {"epochs": 0.5}
    kl = [
        run(place, tmp_path / str(number), mixup=share, **values).rows[-1].kl
        for number, share in enumerate((0.0, 1.0, 1.0))
    ]
    assert kl[0] != kl[1] == kl[2]


# ── the student ─────────────────────────────────────────────────────────────────────────────────

FAMILIES = {
    "class token": {},
    "average": {"class_token": False},
    "average behind a norm": {"class_token": False, "fc_norm": True},
    "registers and LayerScale": {"reg_tokens": 2, "init_values": 0.1, "no_embed_class": True},
    "distilled": {"dist_token": True},
    "CLIP": {"pre_norm": True, "act_layer": "quick_gelu"},
    "no head": {"num_classes": 0},
}


@pytest.mark.parametrize("fields", FAMILIES.values(), ids=FAMILIES)
@torch.inference_mode()
def test_the_student_is_front_and_tail(fields: dict[str, Any]) -> None:
    source = small(**fields)
    config = candidates(source.config, None, FIXED)[0]
    student = pooled(resized(source, config.image), config)
    images = torch.randn(2, 3, 48, 48)
    whole = student(images)
    x = student._embed(images)
    for block in student.blocks[: split_of(config)]:
        x = block(x)
    last: Any = student.blocks[split_of(config)]
    assert torch.allclose(tail(student, last.unpooled(x)), whole, atol=1e-5)
    outputs = Student(student)(images)
    assert torch.equal(outputs.logits, whole)
    assert distillation_loss(outputs, outputs, head=student.num_classes > 0).item() == 0
    reference = HVT(config).eval()  # the same by an ordinary model and a state dict
    tensors = resized(source, (48, 48)).state_dict()
    missing = reference.load_state_dict(tensors, strict=False).missing_keys
    assert missing == ["blocks.1.pos_embed"]
    torch.nn.init.zeros_(reference.get_parameter("blocks.1.pos_embed"))
    assert torch.equal(reference(images), whole)


# ── where to pool ───────────────────────────────────────────────────────────────────────────────


def test_placements_are_within_the_budget() -> None:
    budget = 0.6 * hvt.cost(SMALL).gflops
    *chosen, whole = candidates(SMALL, budget, {})
    prices = [hvt.cost(config).gflops for config in chosen]
    assert all(0.85 * budget <= price <= budget for price in prices)
    assert {config.pool_dims for config in chosen} == {1, 2}
    assert {len(config.pool_blocks) for config in chosen} == {1, 2}
    assert {config.pool_stride for config in chosen} >= {2, (2, 1), (1, 2)}
    assert len(set(chosen)) == len(chosen)
    assert all(config.class_token and min(config.image) >= 32 for config in chosen)
    assert whole.pool_blocks == ()
    assert hvt.cost(whole).gflops <= budget
    assert len(variants(chosen[0], {})) == 4
    assert len(variants(chosen[0], {"pool": "max"})) == 2
    assert len({describe(one) for one in variants(chosen[0], {})}) == 4


def test_without_pooling_all_sizes_near_the_budget_are_candidates() -> None:
    source = SMALL.replace(img_size=48, patch_size=2, head_dim=64)
    configs = candidates(source, 0.81 * hvt.cost(source).gflops, {"pool_after": ()})
    assert [config.img_size for config in configs] == [44, 46]
    assert configs[0].tokens[-1] == 1  # the class token, which is all that the head reads


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_every_patch_is_in_a_window(stride: int) -> None:
    for rows in range(5, 14):
        fixed = FIXED | {"img_size": 8 * rows, "pool_stride": stride}
        config = candidates(SMALL, None, fixed)[0]
        pool: Any = HVT(config).blocks[1].pool
        seen = pool(torch.eye(1 + rows * rows)[:, :, None])[:, 1:, 0]
        assert (seen.sum(dim=1)[1:] > 0).all(), (rows, stride)


@pytest.mark.parametrize(
    ("gflops", "fixed", "match"),
    [
        (1e-6, {}, r"no placement costs 1e-06 GFLOPs or less: they cost from 0\.\d+ to"),
        (1.0, {}, r"is not below the source's 0\.\d+ GFLOPs"),
        (None, {"img_size": 48}, "no budget is given"),
        (None, FIXED | {"pool_after": (9,)}, "must name blocks from 0 to 3"),
        (None, FIXED | {"img_size": 50}, "does not divide"),
        (0.001, {"pool_after": (9,)}, "must name blocks from 0 to 3"),
        (0.001, {"pool_dims": 1, "pool_stride": (2, 1)}, "has rows and columns: use pool_dims=2"),
    ],
)
def test_a_budget_or_place_that_cannot_be(gflops: Any, fixed: Any, match: str) -> None:
    with pytest.raises(hvt.HVTError, match=match):
        candidates(SMALL, gflops, fixed)


def test_the_evaluator_is_as_exact_as_whole_models(place: Path) -> None:
    source = hvt.load(place / "vit.safetensors")
    photos = open_photos(place / "photos", 8, 500).train
    configs = candidates(source.config, 0.6 * hvt.cost(source).gflops, {})
    configs = [config for config in configs if config.image in ((48, 48), (64, 64))][:4]
    evaluator = Evaluator(source, photos, CPU, workers=0, skip=False)
    evaluator.measure(configs[:2], 4)
    evaluator.measure(configs, 12)  # some continue, others begin
    normalise = Normalise(source, CPU)
    for row in evaluator.ranked(configs):
        student = pooled(resized(source, row.config.image), row.config)
        theirs, ours = read_views(photos.subset(range(12)), [source, student], 0, False)
        with torch.inference_mode():
            sums = compare(student(normalise(ours)), source(normalise(theirs)), True).mean(dim=0)
        assert row.photos == 12
        assert row.kl == pytest.approx(sums[1].item(), rel=1e-3)
        assert row.agreement == pytest.approx(100 * sums[0].item(), abs=1e-3)


# ── photos and crops ────────────────────────────────────────────────────────────────────────────


def test_the_held_out_part_is_stable(place: Path, tmp_path: Path) -> None:
    before = open_photos(place / "photos", 8, 500)
    assert len(before.val) == 8
    assert not {*before.train.paths} & {*before.val.paths}
    shutil.copytree(place / "photos", tmp_path / "photos")
    copied = open_photos(tmp_path / "photos", 8, 500)
    assert [p.name for p in copied.val.paths] == [p.name for p in before.val.paths]
    assert identity(copied) == identity(before)
    shutil.copy(place / "photos/a/1.png", tmp_path / "photos/new.png")
    more = open_photos(tmp_path / "photos", 8, 500)
    assert len({p.name for p in more.val.paths} & {p.name for p in before.val.paths}) >= 7
    assert identity(more) != identity(before)


def test_source_and_student_see_the_same_crop(place: Path) -> None:
    with Image.open(place / "photos/a/1.png") as image:
        crops = Crops(((64, 64), (48, 48)), 0.3, "bicubic")
        seeded = SeededDataset([(image, 0)], crops, skip_broken=False)
        flat = seeded[0, 7][0]
        assert torch.equal(flat, seeded[0, 7][0])
        assert not torch.equal(flat, seeded[0, 8][0])
    large, little = unpack(flat[None], 3, crops.sizes)
    shrunk = torch.nn.functional.interpolate(
        large.float(), (48, 48), mode="bilinear", antialias=True
    )
    assert (shrunk - little.float()).abs().mean() < 4  # of 255; another crop is tens away


# ── runs ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def done(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("done")
    return run(place, folder, license="apache-2.0", lr=1e-3)


def test_a_run_brings_the_student_nearer_and_reports_it(done: Any) -> None:
    source, untrained, distilled = done.rows
    assert [row.name for row in done.rows] == ["source", "untrained", "distilled"]
    assert 0 == source.kl < distilled.kl < untrained.kl
    assert distilled.gflops == hvt.cost(done.model).gflops < source.gflops
    with (done.folder / "distilled/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert min(float(row["val_kl"]) for row in rows) == pytest.approx(distilled.kl, rel=1e-4)
    assert json.loads((done.folder / "report.json").read_text())["best"] == "distilled"


def test_the_file_is_an_ordinary_checkpoint(done: Any, place: Path, capsys: Any) -> None:
    model = hvt.load(done.path)
    assert model.class_names == ("a", "b", "c", "d", "e", "f")
    assert model.config.pool_blocks == (1,)
    assert model.pretrained_cfg["crop_pct"] == 0.875
    origin = model.pretrained_cfg["origin"]
    assert origin["source"] == "vit.safetensors"
    assert origin["license"] == "apache-2.0"
    assert "command" in origin
    assert main(["predict", str(done.path), str(place / "photos/a/1.png"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] in model.class_names


@pytest.mark.parametrize("words", ["untrained: ", "epoch 1/2"])
def test_a_stopped_run_ends_as_if_it_had_not(
    done: Any, place: Path, tmp_path: Path, words: str
) -> None:
    console = Console(file=Interrupting(words), width=200)
    values = {"license": "apache-2.0"}
    with pytest.raises((Interrupted, KeyboardInterrupt)):
        run(place, tmp_path, console, **values, lr=1e-3)
    assert not (tmp_path / "out.safetensors").exists()
    with pytest.raises(hvt.HVTError, match="resume it with hvt upcycle --resume"):
        run(place, tmp_path)
    resume(tmp_path / "run", quiet())
    ours = hvt.load(tmp_path / "run/distilled/model.safetensors").state_dict()
    theirs = hvt.load(done.folder / "distilled/model.safetensors").state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_the_best_candidate_is_taken_unless_pooling_is_asked_for(
    place: Path, tmp_path: Path
) -> None:
    values = {"pool_after": None, "pool": None, "pool_dims": None, "img_size": None}
    values |= {"epochs": 0.0, "gflops": 0.6 * hvt.cost(SMALL).gflops}
    for asked in (None, "any", "max"):
        console = quiet()
        result = run(place, tmp_path / str(asked), console, **values | {"pool": asked})
        most = max(row["photos"] for row in result.ranked)
        last = [row for row in result.ranked if row["photos"] == most]
        assert any(not row["pool_after"] for row in last)  # the source on smaller images
        allowed = [row for row in last if asked is None or row["pool_after"]]
        best = min(allowed, key=lambda row: row["kl"])
        config = hvt.load(result.path).config
        assert [list(config.pool_blocks), config.img_size] == [best["pool_after"], best["img_size"]]
        assert "chosen: " in said(console)
        assert [row.name for row in result.rows] == ["source", "untrained"]
        assert hvt.cost(config).gflops <= values["gflops"]
        assert asked != "max" or config.pool == "max"


def test_two_runs_of_one_source_do_not_share_a_folder(place: Path, tmp_path: Path) -> None:
    """The second finds the folder taken, whatever the first has written by then."""
    alone, taken = DistributedContext(), "run is in use by another process"
    with locked(tmp_path / "run", alone), pytest.raises(hvt.HVTError, match=taken):
        run(place, tmp_path, epochs=0.0)
    assert not (tmp_path / "run").exists()
    first = run(place, tmp_path, epochs=0.0)
    with locked(first.folder, alone), pytest.raises(hvt.HVTError, match=taken):
        resume(first.folder, quiet())


def test_a_restart_does_not_resume_another_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(place, tmp_path, epochs=0.0)
    first.path.unlink()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    asked = (first.folder / "upcycle.json").read_bytes()
    with pytest.raises(hvt.HVTError, match="run already contains a run"):
        run(place, tmp_path, epochs=0.0, pool="max")
    assert (first.folder / "upcycle.json").read_bytes() == asked
    run(place, tmp_path, epochs=0.0)  # its own


def test_a_resumed_run_writes_where_it_was_told(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(place, Path(), epochs=0.0).path.unlink()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    resume("../run", quiet())
    assert (tmp_path / "out.safetensors").exists()


def test_a_source_without_a_head_is_followed_by_its_features(place: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model(
        "vit_small_patch14_reg4_dinov2", img_size=56, depth=3, embed_dim=32, num_heads=2
    )
    result = upcycle(
        theirs, tmp_path / "out.safetensors", place / "photos", run_folder=tmp_path / "run",
        console=quiet(),
        **QUICK | {"img_size": 56, "pool_after": (0,), "epochs": 1.0},
    )  # fmt: skip
    model = hvt.load(result.path)
    assert (model.num_classes, model.config.reg_tokens) == (0, 4)
    assert model.config.init_values is not None
    assert result.rows[0].agreement == 100


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


def test_other_photos_are_noticed_on_resuming(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "photos", tmp_path / "photos")
    shutil.copy(place / "vit.safetensors", tmp_path)
    console = Console(file=Interrupting("untrained"), width=200)
    with pytest.raises((Interrupted, KeyboardInterrupt)):
        run(tmp_path, tmp_path, console)
    photo = tmp_path / "photos/a/1.png"
    for change in (lambda: shutil.copy(tmp_path / "photos/a/3.png", photo), photo.unlink):
        change()
        with pytest.raises(hvt.HVTError, match="have changed since the run"):
            resume(tmp_path / "run", quiet())


def test_bad_input_is_one_sentence(place: Path, tmp_path: Path, capsys: Any) -> None:
    vit, out, photos = str(place / "vit.safetensors"), str(tmp_path / "o.safetensors"), str(place)
    (tmp_path / "empty").mkdir()
    common = ["--gflops", "0.0005", "--run-folder", str(tmp_path / "run"), "--device", "cpu"]
    for words, says in {
        (vit, out, "--data", str(tmp_path / "empty"), *common): "no images in",
        (vit, out, "--data", photos + "/photos/a", "--batch-size", "64", *common): (
            "20 images, 16 to train on and 4 held out: too few for a batch of 64"
        ),
        (vit, "out.pth", "--data", photos): "should end in .safetensors",
        (vit, out): "name photos with --data",
        (vit, out, "--data", photos + "/photos/a/*.png", *common): "is not a folder",
        (vit,): "name a source and an output",
        (vit, out, "--resume", "x"): "leave the others out",
        ("--resume", str(tmp_path)): "not the folder of an upcycling",
    }.items():
        assert main(["upcycle", *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert says in error
    assert not (tmp_path / "run").exists()
    assert not Path(out).exists()


def test_a_training_that_diverges_is_an_error(place: Path, tmp_path: Path) -> None:
    with pytest.raises(hvt.HVTError, match="outputs are not finite: lower --lr"):
        run(place, tmp_path, epochs=1.0, lr=1e30)


def test_sources_that_do_not_fit_are_named(tmp_path: Path) -> None:
    hvt.save(small(stages=2), tmp_path / "hvt.safetensors")
    with pytest.raises(hvt.HVTError, match="is not a plain ViT: it is pooled after block 0"):
        open_source(tmp_path / "hvt.safetensors")
    with pytest.raises(hvt.HVTError, match="resnet18 is not supported"):
        open_source("resnet18")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"minutes": 0.0}, "minutes=0.0 must be"),
        ({"pool_stride": (2, 0)}, r"pool_stride=\(2, 0\) must be"),
        ({"batch_size": 7}, "must be a multiple of 2"),
        ({"pool": "conv"}, "pool='conv' must be max or avg or any"),
        ({"gflop": 1}, "unknown setting 'gflop': did you mean gflops"),
    ],
    ids=str,
)
def test_settings_are_checked(values: dict[str, Any], words: str) -> None:
    with pytest.raises(hvt.HVTError, match=words):
        hvt.upcycle("nothing", "y.safetensors", "z", **values)


def test_without_pooling_the_class_token_ends_alone(place: Path, tmp_path: Path) -> None:
    """It costs less, and has the outputs of the source on such images."""
    values = {"pool_after": (), "pool": None, "pool_dims": None}
    result = run(place, tmp_path, quiet(), epochs=0.0, img_size=48, **values)
    model = hvt.load(result.path)
    whole = resized(hvt.load(place / "vit.safetensors"), (48, 48))
    assert model.config.tokens == (*whole.config.tokens, 1)
    assert hvt.cost(model).gflops < hvt.cost(whole).gflops
    images = torch.randn(3, 3, 48, 48)
    with torch.inference_mode():
        torch.testing.assert_close(model(images), whole.eval()(images))
