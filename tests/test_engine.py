"""Real trainings of a tiny model: what moves, is measured and written, and what is an error."""

import csv
import io
import itertools
import json
import math
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor
from training import (
    PLAIN,
    TINY,
    Waits,
    assert_same_run,
    quiet,
    run,
    said,
    small_disk,
    tiny,
    trainer_of,
    weights,
    write_recipe,
)

import hvt
from hvt import HVTError
from hvt.cli import main
from hvt.training.engine import resume, train
from hvt.training.optimize import make_optimizer, make_schedule
from hvt.training.pipeline import build_model
from hvt.training.recipe import Recipe
from hvt.training.state import read_state, states
from hvt.training.trainer import Result, Trainer
from hvt.training.watch import Watcher, clock

CPU = torch.device("cpu")


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def losses(result: Result) -> list[float]:
    return [row["train_loss"] for row in result.rows]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A finished run that has learned something."""
    folder = tmp_path_factory.mktemp("done") / "run"
    values = PLAIN | {"ema": 0.9, "epochs": 6, "batch_size": 120, "lr": 0.05}
    return run(folder, **values, overrides={"drop_path_rate": 0.0})


# ── what a run leaves ───────────────────────────────────────────────────────────────────────────


def test_a_run_learns(done: Result) -> None:
    assert losses(done)[-1] < losses(done)[0] - 0.3
    assert done.top1 > 30  # by chance 10
    rows = table(done.folder)
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [float(row["train_loss"]) for row in rows] == losses(done)
    assert all(row["bad_steps"] == row["broken"] == "0" for row in rows)


def test_the_folder_says_everything(done: Result) -> None:
    names = {path.name for path in done.folder.iterdir()}
    assert names == {
        "best.safetensors", "model.safetensors", "checkpoints", "config.json", "curves.png",
        "metrics.csv", "recipe.json", "worst.png",
    }  # fmt: skip
    assert len(list((done.folder / "checkpoints").iterdir())) == 2
    described = json.loads((done.folder / "recipe.json").read_text())
    assert described["output"] == str(done.folder)
    assert described["overrides"]["head_dim"] == 16
    config = json.loads((done.folder / "config.json").read_text())
    assert hvt.HVTConfig.from_dict(config) == done.model.config
    assert hvt.load(done.folder).class_names == done.model.class_names  # the folder will do
    with Image.open(done.folder / "curves.png") as image:
        assert image.format == "PNG"


def test_the_average_is_evaluated_too_and_the_better_is_kept(done: Result) -> None:
    state = read_state(states(done.folder / "checkpoints")[-1])
    trainer = trainer_of(tiny(done.folder))
    for kind, prefix in (("model", "val"), ("ema", "ema")):
        model = hvt.load(done.folder / "model.safetensors")
        model.load_state_dict(state[kind])
        metrics = trainer.evaluate(model)
        assert metrics["top1"] == done.rows[-1][f"{prefix}_top1"]
        assert metrics["loss"] == pytest.approx(done.rows[-1][f"{prefix}_loss"], rel=1e-6)
    assert done.best == max(row[key] for row in done.rows for key in ("val_top1", "ema_top1"))
    best = hvt.load(done.folder / "best.safetensors")
    assert trainer.evaluate(best)["top1"] == done.best
    last = done.rows[-1]
    assert done.top1 == max(last["val_top1"], last["ema_top1"])
    written = weights(done.folder / "model.safetensors")
    assert all(torch.equal(written[k], v) for k, v in done.model.state_dict().items())
    assert not done.model.training


@pytest.mark.parametrize(("direction", "best"), [("max", 3.0), ("min", 1.0)])
def test_a_trainer_takes_its_measure(tmp_path: Path, direction: Any, best: float) -> None:
    console, values = quiet(), iter((2.0, 3.0, 1.0, 2.5))
    learner = trainer_of(tiny(tmp_path, **PLAIN, epochs=4, batch_size=1000)).learner
    result = Trainer(
        learner,
        tmp_path,
        console,
        evaluate=lambda model: {"kl": next(values)},
        measure="kl",
        direction=direction,
        identity={},
        about="about",
    ).run()
    assert result.best == best
    assert [row["val_kl"] for row in result.rows[:3]] == [2.0, 3.0, 1.0]
    assert f"KL 2.5000, best KL {best:.4f}" in said(console)
    assert "KL 2.0000" in said(console)


def test_what_is_printed_first(tmp_path: Path) -> None:
    console = quiet()
    train(tiny(tmp_path / "run", epochs=1, accumulate=2), console=console)
    data, model, first, second, epoch, summary = said(console).splitlines()
    assert (data, model) == ("reading the data: digits", "building the model: hvt_ti_2")
    assert "hvt_ti_2 (new weights): 8×8, tokens 16 → 7 → 3; digits: 1293 training and 145" in first
    assert "batch 240 = 1 process(es) × 2 × 120; learning rate 9.37e-03" in second
    assert "5 steps per epoch, 5 left on cpu" in second
    assert epoch.startswith("epoch 1/1  loss ")
    assert "weights in model.safetensors" in summary


@pytest.mark.parametrize(
    ("minutes", "left"),
    [(None, 76 + 2 * 10 + 3 * 500), (10, 600 - 30)],  # of steps, two more starts, evaluations
)
def test_the_estimate_counts_evaluations_and_the_start_of_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float | None, left: float
) -> None:
    """Steps of 1 s, of which the first of an epoch waits 10 s for its readers."""
    console, seconds = quiet(), [0.0]
    recipe = tiny(tmp_path, **PLAIN, epochs=3, batch_size=40, minutes=minutes)
    trainer = trainer_of(recipe, console)
    trainer.evaluation_seconds = lambda model: 500.0
    learn = trainer.learner.step

    def step(batches: Any, update: int, *options: Any) -> Any:
        seconds[0] += 1.0 + 10.0 * (update % trainer.steps == 0)
        return learn(batches, update, *options)

    monkeypatch.setattr(trainer.learner, "step", step)
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    trainer.run()
    assert f"about {clock(left)} left: 40 images/s" in said(console)
    assert "epoch 1/3" not in said(console).split(" left: ")[0]
    monkeypatch.undo()
    trainer = trainer_of(recipe)
    assert trainer.evaluation_seconds(trainer.learner.model) > 0


def test_a_step_touches_the_files_that_contributing_lists(
    folder_of_images: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(on_images(tmp_path / "run", folder_of_images))
    trainer.saved = time.monotonic()
    trainer.watcher = Watcher(quiet())
    trainer.first_epoch = 0
    root, touched = Path(hvt.__file__).parent, set()

    def look(frame: Any, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(root):
            touched.add(path.relative_to(root).as_posix())

    sys.setprofile(look)
    try:
        trainer._epoch(0)
    finally:
        sys.setprofile(None)
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    listed = text.split("<!-- step:begin -->")[1].split("<!-- step:end -->")[0]
    assert touched == set(re.findall(r"^- `(.+?)`", listed, re.MULTILINE))
    assert len(touched) <= 11


def test_tensorboard_where_it_is_wanted(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(tmp_path / "run", epochs=2, tensorboard=True)
    log = EventAccumulator(str(result.folder / "tensorboard"))
    log.Reload()
    for name in ("train_loss", "val_top1", "ema_top1"):
        assert [(e.step, e.value) for e in log.Scalars(name)] == [
            (row["epoch"], pytest.approx(row[name])) for row in result.rows
        ]


# ── how the weights move ────────────────────────────────────────────────────────────────────────


@pytest.fixture
def model() -> hvt.HVT:
    fields = {"img_size": 32, "patch_size": 4, "depth": 6, "num_classes": 10}
    return hvt.create_model("hvt_ti_2", class_token=True, **fields)


def groups_of(model: hvt.HVT, **values: Any) -> dict[str, dict[str, Any]]:
    """The optimizer's group of each parameter."""
    recipe = Recipe(weight_decay=0.1, lr=1.0, batch_size=512, **values)
    optimizer = make_optimizer(model, recipe, CPU)
    make_schedule(optimizer, recipe, steps=100).step_update(500)  # at the peak
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert groups.keys() == dict(model.named_parameters()).keys()
    return groups


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_weights_decay_and_the_rest_does_not(model: hvt.HVT, layer_decay: float | None) -> None:
    decays = {
        name: group["weight_decay"]
        for name, group in groups_of(model, layer_decay=layer_decay).items()
    }
    pooled = [name for name in decays if name.startswith("blocks") and name.endswith("pos_embed")]
    assert len(pooled) == 2
    for name, decay in decays.items():
        free = name.endswith((".bias", "pos_embed", "cls_token")) or "norm" in name
        assert decay == (0.0 if free else 0.1), name


def test_layer_decay_slows_the_early_layers(model: hvt.HVT) -> None:
    rates = {name: group["lr"] for name, group in groups_of(model, layer_decay=0.5).items()}
    assert rates["head.weight"] == pytest.approx(1.0)
    assert rates["norm.weight"] == rates["blocks.5.norm1.weight"]  # timm counts it to the block
    for block in range(6):
        assert rates[f"blocks.{block}.mlp.fc1.weight"] == pytest.approx(0.5 ** (6 - block))
    assert rates["blocks.0.pos_embed"] == pytest.approx(0.5**6)
    for name in ("patch_embed.proj.weight", "pos_embed", "cls_token"):
        assert rates[name] == pytest.approx(0.5**7)


@pytest.mark.parametrize("batch_size", [64, 512, 1024])
def test_the_schedule(model: hvt.HVT, batch_size: int) -> None:
    recipe = Recipe(epochs=10, warmup_epochs=2.5, batch_size=batch_size)
    optimizer = make_optimizer(model, recipe, CPU)
    schedule = make_schedule(optimizer, recipe, steps=20)
    rates = []
    for update in range(200):
        schedule.step_update(update)
        rates.append(optimizer.param_groups[0]["lr"])
    peak = 5e-4 * batch_size / 512
    assert rates[0] == pytest.approx(1e-6)
    assert rates[25] == pytest.approx((peak + 1e-6) / 2)
    assert rates[50] == max(rates) == pytest.approx(peak)
    for update in (51, 100, 150, 198):
        cosine = 0.5 * (1 + math.cos(math.pi * (update - 50) / 149))
        assert rates[update] == pytest.approx(1e-5 + (peak - 1e-5) * cosine)
    assert rates[199] == min(rates[50:]) == pytest.approx(1e-5)


@pytest.mark.parametrize("steps", [1, 2, 3, 30])
@pytest.mark.parametrize("warmup", [0, 5])
def test_short_schedules_warn_of_nothing(
    model: hvt.HVT, caplog: pytest.LogCaptureFixture, steps: int, warmup: int
) -> None:
    recipe = Recipe(epochs=1, warmup_epochs=warmup, batch_size=512)
    schedule = make_schedule(make_optimizer(model, recipe, CPU), recipe, steps)
    assert not caplog.records
    rates = [schedule._get_lr(update)[0] for update in range(steps)]
    assert max(rates) == pytest.approx(5e-4) if steps >= 3 else max(rates) <= 5e-4 * 1.001
    assert steps < 3 or rates[-1] == pytest.approx(1e-5)


def test_a_part_of_an_epoch(tmp_path: Path) -> None:
    """1.4 epochs of 5 steps are 7 steps, and the rate is down at the last of them."""
    console = quiet()
    recipe = tiny(tmp_path / "run", epochs=1.4, eval_every=5, **PLAIN)
    result = train(recipe, console=console)
    assert "5 steps per epoch, 7 left" in said(console)
    assert "epoch 2/2" in said(console)
    first, last = table(result.folder)
    assert (first["epoch"], first["val_top1"], last["epoch"]) == ("1", "", "2")
    assert float(last["val_top1"]) == result.top1  # the last epoch is evaluated in any case
    assert "ema_top1" not in first  # there is no average
    assert result.rows[-1]["lr"] == pytest.approx(1e-5)
    assert run(tmp_path / "short", epochs=0.1, **PLAIN).rows[-1]["epoch"] == 1


def first_step(folder: Path, **values: Any) -> dict[str, Tensor]:
    """How far the first step moves each parameter."""
    trainer = trainer_of(tiny(folder, **values))
    model = trainer.learner.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.learner.step(trainer.batches.epoch(0), 0)
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


def test_clipping_shortens_the_gradient(tmp_path: Path) -> None:
    # Adam's first step is g / (|g| + 1e-8): only gradients near 1e-8 show their length in it.
    def length(clip: float | None) -> float:
        moved = first_step(tmp_path, **PLAIN, clip_grad=clip, layer_decay=None, weight_decay=0.0)
        return math.sqrt(sum(float((m**2).sum()) for m in moved.values()))

    free, loose, tight = length(None), length(1e6), length(1e-9)
    assert free == loose
    assert 0 < tight < free / 5


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_step_waits_for_the_device_once(tmp_path: Path, microbatches: int) -> None:
    """Mixup, clipping, averaging, the loss shown and the wish to stop: one transfer in all."""
    recipe = tiny(tmp_path, accumulate=microbatches)
    trainer = trainer_of(recipe)
    trainer.saved = time.monotonic()
    trainer.watcher = Watcher(quiet())
    with Waits() as waits:
        trainer._epoch(0)
    assert (trainer.progress.step, trainer.progress.loss_steps) == (5, 5)
    assert waits.transfers == 5


# ── microbatches, precision, memory ─────────────────────────────────────────────────────────────


def assert_close(left: Result, right: Result) -> None:
    assert losses(left) == pytest.approx(losses(right), rel=1e-5)
    for name, tensor in left.model.state_dict().items():
        assert torch.allclose(tensor, right.model.state_dict()[name], atol=2e-5), name


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_add_up(single: Result, tmp_path: Path, microbatches: int) -> None:
    assert_close(run(tmp_path / "run", accumulate=microbatches), single)


DROPOUT = {"pos_drop_rate": 0.3, "proj_drop_rate": 0.2, "drop_rate": 0.5}


def masks_of_a_step(folder: Path, microbatches: int) -> tuple[Tensor, Tensor]:
    """What each microbatch's dropout left out, and which branches stochastic depth left in."""
    recipe = tiny(folder, accumulate=microbatches, overrides=DROPOUT, **PLAIN)
    trainer = trainer_of(recipe)
    learner, dropped, kept = trainer.learner, [], []
    learner.model.head_drop.register_forward_hook(lambda _m, _i, y: dropped.append(y == 0))
    last = learner.model.blocks[-1].drop_path2
    last.register_forward_hook(lambda _m, i, y: kept.append((y != i[0]).any(2).any(1)))
    learner.step(trainer.batches.epoch(0), 3)
    rows = [batch.rows for batch in itertools.islice(trainer.batches.epoch(0), microbatches)]
    whole = torch.empty(240, dtype=torch.bool)
    for row, part in zip(rows, kept, strict=True):
        whole[slice(None) if row is None else row] = part
    return torch.stack(dropped), whole


def test_microbatches_have_their_own_dropout_and_share_stochastic_depth(tmp_path: Path) -> None:
    dropped, kept = masks_of_a_step(tmp_path / "microbatches", 2)
    assert dropped.shape[:2] == (2, 120)
    assert 0.4 < dropped.float().mean() < 0.6
    agree = (dropped[0] == dropped[1]).float().mean()
    assert 0.4 < agree < 0.6  # as two independent masks of rate 0.5 do
    _, in_one = masks_of_a_step(tmp_path / "whole", 1)
    assert torch.equal(kept, in_one)
    assert 0 < kept.sum() < 240
    again, _ = masks_of_a_step(tmp_path / "again", 2)
    assert torch.equal(again, dropped)  # from (seed, step, shard) only


def test_a_trained_model_draws_for_itself(tmp_path: Path) -> None:
    """Nothing of the last step's masks is left in it."""
    trainer = trainer_of(tiny(tmp_path, accumulate=2, overrides=DROPOUT))
    trainer.learner.step(trainer.batches.epoch(0), 0)
    assert trainer.learner.model.train()(torch.zeros(7, 3, 8, 8)).shape == (7, 10)


@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
def test_mixed_precision(single: Result, tmp_path: Path, amp: str) -> None:
    result = run(tmp_path / "run", amp=amp)
    assert losses(result) == pytest.approx(losses(single), rel=0.02)
    assert losses(result) != losses(single)
    assert all(p.dtype == torch.float32 for p in result.model.parameters())
    assert result.rows[-1]["bad_steps"] == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled(single: Result, tmp_path: Path) -> None:
    result = run(tmp_path / "run", compile=True)
    assert losses(result) == pytest.approx(losses(single), rel=1e-3)
    assert result.model.state_dict().keys() == single.model.state_dict().keys()


# ── losses that are not finite ──────────────────────────────────────────────────────────────────


def poisoned(trainer: Trainer, value: float) -> None:
    """Spoil one training image's worth of everything: a bias of the head."""
    with torch.no_grad():
        trainer.learner.model.get_parameter("head.bias")[0] = value


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_bad_step_changes_nothing(tmp_path: Path, microbatches: int) -> None:
    trainer = trainer_of(tiny(tmp_path, accumulate=microbatches))
    learner, batches = trainer.learner, trainer.batches.epoch(0)
    assert learner.step(batches, 0).taken
    poisoned(trainer, math.inf)
    before = {kind: {k: v.clone() for k, v in state.items()} for kind, state in
              (("model", learner.model.state_dict()), ("ema", learner.state()["ema"]))}  # fmt: skip
    moments = [s["exp_avg"].clone() for s in learner.optimizer.state_dict()["state"].values()]
    step = learner.step(batches, 1)
    assert not step.taken
    assert not math.isfinite(step.loss)
    after = learner.state()
    assert all(torch.equal(after[kind][k], v) for kind in before for k, v in before[kind].items())
    now = [s["exp_avg"] for s in learner.optimizer.state_dict()["state"].values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, now, strict=True))
    assert all(p.grad is None for p in learner.model.parameters())
    poisoned(trainer, 0.0)
    assert learner.step(batches, 2).taken


def test_a_learning_rate_that_diverges_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    values = PLAIN | {"lr": 1e30, "warmup_lr": 1e-9, "warmup_epochs": 2, "clip_grad": None}
    with pytest.raises(HVTError, match=r"not finite 3 times in a row \(epoch 1, step \d\): lower"):
        run(folder, **values, epochs=4, max_bad_steps=3, checkpoint_minutes=0.0)
    # Of what was written nothing is lost: the checkpoint before the fall is among those kept.
    oldest = sorted((folder / "checkpoints").iterdir())[0]
    state = torch.load(oldest, weights_only=True)
    assert all(torch.isfinite(tensor).all() for tensor in state["model"].values())
    assert state["progress"]["consecutive_nonfinite"] == 0


def test_a_model_without_finite_outputs_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    values = PLAIN | {"lr": 1e22, "warmup_epochs": 0, "clip_grad": None, "batch_size": 1000}
    with pytest.raises(HVTError, match="the trained model's outputs are not finite: lower --lr"):
        run(folder, **values, epochs=3)
    assert not (folder / "best.safetensors").exists()
    assert not (folder / "model.safetensors").exists()


def test_a_few_bad_steps_are_counted_and_skipped(tmp_path: Path) -> None:
    recipe = tiny(tmp_path / "run", **PLAIN, max_bad_steps=3)
    console = quiet()
    trainer = trainer_of(recipe, console)
    # Two gradients of ten, the second and third, are not finite.
    calls: list[int] = []

    def spoil(gradient: Tensor) -> Tensor:
        calls.append(1)
        # The first two are those of the estimate of the time.
        return gradient * math.inf if len(calls) in (4, 5) else gradient

    trainer.learner.model.get_parameter("head.bias").register_hook(spoil)
    result = trainer.run()
    assert len(calls) == 12
    assert [row["bad_steps"] for row in table(result.folder)] == ["2", "2"]
    assert "2 bad steps" in said(console)
    assert all(math.isfinite(loss) for loss in losses(result))


# ── distillation ────────────────────────────────────────────────────────────────────────────────


def test_another_teacher_of_the_same_name_is_noticed(done: Result, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher.safetensors"
    shutil.copy(done.folder / "best.safetensors", teacher)
    folder = tmp_path / "a run"
    run(folder, **PLAIN, epochs=1, batch_size=1000, teacher=str(teacher))
    model = hvt.load(teacher)
    torch.nn.init.zeros_(model.head.bias)
    hvt.save(model, teacher)
    with pytest.raises(HVTError, match="teacher's weights changed since the run started"):
        resume(folder, epochs=2, console=quiet())


def test_a_resumed_run_does_not_read_its_init(done: Result, tmp_path: Path) -> None:
    """It has the weights, the architecture and the preprocessing in its state."""
    init = tmp_path / "init.safetensors"
    model = hvt.load(done.folder / "best.safetensors")
    hvt.save(model, init, preprocessing={"mean": (0.1,) * 3})
    run(tmp_path / "run", **PLAIN, epochs=1, batch_size=1000, model=None, init=str(init))
    init.unlink()
    result = resume(tmp_path / "run", epochs=2, console=quiet())
    assert len(result.rows) == 2
    assert hvt.load(result.folder / "model.safetensors").pretrained_cfg["mean"] == (0.1,) * 3


def test_alpha_weighs_the_teacher_against_the_labels(done: Result, tmp_path: Path) -> None:
    teacher = str(done.folder / "best.safetensors")

    def loss(alpha: float) -> float:
        recipe = tiny(tmp_path, teacher=teacher, distill_alpha=alpha)
        trainer = trainer_of(recipe)
        return trainer.learner.step(trainer.batches.epoch(0), 0).loss

    labels, teacher_only = loss(0.0), loss(1.0)
    assert labels != pytest.approx(teacher_only, rel=1e-3)
    assert loss(0.25) == pytest.approx(0.75 * labels + 0.25 * teacher_only, rel=1e-5)
    alone = trainer_of(tiny(tmp_path))
    assert alone.learner.step(alone.batches.epoch(0), 0).loss == pytest.approx(labels)


# ── starting from a checkpoint ──────────────────────────────────────────────────────────────────


def draw(path: Path, colour: int, size: int = 20) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size, size), (colour, 255 - colour, 128)).save(path)


@pytest.fixture
def folder_of_images(tmp_path: Path) -> Path:
    """Two classes of twelve and a validation part."""
    for index in range(12):
        draw(tmp_path / "images" / "train" / "dark" / f"{index}.png", 10 * index)
        draw(tmp_path / "images" / "train" / "light" / f"{index}.png", 255 - 10 * index)
    for name, colour in (("dark", 5), ("light", 250)):
        for index in range(3):
            draw(tmp_path / "images" / "val" / name / f"{index}.png", colour + index)
    return tmp_path / "images"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("0123456789", "its own classifier"),
        (None, "its own classifier"),
        ("9876543210", "new classifier"),
    ],
)
def test_a_classifier_of_the_same_classes_is_kept(
    tmp_path: Path, names: str | None, words: str
) -> None:
    fields = TINY | {"num_classes": 10, "class_token": True, "dist_token": True}
    model = hvt.create_model("hvt_ti_2", **fields)
    hvt.save(model, tmp_path / "m.safetensors", class_names=None if names is None else list(names))
    recipe = tiny(tmp_path / "run", model=None, init=str(tmp_path / "m.safetensors"))
    built = build_model(recipe)
    assert built.weights == words
    assert built.model.class_names == tuple("0123456789")
    for head in ("head", "head_dist"):
        ours, theirs = (getattr(one, head).weight for one in (built.model, model))
        assert torch.equal(ours, theirs) == (words == "its own classifier")
    kept = build_model(recipe, keep_classifier=True).model
    assert torch.equal(kept.head.weight, model.head.weight)


def test_half_precision_weights_are_trained_in_full(done: Result, tmp_path: Path) -> None:
    hvt.save(hvt.load(done.folder / "best.safetensors").half(), tmp_path / "half.safetensors")
    init = str(tmp_path / "half.safetensors")
    result = run(tmp_path / "run", **PLAIN, model=None, init=init, epochs=1, lr=1e-4)
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}
    assert result.top1 == pytest.approx(done.best, abs=3)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model": None}, "no model is given"),
        ({"data": None}, "no data is given"),
        ({"model": None, "init": "nowhere.pth"}, r"cannot read nowhere\.pth"),
        ({"init": "x.pth"}, r"--model hvt_ti_2 and --init x\.pth are two models: name one"),
        (
            {"model": None, "init": "x.pth", "pretrained": True},
            r"x\.pth has its own weights: leave",
        ),
        ({"batch_size": 30, "accumulate": 4}, "must be a multiple of 8"),
        ({"overrides": {"global_pool": ""}}, "global_pool='' leaves the tokens unpooled"),
    ],
)
def test_what_cannot_be_trained_leaves_no_folder(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    with pytest.raises(HVTError, match=match):
        run(tmp_path / "run", **change)
    assert not (tmp_path / "run").exists()


def test_grey_images(tmp_path: Path) -> None:
    result = run(tmp_path / "run", epochs=1, overrides={"in_chans": 1})
    assert result.model.config.in_chans == 1
    assert len(result.model.pretrained_cfg["mean"]) == 1
    again = run(
        tmp_path / "again", init=str(result.folder / "model.safetensors"), model=None, epochs=1
    )
    assert again.model.config.in_chans == 1


# ── images that cannot be read ────────────────────────────────────────────────────────────────


def on_images(folder: Path, images: Path, **values: Any) -> Recipe:
    return tiny(folder, data=str(images), holdout=0.0, batch_size=8, epochs=2, repeats=1, **values)


def test_a_run_continues_with_changed_images_where_that_is_allowed(
    folder_of_images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train(on_images(tmp_path / "run", folder_of_images), console=quiet()).folder
    draw(folder_of_images / "train" / "dark" / "3.png", 200)  # other content, the same name
    command = ["train", "--resume", str(folder), "--epochs", "3"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "images changed since the run started" in error
    assert error.endswith("resume anyway with --allow-changed-data\n")
    assert main([*command, "--allow-changed-data"]) == 0
    assert "images changed since the run started" in capsys.readouterr().out


def test_unreadable_images_are_skipped_and_counted(folder_of_images: Path, tmp_path: Path) -> None:
    for image in ("train/dark/4.png", "val/dark/0.png"):
        (folder_of_images / image).write_bytes(b"no")
    console = quiet()
    recipe = on_images(tmp_path / "run", folder_of_images, skip_broken=True, accumulate=2)
    result = train(recipe, console=console)
    assert [row["broken"] for row in table(result.folder)] == ["1", "2"]  # once an epoch
    assert "1 unreadable validation images were skipped" in said(console)
    assert "2 broken images" in said(console)


# ── folders that cannot be written ──────────────────────────────────────────────────────────────


def test_a_run_is_not_overwritten(done: Result, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(done.folder, copy)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(
        HVTError,
        match=rf"already contains a run \(recipe.json\): resume it with hvt train --resume {copy}",
    ):
        run(copy)
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    shutil.rmtree(copy / "checkpoints")  # somebody wanted the space
    with pytest.raises(HVTError, match="already contains a run"):
        run(copy)
    (tmp_path / "config.json").write_text("of another model")
    with pytest.raises(HVTError, match=r"already contains a run \(config\.json\)"):
        run(tmp_path)


def test_a_second_run_gets_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tiny(tmp_path, epochs=1, batch_size=1000, **PLAIN).replace(output=None)
    folders = [train(recipe, name="first", console=quiet()).folder for _ in range(3)]
    assert [str(folder) for folder in folders] == [
        "runs/first-hvt_ti_2", "runs/first-hvt_ti_2-2", "runs/first-hvt_ti_2-3"
    ]  # fmt: skip
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # resumes the newest, which is done
    assert str(train(recipe, name="first", console=quiet()).folder) == str(folders[-1])


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    values = PLAIN | {"batch_size": 400}
    first = run(tmp_path / "first", epochs=1, **values)
    longer = resume(first.folder, console=quiet(), epochs=3)
    assert [row["epoch"] for row in longer.rows] == [1, 2, 3]
    assert longer.rows[0] == first.rows[0]
    assert json.loads((first.folder / "recipe.json").read_text())["epochs"] == 3
    assert [row["epoch"] for row in resume(first.folder, console=quiet()).rows] == [1, 2, 3]
    with pytest.raises(HVTError, match="has run 9 steps and cannot be resumed to 6: a run can"):
        resume(first.folder, console=quiet(), epochs=2)
    within = run(tmp_path / "within", epochs=1.5, **values)
    before = (within.folder / "recipe.json").read_bytes()
    with pytest.raises(HVTError, match="cannot be resumed to 9: a run can be extended, unless it"):
        resume(within.folder, console=quiet(), epochs=3)
    assert (within.folder / "recipe.json").read_bytes() == before


def test_a_batch_larger_than_the_data_is_lowered(tmp_path: Path) -> None:
    console = quiet()
    values = PLAIN | {"epochs": 1, "accumulate": 2, "batch_size": 2000}
    result = train(tiny(tmp_path / "run", **values), console=console)
    assert "batch_size=2000 is more than the 1293 training images: lowered to 1292" in said(console)
    assert json.loads((result.folder / "recipe.json").read_text())["batch_size"] == 1292


def test_the_bar_shows_no_accuracy_before_there_is_one(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    watcher = Watcher(console)
    watcher.begin(0, 2, 0, 10)
    watcher.step(1, 10, 2.5, 100.0)
    assert watcher.bar is not None
    assert watcher.bar.tasks[0].fields["figures"] == " loss 2.500 100 images/s"
    row = {"epoch": 1, "train_loss": 2.0, "val_top1": 12.34, "bad_steps": 0, "broken": 0}
    watcher.epoch(row, 2, 100.0, 5.0)
    watcher.step(1, 10, 1.5, 100.0)
    assert watcher.bar.tasks[0].fields["figures"] == " loss 1.500 top-1 12.34 % 100 images/s"
    watcher.close()


# ── from Python ─────────────────────────────────────────────────────────────────────────────────


def test_train_and_evaluate_are_functions(tmp_path: Path) -> None:
    values = {"output": str(tmp_path / "run"), "workers": 0, "batch_size": 718, "threads": 1}
    result = hvt.train("digits", quiet=True, epochs=1, depth=2, tensorboard=False, **values)
    assert result.model.config.depth == 2
    score = hvt.evaluate(result.folder / "model.safetensors", "digits", workers=0)
    assert score.top1 == result.top1
    assert score.class_names == tuple("0123456789")
    assert hvt.evaluate(result.model, "digits", workers=0).top1 == score.top1
    with pytest.raises(HVTError, match="epochs='2' must be a number"):
        hvt.train(resume=result.folder, epochs="2", quiet=True)
    longer = hvt.train(resume=result.folder, epochs=2, quiet=True)
    assert [row["epoch"] for row in longer.rows] == [1, 2]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: hvt.train(), "no recipe is given"),
        (lambda: hvt.train("digits", epoch=3), "unknown field 'epoch': did you mean epochs"),
        (lambda: hvt.train(resume="runs/x", lr=1.0), "only the run, and epochs"),
        (lambda: hvt.train(resume="nowhere"), "nowhere is not the folder of a run"),
        (lambda: hvt.train("digits", output=""), "output is empty: name one, or leave it out"),
        (lambda: hvt.train("digits", distill_tau=2.0), "distill_tau needs a teacher"),
        (lambda: hvt.evaluate("cifar100", ""), "must not be empty"),
        (lambda: hvt.evaluate("nowhere.pth", "digits"), "cannot read nowhere"),
    ],
)
def test_wrong_arguments_are_errors(call: Any, match: str) -> None:
    with pytest.raises(HVTError, match=match):
        call()


def test_a_finished_run_is_finished(done: Result, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(done.folder, copy)
    again = resume(copy, console=quiet(), workers=1, eval_every=3)  # not what is learned
    assert (again.top1, again.best, again.rows) == (done.top1, done.best, done.rows)
    assert_same_run(copy, done.folder)


def test_a_folder_below_a_file_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("I am in the way")
    code = main(["train", write_recipe(tiny(tmp_path / "file" / "run"), tmp_path / "tiny.toml")])
    assert code == 2
    error = capsys.readouterr().err.strip()
    assert error == f"hvt: cannot write {tmp_path / 'file' / 'run'}: Not a directory"


def test_a_full_disk_is_an_error_with_the_command_that_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", "700k") as disk:  # a state has 320 KB
        recipe = tiny(disk / "run", checkpoint_minutes=0.0, tensorboard=True)
        code = main(["train", write_recipe(recipe, tmp_path / "tiny.toml")])
        error = capsys.readouterr().err.strip()
        assert code == 2
        assert "\n" not in error
        assert error.startswith("hvt: cannot write ")
        assert error.endswith(f"resume with: hvt train --resume {disk / 'run'}")
        assert read_state(states(disk / "run" / "checkpoints")[-1])["progress"]["step"] > 0
        assert not list(disk.rglob(".*.part"))
        # With room again it resumes from there.
        shutil.copytree(disk / "run", tmp_path / "run")
    assert len(resume(tmp_path / "run", console=quiet()).rows) == 2
