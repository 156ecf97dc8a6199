"""Pictures from a pipeline, so that two pipelines start from the same noise."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from quantkit.calibration.running import read_prompts
from quantkit.errors import InputError, PromptError
from quantkit.progress import Progress, silent

from .images import Pixels, to_pixels

#: Prompts of the bundled set that are compared when nobody says how many.
DEFAULT_COUNT = 16


@dataclass(frozen=True)
class Settings:
    """What both pipelines are given."""

    prompts: tuple[str, ...]
    #: one per prompt
    seeds: tuple[int, ...]
    steps: int
    #: None takes the pipeline's own default
    guidance: float | None = None
    #: prompts at a time; changes memory and speed, not the noise
    batch: int = 4

    def __post_init__(self) -> None:
        assert len(self.prompts) == len(self.seeds)


@dataclass(frozen=True)
class Generated:
    """The pictures of one pipeline, in the order of the prompts."""

    pictures: tuple[Pixels, ...]
    seconds: float


def make_settings(
    prompts: Sequence[str], *, steps: int, guidance: float | None, seed: int, batch: int
) -> Settings:
    """Return settings in which prompt i has seed ``seed + i``.

    Raises:
        PromptError: no prompts, or an empty one.
        InputError: fewer than one step or prompt at a time.
    """
    if not prompts:
        raise PromptError("no prompts; wanted at least one")
    for index, prompt in enumerate(prompts):
        if not prompt.strip():
            raise PromptError(f"prompt {index}: empty; wanted text on every line")
    if steps < 1 or batch < 1:
        raise InputError(f"steps {steps}, batch {batch}: wanted at least 1 of both")
    seeds = tuple(seed + index for index in range(len(prompts)))
    return Settings(tuple(prompts), seeds, steps, guidance, batch)


def generate(
    pipe: Any, settings: Settings, *, label: str, progress: Progress = silent
) -> Generated:
    """Run the pipeline over all prompts.

    Args:
        pipe: a diffusers text-to-image pipeline.
        settings: the same value for every pipeline that is compared.
        label: what progress and errors call this pipeline.
        progress: told about every denoising step of every prompt.

    Returns:
        One picture per prompt and the wall time.

    Raises:
        NonFiniteError: a picture holds NaN or Inf; prompt and pipeline are named.
    """
    pipe.set_progress_bar_config(disable=True)
    if getattr(pipe, "safety_checker", None) is not None:
        # It blackens pictures, in one pipeline and not in the other: no metric sees through that.
        pipe.safety_checker = None
    pictures: list[Pixels] = []
    started = perf_counter()
    for start in range(0, len(settings.prompts), settings.batch):
        pictures += _generate_batch(pipe, settings, start, label, progress)
    total = len(settings.prompts) * settings.steps
    progress(label, total, total)
    return Generated(tuple(pictures), perf_counter() - started)


def choose_prompts(path: Path | None, count: int | None, *, last: bool) -> tuple[str, ...]:
    """Return ``count`` prompts of a file, or of the bundled set.

    Args:
        path: one prompt a line; None for the bundled set.
        count: None for all of a file, or 16 of the bundled set.
        last: take them from the end. Calibration reads prompts from the start, and a pipeline is
            better judged on others than those that its scales were chosen on.

    Raises:
        PromptError: an unreadable file, or fewer prompts than wanted.
    """
    prompts = tuple(read_prompts(path))
    count = count or (len(prompts) if path else DEFAULT_COUNT)
    if len(prompts) < count:
        raise PromptError(
            f"{path or 'bundled prompts'}: {len(prompts)} prompts, wanted {count}; "
            "lower --count or pass a longer --prompts FILE"
        )
    return prompts[-count:] if last else prompts[:count]


def _generate_batch(
    pipe: Any, settings: Settings, start: int, label: str, progress: Progress
) -> list[Pixels]:
    chosen = slice(start, start + settings.batch)
    prompts, seeds = settings.prompts[chosen], settings.seeds[chosen]
    total = len(settings.prompts) * settings.steps

    def on_step(_pipe: Any, step: int, _timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        done = (start + len(prompts)) * settings.steps
        progress(label, min(done, start * settings.steps + (step + 1) * len(prompts)), total)
        return kwargs

    arguments: dict[str, Any] = {
        "prompt": list(prompts),
        "num_inference_steps": settings.steps,
        # one generator per prompt, on the CPU: neither batch size nor device changes the noise
        "generator": [torch.Generator("cpu").manual_seed(seed) for seed in seeds],
        "output_type": "np",
    }
    if settings.guidance is not None:
        arguments["guidance_scale"] = settings.guidance
    if "callback_on_step_end" in inspect.signature(pipe.__call__).parameters:
        arguments["callback_on_step_end"] = on_step
    images = pipe(**arguments).images
    return [
        to_pixels(image, name=f"{label}, prompt {start + offset} ({prompts[offset]!r})")
        for offset, image in enumerate(images)
    ]
