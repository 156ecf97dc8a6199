"""Operands of convolutions, and shapes at the edges of tiles, pictures and taps."""

from dataclasses import dataclass, replace

import torch

from quantkit.device.geometry import tiles
from quantkit.device.ops.op import Variant
from quantkit.device.ops.products.conv import integers
from quantkit.device.ops.table import OPS
from quantkit.numerics.conv_windows import ConvShape, Windows
from tests.support.kernel_cases import DTYPES, codes, gemm_case, launch, magnitudes, referred

SAME = Windows((3, 3), padding=(1, 1, 1, 1))
STRIDED = Windows((3, 3), (2, 2), padding=(0, 1, 0, 1))
UNEVEN = Windows((2, 3), (1, 2), (2, 1), (2, 0, 1, 3))
LINE = Windows((1, 5), padding=(2, 2, 0, 0))
DILATED = Windows((3, 3), dilation=(2, 3), padding=(3, 3, 2, 2))


@dataclass(frozen=True)
class ConvCase:
    """Operands of one convolution."""

    variant: Variant
    shape: ConvShape
    #: argument name -> operand, y aside
    tensors: dict

    @property
    def k(self):
        return self.shape.k

    @property
    def dtype(self):
        return DTYPES[self.variant.word("QK_IO")]

    @property
    def result(self):
        return self.shape.batch, *self.shape.outputs, self.shape.n

    def changed(self, **tensors):
        return replace(self, tensors={**self.tensors, **tensors})

    def run(self, layout, shape=None):
        y = torch.empty(self.result, dtype=self.dtype)
        sizes = integers(shape or self.shape)
        return launch(self.variant, layout, {**self.tensors, "y": y}, sizes)["y"]

    def exact(self):
        """Return the result in float64, unrounded."""
        return self._reference(self.tensors)

    def sizes(self):
        """Return the sum of the magnitudes of all terms."""
        return self._reference(magnitudes(self.variant, self.tensors))

    def _reference(self, tensors):
        return referred(self.variant, tensors, self.shape.windows.numbers)


def conv_case(variant, shape, generator, *, bias=True):
    """Return random operands of a convolution's variant."""
    plain = Variant(OPS[variant.op.name.replace("conv", "gemm")], variant.words)
    tensors = dict(gemm_case(plain, 1, shape.n, shape.k, generator, bias=bias).tensors)
    pixels = (shape.batch, shape.height, shape.width, shape.channels)
    tensors["x"] = codes(pixels, variant.word("QK_X_FORMAT"), generator)
    return ConvCase(variant, shape, tensors)


def conv_shapes(variant):
    """Return shapes around every edge of the variant's tile, and of pictures and taps."""
    tile, step = tiles()[int(variant.word("QK_TILE")[1:])], variant.op.k_multiple
    m, n = tile.m, tile.n
    return (
        ConvShape(1, 1, 1, 64, 1, SAME),
        ConvShape(2, 9, m // 16 + 1, 64 + step, n + 1, SAME),
        ConvShape(1, m // 8, 8, 128, n, SAME),
        ConvShape(1, 17, m // 4 + 3, 96, 5, STRIDED),
        ConvShape(3, 5, 9, 64 + 3 * step, n - 1, UNEVEN),
        ConvShape(2, 3, 6, 192, 33, LINE),
        ConvShape(1, 7, 11, 64, 8, DILATED),
        ConvShape(2, 5, 5, 64 + step, 17, Windows((1, 1), (2, 2))),
    )
