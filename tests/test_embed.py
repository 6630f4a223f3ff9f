"""Embeddings are what the classifier sees; parts of many images are shared, skipped and whole."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Command
from PIL import Image
from shards import write_shards

import hvt
from hvt.data.evaluation import eval_transform
from hvt.deploy.parts import many_images, process_rank
from hvt.errors import HVTError

Build = Callable[..., hvt.HVT]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(7):
        pixels = draw.integers(0, 256, (70, 90, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


@pytest.fixture
def checkpoint(build: Build, tmp_path: Path) -> str:
    hvt.save(build("hvt_ti_2", depth=2), tmp_path / "model.safetensors")
    return str(tmp_path / "model.safetensors")


def test_features_are_those_before_the_classifier(checkpoint: str, images: Path) -> None:
    embedder = hvt.Embedder(checkpoint, "cpu", batch_size=3)
    model = hvt.load(checkpoint).eval()
    transform = eval_transform(model)
    paths = sorted(images.iterdir())
    with torch.inference_mode():
        batch = torch.stack([transform(Image.open(path)) for path in paths])
        want = model.forward_head(model.forward_features(batch), pre_logits=True).numpy()
    features = embedder(str(images))
    assert features.shape == (7, model.config.width)
    np.testing.assert_allclose(features, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(embedder(paths[2]), want[2], rtol=1e-4, atol=1e-5)


def test_a_digest_is_of_the_config_too(build: Build) -> None:
    one, other = (build("hvt_ti_2", depth=2, pool=pool) for pool in ("max", "avg"))
    other.load_state_dict(one.state_dict())
    assert hvt.Embedder(one).digest != hvt.Embedder(other).digest


def test_an_exported_model_embeds_alike(checkpoint: str, images: Path, command: Command) -> None:
    pytest.importorskip("onnxruntime")
    onnx = checkpoint.replace(".safetensors", ".onnx")
    assert command("export", checkpoint, onnx)[0] == 0
    ours, theirs = hvt.Embedder(checkpoint, "cpu"), hvt.Embedder(onnx, "cpu")
    np.testing.assert_allclose(theirs(str(images)), ours(str(images)), rtol=1e-3, atol=1e-4)


def test_a_broken_image_is_left_out_and_said(
    checkpoint: str, images: Path, tmp_path: Path, command: Command
) -> None:
    (images / "3.png").write_bytes(b"no image")
    code, _, err = command("embed", checkpoint, str(images), str(tmp_path / "out.npz"))
    assert code == 1
    assert "3.png: its content is not in an image format" in err
    with np.load(tmp_path / "out.npz") as file:
        assert [Path(name).stem for name in file["names"]] == list("012456")
        assert file["features"].shape[0] == 6
    with pytest.raises(HVTError, match=r"3\.png"):
        hvt.Embedder(checkpoint, "cpu")(str(images))


def test_formats(checkpoint: str, images: Path, tmp_path: Path, command: Command) -> None:
    for name in ("out.npz", "out.npy", "out.csv"):
        assert command("embed", checkpoint, str(images), str(tmp_path / name))[0] == 0
    want = np.load(tmp_path / "out.npz")["features"]
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), want)
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["source"]).name for row in rows] == [f"{n}.png" for n in range(7)]
    np.testing.assert_allclose([float(row["f5"]) for row in rows], want[:, 5])


def test_parts_are_shared_and_a_restart_skips_them(
    checkpoint: str, images: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("embed", checkpoint, str(images), str(tmp_path / "parts"), "--part-size", "2")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert command(*words)[0] == 0
    parts = tmp_path / "parts"
    first = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    assert [name[:10] for name in sorted(first)] == ["part-00001", "part-00003"]
    monkeypatch.delenv("SLURM_NTASKS")  # one process finishes what two began
    assert command(*words)[0] == 0
    names = [str(name) for p in sorted(parts.iterdir()) for name in np.load(p)["names"]]
    assert [Path(name).name for name in names] == [f"{n}.png" for n in range(7)]
    assert first.items() <= {p.name: p.stat().st_mtime_ns for p in parts.iterdir()}.items()
    (images / "0.png").rename(images / "00.png")
    code, _, err = command(*words)
    assert code == 2
    assert "belongs to another run (images, model or options differ): name another folder" in err


def test_tar_files_and_lists(tmp_path: Path, checkpoint: str, command: Command) -> None:
    write_shards(tmp_path, {"train": [3, 2]})
    shards = str(tmp_path / "train-*.tar")
    assert command("embed", checkpoint, shards, str(tmp_path / "out.npz"))[0] == 0
    with np.load(tmp_path / "out.npz") as file:
        assert str(file["names"][0]).endswith("train-0.tar/000.png")
        assert file["features"].shape[0] == 5
    listed = tmp_path / "files.txt"
    listed.write_text(f"{tmp_path / 'train-0.tar'}\n{tmp_path / 'train-1.tar'}\n")
    assert len(list(many_images([], str(listed)))) == 5
    listed.write_text(f"{tmp_path / 'none.png'}\n{tmp_path / 'train-1.tar'}\n")
    code, _, err = command("embed", checkpoint, "--list", listed, tmp_path / "rest.csv")
    assert (code, "none.png: there is no such file" in err) == (1, True)
    assert len((tmp_path / "rest.csv").read_text().splitlines()) == 1 + 2
    with pytest.raises(HVTError, match="the list"):
        list(many_images([], str(tmp_path / "none.txt")))
    broken = tmp_path / "bad.tar"
    content = bytearray((tmp_path / "train-0.tar").read_bytes())
    content[content.index(b"001.png")] ^= 1  # the checksum of this header is wrong now
    for damaged in (b"x" * 600, content):
        broken.write_bytes(damaged)
        with pytest.raises(HVTError, match="uncompressed tar"):
            list(many_images([str(broken)]))


def test_predictions_in_files(
    checkpoint: str, images: Path, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "predictions.csv"
    words = ("predict", checkpoint, str(images), "--top", "2")
    assert command(*words, "--output", str(out))[0] == 0
    code, printed, _ = command(*words, "--csv")
    assert code == 0
    assert out.read_text().splitlines() == printed.splitlines()
    assert command(*words, "--output", str(tmp_path / "parts"), "--format", "jsonl")[0] == 0
    (part,) = (tmp_path / "parts").iterdir()
    rows = [json.loads(line) for line in part.read_text().splitlines()]
    assert len(rows) == 14
    assert 0 < rows[1]["probability"] < rows[0]["probability"] < 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out.npz"], "name images and an output"),
        (["{images}", "out.xyz"], "neither a folder nor a file of npz, npy, csv, parquet"),
        (["{images}", "out", "--format", "jsonl"], "format='jsonl' is not one of npz"),
    ],
)
def test_bad_input(words: list[str], message: str, images: Path, command: Command) -> None:
    code, _, err = command("embed", *(word.format(images=images) for word in words))
    assert code == 2
    assert message in err


def test_one_file_is_not_for_several_processes(
    checkpoint: str, images: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert process_rank() == (0, 2)
    code, _, err = command("embed", checkpoint, str(images), "out.npz")
    assert code == 2
    assert "name a folder" in err
