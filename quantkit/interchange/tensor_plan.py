"""The plan of an exported file: the source of each tensor, decided before anything is written."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce

import torch
from torch import Tensor

from quantkit.checkpoint.torch_dtypes import FLOAT_DTYPES
from quantkit.errors import CheckpointError
from quantkit.interchange.denoiser import Denoiser
from quantkit.interchange.joining import join
from quantkit.interchange.layer_codes import (
    LayerCodes,
    are_powers_of_two,
    joined_codes,
    map_rows,
    nearest_codes,
    under_one_scale,
)
from quantkit.interchange.layout_names import OriginalTensor
from quantkit.interchange.rotated import choose_rotation, rotated_codes
from quantkit.interchange.targets import Target, held_format, holds_as_convolution, obstacles
from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.granularity import PerChannel, PerTensor
from quantkit.numerics.rotation import largest_size
from quantkit.numerics.scales import power_of_two
from quantkit.numerics.scheme import Activation


class Treatment(Enum):
    """The source of a tensor of the file."""

    #: one that is not packed, as it is
    COPIED = "copied"
    #: packed codes, not rounded again
    TAKEN = "taken over"
    #: rotated and rounded on the way, from 16 bit
    ROTATED = "rotated"
    #: packed codes of what the target does not hold, quantized again
    CONVERTED = "converted"
    #: packed codes, in the model's 16-bit dtype
    DEQUANTIZED = "dequantized"


@dataclass(frozen=True)
class Entry:
    """One tensor of the model in the file; a quantized one has scales in a tensor of their own."""

    original: OriginalTensor
    treatment: Treatment
    shape: tuple[int, ...]
    #: of codes
    fmt: NumberFormat | None = None
    #: the input has a static scale
    static: bool = False
    #: 2:4, which is expanded
    sparse: bool = False
    #: columns of the weight that are rotated together; 0: none are
    rotation: int = 0

    @property
    def name(self) -> str:
        """Its name, or that of the weight."""
        return self.original.name


def unchanged(names: Iterable[str]) -> tuple[OriginalTensor, ...]:
    """Return tensors that keep their names and are not joined."""
    return tuple(OriginalTensor(name, (name,), swapped=False) for name in names)


def plan_tensors(
    source: Denoiser, originals: Sequence[OriginalTensor], target: Target, *, requantize: bool
) -> tuple[Entry, ...]:
    """Plan the source of each tensor.

    Args:
        source: the model, packed or not.
        originals: the tensors of the file and what they consist of.
        target: what the file holds.
        requantize: convert what it does not, where that only costs accuracy.

    Returns:
        by name: the same model gives the same bytes, however its files are ordered.

    Raises:
        CheckpointError: the first layer that the target does not hold.
    """
    entries = (_planned(source, o, target, requantize=requantize) for o in originals)
    return tuple(sorted(entries, key=lambda entry: entry.name))


def codes_of(source: Denoiser, entry: Entry, target: Target) -> LayerCodes:
    """Return the codes and scales of a quantized weight, joined as the file has it."""
    fmt, static = entry.fmt, None
    assert fmt is not None
    if entry.rotation:
        # What is converted has no 16-bit model, or no more of it than its codes say.
        known = source.reference if entry.treatment is Treatment.ROTATED else None
        read = source.read if known is None else known.rows
        return rotated_codes(read, known, entry.original, fmt, entry.rotation)
    whole = fmt in target.one_scale
    if entry.static:
        # Of all timesteps and joined layers, which one scale serves: the largest clips nothing.
        scales = [source.part(part, "input_scale").max() for part in entry.original.parts]
        largest = torch.stack(scales).max()
        static = float(power_of_two(largest) if target.static == "pow2" else largest)
    if entry.treatment is Treatment.CONVERTED:
        granularity = PerTensor() if whole else PerChannel()
        rule = "mse_pow2" if whole else "mse"
        layer = nearest_codes(dense_of(source, entry), fmt, granularity, rule=rule)
    else:
        layer = joined_codes([source.codes(part) for part in entry.original.parts])
        if entry.original.swapped:
            layer = map_rows(layer, lambda rows: join(entry.original, [rows]))
        if whole and layer.one_scale is None:
            layer = under_one_scale(layer)
    return LayerCodes(layer.fmt, layer.codes, layer.scale, static)


def dense_of(source: Denoiser, entry: Entry) -> Tensor:
    """Return a tensor's values, joined as the file has it; float32 where it is packed."""
    return join(entry.original, [source.read(part) for part in entry.original.parts])


def stored_dtype(source: Denoiser, entry: Entry) -> torch.dtype:
    """Return the dtype of a tensor that has no codes in the file: no part that had none changes."""
    dtypes = [FLOAT_DTYPES[source.dtypes.get(p, source.dtype)] for p in entry.original.parts]
    return reduce(torch.promote_types, dtypes)


def _planned(
    source: Denoiser, original: OriginalTensor, target: Target, *, requantize: bool
) -> Entry:
    shapes = [source.shapes[part] for part in original.parts]
    shape = (sum(s[0] for s in shapes), *shapes[0][1:]) if len(shapes) > 1 else shapes[0]
    packed = [part for part in original.parts if part in source.schemes]
    if not packed:
        return Entry(original, Treatment.COPIED, shape)
    found = list(_found(source, original, packed, target))
    for part, obstacle in found:
        if not requantize:
            raise _refusal(source, part, obstacle, target)
    sparse = any(source.schemes[part].sparsity is not None for part in packed)
    whole = len(packed) == len(original.parts)
    as_convolution = all(holds_as_convolution(source, part, target) for part in packed)
    if not target.formats or not whole or not as_convolution:
        return Entry(original, Treatment.DEQUANTIZED, shape, sparse=sparse)
    treatment = Treatment.CONVERTED if found else Treatment.TAKEN
    fmt = _format(source, packed, target)
    if fmt in target.must_rotate:
        rotation = largest_size(shape[1])
        assert rotation, "packed rows are of 16 columns, or a multiple"
    else:
        may = fmt in target.may_rotate and not found
        rotation = _rotation(source, packed) if may else 0
    if rotation:
        treatment = treatment if found else Treatment.ROTATED
        return Entry(original, treatment, shape, fmt, rotation=rotation)
    static = target.static != "no" and all(_keeps_static_scale(source, part) for part in packed)
    return Entry(original, treatment, shape, fmt, static=static, sparse=sparse)


def _rotation(source: Denoiser, packed: Sequence[str]) -> int:
    """Return how many columns are rotated of weights that need not be; 0: none."""
    known = source.reference
    sparse = any(source.schemes[part].sparsity is not None for part in packed)
    if known is None or sparse or known.corrects_bias(packed):
        return 0
    return choose_rotation(known, packed)


def _format(source: Denoiser, packed: Sequence[str], target: Target) -> NumberFormat:
    """Return the layers' own format where the target has it, for the least error."""
    formats = {held_format(source.schemes[part], target) for part in packed}
    held = [fmt for fmt in target.formats if formats == {fmt}]
    return held[0] if held else target.formats[0]


def _keeps_static_scale(source: Denoiser, part: str) -> bool:
    # That of a smoothed input belongs to the input times its factor, which the file has not.
    scheme = source.schemes[part]
    return scheme.activation is Activation.STATIC and not scheme.smooth


def _found(
    source: Denoiser, original: OriginalTensor, packed: Sequence[str], target: Target
) -> Iterator[tuple[str, str]]:
    for part in packed:
        for obstacle in obstacles(source, part, target):
            yield part, obstacle
    if not target.formats:
        return
    for part in original.parts:
        if part not in packed:
            yield packed[0], f"joined with {part}, which is not packed"
    formats = {held_format(source.schemes[part], target) for part in packed}
    if len(formats) > 1:
        names = ", ".join(sorted(fmt.name for fmt in formats))
        yield packed[0], f"joined with layers of another format ({names})"
    elif formats <= set(target.one_scale) and len(packed) > 1:
        scales = torch.cat([source.part(part, "weight_scale").reshape(-1) for part in packed])
        if bool((scales != scales[0]).any()) and not are_powers_of_two(scales):
            yield packed[0], "joined under one scale, and its own is no power of two"


def _refusal(source: Denoiser, part: str, obstacle: str, target: Target) -> CheckpointError:
    cure = target.cure or "export the 16-bit model"
    return CheckpointError(
        f"{source.path}: {part.removesuffix('.weight')}: {obstacle}, which "
        f"{target.program} does not hold; {cure}, or set requantize, which converts it at a loss",
        fields=("requantize",),
    )
