"""Elastic models: settings that share weights, files, the sandwich rule, upcycling."""

# ruff: noqa: F811 - a fixture that is imported

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import training
from test_serve import client, encoded_image
from test_upcycle import SMALL, place, quiet, small  # noqa: F401 - a fixture

import hvt
from hvt.cli import main
from hvt.costs import cost
from hvt.deploy.elastic import milliseconds
from hvt.deploy.runtime import OnnxModel
from hvt.elastic import at, configs_of, label, make_elastic, plain
from hvt.model import HVT
from hvt.serve import settings as serve
from hvt.serve.app import create_app
from hvt.serve.engine import Controller, Engine
from hvt.training.interrupt import Interrupted
from hvt.training.learner import Learner
from hvt.training.sandwich import Sandwich, chosen_settings
from hvt.upcycling.run import resume, upcycle

POOLED = SMALL.replace(pool_after=(1,), pool_dims=2, pool="avg", pool_kernel=2)


def elastic(own: tuple[str, ...] = ("norm.*",), **fields: Any) -> HVT:
    """A model of 64 pixels with a pooled setting and one of 32 pixels."""
    model = make_elastic(small(**fields), [SMALL.replace(img_size=32), POOLED], own)
    assert model.settings is not None
    for parameter in model.settings.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def logits(model: HVT) -> torch.Tensor:
    images = torch.rand(2, 3, *model.config.image, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(images)


@contextlib.contextmanager
def stopping_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A training is asked to stop at so many steps."""
    steps, original = [0], Learner.step

    def step(self: Any, *arguments: Any) -> Any:
        steps[0] += 1
        if steps[0] == number:
            signal.raise_signal(signal.SIGTERM)
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", step)
        yield


# ── settings ────────────────────────────────────────────────────────────────────────────────────


def test_a_setting_is_a_plain_model_that_shares_the_weights() -> None:
    model = elastic()
    assert [config.image[0] for config in configs_of(model)] == [64, 64, 32]
    for index, config in enumerate(configs_of(model)):
        setting = model.at(label(config))
        assert setting.config == config
        assert setting.settings is None
        assert setting.blocks[0].attn.qkv.weight is model.blocks[0].attn.qkv.weight
        assert (setting.norm.weight is model.norm.weight) == (index == 0)
    assert model.at(100).config == model.config
    with torch.no_grad():
        model.head.bias += 1
    assert model.at("100G").head.bias is model.head.bias


def test_settings_begin_as_the_source() -> None:
    model = make_elastic(small(), [SMALL.replace(img_size=32)])
    resized = small()
    resized.set_input_size(32)
    torch.testing.assert_close(logits(plain(model, 1)), logits(resized))


def test_training_a_setting_changes_only_what_it_has() -> None:
    model = elastic()
    setting = plain(model, 2)
    setting(torch.rand(2, 3, 32, 32)).sum().backward()
    assert model.settings is not None
    assert model.pos_embed.grad is None
    assert model.blocks[0].attn.qkv.weight.grad is not None
    own = dict(model.settings.named_parameters())
    assert own["1.pos_embed"].grad is not None
    assert own["0.pos_embed"].grad is None


@pytest.mark.parametrize(
    ("configs", "match"),
    [
        ([SMALL.replace(img_size=72)], "not in order"),
        ([SMALL], "cost the same"),
        ([SMALL.replace(img_size=32, depth=3)], "the same depth, not 4 and 3"),
    ],
)
def test_settings_that_do_not_belong_together(configs: list[Any], match: str) -> None:
    with pytest.raises(hvt.HVTError, match=match):
        make_elastic(small(), configs)


def test_budgets_that_no_setting_meets() -> None:
    with pytest.raises(hvt.HVTError, match="no setting costs 1e-09 GFLOPs or less, only"):
        at(elastic(), 1e-9)
    with pytest.raises(hvt.HVTError, match="'cheap' is not a budget"):
        at(elastic(), "cheap")


def test_a_new_classifier_is_that_of_all_settings(tmp_path: Path) -> None:
    model, path = elastic(("norm.*", "*bias")), tmp_path / "m.safetensors"
    model.reset_classifier(3)
    hvt.save(model, path)
    assert logits(plain(hvt.load(path), 2)).shape == (2, 3)
    model.set_input_size(32)  # no larger than the smallest setting, so no longer the largest
    with pytest.raises(hvt.HVTError, match=r"two settings cost the same|not in order"):
        hvt.save(model, path)


# ── files ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("own", [(), ("norm.*",), ("blocks.*.norm?.*",)])
def test_a_file_holds_all_settings(own: tuple[str, ...], tmp_path: Path) -> None:
    model, path = elastic(own), tmp_path / "elastic.safetensors"
    hvt.save(model, path, class_names=list("abcdef"))
    loaded = hvt.load(path)
    assert configs_of(loaded) == configs_of(model)
    for index, config in enumerate(configs_of(model)):
        wanted = logits(plain(model, index))
        assert torch.equal(logits(plain(loaded, index)), wanted)
        alone = hvt.load(path, gflops=float(label(config)[:-1]))
        assert alone.settings is None
        assert alone.class_names == tuple("abcdef")
        assert torch.equal(logits(alone), wanted)
    hvt.save(loaded, tmp_path / "again.safetensors")
    assert path.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def test_overrides_are_of_one_setting(tmp_path: Path) -> None:
    hvt.save(elastic(), tmp_path / "elastic.safetensors")
    model = hvt.load(tmp_path / "elastic.safetensors", gflops=100, img_size=48, num_classes=2)
    assert model.config.image == (48, 48)
    assert model.settings is None


def test_a_plain_file_has_no_budgets(tmp_path: Path) -> None:
    hvt.save(small(), tmp_path / "plain.safetensors")
    with pytest.raises(hvt.CheckpointError, match="is not elastic"):
        hvt.load(tmp_path / "plain.safetensors", gflops=0.7)


# ── the sandwich ────────────────────────────────────────────────────────────────────────────────


def test_the_largest_and_the_smallest_always_have_their_turn() -> None:
    turns = [chosen_settings(4, 0, update) for update in range(50)]
    assert {(first, last) for first, _, last in turns} == {(0, 3)}
    assert {middle for _, middle, _ in turns} == {1, 2}
    assert turns == [chosen_settings(4, 0, update) for update in range(50)]
    assert chosen_settings(2, 0, 0) == [0, 1]


def test_every_parameter_has_a_gradient_each_step() -> None:
    model = elastic()
    sandwich = Sandwich(model)
    views = [torch.rand(2, 3, 64, 64), torch.rand(2, 3, 32, 32)]
    outputs = sandwich(views, [0, 2])
    sum(one.sum() for one in outputs).backward()
    assert all(parameter.grad is not None for parameter in sandwich.parameters())
    assert len(list(sandwich.parameters())) == len(list(model.parameters()))


def test_training_gives_an_elastic_model_and_resumes_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, Any] = {"elastic": (0, 1, 2), "overrides": {"pool_kernel": 2}}
    result = training.run(tmp_path / "whole", **values)
    model = hvt.load(tmp_path / "whole" / "model.safetensors")
    assert [len(config.pool_blocks) for config in configs_of(model)] == [0, 1, 2]
    each = [result.metrics[f"top1_{label(config)}"] for config in configs_of(model)]
    assert result.top1 == pytest.approx(sum(each) / 3)

    with stopping_at(7, monkeypatch), pytest.raises(Interrupted):
        training.run(tmp_path / "resumed", **values)
    hvt.train(resume=tmp_path / "resumed", quiet=True)
    training.assert_same_run(tmp_path / "whole", tmp_path / "resumed")


def test_one_number_of_stages_is_not_elastic(tmp_path: Path) -> None:
    with pytest.raises(hvt.HVTError, match="needs two numbers of stages"):
        training.tiny(tmp_path, elastic=(2,))


# ── upcycling ───────────────────────────────────────────────────────────────────────────────────

BUDGETS = tuple(float(label(SMALL.replace(img_size=size))[:-1]) for size in (64, 48, 40, 32))
QUICK: dict[str, Any] = {
    "elastic": BUDGETS, "pool_after": (), "epochs": 2.0, "batch_size": 8, "workers": 0,
    "device": "cpu", "threads": 1,
}  # fmt: skip


def run(place: Path, folder: Path, **values: Any) -> Any:
    return upcycle(
        place / "vit.safetensors", folder / "out.safetensors", place / "photos",
        run_folder=folder / "run", console=quiet(), **QUICK | values,
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(place, tmp_path_factory.mktemp("elastic"))


def test_upcycling_gives_one_file_for_all_budgets(done: Any) -> None:
    model = hvt.load(done.path)
    assert [config.image[0] for config in configs_of(model)] == [64, 48, 40, 32]
    labels = [label(config) for config in configs_of(model)]
    names = [f"{name} {cost}" for name in ("untrained", "distilled") for cost in labels]
    assert [row.name for row in done.rows] == ["source", *names]
    assert (done.folder / "distilled" / "metrics.csv").read_text().count("\n") == 3
    report = json.loads((done.folder / "report.json").read_text())
    assert report["best"] in ("untrained", "distilled")
    costs = [row["gflops"] for row in report["rows"][1:]]
    assert costs == sorted(costs[:4], reverse=True) * 2


def test_a_stopped_elastic_run_ends_as_if_it_had_not(
    place: Path,
    done: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stopping_at(3, monkeypatch), pytest.raises(Interrupted):
        run(place, tmp_path)
    resumed = resume(tmp_path / "run", quiet())
    for name, tensor in done.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_a_frozen_run_leaves_the_largest_as_the_source(place: Path, tmp_path: Path) -> None:
    result = run(
        place, tmp_path, freeze=True, every_setting=True, own_lr=1e-2, layer_decay=None, epochs=1.0
    )
    source = hvt.load(place / "vit.safetensors").state_dict()
    assert all(torch.equal(source[k], v) for k, v in plain(result.model, 0).state_dict().items())
    assert [row.kl for row in result.rows[:2]] == [0.0, pytest.approx(0, abs=1e-6)]
    before = make_elastic(small(), configs_of(result.model)[1:]).state_dict()
    after = hvt.load(result.folder / "distilled" / "model.safetensors").state_dict()
    assert not torch.equal(before["settings.0.pos_embed"], after["settings.0.pos_embed"])


def test_a_budget_may_be_met_by_pooling(place: Path, tmp_path: Path) -> None:
    cheap = float(label(SMALL.replace(img_size=40))[:-1])
    result = run(
        place, tmp_path, elastic=(BUDGETS[0], cheap), pool_after=None, pool="any", epochs=0.0,
        rank_photos=4,
    )  # fmt: skip
    first, second = configs_of(result.model)
    assert not first.pool_blocks
    assert second.pool_blocks


def test_errors_of_an_elastic_upcycling(place: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["upcycle", str(place / "vit.safetensors"), str(tmp_path / "o.safetensors")]
    words += ["--data", str(place / "photos"), "--run-folder", str(tmp_path / "run")]
    for flags, match in (
        (["--elastic", "0.7"], "needs at least two budgets"),
        (["--elastic", "0.4,0.7", "--mixup", "0.5"], "trained without mixup"),
        (["--elastic", "1,2", "--gflops", "1"], "leave gflops out"),
        (["--elastic", "1,0.0000001"], "no placement costs 1e-07"),
    ):
        assert main([*words, *flags]) == 2
        assert match in capsys.readouterr().err


# ── use ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "elastic.safetensors"
    hvt.save(elastic(), path, class_names=list("abcdef"))
    return path


def names(path: Path) -> list[str]:
    return [label(config) for config in configs_of(hvt.load(path))]


def labelled(folder: Path) -> Path:
    for name in "abcdef":
        (folder / name).mkdir(parents=True)
        for number in range(2):
            (folder / name / f"{number}.png").write_bytes(encoded_image(ord(name) + number))
    return folder


def test_eval_measures_all_settings(file: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["eval", str(file), "--data", str(labelled(tmp_path / "data")), "--workers", "0"]
    plot = tmp_path / "curve.svg"
    assert main([*words, "--settings", "all", "--json", "--plot", str(plot)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["setting"] for row in rows] == names(file)
    for row in rows:
        alone = hvt.evaluate(file, words[3], workers=0, gflops=float(row["setting"][:-1]))
        assert row["top1"] == alone.top1
    assert plot.exists()
    assert main([*words, "--settings", "all"]) == 0
    assert main([*words, "--plot", str(plot)]) == 2
    assert "--plot needs --settings all" in capsys.readouterr().err


def test_an_export_is_one_setting(file: Path, tmp_path: Path) -> None:
    cheapest = names(file)[-1]
    assert main(["export", str(file), str(tmp_path / "m.onnx"), "--gflops", cheapest[:-1]]) == 0
    exported = OnnxModel(tmp_path / "m.onnx")
    images = torch.rand(2, 3, *exported.config.image)
    with torch.no_grad():
        wanted = hvt.load(file).at(cheapest)(images)
    torch.testing.assert_close(exported(images), wanted, atol=1e-4, rtol=1e-4)


def test_predict_takes_the_largest_setting_in_time(
    file: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(encoded_image())
    costs = {label(config): cost(config).macs / 1e5 for config in configs_of(hvt.load(file))}
    times = "hvt.deploy.elastic.milliseconds"
    monkeypatch.setattr(times, lambda model: costs[label(model.config)])
    middle = names(file)[1]
    assert main(["predict", str(file), str(image), "--ms", str(costs[middle]), "--json"]) == 0
    said = capsys.readouterr()
    assert f"setting {middle}" in said.err
    wanted = hvt.Predictor(file, gflops=float(middle[:-1]))(image)
    assert json.loads(said.out)[0]["probability"] == pytest.approx(wanted.probability)
    assert main(["predict", str(file), str(image), "--ms", "0.0001"]) == 2
    assert f"no setting takes 0.0001 ms or less: the smallest, {names(file)[-1]}" in (
        capsys.readouterr().err
    )


def test_the_time_of_a_setting_is_measured() -> None:
    assert milliseconds(plain(elastic(), 2)) > 0


def test_a_plain_checkpoint_has_no_settings_to_choose_from(
    place: Path, tmp_path: Path, capsys: Any
) -> None:
    path = str(place / "vit.safetensors")
    assert main(["eval", path, "--data", str(place / "photos"), "--settings", "all"]) == 2
    assert "is not elastic" in capsys.readouterr().err


def test_timm_reads_the_largest_setting(tmp_path: Path) -> None:
    model = elastic()
    model.save_pretrained(tmp_path / "folder")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True)
    assert torch.equal(logits(theirs), logits(model))


# ── serve ───────────────────────────────────────────────────────────────────────────────────────


def test_a_longer_queue_is_answered_by_a_cheaper_setting_and_back_after_a_while() -> None:
    control = Controller(count=4, high=8, hold=1.0)
    assert [control.choose(n, 0.0) for n in (0, 7, 8, 15, 16, 100)] == [0, 0, 1, 1, 2, 3]
    assert control.choose(13, 5.0) == 3  # not below half of 24
    assert control.choose(2, 5.5) == 3  # not long enough
    assert [control.choose(2, 6.0 + n) for n in range(4)] == [2, 1, 0, 0]
    assert control.choose(8, 10.0) == 1
    # A long pause is many short ones, but no more than the queue allows.
    assert [control.choose(100, 11.0), control.choose(0, 99.0)] == [3, 0]
    assert [control.choose(100, 100.0), control.choose(6, 999.0)] == [3, 1]


@pytest.fixture(scope="module")
def engine(file: Path) -> Engine:
    settings = serve.Settings(elastic=True, concurrent_batches=1, max_wait_ms=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hvt.deploy.runtime.LEAST_SHARED", 256)  # bytes, for so small a model
        return Engine(file, settings)


def test_settings_share_their_weights_in_memory(engine: Engine, file: Path) -> None:
    (shared,) = {
        id(each.session._shared): each.session._shared for each in engine.variants
    }.values()
    parameters = [4 * parameter.numel() for parameter in hvt.load(file).parameters()]
    assert sum(value.numpy().nbytes for value in shared.values()) <= sum(parameters)
    assert len(shared) > 4


def test_answers_and_metrics_say_which_setting(engine: Engine, file: Path) -> None:
    app, image = create_app(engine), encoded_image()

    async def ask() -> Any:
        async with client(app) as to:
            answers = []
            for waiting in (0, 8, 100):
                engine.waiting = lambda waiting=waiting: waiting
                answers.append((await to.post("/predict?top=3", content=image)).json())
            explained = (await to.post("/explain", content=image)).json()
            return answers, explained, (await to.get("/metrics")).text

    answers, explained, metrics = asyncio.run(ask())
    for answer, name in zip(answers, names(file), strict=True):
        (prediction,) = answer["predictions"]
        assert prediction["setting"] == name
        wanted = hvt.Predictor(file, gflops=float(name[:-1]))(image)
        assert prediction["name"] == wanted.name
        assert prediction["probability"] == pytest.approx(wanted.probability, abs=1e-5)
        assert f'hvt_setting_images_total{{setting="{name}"}} 1.0' in metrics
    assert explained["stages"]


def test_services_that_cannot_be_elastic(place: Path, file: Path) -> None:
    with pytest.raises(hvt.HVTError, match="is not elastic: leave --elastic out"):
        Engine(place / "vit.safetensors", serve.Settings(elastic=True))
    with pytest.raises(hvt.HVTError, match="no setting costs from 5 to 1e"):
        Engine(file, serve.Settings(elastic=True, min_gflops=5))
