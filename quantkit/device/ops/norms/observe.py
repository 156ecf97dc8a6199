"""Sums of what a layer reads, by channel, and the histogram of its magnitudes, for calibration."""

import torch
from torch import Tensor

from quantkit.device.ops.axes import IO, K, M, N
from quantkit.device.ops.checks import IO_DTYPES, given, io_word
from quantkit.device.ops.op import (
    Argument,
    Budget,
    Op,
    Operands,
    Options,
    Output,
    Problem,
    Variant,
)
from quantkit.errors import ShapeError
from quantkit.numerics.histogram import BINS, bin_index

#: Channels of a block.
_SLAB, _WAVES = 256, 8
#: Channels that a lane loads at once.
_ALIGNED = 8


def observe_columns(x: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Return sums over the rows of each of so many chunks, of one length but for the last ones.

    Args:
        x: (M, K) float16, bfloat16 or float32.
        chunks: how many.

    Returns:
        (chunks, 3, K) float32: largest magnitude, sum, sum of squares, zeros where there are no
        rows; and (chunks * ceil(K / 256), BINS) int32, magnitudes in each bin by block.
    """
    rows = -(-len(x) // chunks)
    parts = [x[rows * i : rows * (i + 1)].float() for i in range(chunks)]
    counts = [_counts(slab) for part in parts for slab in torch.split(part, _SLAB, dim=1)]
    return torch.stack([_sums(part, 0) for part in parts]), torch.stack(counts)


def observe_pictures(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums over the pixels of each picture.

    Args:
        x: (B, C, T) float16, bfloat16 or float32.

    Returns:
        (B, 3, C) float32, as ``observe_columns`` has them; and (B * ceil(C / 8), BINS) int32.
    """
    counts = [_counts(block) for picture in x.float() for block in picture.split(_WAVES)]
    return torch.stack([_sums(picture, 1) for picture in x.float()]), torch.stack(counts)


def _sums(part: Tensor, axis: int) -> Tensor:
    if not part.shape[axis]:
        return part.new_zeros(3, part.shape[1 - axis])
    return torch.stack([part.abs().amax(axis), part.sum(axis), part.square().sum(axis)])


def _counts(part: Tensor) -> Tensor:
    index = bin_index(part.contiguous()).flatten().long()
    return index.new_zeros(BINS, dtype=torch.int32).index_add_(
        0, index, torch.ones_like(index, dtype=torch.int32)
    )


def _check_columns(op: Op, operands: Operands, options: Options) -> Problem:
    x, (chunks,) = given(operands[0]), options
    if x.ndim != 2 or chunks < 1:
        raise ShapeError(
            f"{op.name}: x is {tuple(x.shape)} in {chunks} chunks, expected (M, K) in one or more"
        )
    sizes = {"m": x.shape[0], "n": chunks, "k": x.shape[1]}
    return Problem((io_word(op.name, x.dtype),), sizes)


def _check_pictures(op: Op, operands: Operands, options: Options) -> Problem:
    del options
    x = given(operands[0])
    if x.ndim != 3 or not x.shape[2]:
        raise ShapeError(f"{op.name}: x is {tuple(x.shape)}, expected (B, C, T) with pixels")
    sizes = {"m": x.shape[2], "n": x.shape[0], "k": x.shape[1]}
    return Problem((io_word(op.name, x.dtype),), sizes)


def _column_shapes(operands: Operands, options: Options) -> tuple[Output, ...]:
    (rows, columns), (chunks,) = given(operands[0]).shape, options
    return _shapes(chunks if rows else 0, columns, _SLAB)


def _picture_shapes(operands: Operands, options: Options) -> tuple[Output, ...]:
    del options
    pictures, channels, _ = given(operands[0]).shape
    return _shapes(pictures, channels, _WAVES)


def _shapes(parts: int, channels: int, block: int) -> tuple[Output, ...]:
    blocks = parts * -(-channels // block)
    return ((parts, 3, channels), torch.float32), ((blocks, BINS), torch.int32)


def _sample_columns(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    m, n, k = sizes
    return (_sample_values(variant, generator, m, k),), (n,)


def _sample_pictures(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    pixels, pictures, channels = sizes
    return (_sample_values(variant, generator, min(pictures, 2), channels, pixels),), ()


def _sample_values(variant: Variant, generator: torch.Generator, *shape: int) -> Tensor:
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    return (x + 1).to(IO_DTYPES[variant.word("QK_IO")])


_SUMMED = Budget(
    1e-12, 0.0, (0.0, 1.0), "sums of float32 in another order; magnitudes and counts are exact"
)
_FORMULA = (
    "sums[i] = max |x|, sum of x, sum of x^2 over {over}; counts[block, b] = how many |x| have bin "
    "b: exponent and first four bits of the mantissa"
)


def _outputs(counts: str) -> tuple[Argument, ...]:
    sums = Argument("sums", "f32", "[n, 3, k]", written=True)
    return sums, Argument("counts", "u32", counts, written=True), M, N, K


OPS = (
    Op(
        name="observe_columns",
        family="observe_columns",
        source="observe_columns.hip",
        formula=_FORMULA.format(over="rows i * ceil(m / n) on"),
        schema="(Tensor x, int chunks) -> (Tensor, Tensor)",
        axes=(IO,),
        args=(Argument("x", "io", "[m, k]"), *_outputs("[n * ceil_div(k, 256), 658]")),
        k_multiple=_ALIGNED,
        check=_check_columns,
        outputs=_column_shapes,
        reference=observe_columns,
        budget=_SUMMED,
        sample=_sample_columns,
    ),
    Op(
        name="observe_pictures",
        family="observe_pictures",
        source="observe_pictures.hip",
        formula=_FORMULA.format(over="the pixels of picture i"),
        schema="(Tensor x) -> (Tensor, Tensor)",
        axes=(IO,),
        args=(Argument("x", "io", "[n, k, m]"), *_outputs("[n * ceil_div(k, 8), 658]")),
        k_multiple=1,
        check=_check_pictures,
        outputs=_picture_shapes,
        reference=observe_pictures,
        budget=_SUMMED,
        sample=_sample_pictures,
    ),
)
