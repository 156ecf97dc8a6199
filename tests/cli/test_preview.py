"""Pictures on a terminal, and none elsewhere."""

import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from rich.style import Style

from quantkit.cli import preview
from quantkit.cli.preview import half_blocks, print_pair


def picture(tmp_path, name, height=4, width=6):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / name)
    return pixels, tmp_path / name


@pytest.mark.parametrize("height", [4, 5], ids=["even", "odd"])
def test_a_letter_is_two_pixels(tmp_path, height):
    pixels, path = picture(tmp_path, "a.png", height)
    with Image.open(path) as image:
        lines = half_blocks(image, 6)
    assert len(lines) == (height + 1) // 2
    below = np.vstack([pixels, np.zeros((1, 6, 3), np.uint8)])
    for y, line in enumerate(lines):
        assert line.plain == "\u2580" * 6
        for x, span in enumerate(line.spans):
            assert isinstance(span.style, Style)
            assert tuple(span.style.color.triplet) == tuple(pixels[2 * y, x])
            assert tuple(span.style.bgcolor.triplet) == tuple(below[2 * y + 1, x])


@pytest.mark.parametrize("mode", ["L", "RGBA", "P"])
def test_wide_and_odd_pictures_fit(mode):
    assert len(half_blocks(Image.new(mode, (400, 3)), 10)) == 1
    assert len(half_blocks(Image.new(mode, (3, 400)), 1)) == 67


def terminal_of(width):
    return Console(force_terminal=True, color_system="truecolor", width=width)


@pytest.mark.parametrize(("width", "columns"), [(80, 38), (20, 9), (200, 38)])
def test_both_pictures_fit_the_terminal(tmp_path, monkeypatch, capsys, width, columns):
    monkeypatch.setattr(preview, "terminal", lambda: terminal_of(width))
    print_pair("worst", picture(tmp_path, "a.png")[1], picture(tmp_path, "b.png")[1])
    title, *lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert title == "worst"
    assert {len(line) for line in lines} == {2 * columns + 2}


def test_nothing_is_shown_in_a_pipe_or_without_colours(tmp_path, monkeypatch, capsys):
    files = picture(tmp_path, "a.png")[1], picture(tmp_path, "b.png")[1]
    print_pair("worst", *files)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_pair("worst", *files)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("pictures", [True, False])
def test_the_worst_pair_is_shown_when_it_is_another_one(tmp_path, monkeypatch, capsys, pictures):
    from quantkit.eval.pages.live import SoFar

    monkeypatch.setattr(preview, "terminal", lambda: terminal_of(80))
    files = picture(tmp_path, "a.png")[1], picture(tmp_path, "b.png")[1]
    found = SoFar(3, 8, "002", 0.91234, *files, new=True)
    preview.print_so_far(replace(found, new=False), pictures=pictures)
    assert capsys.readouterr() == ("", "")
    preview.print_so_far(found, pictures=pictures)
    out, err = capsys.readouterr()
    assert ("\u2580" in out) == pictures
    assert "3 of 8 pictures so far; worst pair, 002: SSIM 0.9123" in (out if pictures else err)
