"""A real Chromium for tests, and a page of ours in it."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
)
PATIENCE = 60  # seconds; a busy machine is slow


def find_browser() -> tuple[str, str]:
    """A Chromium and its driver, or the reason why there is none."""
    pytest.importorskip("selenium", reason="selenium is not installed: pip install 'hvt[dev]'")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("there is no Chromium here: apt-get install chromium chromium-driver")
    return browser, driver


@contextlib.contextmanager
def start_chromium(profile: Path) -> Iterator[Any]:
    browser, driver = find_browser()
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield started
    finally:
        started.quit()


class Page:
    """The page in the browser, as a person meets it."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver, self.address = driver, address

    def open(self, width: int = 1100, height: int = 900) -> "Page":
        phone = width < 500
        self.cdp("Emulation.setTouchEmulationEnabled", enabled=phone)
        features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
        self.cdp("Emulation.setEmulatedMedia", features=features)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.cdp("Emulation.setDeviceMetricsOverride", **size)
        self.driver.get(self.address)
        self.until(lambda: "classes" in self.text("model"))
        return self

    def cdp(self, command: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, parameters)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def text(self, name: str) -> str:
        return self.one(f"#{name}").text

    def shown(self, name: str) -> bool:
        return self.one(f"#{name}").is_displayed()

    def until(self, condition: Callable[[], Any]) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, PATIENCE, 0.05).until(lambda _: condition())

    def sample(self, name: str) -> "Page":
        self.one(f"[data-sample={name}]").click()
        return self.answered()

    def answered(self) -> "Page":
        self.until(lambda: self.shown("costs") or self.shown("problem"))
        assert not self.shown("problem"), self.text("problem")
        return self

    def keys(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()
