"""Plans are priced as `hvt.cost` prices, within their budgets, and errors name what is wrong."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SMALL, Command

import hvt
from hvt.config import HVTConfig
from hvt.planning.baselines import scaled_up
from hvt.planning.best import scores_of
from hvt.planning.budget import tolerance
from hvt.planning.latency import LatencyTable
from hvt.planning.price import Priced, priced, training_bytes
from hvt.planning.quality import flags_of, load_quality, measures_of
from hvt.planning.space import Space, space_of
from hvt.planning.timings import cache_file, cases_of, latency_table, solve, time_models
from hvt.training.recipe import load_recipe
from hvt.zoo import read_config, write_config

ROOT = Path(__file__).parents[1]
NARROW: dict[str, Any] = {"depth": 12, "img_size": 224, "patch_size": 16}


def configs(space: Space, one: Priced, count: int) -> list[tuple[tuple[int, int, int], HVTConfig]]:
    """Some configs of a depth with their place in its arrays."""
    valid = np.argwhere(np.broadcast_to(one.valid[:, :, None], one.macs.shape))
    picked = valid[np.random.default_rng(0).permutation(len(valid))[:count]]
    return [((p, q, w), space.config(*one.choices(p, q, w))) for p, q, w in picked.tolist()]


# The closed form over arrays


@pytest.mark.parametrize(
    "fixed",
    [
        {"depth": 6},
        {"depth": 9, "img_size": (192, 128)},
        {"depth": 4, "pool": "conv", "num_classes": 10},
        {"depth": 5, "pool": "avg", "mlp_ratio": 2.5, "in_chans": 1},
        {"depth": 12, "class_token": True, "num_classes": 0},
        {"depth": 8, "stages": 2, "pool_kernel": (2, 3), "pool_stride": (1, 2)},
        {"depth": 7, "pool_after": (1, 4), "head_dim": 12, "img_size": 32},
        {"depth": 3, "mlp_ratio": 453 / 448, "num_heads": 7, "head_dim": 64},
    ],
)
def test_every_cost_is_that_of_the_closed_form(fixed: dict[str, Any]) -> None:
    space, quality = space_of(fixed), load_quality()
    (one,) = priced(space, batch=7)
    scores = scores_of(one, space, quality)
    for place, config in configs(space, one, 60):
        price = hvt.cost(config)
        assert one.macs[place] == price.macs
        assert one.params[place] == price.params
        assert one.training_bytes[place] == training_bytes(price, config, 7)
        expected = quality.score(measures_of(config), flags_of(config))
        assert scores[place] == pytest.approx(expected)
        for name, value in fixed.items():
            assert getattr(config, name) == value


# What a budget buys


def test_the_papers_four_ways_to_spend_the_budget_of_deit_s() -> None:
    planned = hvt.plan(gflops=4.6)
    paper = {"11 heads": 4.51, "48 blocks": 4.33, "patch 8, 192 px": 4.35, "384 px": 4.48}
    assert {choice.name: round(choice.gflops, 2) for choice in planned.scaled} == paper
    expected = [{"num_heads": 11}, {"depth": 48}, {"patch_size": 8, "img_size": 192},
                {"img_size": 384}]  # fmt: skip
    assert [c.config for c in planned.scaled] == [hvt.get_config("hvt_s_4", **o) for o in expected]
    assert planned.baseline is not None
    assert planned.baseline.config == hvt.get_config("deit_s")
    assert len(planned.best) == 5
    for choice in planned.best:
        assert 0.8 * 4.6 <= choice.gflops <= tolerance(4.6)
        assert sum(choice.macs_share.values()) == pytest.approx(1)


def test_several_budgets_and_fixed_fields() -> None:
    planned = hvt.plan(gflops=1.0, params=5, memory=900, train_batch=32, img_size=160, pool_dims=2)
    for choice in planned.choices:
        assert choice.gflops == pytest.approx(hvt.cost(choice.config).gflops)
        assert choice.gflops <= tolerance(1.0)
        assert choice.params_m <= tolerance(5)
        assert choice.training_memory_mb <= tolerance(900)
        assert choice.config.image == (160, 160)
    assert all(c.config.pool_dims == 2 or not c.config.pool_blocks for c in planned.best)
    assert planned.num_within <= planned.num_configs


def test_budgets_and_fields_by_other_names() -> None:
    planned = hvt.plan(gflops=1.25, **NARROW)
    assert planned.baseline is not None
    assert planned.baseline.config == hvt.get_config("deit_ti")  # 1.2537 G, as printed
    assert (tolerance(4.6), tolerance(0.02)) == pytest.approx((4.605, 0.02005))
    ways = scaled_up(space_of({}), lambda config: hvt.cost(config).gflops <= 1.75)
    assert ways["16 blocks"] == hvt.get_config("hvt_s_4", depth=16)  # which do not double
    fixed = {"pool_after": [0], "img_size": [192, 128], "pool_kernel": [3, 2]}
    (choice,) = hvt.plan(gflops=1, count=1, depth=4, **fixed).best
    assert choice.config.pool_blocks == (0,)
    assert (choice.config.image, choice.config.pool_kernel) == ((192, 128), (3, 2))


def test_the_best_differ_from_each_other() -> None:
    deit_s = hvt.plan(gflops=4.6, depth=12)
    shapes = [(c.config.width, c.config.grid, len(c.config.pool_blocks)) for c in deit_s.best]
    assert len(set(shapes)) == len(shapes)
    scores = [choice.score for choice in deit_s.best]
    assert max(scores) - scores[0] < 0.5  # what the regression can tell apart is in order


# Budgets that cannot be met, and bad arguments


@pytest.mark.parametrize(
    ("budgets", "tightest"),
    [
        ({"gflops": 1e-5}, "gflops=1e-05"),
        ({"gflops": 0.5, "memory": 3}, "memory=3"),
        ({"gflops": 0.03, "params": 0.24}, "params=0.24"),  # each can be met without the other
    ],
)
def test_budgets_that_cannot_be_met_name_the_closest_config(
    budgets: dict[str, float], tightest: str
) -> None:
    fixed = {"img_size": 224, "depth": 12, "stages": 0}
    with pytest.raises(hvt.HVTError, match=f"{tightest} cannot be met: the closest") as error:
        hvt.plan(**budgets, **fixed)
    takes = map(float, re.findall(r"([\d.]+) (?:GFLOPs|MB|M par)", str(error.value)))
    assert hvt.plan(**dict(zip(budgets, takes, strict=True)), **fixed).best


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no budget is given"),
        (("--gflops", "0"), "gflops=0.0 must be a number above 0"),
        (("--latency-ms", "5", "--mode", "onx"), "unknown mode 'onx': did you mean onnx?"),
        (("--gflops", "1", "--device", "cpu"), "need latency_ms: give it, or leave them out"),
        (("--gflops", "1", "--choice", "3"), "--choice needs --save FILE.json"),
        (("--latency-ms", "5", "--pool", "conv"), "latency cannot be predicted for pool='conv'"),
        (
            ("--gflops", "1", "--img-size", "32", "--patch-size", "16", "--stages", "4"),
            "no config of the space has enough tokens for its poolings: use fewer stages",
        ),
        (("--latency-ms", "5", "--head-dim", "12"), "latency cannot be predicted for head_dim=12"),
        (("--gflops", "1", "--embed-dim", "100", "--num-heads", "3"), "embed_dim=100 is not"),
        (("--gflops", "1", "--depth", "7", "--stages", "2"), "stages=2 is not possible at depth 7"),
        (("--gflops", "1", "--save", "plan.toml", "--depth", "4"), "must end in .json"),
    ],
)
def test_bad_arguments(command: Command, words: tuple[str, ...], message: str) -> None:
    code, out, err = command("plan", *words)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"embed_dim": "96"}, "embed_dim='96' must be a whole number of at least 1"),
        ({"pool_after": (64,)}, "pool_after=(64,) is not possible at depth 2 to 64"),
        ({"stages": 1, "pool_after": (0, 2)}, "stages and pool_after disagree"),
        ({"pool_dims": 1, "pool_kernel": (3, 2)}, "needs pool_dims=2"),
        ({"patch_size": 11}, "patch_size=11 fits no image of the plan: fix both"),
        ({"img_size": 100_000, "depth": 64}, "gflops=1 cannot be met: the closest config"),
        ({"retention": (3, 2)}, "hvt plan does not support retention"),
    ],
)
def test_bad_fields(fixed: dict[str, Any], message: str) -> None:
    with pytest.raises(hvt.HVTError, match=re.escape(message)):
        hvt.plan(**{"gflops": 1} | fixed)


# The command


def test_the_command(command: Command, tmp_path: Path) -> None:
    words = ("plan", "--gflops", "1", "--img-size", "224", "--depth", "12", "--patch-size", "16")
    code, out, _ = command(*words, "--save", tmp_path / "plan.json")
    assert code == 0
    assert "share of MACs" in out
    assert "DeiT" in out
    assert "rank correlation" in out
    code, reported, _ = command(*words, "--json", "--count", 2)
    answer = json.loads(reported)
    assert len(answer["best"]) == 2
    config = HVTConfig.from_dict(answer["best"][0]["config"])
    assert read_config(tmp_path / "plan.json") == config
    assert hvt.cost(tmp_path / "plan.json").gflops == answer["best"][0]["gflops"]
    _, out, _ = command(*words, "--count", 1, "--save", tmp_path / "my plan.json")
    assert out.rstrip().endswith(f"--model '{tmp_path}/my plan.json'")
    code, priced_out, _ = command("cost", tmp_path / "plan.json", "--json")
    assert json.loads(priced_out)["gflops"] == answer["best"][0]["gflops"]


@pytest.mark.parametrize(("gflops", "extrapolated"), [(0.009, False), (1.0, True)])
def test_an_order_beyond_the_fitted_models_is_marked(
    command: Command, gflops: float, extrapolated: bool
) -> None:
    _, out, _ = command("plan", "--gflops", gflops, "--depth", 4, "--img-size", 64)
    assert ("by cost, order extrapolated" in out.splitlines()[0]) == extrapolated


def test_no_torch_is_needed() -> None:
    code = (
        "import sys, hvt.cli; sys.argv = ['hvt']; "
        "hvt.cli.main(['plan', '--gflops', '1', '--depth', '12', '--img-size', '224']); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Config files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "plan.json is not a config: Expecting value"),
        (b'{"widht": 3}', "unknown override 'widht'"),
        (b'{"depth": "12"}', "depth='12' must be a whole number"),
    ],
)
def test_a_bad_config_file(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(hvt.HVTError, match=re.escape(message)):
        hvt.cost(str(path))


def test_a_config_file_replaces_the_recipes_own_fields(tmp_path: Path) -> None:
    config = hvt.get_config("hvt_ti_2", **SMALL, pool_after=(1, 3))
    write_config(config, tmp_path / "plan.json")
    recipe = load_recipe("digits").replace(
        {"depth": 5, "stages": 1}, model=str(tmp_path / "plan.json")
    )
    made = hvt.get_config(recipe.model, **recipe.overrides, num_classes=10)
    assert made == config.replace(depth=5, stages=1)


# Latency


def law(n: float, d: float) -> float:
    """A block's time on a machine that is made up: not what the fit assumes."""
    return (1e-4 + 3e-11 * n * d * d + 5e-12 * n * n * d) * (1 + 0.2 * math.sin(math.log(n * d)))


def made_up() -> LatencyTable:
    points = [(n, d, law(n, d)) for n in (4, 16, 49, 196, 784) for d in (64, 192, 384, 768)]
    pools = {"1": (1e-5, 1e-9), "2": (2e-5, 2e-9)}
    return LatencyTable({}, points, 2e-4, (1e-11, 1e-9), pools, anchor=1e-3)


def test_the_table_is_exact_at_its_points_and_near_between_them() -> None:
    latency = made_up()
    for n, d, seconds in latency.points:
        assert latency.block(n, d) == pytest.approx(seconds)
    for n, d in ((30, 128), (100, 300), (400, 600)):
        assert latency.block(n, d) == pytest.approx(law(n, d), rel=0.1)
    points = [point for point in latency.points if point[0] * point[1] < 10**5]  # small ones
    partly = LatencyTable({}, points, 0.0, (0.0, 0.0), {}, 1e-3)
    assert partly.block(784, 768) == pytest.approx(law(784, 768), rel=0.5)


@pytest.mark.parametrize("mode", ["eager", "onnx"])
def test_layer_times_follow_from_model_times(mode: str) -> None:
    truth, cases = made_up(), cases_of(mode)
    calls = {case: [truth.seconds(config)] for case, config in cases.items()}
    solved = solve(calls, cases, {"mode": mode})
    assert solved.overhead == pytest.approx(truth.overhead, rel=0.1)
    for name in ("hvt_ti_1", "hvt_s_4", "deit_ti", "hvt_s_2_2d"):
        config = hvt.get_config(name)
        assert solved.seconds(config) == pytest.approx(truth.seconds(config), rel=0.1)


@pytest.mark.parametrize("fixed", [{}, {"mlp_ratio": 1.0}, {"mlp_ratio": 8.0}])
def test_a_models_time_is_the_sum_of_its_layers(fixed: dict[str, Any]) -> None:
    latency, space = made_up(), space_of({"depth": 12, "img_size": 224} | fixed)
    (one,) = priced(space)
    seconds = latency.of_space(one, space)
    for place, config in configs(space, one, 20):
        assert seconds[place] == pytest.approx(latency.seconds(config))
        usual = latency.seconds(config.replace(mlp_ratio=4.0))
        assert (latency.seconds(config) > usual) == (config.mlp_ratio > 4)
    config = hvt.get_config("hvt_s_1")
    expected = 2e-4 + 1e-11 * 196 * 768 * 384 + 1e-9 * 3 * 224**2
    expected += latency.block(196, 384) + 11 * latency.block(97, 384) + 1e-5 + 1e-9 * 196 * 384
    assert latency.seconds(config.replace(num_classes=0)) == pytest.approx(float(expected))


class FakeMachine:
    """Stands in for `time_models`: each model's calls take a multiple of `made_up`'s time."""

    def __init__(self) -> None:
        self.factors = [1.0]
        self.timed: list[int] = []
        """How many models, each time."""

    def __call__(self, cases: Any, *_: Any) -> dict[Any, list[float]]:
        self.timed.append(len(cases))
        truth = made_up()
        seconds = {case: truth.seconds(config) for case, config in cases.items()}
        return {case: [one * factor for factor in self.factors] for case, one in seconds.items()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    fake = FakeMachine()
    monkeypatch.setattr("hvt.planning.timings.time_models", fake)
    return fake


def table(batch: int = 1, remeasure: bool = False) -> tuple[LatencyTable, str]:
    """The table, and what was reported on the way to it."""
    notes: list[str] = []
    taken = latency_table("eager", "cpu", 1, batch, remeasure=remeasure, note=notes.append)
    return taken, "\n".join(notes)


def test_the_table_is_measured_once(machine: FakeMachine, cache: Path) -> None:
    first, notes = table()
    assert "timing blocks in eager at batch 1" in notes
    again, notes = table()
    assert again.seconds(HVTConfig()) == first.seconds(HVTConfig())
    assert machine.timed == [len(cases_of("eager")), 1]
    assert re.match(r"using the timings of 20\d\d-\d\d-\d\d on .*, spread 0%$", notes)
    table(batch=4)  # another batch size is another table
    assert len(list((cache / "hvt").iterdir())) == 2
    table(remeasure=True)
    assert machine.timed[2:] == 2 * [len(cases_of("eager"))]


def test_busy_rounds_do_not_count_and_the_spread_is_kept(machine: FakeMachine) -> None:
    idle, _ = table()
    machine.factors = [5.0, 1.0, 3.0]
    busy, notes = table(remeasure=True)
    assert busy.points == idle.points
    assert busy.machine["spread"] == 2.0
    assert "spread 200%" in notes
    assert "the machine is busy: measure again with --remeasure when it is idle" in notes


@pytest.mark.parametrize("factor", [0.1, 1.5])
def test_a_table_that_no_longer_fits_is_measured_anew(machine: FakeMachine, factor: float) -> None:
    before, _ = table()
    machine.factors = [factor]
    after, notes = table()
    assert re.search(r"no longer fit: a model that took [\d.]+ ms takes [\d.]+ ms now", notes)
    assert after.overhead == pytest.approx(factor * before.overhead)
    _, notes = table()
    assert notes.startswith("using the timings of")


@pytest.mark.parametrize(
    "damage", [lambda text: text[:50], lambda text: text.replace('"threads": ', '"threads": 9')]
)
def test_a_damaged_table_is_measured_anew(machine: FakeMachine, damage: Any) -> None:
    first, _ = table()
    path = cache_file(first.machine)
    path.write_text(damage(path.read_text()))
    again, notes = table()
    assert "cannot be used" in notes
    assert again.points == first.points


def test_a_cache_that_cannot_be_written(machine: FakeMachine, cache: Path) -> None:
    cache.touch()
    taken, notes = table()
    assert taken.points
    assert "the timings are not cached" in notes


def test_a_latency_budget(machine: FakeMachine, command: Command) -> None:
    words = ("plan", "--latency-ms", 50, "--gflops", 0.2, "--depth", 4, "--img-size", 128)
    words += ("--device", "cpu", "--threads", 1)
    code, out, err = command(*words)
    assert code == 0, err
    assert "Latency: timings of 20" in out
    assert "threads 1, eager at batch 1, spread 0%." in " ".join(out.split())
    planned = json.loads(command(*words, "--json")[1])
    assert all(choice["latency_ms"] <= tolerance(50) for choice in planned["best"])


@pytest.mark.parametrize(
    "mode", ["eager", *(pytest.param(one, marks=pytest.mark.slow) for one in ("onnx", "int8"))]
)
def test_models_are_timed(mode: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if mode != "eager":
        pytest.importorskip("onnxruntime", reason="the export extra is not installed")
    for name, value in {"WIDTHS": (16, 32), "ROWS": (2, 3, 4), "SECONDS": 0.0, "SLOW": 0.0}.items():
        monkeypatch.setattr(f"hvt.planning.timings.{name}", value)
    cases = cases_of(mode)
    calls = time_models(cases, mode, torch.device("cpu"), 1, 1)
    taken = solve(calls, cases, {"mode": mode})
    # Blocks that every table needs, and one further that is too slow, so that no larger one is.
    middle = 9 if mode == "eager" else 16
    needed = {(4, 16), (4, 32), (middle, 16), (middle, 32)}
    assert needed < {point[:2] for point in taken.points}
    assert len(taken.points) == 5
    assert all(seconds > 0 for *_, seconds in taken.points)
