"""Numbers whose code is another one where a scale is multiplied by instead of divided by."""

import torch


def near_ties(scale, fmt):
    """Return float32 numbers x, not beyond the format, whose x / s and x * (1 / s) round apart.

    Args:
        scale: s, float32.
        fmt: int8, or a float of one byte.
    """
    if fmt.is_integer:
        codes = torch.arange(-127.0, 128.0)
    else:
        codes = torch.arange(256, dtype=torch.uint8).view(fmt.torch_dtype).float()
        codes = codes[codes.isfinite()].unique()
    middles = (codes[1:] + codes[:-1]) / 2
    bits = (middles * scale).view(torch.int32)
    found = (bits[:, None] + torch.arange(-4, 5, dtype=torch.int32)).flatten().view(torch.float32)
    apart = _rounded(found / scale, fmt) != _rounded(found * (1 / scale), fmt)
    return found[apart]


def _rounded(values, fmt):
    return values.round() if fmt.is_integer else values.to(fmt.torch_dtype).float()
