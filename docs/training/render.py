"""Scenes into pictures: signed distances, two-tone textures, antialiasing, all in one batch."""

import torch
from quantkit.eval.world.outlines import signed_distance
from quantkit.eval.world.scenes import ALONE, FILLS, PATTERNS, Scenes, draw_scenes
from torch import Generator, Tensor
from torch.nn import functional

from docs.training.scene_layout import SIDE, Layout, lay_out

#: Share of the accent in a fill's and in a background's second tone. Backgrounds stay quieter,
#: so that a thing stands out on any of them.
_FILL_ACCENT, _GROUND_ACCENT, _GRADIENT_ACCENT = 0.62, 0.34, 0.6
#: Periods in pixels: at least five, because the autoencoder sees cells of four pixels.
_STRIPES, _DOTS = 6.0, 5.5
_GROUND_STRIPES, _GROUND_CELLS, _GROUND_DOTS = 16.0, 16.0, 12.8
#: Width of an outline in radii and its bounds in pixels: the thinnest ring keeps an inside.
_OUTLINE, _OUTLINE_LEAST, _OUTLINE_MOST = 0.16, 1.3, 3.0
#: Radius of a dot as a share of its period.
_DOT = 0.29
#: Relative luminance of red, green and blue (ITU-R BT.709), above which the accent is darker.
_LUMINANCE = (0.2126, 0.7152, 0.0722)


def render(scenes: Scenes, layout: Layout, *, supersample: int = 2) -> Tensor:
    """Draw a batch of pictures.

    Args:
        scenes: n scenes.
        layout: their layout, on the same device.
        supersample: samples per pixel along each axis.

    Returns:
        (n, 3, 64, 64) float32 in [0, 1], red green blue.
    """
    pixel = 1 / supersample
    axis = (torch.arange(SIDE * supersample, device=layout.centre.device) + 0.5) * pixel
    y, x = axis[None, :, None], axis[None, None, :]
    canvas = _ground(scenes.pattern, layout, x, y, pixel)
    for slot in range(2):
        shown = 1.0 if slot == 0 else (scenes.relation != ALONE).float()[:, None, None]
        across = x + 0 * y - layout.centre[:, slot, 0, None, None]
        down = y + 0 * x - layout.centre[:, slot, 1, None, None]
        radius = layout.radius[:, slot, None, None]
        inside = -radius * signed_distance(scenes.shape[:, slot], across / radius, down / radius)
        second = _fill(scenes.fill[:, slot], across, down, inside - _outline(radius), pixel)
        colour = _two_tone(layout.paint[:, slot], _FILL_ACCENT, second)
        canvas = torch.lerp(canvas, colour, (_step(inside, pixel) * shown)[:, None])
    return functional.avg_pool2d(canvas, supersample)


def draw_pictures(count: int, generator: Generator) -> tuple[Scenes, Tensor]:
    """Draw scenes and their pictures; equal generators give equal pictures on one device."""
    scenes = draw_scenes(count, generator)
    return scenes, render(scenes, lay_out(scenes, generator))


def _ground(pattern: Tensor, layout: Layout, x: Tensor, y: Tensor, pixel: float) -> Tensor:
    right, down = (layout.phase[:, i, None, None] for i in range(2))
    column, row = x / _GROUND_CELLS + right, y / _GROUND_CELLS + down
    masks = {
        "plain": torch.zeros_like(x + y),
        "gradient": (y / SIDE + torch.zeros_like(x)) * (_GRADIENT_ACCENT / _GROUND_ACCENT),
        "striped": _step(_wave((x + y) / _GROUND_STRIPES + right) * _GROUND_STRIPES, pixel),
        "checkered": _step(_checks(column, row) * _GROUND_CELLS, pixel),
        "dotted": _step(_dots(x, y, right, down) * _GROUND_DOTS, pixel),
    }
    second = _select(pattern, [masks[name] for name in PATTERNS])
    darker = pattern == PATTERNS.index("gradient")
    return _two_tone(layout.paint[:, 2], _GROUND_ACCENT, second, darker=darker)


def _fill(fill: Tensor, x: Tensor, y: Tensor, within: Tensor, pixel: float) -> Tensor:
    masks = {
        "solid": torch.zeros_like(x),
        "striped": _step(_wave((x - y) / _STRIPES) * _STRIPES, pixel),
        "dotted": _step(
            (_DOT + 0.03 - torch.hypot(_saw(x / _DOTS), _saw(y / _DOTS))) * _DOTS, pixel
        ),
        "outlined": _step(within, pixel),
    }
    return _select(fill, [masks[name] for name in FILLS])


def _outline(radius: Tensor) -> Tensor:
    return (_OUTLINE * radius).clamp(_OUTLINE_LEAST, _OUTLINE_MOST)


def _select(rows: Tensor, masks: list[Tensor]) -> Tensor:
    chosen = torch.zeros_like(masks[-1])
    for row, mask in enumerate(masks):
        chosen = torch.where((rows == row)[:, None, None], mask, chosen)
    return chosen


def _step(distance: Tensor, pixel: float) -> Tensor:
    return (0.5 + distance / pixel).clamp(0, 1)


def _saw(turns: Tensor) -> Tensor:
    return turns - torch.round(turns)


def _wave(turns: Tensor) -> Tensor:
    return _saw(turns).abs() - 0.25


def _checks(column: Tensor, row: Tensor) -> Tensor:
    # Positive where both coordinates are in the same half of their period, zero on the borders.
    first, second = _wave(column), _wave(row)
    return torch.minimum(first.abs(), second.abs()) * torch.sign(first) * torch.sign(second)


def _dots(x: Tensor, y: Tensor, right: Tensor, down: Tensor) -> Tensor:
    return _DOT - torch.hypot(_saw(x / _GROUND_DOTS + right), _saw(y / _GROUND_DOTS + down))


def _two_tone(
    colour: Tensor, share: float, second: Tensor, *, darker: Tensor | None = None
) -> Tensor:
    # The accent leads away from the colour's own brightness: towards black from light colours.
    luminance = (colour * torch.tensor(_LUMINANCE, device=colour.device)).sum(1, keepdim=True)
    towards_black = luminance > 0.52
    if darker is not None:
        towards_black = towards_black | (darker[:, None] & (luminance > 0.1))
    target = torch.where(towards_black, 0.0, 1.0)
    accent = torch.lerp(colour, target, share)[:, :, None, None]
    return torch.lerp(colour[:, :, None, None], accent, second[:, None])
