"""PoWER: what is kept and why, what a budget leaves, the search, and all three steps by command."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import stir
from hypothesis import given, settings
from hypothesis import strategies as st
from training import PLAIN, TINY, quiet, said, tiny, write_recipe

import hvt
from hvt import HVT, HVTConfig, HVTError
from hvt.cli import main
from hvt.distributed import DistributedContext
from hvt.extraction import best, ranks, shared_softmax
from hvt.power import budget_range, retention_for, search
from hvt.power.retention import fit_retention, retention_of
from hvt.power.search import Searcher
from hvt.power.soft import SoftDeiT, harden, penalty, soften
from hvt.training.pipeline import build_model, open_batches
from hvt.training.recipe import Recipe

SMALL = HVTConfig(
    img_size=32, patch_size=8, num_heads=2, head_dim=4, depth=3, num_classes=5, class_token=True,
    drop_path_rate=0.0,
)  # fmt: skip
CPU = torch.device("cpu")


def deit(**fields: Any) -> HVT:
    """A small DeiT of 16 patches, every parameter stirred."""
    return stir(HVT(SMALL.replace(**fields))).eval()


# ── what is kept ────────────────────────────────────────────────────────────────────────────────


SCORES = st.integers(1, 12).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=1, max_size=3)
)


@given(SCORES, st.data())
def test_of_equals_the_earlier_leads_and_order_is_kept(
    rows: list[list[int]], data: st.DataObject
) -> None:
    scores = torch.tensor(rows).float()
    keep = data.draw(st.integers(1, len(rows[0])))
    places, kept = ranks(scores), best(scores, keep)
    for row, place, chosen in zip(rows, places.tolist(), kept.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda i: -row[i])  # stable
        assert [place[i] for i in order] == list(range(len(row)))
        assert chosen == sorted(order[:keep])


# ── in the model; its logits against the equations are in test_model ────────────────────────────


def test_intermediates_have_a_row_where_the_grid_is_lost() -> None:
    model, images = deit(retention=(17, 6, 1)), torch.randn(2, 3, 32, 32)
    shapes = [y.shape for y in model.forward_intermediates(images, intermediates_only=True)]
    assert shapes == [(2, 8, 4, 4), (2, 8, 1, 5), (2, 8, 1, 0)]
    kinds = [(level["tokens"], level["sequence"]) for level in model.feature_info]
    assert kinds == [(16, False), (5, True), (0, True)]


# ── soft extraction ─────────────────────────────────────────────────────────────────────────────


def set_r(model: SoftDeiT, retention: Sequence[int], low: float = 0.0) -> None:
    """The r that a retention stands for; the last block of a class-token head has none."""
    with torch.no_grad():
        for r, kept in zip(model.r, retention, strict=False):
            r.fill_(low)[: kept - 1] = 1.0


RETENTIONS = st.lists(st.integers(1, 17), min_size=3, max_size=3).map(
    lambda kept: tuple(sorted(kept, reverse=True))
)


@settings(max_examples=25, deadline=None)
@given(RETENTIONS, st.sampled_from(["token", "avg", "fc_norm"]), st.integers(0, 9))
def test_soft_at_0_and_1_is_the_hard_model(
    retention: tuple[int, ...], head: str, seed: int
) -> None:
    torch.manual_seed(seed)
    if head != "token":
        retention = tuple(max(2, kept) for kept in retention)
    pool = "token" if head == "token" else "avg"
    soft = soften(deit(global_pool=pool, fc_norm=head == "fc_norm").double())
    set_r(soft, retention)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    hard = harden(soft, retention).eval()
    torch.testing.assert_close(soft(images), hard(images), rtol=0, atol=1e-9)
    assert hard.config == soft.config.replace(retention=retention)


@pytest.mark.parametrize("r", [1.0, 1e-6, 0.0])
def test_the_gradient_of_every_r_is_finite_and_not_0(r: float) -> None:
    """Also of a rank that is dropped, so that it can come back."""
    soft = soften(deit().double())
    set_r(soft, (9, 5, 1), low=r)
    soft(torch.randn(4, 3, 32, 32, dtype=torch.float64)).square().sum().backward()
    assert len(soft.r) == 2  # none in the last of three blocks, whose patches are not read
    assert all(parameter.grad.isfinite().all() for parameter in soft.parameters())
    assert soft.r[0].grad.ne(0).all()
    assert soft.r[1].grad[: None if r else 8].ne(0).all()  # the others have been dropped before


def test_keys_count_by_their_share() -> None:
    logits, share = torch.randn(2, 3, 5, 5, dtype=torch.float64), torch.rand(2, 5).double()
    want = (logits + share.log()[:, None, None, :]).softmax(dim=3)
    torch.testing.assert_close(shared_softmax(logits, share), want)
    # A key that does not count may have any logit.
    logits[..., 4], share[:, 4] = 1e5, 0
    share.requires_grad_()
    weights = shared_softmax(logits, share)
    assert (weights[..., 4] == 0).all()
    torch.testing.assert_close(weights[..., :4], shared_softmax(logits[..., :4], share[:, :4]))
    weights[..., 0].sum().backward()
    assert share.grad.isfinite().all()


def test_the_penalty_weighs_deep_blocks_most() -> None:
    model = soften(deit())
    assert penalty(model).item() == 16 * (1 + 2)
    penalty(model).backward()
    for number, r in enumerate(model.r, start=1):
        assert r.grad.tolist() == [number] * 16
    assert len(soften(deit(global_pool="avg")).r) == 3


# ── budgets ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "gflops"), [("deit_ti", 0.80), ("deit_s", 2.70)])
def test_the_named_models_follow_the_rule_and_meet_the_paper(name: str, gflops: float) -> None:
    named = hvt.get_config(f"{name}_power")
    assert named == hvt.get_config(name, retention=retention_for(name, gflops))
    assert f"{hvt.cost(named).gflops:.2f}" == f"{gflops:.2f}"
    assert hvt.cost(named).params == hvt.cost(name).params
    falls = [a - b for a, b in zip((197, *named.retention), named.retention, strict=False)]
    assert max(falls) - min(falls) <= 1 + 1  # even, but for rounding and topping up


def test_the_sum_of_r_is_rounded_up_and_never_rises() -> None:
    assert retention_of([16.0, 7.01, 7.0, 0.0]) == (17, 9, 8, 1)
    assert retention_of([3.0, 5.0, 2.2, 2.9]) == (4, 4, 4, 4)
    assert retention_of([16 * 0.1 * 10 + 1e-6]) == (17,)  # rounding is not a token
    assert retention_of([0.0, 0.0], lowest=2) == (2, 2)


MASSES = st.lists(st.floats(0, 16), min_size=1, max_size=5)


@settings(max_examples=60)
@given(MASSES, st.floats(0, 1), st.sampled_from(["token", "avg", ""]))
def test_any_mass_is_fitted_to_any_budget(mass: list[float], share: float, pool: str) -> None:
    config = SMALL.replace(depth=len(mass), global_pool=pool)
    lowest, highest = budget_range(config)
    budget = lowest + share * (highest - lowest)
    fitted = fit_retention(config, mass, budget)
    pinned = pool == "token"  # the head reads no patch of the last block
    assert not pinned or fitted[-1] == 1
    free = len(mass) - pinned
    for retention, blocks in ((fitted, free), (retention_for(config, budget), len(mass))):
        price = hvt.cost(config, retention=retention).gflops  # an error if the retention rises
        assert price <= budget + 1e-9
        before = (17, *retention)
        for block, kept in enumerate(retention[:blocks]):
            if kept < before[block]:
                more = (*retention[:block], kept + 1, *retention[block + 1 :])
                assert hvt.cost(config, retention=more).gflops > budget


@pytest.mark.parametrize("gflops", [0.01, 4.61, float("nan")])
def test_the_error_for_a_budget_out_of_reach_names_the_range(gflops: float) -> None:
    lowest, highest = budget_range(hvt.get_config("deit_s"))
    assert highest == hvt.cost("deit_s").gflops
    assert lowest == hvt.cost("deit_s", retention=(1,) * 12).gflops
    with pytest.raises(HVTError, match=f"costs {lowest:.4g} GFLOPs .* and {highest:.4g} with all"):
        retention_for("deit_s", gflops)
    assert retention_for("deit_s", lowest) == (1,) * 12
    assert retention_for("deit_s", highest) == (197,) * 12


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"class_token": False}, "has no class token"),
        ({"class_token": False, "stages": 1}, "pools its tokens"),
        ({"merge": (4, 2, 0)}, "merges its tokens"),
        ({"dist_token": True}, "has other tokens beside the class token"),
    ],
)
def test_power_needs_a_deit(fields: dict[str, Any], reason: str) -> None:
    config = SMALL.replace(**fields)
    for call in (budget_range, lambda config: soften(HVT(config))):
        with pytest.raises(HVTError, match=f"needs a DeiT, but the model {reason}: use a deit_"):
            call(config)


# ── the search ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeiT that has learned something of the digits."""
    folder = tmp_path_factory.mktemp("deit")
    recipe = tiny(
        folder / "run", **PLAIN | {"epochs": 8, "batch_size": 120, "lr": 0.02, "model": "deit_ti"},
        overrides={"drop_path_rate": 0.0},
    )  # fmt: skip
    assert main(["train", write_recipe(recipe, folder / "deit.toml")]) == 0
    return folder / "run" / "model.safetensors"


def soft_recipe(checkpoint: Path, **values: Any) -> Recipe:
    recipe = tiny(checkpoint.parent, **PLAIN | {"epochs": 3, "batch_size": 120} | values)
    return dataclasses.replace(recipe, model=None, overrides={}, init=str(checkpoint), output=None)


def test_a_search_meets_its_budget(trained: Path, tmp_path: Path) -> None:
    config = hvt.load(trained).config
    lowest, highest = budget_range(config)
    budget = lowest + 0.3 * (highest - lowest)
    console, path = quiet(), tmp_path / "found.safetensors"
    result = search(soft_recipe(trained), budget, output=path, console=console)
    token = (12 * 16**2 + 2 * 16 * (2 * 17 + 1)) / 1e9  # at most, its MLP and the next attention
    assert budget - token <= result.gflops <= budget
    assert result.gflops == hvt.cost(result.model).gflops
    assert result.model.config == config.replace(retention=result.retention)
    written = hvt.load(path)
    assert written.config == result.model.config
    assert written.class_names == tuple("0123456789")
    lines = said(console).splitlines()
    epochs = [line for line in lines if line.startswith("epoch")]
    assert [line.split()[1] for line in epochs] == ["1/3", "2/3", "3/3"]
    steered = float(re.search(r"  λ \S+  (\S+) GFLOPs$", epochs[-1]).group(1))
    assert steered < budget + 0.25 * (highest - budget)  # most of the way is λ's
    assert f"retention {','.join(map(str, result.retention))}" in said(console)


def test_r_has_its_own_rate_no_decay_and_stays_in_its_range(trained: Path) -> None:
    recipe = soft_recipe(trained, weight_decay=0.5)
    model, data, _ = build_model(recipe)
    train, _ = open_batches(recipe, model, data, DistributedContext(), CPU)
    model = soften(model)
    searcher = Searcher(recipe, model, train, DistributedContext(), CPU, 0.00015, r_lr=0.3)
    own = list(model.r)
    (*weights, last) = searcher.optimizer.param_groups
    assert {id(p) for p in last["params"]} == {id(r) for r in own}
    assert (last["lr"], last["weight_decay"]) == (0.3, 0.0)
    held = {id(p) for group in weights for p in group["params"]}
    assert held == {id(p) for p in model.parameters()} - {id(r) for r in own}
    searcher.strength, searcher.total = 10.0, 4  # far above what the labels can hold up
    searcher.run(lambda text: None)
    assert all(((r >= 0) & (r <= 1)).all() for r in own)
    assert last["lr"] == 0.3  # the schedule does not change it
    assert weights[0]["lr"] != recipe.scaled_lr
    assert sum(r.sum().item() for r in own) < 0.5 * 3 * 16


def test_a_search_keeps_the_checkpoints_classes(trained: Path, tmp_path: Path) -> None:
    """Labels follow the names; unknown names need --match-by-order."""
    model = hvt.load(trained)
    with torch.no_grad():  # the same model with its classes in reverse
        for part in model.head.parameters():
            part.copy_(part.flip(0))
    turned, other = tmp_path / "turned.safetensors", tmp_path / "other.safetensors"
    hvt.save(model, turned, class_names=list("9876543210"))
    hvt.save(hvt.load(trained), other, class_names=list("abcdefghij"))
    recipe = soft_recipe(trained, epochs=1, batch_size=240)
    plain, console = search(recipe, 0.00015, console=quiet()), quiet()
    result = search(recipe.replace(init=str(turned)), 0.00015, console=console)
    assert result.model.class_names == tuple("9876543210")
    assert result.top1 == pytest.approx(plain.top1, abs=2)  # rounding may change some
    assert "classes matched by name: 10 of the model's 10" in said(console)
    with pytest.raises(HVTError, match=r"'0' of digits is not among the model's 10 .*by-order"):
        search(recipe.replace(init=str(other)), 0.00015, console=quiet())
    result = search(
        recipe.replace(init=str(other)), 0.00015, match_by_order=True, console=(console := quiet())
    )
    assert result.retention == plain.retention
    assert result.model.class_names == tuple("0123456789")  # as a later training has them
    assert "classes matched by order: 0 = a, 1 = b, 2 = c, 7 more" in said(console)


# ── the three steps, as a user runs them ────────────────────────────────────────────────────────

FLAGS = ["--data", "digits", "--recipe", "digits", "--device", "cpu", "--threads", "1"]


def test_search_and_retrain(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    result, folder = tmp_path / "power.safetensors", tmp_path / "run"
    out = run(
        "power", "search", trained, *FLAGS, "--gflops", 0.00015, "--epochs", 2, "--batch-size", 240,
        "--workers", 0, "--output", result,
    )  # fmt: skip
    retention = tuple(map(int, re.search(r"retention ([\d,]+):", out).group(1).split(",")))
    assert hvt.load(result).config.retention == retention
    assert 0.000145 < hvt.cost(hvt.load(result)).gflops <= 0.00015

    retrain = ["--epochs", 2, "--batch-size", 240, "--workers", 0, "--no-tensorboard"]
    run("power", "retrain", result, *FLAGS, *retrain, "--lr", 0.02, "--output", folder)
    done = hvt.load(folder / "model.safetensors")
    assert done.config.retention == retention
    assert json.loads((folder / "config.json").read_text())["retention"] == list(retention)
    assert "2/2" not in run("train", "--resume", folder)  # nothing is left to do


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["search", "DEIT", "--gflops", "5"], "is out of range: this model costs 4.125e-05"),
        (["search", "DEIT", "--gflops", "0.00015", "--output", "DEIT"], "already exists"),
        (["search", "POWER", "--gflops", "0.00015"], "already has a retention"),
        (["search", "HVT", "--gflops", "0.00015"], "PoWER needs a DeiT"),
        (["search", "FIVE", "--gflops", "0.00015"], "has 5 classes, digits has 10"),
        (["search", "DEIT", "--gflops", "0.00015"], "does not name its 10 classes, digits has 10"),
        (["retrain", "DEIT"], "has no retention: make one with hvt power search"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = TINY | {"class_token": True, "num_classes": 10}
    models = {
        "DEIT": fields,
        "POWER": fields | {"retention": (9,) * 4},
        "HVT": fields | {"class_token": False},
        "FIVE": fields | {"num_classes": 5},
    }
    paths = {name: tmp_path / f"{name.lower()}.safetensors" for name in models}
    for name in set(words) & set(models):
        hvt.save(HVT(HVTConfig(**models[name])), paths[name])
    argv = ["power", *(str(paths.get(word, word)) for word in words)]
    assert main([*argv, *FLAGS]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
