"""The page's files and headers, its explanation against `hvt.see`, and its sample images."""

import io
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from conftest import SMALL, stir
from fastapi.testclient import TestClient
from PIL import Image

import hvt
from hvt.costs import cost
from hvt.data.evaluation import eval_transform
from hvt.deploy.export import write_onnx
from hvt.see import token_sources
from hvt.serve.app import create_app
from hvt.serve.engine import Engine
from hvt.serve.hierarchy import hierarchy, seen_part
from hvt.serve.middleware import HEADERS
from hvt.serve.settings import Settings

ROOT = Path(__file__).parents[1]
STATIC = Path(hvt.__file__).parent / "serve/static"
SAMPLES = {
    "imagenet": ("daisy", "Granny Smith", "jack-o'-lantern", "soccer ball", "traffic light",
                 "volcano"),
    "cifar100": ("apple", "clock", "mountain", "rocket", "sea", "sunflower"),
}  # fmt: skip
TEXTS = ("page.html", "page.css", "page.js", "engine.js", "icon.svg")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two stages; its export lies beside it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("page")
    small = SMALL | {"img_size": 32, "depth": 2}
    hvt.save(stir(hvt.create_model("hvt_ti_2", **small)), folder / "small.safetensors")
    write_onnx(hvt.load(folder / "small.safetensors").eval(), folder / "0.onnx")
    return folder / "small.safetensors"


@pytest.fixture(scope="module")
def serve(checkpoint: Path) -> Callable[..., TestClient]:
    def start(source: Path = checkpoint, **settings: Any) -> TestClient:
        engine = Engine(source, Settings(concurrent_batches=1, **settings), checkpoint.parent)
        return TestClient(create_app(engine), base_url="http://localhost")

    return start


@pytest.fixture(scope="module")
def client(serve: Callable[..., TestClient]) -> Iterator[TestClient]:
    with serve() as client:
        yield client


def png(width: int = 48, height: int = 32) -> bytes:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, "PNG")
    return stream.getvalue()


# The files


@pytest.mark.parametrize("name", ["page.html", *TEXTS, *(p.name for p in STATIC.glob("*.jpg"))])
def test_files_are_sent(client: TestClient, name: str) -> None:
    path = "/" if name == "page.html" else f"/static/{name}"
    response = client.get(path)
    assert (response.status_code, response.content) == (200, (STATIC / name).read_bytes())
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
    kinds |= {"svg": "image/svg+xml", "jpg": "image/jpeg"}
    assert response.headers["content-type"].split(";")[0] == kinds[name.split(".")[-1]]
    assert {header: response.headers.get(header) for header in HEADERS} == HEADERS
    again = client.get(path, headers={"If-None-Match": f'"other", W/{response.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == response.headers["etag"]
    head = client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(response.content))


def test_no_file_asks_for_anything_from_elsewhere() -> None:
    for name in TEXTS:
        text = (STATIC / name).read_text()
        links = set(re.findall(r"[a-z]+://[^\s\"')]*", text))
        assert links <= {"http://www.w3.org/2000/svg"}, name
        assert not re.findall(
            r"url\(|@import|\bfrom ['\"](?!\./)|import\(|eval\(|innerHTML", text
        ), name
    page = (STATIC / "page.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)
    linked = re.findall(r"(?:src|href)=\"([^\"#][^\"]*)\"", page)
    assert {Path(link).name for link in linked} - {"openapi.json"} <= {
        path.name for path in STATIC.iterdir()
    }
    assert {f"static/{path.name}" for path in STATIC.glob("*.jpg")} <= set(linked)


def test_the_wheel_has_the_files() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("only a source tree can be built")
    files = {f.distribution_path for f in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    names = {path.name for path in STATIC.iterdir()}
    assert {f"hvt/serve/static/{name}" for name in names} <= files
    assert "hvt/serve/browser/engine.js" in files


# The hierarchy

KINDS: dict[str, dict[str, Any]] = {
    "hvt_ti_2": {},
    "hvt_ti_1": {"pool_dims": 2, "img_size": (32, 64)},
    "hvt_s_2": {"class_token": True, "pool_kernel": 2},
    "deit_ti_power": {"depth": 3, "retention": (40, 40, 1)},
    "deit_ti": {"depth": 3, "merge": (9, 0, 20)},
    "deit_s": {
        "depth": 3, "pool_after": (1,), "pool": "avg", "pool_dims": 2, "pool_kernel": (2, 1),
        "pool_stride": (2, 1),
    },
}  # fmt: skip
HOW = {"deit_ti_power": "drop", "deit_ti": "merge", "deit_s": "avg"}


@pytest.mark.parametrize("name", KINDS)
def test_hierarchy_is_what_see_finds_and_cost_says(
    build: Callable[..., hvt.HVT], name: str
) -> None:
    model = build(name, **KINDS[name])
    config, price = model.config, cost(model)
    image = torch.randn(3, *config.image)
    result = hierarchy(config, model, image, {})
    assert result["untraced"] is None
    assert result["reduction"] == HOW.get(name, "max")
    first, *stages = result["stages"]
    assert [stage["tokens"] for stage in (first, *stages)] == list(config.tokens)
    assert [token["patches"] for token in first["kept"]] == [
        [patch] for patch in range(math.prod(config.grid))
    ]
    for stage, source in zip(stages, token_sources(model, image), strict=True):
        assert stage["after_block"] == source.block
        assert stage["shares"] == pytest.approx(source.shares.flatten().tolist(), abs=1e-5)
        assert len(stage["kept"]) == source.tokens == stage["tokens"] - config.num_prefix_tokens
        for token, weights in zip(stage["kept"], source.weights, strict=True):
            assert token["patches"] == weights.nonzero().flatten().tolist()
            assert token["weights"] == pytest.approx(weights[token["patches"]].tolist(), abs=1e-5)
    grids = [*config.grids, *[None] * (len(config.tokens) - len(config.grids))]
    assert [stage["grid"] for stage in result["stages"]] == grids
    assert [(block["tokens"], block["macs"]) for block in result["blocks"]] == price.blocks()
    assert (result["macs"], result["unpooled_macs"]) == (price.macs, price.unpooled_macs)
    # Embedding and classifier are the only price that no block has; keeping all tokens spares both.
    outside = result["macs"] - sum(block["macs"] for block in result["blocks"])
    unpooled = sum(block["unpooled_macs"] for block in result["blocks"])
    assert result["unpooled_macs"] - unpooled == outside


def test_what_cannot_be_traced_says_why(build: Callable[..., hvt.HVT]) -> None:
    model = build("hvt_ti_2", pool="conv")
    result = hierarchy(model.config, model, torch.randn(3, 64, 64), {})
    assert "pools by convolution" in result["untraced"]
    assert {(stage["kept"], stage["shares"]) for stage in result["stages"]} == {(None, None)}


def test_a_model_without_pooling_keeps_all(build: Callable[..., hvt.HVT]) -> None:
    model = build("deit_ti")
    result = hierarchy(model.config, model, torch.randn(3, 64, 64), {})
    (stage,) = result["stages"]
    assert (result["untraced"], stage["tokens"], len(stage["kept"])) == (None, 65, 64)
    assert stage["shares"] == pytest.approx([1 / 64] * 64, abs=1e-5)


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("size", [(300, 200), (200, 300), (256, 256)])
@pytest.mark.parametrize(("image", "share"), [((64, 64), 0.8), ((64, 96), 1.0), ((96, 64), 0.875)])
def test_seen_part_is_where_the_transform_looks(
    build: Callable[..., hvt.HVT],
    mode: str,
    size: tuple[int, int],
    image: tuple[int, int],
    share: float,
) -> None:
    model = build("hvt_ti_1", img_size=image)
    black = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    model.pretrained_cfg |= {"crop_mode": mode, "crop_pct": share, **black}
    # Red grows to the right, green downwards; what is not the image has the mean, which is black.
    x, y = (np.linspace(55, 255, side).astype(np.uint8) for side in size)
    across, down = np.broadcast_arrays(x, y[:, None])
    ramps = np.stack((across, down, np.full_like(across, 255)), axis=-1)
    values = 255 * eval_transform(model)(Image.fromarray(ramps))  # (3, H, W)
    box = seen_part(size, model.config, model.pretrained_cfg)
    rows, cols = (values[2] > 128).any(1).nonzero(), (values[2] > 128).any(0).nonzero()
    for channel, (start, length), lines, side in (
        (values[0].amax(0), (box["left"], box["width"]), cols, image[1]),
        (values[1].amax(1), (box["top"], box["height"]), rows, image[0]),
    ):
        inner = lines.flatten()[2:-2]  # the resampling mixes what is outermost
        place = start + length * (inner + 0.5) / side
        assert torch.allclose(channel[inner], 55 + 200 * place.float(), atol=4)


# The route


def test_explain(client: TestClient, checkpoint: Path) -> None:
    response = client.post("/explain", content=png(), headers={"Content-Type": "image/png"})
    assert response.status_code == 200, response.text
    model = hvt.load(checkpoint).eval()
    image = eval_transform(model)(Image.open(io.BytesIO(png())))
    seen = seen_part((48, 32), model.config, model.pretrained_cfg)
    wanted = hierarchy(model.config, model, image, seen)
    assert response.json() == json.loads(json.dumps(wanted))
    assert client.post("/explain", files={"images": png()}).json() == response.json()
    two = client.post("/explain", files=[("images", png())] * 2)
    assert (two.status_code, "send one to explain" in two.text) == (413, True)
    assert client.post("/explain", content=b"words").status_code == 415


def test_explain_of_an_exported_file(serve: Callable[..., TestClient], checkpoint: Path) -> None:
    with serve(checkpoint.with_name("0.onnx")) as client:
        page = client.post("/explain", content=png()).json()
    assert [(s["tokens"], s["kept"]) for s in page["stages"]] == [(16, None), (7, None), (3, None)]
    assert "serve the checkpoint" in page["untraced"]
    assert sum(block["macs"] for block in page["blocks"]) < page["macs"]


def test_limits_of_time_and_number(
    serve: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    monkeypatch.setattr("hvt.serve.app._explain", lambda *_: answered.wait())
    with serve(max_queue=1, max_images=1, timeout=0.1) as client:
        assert client.post("/explain", content=png()).status_code == 504
        answered.set()
        admission = client.app.state.admission  # type: ignore[attr-defined]
        assert admission.images == 0
        admission.acquire(images=1)
        response: httpx.Response = client.post("/explain", content=png())
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")


# The sample images


def sample_files() -> dict[str, Path]:
    """The sample images that the page offers, by class."""
    page = (STATIC / "page.html").read_text()
    buttons = re.findall(r'data-sample="([^"]+)"><img src="static/([^"]+)"', page)
    return {name: STATIC / file for name, file in buttons}


@pytest.mark.parametrize("model", ["cifar100", "imagenet"])
def test_a_built_in_model_knows_its_samples(model: str) -> None:
    """And no other model is offered them by a name that it has too."""
    predictor, files = hvt.Predictor(model), sample_files()
    paths = [files[name] for name in SAMPLES[model]]
    assert [prediction.name for prediction in predictor(paths)] == list(SAMPLES[model])
    others = {name for key in SAMPLES if key != model for name in SAMPLES[key]}
    assert not others & set(predictor.class_names)


def test_every_sample_is_offered() -> None:
    files = sample_files()
    assert sorted(files) == sorted(name for listed in SAMPLES.values() for name in listed)
    assert sorted(STATIC.glob("sample-*")) == sorted(files.values())
    assert max(path.stat().st_size for path in files.values()) <= 15_000
