"""Pictures: pixels, differences, files and folders of them."""

import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms
from quantkit.eval.measuring.pictures import (
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
    with pytest.raises(InputError, match="expected an 8-bit RGB or grey picture"):
        read_image(tmp_path / "deep.png")
    (tmp_path / "text.png").write_text("hello")
    with pytest.raises(InputError, match="not a picture"):
        read_image(tmp_path / "text.png")


@pytest.mark.parametrize("turn", range(1, 9))
def test_pictures_are_turned_as_exif_says(tmp_path, turn):
    """Turned and saved with what turns it back, of which Pillow has a table of its own."""
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    picture = Image.fromarray(pixels(width=32))
    stored = picture.transpose(Image.Transpose(back[turn])) if turn > 1 else picture
    exif = Image.Exif()
    exif[0x0112] = turn
    stored.save(tmp_path / "x.png", exif=exif)
    assert (read_image(tmp_path / "x.png") == pixels(width=32)).all()


def png_of_16_bits(path, colour, channels):
    """Write a PNG that Pillow cannot write, by the PNG specification."""

    def chunk(kind, data):
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    rows = (b"\0" + np.full((4, channels), 0x1234, ">u2").tobytes()) * 4
    header = struct.pack(">IIBBBBB", 4, 4, 16, colour, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_pictures_of_16_bits_a_channel_are_refused(tmp_path, colour, channels):
    png_of_16_bits(tmp_path / "deep.png", colour, channels)
    with pytest.raises(InputError, match="16 bits a channel, expected an 8-bit"):
        read_image(tmp_path / "deep.png")


def test_palettes_with_one_clear_colour_are_refused_and_others_read(tmp_path):
    image = Image.new("P", (8, 8), 1)
    image.putpalette([9, 9, 9, 1, 2, 3])
    image.save(tmp_path / "palette.png")
    assert (read_image(tmp_path / "palette.png") == (1, 2, 3)).all()
    image.save(tmp_path / "clear.png", transparency=1)
    with pytest.raises(InputError, match="transparent pixels"):
        read_image(tmp_path / "clear.png")


def test_pictures_that_would_be_measured_as_others_are_refused(tmp_path):
    image = Image.new("RGB", (8, 8), (200, 10, 10))
    other = image.copy()
    other.putpixel((0, 0), (0, 0, 0))
    image.save(tmp_path / "moving.webp", save_all=True, append_images=[other], lossless=True)
    with pytest.raises(InputError, match="2 pictures, expected one"):
        read_image(tmp_path / "moving.webp")
    image.convert("CMYK").save(tmp_path / "print.jpg")
    with pytest.raises(InputError, match="mode CMYK"):
        read_image(tmp_path / "print.jpg")
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    image.save(tmp_path / "lab.png", icc_profile=lab)
    with pytest.raises(InputError, match=r"profile 'Lab identity.*', expected sRGB; convert"):
        read_image(tmp_path / "lab.png")
    image.save(tmp_path / "odd.png", icc_profile=b"no profile")
    with pytest.raises(InputError, match=r"cannot be read.*, expected sRGB"):
        read_image(tmp_path / "odd.png")
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    image.save(tmp_path / "srgb.png", icc_profile=srgb)
    assert (read_image(tmp_path / "srgb.png") == (200, 10, 10)).all()


def test_files_that_break_the_reader_are_no_pictures(tmp_path, monkeypatch):
    save_png(pixels(), tmp_path / "x.png")
    whole = (tmp_path / "x.png").read_bytes()
    for length in (0, 8, 30, 60, len(whole) // 2):
        (tmp_path / "cut.png").write_bytes(whole[:length])
        with pytest.raises(InputError, match="not a picture"):
            read_image(tmp_path / "cut.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 16)
    with pytest.raises(InputError, match=r"not a picture that Pillow can read .*exceeds limit"):
        read_image(tmp_path / "x.png")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(InputError, match="a named pipe, expected a file"):
        read_image(tmp_path / "pipe.png")


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
