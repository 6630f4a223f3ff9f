"""A classifier of one's own images: head, label errors, duplicates, report, errors."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command
from PIL import Image
from torch import nn

import hvt
from hvt.data.contact_sheet import _font
from hvt.deploy.embed import Embedder
from hvt.errors import HVTError
from hvt.evaluation import wilson
from hvt.fitting import head as heads
from hvt.fitting.head import fit_head, label_errors, temperature
from hvt.fitting.run import Fitted
from hvt.model import HVT
from hvt.training.interrupt import Interrupted
from hvt.training.learner import Learner

COLOURS = {"blue": (30, 40, 200), "green": (30, 180, 60), "red": (200, 40, 30)}


def save_images(folder: Path, count: int, seed: int = 0, names: Any = COLOURS) -> None:
    """Noisy images of one colour per class."""
    draw = np.random.default_rng(seed)
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = draw.normal(COLOURS[name], 50, (40, 50, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{seed}-{number}.png")


@pytest.fixture(scope="module")
def init(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model to embed with."""
    torch.manual_seed(0)
    config = hvt.get_config(
        "hvt_ti_1", img_size=32, patch_size=8, depth=2, num_heads=2, head_dim=16
    )
    path = tmp_path_factory.mktemp("init") / "small.safetensors"
    hvt.save(HVT(config), path)
    return path


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HVT_CACHE", str(tmp_path / "cache"))
    save_images(tmp_path / "images", 15)
    return tmp_path / "images"


@pytest.fixture(scope="module")
def features() -> tuple[torch.Tensor, torch.Tensor]:
    """Three overlapping clouds of 200 points."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 3
    centres = torch.randn(3, 8, generator=draw)
    return centres[labels] + 0.8 * torch.randn(600, 8, generator=draw) + 5, labels


def fit(x: torch.Tensor, labels: torch.Tensor, **options: Any) -> tuple[nn.Linear, Any, float]:
    head = nn.Linear(x.shape[1], 3)
    return head, *fit_head(head, x, labels, **options)


def test_the_head_is_scikit_learn_s(features: tuple[torch.Tensor, torch.Tensor]) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    x, labels = features
    head, _, strength = fit(x, labels, weights=torch.tensor([1.0, 2.0, 5.0]))
    scale = float((x - x.mean(0)).square().mean())
    options = {"max_iter": 1000, "tol": 1e-8, "class_weight": {0: 1, 1: 2, 2: 5}}
    theirs = linear.LogisticRegression(C=1 / (strength * scale), **options)
    theirs.fit(x.numpy(), labels.numpy())
    ours = head(x).softmax(dim=1).detach().numpy()
    assert np.abs(ours - theirs.predict_proba(x.numpy())).max() < 5e-3


def test_held_out_probabilities_are_of_heads_without_the_image(
    features: tuple[torch.Tensor, torch.Tensor],
) -> None:
    x, labels = features
    noise = torch.randn(len(x), 400, generator=torch.Generator().manual_seed(1))
    # nothing to learn, much to overfit
    assert (fit(noise, labels)[1].argmax(dim=1) == labels).float().mean() < 0.45
    assert (fit(x, labels)[1].argmax(dim=1) == labels).float().mean() > 0.7


@pytest.mark.parametrize(("counts", "folds"), [((9, 9, 1), 5), ((4, 2), 5), ((1, 1, 1), 3)])
def test_a_rare_class_takes_no_folds_from_the_others(counts: tuple[int, ...], folds: int) -> None:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    assert set(heads._folds(labels, 0).tolist()) == set(range(folds))


def test_label_errors_are_found(features: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, labels = features
    wrong = labels.clone()
    wrong[:12] = (wrong[:12] + 1) % 3
    found = label_errors(fit(x, wrong)[1], wrong)
    hits = [i for i, guess in found[:12] if i < 12 and guess == labels[i]]
    assert len(hits) >= 8


def test_the_temperature_calibrates() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 4, generator=draw)
    labels = torch.multinomial(logits.softmax(1), 1, generator=draw)[:, 0]
    assert temperature(3 * logits, labels) == pytest.approx(3, rel=0.1)
    assert temperature(torch.tensor([[5.0, 0.0]]), torch.tensor([0])) > 0.1  # one image, right


@pytest.mark.parametrize(
    ("right", "total", "interval"), [(8, 10, (49.0, 94.3)), (0, 5, (0.0, 43.4)), (0, 0, (0, 100))]
)
def test_intervals_are_wilson_s(right: int, total: int, interval: tuple[float, float]) -> None:
    assert wilson(right, total) == pytest.approx(interval, abs=0.1)


def test_a_folder_becomes_a_checkpoint_and_a_report(
    images: Path, init: Path, tmp_path: Path, command: Command
) -> None:
    code, out, _ = command("fit", images, "--init", init, "--output", tmp_path / "run")
    assert code == 0
    assert "held out of the training data" in out
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["top1"] > 90
    assert report["val_images"] == 9
    assert sum(map(sum, report["confusion"])) == 9
    predictor = hvt.Predictor(tmp_path / "run/model.safetensors")
    assert predictor.class_names == tuple(COLOURS)
    save_images(tmp_path / "new", 3, seed=1)
    for name in COLOURS:
        for prediction in predictor(tmp_path / "new" / name):
            assert prediction.name == name
    page = (tmp_path / "run/report.html").read_text()
    assert not re.search(r"\b(src|href)=(?!\"?data:image/)", page)  # nothing is loaded
    assert str(tmp_path) not in page
    assert (tmp_path / "run/worst.png").exists() == bool(report["worst"])
    assert not (tmp_path / "run/linear.safetensors").exists()


def test_the_last_mlp_is_fitted_to_what_the_class_token_is_before_it(init: Path) -> None:
    model = hvt.create_model("deit_ti", num_classes=2, img_size=32, patch_size=8, depth=2).eval()
    images, labels = torch.randn(40, 3, 32, 32), torch.arange(40) % 2
    images += labels.view(-1, 1, 1, 1)
    with torch.no_grad():
        body, tokens = heads.without_tail(model), model.forward_features(images)
        x = body.forward_head(body.forward_features(images), pre_logits=True)
        assert torch.allclose(heads.tail(model, x), model.forward_head(tokens, True), atol=1e-5)
    heads.fit_tail(model, x, labels, None, seed=0)
    assert (model(images).argmax(dim=1) == labels).all()
    assert (heads.can_cut(model), heads.can_cut(hvt.load(init))) == (True, False)


def test_a_second_run_embeds_nothing(
    images: Path, init: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hvt.fit(images, tmp_path / "1", init=init)
    shutil.copytree(images, tmp_path / "copied")  # it is the content that counts
    monkeypatch.setattr(HVT, "forward_features", None)
    second = hvt.fit(tmp_path / "copied", tmp_path / "2", init=init)
    assert torch.equal(first.model.head.weight, second.model.head.weight)
    (cache,) = (tmp_path / "cache/embeddings").iterdir()
    cache.write_bytes(b"damaged")
    monkeypatch.undo()
    monkeypatch.setenv("HVT_CACHE", str(tmp_path / "cache"))
    third = hvt.fit(images, tmp_path / "3", init=init)
    assert torch.equal(first.model.head.weight, third.model.head.weight)


def test_the_cache_holds_what_was_embedded_and_how(
    images: Path, init: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Embedder.stream

    def stopped(embedder: Embedder, paths: Any) -> Any:
        yield next(stream(embedder, paths))
        raise KeyboardInterrupt

    monkeypatch.setattr(Embedder, "stream", stopped)
    with pytest.raises(KeyboardInterrupt):
        hvt.fit(images, tmp_path / "run", init=init, amp="off")
    assert not (tmp_path / "run").exists()
    (cache,) = (tmp_path / "cache/embeddings").iterdir()
    assert len(np.load(cache)["digests"]) == 1
    monkeypatch.undo()
    hvt.fit(images, tmp_path / "run", init=init, amp="bfloat16", cache=cache.parent)
    assert len(list(cache.parent.iterdir())) == 2


def test_train_and_val_with_duplicates_and_contradictions(
    images: Path, init: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    data = tmp_path / "data"
    shutil.copytree(images, data / "train")
    save_images(data / "val", 4, seed=2)
    shutil.copy(images / "red/0-0.png", data / "val/red/copy.png")
    shutil.copy(images / "red/0-1.png", data / "train/blue/copy.png")
    report = hvt.fit("~/data", tmp_path / "run", init=init).report
    assert not report.val_drawn
    assert report.data == str(data)
    assert [pair.labels for pair in report.duplicates if pair.exact] == [("red", "red")]
    assert {pair.labels for pair in report.contradictions} == {("blue", "red")}
    assert any("also in the training images" in text for text in report.warnings)
    assert any("in two classes" in text for text in report.warnings)


def test_few_images_say_how_uncertain_they_are(init: Path, tmp_path: Path, images: Path) -> None:
    save_images(tmp_path / "few", 5)
    report = hvt.fit(tmp_path / "few", tmp_path / "run", init=init).report
    assert any("few training images: blue (4)" in text for text in report.warnings)
    assert any("interval of top-1 is wider than 20 points" in text for text in report.warnings)


def test_one_image_per_class(init: Path, tmp_path: Path, images: Path) -> None:
    save_images(tmp_path / "data/train", 1)
    save_images(tmp_path / "data/val", 2, seed=1)
    assert hvt.fit(tmp_path / "data", tmp_path / "run", init=init).report.top1 > 50
    for path in (tmp_path / "data/val").rglob("*.png"):
        path.write_bytes(b"nothing")
    with pytest.raises(HVTError, match="none of 6 images can be read"):
        hvt.fit(tmp_path / "data", tmp_path / "run2", init=init, skip_broken=True)


@pytest.mark.parametrize("installed", [True, False])
def test_contact_sheets_have_arrows(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    font, arrow = _font()
    assert bytes(font.getmask(arrow)) != bytes(font.getmask("\uffff"))


def test_bad_input_is_one_sentence(
    images: Path, init: Path, tmp_path: Path, command: Command
) -> None:
    def error(*words: Any) -> str:
        code, _, err = command("fit", *words, "--init", init)
        assert (code, err.count("\n")) == (2, 1)
        return err

    save_images(tmp_path / "one", 3, names=["red"])
    assert "only the class 'red'" in error(tmp_path / "one", "--output", tmp_path / "r")
    assert not (tmp_path / "r").exists()
    assert "neither a folder nor a known source" in error("nowhere")
    assert "not a folder of images" in error("digits")
    (images / "red/broken.png").write_bytes(b"nothing")
    assert "broken.png cannot be read as an image" in error(images)
    code, out, _ = command(
        "fit", images, "--init", init, "--skip-broken", "--output", tmp_path / "r"
    )
    assert code == 0
    assert "unreadable images skipped: 1" in out
    assert "already contains a model.safetensors" in error(images, "--output", tmp_path / "r")
    (images / "empty").mkdir()
    assert "empty" in error(images)


def test_minutes_fine_tune_all_blocks_and_keep_the_better(
    images: Path, init: Path, tmp_path: Path, command: Command
) -> None:
    words = ["--init", init, "--workers", "0", "--threads", "1", "--balance", "--amp", "off"]
    code, _, _ = command(
        "fit", images, *words, "--minutes", "1", "--epochs", "2", "--output", tmp_path / "run"
    )
    assert code == 0
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert set(report["top1_of"]) == {"linear head", "fine-tuned"}
    assert report["top1"] == pytest.approx(max(report["top1_of"].values()))
    recipe = json.loads((tmp_path / "run/recipe.json").read_text())
    assert (recipe["batch_size"], recipe["epochs"], recipe["balance"]) == (16, 2, True)
    assert (tmp_path / "run/curves.png").exists()
    start, tuned = (
        hvt.load(tmp_path / "run" / name) for name in ("linear.safetensors", "best.safetensors")
    )
    assert start.class_names == tuned.class_names == tuple(COLOURS)
    assert not torch.equal(start.blocks[0].attn.qkv.weight, tuned.blocks[0].attn.qkv.weight)


def test_a_stopped_fine_tuning_is_resumed_by_the_same_call(
    images: Path, init: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(data: Path = images, minutes: float | None = 1, **values: Any) -> Fitted:
        fixed = {"init": init, "epochs": 2, "workers": 0, "amp": "off"}
        return hvt.fit(data, tmp_path / "run", minutes=minutes, **fixed | values)

    learn = Learner.step

    def stop(learner: Learner, batches: Any, update: int, *options: Any) -> Any:
        step = learn(learner, batches, update, *options)
        return dataclasses.replace(step, flags=(float(update == 2), 0.0, 0.0))

    monkeypatch.setattr(Learner, "step", stop)
    with pytest.raises(Interrupted, match="resume with the same command and --output"):
        run()
    monkeypatch.setattr(Learner, "step", learn)
    with pytest.raises(HVTError, match="already contains"):
        run(minutes=None)
    with pytest.raises(HVTError, match="started by a different command"):
        run(lr=1e-3)
    save_images(tmp_path / "other", 15, seed=1)
    with pytest.raises(HVTError, match="training images changed"):
        run(tmp_path / "other")
    fitted = run()
    assert fitted.report.top1_of["fine-tuned"] > 30
    assert len((fitted.folder / "metrics.csv").read_text().splitlines()) == 3


def test_help_shows_the_values_of_finetune(command: Command) -> None:
    _, out, _ = command("fit", "--help")
    assert "(default: 40)" in out  # epochs; a recipe's own default is 300
