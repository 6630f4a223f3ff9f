"""The closed form against the paper's equations, torch's own counters and autograd's memory.

`test_paper` has every printed cost.
"""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hvt
from hvt import HVT, HVTConfig, HVTError, cost
from hvt.costs import attention_macs, block_macs, mlp_macs

# ── the paper's equations ───────────────────────────────────────────────────────────────────────


@given(n=st.integers(1, 5000), d=st.integers(1, 2000))
def test_equation_7(n: int, d: int) -> None:
    assert block_macs(n, d) == 12 * n * d**2 + 2 * n**2 * d
    assert block_macs(n, d) == attention_macs(n, d) + mlp_macs(n, d, 4 * d)


@given(rows=st.integers(1, 12), heads=st.integers(1, 4), head_dim=st.integers(4, 64))
def test_equation_8_where_the_sequence_halves_exactly(rows: int, heads: int, head_dim: int) -> None:
    heads_of = {"num_heads": heads, "head_dim": head_dim}
    config = HVTConfig(img_size=(16 * rows, 32), depth=1, stages=1, pool_kernel=2, **heads_of)
    (step,) = cost(config).compression
    assert step.tokens_in == 2 * step.tokens_out == 2 * rows
    assert step.alpha == pytest.approx(2 + 2 / (12 * config.width / step.tokens_in + 1))
    assert step.measured == pytest.approx(step.alpha)
    assert 2 < step.alpha < 4


# ── random configs against the real model ───────────────────────────────────────────────────────


@st.composite
def configs(draw: st.DrawFn) -> HVTConfig:
    patch = draw(st.sampled_from([4, 8, 16]))
    side = st.integers(-(-16 // patch), 64 // patch)
    depth = draw(st.integers(1, 6))
    class_token = draw(st.booleans())
    stages: dict[str, Any] = draw(
        st.one_of(
            st.sampled_from([m for m in range(7) if m == 0 or depth % m == 0]).map(
                lambda m: {"stages": m}
            ),
            st.sets(st.integers(0, depth - 1)).map(lambda b: {"pool_after": tuple(sorted(b))}),
        )
    )
    rows, cols = draw(side), draw(side)
    if class_token and draw(st.booleans()):  # PoWER in place of pooling
        kept = st.lists(st.integers(2, rows * cols + 1), min_size=depth, max_size=depth)
        stages = {"retention": tuple(sorted(draw(kept), reverse=True))}
    try:
        return HVTConfig(
            img_size=(rows * patch, cols * patch),
            patch_size=patch,
            in_chans=draw(st.integers(1, 4)),
            num_classes=draw(st.sampled_from([0, 1, 7])),
            num_heads=draw(st.integers(1, 3)),
            head_dim=draw(st.integers(4, 16)),
            depth=depth,
            pool=draw(st.sampled_from(["max", "avg", "conv"])),
            pool_kernel=draw(st.integers(1, 4)),
            pool_stride=draw(st.integers(1, 3)),
            pool_dims=draw(st.sampled_from([1, 2])),
            class_token=class_token,
            global_pool=draw(st.sampled_from([None, "", "avg", *(["token"] * class_token)])),
            mlp_ratio=draw(st.sampled_from([0.5, 1.3, 4.0])),
            drop_path_rate=0.0,
            **stages,
        )
    except HVTError as error:
        assume("would leave no token" not in str(error))
        raise


@settings(max_examples=80)
@given(configs())
def test_closed_form_is_what_torch_counts(config: HVTConfig) -> None:
    model, priced = HVT(config).eval(), cost(config)
    assert priced.params == sum(p.numel() for p in model.parameters())
    # The fused kernel of the CPU is not in the counter's registry, its plain equivalent is.
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(torch.zeros(1, config.in_chans, *config.image))
    assert 2 * priced.macs == counter.get_total_flops()  # a MAC is two operations


# ── training memory ─────────────────────────────────────────────────────────────────────────────


def saved_bytes(model: HVT, batch: int) -> int:
    """What autograd keeps for a training step, parameters and images aside, each storage once."""
    images = torch.randn(batch, model.config.in_chans, *model.config.image)
    free = {p.untyped_storage().data_ptr() for p in model.parameters()}
    free.add(images.untyped_storage().data_ptr())
    kept: dict[int, torch.UntypedStorage] = {}  # holding them keeps addresses from being reused

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in free:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.train()(images)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("kind", ["max", "avg", "conv"])
@pytest.mark.parametrize("stages", [0, 1, 3])
def test_activations_are_what_autograd_saves(
    stages: int, kind: str, dims: int, class_token: bool
) -> None:
    pooling = {"stages": stages, "pool": kind, "pool_dims": dims, "class_token": class_token}
    size = {"img_size": (64, 96), "patch_size": 8, "num_heads": 2, "head_dim": 8, "depth": 3}
    config = HVTConfig(num_classes=5, drop_path_rate=0.0, **size, **pooling)
    one = round(cost(config).activation_mb * 1e6)
    assert saved_bytes(HVT(config), batch=1) == one
    assert saved_bytes(HVT(config), batch=3) == 3 * one


@pytest.mark.parametrize(
    "fields",
    [
        {"global_pool": ""},
        {"class_token": True, "global_pool": ""},
        {"class_token": True, "global_pool": "avg"},
        {"num_classes": 0},
        {"class_token": True, "num_classes": 0},
        {"mlp_ratio": 1.5, "in_chans": 1},
        {"stages": 0, "class_token": True, "retention": (65, 9)},
        {"stages": 0, "class_token": True, "retention": (30, 2)},
        {"stages": 0, "class_token": True, "retention": (30, 1)},
    ],
)
def test_activations_with_other_heads_and_widths(fields: dict[str, Any]) -> None:
    base = {"img_size": 64, "patch_size": 8, "num_heads": 3, "head_dim": 4, "depth": 2}
    config = HVTConfig(**base | {"drop_path_rate": 0.0, "stages": 1} | fields)
    assert saved_bytes(HVT(config), batch=1) == sum(
        layer.activation_bytes for layer in cost(config).layers
    )


# ── the report ──────────────────────────────────────────────────────────────────────────────────


def test_a_model_costs_what_it_is_now() -> None:
    model = hvt.create_model("hvt_ti_2", img_size=64, patch_size=8, num_heads=1, depth=2)
    before = cost(model)
    model.set_input_size((64, 96))
    model.reset_classifier(10)
    after = cost(model)
    assert after.tokens == [96, 47, 23]
    assert after.macs > before.macs
    assert after.params == sum(p.numel() for p in model.parameters())


def test_nothing_is_built() -> None:
    # Each of these would take more memory than any machine has.
    wide = cost(HVTConfig(num_heads=1000, head_dim=64, depth=12))
    assert wide.params > 10**11
    assert cost("hvt_s_1", num_classes=10**15).params > 10**17
    assert cost("hvt_s_4", img_size=16 * 10**6).tokens[0] == 10**12


def test_ratio_to_the_unpooled_model() -> None:
    priced = cost("hvt_s_4")
    assert priced.unpooled_macs == cost("hvt_s_0").macs
    assert priced.ratio == pytest.approx(cost("hvt_s_0").gflops / priced.gflops)
    assert cost("deit_s").ratio == 1
    assert cost("deit_s").compression == []
    # An unpooled model has no convolutions to pool with either.
    assert cost("hvt_s_4", pool="conv").unpooled_macs == cost("hvt_s_0").macs


def test_blocks_add_their_pooling() -> None:
    priced = cost("hvt_s_2", pool="conv")
    blocks = priced.blocks()
    assert [tokens for tokens, _ in blocks] == [196, *[97] * 6, *[48] * 5]
    assert blocks[0][1] == block_macs(196, 384) + 97 * 3 * 384**2
    assert blocks[1][1] == block_macs(97, 384)
    outside = sum(r.macs for r in priced.layers if r.name in ("patch_embed", "head"))
    assert sum(macs for _, macs in blocks) + outside == priced.macs


def test_a_block_that_drops_tokens_has_them_only_in_its_attention() -> None:
    kept = (50, 50, 7)
    priced = cost("deit_s", depth=3, retention=kept)
    assert priced.tokens == [197, 50, 7]
    assert priced.mlp_tokens() == list(kept)
    assert priced.blocks() == [
        (n, 4 * n * 384**2 + 2 * n**2 * 384 + 8 * left * 384**2)
        for n, left in zip((197, 50, 50), kept, strict=True)
    ]
    assert priced.compression == []
    assert priced.unpooled_macs == cost("deit_s", depth=3).macs
    assert priced.params == cost("deit_s", depth=3).params
    assert priced.ratio > 1


def test_a_cost_is_a_short_line_in_a_session() -> None:
    shown = "Cost(2.40 GFLOPs, 22.09 M parameters, tokens 196 → 97)"
    assert repr(cost("hvt_s_1")) == shown
