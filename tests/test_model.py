"""The transformer does what the paper says, in every mode, precision, size and compiler."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hvt
from hvt import HVT, HVTConfig, HVTError

NAMES = hvt.list_models()

# One of each kind, shallow: what is compiled, exported or resized below.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "max": ("hvt_s_2", {}),
    "avg": ("hvt_s_2", {"pool": "avg"}),
    "conv": ("hvt_s_2", {"pool": "conv"}),
    "2D": ("hvt_s_2_2d", {}),
    "class token": ("deit_s", {}),
    "pooled class token": ("deit_s", {"stages": 1}),
    "PoWER": ("deit_s", {"retention": (40, 9)}),
    "H×W": ("hvt_s_2", {"img_size": (64, 96)}),
}
Build = Callable[..., HVT]


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, build: Build) -> HVT:
    name, overrides = KINDS[request.param]
    return build(name, depth=2, **overrides)


def random_images(model: HVT, batch: int = 2) -> Tensor:
    return torch.randn(batch, model.config.in_chans, *model.config.image)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────


class Paper:
    """The forward pass written out from the paper's equations, with plain torch functions."""

    def __init__(self, state: dict[str, Tensor], config: HVTConfig) -> None:
        self.state, self.config = state, config

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def attention(self, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
        heads, matrices = [], []
        parts = self.linear(x, f"{name}.qkv").chunk(3, 2)
        for q, k, v in zip(*(part.split(self.config.head_dim, 2) for part in parts), strict=True):
            weights = (q @ k.transpose(1, 2) / self.config.head_dim**0.5).softmax(dim=2)
            heads.append(weights @ v)
            matrices.append(weights)
        return self.linear(torch.cat(heads, dim=2), f"{name}.proj"), sum(matrices)

    def extract(self, x: Tensor, weights: Tensor, keep: int) -> Tensor:
        """PoWER, image by image: the class token and the patches that most is paid to."""
        rows = []
        for tokens, matrix in zip(x, weights, strict=True):
            received = matrix.clone().fill_diagonal_(0).sum(dim=0)[1:].tolist()
            order = sorted(range(len(received)), key=lambda patch: -received[patch])
            rows.append(tokens[[0, *sorted(1 + patch for patch in order[: keep - 1])]])
        return torch.stack(rows)

    def embed(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        filters, bias = (self.state[f"patch_embed.proj.{part}"] for part in ("weight", "bias"))
        grid = F.conv2d(images, filters, bias, stride=self.config.patch_size)
        x = grid.flatten(2).transpose(1, 2)
        if self.config.class_token:
            x = torch.cat((self.state["cls_token"].expand(len(x), 1, -1), x), dim=1)
        return x + self.state["pos_embed"], grid.shape[2:]

    def pool(self, x: Tensor, grid: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        channels = x.transpose(1, 2)
        if self.config.pool_dims == 1:
            return F.max_pool1d(channels, kernel_size=3, stride=2).transpose(1, 2), grid
        image = F.max_pool2d(channels.unflatten(2, grid), 3, 2, padding=1)
        return image.flatten(2).transpose(1, 2), image.shape[2:]

    def __call__(self, images: Tensor) -> Tensor:
        config = self.config
        x, grid = self.embed(images)
        for i in range(config.depth):
            name = f"blocks.{i}"
            branch, weights = self.attention(self.norm(x, f"{name}.norm1"), f"{name}.attn")
            x = x + branch
            if config.retention:
                x = self.extract(x, weights, config.retention[i])
            hidden = F.gelu(self.linear(self.norm(x, f"{name}.norm2"), f"{name}.mlp.fc1"))
            x = x + self.linear(hidden, f"{name}.mlp.fc2")
            if config.stages and i % (config.depth // config.stages) == 0:  # first of its stage
                x, grid = self.pool(x, grid)
                x = x + self.state[f"{name}.pos_embed"]
        x = self.norm(x, "norm")
        return self.linear(x[:, 0] if config.class_token else x.mean(dim=1), "head")


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_papers(name: str, build: Build, images: Tensor) -> None:
    """Every model against the equations; attention is the fused kernel against a softmax."""
    model = build(name)
    with torch.no_grad():
        logits = model(images)
        want = Paper(model.state_dict(), model.config)(images)
    assert logits.shape == (2, 10)
    assert logits.std() > 0.1
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


def test_stochastic_depth_rises_linearly(small: dict) -> None:
    model = hvt.create_model("hvt_s_4", **small)
    for branch in ("drop_path1", "drop_path2"):
        rates = [getattr(block, branch).rate for block in model.blocks]
        assert rates == pytest.approx([0.1 * i / 11 for i in range(12)])


@pytest.mark.parametrize("name", ["hvt_ti_4", "deit_ti"])
def test_initialisation_is_deits(name: str) -> None:
    model = hvt.create_model(name)
    positions = [n for n, _ in model.named_parameters() if n.endswith("pos_embed")]
    assert len(positions) == (5 if name == "hvt_ti_4" else 1)
    for n, parameter in model.named_parameters():
        if n in positions or n == "cls_token" or (parameter.ndim == 2 and n.endswith("weight")):
            assert parameter.std().item() == pytest.approx(0.02, rel=0.15), n
            assert parameter.mean().item() == pytest.approx(0, abs=0.005), n
        elif "norm" in n:
            assert (parameter == (1 if n.endswith("weight") else 0)).all(), n
        elif "patch_embed" not in n:
            assert (parameter == 0).all(), n


# ── modes ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_logits_in_every_mode(name: str, build: Build, images: Tensor) -> None:
    model = build(name, drop_path_rate=0.0)
    with torch.no_grad():
        evaluated, trained = model(images), model.train()(images)
    assert evaluated.shape == trained.shape == (2, 10)
    torch.testing.assert_close(trained, evaluated)


@pytest.mark.parametrize(
    "name", ["drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"]
)
def test_each_dropout_acts_only_in_training(name: str, build: Build, images: Tensor) -> None:
    torch.manual_seed(1)
    still = build("hvt_s_2", depth=4, drop_path_rate=0.0)
    torch.manual_seed(1)
    dropped = build("hvt_s_2", depth=4, **{"drop_path_rate": 0.0} | {name: 0.5})
    with torch.no_grad():
        torch.testing.assert_close(dropped(images), still(images))
        assert not torch.allclose(dropped.train()(images), still(images), atol=1e-2)


def test_gradients_reach_every_parameter(model: HVT) -> None:
    model(random_images(model)).square().sum().backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


def test_checkpointing_changes_no_gradient(model: HVT) -> None:
    images = random_images(model)
    model.train()
    other = copy.deepcopy(model)
    other.set_grad_checkpointing()
    kept = []
    for net in (model, other):
        torch.manual_seed(3)  # stochastic depth draws alike
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: (saved.append(t.numel()), t)[1], lambda t: t
        ):
            loss = net(images).square().sum()
        loss.backward()
        kept.append(sum(saved))
    assert kept[1] < kept[0] / 2
    gradients = ({n: p.grad for n, p in net.named_parameters()} for net in (model, other))
    torch.testing.assert_close(*gradients)

    other.set_grad_checkpointing(False)
    assert not other.grad_checkpointing


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_precisions(model: HVT, dtype: torch.dtype, tolerance: float) -> None:
    images = random_images(model)
    want = model(images).detach()
    with torch.autocast("cpu", dtype):
        mixed = model(images)
    mixed.float().square().sum().backward()
    assert model.pos_embed.grad.isfinite().all()
    with torch.no_grad():
        half = model.to(dtype)(images.to(dtype))
    assert half.dtype == dtype
    for got in (mixed, half):
        assert (got.float() - want).abs().max() <= tolerance * want.abs().max()


def test_neither_batch_nor_memory_format_changes_logits(model: HVT) -> None:
    images = random_images(model, batch=3)
    with torch.no_grad():
        last = images.to(memory_format=torch.channels_last)
        torch.testing.assert_close(model(last), model(images))
        torch.testing.assert_close(model(images[1:2]), model(images)[1:2], rtol=1e-4, atol=1e-4)


# ── compilers ───────────────────────────────────────────────────────────────────────────────────


def some(quick: Sequence[str], slow: Sequence[str]) -> list[Any]:
    """Kinds of models; a quick run leaves out those whose operators others have."""
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


@pytest.mark.parametrize(
    "model", some(["max", "PoWER"], ["2D", "pooled class token"]), indirect=True
)
def test_compiles_as_one_graph(model: HVT) -> None:
    torch.compiler.reset()
    images = random_images(model)
    want = model(images)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = compiled(images)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got.square().sum(), list(model.parameters())),
        torch.autograd.grad(want.square().sum(), list(model.parameters())),
        rtol=1e-4,
        atol=1e-4,
    )


def test_compiles_as_one_graph_in_training(build: Build, images: Tensor) -> None:
    torch.compiler.reset()
    model = build("hvt_s_1", depth=1, drop_rate=0.1, attn_drop_rate=0.1).train()
    model.set_grad_checkpointing()
    logits = torch.compile(model, backend="aot_eager", fullgraph=True)(images)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# ── sizes ───────────────────────────────────────────────────────────────────────────────────────

SIZES = [
    {"img_size": 96},
    {"img_size": (48, 80)},
    {"patch_size": 4},
    {"patch_size": 16, "img_size": (96, 128)},
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_set_input_size_is_as_if_built_so(model: HVT, size: dict[str, Any]) -> None:
    old = model.config
    model.set_input_size(**size)
    built = HVT(old.replace(**size))
    assert model.config == built.config
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in built.state_dict().items()
    }
    assert model.feature_info == built.feature_info
    assert model.default_cfg["input_size"] == built.default_cfg["input_size"]

    images = random_images(model)
    built.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(images), built.eval()(images))
        assert model(images).isfinite().all()


def test_what_is_frozen_stays_frozen_at_a_new_size(model: HVT) -> None:
    model.requires_grad_(False)
    model.set_input_size(96, 16)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ({"img_size": 65}, "patch_size=8 does not divide img_size=65"),
        ({"patch_size": (8, 16)}, r"patch_size=\(8, 16\) must be a whole number"),
        ({"img_size": 8}, "would leave no token"),
    ],
)
def test_an_impossible_size_leaves_the_model_unchanged(
    size: dict[str, Any], says: str, build: Build, images: Tensor
) -> None:
    model = build("hvt_s_2", depth=2)
    with torch.no_grad():
        before = model(images)
        with pytest.raises(HVTError, match=says):
            model.set_input_size(**size)
        assert torch.equal(model(images), before)


@pytest.mark.parametrize("shape", [(2, 3, 64, 72), (2, 1, 64, 64), (3, 64, 64)])
@pytest.mark.parametrize("method", ["forward", "forward_intermediates"])
def test_wrong_images_are_told_the_right_size(
    shape: tuple[int, ...], method: str, build: Build
) -> None:
    with pytest.raises(HVTError, match=r"takes \(batch, 3, 64, 64\); .*set_input_size") as caught:
        getattr(build("hvt_s_2", depth=2), method)(torch.randn(shape))
    assert str(shape) in str(caught.value)


# ── stochastic depth of a shared batch ──────────────────────────────────────────────────────────


def test_stochastic_depth_drawn_before_is_what_a_forward_draws(
    build: Build, images: Tensor
) -> None:
    model = build("hvt_s_2", depth=4, drop_path_rate=0.5).train()
    batch = images.repeat(4, 1, 1, 1)
    torch.manual_seed(1)
    want = model(batch)
    torch.manual_seed(1)
    model.draw_drop_path(8)
    assert torch.equal(model(batch), want)
    assert torch.equal(model(batch), want)  # it holds
    # The two halves of a batch, each by its rows of what is drawn for all.
    for rows in (torch.arange(0, 8, 2), torch.arange(1, 8, 2)):
        torch.manual_seed(1)
        model.draw_drop_path(8, rows)
        torch.testing.assert_close(model(batch[rows]), want[rows])
    model.draw_drop_path(None)
    torch.manual_seed(1)
    assert torch.equal(model(batch), want)
    assert not torch.equal(model(batch), want)
