"""Limits of attention for checks of recipes and headers; needs no torch."""

#: Columns of a head that one matrix instruction takes.
COLUMNS = 16

#: Columns of the largest head that kernels take, and what those of all are multiples of.
LARGEST_HEAD, _ALIGNED = 160, 8

#: What ranges of calibration are multiplied by: other prompts go beyond them, and a float format
#: gives the room for nothing. 4 is no better than 2, and none costs SSIM .003.
MARGIN = 2.0


def takes_heads(columns: int) -> bool:
    """Tell whether heads of so many columns can be multiplied as codes."""
    return 0 < columns <= LARGEST_HEAD and columns % _ALIGNED == 0
