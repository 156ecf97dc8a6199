"""The shapes that kernels are measured on: a literal table, or a file of the user's own."""

import csv
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import ArtefactError
from quantkit.storage.inputfile import read_text
from quantkit.storage.jsonfile import parse_json, short

_MAX_BYTES = 2**20
#: Kernels index rows and columns with 32 bits.
_MAX_SIZE = 2**31 - 1


@dataclass(frozen=True)
class Shape:
    """M tokens times N outputs, summed over K inputs."""

    m: int
    n: int
    k: int

    @property
    def label(self) -> str:
        """``MxNxK``."""
        return f"{self.m}x{self.n}x{self.k}"


#: group -> shapes. SDXL: batch 2 at 1024x1024 (attention and GEGLU layers of 640 and 1280
#: channels); FLUX.1: 4096 picture and 512 text tokens, 3072 channels. ``host`` is for CPUs, which
#: run the kernels lane by lane: a tile and more, tails, and few tokens.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "sdxl": (
        Shape(8192, 640, 640),
        Shape(8192, 5120, 640),
        Shape(2048, 1280, 1280),
        Shape(2048, 10240, 1280),
        Shape(2048, 1280, 5120),
    ),
    "flux": (Shape(4608, 3072, 3072), Shape(4608, 12288, 3072), Shape(4608, 3072, 15360)),
    "other": (Shape(8192, 8192, 8192), Shape(16, 1280, 1280)),
    "host": (Shape(256, 256, 320), Shape(77, 130, 96), Shape(16, 320, 320)),
}
#: What ``all`` names.
_ALL = ("sdxl", "flux", "other")


def find_shapes(text: str) -> tuple[Shape, ...]:
    """Return the shapes of a group, of all groups, or of a file.

    Args:
        text: a group of SHAPES, ``all`` (``host`` aside), or the path of a .json or .csv file.

    Raises:
        ArtefactError: no such group or file, or a file that does not hold shapes.
    """
    if text == "all":
        return tuple(shape for group in _ALL for shape in SHAPES[group])
    if text in SHAPES:
        return SHAPES[text]
    path = Path(text)
    if path.suffix not in {".json", ".csv"}:
        raise ArtefactError(
            f"shapes {text!r}: unknown, wanted all, {', '.join(SHAPES)}, or a .json or .csv file"
        )
    return _read(path)


def _read(path: Path) -> tuple[Shape, ...]:
    text = read_text(path, _MAX_BYTES, error=ArtefactError)
    try:
        rows = parse_json(text) if path.suffix == ".json" else list(_csv_rows(text))
    except (ValueError, csv.Error) as error:
        raise ArtefactError(f"{path}: not a table of shapes ({short(error)})") from error
    if not isinstance(rows, list) or not rows:
        raise ArtefactError(f'{path}: no shapes, wanted as [[8192, 640, 640]] or a CSV of "m,n,k"')
    return tuple(_shape(path, index, row) for index, row in enumerate(rows, 1))


def _csv_rows(text: str) -> Iterable[list[str]]:
    for row in csv.reader(text.splitlines()):
        if row and [cell.strip().lower() for cell in row] != ["m", "n", "k"]:
            yield row


def _shape(path: Path, index: int, row: Any) -> Shape:
    if isinstance(row, dict):
        row = [row.get(name) for name in ("m", "n", "k")] if set(row) == {"m", "n", "k"} else row
    try:
        m, n, k = (int(str(cell)) for cell in row)
    except (TypeError, ValueError) as error:
        raise ArtefactError(
            f"{path}: shape {index}: found {reprlib.repr(row)}, wanted three whole numbers m, n, k"
        ) from error
    if not all(1 <= size <= _MAX_SIZE for size in (m, n, k)):
        raise ArtefactError(
            f"{path}: shape {index}: {m!s:.20}x{n!s:.20}x{k!s:.20}, wanted each to be 1 to "
            f"{_MAX_SIZE}"
        )
    return Shape(m, n, k)
