"""Rows that a layer multiplies, drawn from its input: those of a Linear, windows of a Conv2d."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantkit.errors import ModelError

#: Elements of the windows that are unfolded at a time: 64 MiB in float32.
_WINDOW_ELEMENTS = 1 << 24


def read_rows(
    module: nn.Module, values: Tensor, where: str, draw: Callable[[int, int], Tensor | None]
) -> Iterator[Tensor]:
    """Yield what the layer multiplies, (rows, K) of its dtype, a convolution's channels first.

    Args:
        module: Linear or Conv2d.
        values: its input.
        where: for messages.
        draw: returns places among so many rows of so many pictures, on their device; None: all.
    """
    if not isinstance(module, nn.Conv2d):
        rows = values.reshape(-1, values.shape[-1])
        places = draw(len(rows), len(values))
        yield rows if places is None else rows[places]
        return
    if isinstance(module.padding, str) or module.padding_mode != "zeros" or module.groups != 1:
        raise ModelError(
            f"{where}: padding {module.padding!r} in mode {module.padding_mode}, {module.groups} "
            "groups, expected zero padding and one group; keep the layer in 16 bit"
        )
    taps = module.weight[0].numel()
    step = max(1, _WINDOW_ELEMENTS // (taps * values.shape[-2] * values.shape[-1]))
    for part in torch.split(values, step):
        windows = _windows(module, part)
        batch, height, width = windows.shape[:3]
        places = draw(batch * height * width, batch)
        if places is not None:
            # Only what was drawn is copied: unfolding all of it took longer than the product.
            yield _taken(windows, places).reshape(-1, taps)
        elif batch == 1:
            yield _unfolded(module, part)
        else:
            yield windows.reshape(-1, taps)


def _unfolded(module: nn.Conv2d, picture: Tensor) -> Tensor:
    """Return all windows of a picture, which torch writes fastest with pixels last."""
    sides = (module.kernel_size, module.dilation, module.padding, module.stride)
    return functional.unfold(picture, *sides)[0].t()  # type: ignore[arg-type]


def _taken(windows: Tensor, places: Tensor) -> Tensor:
    height, width = windows.shape[1:3]
    picture, pixel = places // (height * width), places % (height * width)
    return windows[picture, pixel // width, pixel % width]


def _windows(module: nn.Conv2d, values: Tensor) -> Tensor:
    """Return the view (B, OH, OW, C, kh, kw) of what a convolution reads of (B, C, H, W)."""
    (ph, pw), (sh, sw), (dh, dw) = (
        [int(side) for side in pair] for pair in (module.padding, module.stride, module.dilation)
    )
    tall, wide = (d * (k - 1) + 1 for d, k in zip((dh, dw), module.kernel_size, strict=True))
    padded = functional.pad(values, (pw, pw, ph, ph)).permute(0, 2, 3, 1)
    return padded.unfold(1, tall, sh).unfold(2, wide, sw)[..., ::dh, ::dw]


def kernel_order(module: nn.Module) -> Tensor:
    """Return where each column of the kernels' rows stands among the unfolded ones."""
    weight = module.get_parameter("weight")
    places = torch.arange(weight[0].numel()).reshape(weight.shape[1:])
    return places.permute(1, 2, 0).reshape(-1) if weight.ndim == 4 else places
