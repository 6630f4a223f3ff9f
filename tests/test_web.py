"""`hvt export --web`: its files, what its graph tells of tokens, and the page in Chromium."""

import functools
import hashlib
import http.server
import json
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from browser import Page, find_browser
from conftest import NAMES, Command
from data_paths import npm_package
from PIL import Image
from torch import Tensor

import hvt
from hvt.data.evaluation import eval_transform
from hvt.deploy.calibrate import input_ranges
from hvt.deploy.export import Calibration, write_onnx
from hvt.see import token_sources
from hvt.serve.hierarchy import hierarchy
from hvt.serve.web import INTEGRITY, STATIC, export_web, token_outputs

Build = Callable[..., hvt.HVT]
KINDS: dict[str, dict[str, Any]] = {
    "hvt_ti_2": {},
    "hvt_ti_1": {"pool_dims": 2},
    "hvt_s_2": {"class_token": True, "pool_kernel": 2},
    "deit_ti_power": {"depth": 4, "retention": (65, 40, 20, 1)},
}


@pytest.fixture(autouse=True)
def _brief_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvt.bench.run.TURN", 0.0)


def package(folder: Path) -> Path:
    """What looks like onnxruntime-web."""
    (folder / "dist").mkdir(parents=True)
    for name in INTEGRITY:
        (folder / "dist" / name).write_text(name)
    return folder


@pytest.mark.parametrize("vendored", [False, True])
def test_the_folder(command: Command, build: Build, tmp_path: Path, vendored: bool) -> None:
    hvt.save(build("hvt_ti_1", depth=2), tmp_path / "model.safetensors", NAMES)
    out = tmp_path / "page"
    words = ("--runtime", package(tmp_path / "package")) if vendored else ()
    code, _, err = command("export", tmp_path / "model.safetensors", out, "--web", *words)
    assert (code, err) == (0, "")
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    shared = {path.name for path in STATIC.iterdir()} - {"page.html"}
    wanted = {"index.html", "page.json", "config.json", "preprocessor_config.json"}
    wanted |= {"onnx/model.onnx", "onnx/model.tokens"} | {f"static/{name}" for name in shared}
    assert found == wanted | ({f"ort/{name}" for name in INTEGRITY} if vendored else set())
    page = json.loads((out / "page.json").read_text())
    assert page["model"]["name"] == "model.safetensors"
    assert [stage["tokens"] for stage in page["hierarchy"]["stages"]] == [64, 31]
    if vendored:
        assert page["runtime"] == {"base": "ort/", "integrity": None}
    else:
        assert page["runtime"]["base"].endswith("onnxruntime-web@1.30.0/dist/")
        assert page["runtime"]["integrity"] == INTEGRITY


@pytest.mark.parametrize(("name", "int8"), [*((name, False) for name in KINDS), ("hvt_ti_1", True)])
def test_tokens_are_those_of_see(
    build: Build, images: Tensor, tmp_path: Path, name: str, int8: bool
) -> None:
    """The appended outputs, followed as the page does, against `token_sources`."""
    model = build(name, **{"depth": 2} | KINDS[name])
    drops = model.config.retention is not None
    calibration = Calibration(model, input_ranges(model, images)) if int8 else None
    write_onnx(model, tmp_path / "model.onnx", calibration)
    content = (tmp_path / "model.onnx").read_bytes()
    session = onnxruntime.InferenceSession(
        content + token_outputs(content, "drop" if drops else "max")
    )
    names = [value.name for value in session.get_outputs()]
    outputs = dict(zip(names, session.run(None, {"pixel_values": images[:1].numpy()}), strict=True))
    origins = torch.arange(64)[:, None].expand(-1, model.config.width)
    stages = token_sources(model, images[0])
    for step, stage in enumerate(stages, 1):
        if f"tokens_{step}" not in outputs:
            assert (step, stage.tokens) == (len(stages), 0)  # the class token alone
            continue
        taken = torch.from_numpy(outputs[f"tokens_{step}"]).long()[0]
        if drops:
            taken = taken[:, None].expand(-1, model.config.width)
        else:  # (D, H', W'), counted through all channels
            taken = taken.flatten(1).T % len(origins)
        origins = origins.gather(0, taken)
        assert stage.origins is not None
        same = (origins == stage.origins).float().mean()
        assert same > (0.8 if int8 else 0.999)


@pytest.mark.parametrize(
    ("fields", "traced"),
    [
        ({"pool_after": (1,), "pool": "avg", "pool_dims": 2}, True),
        ({"merge": (9, 0)}, False),
    ],
)
def test_what_no_image_changes(
    build: Build, tmp_path: Path, fields: dict[str, Any], traced: bool
) -> None:
    """Averages are known beforehand; what the page cannot follow it says."""
    model = build("deit_ti", depth=2, **fields)
    export_web(model, tmp_path / "page")
    page = json.loads((tmp_path / "page/page.json").read_text())
    assert not page["tokens"]
    assert (page["hierarchy"]["untraced"] is None) == traced
    assert all((stage["kept"] is not None) == traced for stage in page["hierarchy"]["stages"])


# ── in Chromium, with the package of npm ─────────────────────────────────────────────────────────


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Where pages are served, and their folder: of the built-in models, one in int8 too."""
    runtime = npm_package("onnxruntime-web")
    find_browser()
    folder = tmp_path_factory.mktemp("pages")
    torch.manual_seed(0)
    export_web(hvt.load("cifar100"), folder / "cifar100", name="cifar100", runtime=runtime)
    model = hvt.load("imagenet")
    transform = eval_transform(model)
    images = [transform(Image.open(path).convert("RGB")) for path in STATIC.glob("*.jpg")]
    export_web(model, folder / "imagenet", torch.stack(images * 3), int8=True, runtime=runtime)
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


@pytest.fixture
def page(chromium: Any, pages: tuple[str, Path]) -> Iterator[Page]:
    page = Page(chromium, f"{pages[0]}/cifar100/").open()
    chromium.get_log("browser")
    yield page
    complaints = [entry["message"] for entry in chromium.get_log("browser")]
    assert [text for text in complaints if "No available adapters" not in text] == []  # of WebGPU


def shown(page: Page) -> list[tuple[str, float]]:
    rows = [row.text.split("\n") for row in page.all("#top li")]
    return [(name, float(share.removesuffix(" %"))) for name, share in rows]


@pytest.mark.npm
@pytest.mark.parametrize("name", ["cifar100", "imagenet"])
def test_samples_are_answered_as_by_predict(
    chromium: Any, pages: tuple[str, Path], name: str
) -> None:
    address, folder = pages
    page = Page(chromium, f"{address}/{name}/").open()
    offered = [b for b in page.all("#samples button") if b.is_displayed()]
    assert len(offered) == 6
    # int8 amplifies what JPEG decoders differ by.
    file, within = ("model_quantized.onnx", 2.01) if name == "imagenet" else ("model.onnx", 1.01)
    predictor = hvt.Predictor(folder / name / "onnx" / file)
    for button in offered:
        button.click()
        page.answered()
        source = button.find_element("css selector", "img").get_attribute("src")
        want = predictor(STATIC / Path(source).name)
        found = shown(page)
        assert found[0] == (want.name, pytest.approx(100 * want.probability, abs=within))
    assert page.run("return document.documentElement.dataset.provider") == "wasm"
    assert float(page.text("server-ms").split()[0]) > 0
    assert page.one("footer").text == "Images stay on this device."


@pytest.mark.npm
def test_tokens_of_each_stage_are_drawn(page: Page, pages: tuple[str, Path]) -> None:
    page.sample("sunflower")
    assert page.text("stages-title") == "64 → 16 → 4 tokens"
    assert len(page.all("#strip canvas[role=slider]")) == 3
    found = page.driver.execute_async_script(
        """const done = arguments[0];
           const engine = await import(new URL('static/engine.js', document.baseURI));
           const blob = await (await fetch('static/sample-sunflower.jpg')).blob();
           const image = await engine.prepare(blob);
           await engine.predict(image, new AbortController().signal);
           done({explained: await engine.explain(image), values: Array.from(image.values)});"""
    )
    model = hvt.load("cifar100").eval()
    with Image.open(STATIC / "sample-sunflower.jpg") as image:
        prepared = eval_transform(model)(image.convert("RGB"))
    want = hierarchy(model.config, model, prepared, {})
    difference = (torch.tensor(found["values"]).view_as(prepared) - prepared).abs()
    assert difference.max() < 0.05  # JPEG decoders may differ by a step or two of 255
    for stage, wanted in zip(found["explained"]["stages"], want["stages"], strict=True):
        assert stage["shares"] == pytest.approx(wanted["shares"], abs=0.01)
        assert len(stage["kept"]) == len(wanted["kept"] or ())


@pytest.mark.npm
def test_a_file_of_the_visitor(page: Page, tmp_path: Path) -> None:
    """Transparent, wider than high; what is no image is told, and the page goes on."""
    image = Image.effect_mandelbrot((150, 90), (-2, -1, 1, 1), 60).convert("RGBA")
    image.putalpha(128)
    image.save(tmp_path / "set.png")
    (tmp_path / "words.jpg").write_text("not an image")
    page.one("#file").send_keys(str(tmp_path / "words.jpg"))
    page.until(lambda: page.shown("problem"))
    assert page.text("problem").startswith("This browser cannot read that file")
    page.one("#file").send_keys(str(tmp_path / "set.png"))
    page.until(lambda: page.shown("costs"))
    want = hvt.Predictor("cifar100")(tmp_path / "set.png")
    assert shown(page)[0] == (want.name, pytest.approx(100 * want.probability, abs=1.01))
    assert "framed part" in page.text("view")


@pytest.mark.npm
def test_the_camera(page: Page) -> None:
    """Chromium's own, of a test image."""
    button = page.one("#live")
    assert button.text == "Use the camera"
    button.click()
    page.until(lambda: button.text == "Take the photo")
    assert page.shown("video")
    button.click()
    page.answered()
    assert not page.shown("video")
    assert page.one("#image").get_attribute("aria-label") == "Your image: camera"
    assert len(shown(page)) == 5


@pytest.mark.npm
def test_the_named_runtime_is_that_of_npm() -> None:
    folder = npm_package("onnxruntime-web")
    if json.loads((folder / "package.json").read_text())["version"] != "1.30.0":
        pytest.skip("the page names onnxruntime-web 1.30.0")
    for name, integrity in INTEGRITY.items():
        digest = hashlib.sha384((folder / "dist" / name).read_bytes()).digest()
        assert integrity == f"sha384-{b64encode(digest).decode()}"
