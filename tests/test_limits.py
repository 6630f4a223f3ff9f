"""What a recipe leaves to the clock, to its figures and to the number of images."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training import PLAIN, quiet, said, tiny, trainer_of

from hvt import HVTError
from hvt.data.arrays import ArrayImages
from hvt.data.sources import Data
from hvt.training.pipeline import class_weights, fit_to_data
from hvt.training.recipe import Recipe, load_recipe
from hvt.training.state import read_state, states


def test_minutes_end_a_run_with_the_last_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 6 s: ten in a minute, of which the evaluations take two."""
    seconds, console = [0.0], quiet()
    recipe = tiny(tmp_path, **PLAIN, epochs=100, minutes=1, eval_every=100)
    trainer = trainer_of(recipe, console)
    trainer.evaluation_seconds = lambda model: 12.0
    learn, rates = trainer.learner.step, []

    def step(*arguments: Any) -> Any:
        seconds[0] += 6.0
        result = learn(*arguments)
        rates.append(trainer.learner.optimizer.param_groups[-1]["lr"])
        return result

    monkeypatch.setattr(trainer.learner, "step", step)
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    result = trainer.run()
    assert len(rates) == 8
    assert rates[-1] < 0.1 * max(rates)
    assert "val_top1" in result.rows[-1]
    assert "5 steps per epoch, 500 left in at most 60 s on cpu" in said(console)
    first, last = [line for line in said(console).splitlines() if line.startswith("epoch ")]
    assert first.endswith("  30 s left")
    assert last.endswith("  0 s left")
    monkeypatch.undo()
    state = read_state(states(tmp_path / "checkpoints")[-1])
    assert len(trainer_of(recipe).run(state).rows) == len(result.rows)  # there is no time left


def test_no_epoch_begins_that_cannot_be_evaluated_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch of 20 s and its evaluation of 30 s leave ten of a minute."""
    seconds, trainer = [0.0], trainer_of(tiny(tmp_path, **PLAIN, epochs=9, minutes=1))

    def wait(each: float, what: Any) -> Any:
        return lambda *arguments: (seconds.append(seconds[-1] + each), what(*arguments))[1]

    trainer.evaluate = wait(30.0, trainer.evaluate)
    monkeypatch.setattr(trainer.learner, "step", wait(4.0, trainer.learner.step))
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[-1])
    assert len(trainer.run().rows) == 1


def test_patience_ends_a_run_that_does_not_get_better(tmp_path: Path) -> None:
    trainer = trainer_of(tiny(tmp_path, **PLAIN, epochs=9, patience=2))
    values = iter((2.0, 3.0, 3.0, 1.0))
    trainer.evaluate = lambda model: {"top1": next(values)}
    assert [row["val_top1"] for row in trainer.run().rows] == [2, 3, 3, 1]


def test_frozen_blocks_stay_as_they_are(tmp_path: Path) -> None:
    trainer = trainer_of(tiny(tmp_path, **PLAIN, freeze=1))
    before = {k: v.clone() for k, v in trainer.learner.model.state_dict().items()}
    after = trainer.run().model.state_dict()
    same = {name for name in after if torch.equal(before[name], after[name])}
    assert same == {n for n in after if n.startswith(("blocks.0.", "patch_embed.", "pos_embed"))}
    with pytest.raises(HVTError, match="freeze=99 is more than the"):
        trainer_of(tiny(tmp_path, **PLAIN, freeze=99))


@pytest.mark.parametrize(
    ("images", "batch", "warmup", "ema"), [(24, 16, 3, 0.75), (3200, 64, 3, 0.98)]
)
def test_what_a_recipe_leaves_to_the_number_of_images(
    images: int, batch: int, warmup: float, ema: float
) -> None:
    zeros = torch.zeros(images, dtype=torch.int64)
    part = ArrayImages(zeros[:, None, None, None].byte(), zeros)
    data = Data(name="x", val=part, class_names=("a",), train=part, held_out=False)
    fitted = fit_to_data(load_recipe("finetune"), data, 1)
    assert (fitted.batch_size, fitted.warmup_epochs, fitted.eval_every) == (batch, warmup, 8)
    assert fitted.ema == pytest.approx(ema)
    short = fit_to_data(load_recipe("finetune").replace(epochs=3, batch_size=8), data, 1)
    assert (short.batch_size, short.warmup_epochs, short.ema) == (8, 3, 0.98)


def test_balance_weights_the_loss_by_class() -> None:
    labels = torch.tensor([0, 0, 0, 1])
    part = ArrayImages(torch.zeros(4, 2, 2, 3, dtype=torch.uint8), labels)
    data = Data(name="x", val=part, class_names=("a", "b"), train=part, held_out=False)
    weights = class_weights(Recipe(balance=True), data)
    assert weights is not None
    assert weights[labels].sum() == pytest.approx(4)
    assert weights[1] == pytest.approx(3 * weights[0])
