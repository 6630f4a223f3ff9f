"""A search trains only what its budget holds, halves its trials, and outlives its processes."""

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Command
from rich.console import Console

import hvt
from hvt.cli.search import _train_command
from hvt.config import HVTConfig
from hvt.planning.budget import tolerance
from hvt.searching.halving import Score, frontier, goes_on, rung_epochs
from hvt.searching.report import importance, render, write_report
from hvt.searching.run import _identity, _recipe
from hvt.searching.study import (
    _join,
    _without_password,
    default_storage,
    differences,
    import_optuna,
    open_study,
    rows_of,
)
from hvt.searching.suggest import choices_of, place
from hvt.searching.worker import Worker, _has
from hvt.training.interrupt import Interrupted
from hvt.training.recipe import Recipe
from hvt.zoo import write_config

optuna = pytest.importorskip("optuna", reason="the search extra is not installed")

# One step of a few images: what is searched is as small as can be.
TINY: dict[str, Any] = {
    "epochs": 0.9, "workers": 0, "device": "cpu", "train_fraction": 0.1, "batch_size": 32,
    "img_size": 8, "depth": 2, "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _few_draws() -> Iterator[None]:
    """What is promising is chosen from fewer, which is as good for all but its quality."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hvt.searching.suggest.DRAWS", 50)
        yield


# What is suggested


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((12, 0, 0.5, 0.5), ()),
        ((12, 4, 0.0, 1.0), (0, 3, 6, 9)),
        ((12, 4, 0.0, 0.0), (0, 1, 2, 3)),
        ((12, 1, 1.0, 0.3), (6,)),
        ((2, 4, 1.0, 1.0), (0,)),
        ((3, 4, 1.0, 1.0), (0, 1)),
        ((1, 2, 0.0, 0.0), ()),
    ],
)
def test_where_to_pool(arguments: Any, expected: tuple[int, ...]) -> None:
    assert place(*arguments) == expected


@pytest.mark.parametrize("model", ["hvt_ti_4", "deit_ti"])
def test_every_suggestion_is_within_the_budget(model: str) -> None:
    base = hvt.get_config(model, img_size=32, patch_size=4, head_dim=12, num_classes=100)
    choices = choices_of(base, 0.008, {})
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    results = [choices.suggest(study.ask()) for _ in range(60)]
    configs = [config for config in results if config is not None]
    assert len(configs) > 40
    assert max(hvt.cost(config).gflops for config in configs) <= tolerance(0.008)
    assert sum(hvt.cost(config).gflops > 0.003 for config in configs) > 20
    for values in (
        {c.depth for c in configs}, {c.width for c in configs}, {c.pool_dims for c in configs},
        {c.image for c in configs}, {c.patch_size for c in configs},
        {len(c.pool_blocks) for c in configs}, {c.pool_stride for c in configs},
    ):  # fmt: skip
        assert len(values) > 1
    assert not any(config.class_token for config in configs)


def test_what_is_fixed_is_not_searched() -> None:
    base = hvt.get_config("hvt_ti_4", img_size=32, patch_size=4, head_dim=12)
    choices = choices_of(base, 0.01, {"stages": 2, "depth": 6, "img_size": 32, "patch_size": 4})
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(5):
        config = choices.suggest(study.ask())
        assert config is not None
        assert (config.depth, config.image, config.pool_blocks) == (6, (32, 32), (0, 3))


def test_a_recipe_with_a_small_mlp_has_the_widths_that_leave_it_any() -> None:
    values = {"num_heads": 10, "head_dim": 12, "mlp_ratio": 0.02}
    base = hvt.get_config("hvt_ti_4", img_size=32, patch_size=4, **values)
    assert choices_of(base, 0.01, {}).space.widths[0] == (5, 12)


def test_the_cheapest_config_is_pooled() -> None:
    base = hvt.get_config("hvt_ti_4", img_size=32, patch_size=4, head_dim=12)
    never, free = (choices_of(base, 1.0, fixed).cheapest() for fixed in ({"stages": 0}, {}))
    assert never is not None
    assert free is not None
    assert free < never
    for fixed in ({}, {"stages": 3}, {"pool_after": (0, 1)}):
        cheapest = choices_of(base, 1.0, fixed).cheapest()
        assert cheapest is not None
        choices = choices_of(base, 10 * cheapest, fixed)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        configs = [choices.suggest(study.ask()) for _ in range(20)]
        prices = [hvt.cost(config).gflops for config in configs if config is not None]
        assert min(prices) >= cheapest


def test_a_number_of_heads_keeps_their_width() -> None:
    base = hvt.get_config("hvt_ti_4", img_size=32, patch_size=4, head_dim=12)
    assert choices_of(base, 0.01, {"num_heads": 3}).space.widths == ((3, 12),)
    assert choices_of(base, 0.01, {"embed_dim": 96}).space.widths == ((3, 32),)


def test_what_is_not_searched_is_the_recipes() -> None:
    kept = {
        "drop_rate": 0.1, "attn_drop_rate": 0.2, "init_values": 0.1, "act_layer": "gelu_tanh",
        "proportional_attention": True, "reg_tokens": 1, "pool": "avg", "mlp_ratio": 2.0,
        "in_chans": 1,
    }  # fmt: skip
    base = hvt.get_config(
        "hvt_ti_4", img_size=32, patch_size=4, head_dim=12, class_token=True, **kept
    )
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    config = choices_of(base, 1.0, {"drop_rate": 0.3}).suggest(study.ask())
    assert config is not None
    expected = kept | {"drop_rate": 0.3, "class_token": False}  # which is the paper's HVT
    assert {name: getattr(config, name) for name in expected} == expected
    merged = hvt.get_config("deit_ti", merge=2)
    with pytest.raises(hvt.HVTError, match="cannot keep the recipe's merge: leave it out"):
        choices_of(merged, 1.0, {})


# Halving


def test_rungs_are_thirds() -> None:
    assert rung_epochs(9) == [1, 3, 9]
    assert rung_epochs(1.5)[-1] == 1.5
    assert rung_epochs(9, 1) == [9]
    with pytest.raises(hvt.HVTError, match="too short for 3 rungs, the first of which is 1/9"):
        rung_epochs(0.0001)
    with pytest.raises(hvt.HVTError, match="rungs=10 are too many: use 1 to 9"):
        rung_epochs(9, 10)


def test_a_third_goes_on_and_the_cheap_are_not_measured_by_the_dear() -> None:
    assert goes_on(Score(1.0, 10.0), [])
    assert not goes_on(Score(1.0, 10.0), [Score(1.0, 20.0)])
    assert goes_on(Score(1.0, 10.0), [Score(2.0, 20.0)])
    others = [Score(1.0, float(top1)) for top1 in range(8)]
    assert goes_on(Score(1.0, 5.5), others)  # the third of nine
    assert not goes_on(Score(1.0, 4.5), others)


def test_the_frontier() -> None:
    rows = [
        {"trial": n, "gflops": g, "top1": t, "finished": f}
        for n, (g, t, f) in enumerate(
            [(1, 10, True), (2, 9, True), (3, 12, True), (0.5, 99, False), (3, 11, True)]
        )
    ]
    assert [row["trial"] for row in frontier(rows)] == [0, 2]


# The study


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("search")
    return hvt.search("digits", 0.002, trials=3, output=folder, quiet=True, **TINY)


def test_a_search_leaves_its_results(found: Any) -> None:
    assert len(found.trials) == 3
    assert hvt.cost(found.best).gflops <= tolerance(0.002)
    assert hvt.get_config(str(found.folder / "best.json")) == found.best
    with (found.folder / "trials.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["trial"]) for row in rows] == [row["trial"] for row in found.trials]
    for row in rows:
        price = hvt.cost(HVTConfig.from_dict(json.loads(row["config"])))
        assert float(row["gflops"]) == pytest.approx(price.gflops)
        assert json.loads(row["rungs"])[-1] == [float(row["epochs"]), float(row["top1"])]
    reported = json.loads((found.folder / "trials.json").read_text())
    assert reported["frontier"] == [row["trial"] for row in found.frontier]
    page = (found.folder / "report.html").read_text()
    assert "data:image/png;base64" in page
    assert (found.folder / "report.png").read_bytes()[:4] == b"\x89PNG"
    assert not (found.folder / "trials").exists()  # no weights are left behind


def test_a_search_goes_on_and_ends(found: Any) -> None:
    again = hvt.search("digits", 0.002, trials=3, output=found.folder, quiet=True, **TINY)
    assert [row["trial"] for row in again.trials] == [row["trial"] for row in found.trials]
    with pytest.raises(hvt.HVTError, match=r"begun with other settings \(gflops was 0.002\)"):
        open_study("digits", default_storage(found.folder), {**_settings(found), "gflops": 0.003})


def test_results_are_not_written_over_by_another_study_of_the_same_name(
    found: Any, tmp_path: Path
) -> None:
    elsewhere = {"storage": f"sqlite:///{tmp_path}/other.db", "output": found.folder}
    with pytest.raises(hvt.HVTError, match=r"begun with other settings \(gflops was 0.002\)"):
        hvt.search("digits", 0.003, trials=1, quiet=True, **elsewhere, **TINY)
    assert not (tmp_path / "other.db").exists()


def test_a_study_knows_its_images_again(found: Any) -> None:
    settings = _settings(found)
    storage = default_storage(found.folder)
    earlier = {name: value for name, value in settings.items() if name != "images"}
    images = settings["images"] | {"list of training images": "another"}
    with pytest.raises(hvt.HVTError, match=r"other settings \(another list of training images\)"):
        open_study("digits", storage, settings | {"images": images})
    open_study("digits", storage, settings)
    assert differences(earlier, settings) == ""  # a study of an earlier version has none


def test_what_no_search_has_written_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text("mine")
    with pytest.raises(hvt.HVTError, match=r"has a best\.json of something else"):
        hvt.search("digits", 0.002, trials=1, output=tmp_path, quiet=True, **TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["best.json"]


def _settings(found: Any) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((found.folder / "trials.json").read_text())["settings"]
    return settings


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "50 %41 {why}?x=1#@"
    folder.mkdir()
    try:
        address = default_storage(folder)
    except hvt.HVTError:
        pytest.skip("SQLAlchemy before 2.1 does not quote, and such names are refused")
    open_study("s", address, {})
    assert [path.name for path in folder.iterdir()] == ["study.db"]
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_the_command_to_train_the_best_has_its_images() -> None:
    given = {"root": "MY DATA", "download": True, "batch_size": 8}
    command = _train_command("cifar100-cpu", given, Path("my runs"))
    expected = "hvt train cifar100-cpu --root 'MY DATA' --download --model 'my runs/best.json'"
    assert command == expected
    given = {"data": "X", "seed": 5, "val_fraction": 0.3, "skip_broken": True}
    assert _train_command("folder", given, Path("out")) == (
        "hvt train folder --data X --seed 5 --val-fraction 0.3 --skip-broken --model out/best.json"
    )


def test_a_config_files_path_is_a_model(trained: list[Recipe], tmp_path: Path) -> None:
    write_config(hvt.get_config("hvt_ti_0", img_size=8, patch_size=2), tmp_path / "plan.json")
    recipe, *_ = _recipe("digits", {"model": tmp_path / "plan.json"})
    assert recipe.overrides["num_heads"] == 3


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """The recipes of the trainings, none of which is done."""
    recipes: list[Recipe] = []

    def train(recipe: Recipe, console: Console) -> Any:
        recipes.append(recipe)
        return SimpleNamespace(top1=50.0, stop_asked=False)

    monkeypatch.setattr("hvt.searching.worker.engine.train", train)
    monkeypatch.setattr("hvt.searching.run.write_report", lambda *_: None)
    return recipes


@pytest.mark.parametrize(
    "fixed",
    [
        {"depth": 5}, {"stages": 3}, {"stages": 4}, {"embed_dim": 64}, {"patch_size": 4},
        {"pool_after": [0, 8]}, {"pool_kernel": (3, 3)},
    ],
)  # fmt: skip
def test_what_is_fixed_need_not_go_with_the_recipes_shape(
    fixed: dict[str, Any], trained: list[Recipe], tmp_path: Path
) -> None:
    found = hvt.search("digits", 0.01, trials=1, output=tmp_path, quiet=True, **fixed)
    (name, value), = fixed.items()  # fmt: skip
    stated = {"embed_dim": "width", "pool_after": "pool_blocks"}.get(name, name)
    if name == "pool_kernel":  # one number says the same of a square
        assert found.best.pool_kernel == 3
    else:
        assert getattr(found.best, stated) == (tuple(value) if name == "pool_after" else value)
    assert len(trained) == 3


def test_the_seed_is_that_of_the_trainings(trained: list[Recipe], tmp_path: Path) -> None:
    hvt.search("digits", 0.002, trials=2, seed=2**40, output=tmp_path, quiet=True, **TINY)
    assert {recipe.seed for recipe in trained} == {2**40}


def test_with_one_rung_every_trial_is_trained_to_the_end(
    trained: list[Recipe], tmp_path: Path
) -> None:
    words = {"output": tmp_path, "quiet": True} | TINY
    rows = hvt.search("digits", 0.002, trials=4, rungs=1, **words).trials
    assert [recipe.epochs for recipe in trained] == 4 * [TINY["epochs"]]
    assert all(row["finished"] and len(row["rungs"]) == 1 for row in rows)
    with pytest.raises(hvt.HVTError, match="rungs"):
        hvt.search("digits", 0.002, trials=5, **words)


# Configs that are given


def _small(**values: Any) -> HVTConfig:
    shape = {"img_size": 8, "patch_size": 2, "num_heads": 2, "head_dim": 16, "depth": 4}
    return hvt.get_config("hvt_ti_0", **shape | {"drop_path_rate": 0.0} | values)


def test_configs_that_are_given_come_first(trained: list[Recipe], tmp_path: Path) -> None:
    first = _small(pool_after=(0, 2), stages=None)
    second = _small(pool_dims=2, stages=1, pool_kernel=2, depth=5)
    write_config(first, tmp_path / "mine.json")
    words = {"output": tmp_path / "out", "quiet": True, "promising": 0} | TINY
    words |= {"head_dim": 16, "drop_path_rate": 0.0}
    del words["depth"]
    given = [tmp_path / "mine.json", second]
    rows = hvt.search("digits", 0.0005, trials=3, configs=given, **words).trials
    shapes = [(one.num_heads, one.depth, one.pool_blocks, one.tokens) for one in (first, second)]
    found = [HVTConfig.from_dict(row["config"]) for row in rows]
    assert [(f.num_heads, f.depth, f.pool_blocks, f.tokens) for f in found[:2]] == shapes
    # Another is taken in by a study that exists, and those that it has are not tried again.
    third = _small(depth=2)
    rows = hvt.search("digits", 0.0005, trials=4, configs=[*given, third], **words).trials
    assert len(rows) == 4
    assert rows[3]["config"]["depth"] == 2
    assert rows[3]["config"]["stages"] == 0


@pytest.mark.parametrize("depth", [2, 3, 6, 7, 12, 16])
def test_every_place_of_the_search_can_be_given(depth: int) -> None:
    grid = np.linspace(0, 1, 15)
    places = {place(depth, *one) for one in itertools.product(range(5), grid, grid)}
    for after in places:
        config = _small(img_size=32, depth=depth, pool_after=after, stages=None)
        choices = choices_of(config, hvt.cost(config).gflops, {})
        params = choices.params_of(config, "mine")
        assert place(depth, *(params[name] for name in ("stages", "first", "gap"))) == after


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"depth": 17}, "mine has depth=17, which is not in this search"),
        ({"img_size": 36}, "mine has img_size=36 with patch_size=2, which is not in this search"),
        ({"pool_kernel": 4, "stages": 2}, "mine has pooling in 1D by 4/2, which is not in"),
        (
            {"pool_after": (0, 1, 3), "depth": 6, "stages": None},
            "after blocks 0, 1, 3, which",
        ),
        ({"drop_rate": 0.5}, "mine has drop_rate=0.5, which this search would not suggest"),
        (
            {"head_dim": 8, "num_heads": 4},
            "mine has num_heads=4, head_dim=8, which this search would not suggest",
        ),
        ({"num_heads": 24, "depth": 16}, "mine takes .* GFLOPs, above 0.001"),
        (
            {"num_heads": 1, "depth": 2},
            "mine takes .* GFLOPs, and a trial of this search at least 50%",
        ),
    ],
)
def test_configs_that_cannot_be_suggested_are_refused(values: dict[str, Any], what: str) -> None:
    choices = choices_of(_small(), 0.001, {})
    with pytest.raises(hvt.HVTError, match=what):
        choices.params_of(_small(**values), "mine")


def test_the_command_refuses_a_config(command: Command, tmp_path: Path) -> None:
    write_config(_small(depth=5), tmp_path / "mine.json")
    words = ("search", "digits", "--gflops", 0.0004, "--img-size", 8, "--output", tmp_path / "out")
    code, _, said = command(*words, "--configs", tmp_path / "mine.json")
    assert code == 2
    assert "mine.json takes" in said
    assert not (tmp_path / "out").exists()


def test_one_config_is_no_list() -> None:
    with pytest.raises(hvt.HVTError, match="configs is to be a list"):
        hvt.search("digits", 0.002, configs="mine.json")  # type: ignore[arg-type]


def test_a_study_that_was_stopped_suggests_as_if_it_had_not_been(
    trained: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def params(folder: str, *trials: int) -> list[Any]:
        for count in trials:
            # one that is promising, then five at random, then Optuna's
            words = {"output": tmp_path / folder, "quiet": True, "promising": 1} | TINY
            rows = hvt.search("digits", 0.002, trials=count, **words).trials
        return [row["params"] for row in rows]

    whole = params("whole", 8)
    assert len({json.dumps(one, sort_keys=True) for one in whole}) == 8
    assert whole[0]["spent"] == 1.0
    assert params("parts", 1, 8) == whole
    done = len(trained)

    def interrupted(recipe: Recipe, console: Console) -> Any:
        trained.append(recipe)
        if len(trained) == done + 8:
            raise Interrupted("stopped")
        return SimpleNamespace(top1=50.0, stop_asked=False)

    monkeypatch.setattr("hvt.searching.worker.engine.train", interrupted)
    with pytest.raises(Interrupted):
        params("cut", 8)
    assert params("cut", 8) == whole


@pytest.mark.parametrize("trainings", [1, 3])
def test_a_stop_that_comes_after_a_training_is_not_forgotten(
    trainings: int, tmp_path: Path, trained: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two rungs the trial is queued again with what it has; after the last it counts."""

    def train(recipe: Recipe, console: Console) -> Any:
        trained.append(recipe)
        return SimpleNamespace(top1=50.0, stop_asked=len(trained) == trainings)

    monkeypatch.setattr("hvt.searching.worker.engine.train", train)
    words = {"trials": 2, "output": tmp_path, "quiet": True} | TINY
    with pytest.raises(Interrupted):
        hvt.search("digits", 0.002, **words)
    assert len(trained) == trainings
    rows = hvt.search("digits", 0.002, **words).trials
    assert rows[0]["again"] == (0 if trainings == 1 else None)
    assert rows[0]["rungs"][0] == [0.1, 50.0]


def test_a_stored_config_is_known_again() -> None:
    """JSON, which the storage has, makes lists of tuples."""
    config = hvt.get_config("hvt_ti_1", stages=None, pool_after=(0, 4), img_size=(32, 64))
    row = {"config": json.loads(json.dumps(config.to_dict()))}
    assert row["config"] != config.to_dict()
    assert _has(row, config)
    assert not _has(row, config.replace(pool_after=(0, 5)))


def test_a_config_is_trained_once(trained: list[Recipe], tmp_path: Path) -> None:
    fixed = {"num_heads": 1, "stages": 0, "patch_size": 2}
    words = {"trials": 3, "output": tmp_path, "quiet": True} | TINY | fixed
    rows = hvt.search("digits", 0.002, **words).trials
    assert len({json.dumps(row["config"]) for row in rows}) == 1
    assert [row["rungs"] for row in rows] == 3 * [rows[0]["rungs"]]
    assert len(trained) == len(rows[0]["rungs"])


def test_a_config_that_is_suggested_again_goes_on_only_if_it_is_worth_it(
    trained: list[Recipe], tmp_path: Path
) -> None:
    """It was stopped on the first rung, and nothing has been worse since."""
    base, fixed, _ = _recipe("digits", dict(TINY))
    rungs = rung_epochs(base.epochs)
    study = open_study("s", f"sqlite:///{tmp_path}/study.db", {})
    choices = choices_of(_small(), 0.002, fixed)
    worker = Worker(base, choices, study, tmp_path, 9, Console(quiet=True), rungs, promising=0)
    params = choices.promising(1, 0)[0] | {"spent": 1.0}
    better = params | {"spent": 0.5}

    def run(params: dict[str, Any], **attributes: Any) -> dict[str, Any]:
        study.enqueue_trial(params, user_attrs=attributes)
        study.optimize(worker.objective, n_trials=1)
        return rows_of(study)[-1]

    first = [rungs[0], 60.0]
    assert run(better, rungs=[first, [rungs[1], 60.0], [rungs[2], 60.0]])["finished"]
    assert not trained
    stopped = run(params)  # with the 50 % that all trainings give here
    assert stopped["config"] != rows_of(study)[0]["config"]
    assert stopped["rungs"] == [[rungs[0], 50.0]]
    for _ in range(3):  # more of the same do not make it better
        assert run(params)["rungs"] == stopped["rungs"]
    assert len(trained) == 1
    # A trial that is taken up was told to go on by the process that began it.
    assert len(run(params, rungs=[first], again=1)["rungs"]) == 2
    assert len(trained) == 2


def test_studies_do_not_share_a_folder(
    trained: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = hvt.search("digits", 0.002, trials=1, study="my/first", quiet=True, **TINY)
    assert mine.folder == Path("runs/search-my-first")
    names = {Path(str(recipe.output)).name.rpartition("-rung")[0] for recipe in trained}
    assert names == {"my-first-0000"}
    (mine.folder / "trials.json").write_text(json.dumps({"study": "my/first"}))
    with pytest.raises(hvt.HVTError, match="has the results of the study my/first: use another"):
        hvt.search("digits", 0.002, trials=1, output=mine.folder, quiet=True, **TINY)


def test_a_study_in_another_storage_is_another(
    trained: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvt.searching.run.write_report", write_report)
    words = {"trials": 1, "output": tmp_path / "out", "quiet": True} | TINY
    hvt.search("digits", 0.002, **words)
    report = (tmp_path / "out/trials.json").read_bytes()
    with pytest.raises(hvt.HVTError, match="its trial 0 is not in this storage"):
        hvt.search("digits", 0.002, storage=f"sqlite:///{tmp_path}/other.db", **words)
    assert (tmp_path / "out/trials.json").read_bytes() == report
    assert len(hvt.search("digits", 0.002, **words | {"trials": 2}).trials) == 2


def test_a_study_that_another_process_is_making(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [
        RuntimeError("table studies already exists"),
        RuntimeError("UNIQUE constraint failed: v"),
    ]

    def join(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return _join(*arguments)

    monkeypatch.setattr("hvt.searching.study.PAUSE", 0)
    monkeypatch.setattr("hvt.searching.study._join", join)
    assert open_study("s", f"sqlite:///{tmp_path}/study.db", {}).study_name == "s"
    assert not errors


def test_optuna_does_not_tell_of_an_interruption() -> None:
    assert import_optuna().logging.get_verbosity() == optuna.logging.ERROR


def test_the_trial_of_a_process_that_died_is_taken_up(tmp_path: Path) -> None:
    """Its finished rungs are not trained again."""

    base, fixed, _ = _recipe("digits", dict(TINY))
    settings = {"recipe": _identity(base), "gflops": 0.002, "fixed": fixed,
                "rungs": rung_epochs(base.epochs), "seed": 0}  # fmt: skip
    storage = f"sqlite:///{tmp_path}/study.db"
    study = open_study("s", storage, settings, heartbeat=1)
    config = hvt.get_config("hvt_ti_0", img_size=8, patch_size=2, head_dim=32, num_classes=10)
    trial = study.ask()  # a process that asked, trained one rung and was killed
    choices_of(config, 0.002, fixed).suggest(trial)
    trial.set_user_attr("rungs", [[rung_epochs(0.9)[0], 55.5]])
    study._storage.record_heartbeat(trial._trial_id)
    _age_heartbeats(tmp_path / "study.db")
    choices = choices_of(config, 0.002, fixed)
    Worker(base, choices, study, tmp_path, 1, Console(quiet=True), rung_epochs(0.9)).work()
    (row,) = rows_of(study)
    assert row["again"] == trial.number
    assert row["params"] == trial.params
    assert row["rungs"][0] == [rung_epochs(0.9)[0], 55.5]
    assert row["complete"]
    assert study.get_trials()[trial.number].state.name == "FAIL"


def _age_heartbeats(path: Path) -> None:
    import sqlite3

    with sqlite3.connect(path) as database:
        database.execute("UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00'")


@pytest.mark.slow
def test_two_processes_share_a_study_and_one_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "hvt", "search", "digits", "--gflops", "0.002", "--trials", "4"]
    words += ["--epochs", "3", "--workers", "0", "--device", "cpu", "--threads", "1"]
    words += ["--heartbeat", "2", "--output", str(tmp_path)]
    first, second = (
        subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    database = f"sqlite:///{tmp_path}/study.db"
    victim = None
    deadline = time.monotonic() + 300
    while victim is None and time.monotonic() < deadline:
        if (tmp_path / "study.db").exists():
            try:
                trials = optuna.load_study(study_name="digits", storage=database).trials
            except Exception:  # being created
                trials = []
            if sum(trial.state.name == "RUNNING" for trial in trials) == 2:
                victim = first
        time.sleep(0.2)
    assert victim is not None
    os.kill(victim.pid, signal.SIGKILL)
    first.communicate()
    _, err = second.communicate(timeout=600)
    assert second.returncode == 0, err
    trials = optuna.load_study(study_name="digits", storage=database).trials
    states = [trial.state.name for trial in trials]
    assert states.count("FAIL") == 1
    (lost,) = [trial for trial in trials if trial.state.name == "FAIL"]
    (again,) = [t for t in trials if t.user_attrs.get("again") == lost.number]
    assert again.params == lost.params
    assert again.state.name == "COMPLETE"
    assert "RUNNING" not in states
    assert "WAITING" not in states


# Refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("digits", "--gflops", "0"), "gflops=0.0 must be a number above 0"),
        (("digits", "--gflops", "nan"), "gflops=nan must be a number above 0"),
        (("digit", "--gflops", "1"), "unknown recipe 'digit'"),
        (("digits", "--gflops", "1e-9"), "gflops=1e-09 cannot be met: the least"),
        (("digits", "--gflops", "1", "--holdout", "0"), "holdout=0 leaves a search nothing to"),
        (
            ("digits", "--gflops", "1", "--epochs", "0.0001"),
            "epochs=0.0001 is too short for 3 rungs",
        ),
        (("digits", "--gflops", "1", "--seed", "-1"), "seed=-1 must be a whole number"),
        (("digits", "--gflops", "1", "--model", "deit_s_power"), "cannot keep the recipe's retent"),
        (("digits", "--gflops", "1", "--stages", "18"), "no config of the search has blocks and"),
        (("folder", "--gflops", "1", "--data", "nowhere"), "nowhere"),
    ],
)
def test_nonsense_is_refused(
    command: Command, words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    code, _, err = command("search", *words, "--output", tmp_path / "out", "--device", "cpu")
    assert code == 2
    assert message in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("digits",),
        ("digits", "--gflops", "1", "--trials", "0"),
        # What a search could only fail by, or pass over.
        *(
            ("digits", "--gflops", "1", flag, "2")
            for flag in (
                "--init", "--pretrained", "--teacher", "--distill", "--processes", "--eval-every",
                "--checkpoint-minutes", "--tensorboard",
            )
        ),
    ],
)  # fmt: skip
def test_flags_are_checked_first(command: Command, words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command("search", *words)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"init": "x.pth"}, "leave init out"),
        ({"teacher": "x.pth"}, "leave teacher out"),
        ({"pretrained": True}, "leave pretrained out"),
        ({"processes": 2}, "leave processes out"),
        ({"storage": Path("x.db")}, "must be text or nothing"),
        ({"study": 5}, "study=5 must be text or nothing"),
        ({"trials": 10**400}, "trials=… must be a whole number"),
    ],
)
def test_what_a_trial_cannot_have(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(hvt.HVTError, match=message):
        hvt.search("digits", 1, **values)
    if values.keys() & {
        "init",
        "teacher",
        "pretrained",
    }:  # in a file it is for hvt train, and trials have one each
        name, value = next(iter(values.items()))
        path = tmp_path / "mine.toml"
        path.write_text(f"data = 'digits'\n{name} = {json.dumps(value)}\n")
        with pytest.raises(hvt.HVTError, match=message):
            hvt.search(path, 1)


def test_a_storage_that_is_not_there_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(hvt.HVTError, match="the study cannot be opened in sqlite:///") as refused:
        open_study("s", f"sqlite:///{tmp_path}/none/study.db", {})
    assert len(str(refused.value).splitlines()) == 1
    assert _without_password("postgresql://me:secret@host/db") == "postgresql://host/db"


def test_without_optuna(monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, out, err = command("search", "digits", "--gflops", "1", "--output", tmp_path / "out")
    assert (code, out) == (2, "")
    assert err == "hvt: a search needs Optuna: pip install 'hvt[search]'\n"


def test_the_page_takes_names_for_names() -> None:
    page = render("<b>", [], [], {"<i>": 1.0}, b"")
    assert "<b>" not in page
    assert "<i>" not in page


def test_what_mattered_is_found() -> None:
    study = optuna.create_study(directions=["maximize", "minimize"])
    for n in range(12):
        values = {"stages": n % 3, "first": (n * 5 % 12) / 12}
        ranges = {
            "stages": optuna.distributions.IntDistribution(0, 4),
            "first": optuna.distributions.FloatDistribution(0.0, 1.0),
        }
        study.add_trial(
            optuna.trial.create_trial(
                params=values, distributions=ranges, values=[0.0, 1.0],
                user_attrs={"rungs": [[1, 10.0 * values["stages"]], [3, 50.0]]},
            )
        )  # fmt: skip
    mattered = importance(study)
    assert next(iter(mattered)) == "stages"
    assert sum(mattered.values()) == pytest.approx(1)


def test_too_few_trials_say_nothing_of_what_mattered() -> None:
    assert importance(optuna.create_study(directions=["maximize", "minimize"])) == {}
