"""Pictures from a pipeline, so that two pipelines start from the same noise."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from quantkit.eval.measuring.initial_noise import one_noise
from quantkit.eval.measuring.pictures import Pixels, to_pixels
from quantkit.eval.measuring.step_errors import StepLatents

from quantkit.errors import InputError, ModelError, PromptError
from quantkit.pipelines.calling import Call, rehearse
from quantkit.pipelines.own_inputs import OwnInputs
from quantkit.pipelines.replay import replayed
from quantkit.pipelines.running import read_prompts
from quantkit.progress import Progress, silent

#: Prompts of the bundled set that are compared when nobody says how many, by kind of device.
DEFAULT_COUNTS = {"cpu": 16, "cuda": 64}

#: Told the latents after every step.
Listener = Callable[[StepLatents], None]
#: Told the pictures of every batch, with the position of the first.
Viewer = Callable[[int, Sequence[Pixels]], None]


@dataclass(frozen=True)
class GenerationSettings:
    """Prompts, seeds and steps of both pipelines."""

    prompts: tuple[str, ...]
    #: one per prompt
    seeds: tuple[int, ...]
    steps: int
    #: None takes the pipeline's own default
    guidance: float | None = None
    #: prompts at a time; changes memory and speed, not the noise
    batch: int = 4
    #: beside prompts, as ``rehearse_pictures`` found; None: nothing
    inputs: OwnInputs | None = None

    def __post_init__(self) -> None:
        assert len(self.prompts) == len(self.seeds)

    @property
    def call(self) -> Call:
        """One call of a pipeline with all of the prompts."""
        return Call(self.prompts, self.seeds, self.steps, self.guidance, "np", self.inputs)


@dataclass(frozen=True)
class Generated:
    """The pictures of one pipeline, in the order of the prompts."""

    pictures: tuple[Pixels, ...]
    seconds: float
    #: most memory of the card that torch had in use at once; None: it ran on the CPU
    peak_bytes: int | None = None


def make_settings(
    prompts: Sequence[str], *, steps: int, guidance: float | None, seed: int, batch: int
) -> GenerationSettings:
    """Return settings in which prompt i has seed ``seed + i``.

    Raises:
        PromptError: no prompts, or an empty one.
        InputError: fewer than one step or prompt at a time.
    """
    if not prompts:
        raise PromptError("no prompts; expected at least one")
    for index, prompt in enumerate(prompts):
        if not prompt.strip():
            raise PromptError(f"prompt {index}: empty; expected text on every line")
    if steps < 1 or batch < 1:
        raise InputError(f"steps {steps}, batch {batch}: expected at least 1 of both")
    seeds = tuple(seed + index for index in range(len(prompts)))
    return GenerationSettings(tuple(prompts), seeds, steps, guidance, batch)


def unheard(step: StepLatents) -> None:
    """Listen to nothing."""
    del step


def unseen(start: int, pictures: Sequence[Pixels]) -> None:
    """Look at nothing."""
    del start, pictures


def rehearse_pictures(pipe: Any, settings: GenerationSettings) -> GenerationSettings:
    """Try what ``generate`` is about to do, up to the denoiser's first answer.

    Returns:
        the settings, with what the pipeline is given beside prompts.

    Raises:
        ModelError: the pipeline cannot be run so, or makes no pictures.
    """
    if "num_frames" in inspect.signature(pipe.__call__).parameters:
        raise ModelError(
            f"{type(pipe).__name__} makes videos, and eval compares pictures; look at a few of both"
        )
    return replace(settings, inputs=rehearse(pipe, settings.call))


def generate(
    pipe: Any,
    settings: GenerationSettings,
    *,
    label: str,
    progress: Progress = silent,
    listener: Listener = unheard,
    viewer: Viewer = unseen,
    replay: bool = False,
) -> Generated:
    """Run the pipeline over all prompts.

    Args:
        pipe: a diffusers text-to-image pipeline.
        settings: the same value for every pipeline that is compared.
        label: what progress and errors call this pipeline.
        progress: told about every denoising step of every prompt.
        listener: told the latents after every step; never, when the pipeline has no callback.
        viewer: told the pictures of every batch.
        replay: record the denoisers' steps on a GPU, and launch them again.

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
    device = torch.device(pipe.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = perf_counter()
    with one_noise(pipe), replayed(pipe) if replay else nullcontext():
        for start in range(0, len(settings.prompts), settings.batch):
            call = _Batch(settings, start, label, progress, listener)
            pictures += call.run(pipe)
            viewer(start, pictures[start:])
    total = len(settings.prompts) * settings.steps
    progress(label, total, total)
    seconds = perf_counter() - started
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Generated(tuple(pictures), seconds, peak)


def choose_prompts(
    given: Path | Sequence[str] | None, count: int | None, *, device: torch.device, last: bool
) -> tuple[str, ...]:
    """Return ``count`` prompts of those that are given, or of the bundled set.

    Args:
        given: texts, or a file with one prompt a line; None for the bundled set.
        count: None for all of a file, or DEFAULT_COUNTS of the bundled set.
        device: where the pipelines will run.
        last: take them from the end. Calibration reads prompts from the start, and a pipeline is
            better judged on others than those that its scales were chosen on.

    Raises:
        PromptError: an unreadable file, or fewer prompts than expected.
    """
    if given is None or isinstance(given, Path):
        prompts, where = read_prompts(given), str(given or "bundled prompts")
    else:
        prompts, where = tuple(given), "prompts"
    default = DEFAULT_COUNTS["cpu" if device.type == "cpu" else "cuda"]
    count = count or (default if given is None else len(prompts))
    if len(prompts) < count:
        raise PromptError(
            f"{where}: {len(prompts)} prompts, expected {count}; lower the count or give more "
            "prompts",
            fields=("count", "prompts"),
        )
    return prompts[-count:] if last else prompts[:count]


def choose_unseen(
    prompts: Sequence[str], seen: Sequence[str], *, device: torch.device
) -> tuple[str, ...]:
    """Return as many prompts as DEFAULT_COUNTS says, at most, that calibration did not see.

    Args:
        prompts: to choose from; the last are taken.
        seen: those that scales and masks were chosen on.
        device: where the pipelines will run.

    Returns:
        prompts that are not among ``seen``; where all of them are, the last all the same.
    """
    known = frozenset(seen)
    others = [prompt for prompt in prompts if prompt not in known] or list(prompts)
    return tuple(others[-DEFAULT_COUNTS["cpu" if device.type == "cpu" else "cuda"] :])


@dataclass(frozen=True)
class _Batch:
    """One call of a pipeline, for the prompts from ``start`` on."""

    settings: GenerationSettings
    start: int
    label: str
    progress: Progress
    listener: Listener

    @property
    def prompts(self) -> tuple[str, ...]:
        return self.settings.prompts[self.start : self.start + self.settings.batch]

    def run(self, pipe: Any) -> list[Pixels]:
        images = pipe(**self._arguments(pipe)).images
        return [
            to_pixels(image, name=f"{self.label}, prompt {self.start + offset} ({prompt!r})")
            for offset, (image, prompt) in enumerate(zip(images, self.prompts, strict=True))
        ]

    def _arguments(self, pipe: Any) -> dict[str, Any]:
        settings = self.settings
        seeds = settings.seeds[self.start : self.start + settings.batch]
        call = replace(settings.call, prompts=self.prompts, seeds=seeds)
        arguments = call.arguments(pipe)
        known = inspect.signature(pipe.__call__).parameters
        if "callback_on_step_end" in known:
            arguments["callback_on_step_end"] = self._on_step_end
        elif "callback" in known:
            # PixArt's pipelines have the older one only.
            arguments["callback"] = self._tell
        return arguments

    def _on_step_end(
        self, _pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        self._tell(index, timestep, tensors["latents"])
        return tensors

    def _tell(self, index: int, timestep: Any, latents: torch.Tensor) -> None:
        count, steps = len(self.prompts), self.settings.steps
        done = min(self.start * steps + (index + 1) * count, (self.start + count) * steps)
        self.progress(self.label, done, len(self.settings.prompts) * steps)
        self.listener(StepLatents(self.start, index, float(timestep), latents))
