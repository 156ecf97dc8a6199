"""The shapes that kernels are measured on: a literal table, or a file of the user's own."""

import csv
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from quantkit.errors import ArtefactError
from quantkit.storage.inputfile import read_text, split_lines
from quantkit.storage.jsonfile import parse_json, short

_MAX_BYTES = 2**20
#: Kernels index rows and columns with 32 bits.
_MAX_SIZE = 2**31 - 1


@dataclass(frozen=True)
class Shape:
    """M tokens times N outputs, summed over K inputs."""

    #: as a table's head names them
    axes: ClassVar[str] = "M x N x K"

    m: int
    n: int
    k: int

    @property
    def label(self) -> str:
        """``MxNxK``."""
        return _label(self)

    @property
    def summed(self) -> int:
        """Products of a sum."""
        return self.k


@dataclass(frozen=True)
class AttentionShape:
    """Queries of every head of a batch against keys."""

    axes: ClassVar[str] = "B x H x Q x K x D"

    batch: int
    heads: int
    queries: int
    keys: int
    head_size: int

    @property
    def label(self) -> str:
        """``BxHxQxKxD``."""
        return _label(self)

    @property
    def summed(self) -> int:
        """Values of a mean."""
        return self.keys


AnyShape = Shape | AttentionShape
#: By the numbers that a row has.
_KINDS: dict[int, type[AnyShape]] = {len(fields(kind)): kind for kind in (Shape, AttentionShape)}

#: group -> shapes. SDXL: batch 2 at 1024x1024 (attention and GEGLU layers of 640 and 1280
#: channels); FLUX.1: 4096 picture and 512 text tokens, 3072 channels. SD 1.5, 512x512, and SD3,
#: 1024x1024: attention alone; cross attention has 77 keys. ``host`` is for CPUs, which run the
#: kernels lane by lane: a tile and more, tails, and few tokens.
SHAPES: dict[str, tuple[AnyShape, ...]] = {
    "sdxl": (
        Shape(8192, 640, 640),
        Shape(8192, 5120, 640),
        Shape(2048, 1280, 1280),
        Shape(2048, 10240, 1280),
        Shape(2048, 1280, 5120),
        AttentionShape(2, 10, 4096, 4096, 64),
        AttentionShape(2, 20, 1024, 1024, 64),
        AttentionShape(2, 10, 4096, 77, 64),
        AttentionShape(2, 20, 1024, 77, 64),
    ),
    "flux": (
        Shape(4608, 3072, 3072),
        Shape(4608, 12288, 3072),
        Shape(4608, 3072, 15360),
        AttentionShape(1, 24, 4608, 4608, 128),
    ),
    "sd15": (AttentionShape(2, 8, 4096, 4096, 40), AttentionShape(2, 8, 4096, 77, 40)),
    "sd3": (AttentionShape(2, 24, 4250, 4250, 64),),
    "other": (Shape(8192, 8192, 8192), Shape(16, 1280, 1280)),
    "host": (
        Shape(256, 256, 320),
        Shape(77, 130, 96),
        Shape(16, 320, 320),
        AttentionShape(1, 2, 64, 256, 64),
        AttentionShape(1, 2, 37, 101, 40),
        AttentionShape(1, 1, 16, 77, 128),
    ),
}
#: What ``all`` names.
_ALL = ("sdxl", "flux", "sd15", "sd3", "other")


def find_shapes(text: str) -> tuple[AnyShape, ...]:
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
            f"shapes {text!r}: unknown, expected all, {', '.join(SHAPES)}, or a .json or .csv file"
        )
    return _read(path)


def shape_of(values: Mapping[str, Any]) -> AnyShape:
    """Return the shape that a saved row has.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    kind = _KINDS[len(values)]
    return kind(*(int(values[axis.name]) for axis in fields(kind)))


def _label(shape: AnyShape) -> str:
    return "x".join(map(str, astuple(shape)))


def _read(path: Path) -> tuple[AnyShape, ...]:
    text = read_text(path, _MAX_BYTES, error=ArtefactError)
    try:
        rows = parse_json(text) if path.suffix == ".json" else list(_csv_rows(text))
    except (ValueError, csv.Error) as error:
        raise ArtefactError(f"{path}: not a table of shapes ({short(error)})") from error
    if not isinstance(rows, list) or not rows:
        raise ArtefactError(
            f'{path}: no shapes, expected as [[8192, 640, 640]] or a CSV of "m,n,k"'
        )
    return tuple(_shape(path, index, row) for index, row in enumerate(rows, 1))


def _csv_rows(text: str) -> Iterable[list[str]]:
    for row in csv.reader(split_lines(text)):
        if row and [cell.strip().lower() for cell in row] not in _AXES:
            yield row


#: As files name them.
_AXES = [[axis.name for axis in fields(kind)] for kind in _KINDS.values()]


def _shape(path: Path, index: int, row: Any) -> AnyShape:
    if isinstance(row, dict):
        axes = next((axes for axes in _AXES if set(axes) == set(row)), [])
        row = [row[axis] for axis in axes] or row
    try:
        sizes = [int(str(cell)) for cell in row]
        kind = _KINDS[len(sizes)]
    except (TypeError, ValueError, KeyError) as error:
        expected = " or ".join(", ".join(axes) for axes in _AXES)
        raise ArtefactError(
            f"{path}: shape {index}: found {reprlib.repr(row)}, expected whole numbers {expected}"
        ) from error
    if not all(1 <= size <= _MAX_SIZE for size in sizes):
        found = "x".join(f"{size!s:.20}" for size in sizes)
        raise ArtefactError(f"{path}: shape {index}: {found}, expected each to be 1 to {_MAX_SIZE}")
    return kind(*sizes)
