"""A map of the network: its blocks in order, every layer by size, error and format."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log

from quantkit.eval.judging.evaluation_result import LayerRow
from quantkit.eval.measuring.number_format import show, show_bytes

#: What stands on a layer, by the first word of its format; else its first two letters.
MARKS = {
    "int8": "I8", "int4": "I4", "e4m3fn": "F8", "e5m2": "F8", "q8_0": "Q8", "q4_0": "Q4",
}  # fmt: skip
#: Where a network's parts stand in it, by how their names begin; a file has them by the alphabet.
STAGES = (
    ("conv_in", 0), ("proj_in", 0), ("pos_embed", 0), ("patch_embed", 0), ("x_embedder", 0),
    ("time", 1), ("context_embedder", 1), ("caption", 1), ("class_embedding", 1), ("add_embed", 1),
    ("down_blocks", 2), ("mid_block", 3), ("up_blocks", 4), ("single_", 4),
    ("norm_out", 5), ("conv_out", 5), ("proj_out", 5), ("final", 5),
)  # fmt: skip
#: Of every other name, as transformer_blocks.
_BETWEEN = 2
#: The mark of a layer that was not packed.
PLAIN = "16"


@dataclass(frozen=True)
class Segment:
    """One layer."""

    #: position in the report's table
    index: int
    #: share of the largest block's bytes, in %
    width: float
    #: 0 for the least error of the network, 100 for the largest, on a log scale; None: not measured
    heat: int | None
    mark: str
    sparse: bool
    #: what a pointer reads
    words: str


@dataclass(frozen=True)
class Block:
    """Layers whose names begin alike, in the order of the model."""

    name: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class NetworkMap:
    """The blocks, and what their colours mean."""

    blocks: tuple[Block, ...]
    #: which error: of the outputs, or of the weights where no output was seen
    error: str
    #: the least and the largest; None: nothing was measured
    span: tuple[float, float] | None
    #: marks that occur, with the format's word
    marks: tuple[tuple[str, str], ...]
    sparse: bool


def map_network(layers: Sequence[LayerRow]) -> NetworkMap:
    """Return the map of a report's layers."""
    outputs = any(row.output_error is not None for row in layers)
    errors = [row.output_error if outputs else row.weight_error for row in layers]
    found = [error for error in errors if error]
    span = (min(found), max(found)) if found else None
    rows = list(zip(range(len(layers)), layers, errors, strict=True))
    rows.sort(key=lambda row: _place(layers, row[1]))
    groups = [(key, list(rows)) for key, rows in groupby(rows, lambda row: block_of(row[1]))]
    largest = max((sum(row.bytes_after for _, row, _ in g) for _, g in groups), default=1) or 1
    blocks = tuple(
        Block(name, tuple(_segment(i, row, error, span, largest) for i, row, error in group))
        for name, group in groups
    )
    marks = {_mark(row): _word(row) for row in layers}
    return NetworkMap(
        blocks, "output error" if outputs else "weight error", span,
        tuple(sorted(marks.items())), any(_sparse(row) for row in layers),
    )  # fmt: skip


def block_of(row: LayerRow) -> str:
    """Return the block of a layer: its name up to the first number, as ``down_blocks.0``."""
    parts = row.name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    kept = parts[:1] if number is None else parts[: number + 1]
    return ".".join(filter(None, (row.component, *kept)))


def _place(
    layers: Sequence[LayerRow], row: LayerRow
) -> tuple[int, int, list[tuple[bool, int | str]]]:
    """Return where a layer stands: its component's place, its stage, then numbers as numbers."""
    components = list(dict.fromkeys(layer.component for layer in layers))
    stage = next((rank for start, rank in STAGES if row.name.startswith(start)), _BETWEEN)
    parts = [
        (part.isdigit(), int(part) if part.isdigit() else part) for part in row.name.split(".")
    ]
    return (components.index(row.component), stage, parts)


def worst_layers(layers: Sequence[LayerRow], count: int = 10) -> tuple[tuple[int, LayerRow], ...]:
    """Return position and row of the layers with the largest error, as the map sees it."""
    outputs = any(row.output_error is not None for row in layers)
    rows = [
        (error, index, row)
        for index, row in enumerate(layers)
        if (error := row.output_error if outputs else row.weight_error) is not None
    ]
    return tuple((i, row) for _, i, row in sorted(rows, key=lambda r: (-r[0], r[1]))[:count])


def _segment(
    index: int,
    row: LayerRow,
    error: float | None,
    span: tuple[float, float] | None,
    largest: int,
) -> Segment:
    words = f"{row.name}: {row.format}, {show_bytes(row.bytes_after)}"
    if error is not None:
        words += f", error {show(error)}"
    heat = None if error is None or span is None else _heat(error, span)
    width = 100 * row.bytes_after / largest
    return Segment(index, width, heat, _mark(row), _sparse(row), words)


def _heat(error: float, span: tuple[float, float]) -> int:
    low, high = span
    if error <= low:
        return 0 if high > low or not error else 100
    return round(100 * log(error / low) / log(high / low))


def _mark(row: LayerRow) -> str:
    if "not packed" in row.format:
        return PLAIN
    word = _word(row)
    return MARKS.get(word, word[:2].upper())


def _word(row: LayerRow) -> str:
    return "not packed" if "not packed" in row.format else row.format.partition(" ")[0]


def _sparse(row: LayerRow) -> bool:
    return "2:4" in row.format
