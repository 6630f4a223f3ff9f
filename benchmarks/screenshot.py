"""Take `docs/serve-page.png`: the page of `hvt serve` after a click on a sample image.

    python benchmarks/screenshot.py [--out FILE.png] [--sample NAME] [--width N] [--dark]

It starts `hvt serve cifar100`, whose model pools, and needs Chromium, its driver and selenium.
`--address` visits a service that is already running.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from hvt.files import atomic_write

PATIENCE = 120  # seconds
COLOURS = 256
"""Enough for the page and its small images, in a third of the bytes."""
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def main() -> None:
    default = Path(__file__).parents[1] / "docs/serve-page.png"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--sample", default="sunflower", help="which image to click on")
    parser.add_argument("--width", type=int, default=1100, help="of the window, in pixels")
    parser.add_argument("--dark", action="store_true", help="in the dark colours")
    parser.add_argument("--address", help="of a running service, such as http://127.0.0.1:8000")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        address = args.address or stack.enter_context(service())
        driver = stack.enter_context(browser())
        image = take(driver, address, args.sample, args.width, args.dark)
    few = Image.open(io.BytesIO(image)).convert("RGB").quantize(COLOURS, kmeans=2)
    with atomic_write(args.out) as temporary:
        few.save(temporary, "PNG", optimize=True)
    print(f"{args.out} ({args.out.stat().st_size / 1e3:.0f} kB)")


@contextlib.contextmanager
def service() -> Iterator[str]:
    command = [sys.executable, "-m", "hvt", "serve", "cifar100", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            match = re.search(r"http://\S+", process.stdout.readline())
            if match is None:
                raise SystemExit("hvt serve did not start")
            yield match[0]
        finally:
            process.terminate()


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def take(driver: Any, address: str, sample: str, width: int, dark: bool) -> bytes:
    """The whole page as PNG, once it has answered twice: the first time warms it up."""
    features = [
        {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def finished(_: Any) -> bool:
        return driver.find_element("id", "costs").is_displayed()

    for _ in range(2):
        driver.get(address)
        driver.find_element("css selector", f'[data-sample="{sample}"]').click()
        WebDriverWait(driver, PATIENCE, 0.05).until(finished)
    driver.execute_script("document.activeElement.blur()")
    height = driver.execute_script("return document.querySelector('footer').offsetTop + 12")
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size | {"height": height})
    return driver.get_screenshot_as_png()


if __name__ == "__main__":
    main()
