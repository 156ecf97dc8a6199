"""Screenshots of the demo's page and of one of its reports, which README and guides show.

make demo && .venv/bin/python docs/make_screenshots.py demo-output
"""

import io
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image

IMAGES = Path(__file__).parent / "images"
#: The report that is shown, of the demo's.
SHOWN = "report-budget-int8"
#: Of the contact sheet: pairs, and the side of a picture in pixels.
PAIRS, SIDE = 8, 128


def main(demo: Path) -> None:
    """Write the sheet of both pipelines, and the pages at 1280 pixels and on a phone."""
    report = demo / SHOWN
    contact_sheet(report / "images").save(IMAGES / "before-after.webp", quality=90, method=6)
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto((demo / "index.html").absolute().as_uri())
        save(page.screenshot(), "demo")
        page.goto((report / "report.html").absolute().as_uri())
        save(page.screenshot(), "report")
        page.locator(".look img").first.click()
        page.locator("[name=split]").fill("45")
        save(page.screenshot(), "lightbox")
        page.keyboard.press("Escape")
        page.locator(".contents a[href='#layers']").click()
        save(page.screenshot(), "layers")
        show_phone(browser, report)
        browser.close()


def show_phone(browser: Any, report: Path) -> None:
    """Write the first screen of a dark phone."""
    page = browser.new_page(viewport={"width": 400, "height": 800}, color_scheme="dark")
    page.goto((report / "report.html").absolute().as_uri())
    save(page.screenshot(), "phone")


def contact_sheet(images: Path) -> Image.Image:
    """Return the first pairs, the originals above the packed ones."""
    gap = SIDE // 16
    sheet = Image.new("RGB", (PAIRS * (SIDE + gap) - gap, 2 * SIDE + gap), "white")
    for row, side in enumerate(("original", "packed")):
        for column, path in enumerate(sorted((images / side).iterdir())[:PAIRS]):
            with Image.open(path) as picture:
                shown = picture.resize((SIDE, SIDE), Image.Resampling.NEAREST)
            sheet.paste(shown, (column * (SIDE + gap), row * (SIDE + gap)))
    return sheet


def save(png: bytes, name: str) -> None:
    """Write a screenshot as WebP."""
    with Image.open(io.BytesIO(png)) as picture:
        picture.convert("RGB").save(IMAGES / f"{name}.webp", quality=85, method=6)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
