"""The service predicts as `hvt predict` does, batches, keeps its limits and stops gracefully."""

import asyncio
import contextlib
import io
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from conftest import FEW, NAMES, SMALL
from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from hostile import GOOD, drawn, encoded, hostile, png
from PIL import Image
from serving import Service, live
from training import small_disk

import hvt
from hvt.cli import main
from hvt.data.evaluation import eval_transform
from hvt.deploy.runtime import NOT_FINITE, OnnxModel
from hvt.errors import HVTError
from hvt.serve import decoding
from hvt.serve.app import create_app
from hvt.serve.engine import Engine, Pixels, Scores, Setting
from hvt.serve.inference import Batcher
from hvt.serve.middleware import HEADERS
from hvt.serve.settings import Settings


@pytest.fixture(scope="module")
def predictor(onnx: Path) -> hvt.Predictor:
    return hvt.Predictor(onnx, threads=1)


@pytest.fixture
def engine(onnx: Path) -> Callable[..., Engine]:
    return lambda **settings: Engine(onnx, Settings(**{"concurrent_batches": 1, **settings}))


@contextlib.asynccontextmanager
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a started application, without a network."""
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as result:
            yield result


def ask(app: FastAPI, method: str, path: str, **request: Any) -> httpx.Response:
    """One request to an application that is started for it."""

    async def call() -> httpx.Response:
        async with client(app) as to:
            return await to.request(method, path, **request)

    return asyncio.run(call())


def encoded_image(seed: int = 0, form: str = "PNG", size: tuple[int, int] = (40, 50)) -> bytes:
    return encoded(drawn(random.Random(seed), size), form)


def assert_same(answer: dict[str, Any], content: bytes, predictor: hvt.Predictor) -> None:
    """An answer is the one that `hvt predict` gives for the same bytes."""
    expected = predictor(Image.open(io.BytesIO(content)))
    assert list(answer) == [key for key in expected.to_dict() if key != "error"]
    assert {key: answer[key] for key in answer["top"][0]} == answer["top"][0]
    for guess, known in zip(answer["top"], expected.top, strict=False):
        assert (guess["label"], guess["name"]) == (known.label, known.name)
        assert guess["probability"] == pytest.approx(known.probability, abs=1e-5)


# ── answers ─────────────────────────────────────────────────────────────────────────────────────


def test_raw_and_multipart_answer_as_predict_does(
    engine: Callable[..., Engine], predictor: hvt.Predictor
) -> None:
    strange = dict(item for item in hostile(200, 3) if item[0] in GOOD)
    assert set(strange) == set(GOOD)
    app = create_app(engine())

    async def call() -> None:
        async with client(app) as to:
            for content in strange.values():
                raw = await to.post("/predict?top=3", content=content, headers=CURL)
                assert raw.status_code == 200, raw.text
                body = raw.json()
                assert body["model"] == "model.onnx"
                assert body["milliseconds"] > 0
                (answer,) = body["predictions"]
                assert answer["source"] is None
                assert len(answer["top"]) == 3
                assert_same(answer, content, predictor)
            files = [("images", (f"{kind}.é", content)) for kind, content in strange.items()]
            many = (await to.post("/predict", files=files)).json()["predictions"]
            assert [answer["source"] for answer in many] == [f"{kind}.é" for kind in strange]
            for answer, content in zip(many, strange.values(), strict=True):
                assert_same(answer, content, predictor)

    asyncio.run(call())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(32, 32), (33, 20), (7, 90), (300, 200)])
def test_images_are_prepared_bit_for_bit_as_by_predict(
    channels: int, size: tuple[int, int]
) -> None:
    model = hvt.create_model("hvt_ti_1", **SMALL | FEW | {"in_chans": channels})
    setting, transform = Setting(model, None, ""), eval_transform(model)
    image = drawn(random.Random(1), size).convert("L" if channels == 1 else "RGB")
    assert torch.equal(setting.inputs([setting.pixels(image)])[0], transform(image))


def test_model_and_openapi_describe_the_service(engine: Callable[..., Engine]) -> None:
    app = create_app(engine(max_images=7))
    result = ask(app, "GET", "/model").json()
    assert (result["class_names"], result["input_size"]) == (NAMES, [3, 32, 32])
    assert (result["limits"]["max_images"], result["precision"]) == (7, "float32")
    assert hvt.HVTConfig.from_dict(result["config"]) == app.state.engine.config
    paths = ask(app, "GET", "/openapi.json").json()["paths"]
    assert "/" not in paths
    predict, explain = (paths[path]["post"] for path in ("/predict", "/explain"))
    assert predict["parameters"][0]["schema"]["maximum"] == 10
    for route, most in ((predict, 7), (explain, 1)):
        assert {"200", "413", "415", "422", "503", "504"} <= set(route["responses"])
        form = route["requestBody"]["content"]["multipart/form-data"]["schema"]
        assert form["properties"]["images"]["maxItems"] == most


# ── errors ──────────────────────────────────────────────────────────────────────────────────────

# What `curl --data-binary` says of any file.
CURL = {"content-type": "application/x-www-form-urlencoded"}
FORM = {"content-type": "multipart/form-data; boundary=b"}
CUT = b'--b\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\nGIF'


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        ({"content": b""}, 422, "empty"),
        ({"content": b"no image"}, 415, "a known format: use JPEG"),
        ({"content": encoded_image()[:60]}, 422, "damaged"),
        ({"content": png(60_000, 60_000)}, 413, "pixels"),
        ({"content": png(1, 500_000)}, 413, "after resizing to a shorter side"),
        ({"content": bytes(200_001)}, 413, "larger than the 200000 bytes"),
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, 415, "image/*"),
        ({"files": [("image", encoded_image())]}, 422, "in the field 'images'"),
        ({"files": [("images", encoded_image())] * 5}, 413, "more than the 4 images"),
        (
            {"files": [("images", ("a.png", encoded_image())), ("images", ("b.png", b"GIF"))]},
            415,
            "the image 'b.png'",
        ),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 422, "boundary"),
        ({"content": b"nonsense", "headers": FORM}, 422, "multipart body is damaged"),
        ({"content": CUT, "headers": FORM}, 422, "its last boundary is missing"),
        ({"content": encoded_image(), "params": {"top": 11}}, 422, "top"),
        ({"content": encoded_image(), "params": {"top": "x"}}, 422, "top"),
    ],
)
def test_bad_requests_are_answered_with_one_sentence(
    engine: Callable[..., Engine], request_: dict[str, Any], status: int, words: str
) -> None:
    app = create_app(engine(max_body=200_000, max_images=4))

    response = ask(app, "POST", "/predict", **request_)
    assert response.status_code == status, response.text
    detail = response.json()["detail"]
    assert words in detail
    assert "\n" not in detail
    assert app.state.admission.images == 0


def test_an_image_that_takes_too_long_is_given_up_and_others_are_answered(
    engine: Callable[..., Engine], predictor: hvt.Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, others = subprocess.run, threading.Event()

    def hang(command: list[str], **options: Any) -> Any:
        if not options["input"].startswith(b"P6"):
            return run(command, **options)
        others.wait()
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(decoding.subprocess, "run", hang)
    app = create_app(engine(decoders=2, decode_timeout=60, timeout=300))
    light, heavy = encoded_image(5, size=(300, 200)), encoded_image(6, "TIFF")

    async def call() -> None:
        async with client(app) as to:
            slow = asyncio.create_task(to.post("/predict", content=encoded_image(0, "PPM")))
            for content in (light, heavy):  # they do not wait for it
                answered = await to.post("/predict", content=content)
                assert_same(answered.json()["predictions"][0], content, predictor)
                assert not slow.done()
            others.set()
            assert (await slow).status_code == 413
            assert "more than the 60 seconds allowed" in (await slow).json()["detail"]

    asyncio.run(call())
    assert app.state.admission.images == 0


def test_a_full_temporary_folder_is_a_clear_error(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")  # the command sets it: undo that
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR")
    with small_disk(tmp_path / "disk", "16k") as disk:  # the export needs more
        monkeypatch.setattr("tempfile.tempdir", str(disk))
        assert main(["serve", str(checkpoint), "--port", "0", "--workers", "2"]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert re.fullmatch(
            r"hvt: cannot write to \S+: No space left on device; set TMPDIR.*", error
        )
        assert list(disk.iterdir()) == []
    monkeypatch.setattr("tempfile.tempdir", str(checkpoint / "nowhere"))
    with pytest.raises(HVTError, match=r"cannot write to \S+nowhere: Not a directory; set TMPDIR"):
        Engine(checkpoint)


def test_a_full_queue_says_when_to_try_again(engine: Callable[..., Engine]) -> None:
    app = create_app(engine(max_queue=2, max_images=2))

    async def call() -> None:
        async with client(app) as to:
            app.state.admission.acquire(images=1)
            two = await to.post("/predict", files=[("images", encoded_image())] * 2)
            app.state.admission.acquire(images=1)
            one = await to.post("/predict", content=encoded_image())
            for response in (one, two):
                assert response.status_code == 503
                assert int(response.headers["retry-after"]) >= 1
            app.state.admission.release(2, 0)
            assert (await to.post("/predict", content=encoded_image())).status_code == 200

    asyncio.run(call())
    assert app.state.admission.images == 0


def test_bodies_are_buffered_up_to_a_limit(engine: Callable[..., Engine]) -> None:
    app = create_app(engine(max_body=50_000, max_buffered=80_000))
    admission = app.state.admission

    async def slow(first: int, rest: asyncio.Event) -> AsyncIterator[bytes]:
        yield bytes(first)
        await rest.wait()
        yield b"x"

    async def call() -> None:
        rest = asyncio.Event()
        async with client(app) as to:
            one = asyncio.create_task(to.post("/predict", content=slow(45_000, rest)))
            while admission.buffered < 45_000:
                await asyncio.sleep(0.01)
            assert admission.images == 0  # half an upload takes no place in the queue
            two = await to.post("/predict", content=bytes(40_000))
            assert (two.status_code, two.headers["retry-after"]) == (503, "1")
            assert "more than 80000 bytes" in two.json()["detail"]
            assert (await to.post("/predict", content=encoded_image())).status_code == 200
            rest.set()
            assert (await one).status_code == 415

    asyncio.run(call())
    assert (admission.images, admission.buffered) == (0, 0)


# ── middleware, hosts, names ────────────────────────────────────────────────────────────────────


def test_middleware_of_a_user_sees_every_route(engine: Callable[..., Engine]) -> None:
    app = create_app(engine())
    seen = []

    @app.middleware("http")
    async def with_a_key(request: Request, follow: Any) -> Response:
        seen.append(request.url.path)
        if request.headers.get("x-key") != "right":
            return Response("no", 401)
        return await follow(request)

    origin = "https://elsewhere.example"
    app.add_middleware(CORSMiddleware, allow_origins=[origin])

    async def call() -> None:
        async with client(app) as to:
            for path in ("/predict", "/explain"):
                content = encoded_image()
                assert (await to.post(path, content=content)).status_code == 401
                headers = {"x-key": "right", "origin": origin}
                answer = await to.post(path, headers=headers, content=content)
                assert answer.status_code == 200, answer.text
                assert answer.headers["access-control-allow-origin"] == origin
            assert (await to.get("/model")).status_code == 401

    asyncio.run(call())
    assert seen == ["/predict", "/predict", "/explain", "/explain", "/model"]


def test_other_names_are_not_served(engine: Callable[..., Engine]) -> None:
    app = create_app(engine())
    for method, path in (("GET", "/model"), ("POST", "/predict"), ("GET", "/")):
        evil = ask(app, method, path, headers={"host": "evil.example"})
        assert evil.status_code == 421
        assert "--allow-host" in evil.json()["detail"]
    assert ask(app, "GET", "/model", headers={"host": "127.0.0.1:8000"}).status_code == 200


@pytest.mark.parametrize(
    "path", ["/healthz", "/metrics", "/model", "/openapi.json", "/", "/static/page.js"]
)
def test_head_and_the_headers_of_every_response(engine: Callable[..., Engine], path: str) -> None:
    app = create_app(engine())
    got, head = ask(app, "GET", path), ask(app, "HEAD", path)
    assert (got.status_code, head.status_code, head.content) == (200, 200, b"")
    for response in (got, head):
        assert {name: response.headers.get(name) for name in HEADERS} == HEADERS
    assert ask(app, "POST", path).headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_an_answer_that_is_not_a_number_is_an_error(
    number: float,
    engine: Callable[..., Engine],
    predictor: hvt.Predictor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is one for its own image only, also where others shared its batch."""
    app = create_app(blind := engine(max_batch_size=2, max_wait_ms=1000))

    def blinded(images: torch.Tensor) -> torch.Tensor:
        result = blind.session(images)
        result[images.amax((1, 2, 3)) > 1, 0] = number
        return result

    monkeypatch.setattr(blind.variants[0], "session", blinded)
    dark, bright = (encoded(Image.new("RGB", (32, 32), (level,) * 3), "PNG") for level in (40, 250))

    async def call() -> list[httpx.Response]:
        async with client(app) as to:
            both = (to.post("/predict", content=content) for content in (bright, dark))
            return await asyncio.gather(*both)

    failed, answered = asyncio.run(call())
    assert (failed.status_code, failed.json()) == (500, {"detail": NOT_FINITE})
    assert answered.status_code == 200
    assert_same(answered.json()["predictions"][0], dark, predictor)


def test_a_model_that_cannot_be_run_is_an_error_in_json(
    engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = create_app(broken := engine())
    # ONNX Runtime then fails, as it does where memory is short or a device is gone.
    monkeypatch.setattr(broken.session, "session", None)
    response = ask(app, "POST", "/predict", content=encoded_image())
    assert response.status_code == 500
    assert response.json()["detail"] == "the model cannot be run: see the service's log"
    assert str(broken.session.path) in caplog.text


def test_class_names_that_are_not_text_are_written_out(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = ("\udcff", *NAMES[1:])  # what a folder's name of a lone byte ff becomes
    named = property(lambda self: odd, lambda *_: None)
    monkeypatch.setattr(OnnxModel, "class_names", named, raising=False)
    app = create_app(engine())
    labels = [r"\udcff", *NAMES[1:]]
    assert ask(app, "GET", "/model").json()["class_names"] == labels
    answer = ask(app, "POST", "/predict?top=10", content=encoded_image()).json()
    assert {guess["name"] for guess in answer["predictions"][0]["top"]} == set(labels)


# ── batches, metrics, health ────────────────────────────────────────────────────────────────────


def metric(text: str, name: str) -> float:
    match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(match[1]) if match else 0.0


def test_requests_that_arrive_together_share_a_batch(
    engine: Callable[..., Engine], predictor: hvt.Predictor
) -> None:
    # It starts when it is full, long before the second is over that it might wait.
    app = create_app(engine(max_batch_size=6, max_wait_ms=1000))
    contents = [encoded_image(seed) for seed in range(4)]

    async def call() -> str:
        async with client(app) as to:
            two = [("images", contents[3]), ("images", contents[0])]
            responses = await asyncio.gather(
                *[to.post("/predict", content=content) for content in contents],
                to.post("/predict", files=two),
            )
            answers = [answer for r in responses for answer in r.json()["predictions"]]
            order = [*contents, contents[3], contents[0]]
            for answer, content in zip(answers, order, strict=True):
                assert_same(answer, content, predictor)
            await to.get("/nothing")
            await to.post("/predict", content=b"")
            return (await to.get("/metrics")).text

    text = asyncio.run(call())
    assert metric(text, "hvt_batch_size_count") == 1
    assert metric(text, "hvt_batch_size_sum") == 6
    assert metric(text, "hvt_images_total") == 6
    assert metric(text, "hvt_queue_images") == 0
    assert metric(text, 'hvt_requests_total{path="/predict",status="200"}') == 5
    assert metric(text, 'hvt_requests_total{path="/predict",status="422"}') == 1
    assert metric(text, 'hvt_requests_total{path="other",status="404"}') == 1
    assert metric(text, 'hvt_request_seconds_count{path="/predict"}') == 6


def test_the_batcher_fills_waits_skips_and_passes_errors_on() -> None:
    batches: list[list[float]] = []
    asked = threading.Event()

    def answer(images: Sequence[Pixels], top: int) -> list[Scores]:
        asked.wait()
        values = [image.values.item() for image in images]
        batches.append(values)
        if 99.0 in values:
            raise RuntimeError("broken")
        return [Scores([value] * top, [0] * top, "") for value in values]

    async def call() -> None:
        batcher = Batcher(answer, max_batch_size=3, max_wait=0.01)

        def send(value: float, top: int = 1, setting: int = 0) -> asyncio.Future[Scores]:
            return batcher.submit(Pixels(np.array(float(value)), setting, (1, 1)), top)

        # Three at a time while a run is under way; the one that nobody waits for is left out.
        futures = [send(value, top=value % 2 + 1) for value in range(7)]
        futures[4].cancel()
        asked.set()
        rows = [await future for place, future in enumerate(futures) if place != 4]
        assert [scores.probabilities[0] for scores in rows] == [0, 1, 2, 3, 5, 6]
        assert batches == [[0, 1, 2], [3, 5, 6]]
        # A lone image has waited for others.
        start = asyncio.get_running_loop().time()
        assert (await send(7)).labels == [0]
        assert asyncio.get_running_loop().time() - start >= 0.009
        with pytest.raises(RuntimeError, match="broken"):
            await send(99)
        # A batch is of one setting.
        del batches[:]
        await asyncio.gather(*[send(place, 1, place) for place in (1, 1, 2, 1)])
        assert batches == [[1, 1], [2], [1]]
        batcher.close()

    asyncio.run(call())


def test_a_request_touches_the_files_that_contributing_lists(
    engine: Callable[..., Engine],
) -> None:
    root, touched = Path(hvt.__file__).parent, set()

    def look(frame: Any, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(root):
            touched.add(path.relative_to(root).as_posix())

    app = create_app(engine())
    images = [encoded_image(), encoded_image(size=(300, 200)), encoded_image(form="TIFF")]

    async def call() -> None:
        threading.setprofile(look)  # those of the batcher and of the decoders, as they start
        async with client(app) as to:
            await to.get("/healthz")
            touched.clear()
            sys.setprofile(look)
            try:
                responses = [await to.post("/predict", content=image) for image in images]
            finally:
                sys.setprofile(None)
                threading.setprofile(None)  # type: ignore[arg-type]
        assert [response.status_code for response in responses] == [200] * 3

    asyncio.run(call())
    page = Path(__file__).parents[1] / "CONTRIBUTING.md"
    if not page.exists():
        pytest.skip("a source distribution has no CONTRIBUTING.md")
    listed = page.read_text().split("<!-- request:begin -->")[1].split("<!-- request:end -->")[0]
    assert touched == set(re.findall(r"^- `(.+?)`", listed, re.MULTILINE))
    assert len(touched) <= 9


# ── settings and the command ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0 must be a whole number of at least 1"),
        ({"port": 70_000}, "port=70000 must be a whole number from 0 to 65535"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"max_pixels": 10**9}, "max_pixels"),
        ({"max_queue": 8, "max_images": 9}, "max_queue=8"),
        ({"max_body": 8, "max_buffered": 7}, "max_buffered=7"),
        ({"allow_host": ("https://a.example",)}, "allow_host='https://a.example'"),
    ],
)
def test_settings_that_cannot_work_are_errors(values: dict[str, Any], words: str) -> None:
    with pytest.raises(HVTError, match=re.escape(words)):
        Settings(**values)


def test_errors_of_the_command_are_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")  # several workers set it: undo that
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR")

    def refused(*words: object) -> str:
        assert main(["serve", *map(str, words)]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in refused(
            "--port", port
        )
    assert "No such file" in refused(tmp_path / "absent.onnx", "--port", 0)
    (tmp_path / "bad.onnx").write_bytes(b"nonsense")
    for workers in (1, 2):
        error = refused(tmp_path / "bad.onnx", "--port", 0, "--workers", workers)
        assert "is not an ONNX model" in error
    assert "cannot listen on 999.1.1.1:0" in refused("--host", "999.1.1.1", "--port", 0)
    assert "max_batch_size=0" in refused("--max-batch-size", 0)
    monkeypatch.setitem(sys.modules, "hvt.serve.server", None)
    assert "pip install 'hvt[serve]'" in refused()


# ── by a real network ───────────────────────────────────────────────────────────────────────────


def test_the_service_keeps_to_its_description(onnx: Path, tmp_path: Path) -> None:
    """Schemathesis, with all its checks: what is described is accepted, and nothing else."""
    config = tmp_path / "schemathesis.toml"
    # What is not an image gets other codes than what is not a number.
    config.write_text('[checks.negative_data_rejection]\nexpected-statuses = ["4xx"]\n')
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "src")])
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": path}
    app = create_app(Engine(onnx, Settings(concurrent_batches=1, max_images=4, max_wait_ms=0)))
    with live(app) as url:
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
        options = ["--max-examples", "20", "--phases", "coverage,fuzzing", "--seed", "0"]
        result = subprocess.run(
            [*command, f"{url}/openapi.json", *options, "--no-color"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert result.returncode == 0, result.stdout + result.stderr


def test_hostile_images_harm_nothing(onnx: Path, predictor: hvt.Predictor) -> None:
    app = create_app(Engine(onnx, Settings(concurrent_batches=1, max_wait_ms=0)))
    statuses = set()
    with live(app) as url, httpx.Client(base_url=url, timeout=60) as to:
        for place, (kind, content) in enumerate(hostile(96)):
            form: Any = {"files": {"images": (f"{kind}.png", content)}}
            response = to.post("/predict", **(form if place % 3 == 0 else {"content": content}))
            assert kind not in GOOD or response.status_code == 200, (kind, response.text)
            assert kind not in ("svg", "noise") or response.status_code in (415, 422), kind
            statuses.add(response.status_code)
        good = encoded_image(5)
        assert_same(to.post("/predict", content=good).json()["predictions"][0], good, predictor)
    assert statuses == {200, 413, 415, 422}
    assert app.state.admission.images == 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="workers are killed by SIGKILL")
def test_a_killed_worker_is_replaced_and_the_others_continue(
    onnx: Path, predictor: hvt.Predictor
) -> None:
    psutil = pytest.importorskip("psutil")
    content = encoded_image()
    with Service(onnx, "--workers", 2, "--drain", 0) as service:

        def workers() -> list[Any]:
            result = psutil.Process(service.process.pid).children()
            return [each for each in result if "spawn_main" in " ".join(each.cmdline())]

        stderr = service.process.stderr
        assert stderr is not None
        for _ in range(3):  # it was checked once, and both are nearly ready
            while stderr.readline() != "warming up\n":
                pass
        for _ in range(4):
            assert_same(service.ask(content), content, predictor)
        victim, other = workers()
        victim.kill()
        victim.wait(60)
        for _ in range(4):  # the other one continues
            assert_same(service.ask(content), content, predictor)
        with urllib.request.urlopen(f"{service.url}/metrics", timeout=60) as response:
            text = response.read().decode()
        assert metric(text, "hvt_images_total") == 8  # also of the one that is gone
        end = time.monotonic() + 60
        while len(workers()) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert other in workers()
        assert len(workers()) == 2
        code, _ = service.stop()
    assert code == 0
