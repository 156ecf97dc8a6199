"""The pages in a real browser: what they show, what their script does, and who can use them."""

import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlparse

import numpy as np
import pytest
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.comparison import compare
from quantkit.eval.measuring.metrics import Better
from quantkit.eval.measuring.pictures import amplified_difference
from quantkit.eval.pages import live, running
from quantkit.eval.pages.report import write_report

from tests.support.browser import LARGE, launched, live_facts, shown, write_pages
from tests.support.reports import made, made_report
from tests.support.sampling import one_of_each

#: What makes a page hard or impossible to use for somebody.
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def browser():
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    return write_pages(tmp_path_factory.mktemp("pages"))


def unfold(page):
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")


def violations(page):
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        (rule["id"], [node["html"][:120] for node in rule["nodes"]][:3])
        for rule in found
        if rule["impact"] in SERIOUS
    ]


LOOKS = [(1280, "light"), (400, "dark"), (1280, "dark"), (400, "light")]


@pytest.mark.slow
@pytest.mark.parametrize("look", one_of_each(LOOKS, lambda look: look[0]), ids=str)
@pytest.mark.parametrize("name", ["small", "images", "methods", "live", "course"])
def test_everybody_can_use_the_page(browser, pages, tmp_path, name, look):
    width, scheme = look
    with shown(browser, pages[name], width=width, scheme=scheme) as found:
        page = found.page
        folder = Path(os.environ.get("QUANTKIT_SCREENSHOTS", tmp_path))
        page.screenshot(path=folder / f"{name}-{width}-{scheme}.png")
        first = page.locator(".pair img").first.bounding_box()
        assert first["y"] < 800, "a picture is on the first screen"
        assert first["width"] > 120
        unfold(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert violations(page) == []
        page.locator(".compare").first.click()
        page.screenshot(path=folder / f"{name}-{width}-{scheme}-lightbox.png")
        assert page.evaluate("document.querySelector('#lightbox').scrollWidth") <= width
        assert violations(page) == []
        assert found.problems == []


@pytest.mark.parametrize(
    "name", ["small", "large", "beside", "lossy", "images", "methods", "live", "course"]
)
def test_no_request_leaves_the_page_and_its_folder(browser, pages, name):
    with shown(browser, pages[name]) as found:
        found.page.locator("#gallery .compare").first.click()
        for key in "jfdk":
            found.page.keyboard.press(key)
        found.page.wait_for_timeout(50)
        asked = [url for url in found.requests if not url.startswith("data:")]
        files = [Path(unquote(urlparse(url).path)) for url in asked]
        assert all(url.startswith("file:") for url in asked)
        assert all(path.is_relative_to(pages[name].parent) for path in files)
        assert all(path.is_file() for path in files)
        alone = name in {"small", "large", "lossy", "images", "course"}
        assert (set(files) == {pages[name]}) == alone
        assert found.problems == []


def pair(found):
    return int(found.page.locator("#lightbox-title").text_content().removeprefix("Pair "))


def opened(found, name="002"):
    """Open a pair with the keyboard alone."""
    button = found.page.locator(f"#gallery [data-name='{name}'] .compare")
    button.focus()
    found.page.keyboard.press("Enter")
    found.page.keyboard.press("z")
    found.page.wait_for_function("document.querySelector('.under').complete")


@pytest.mark.parametrize("name", ["small", "large", "beside"])
def test_the_lightbox_shows_the_measured_pixels(browser, pages, name):
    pairs = made(8, sigma=6.0, side=48) if name == "small" else made(3, sigma=6.0, side=LARGE)
    original, packed = pairs.original[2], pairs.packed[2]
    middle = original.shape[1] // 2
    with shown(browser, pages[name]) as found:
        opened(found)
        # The labels lie over the pictures.
        found.page.add_style_tag(content=".tag { display: none }")
        seen = found.pixels(".box")
        # the divider is 4 pixels wide with its border
        assert (seen[:, : middle - 3] == original[:, : middle - 3]).all()
        assert (seen[:, middle + 3 :] == packed[:, middle + 3 :]).all()
        found.page.keyboard.press("f")
        assert (found.pixels(".box") == original).all()
        found.page.keyboard.press("f")
        assert (found.pixels(".box") == packed).all()
        found.page.keyboard.press("d")
        assert (found.pixels(".box") == amplified_difference(original, packed)).all()
        found.page.locator("[name=gain]").fill("16")
        assert (found.pixels(".box") == amplified_difference(original, packed, gain=16)).all()
        assert found.problems == []


def test_lossy_pictures_have_the_difference_of_the_measured_ones(browser, pages):
    pairs = made(3, sigma=6.0, side=LARGE)
    expected = amplified_difference(pairs.original[2], pairs.packed[2]).astype(int)
    with shown(browser, pages["lossy"]) as found:
        opened(found)
        found.page.keyboard.press("d")
        found.page.add_style_tag(content=".tag { display: none }")
        found.page.wait_for_function("document.querySelector('.under').complete")
        seen = found.pixels(".box").astype(int)
        # Noise is the worst for an encoder; brightness and place must be right all the same.
        assert np.abs(seen.mean((0, 1)) - expected.mean((0, 1))).max() < 8
        grey = [picture.mean(2).ravel() for picture in (seen, expected)]
        assert np.corrcoef(*grey)[0, 1] > 0.7


def test_keys_go_through_the_pairs_that_are_shown(browser, pages):
    with shown(browser, pages["small"]) as found:
        page = found.page
        page.locator("[name=order]").select_option("given")
        opened(found, "000")
        seen = []
        for key in "jjk":
            page.keyboard.press(key)
            seen.append(pair(found))
        assert seen == [1, 2, 1]
        assert "ball 1" in page.locator("#lightbox .facts").text_content()
        page.keyboard.press("k")
        page.keyboard.press("k")
        assert pair(found) == 7
        page.keyboard.press("Escape")
        assert not page.locator("#lightbox").is_visible()
        assert page.evaluate("document.activeElement.className") == "compare"
        page.locator("[name=search]").fill("ball 3")
        page.locator("#gallery .pair:visible .compare").click()
        page.keyboard.press("j")
        assert pair(found) == 3


def test_the_divider_moves_by_keys_and_by_pointer(browser, pages):
    with shown(browser, pages["small"]) as found:
        page = found.page
        page.locator(".look img").first.click()
        split = page.locator("[name=split]")
        page.keyboard.press("ArrowRight")
        assert split.input_value() == "55"
        box = page.locator(".box").bounding_box()
        page.mouse.click(box["x"] + box["width"] / 4, box["y"] + 50)
        assert abs(float(split.input_value()) - 25) <= 1


def test_zoom_moves_both_pictures_and_keeps_the_place(browser, pages):
    with shown(browser, pages["large"]) as found:
        page = found.page
        page.locator(".look img").first.click()
        for _ in range(4):
            page.keyboard.press("+")
        width = page.locator(".under").bounding_box()["width"]
        assert width == pytest.approx(8 * LARGE)
        stage = page.locator(".stage").bounding_box()
        page.mouse.move(stage["x"] + 400, stage["y"] + 300)
        page.mouse.down()
        page.mouse.move(stage["x"] + 200, stage["y"] + 200)
        page.mouse.up()
        boxes = [page.locator(name).bounding_box() for name in (".under", ".over")]
        assert boxes[0] == boxes[1]
        offset = page.evaluate("document.querySelector('.stage').scrollLeft")
        assert offset == pytest.approx((8 * LARGE - stage["width"]) / 2 + 200, abs=12)


def names(page):
    figures = page.locator("#gallery .pair:visible").all()
    return [figure.get_attribute("data-name") for figure in figures]


def test_pairs_are_sorted_filtered_and_searched(browser, pages):
    with shown(browser, pages["small"]) as found:
        page = found.page
        scores = compare(made(8, sigma=6.0, side=48), Backbones()).scores
        for metric in ("psnr", "mse", "ssim"):
            page.locator("[name=metric]").select_option(metric)
            sign = 1 if scores[metric].metric.better is Better.HIGHER else -1
            values = [sign * value for value in scores[metric].values]
            down = [f"{i:03d}" for i in sorted(range(8), key=values.__getitem__)]
            assert names(page) == down
        page.locator("[name=order]").select_option("best")
        assert names(page) == down[::-1]
        page.locator("[name=metric]").select_option("psnr")
        page.locator("[name=least]").fill("1000")
        assert names(page) == ["000"], "identical pictures have an infinite PSNR"
        page.locator("[name=least]").fill("")
        page.locator("[name=search]").fill("BALL 5")
        assert names(page) == ["005"]
        assert page.locator("#gallery output").text_content() == "1 of 8"


def test_methods_are_picked_by_click(browser, pages):
    with shown(browser, pages["methods"]) as found:
        page = found.page
        first = page.locator("#gallery .pair").first

        def sides():
            return [
                side.get_attribute("data-side") for side in first.locator(".side:visible").all()
            ]

        assert sides() == ["original", "fp8", "int4 & more", "2:4", "int8"]
        page.get_by_label("fp8").uncheck()
        page.get_by_label("int8 sparse").check()
        assert sides() == ["original", "int4 & more", "2:4", "int8", "int8 sparse"]
        first.locator("[data-side='2:4'] img").click()
        assert page.locator("[name=right]").input_value() == "2:4"
        page.keyboard.press("j")
        assert page.locator("[name=right]").input_value() == "2:4"
        page.locator("[name=left]").select_option("int8")
        assert page.locator(".tag.left").text_content() == "int8"
        for link in page.locator(".tiles a").all():
            assert (pages["methods"].parent / link.get_attribute("href")).is_file()


def test_layers_are_searched_sorted_and_found_on_the_map(browser, pages):
    with shown(browser, pages["small"]) as found:
        page = found.page
        unfold(page)
        rows = page.locator("#layer-table tbody tr:visible")
        assert rows.count() == 5
        page.locator("[name=layer]").fill("not packed")
        assert rows.count() == 1
        page.locator("[name=layer]").fill("")
        page.get_by_role("button", name="Weight error").click()
        page.get_by_role("button", name="Weight error").click()
        assert rows.first.locator("td").first.text_content() == "4"
        page.locator(".segment").nth(2).click()
        assert rows.count() == 1
        assert "block.2.conv" in rows.first.text_content()


def test_links_open_what_they_point_at(browser, pages):
    with shown(browser, pages["small"]) as found:
        page = found.page
        table = page.locator("#kernels table")
        assert not table.is_visible()
        for _ in range(2):
            page.locator(".contents a[href='#kernels']").click()
            table.wait_for(state="visible")
            page.locator("#kernels > summary").click()
            table.wait_for(state="hidden")
        for link in page.locator(".contents a").all():
            assert page.locator(link.get_attribute("href")).count() == 1


def test_paper_has_everything_unfolded(browser, pages):
    with shown(browser, pages["small"], media="print") as found:
        page = found.page
        for part in ("#why p", "#metrics table", "#layer-table", "#kernels table", "#made pre"):
            assert page.locator(part).first.bounding_box()["height"] > 10
        for part in (".contents", ".controls", ".compare"):
            assert not page.locator(part).first.is_visible()


def test_without_a_script_the_page_still_shows_everything(browser, pages):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(pages["small"].as_uri())
    assert page.locator("#gallery .pair img").count() == 16
    assert not page.locator("#gallery .controls").is_visible()
    assert not page.locator(".compare").first.is_visible()
    page.locator("#kernels > summary").click()
    assert page.locator("#kernels table").is_visible()
    context.close()


def eventually(page, expression):
    """Wait until it is true; wait_for_function needs eval, which the page's policy forbids."""
    from playwright.sync_api import Error

    for _ in range(200):
        # A page that loads itself again has no context for a moment.
        with suppress(Error):
            if page.evaluate(expression):
                return
        page.wait_for_timeout(50)
    pytest.fail(f"never true: {expression}")


def open_first_pair(page):
    """Click until it stays open: a click while the page loads itself again is lost."""
    from playwright.sync_api import Error

    for _ in range(50):
        with suppress(Error):
            if not page.locator("#lightbox").is_visible():
                page.locator("#gallery .compare").first.click(timeout=500)
            # As long as a page loads that was on its way.
            page.wait_for_timeout(400)
            if page.locator("#lightbox").is_visible():
                return
    pytest.fail("no pair opens")


def test_a_live_page_follows_its_evaluation_and_stays_where_it_was(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "RELOAD_SECONDS", 0.2)
    pairs, folder = made(8, sigma=6.0, side=48), tmp_path / "out"
    with live.open_live(folder, live_facts(pairs), force=False, watch=live.unwatched) as run:
        run.original(0, pairs.original)
        run.packed(0, pairs.packed[:3])
        with shown(browser, folder / "report.html", height=500) as found:
            page = found.page
            page.locator("[name=order]").select_option("best")
            # Again and again until a reload has seen it: a click may meet a page that goes away.
            shut = "history.state?.shut?.includes('waiting')"
            close = "document.activeElement.blur(), document.querySelector('#waiting').open = false"
            eventually(page, f"({close}, {shut})")
            # A reload that is on its way has kept the place of before.
            kept = "window.scrollTo(0, 700), Math.abs(history.state?.y - 700) < 2"
            eventually(page, f"(document.activeElement.blur(), {kept})")
            run.packed(3, pairs.packed[3:6])
            eventually(page, "document.querySelectorAll('#gallery .pair').length === 6")
            eventually(page, "Math.abs(window.scrollY - 700) < 2")
            assert page.locator("[name=order]").input_value() == "best"
            assert names(page)[0] == "000"
            assert not page.locator("#waiting .grid").is_visible()
            # who compares a pair is not disturbed
            open_first_pair(page)
            run.packed(6, pairs.packed[6:])
            page.wait_for_timeout(600)
            assert page.locator("#lightbox").is_visible()
            assert page.locator("#gallery .pair").count() == 6
            page.keyboard.press("Escape")
            eventually(page, "document.querySelectorAll('#gallery .pair').length === 8")
            write_report(made_report(pairs), pairs, folder, force=True)
            page.wait_for_selector("#layers", state="attached")
            page.evaluate("window.mark = 1")
            page.wait_for_timeout(600)
            assert page.evaluate("window.mark") == 1, "the finished page stays"
            assert found.problems == []


def test_any_step_of_a_recovery_is_compared_with_the_original(browser, pages):
    with shown(browser, pages["course"]) as found:
        page = found.page
        sides = page.locator("#gallery .pair").first.locator(".side")
        labels = [side.get_attribute("data-side") for side in sides.all()]
        assert labels == ["original", "step 0", "step 50", "step 100"]
        sides.nth(2).locator("img").click()
        assert page.locator("[name=right]").input_value() == "step 50"
        page.locator("[name=left]").select_option("step 0")
        assert page.locator(".tag.left").text_content() == "step 0"
        page.keyboard.press("Escape")
        assert page.locator("#curves svg").count() == 2
        assert page.locator("#age").count() == 0
