"""Calling a pipeline with prompts, and with pictures where it needs them; trials before long work.

What a pipeline takes is read from the signature of its ``__call__``, never from its class.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from PIL import Image
from torch import nn

from quantkit.errors import ModelError, QuantkitError
from quantkit.models.attention import denoisers_of
from quantkit.storage.jsonfile import DAMAGE, short

#: What pipelines and what they call raise where they are given too little, or cannot run it.
_REFUSALS = (*DAMAGE, RuntimeError, OSError, ImportError, AssertionError, MemoryError)
#: Parameters that are a picture, and those that say which part of it is repainted.
_PICTURES = ("image", "control_image")
_MASKS = ("mask_image",)
#: Pixels of a side where neither pipeline nor denoiser says.
_SIDE = 512
#: How many prompts a trial with pictures has: a list and one picture differ from two on.
_TRIED = 2


@dataclass(frozen=True)
class Call:
    """One call of a pipeline, without what it does with pictures."""

    prompts: tuple[str, ...]
    #: of each prompt's noise
    seeds: tuple[int, ...]
    steps: int
    #: None: the pipeline's own default
    guidance: float | None = None
    #: latent or np
    output: str = "latent"

    def arguments(self, pipe: Any) -> dict[str, Any]:
        """Return what the pipeline is called with, pictures included where it needs them."""
        given = _CHOSEN.get(type(pipe), _alone)(pipe, len(self.prompts))
        return self._plain() | given

    def _plain(self) -> dict[str, Any]:
        guidance = {} if self.guidance is None else {"guidance_scale": self.guidance}
        return {
            "prompt": list(self.prompts),
            "num_inference_steps": self.steps,
            # One generator a prompt, on the CPU: neither batch nor device changes the noise.
            "generator": [torch.Generator("cpu").manual_seed(seed) for seed in self.seeds],
            "output_type": self.output,
            **guidance,
        }

    def first(self, count: int) -> "Call":
        """Return the call of the first prompts."""
        return replace(self, prompts=self.prompts[:count], seeds=self.seeds[:count])


#: What is given beside prompts, of so many of them.
_Giver = Callable[[Any, int], dict[str, Any]]


def rehearse(pipe: Any, call: Call) -> None:
    """Try a call up to the denoiser's first answer, on the longest prompt.

    Where a prompt alone does not do, later calls give pictures made here, with strength 1: from
    noise, so that every timestep is seen.

    Args:
        pipe: a diffusers pipeline; nothing listens to it yet.
        call: of all prompts, with the steps and the guidance of the long run.

    Raises:
        ModelError: the pipeline cannot be run so; the text names what it lacks.
    """
    _refuse_uncallable(pipe)
    longest = max(range(len(call.prompts)), key=lambda i: _tokens(pipe, call.prompts[i]))
    order = (longest, *(i for i in range(len(call.prompts)) if i != longest))
    call = replace(call, prompts=tuple(call.prompts[i] for i in order))
    reasons = []
    for give in _ways(pipe):
        _CHOSEN[type(pipe)] = give
        try:
            _begin(pipe, call.first(1 if give is _alone else _TRIED))
        except (QuantkitError, torch.OutOfMemoryError):
            raise
        except _REFUSALS as error:
            reasons.append(error)
        else:
            return
    del _CHOSEN[type(pipe)]
    raise ModelError(_refusal(pipe, call, reasons[-1])) from reasons[-1]


def fewest_steps(pipe: Any, call: Call, least: int) -> Call:
    """Return the call with so few steps, or as few above as the scheduler takes.

    Raises:
        ModelError: not even all steps can be run.
    """
    for steps in range(min(least, call.steps), call.steps):
        few = replace(call, steps=steps)
        try:
            _begin(pipe, few)
        except _REFUSALS:
            continue
        return few
    rehearse(pipe, call)
    return call


def _refusal(pipe: Any, call: Call, error: BaseException) -> str:
    given = ", ".join(_picture_names(pipe))
    what = f"prompts and {given} of quantkit's own" if given else "a prompt alone"
    return (
        f"{type(pipe).__name__} cannot run {call.steps} steps on {what} ({call.prompts[0]!r:.60}): "
        f"{short(error)}; try it in diffusers with the same, or give other prompts or steps"
    )


def _picture_names(pipe: Any) -> list[str]:
    return [name for name in (*_PICTURES, *_MASKS) if name in _parameters(pipe)]


def _refuse_uncallable(pipe: Any) -> None:
    """Refuse what prompts and pictures cannot run, whatever they show.

    Raises:
        ModelError: naming what it needs.
    """
    known = _parameters(pipe)
    have = {*_PICTURES, *_MASKS, "prompt"}
    needs = [
        name
        for name, parameter in known.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in have
    ]
    if needs or not {"prompt", "num_inference_steps"} <= set(known):
        lacks = ", ".join(needs) or "no prompt and steps, which quantkit gives"
        raise ModelError(
            f"{type(pipe).__name__} takes {lacks}: quantkit can only run pipelines on prompts and "
            "on pictures of its own; pack it with a recipe that needs no calibration, as fp8"
        )


def _parameters(pipe: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(pipe.__call__).parameters


def _tokens(pipe: Any, prompt: str) -> int:
    """Return how many tokens a prompt has for the tokenizer that makes most of it."""
    tokenizers = [
        part for name, part in getattr(pipe, "components", {}).items() if "tokenizer" in name
    ]
    counts = [len(tokenizer.tokenize(prompt)) for tokenizer in tokenizers
              if hasattr(tokenizer, "tokenize")]  # fmt: skip
    return max(counts, default=len(prompt))


class _BegunError(Exception):
    """The denoiser has answered once."""


def _begin(pipe: Any, call: Call) -> None:
    """Run a pipeline until its denoiser has answered."""
    with _leaving(pipe):
        try:
            pipe(**call.arguments(pipe))
        except _BegunError:
            return


@contextmanager
def _leaving(pipe: Any) -> Iterator[None]:
    def leave(*_: Any) -> None:
        raise _BegunError

    handles = [model.register_forward_hook(leave) for model in _denoisers(pipe)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _denoisers(pipe: Any) -> list[nn.Module]:
    """Return the models that denoise; a ControlNet answers before them."""
    return [
        model
        for model in denoisers_of(pipe).values()
        if "controlnet_cond" not in inspect.signature(model.forward).parameters
    ]


def _ways(pipe: Any) -> tuple[_Giver, ...]:
    """Return what to try: a prompt alone, a picture for each prompt, one picture for all."""
    return (_alone, _each, _one) if _picture_names(pipe) else (_alone,)


def _alone(pipe: Any, count: int) -> dict[str, Any]:
    del pipe, count
    return {}


def _each(pipe: Any, count: int) -> dict[str, Any]:
    found = {name: [value] * count for name, value in _pictures(pipe).items()}
    return found | _strength(pipe)


def _one(pipe: Any, count: int) -> dict[str, Any]:
    del count
    return _pictures(pipe) | _strength(pipe)


def _strength(pipe: Any) -> dict[str, float]:
    return {"strength": 1.0} if "strength" in _parameters(pipe) else {}


def _pictures(pipe: Any) -> dict[str, Image.Image]:
    side, known = _side(pipe), _parameters(pipe)
    pictures = {name: draw_picture(side) for name in _PICTURES if name in known}
    return pictures | {name: draw_mask(side) for name in _MASKS if name in known}


def _side(pipe: Any) -> int:
    """Return how many pixels a side of the pipeline's own pictures has."""
    sizes = [getattr(pipe, "default_sample_size", None)]
    sizes += [getattr(model.config, "sample_size", None) for model in _denoisers(pipe)]
    latent = next((size for size in sizes if type(size) is int), None)
    return _SIDE if latent is None else latent * getattr(pipe, "vae_scale_factor", 8)


def draw_picture(side: int) -> Image.Image:
    """Return a picture of smooth colours, edges and texture, the same for the same side."""
    y, x = np.mgrid[0:side, 0:side] / side
    ball = (x - 0.4) ** 2 + (y - 0.55) ** 2 < 0.06
    waves = 0.5 + 0.5 * np.sin(40 * x + 25 * y * y)
    colours = np.stack([0.2 + 0.6 * x, 0.3 + 0.5 * y * waves, np.where(ball, 0.9, 0.35)], axis=-1)
    return Image.fromarray(np.round(255 * colours).astype(np.uint8))


def draw_mask(side: int) -> Image.Image:
    """Return a mask that has the middle quarter repainted."""
    mask = np.zeros((side, side), np.uint8)
    mask[side // 4 : -(-3 * side // 4), side // 4 : -(-3 * side // 4)] = 255
    return Image.fromarray(mask)


#: How pipelines of a class are called, as ``rehearse`` found.
_CHOSEN: "WeakKeyDictionary[type, _Giver]" = WeakKeyDictionary()
