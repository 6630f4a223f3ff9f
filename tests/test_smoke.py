"""The README's commands in small: what the workflow runs on Linux, macOS and Windows."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Command
from PIL import Image
from training import tiny

from hvt.data.augment import SeededDataset
from hvt.distributed import DistributedContext
from hvt.training.pipeline import build_model, open_batches


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "grey.png"
    Image.fromarray(np.full((32, 32, 3), 127, np.uint8)).save(path)
    return path


def test_train_and_predict(command: Command, tmp_path: Path, image: Path) -> None:
    run = tmp_path / "run"
    code, out, err = command(
        *("train", "digits", "--epochs", "0.1", "--depth", "2", "--output", run),
        *("--color-jitter", "0.1", "--workers", "1", "--no-tensorboard"),  # a reading process
    )
    assert (code, err) == (0, ""), out
    code, out, err = command("predict", run / "model.safetensors", image, "--json")
    assert (code, err) == (0, "")
    assert len(json.loads(out)) == 1


def test_what_is_sent_to_a_spawned_process(tmp_path: Path) -> None:
    """macOS and Windows start reading processes anew, and pickle what they read."""
    recipe = tiny(tmp_path, rand_augment="rand-m9-mstd0.5-inc1", erase=0.5)
    model, data, _ = build_model(recipe)
    train, _ = open_batches(recipe, model, data, DistributedContext(), torch.device("cpu"))
    images = SeededDataset(train.dataset, train.augment, skip_broken=False)
    sent = pickle.loads(pickle.dumps(images))
    for key in range(20):
        assert torch.equal(images[key, key][0], sent[key, key][0])


@pytest.mark.slow
def test_export(command: Command, tmp_path: Path, image: Path) -> None:
    pytest.importorskip("onnxruntime")
    assert command("export", tmp_path / "model.onnx")[0] == 0
    code, out, _ = command("predict", tmp_path / "model.onnx", image)
    assert (code, bool(out)) == (0, True)
