"""Recipes open by name and path, keep the paper's values, and refuse mistakes by one sentence."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hvt.config import HVTConfig
from hvt.errors import HVTError
from hvt.training.recipe import FOLDER, Recipe, from_dict, list_recipes, load_recipe
from hvt.zoo import get_config


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def message_of(path: Path) -> str:
    with pytest.raises(HVTError) as caught:
        load_recipe(str(path))
    message = str(caught.value)
    assert str(path) in message
    return message.removeprefix(f"the recipe {path}").strip(": ")


# The paper's recipe


def test_defaults_are_the_papers_recipe() -> None:
    """The numbers of the paper's experimental settings, which are DeiT's."""
    recipe = Recipe()
    expected = {
        "epochs": 300, "batch_size": 1024, "lr": 5e-4, "min_lr": 1e-5, "warmup_lr": 1e-6,
        "warmup_epochs": 5, "weight_decay": 0.025, "smoothing": 0.1,
        "rand_augment": "rand-m9-mstd0.5-inc1", "color_jitter": 0.4, "mixup": 0.8, "cutmix": 1.0,
        "mixup_switch": 0.5, "mixup_prob": 1.0, "erase": 0.25, "repeats": 3,
        "interpolation": "bicubic", "ema": 0.99996, "clip_grad": None, "accumulate": 1,
        "layer_decay": None, "teacher": None,
    }  # fmt: skip
    assert {name: getattr(recipe, name) for name in expected} == expected
    assert HVTConfig().drop_path_rate == 0.1
    assert HVTConfig().img_size == 224


@pytest.mark.parametrize(
    ("name", "batch", "rate"), [("imagenet", 1024, 1e-3), ("cifar100", 128, 1.25e-4)]
)
def test_the_papers_two_recipes(name: str, batch: int, rate: float) -> None:
    recipe = load_recipe(name)
    assert (recipe.batch_size, recipe.scaled_lr) == (batch, pytest.approx(rate))
    # Nothing else differs from the paper's values.
    own = {"model", "data", "batch_size"}
    plain = Recipe().to_dict()
    assert {k for k, v in recipe.to_dict().items() if v != plain[k]} <= own
    assert recipe.data == name
    assert get_config(str(recipe.model), **recipe.overrides).image == (224, 224)


# The files that ship


def test_all_recipes_are_listed() -> None:
    known = {"cifar100", "cifar100-built-in", "cifar100-cpu", "digits", "finetune", "imagenet"}
    assert known | {"power"} <= set(list_recipes())
    assert list_recipes() == sorted(path.stem for path in FOLDER.iterdir())


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_opens_with_its_command_and_is_valid(name: str) -> None:
    first = (FOLDER / f"{name}.toml").read_text(encoding="utf-8").splitlines()[0]
    assert first.split()[:4] == ["#", "hvt", "train", name]
    recipe = load_recipe(name)
    if recipe.model is None:
        HVTConfig(**recipe.overrides)
    else:
        config = get_config(recipe.model, **recipe.overrides)
        assert len(config.tokens) == (config.stages or 0) + 1
    assert recipe == load_recipe(str(FOLDER / f"{name}.toml"))


@pytest.mark.parametrize("name", list_recipes())
def test_the_command_in_a_recipe_is_understood(name: str) -> None:
    """Every `hvt train` in a comment has flags that the command knows."""
    from hvt.cli import train
    from hvt.cli.flags import Parser

    parser = Parser(prog="hvt")
    train.register(parser.add_subparsers(parser_class=Parser))
    for line in (FOLDER / f"{name}.toml").read_text(encoding="utf-8").splitlines():
        if line.startswith("# hvt train"):
            words = line.removeprefix("# hvt ").split()
            args = parser.parse_args([w for w in words if w != "…"])
            assert args.recipe == name


# Opening


def test_a_recipe_file_by_path(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'model = "hvt_ti_2"\nepochs = 7\nlr = 1\n[overrides]\nimg_size = [32, 64]\npatch_size = 4\n'
        "pool_after = [0, 6]\n",
    )
    recipe = load_recipe(path)
    assert (recipe.model, recipe.epochs, recipe.lr) == ("hvt_ti_2", 7, 1)
    # TOML's lists become the tuples that the model's fields are.
    assert recipe.overrides == {"img_size": (32, 64), "patch_size": 4, "pool_after": (0, 6)}
    assert recipe.batch_size == 1024


def test_unknown_recipe_names() -> None:
    with pytest.raises(HVTError, match=r"unknown recipe 'digit': did you mean digits\?"):
        load_recipe("digit")
    with pytest.raises(HVTError, match=r"cannot read the recipe nowhere/mine\.toml: No such file"):
        load_recipe("nowhere/mine.toml")
    with pytest.raises(HVTError, match=r"unknown recipe '\.\./recipes/digits'"):
        load_recipe("../recipes/digits")


def test_recipe_through_json_is_the_same() -> None:
    recipe = load_recipe("digits").replace({"pool_after": (0, 6), "stages": None}, seed=3)
    values = json.loads(json.dumps(recipe.to_dict()))
    assert from_dict(values, "recipe.json") == recipe
    assert values["overrides"]["pool_after"] == [0, 6]  # what was given is left alone


# Mistakes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "unknown field 'epoch': did you mean epochs"),
        ("learning_rate = 3", "unknown field 'learning_rate': known: accumulate"),
        ("[overrides]\nimg_siz = 32", "unknown override 'img_siz': did you mean img_size?"),
        ("overrides = 3", "overrides=3 must be a table of the model's fields"),
        ("epochs = 1\nepochs = 2", "is not valid TOML: "),
        ('epochs = "3"', "epochs='3' must be a number"),
        ("batch_size = 3.0", "batch_size=3.0 must be a whole number"),
        ("lr = true", "lr=True must be a number"),
        ("model = 3", "model=3 must be text or none"),
        ("download = 1", "download=1 must be true or false"),
        ("rand_augment = false", "rand_augment=False must be text"),
        ("[overrides]\ndepth = 'deep'", "depth='deep' must be a whole number"),
        ("[overrides]\nimg_size = 'large'", "img_size='large' must be a whole number of at"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    said = message_of(write(tmp_path, text))
    assert said.startswith(message)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("epochs", (0, -1, 2e9), (0.3, 1)),
        ("batch_size", (-1,), (0, 2)),
        ("workers", (-2,), (-1, 0)),
        ("threads", (0, 1025), (None, 1, 1024)),
        ("lr", (0, -1e-3), (1e-9,)),
        ("layer_decay", (0, 1.5), (None, 1, 0.5)),
        ("clip_grad", (0, -1), (None, 0.1)),
        ("smoothing", (1, -0.1), (0, 0.9)),
        ("val_fraction", (0, 1), (0.5,)),
        ("distill", ("firm",), ("soft", "hard")),
    ],
)
def test_values_out_of_range(name: str, bad: tuple[Any, ...], good: tuple[Any, ...]) -> None:
    for value in bad:
        with pytest.raises(HVTError, match=f"{name}={value!r} must be "):
            Recipe(**{name: value})
    for value in good:
        assert getattr(Recipe(**{name: value}), name) == value


def test_every_number_has_a_limit() -> None:
    """A new field without one would take any value."""
    for field in dataclasses.fields(Recipe):
        if str(field.type).startswith(("int", "float")):
            assert {"ge", "gt"} & set(field.metadata)


# Replacing


def test_replace_merges_overrides_and_checks() -> None:
    recipe = Recipe(overrides={"depth": 6, "img_size": 64})
    changed = recipe.replace({"img_size": 32}, epochs=3)
    assert changed.overrides == {"depth": 6, "img_size": 32}
    assert changed.epochs == 3
    assert recipe.overrides == {"depth": 6, "img_size": 64}  # as it was
    assert recipe.replace() == recipe
    assert recipe.replace({"pool_after": [0]}).overrides["pool_after"] == (0,)
    with pytest.raises(HVTError, match="epochs=0 must be a number above 0"):
        recipe.replace(epochs=0)
