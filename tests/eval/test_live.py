"""The page of an evaluation that runs: what is in the folder at each moment, and what ends it."""

import re

import numpy as np
import pytest
from PIL import Image
from quantkit.eval.pages.live import open_live, unwatched
from quantkit.eval.pages.report import KIND, write_report

from quantkit.errors import InputError, OutputError
from quantkit.progress import silent
from quantkit.storage.places import check_directory
from quantkit.workflow.evaluate import evaluate
from tests.support.browser import live_facts
from tests.support.reports import made, made_report

RELOADS = 'http-equiv="refresh"'


def text_of(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_page_fills_and_the_report_takes_its_place(tmp_path):
    pairs, told = made(6, sigma=6.0, side=48), []
    folder = tmp_path / "out"
    with open_live(folder, live_facts(pairs), force=False, watch=told.append) as page:
        assert "0 of 6 pictures so far" in text_of(folder)
        page.original(0, pairs.original[:4])
        assert "4 of the original alone" in text_of(folder)
        page.original(4, pairs.original[4:])
        for start in (0, 3):
            page.packed(start, pairs.packed[start : start + 3])
            seen = text_of(folder)
            assert f"{start + 3} of 6 pictures so far" in seen
            assert seen.count('id="pair-') == start + 3
            assert RELOADS in seen
            for source in set(re.findall(r'src="(images/[^"]*)"', seen)):
                assert (folder / source).is_file()
        step = page.under(silent)
        step("error of every step", 0, 4)
        assert "Now: error of every step" in text_of(folder)
        write_report(made_report(pairs), pairs, folder, force=True)
    assert RELOADS not in text_of(folder)
    assert "live" not in text_of(folder).partition("<main")[0].partition("</style>")[2]
    assert [(found.done, found.total, found.new) for found in told] == [(3, 6, True), (6, 6, True)]
    # sigma grows from pair to pair
    assert [found.name for found in told] == ["002", "005"]
    assert told[-1].ssim == pytest.approx(made_report(pairs).comparison.scores["ssim"].values[5])
    assert told[-1].words.startswith("6 of 6 pictures so far; worst pair, 005: SSIM ")


def test_measured_pictures_are_the_files(tmp_path):
    pairs, told = made(2, sigma=6.0, side=48), []
    with open_live(tmp_path / "out", live_facts(pairs), force=False, watch=told.append) as page:
        page.original(0, pairs.original)
        page.packed(0, pairs.packed)
        for path, pixels in (
            (told[0].original, pairs.original[1]), (told[0].packed, pairs.packed[1]),
        ):  # fmt: skip
            with Image.open(path) as image:
                assert (np.asarray(image) == pixels).all()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyboardInterrupt(), "Not finished (interrupted): 2 of 6 pictures, and no verdict."),
        (InputError("out of <memory>"), "ended by an error: out of &lt;memory&gt;"),
        (ValueError(), "Not finished (ended by an error): 2 of 6"),
    ],
    ids=["keyboard", "error", "no words"],
)
def test_a_run_that_ends_early_leaves_a_page_that_says_so(tmp_path, error, words):
    pairs, folder = made(6, sigma=6.0, side=48), tmp_path / "out"
    with (
        pytest.raises(type(error)),
        open_live(folder, live_facts(pairs), force=False, watch=unwatched) as page,
    ):
        page.original(0, pairs.original)
        page.packed(0, pairs.packed[:2])
        raise error
    assert words in text_of(folder)
    assert RELOADS not in text_of(folder)
    assert text_of(folder).count('id="pair-') == 2
    # the next run may replace it with --force, and not without
    check_directory(folder, kind=KIND, force=True)
    with pytest.raises(OutputError, match="exists already"):
        check_directory(folder, kind=KIND, force=False)


def test_a_killed_run_leaves_a_folder_that_force_replaces(tmp_path):
    pairs, folder = made(3, sigma=6.0, side=48), tmp_path / "out"
    with open_live(folder, live_facts(pairs), force=False, watch=unwatched) as page:
        page.original(0, pairs.original)
        # as it is now, without what the end of the body does
        check_directory(folder, kind=KIND, force=True)
        (folder / "notes.txt").write_text("mine")
        with pytest.raises(OutputError, match=re.escape("notes.txt")):
            check_directory(folder, kind=KIND, force=True)


def test_watching_needs_an_output():
    with pytest.raises(InputError, match="watch: fills a page, and no output is given"):
        evaluate("model", "packed", watch=unwatched, device="cpu")
