"""The contact sheet: pictures in a grid, each over its caption."""

import textwrap
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

#: Pictures are enlarged three times; the rest is white space and four lines of caption.
_SCALE, _GAP, _LINES, _LINE = 3, 14, 4, 14
_COLUMNS, _LETTERS, _FONT_SIZE = 6, 33, 12


def save_sheet(pictures: Tensor, texts: list[str], path: Path) -> None:
    """Write a PNG in which every pixel of a picture is a square, so that nothing is smoothed over.

    Args:
        pictures: (n, 3, side, side) in [0, 1], red green blue.
        texts: n captions.
        path: the PNG file.
    """
    side = pictures.shape[-1] * _SCALE
    width, height = side + _GAP, side + _GAP + _LINES * _LINE
    rows = -(-len(texts) // _COLUMNS)
    sheet = Image.new("RGB", (_COLUMNS * width + _GAP, rows * height + _GAP), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(_FONT_SIZE)
    for index, (picture, text) in enumerate(zip(pictures, texts, strict=True)):
        left = _GAP + index % _COLUMNS * width
        top = _GAP + index // _COLUMNS * height
        pixels = (picture.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)
        image = Image.fromarray(pixels.cpu().numpy())
        sheet.paste(image.resize((side, side), Image.Resampling.NEAREST), (left, top))
        for line, words in enumerate(textwrap.wrap(text, _LETTERS)):
            pen.text((left, top + side + 3 + line * _LINE), words, fill="black", font=font)
    sheet.save(path, optimize=True)
