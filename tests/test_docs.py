"""`GET /docs`, and images sent as `curl --data-binary` sends them."""

import html
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import SMALL
from PIL import Image

import hvt
from hvt.zoo import installed

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from fastapi.testclient import TestClient

from hvt.serve.app import create_app
from hvt.serve.docs import render
from hvt.serve.engine import Engine
from hvt.serve.settings import Settings

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    path = tmp_path_factory.mktemp("docs") / "small.safetensors"
    hvt.save(hvt.create_model("hvt_ti_1", **SMALL | {"depth": 2}), path)
    app = create_app(engine=Engine(path, Settings(concurrent_batches=1)))
    with TestClient(app, base_url="http://localhost") as client:
        yield client


def test_docs_name_every_operation_and_load_nothing(service: TestClient) -> None:
    page = service.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for path, methods in service.get("/openapi.json").json()["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()} {path}" in page.text
            assert html.escape(operation["summary"]) in page.text
    assert not re.search(r"(src|href)=\"(https?:)?//", page.text)
    assert "<script" not in page.text


def test_docs_take_words_for_words() -> None:
    operation = {"summary": "<b>", "responses": {"200": {"description": "<i>"}}}
    description = {"info": {"title": "<u>", "version": "1"}, "paths": {"/<p>": {"get": operation}}}
    page = render(description)
    for tag in ("<b>", "<i>", "<u>", "/<p>"):
        assert tag not in page
        assert html.escape(tag) in page


def test_curl_s_data_binary_works_as_typed(service: TestClient) -> None:
    file = io.BytesIO()
    Image.new("RGB", (9, 9)).save(file, "PNG")
    headers = {"content-type": "application/x-www-form-urlencoded"}  # what curl says of any file
    answer = service.post("/predict", content=file.getvalue(), headers=headers)
    assert answer.status_code == 200, answer.text
    form = service.post("/predict", content=b"image=cat", headers=headers)
    assert form.status_code == 415  # a form is not an image


def test_samples_wait_for_a_model_that_knows_them() -> None:
    folder = Path(hvt.__file__).parent / "serve" / "static"
    page, script = (folder / "page.html").read_text(), (folder / "page.js").read_text()
    assert re.search(r'id="samples"[^>]* hidden', page)
    assert "offerSamples(new Set(classes))" in script
    offered = re.findall(r'data-sample="([^"]+)"', page)
    known = {name for model in installed() for name in hvt.load(model).class_names or ()}
    assert {"apple", "sunflower"} < set(offered)
    assert "daisy" not in known or set(offered) <= known


def test_the_empty_page_promises_no_number_of_classes() -> None:
    page = (Path(hvt.__file__).parent / "serve/static/page.html").read_text()
    intro = page.partition('id="intro"')[2].partition("</p>")[0]
    assert "top classes" in intro
    assert not re.search(r"\b(five|\d+)\b", intro.partition(">")[2])


def test_every_promise_names_a_test_that_exists() -> None:
    page = ROOT / "docs/security.md"
    if not page.exists():
        pytest.skip("a source distribution has no docs/")
    named = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py"))
    assert named
    assert {name for name in named if f"def {name}(" not in tests} == set()
