"""A search trains only what its budget allows, halves its trials, and survives its processes."""

import csv
import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Command
from PIL import Image
from rich.console import Console

import hvt
from hvt.config import HVTConfig
from hvt.planning.budget import tolerance
from hvt.searching.halving import frontier, is_promoted, rung_epochs
from hvt.searching.run import _recipe
from hvt.searching.study import default_storage, differences, open_study, rows_of
from hvt.searching.suggest import place, search_space
from hvt.searching.worker import Worker
from hvt.training.interrupt import Interrupted
from hvt.training.recipe import Recipe
from hvt.zoo import write_config

optuna = pytest.importorskip("optuna", reason="the search extra is not installed")
sqlalchemy = pytest.importorskip("sqlalchemy")

# One step of a few images: the search is as small as it can be.
TINY: dict[str, Any] = {
    "epochs": 0.9, "workers": 0, "device": "cpu", "train_fraction": 0.1, "batch_size": 32,
    "img_size": 8, "depth": 2, "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _fast() -> Iterator[None]:
    """Promising trials are drawn from fewer, and databases do not wait for the disk."""

    def in_memory(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", in_memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hvt.searching.suggest.DRAWS", 50)
        yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "connect", in_memory)


def base(**values: Any) -> HVTConfig:
    """The model of a recipe."""
    return hvt.get_config("hvt_ti_4", img_size=32, patch_size=4, head_dim=12, **values)


def suggested(config: HVTConfig, gflops: float, count: int, **fixed: Any) -> list[HVTConfig]:
    space = search_space(config, gflops, fixed)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    configs = [space.suggest(study.ask()) for _ in range(count)]
    return [config for config in configs if config is not None]


# Suggestions


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((12, 0, 0.5, 0.5), ()),
        ((12, 4, 0.0, 1.0), (0, 3, 6, 9)),
        ((12, 4, 0.0, 0.0), (0, 1, 2, 3)),
        ((12, 1, 1.0, 0.3), (6,)),
        ((3, 4, 1.0, 1.0), (0, 1)),
    ],
)
def test_where_to_pool(arguments: Any, expected: tuple[int, ...]) -> None:
    assert place(*arguments) == expected


@pytest.mark.parametrize("token", [False, True])
def test_every_suggestion_is_within_the_budget(token: bool) -> None:
    configs = suggested(base(class_token=token, num_classes=100), 0.008, 60)
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


def test_fixed_fields_are_not_searched() -> None:
    fixed = {"stages": 2, "depth": 6, "img_size": 32, "patch_size": 4}
    for config in suggested(base(), 0.01, 5, **fixed):
        assert (config.depth, config.image, config.pool_blocks) == (6, (32, 32), (0, 3))
    assert search_space(base(), 0.01, {"num_heads": 3}).space.widths == ((3, 12),)
    assert search_space(base(), 0.01, {"embed_dim": 96}).space.widths == ((3, 32),)


def test_fields_that_are_not_searched_are_the_recipes() -> None:
    kept = {
        "drop_rate": 0.1, "attn_drop_rate": 0.2, "init_values": 0.1, "act_layer": "gelu_tanh",
        "proportional_attention": True, "reg_tokens": 1, "pool": "avg", "mlp_ratio": 2.0,
        "in_chans": 1,
    }  # fmt: skip
    (config,) = suggested(base(class_token=True, **kept), 1.0, 1, drop_rate=0.3)
    expected = kept | {"drop_rate": 0.3, "class_token": False}  # as in the paper's HVT
    assert {name: getattr(config, name) for name in expected} == expected
    with pytest.raises(hvt.HVTError, match="cannot keep the recipe's merge: omit it"):
        search_space(hvt.get_config("deit_ti", merge=2), 1.0, {})


@pytest.mark.parametrize("fixed", [{}, {"pool_after": (0, 1)}])
def test_the_minimum_budget_is_that_of_the_cheapest_config(fixed: dict[str, Any]) -> None:
    with pytest.raises(hvt.HVTError, match="the closest config of the search takes") as error:
        search_space(base(), 1e-9, fixed).check_budget()
    cheapest = float(str(error.value).split()[-2])
    search_space(base(), cheapest, fixed).check_budget()
    prices = [hvt.cost(config).gflops for config in suggested(base(), 5 * cheapest, 20, **fixed)]
    assert min(prices) >= 0.99 * cheapest  # which is rounded up


# Halving


def test_rungs_are_thirds() -> None:
    assert rung_epochs(9) == [1, 3, 9]
    assert rung_epochs(1.5)[-1] == 1.5
    assert rung_epochs(9, 1) == [9]
    with pytest.raises(hvt.HVTError, match="too short for 3 rungs, the first of which is 1/9"):
        rung_epochs(0.0001)


def test_a_third_is_promoted_among_trials_that_cost_no_more() -> None:
    def row(gflops: float, *top1: float) -> dict[str, Any]:
        return {"gflops": gflops, "rungs": [[1, one] for one in top1]}

    assert is_promoted(1.0, 10.0, 0, [])
    assert not is_promoted(1.0, 10.0, 0, [row(1.0, 20.0)])
    assert is_promoted(1.0, 10.0, 0, [row(2.0, 20.0)])
    assert is_promoted(1.0, 10.0, 1, [row(1.0, 20.0)])  # which was not trained on this rung
    others = [row(1.0, 99.0, top1) for top1 in range(8)]
    assert is_promoted(1.0, 5.5, 1, others)  # the third of nine
    assert not is_promoted(1.0, 4.5, 1, others)


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
    return hvt.search("digits", 0.002, trials=4, output=folder, quiet=True, **TINY)


def settings_of(found: Any) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((found.folder / "trials.json").read_text())["settings"]
    return settings


def test_a_search_writes_its_results(found: Any) -> None:
    assert len(found.trials) == 4
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
    for figure in ("frontier.png", "importances.png"):
        assert (found.folder / figure).read_bytes()[:4] == b"\x89PNG"
    assert not list(found.folder.rglob("*.safetensors"))  # no weights are left


def test_a_finished_search_trains_nothing_more(found: Any) -> None:
    again = hvt.search("digits", 0.002, trials=4, output=found.folder, quiet=True, **TINY)
    assert [row["trial"] for row in again.trials] == [row["trial"] for row in found.trials]


def test_other_settings_are_named_with_their_values(found: Any) -> None:
    storage, settings = default_storage(found.folder), settings_of(found)
    open_study("digits", storage, settings)
    (text,) = differences({"classes": [str(n) for n in range(1000)]}, {"classes": []})
    assert len(text) < 100
    recipe = settings["recipe"] | {"batch_size": 64}
    with pytest.raises(hvt.HVTError) as refused:
        open_study("digits", storage, settings | {"recipe": recipe, "gflops": 0.003})
    assert str(refused.value) == (
        "the study digits was started with other settings (gflops was 0.002, now 0.003, "
        "recipe: batch_size was 32, now 64): use the same, or another --study"
    )


@pytest.mark.parametrize("other", ["study", "storage"])
def test_results_of_another_study_are_not_replaced(found: Any, tmp_path: Path, other: str) -> None:
    words = {other: "mine" if other == "study" else f"sqlite:///{tmp_path}/other.db"}
    with pytest.raises(hvt.HVTError, match="contains another study: use another"):
        hvt.search("digits", 0.002, 1, output=found.folder, quiet=True, **TINY, **words)


def test_a_folder_whose_name_means_something_else_in_a_url(tmp_path: Path) -> None:
    with pytest.raises(hvt.HVTError, match="cannot hold a database because of its name"):
        default_storage(tmp_path / "50 %41?")
    open_study("s", default_storage(tmp_path), {})
    assert [path.name for path in tmp_path.iterdir()] == ["study.db"]


# Trials, without training them


class Trainings(list[Recipe]):
    """Stands in for `engine.train`: the recipes of the trainings, none of which is run."""

    interrupt_at = stop_at = 0

    def __call__(self, recipe: Recipe, console: Console) -> Any:
        self.append(recipe)
        if len(self) == self.interrupt_at:
            raise Interrupted("stopped")
        return SimpleNamespace(top1=50.0, stop_asked=len(self) == self.stop_at)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trainings:
    trainings = Trainings()
    monkeypatch.setattr("hvt.searching.worker.engine.train", trainings)
    monkeypatch.setattr("hvt.searching.run.write_report", lambda *_: None)
    return trainings


def run(folder: Path | None, trials: int = 1, gflops: float = 0.002, **values: Any) -> Any:
    return hvt.search("digits", gflops, trials, output=folder, quiet=True, **TINY | values)


@pytest.mark.parametrize(
    ("fixed", "expected"),
    [
        ({"embed_dim": 64}, {"width": 64}),
        ({"pool_after": [0, 8]}, {"pool_blocks": (0, 8)}),
        ({"pool_kernel": (3, 3)}, {"pool_kernel": 3}),  # one number stands for a square
    ],
)
def test_fixed_fields_need_not_fit_the_recipes_shape(
    fixed: dict[str, Any], expected: dict[str, Any], trained: Trainings, tmp_path: Path
) -> None:
    found = hvt.search("digits", 0.01, trials=1, output=tmp_path, quiet=True, **fixed)
    assert {name: getattr(found.best, name) for name in expected} == expected
    assert len(trained) == 3


def test_a_replaced_image_is_noticed(trained: Trainings, tmp_path: Path) -> None:
    for number in range(20):
        path = tmp_path / "images" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (number, 0, 0)).save(path)
    words = {"data": str(tmp_path / "images"), "output": tmp_path / "out", "quiet": True}
    words |= {"img_size": 32, "patch_size": 4, "depth": 2, "workers": 0, "device": "cpu"}
    hvt.search("folder", 0.01, 1, **words)
    Image.new("RGB", (16, 16)).save(path)
    changed = r"images: \w+ images was .* continue anyway with --allow-changed-data"
    with pytest.raises(hvt.HVTError, match=changed):
        hvt.search("folder", 0.01, 1, **words)
    with pytest.raises(hvt.HVTError, match="gflops was"):  # which may not differ
        hvt.search("folder", 0.02, 1, allow_changed_data=True, **words)
    hvt.search("folder", 0.01, 1, allow_changed_data=True, **words)
    hvt.search("folder", 0.01, 1, **words)


def test_with_one_rung_every_trial_is_trained_to_the_end(
    trained: Trainings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run(None, 4, rungs=1, study="my/first", seed=2**40)
    assert found.folder == Path("runs/search-my-first")
    assert [recipe.epochs for recipe in trained] == 4 * [TINY["epochs"]]
    assert {recipe.seed for recipe in trained} == {2**40}
    assert all(row["finished"] and len(row["rungs"]) == 1 for row in found.trials)
    with pytest.raises(hvt.HVTError, match=r"rungs was \[0.9\], now \[0.1, 0.3, 0.9\]"):
        run(None, 5, study="my/first", seed=2**40)


def small(**values: Any) -> HVTConfig:
    shape = {"img_size": 8, "patch_size": 2, "num_heads": 2, "head_dim": 16, "depth": 4}
    return hvt.get_config("hvt_ti_0", **shape | {"drop_path_rate": 0.0} | values)


def test_given_configs_come_first_and_are_trained_unchanged(
    trained: Trainings, tmp_path: Path
) -> None:
    first = small(pool_after=(0, 1, 3), stages=None, drop_rate=0.5)
    second = small(class_token=True, depth=5, head_dim=8)
    write_config(first, tmp_path / "mine.json")
    given = [tmp_path / "mine.json", second]
    rows = run(tmp_path / "out", 3, promising=0, configs=given).trials
    tried = [HVTConfig.from_dict(row["config"]) for row in rows]
    assert tried[:2] == [config.replace(num_classes=10) for config in (first, second)]
    assert trained[0].overrides["drop_rate"] == 0.5
    # An existing study takes another one, and does not try the others again.
    third = small(depth=2)
    rows = run(tmp_path / "out", 4, promising=0, configs=[*given, third]).trials
    assert len(rows) == 4
    assert HVTConfig.from_dict(rows[3]["config"]) == third.replace(num_classes=10)


def test_given_configs_are_checked(command: Command, tmp_path: Path) -> None:
    write_config(small(depth=5), tmp_path / "mine.json")
    words = ("search", "digits", "--gflops", 0.0004, "--img-size", 8, "--output", tmp_path / "out")
    code, _, err = command(*words, "--configs", tmp_path / "mine.json")
    assert code == 2
    assert "mine.json costs 0.001" in err
    assert not (tmp_path / "out").exists()


def test_a_study_that_was_stopped_suggests_as_if_it_had_not_been(
    trained: Trainings, tmp_path: Path
) -> None:
    def params(folder: str, *trials: int) -> list[Any]:
        for count in trials:  # one that is promising, then five at random, then Optuna's
            rows = run(tmp_path / folder, count, promising=1).trials
        return [row["params"] for row in rows]

    whole = params("whole", 7)
    assert len({json.dumps(one, sort_keys=True) for one in whole}) == 7
    assert whole[0]["spent"] == 1.0
    assert params("parts", 1, 7) == whole
    trained.interrupt_at = len(trained) + 8
    with pytest.raises(Interrupted):
        params("cut", 7)
    assert params("cut", 7) == whole


@pytest.mark.parametrize("trainings", [1, 3])
def test_a_stop_after_a_training_is_not_forgotten(
    trainings: int, tmp_path: Path, trained: Trainings
) -> None:
    """Between two rungs the trial is retried with its scores; after the last it counts."""
    trained.stop_at = trainings
    with pytest.raises(Interrupted):
        run(tmp_path, 2)
    assert len(trained) == trainings
    rows = run(tmp_path, 2).trials
    assert rows[0]["retry_of"] == (0 if trainings == 1 else None)
    assert rows[0]["rungs"][0] == [0.1, 50.0]


def worker_in(folder: Path, trials: int = 9) -> Worker:
    recipe, fixed, _ = _recipe("digits", dict(TINY))
    study = open_study("s", f"sqlite:///{folder}/study.db", {}, heartbeat=1)
    space = search_space(small(), 0.002, fixed)
    rungs = rung_epochs(recipe.epochs)
    return Worker(recipe, space, study, trials, Console(quiet=True), rungs)


def test_a_config_that_is_suggested_again_continues_only_if_it_is_promoted(
    trained: Trainings, tmp_path: Path
) -> None:
    worker = worker_in(tmp_path)
    study, rungs = worker.study, worker.rungs
    params = worker.space.promising(1, 0)[0]

    def objective(params: dict[str, Any], **attributes: Any) -> dict[str, Any]:
        study.enqueue_trial(params, user_attrs=attributes)
        study.optimize(worker.objective, n_trials=1)
        return rows_of(study)[-1]

    first = [rungs[0], 60.0]
    better = params | {"spent": 0.5}
    assert objective(better, rungs=[first, [rungs[1], 60.0], [rungs[2], 60.0]])["finished"]
    assert not trained
    stopped = objective(params)  # with the 50 % of all trainings here
    assert stopped["config"] != rows_of(study)[0]["config"]
    assert stopped["rungs"] == [[rungs[0], 50.0]]
    for _ in range(3):  # more of the same do not make it better
        assert objective(params)["rungs"] == stopped["rungs"]
    assert len(trained) == 1
    # A retry was promoted by the process that began it.
    assert len(objective(params, rungs=[first])["rungs"]) == 2
    assert len(trained) == 2


def test_a_loss_that_is_not_finite_counts_as_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(recipe: Recipe, console: Console) -> Any:
        raise hvt.HVTError("the loss is not finite")

    monkeypatch.setattr("hvt.searching.worker.engine.train", diverge)
    worker = worker_in(tmp_path, trials=1)
    worker.work()
    assert [row["top1"] for row in rows_of(worker.study)] == [0.0]


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_the_trial_of_a_process_that_died_is_retried(trained: Trainings, tmp_path: Path) -> None:
    """Its finished rungs are not trained again."""
    worker = worker_in(tmp_path, trials=1)
    trial = worker.study.ask()  # a process that asked, trained one rung and was killed
    config = worker.space.suggest(trial)
    assert config is not None
    price = hvt.cost(config)
    model = {"config": config.to_dict(), "gflops": price.gflops, "params_m": price.params_m}
    trial.set_user_attr("model", model)
    trial.set_user_attr("rungs", [[worker.rungs[0], 55.5]])
    worker.study._storage.record_heartbeat(trial._trial_id)
    with sqlite3.connect(tmp_path / "study.db") as database:
        database.execute("UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00'")
    worker.work()
    (row,) = rows_of(worker.study)
    assert row["retry_of"] == trial.number
    assert row["params"] == trial.params
    assert row["rungs"][0] == [worker.rungs[0], 55.5]
    assert row["complete"]
    assert len(trained) == 2
    assert worker.study.get_trials()[trial.number].state.name == "FAIL"


# Errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("digits", "--gflops", "0"), "gflops=0.0 must be a number above 0"),
        (("digits", "--gflops", "1e-9"), "gflops=1e-09 cannot be met: the closest"),
        (("digits", "--gflops", "1", "--holdout", "0"), "holdout=0 leaves no images"),
        (("digits", "--gflops", "1", "--init", "x.pth"), "unknown flag '--init'"),
        (("digits", "--gflops", "1", "--model", "deit_s_power"), "cannot keep the recipe's retent"),
        (("digits", "--gflops", "1", "--stages", "18"), "no config of the search has enough"),
        (("folder", "--gflops", "1", "--data", "nowhere"), "nowhere"),
    ],
)
def test_bad_arguments(
    command: Command, words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    code, _, err = command("search", *words, "--output", tmp_path / "out", "--device", "cpu")
    assert code == 2
    assert message in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"init": "x.pth"}, "leave init out"),
        ({"teacher": "x.pth"}, "leave teacher out"),
        ({"pretrained": True}, "leave pretrained out"),
        ({"processes": 2}, "leave processes out"),
        ({"widht": 5}, "unknown field 'widht'"),
    ],
)
def test_values_that_a_trial_cannot_have(values: dict[str, Any], message: str) -> None:
    with pytest.raises(hvt.HVTError, match=message):
        hvt.search("digits", 1, **values)


def test_a_missing_storage_is_named_without_its_password(tmp_path: Path) -> None:
    for url in (f"sqlite:///{tmp_path}/none/study.db", "nothing://me:secret@host/db"):
        with pytest.raises(hvt.HVTError, match=r"the study cannot be opened in .*://") as error:
            open_study("s", url, {})
        assert len(str(error.value).splitlines()) == 1
        assert "secret" not in str(error.value)


def test_without_optuna(monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, out, err = command("search", "digits", "--gflops", "1", "--output", tmp_path / "out")
    assert (code, out) == (2, "")
    assert err.endswith("hvt: a search needs Optuna: pip install 'hvt[search]'\n")
