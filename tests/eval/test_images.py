"""Pictures: pixels, differences, files and folders of them."""

import numpy as np
import pytest
from PIL import Image
from quantkit.eval.images import (
    amplified_difference,
    match_folders,
    read_image,
    save_png,
    to_pixels,
)

from quantkit.errors import InputError, NonFiniteError, ShapeError
from tests.support.pictures import made_pairs, pixels, write_folders


def test_pixels_round_and_saturate():
    values = np.array([[[-0.5, 0.0, 0.5], [1.0, 1.5, 1 / 255]]])
    assert to_pixels(values, name="x").tolist() == [[[0, 0, 128], [255, 255, 1]]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_pictures_with_nan_or_inf_are_named(bad):
    values = np.zeros((4, 4, 3))
    values[1, 2, 0] = bad
    with pytest.raises(NonFiniteError, match=r"packed, prompt 3 \('a ball'\): 1 of 48 values"):
        to_pixels(values, name="packed, prompt 3 ('a ball')")


def test_difference_is_amplified_and_saturates():
    first = np.full((1, 1, 3), 100, np.uint8)
    second = np.array([[[100, 97, 200]]], np.uint8)
    assert amplified_difference(first, second, gain=8).tolist() == [[[0, 24, 255]]]


def test_png_round_trip_is_exact(tmp_path):
    save_png(pixels(), tmp_path / "a" / "x.png")
    assert (read_image(tmp_path / "a" / "x.png") == pixels()).all()


def test_grey_becomes_rgb_and_transparency_is_refused(tmp_path):
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(tmp_path / "grey.png")
    assert (read_image(tmp_path / "grey.png") == 7).all()
    Image.new("RGBA", (8, 8), (1, 2, 3, 0)).save(tmp_path / "clear.png")
    with pytest.raises(InputError, match="transparent pixels"):
        read_image(tmp_path / "clear.png")
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(InputError, match="wanted an 8-bit RGB or grey picture"):
        read_image(tmp_path / "deep.png")
    (tmp_path / "text.png").write_text("hello")
    with pytest.raises(InputError, match="not a picture"):
        read_image(tmp_path / "text.png")


def test_folders_are_matched_by_name(tmp_path):
    pairs = made_pairs(3)
    found = match_folders(*write_folders(tmp_path, pairs))
    assert found.names == pairs.names
    assert all((a == b).all() for a, b in zip(found.packed, pairs.packed, strict=True))


def test_folders_that_do_not_match_are_refused(tmp_path):
    first, second = write_folders(tmp_path, made_pairs(3))
    with pytest.raises(InputError, match="2 prompts for 3 pictures"):
        match_folders(first, second, ("a", "b"))
    save_png(pixels(width=48), second / "001.png")
    with pytest.raises(ShapeError, match="001: 40x48 against 48x48"):
        match_folders(first, second)
    (second / "001.png").unlink()
    with pytest.raises(InputError, match=r"packed: 1 of 3 pictures .* 001.png"):
        match_folders(first, second)
    with pytest.raises(InputError, match=r"packed: 1 of 3 pictures"):
        match_folders(second, first)
    with pytest.raises(InputError, match="not a folder"):
        match_folders(first, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no pictures"):
        match_folders(first, tmp_path / "empty")
    save_png(pixels(), first / "000.bmp.png")
    Image.fromarray(pixels()).save(first / "000.bmp")
    with pytest.raises(InputError, match="have the same name"):
        match_folders(first, second)
