"""Group norms, convolutions and copies as operators of a program."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.device.torch_operators import OPERATORS, operator_for


@dataclass(frozen=True)
class PictureNorm:
    """A group norm, with an activation and codes of its pixels where they follow."""

    groups: int
    #: added to variances
    eps: float
    #: silu; empty: none
    activation: str
    #: of codes; empty: it gives 16 bit
    format_name: str

    def __call__(
        self,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        *coded: Tensor | None,
    ) -> Tensor:
        """Return ``act(norm(x + added))`` with channels last, or the codes of its pixels.

        Args:
            x: (B, C, H, W).
            added: (B, C, 1, 1), or None.
            weight, bias: (C,), or None.
            coded: smoothing and scale of codes, as ``quantize_static`` takes them.

        Returns:
            (B, C, H, W); codes: (B * H * W, C).
        """
        rows = x.permute(0, 2, 3, 1).flatten(1, 2).contiguous()
        column = None if added is None else added.flatten(1).contiguous()
        partials = OPERATORS["group_partials"](rows, column, self.groups)
        given = (rows, column, partials, weight, bias)
        if not self.format_name:
            y: Tensor = OPERATORS["group_norm"](*given, self.eps, self.activation)
            return y.reshape(len(x), *x.shape[2:], -1).permute(0, 3, 1, 2)
        write = operator_for("group_norm_codes", self.format_name)
        codes: Tensor = write(*given, *coded, self.eps, self.activation, self.format_name)
        return codes.flatten(0, 1)


@dataclass(frozen=True)
class SummedConvolution:
    """A convolution of codes that adds its product to a picture."""

    #: of our operation
    name: str

    def __call__(self, picture: Tensor, *arguments: Any) -> Tensor:
        """Return ``picture + convolution``, rounded once, with channels last.

        Args:
            picture: (B, C, H, W).
            arguments: of the convolution.
        """
        *operands, windows, x_format, w_format, dtype = arguments
        rows = picture.permute(0, 2, 3, 1).contiguous()
        add = OPERATORS[self.name]
        y: Tensor = add(*operands, rows, windows, x_format, w_format, dtype)
        return y.permute(0, 3, 1, 2)


def convolved_parts(size: int, x: Tensor, weight: Tensor, bias: Tensor, *options: Any) -> Any:
    """Return parts of a convolution's channels, which have their bias each.

    torch adds a bias on its own to all of a picture, at a third of the memory's speed; a sum of
    parts is made where a row kernel reads them.

    Args:
        size: channels of a part.
        x: (B, C, H, W).
        weight, bias: (N, C, kh, kw) and (N,).
        options: of the convolution, from its stride on.

    Returns:
        pictures (B, size, OH, OW), the last one of what is left, with channels last.
    """
    last = x.contiguous(memory_format=torch.channels_last)
    picture = torch.ops.aten.convolution.default(last, weight, None, *options)
    parts = zip(torch.split(picture, size, 1), torch.split(bias, size), strict=True)
    return [part + one.reshape(1, -1, 1, 1) for part, one in parts]


def cloned_rows(x: Tensor) -> Tensor:
    """Return a copy of matrices (..., M, N) whose columns lie side by side.

    Products of batches read either order, and a copy that keeps it is made where the numbers are.
    """
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def padded_rows(x: Tensor, count: int, value: float) -> Tensor:
    """Return ``cloned_rows`` of matrices with so many more rows (..., M + count, N) of a value."""
    columns = x.transpose(-1, -2)
    one = torch.full((1,), value, dtype=x.dtype, device=x.device)
    more = one.expand(*columns.shape[:-1], count)
    return torch.cat([columns, more], -1).transpose(-1, -2)
