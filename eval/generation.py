"""Pictures from a pipeline, so that two pipelines start from the same noise."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from quantkit.errors import InputError, PromptError
from quantkit.progress import Progress, silent

from .images import Pixels, to_pixels


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
    prepare(pipe)
    pictures: list[Pixels] = []
    started = perf_counter()
    for start in range(0, len(settings.prompts), settings.batch):
        pictures += _generate_batch(pipe, settings, start, label, progress)
    total = len(settings.prompts) * settings.steps
    progress(label, total, total)
    return Generated(tuple(pictures), perf_counter() - started)


def prepare(pipe: Any) -> None:
    """Silence diffusers' own bar and take out the safety checker.

    The checker blackens pictures, in one pipeline and not in the other, which no metric can see
    through.
    """
    pipe.set_progress_bar_config(disable=True)
    if getattr(pipe, "safety_checker", None) is not None:
        pipe.safety_checker = None


def choose_prompts(path: Path | None, count: int | None) -> tuple[str, ...]:
    """Return ``count`` prompts of a file, or of the bundled set.

    The bundled set is read from its end: calibration reads it from its start, and a pipeline
    should be judged on prompts that its scales were not chosen on.

    Raises:
        PromptError: an unreadable file, or fewer prompts than wanted.
    """
    from quantkit.calibration.running import read_prompts

    prompts = tuple(read_prompts(path))
    count = count or (len(prompts) if path else 16)
    if len(prompts) < count:
        raise PromptError(
            f"{path or 'bundled prompts'}: {len(prompts)} prompts, wanted {count}; "
            "lower --count or pass a longer --prompts FILE"
        )
    return prompts[:count] if path else prompts[-count:]


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
