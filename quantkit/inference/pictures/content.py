"""Pictures that are not computed yet: any lines of them can be asked for.

A convolution with a scale per window needs its windows as rows, nine times the picture. Asked for a
band of lines, it unfolds those alone, and reads them of a norm, an activation or an upsampling that
computes no other. Results are those of the whole picture.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from quantkit.device.torch_operators import OPERATORS
from quantkit.numerics.norms import chunk_pixels

if TYPE_CHECKING:
    from quantkit.numerics.conv_windows import Windows

#: Bytes that the codes of the windows of a band may take, unless a line takes more.
BAND = 64 * 2**20
#: Bytes beyond which a picture is computed twice rather than held through the next block.
LARGE = 256 * 2**20


class Content(Protocol):
    """A picture of which lines can be computed."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, W, C)."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the lines."""

    @property
    def line_bytes(self) -> int:
        """Bytes that computing a line takes besides its sources and itself."""

    def lines(self, first: int, last: int) -> Tensor:
        """Return the lines from ``first`` to the one before ``last``: (B, last - first, W, C)."""

    def release(self) -> None:
        """Give up what can be computed again for few lines at a time."""


class Convolution(Protocol):
    """A layer that multiplies windows, each with a scale: a packed convolution."""

    windows: Windows
    #: output features, and values of a window
    n: int
    k: int

    def multiply_windows(self, pixels: Tensor, windows: Windows) -> Tensor:
        """Return products (B, OH, OW, N) of windows of (B, H, W, C)."""


def whole(content: Content) -> Tensor:
    """Return a picture (B, C, H, W), with channels last in memory; its sources are released."""
    _, height, _, _ = content.shape
    step = max(1, BAND // max(1, content.line_bytes))
    made = content.lines(0, min(step, height))
    if step < height:
        first, made = made, made.new_empty(content.shape)
        made[:, :step] = first
        del first
    for start in range(step, height, step):
        last = min(start + step, height)
        made[:, start:last] = content.lines(start, last)
    content.release()
    return made.permute(0, 3, 1, 2)


@dataclass(frozen=True, eq=False)
class Stored:
    """A picture that is there."""

    #: (B, C, H, W)
    picture: Tensor

    line_bytes = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, W, C)."""
        b, c, h, w = self.picture.shape
        return b, h, w, c

    @property
    def dtype(self) -> torch.dtype:
        """Of the picture."""
        return self.picture.dtype

    def lines(self, first: int, last: int) -> Tensor:
        """Return some of its lines."""
        return self.picture.permute(0, 2, 3, 1)[:, first:last].contiguous()

    def release(self) -> None:
        """Keep the picture, which nothing makes again."""


@dataclass(eq=False)
class Remade:
    """A convolution of an upsampled picture, kept until one has read it.

    It is four times what it is made of, and callers hold it as long as their variables: whoever
    reads it later has its lines computed again.
    """

    product: Product
    #: (B, N, OH, OW); None: given up
    picture: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, OH, OW, N)."""
        return self.product.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the source."""
        return self.product.dtype

    @property
    def line_bytes(self) -> int:
        """Bytes of the codes of a line's windows, where it is computed."""
        return self.product.line_bytes if self.picture is None else 0

    def lines(self, first: int, last: int) -> Tensor:
        """Return some of its lines."""
        if self.picture is None:
            return self.product.lines(first, last)
        return Stored(self.picture).lines(first, last)

    def release(self) -> None:
        """Give the picture up, if it is large."""
        if prod(self.shape) * self.dtype.itemsize > LARGE:
            self.picture = None

    def whole(self) -> Tensor:
        """Return the picture, and keep it."""
        if self.picture is None:
            self.picture = whole(self.product)
        return self.picture


@dataclass(frozen=True, eq=False)
class _OfOther:
    """A picture that is computed of one other; of the same shape, if nothing else is said."""

    source: Content

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, W, C)."""
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the source."""
        return self.source.dtype

    @property
    def line_bytes(self) -> int:
        """Bytes of a line."""
        b, _, w, c = self.shape
        return b * w * c * self.dtype.itemsize

    def release(self) -> None:
        """Give up what the source can."""
        self.source.release()


@dataclass(frozen=True, eq=False)
class Normed(_OfOther):
    """A group norm of a picture, perhaps with an activation."""

    weight: Tensor | None
    bias: Tensor | None
    #: mean and variance of groups, float64 (B, G, 2)
    moments: Tensor
    #: added to variances
    eps: float
    #: as ``group_norm`` takes it
    activation: str = ""
    #: by pixels, what ``group_norm`` reads the moments of
    partials: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(
        source: Content, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Normed:
        """Return the norm of a picture, whose moments are taken."""
        b, h, w, c = source.shape
        rows = source.lines(0, h).reshape(b, h * w, c)
        partials = OPERATORS["group_partials"](rows, None, groups).double()
        return Normed(source, weight, bias, _merged(partials, h * w, c // groups), eps)

    def activated(self, activation: str) -> Normed:
        """Return the same with an activation."""
        return replace(self, activation=activation)

    def lines(self, first: int, last: int) -> Tensor:
        """Return some of its lines."""
        b, _, w, c = self.shape
        rows = self.source.lines(first, last).reshape(b, (last - first) * w, c)
        pixels = rows.shape[1]
        if pixels not in self.partials:
            self.partials[pixels] = _partials(self.moments, pixels, c)
        given = (
            rows,
            None,
            self.partials[pixels],
            self.weight,
            self.bias,
            self.eps,
            self.activation,
        )
        y: Tensor = OPERATORS["group_norm"](*given)
        return y.reshape(b, last - first, w, c)


@dataclass(frozen=True, eq=False)
class Doubled(_OfOther):
    """A picture upsampled by 2, each pixel four times."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, W, C)."""
        b, h, w, c = self.source.shape
        return b, 2 * h, 2 * w, c

    def lines(self, first: int, last: int) -> Tensor:
        """Return some of its lines."""
        start, end = first // 2, -(-last // 2)
        b, _, w, c = self.shape
        few = self.source.lines(start, end).reshape(b, end - start, 1, w // 2, 1, c)
        twice = few.expand(b, end - start, 2, w // 2, 2, c).reshape(b, 2 * (end - start), w, c)
        return twice[:, first - 2 * start : last - 2 * start]


@dataclass(frozen=True, eq=False)
class Product(_OfOther):
    """A convolution with a scale per window, or per pixel where that is the window."""

    layer: Convolution

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, OH, OW, N)."""
        b, h, w, _ = self.source.shape
        return (b, *self.layer.windows.outputs(h, w), self.layer.n)

    @property
    def line_bytes(self) -> int:
        """Bytes of the codes of a line's windows, or of what the source takes."""
        b, _, w, _ = self.shape
        return max(b * w * self.layer.k, self.source.line_bytes)

    def lines(self, first: int, last: int) -> Tensor:
        """Return some of its lines."""
        windows, (_, height, _, _) = self.layer.windows, self.source.shape
        left, right, top, _ = windows.padding
        start = first * windows.stride[0] - top
        end = (last - 1) * windows.stride[0] - top + windows.dilation[0] * (windows.kernel[0] - 1)
        band = self.source.lines(max(start, 0), min(end + 1, height))
        padding = (left, right, max(-start, 0), max(end + 1 - height, 0))
        return self.layer.multiply_windows(band, replace(windows, padding=padding))


@dataclass(frozen=True, eq=False)
class Sum:
    """A sum of pictures of the same shape and dtype."""

    first: Content
    second: Content

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, W, C)."""
        return self.first.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of both."""
        return self.first.dtype

    @property
    def line_bytes(self) -> int:
        """Bytes that the more costly of the two takes."""
        return max(self.first.line_bytes, self.second.line_bytes)

    def lines(self, first: int, last: int) -> Tensor:
        """Return some of its lines."""
        return self.first.lines(first, last) + self.second.lines(first, last)

    def release(self) -> None:
        """Give up what the sources can."""
        self.first.release()
        self.second.release()


def _merged(partials: Tensor, pixels: int, width: int) -> Tensor:
    """Return mean and variance of groups, float64 (B, G, 2), of ``group_partials``'s result."""
    number = _numbers(pixels, partials.device) * width
    means, squares = partials.unbind(-1)
    mean = (number * means).sum(-1, keepdim=True) / number.sum()
    squares = (squares + number * (means - mean).square()).sum(-1)
    return torch.stack([mean.squeeze(-1), squares / number.sum()], dim=-1)


def _partials(moments: Tensor, pixels: int, channels: int) -> Tensor:
    """Return what ``group_partials`` gives of pixels with these moments in every chunk."""
    number = _numbers(pixels, moments.device) * (channels // moments.shape[1])
    mean, variance = moments.unsqueeze(2).unbind(-1)
    squares = variance * number
    return torch.stack([mean.expand_as(squares), squares], dim=-1).float()


@lru_cache(maxsize=64)
def _numbers(pixels: int, device: torch.device) -> Tensor:
    """Return the pixels of every chunk, float64."""
    chunk = chunk_pixels(pixels)
    starts = torch.arange(0, pixels, chunk, device=device, dtype=torch.float64)
    return (pixels - starts).clamp(max=chunk)
