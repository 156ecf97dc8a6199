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
from quantkit.eval.measuring import embedding
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.comparison import compare
from quantkit.eval.measuring.embedding import Pictures
from quantkit.eval.measuring.generation import GenerationSettings
from quantkit.eval.pages import running
from quantkit.eval.pages.course import CourseFacts, CoursePage
from quantkit.eval.pages.images_page import write_images_page
from quantkit.eval.pages.live import LiveFacts, open_live, unwatched
from quantkit.eval.pages.methods_table import Method, write_methods
from quantkit.eval.pages.report import save_pairs, write_report

from quantkit.recovery.distill.distillation import Look
from quantkit.recovery.distill.training_progress import TrainingProgress
from quantkit.recovery.distill.validation import compare_pictures
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
    for index, name in enumerate(("fp8", "int4 & more", "2:4", "int8", "int8 sparse")):
        pairs = made(8, sigma=2.0 + 3 * index, side=48)
        save_pairs(pairs, methods / f"m{index}" / "images")
        (methods / f"m{index}" / "report.html").write_text("a report", encoding="utf-8")
        rows.append(Method(name, made_report(pairs), f"m{index}", "what to do"))
    write_methods(rows, methods, ("quantkit eval compare",))
    write_live(folder / "live", small)
    write_course(folder / "course.html")
    reports = {
        name: folder / name / "report.html" for name in ("small", "large", "beside", "lossy")
    }
    return {
        **reports,
        "images": folder / "images/report.html",
        "methods": methods / "index.html",
        "live": folder / "live/report.html",
        "course": folder / "course.html",
    }


def live_facts(pairs):
    """What the page of a running evaluation says of it."""
    settings = GenerationSettings(pairs.prompts, tuple(range(len(pairs.names))), 4)
    return LiveFacts("b against a", settings, ("quantkit eval report a b --watch",))


def write_live(folder, pairs):
    """Write the page of an evaluation that is half over, and runs.

    It does not reload: a reload would end the script that a slow machine's test is running in it.
    """
    with (
        mock.patch.object(running, "RELOAD_SECONDS", 3600),
        open_live(folder, live_facts(pairs), force=False, watch=unwatched) as page,
    ):
        page.original(0, pairs.original)
        page.packed(0, pairs.packed[:4])


def write_course(path):
    """Write the page of a recovery that is over."""
    page = CoursePage(path, CourseFacts("student", ("quantkit recover teacher -o student",)))
    rng = np.random.default_rng(0)
    wanted = np.float32(1 / 255) * np.stack(made(4, side=48).original).astype(np.float32)
    with page.open():
        for step, noise in ((0, 0.3), (50, 0.1), (100, 0.02)):
            moved = wanted + noise * rng.normal(size=wanted.shape)
            found = moved.clip(0, 1).astype(np.float32)
            score = compare_pictures(found, wanted)
            page.show(Look(step, tuple(f"ball {i}" for i in range(4)), found, wanted, score))
            page.follow(TrainingProgress(step + 1, noise, 60.0, 0.5))
