"""Chromium without a window, driven by Selenium, with what tests of the page ask it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

WAIT_S = 60.0  # what is waited for at most, where a test would else hang


def why_missing() -> str:
    """Why there is no browser here; "" if there is one."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "Selenium is missing: pip install 'offspec[test]'"
    if not (shutil.which("chromium") or shutil.which("google-chrome")) or not shutil.which("chromedriver"):
        return "Chromium or its driver is missing: apt-get install chromium chromium-driver"
    return ""


@contextmanager
def chromium(width: int = 1280, height: int = 800, *flags: str) -> Iterator[Browser]:
    if reason := why_missing():
        pytest.skip(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium") or shutil.which("google-chrome"))
    size = f"--window-size={width},{height}"
    # Without what costs processor time and the page does not need.
    needless = ("extensions", "background-networking", "component-update", "software-rasterizer", "gpu")
    quiet = ("--no-first-run", *(f"--disable-{name}" for name in needless))
    for flag in (*quiet, "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", size, *flags):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(shutil.which("chromedriver"))))
    driver.set_script_timeout(WAIT_S)
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """A browser with one page or several tabs."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)
        self.until("return document.activeElement?.id === 'prompt'")  # the page has begun

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def until(self, script: str, *args: Any) -> Any:
        """Wait until a script's value is true, and return it."""
        end_s = time.monotonic() + WAIT_S
        while True:
            with suppress(self._replaced):
                if value := self.run(script, *args):
                    return value
            assert time.monotonic() < end_s, (script, self.text("body"), self.errors())
            time.sleep(0.03)

    @property
    def _replaced(self) -> type[Exception]:
        from selenium.common.exceptions import JavascriptException

        found: type[Exception] = JavascriptException
        return found

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def press(self, button: str, within: str = "body") -> None:
        """Click the last button with this text."""
        buttons = "[...document.querySelectorAll(arguments[0] + ' button')]"
        self.until(f"return {buttons}.findLast(each => each.textContent === arguments[1])", within, button).click()

    def keys(self, *keys: str) -> None:
        self.find("body").send_keys(*keys)

    def say(self, text: str) -> None:
        """Type a message, and send it."""
        self.find("#prompt").send_keys(text + "\n")

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", selector))

    def wait_for_answer(self) -> str:
        """The text of the last answer, when it is over."""
        answers = "[...document.querySelectorAll('.assistant')]"
        self.until(f"return {answers}.at(-1)?.getAttribute('aria-busy') === 'false'")
        return self.texts(".assistant .body")[-1]

    def errors(self) -> list[str]:
        """Messages of the console that tell of faults: exceptions, and what the policy forbade."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


def wait(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.03)
