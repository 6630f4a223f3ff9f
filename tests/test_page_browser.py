"""The page in a real Chromium, asked for by a real `hvt serve`."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Page, find_browser
from PIL import Image
from serving import Service

import hvt


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where a real service of the small built-in model answers."""
    find_browser()
    with Service("cifar100", "--drain", 0) as service:
        yield service.url


@pytest.fixture
def page(chromium: Any, address: str) -> Iterator[Page]:
    result = Page(chromium, address).open()
    chromium.get_log("browser")
    yield result
    result.cdp("Network.disable")
    # The browser logs each refusal itself; anything else, such as a broken policy, is ours.
    complaints = [entry["message"] for entry in chromium.get_log("browser")]
    assert [text for text in complaints if "Failed to load resource" not in text] == []


def jpeg(path: Path, width: int, height: int, **options: Any) -> Path:
    across = np.linspace(0, 255, width, dtype=np.uint8)
    values = np.broadcast_to(across[None, :, None], (height, width, 3))
    Image.fromarray(np.ascontiguousarray(values)).save(path, "JPEG", **options)
    return path


def test_a_sample_is_answered_and_explained(page: Page) -> None:
    assert not page.shown("stages")
    page.sample("sunflower")
    assert page.text("status").startswith("sunflower, ")
    rows = page.all("#top li")
    names = [row.find_element("css selector", ".name").text for row in rows]
    shares = [float(re.search(r"([\d.]+) %", row.text)[1]) for row in rows]  # type: ignore[index]
    assert (len(rows), names[0], shares) == (5, "sunflower", sorted(shares, reverse=True))
    bars = page.run("return [...document.querySelectorAll('#top i')].map(i => i.offsetWidth)")
    track = page.run("return document.querySelector('#top .bar').offsetWidth")
    assert 100 * bars[0] / track == pytest.approx(shares[0], abs=1.5)
    assert all(float(page.text(name).split()[0]) > 0 for name in ("server-ms", "trip-ms"))
    assert page.text("stages-title") == "64 → 16 → 4 tokens"
    captions = [caption.text.split("\n")[:2] for caption in page.all("#strip figcaption")]
    assert captions == [
        ["64 tokens", "at first, 8 × 8"],
        ["16 tokens", "after block 0, 4 × 4"],
        ["4 tokens", "after block 3, 2 × 2"],
    ]
    assert "55.6 M MACs for this image" in page.text("costs-note")
    assert len(page.all("#chart rect.bar")) == len(page.all("#rows tr")) == 6
    assert len(page.all("#chart rect.ghost")) == 5


@pytest.mark.slow
def test_averaged_tokens_have_their_patches_average_colour(chromium: Any, tmp_path: Path) -> None:
    tall = {"pool": "avg", "pool_dims": 2, "pool_kernel": (2, 1), "pool_stride": (2, 1)}
    small = {"img_size": 32, "patch_size": 8, "num_heads": 1, "head_dim": 8, "depth": 2}
    model = hvt.create_model("deit_ti", pool_after=(0,), num_classes=2, **tall, **small)
    whole = {"crop_pct": 1.0}
    hvt.save(model, tmp_path / "small.safetensors", ["daisy", "<b>volcano</b>"], whole)
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[64:128] = stripes[192:] = 255  # every second row of patches is white
    Image.fromarray(stripes).save(tmp_path / "stripes.png")
    with Service(tmp_path / "small.safetensors", "--drain", 0) as service:
        page = Page(chromium, service.url).open()
        offered = [b.get_attribute("data-sample") for b in page.all("#samples button")
                   if b.is_displayed()]  # fmt: skip
        assert offered == ["daisy"]
        page.one("#file").send_keys(str(tmp_path / "stripes.png"))
        page.answered()
        assert page.text("stages-title") == "17 → 9 tokens"
        note = page.text("stages-note")
        assert "a token for each, after a class token" in note
        assert "Each stage averages neighbouring tokens" in note
        first, second = page.run(
            """const red = (canvas, row) =>
                 canvas.getContext('2d').getImageData(168, 56 * row, 1, 1).data[0];
               return [...document.querySelectorAll('#strip canvas')].map(
                 canvas => [1, 3, 5, 7].map(row => red(canvas, row)))"""
        )
        assert first == pytest.approx([0, 255, 0, 255], abs=8)
        # Three quarters are the average of both rows, a quarter is the image.
        assert second == pytest.approx([96, 159, 96, 159], abs=8)
        page.one("#strip figure:last-child canvas").send_keys(" ", "\ue014")  # the right arrow
        assert "token 1 of 8 is the average of 2 patches" in page.text("detail").lower()


def test_a_file_from_the_disk(page: Page, tmp_path: Path) -> None:
    """Wider than high, and turned by its EXIF: upright, framed and answered."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90°
    page.one("#file").send_keys(str(jpeg(tmp_path / "turned.jpg", 300, 200, exif=exif)))
    page.answered()
    size = page.run("const c = document.getElementById('image'); return [c.width, c.height]")
    assert size == [200, 300]
    assert page.one("#image").get_attribute("aria-label") == "Your image: turned.jpg"
    assert "framed part" in page.text("view")
    assert len(page.all("#top li")) == 5
    # A TIFF, which Chromium cannot show, is answered all the same.
    Image.new("RGB", (64, 64), (10, 90, 200)).save(tmp_path / "a.tif")
    page.one("#file").send_keys(str(tmp_path / "a.tif"))
    page.until(lambda: page.text("invite") == "This browser cannot show that file.")
    assert len(page.answered().all("#strip canvas")) == 3


def test_a_large_photograph_is_made_smaller_first(page: Page, tmp_path: Path) -> None:
    page.run(
        """window.sent = [];
           const real = fetch;
           window.fetch = (path, options) => {
             if (options?.body) sent.push([path, options.body.type, options.body]);
             return real(path, options);
           };"""
    )
    page.one("#file").send_keys(str(jpeg(tmp_path / "large.jpg", 4000, 3000)))
    page.answered()
    sent = page.run(
        """return Promise.all(sent.map(async ([path, type, body]) => {
             const {width, height} = await createImageBitmap(body);
             return [path, type, width, height];
           }))"""
    )
    assert sent == [["predict", "image/jpeg", 1280, 960], ["explain", "image/jpeg", 1280, 960]]


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_dropped_and_pasted_images(page: Page, way: str, tmp_path: Path) -> None:
    content = base64.b64encode(jpeg(tmp_path / "a.jpg", 64, 64).read_bytes()).decode()
    page.run(
        """const bytes = Uint8Array.from(atob(arguments[0]), c => c.charCodeAt(0));
           const data = new DataTransfer();
           data.items.add(new File([bytes], 'given.jpg', {type: 'image/jpeg'}));
           const event = arguments[1] === 'drop'
             ? new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})
             : new ClipboardEvent('paste', {clipboardData: data, bubbles: true});
           document.body.dispatchEvent(event);""",
        content,
        way,
    )
    page.answered()
    assert page.one("#image").get_attribute("aria-label") == "Your image: given.jpg"


def test_keyboard_alone(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    def focused() -> str:
        return page.run(
            "const e = document.activeElement; return e.id || e.dataset.sample || e.ariaLabel"
        )

    way = []
    for _ in range(7):
        page.keys(Keys.TAB)
        way.append(focused())
    assert [name for name in way if name] == [
        "file", "live", "apple", "sunflower", "rocket", "clock",
    ]  # fmt: skip
    page.keys(Keys.ENTER)
    page.answered()
    assert page.text("status").startswith("clock")
    while focused() != "Tokens after block 0":
        page.keys(Keys.TAB)
        assert focused() != "file", "the tab came round without meeting the stages"
    page.keys(Keys.END)
    assert page.text("detail").startswith("Token 16 of 16 holds values from")
    page.keys(Keys.ARROW_LEFT)
    slider = page.run("return document.activeElement")
    assert slider.get_attribute("aria-valuenow") == "15"
    assert slider.get_attribute("aria-valuetext").startswith("token 15 of 16")
    outline = page.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keys(Keys.ESCAPE)
    assert page.text("detail").startswith("Point at a token")
    while not page.run("return document.activeElement.tagName === 'SUMMARY'"):
        page.keys(Keys.TAB)
    page.keys(Keys.ENTER)
    cells = [cell.text for cell in page.all("#rows tr:first-child > *")]
    assert cells == ["0", "64", "29.9 M", "29.9 M"]


def test_a_broken_file_is_answered_in_words(page: Page, tmp_path: Path) -> None:
    good = jpeg(tmp_path / "a.jpg", 64, 64).read_bytes()
    for name, content, words in (
        ("cut.jpg", good[:-100], "That image is damaged."),
        ("words.jpg", b"not an image at all", "not an image in a supported format"),
        ("empty.jpg", b"", "That image is damaged. (the image is empty)"),
    ):
        (tmp_path / name).write_bytes(content)
        page.one("#file").send_keys(str(tmp_path / name))
        page.until(lambda words=words: words in page.text("problem"))
        assert page.text("status") == "No prediction."
        assert not page.shown("stages")
    page.sample("apple")  # and goes on
    assert page.text("status").startswith("apple")


def test_a_newer_image_leaves_nothing_of_an_older_one(page: Page, tmp_path: Path) -> None:
    """The older one is given up while its explanation's body is on the way."""
    page.run(
        """
        const real = window.fetch;
        window.fetch = async (path, options) => {
          if (path !== "explain") return real(path, options);
          const { signal } = options;
          const json = () => new Promise((_, fail) => {
            signal.addEventListener("abort", () => fail(signal.reason));
            window.waits = true;
          });
          return { ok: true, json };
        };
        addEventListener("resize", () => { window.resized = true; }); // after the page's own
        """
    )
    page.one("[data-sample=sea]").click()
    page.until(lambda: page.run("return window.waits"))
    (tmp_path / "words.jpg").write_bytes(b"not an image at all")
    page.one("#file").send_keys(str(tmp_path / "words.jpg"))
    page.until(lambda: page.shown("problem"))
    assert not page.shown("stages")
    # Nothing is drawn that a new width would have to draw again; the log has any error of it.
    size = {"width": 700, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.cdp("Emulation.setDeviceMetricsOverride", **size)
    page.until(lambda: page.run("return window.resized"))


def test_a_service_that_is_gone(page: Page) -> None:
    page.cdp("Network.enable")
    conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.cdp("Network.emulateNetworkConditions", offline=True, **conditions)
    page.one("[data-sample=sea]").click()
    page.until(lambda: page.shown("problem"))
    assert page.text("problem").startswith("The service does not answer.")
    page.cdp("Network.emulateNetworkConditions", offline=False, **conditions)
    page.sample("sea")


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_needs_no_sideways_scrolling(page: Page, width: int) -> None:
    page.open(width, 700)
    camera = page.one("#camera")
    asked = (camera.get_attribute("capture"), camera.get_attribute("accept"))
    assert asked == ("environment", "image/*")
    assert page.one("label[for=camera]").is_displayed()
    assert page.run("return document.documentElement.scrollWidth") == width
    page.sample("rocket")
    page.one("summary").click()
    assert page.run("return document.documentElement.scrollWidth") == width
    small = page.run(
        """return [...document.querySelectorAll('button:not([hidden]), .button label')]
             .map(e => e.getBoundingClientRect())
             .filter(b => b.height < 44 || b.width < 44).length"""
    )
    assert small == 0  # a finger's width


def test_what_a_screen_reader_is_told(page: Page) -> None:
    page.sample("clock")
    nodes = [n for n in page.cdp("Accessibility.getFullAXTree")["nodes"] if not n.get("ignored")]

    def name(node: dict[str, Any]) -> str:
        return node.get("name", {}).get("value", "")

    def focusable(node: dict[str, Any]) -> bool:
        properties = {p["name"]: p["value"].get("value") for p in node.get("properties", ())}
        return bool(properties.get("focusable"))

    def named(role: str) -> list[str]:
        return [name(node) for node in nodes if node["role"]["value"] == role]

    controls = [n for n in nodes if focusable(n) and n["role"]["value"] != "RootWebArea"]
    assert len(controls) >= 12
    assert [json.dumps(node) for node in controls if not name(node)] == []
    assert [n for n in named("button") if n in ("apple", "sea")] == ["apple", "sea"]
    assert named("slider") == ["Tokens at first", "Tokens after block 0", "Tokens after block 3"]
    assert named("heading")[:2] == ["hvt", "Image"]
    assert "64 → 16 → 4 tokens" in named("heading")
    assert any("29.9 M" in text for text in named("image") + named("img"))
    assert any(node["role"]["value"] == "status" for node in nodes)
    pressed = page.run("return document.querySelector('[data-sample=clock]').ariaPressed")
    assert pressed == "true"
    assert page.run("return document.documentElement.lang") == "en"
