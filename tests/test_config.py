"""An architecture is one frozen, validated dataclass of plain values."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvt import HVTConfig, HVTError
from hvt.config import FIELDS

# ── what follows from the fields ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "pool_blocks", "tokens"),
    [
        ({"stages": None}, (), (196,)),
        ({"stages": 0}, (), (196,)),
        ({"stages": 1}, (0,), (196, 97)),
        ({"stages": 3}, (0, 4, 8), (196, 97, 48, 23)),
        ({"stages": 4}, (0, 3, 6, 9), (196, 97, 48, 23, 11)),
        ({"pool_after": (1, 2, 9)}, (1, 2, 9), (196, 97, 48, 23)),
    ],
)
def test_stages_pool_after_the_first_block_of_each(
    fields: dict, pool_blocks: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    config = HVTConfig(**fields)
    assert config.pool_blocks == pool_blocks
    assert config.tokens == tokens
    assert config.grids == ((14, 14), *((1, n) for n in tokens[1:]))


def test_a_class_token_is_counted_and_never_pooled() -> None:
    config = HVTConfig(class_token=True, stages=2)
    assert config.num_prefix_tokens == 1
    assert config.tokens == (197, 98, 49)
    assert config.head_pool == "token"
    assert HVTConfig(class_token=True, global_pool="avg").head_pool == "avg"


def test_a_retention_shortens_the_sequence_block_by_block() -> None:
    config = HVTConfig(class_token=True, depth=5, retention=[197, 90, 90, 7, 1])
    assert config.retention == (197, 90, 90, 7, 1)
    assert config.tokens == (197, 90, 7, 1)
    assert config.grids == ((14, 14),)
    assert hash(config) != hash(config.replace(retention=None))


def test_images_need_not_be_square() -> None:
    config = HVTConfig(img_size=(192, 320), stages=1)
    assert (config.image, config.grid) == ((192, 320), (12, 20))
    assert config.grids == ((12, 20), (1, 119))
    assert HVTConfig(img_size=(192, 320), stages=1, pool_dims=2).grids == ((12, 20), (6, 10))


def test_one_way_to_say_square() -> None:
    assert HVTConfig(img_size=(96, 96)) == HVTConfig(img_size=[96, 96]) == HVTConfig(img_size=96)
    assert HVTConfig(pool_kernel=(2, 2), pool_dims=2) == HVTConfig(pool_kernel=2, pool_dims=2)


@pytest.mark.parametrize(("width", "mlp"), [(448, 1840), (192, 768), (1152, 4304)])
def test_a_ratio_of_two_widths_gives_them_back(width: int, mlp: int) -> None:
    config = HVTConfig(num_heads=width // 64, head_dim=64, mlp_ratio=mlp / width)
    assert config.mlp_width == mlp


# ── replace ─────────────────────────────────────────────────────────────────────────────────────


def test_stages_and_pool_after_displace_each_other() -> None:
    named = HVTConfig(stages=4).replace(pool_after=(0, 1))
    assert (named.stages, named.pool_after) == (None, (0, 1))
    even = named.replace(stages=3)
    assert (even.stages, even.pool_after) == (3, None)
    assert named.replace(depth=6).pool_after == (0, 1)


def test_new_heads_displace_a_stated_width() -> None:
    stated = HVTConfig(embed_dim=384)
    assert stated.replace(num_heads=3).width == 192
    assert stated.replace(head_dim=32).width == 192
    with pytest.raises(HVTError, match="embed_dim=384 disagrees"):
        stated.replace(num_heads=3, embed_dim=384)


def test_a_class_token_takes_the_head_along() -> None:
    deit = HVTConfig(class_token=True, global_pool="token")
    assert deit.replace(class_token=False).head_pool == "avg"
    assert HVTConfig(global_pool="avg").replace(class_token=True).head_pool == "token"
    assert deit.replace(class_token=True, global_pool="avg").head_pool == "avg"
    averaged = HVTConfig(class_token=True, global_pool="avg")
    assert averaged.replace(class_token=True) == averaged  # nothing was asked for


def test_a_retention_follows_the_patches_and_the_depth() -> None:
    power = HVTConfig(class_token=True, depth=2, retention=(99, 50))  # 1/2 and 1/4 of 196
    assert power.replace(img_size=112).retention == (26, 14)  # of 49, rounded up
    assert power.replace(patch_size=8).retention == (393, 197)  # of 784
    assert power.replace(depth=4).retention == (148, 99, 75, 50)  # 3/4, 1/2, 3/8, 1/4
    assert power.replace(depth=1).retention == (50,)
    assert power.replace(img_size=224, depth=2, num_classes=10).retention == (99, 50)
    assert power.replace(img_size=112, retention=(9, 9)).retention == (9, 9)
    assert power.replace(img_size=112, retention=None).tokens == (50,)


@given(
    kept=st.lists(st.integers(1, 65), min_size=1, max_size=6),
    rows=st.integers(1, 12),
    depth=st.integers(1, 9),
)
def test_a_retention_stays_one_at_any_size(kept: list[int], rows: int, depth: int) -> None:
    power = HVTConfig(
        img_size=64, patch_size=8, class_token=True, depth=len(kept),
        retention=sorted(kept, reverse=True),
    )  # fmt: skip
    other = power.replace(img_size=(8 * rows, 64), depth=depth)
    assert len(other.retention) == depth  # and valid, or it would have failed
    assert (other.retention[-1] == 1) == (power.retention[-1] == 1)
    assert power.replace(img_size=64, depth=len(kept)) == power


# ── errors ──────────────────────────────────────────────────────────────────────────────────────

POWER = {"depth": 2, "class_token": True}
ERRORS = [
    # What the model cannot be: the field, its value, and what would be right.
    ({"stages": 5}, "stages=5 does not divide depth=12", "use one of 1, 2, 3, 4, 6, 12"),
    (
        {"stages": 6, "img_size": 32},
        "after block 2 would leave no token: 1 tokens are too few for pool_kernel=3",
        "use fewer stages, a larger image or smaller patches",
    ),
    ({"img_size": 225}, "patch_size=16 does not divide img_size=225", "such as 224 pixels"),
    ({"img_size": (224, 100)}, "does not divide img_size=(224, 100)", "such as 96 pixels"),
    ({"embed_dim": 192}, "embed_dim=192 disagrees with num_heads × head_dim", "set num_heads=3"),
    ({"pool": "maxx"}, "pool='maxx'", "must be max or avg or conv"),
    ({"pool_dims": 3}, "pool_dims=3", "a whole number from 1 to 2"),
    ({"pool_kernel": (2, 3)}, "pool_kernel=(2, 3) has rows and columns", "use pool_dims=2"),
    ({"pool_after": (0, 12)}, "pool_after=(0, 12)", "blocks from 0 to 11"),
    ({"pool_after": (6, 0)}, "pool_after=(6, 0)", "in rising order"),
    ({"pool_after": (0,), "stages": 2}, "stages=2 disagrees with pool_after=(0,)", "give one"),
    ({"global_pool": "token"}, "global_pool='token'", "needs class_token=True"),
    ({"global_pool": "max"}, "global_pool='max'", "avg or token or ''"),
    ({"dist_token": True}, "dist_token=True", "needs class_token=True"),
    ({"fc_norm": True, "class_token": True}, "fc_norm=True", "needs global_pool='avg'"),
    ({"retention": (9,) * 12}, "retention needs class_token=True", "retention=None"),
    (
        {"retention": (9,) * 12, "class_token": True, "stages": 1},
        "retention and pooling exclude each other",
        "stages=0",
    ),
    ({"retention": (9, 9), "class_token": True}, "2 numbers for depth=12", "one for each block"),
    ({"retention": (198, 9), **POWER}, "retention=198 of block 0", "at most the 197 tokens"),
    ({"retention": (8, 9), **POWER}, "retention=9 of block 1", "at most the 8 tokens"),
    (
        {"retention": (9, 1), "global_pool": "avg", **POWER},
        "no patch to average",
        "global_pool='token'",
    ),
    ({"mlp_ratio": 0.001}, "mlp_ratio=0.001", "an empty MLP at width 384"),
]


@pytest.mark.parametrize(("values", "wrong", "right"), ERRORS)
def test_an_error_names_the_field_and_the_fix(values: dict, wrong: str, right: str) -> None:
    _fails(values, wrong, right)


COUNTS = ("patch_size", "in_chans", "num_heads", "head_dim", "embed_dim")
RATES = ("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")
TYPES = [
    # fields, wrong values, what is expected
    (COUNTS, [0, -1, 2.0, True, "3"], "a whole number of at least 1"),
    (("depth",), [0, 2.0, True, "3", None, 10_001], "a whole number from 1 to 10000"),
    (("pool_kernel", "pool_stride"), [0, 2.0, True, (1, 0)], "from 1 to 10000 or a pair such as"),
    (("img_size",), [0, 224.0, True, "9", None, (9,), (9, None)], "of at least 1 or a pair such"),
    (("num_classes", "stages"), [-1, 2.0, True, "3"], "a whole number of at least 0"),
    (("pool_after", "merge"), [(-1,), (True,), (0.0,), "5"], "whole numbers of at least 0 such as"),
    (("retention",), [9, (9, 0), (9, 5.0), (9, True)], "whole numbers of at least 1 such as"),
    (("class_token", "qkv_bias"), [1, None, "yes"], "true or false"),
    (RATES, [-0.1, 1.0, float("nan"), "0.1", None, True], "a number of at least 0 and below 1"),
    (("norm_eps",), [0, 1000, "1e-6"], "a number above 0 and below 1000"),
]


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [(name, value, right) for names, wrong, right in TYPES for name in names for value in wrong],
)
def test_an_error_names_the_type_and_the_bounds(name: str, value: object, right: str) -> None:
    _fails({name: value}, f"{name}={value!r} must be", right)


def _fails(values: dict, *says: str) -> None:
    with pytest.raises(HVTError) as caught:
        HVTConfig(**values)
    message = str(caught.value)
    assert all(part in message for part in says), message
    assert "\n" not in message


# ── for all values ──────────────────────────────────────────────────────────────────────────────

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.floats(),
    st.sampled_from(["max", "avg", "conv", "token", "", "3"]),
)
ANYTHING = SCALARS | st.lists(SCALARS, max_size=3) | st.tuples(SCALARS, SCALARS)


@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4))
def test_any_values_make_a_config_or_an_hvt_error(values: dict) -> None:
    config, error = _try(values)
    if config is None:
        assert error
        assert "\n" not in error
    else:
        assert min(config.tokens) >= 1


@given(
    grid=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    after=st.sets(st.integers(0, 11), max_size=4),
    fields=st.fixed_dictionaries(
        {
            "patch_size": st.integers(1, 16),
            "pool_kernel": st.integers(1, 5),
            "pool_stride": st.integers(1, 4),
            "pool_dims": st.sampled_from([1, 2]),
            "class_token": st.booleans(),
        }
    ),
)
def test_pooling_never_lengthens_and_says_when_nothing_is_left(
    grid: tuple[int, int], after: set[int], fields: dict
) -> None:
    image = tuple(side * fields["patch_size"] for side in grid)
    config, error = _try({"img_size": image, "pool_after": tuple(sorted(after)), **fields})
    if config is None:
        assert "would leave no token" in error
        return
    assert config.grids[0] == grid
    assert len(config.tokens) == len(after) + 1
    assert config.tokens == tuple(sorted(config.tokens, reverse=True))
    assert min(config.tokens) > config.num_prefix_tokens
    values = json.loads(json.dumps(config.to_dict()))
    assert set(values) == set(FIELDS)
    assert HVTConfig.from_dict(values) == config


def _try(values: dict) -> tuple[HVTConfig | None, str]:
    try:
        return HVTConfig(**values), ""
    except HVTError as error:
        return None, str(error)
