"""Generated inputs of pipelines besides prompts: a picture, a mask, a strength, a phrase and a box.

What a pipeline takes is read from the signature of its ``__call__``, never from its class.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

#: Where ``draw_picture`` has its ball: left, top, right, bottom, in shares of a side.
_BALL = (0.155, 0.305, 0.645, 0.795)


def draw_picture(side: int) -> Image.Image:
    """Return a picture of smooth colours, edges and texture, the same for the same side."""
    y, x = np.mgrid[0:side, 0:side] / side
    left, top, right, bottom = _BALL
    radius = (right - left) / 2
    ball = (x - (left + right) / 2) ** 2 + (y - (top + bottom) / 2) ** 2 < radius**2
    waves = 0.5 + 0.5 * np.sin(40 * x + 25 * y * y)
    colours = np.stack([0.2 + 0.6 * x, 0.3 + 0.5 * y * waves, np.where(ball, 0.9, 0.35)], axis=-1)
    return Image.fromarray(np.round(255 * colours).astype(np.uint8))


def draw_mask(side: int) -> Image.Image:
    """Return a mask that has the middle quarter repainted."""
    mask = np.zeros((side, side), np.uint8)
    mask[side // 4 : -(-3 * side // 4), side // 4 : -(-3 * side // 4)] = 255
    return Image.fromarray(mask)


#: Pictures by the parameter that takes one, or a list of one for each prompt.
_PICTURES: Mapping[str, Callable[[int], Image.Image]] = {
    "image": draw_picture,
    "control_image": draw_picture,
    "mask_image": draw_mask,
    "control_mask": draw_mask,
}
#: What is the same for any number of prompts, by parameter: GLIGEN's things and their places.
_OTHERS: Mapping[str, Callable[[int], Any]] = {
    "gligen_phrases": lambda _: ["a blue ball"],
    "gligen_boxes": lambda _: [list(_BALL)],
    "gligen_images": lambda side: [draw_picture(side)],
}
#: Shares of the steps, by parameter.
_WHOLE = ("strength", "gligen_scheduled_sampling_beta")


@dataclass(frozen=True)
class OwnInputs:
    """The generated inputs of a pipeline, by the names of its arguments."""

    #: pixels of a picture's side
    side: int
    #: pictures are lists of one for each prompt, else one for all of them
    listed: bool

    def arguments(self, pipe: Any, count: int) -> dict[str, Any]:
        """Return the pipeline's arguments besides prompts, of which there are ``count``.

        Every timestep is seen by every layer: strength 1 begins at noise, and GLIGEN's boxes are
        looked at to the end.
        """
        known = parameters_of(pipe)
        pictures = {name: draw(self.side) for name, draw in _PICTURES.items() if name in known}
        given: dict[str, Any] = {
            name: [picture] * count if self.listed else picture
            for name, picture in pictures.items()
        }
        given |= {name: make(self.side) for name, make in _OTHERS.items() if name in known}
        return given | {name: 1.0 for name in _WHOLE if name in known}


def parameters_of(pipe: Any) -> Mapping[str, inspect.Parameter]:
    """Return what a pipeline's call takes."""
    return inspect.signature(pipe.__call__).parameters


def taken_by(pipe: Any) -> tuple[str, ...]:
    """Return the parameters of its call that have generated inputs."""
    known = parameters_of(pipe)
    return tuple(name for name in (*_PICTURES, *_OTHERS) if name in known)
