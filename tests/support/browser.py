"""A real browser: Chromium of the system, driven by Playwright; and pages for it to show."""

import io
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from quantkit.eval import embedding
from quantkit.eval.backbones import Backbones
from quantkit.eval.comparison import compare
from quantkit.eval.embedding import Pictures
from quantkit.eval.images_page import write_images_page
from quantkit.eval.methods import Method, write_methods
from quantkit.eval.report import save_pairs, write_report

from tests.support.reports import made, made_report

NAMES = ("chromium", "chromium-browser", "google-chrome")
#: Larger than what the list of pairs shows, so that the page stores it once more.
LARGE = embedding.LIST_SIDE + 16


def find_browser():
    """Return the path of Chromium; skip when it is missing, fail where CI demands it."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    try:
        import axe_playwright_python
        import playwright
    except ImportError as error:
        return _missing(f"{error}; pip install -e '.[dev]'")
    del axe_playwright_python, playwright
    return found or _missing(f"none of {', '.join(NAMES)}; apt-get install chromium")


def _missing(words):
    if os.environ.get("QUANTKIT_REQUIRE_BROWSER") == "1":
        pytest.fail(f"no browser: {words}")
    pytest.skip(f"no browser: {words}")


@contextmanager
def launched():
    """A browser whose colours are those of the files."""
    path = find_browser()
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--force-color-profile=srgb", "--disable-gpu"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@dataclass
class Shown:
    """A page that is open, and what went wrong on it."""

    page: Any
    problems: list = field(default_factory=list)
    requests: list = field(default_factory=list)

    def pixels(self, selector):
        """What the screen shows of an element."""
        data = self.page.locator(selector).screenshot()
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@contextmanager
def shown(browser, path, *, width=1280, height=800, scheme="light", media="screen"):
    """Open a file in a window of its own."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    found = Shown(page)
    page.on("console", lambda message: found.problems.append(message.text))
    page.on("pageerror", lambda error: found.problems.append(str(error)))
    page.on("request", lambda request: found.requests.append(request.url))
    page.emulate_media(media=media)
    page.goto(path.as_uri())
    yield found
    context.close()


def write_pages(folder):
    """Write a page of every kind; return them by name."""
    small, large = made(8, sigma=6.0, side=48), made(3, sigma=6.0, side=LARGE)
    write_report(made_report(small), small, folder / "small", force=False)
    write_report(made_report(large), large, folder / "large", force=False)
    write_report(
        made_report(large), large, folder / "beside", force=False, pictures=Pictures.BESIDE
    )
    with mock.patch.object(embedding, "QUALITIES", (90,)):
        write_report(made_report(large), large, folder / "lossy", force=False)
    write_images_page(
        compare(small, Backbones()), (), small, folder / "images", force=False,
        pictures=Pictures.INSIDE, title="b against a", commands=("quantkit eval images a b",),
        values={},
    )  # fmt: skip
    methods = folder / "methods"
    methods.mkdir()
    rows = []
    for index, name in enumerate(("fp8", "int4 & more", "4:2", "int8", "int8 sparse")):
        pairs = made(8, sigma=2.0 + 3 * index, side=48)
        save_pairs(pairs, methods / f"m{index}" / "images")
        (methods / f"m{index}" / "report.html").write_text("a report", encoding="utf-8")
        rows.append(Method(name, made_report(pairs), f"m{index}", "what to do"))
    write_methods(rows, methods, ("quantkit eval compare",))
    reports = {
        name: folder / name / "report.html" for name in ("small", "large", "beside", "lossy")
    }
    return {**reports, "images": folder / "images/report.html", "methods": methods / "index.html"}
