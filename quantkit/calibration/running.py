"""Loading a diffusers pipeline for calibration and running it over prompts, up to the latents."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit import resources
from quantkit.errors import ModelError, PromptError
from quantkit.jsonfile import read_json
from quantkit.models.layers import list_layers
from quantkit.models.source import Model
from quantkit.recipe import CalibrationRecipe


def read_prompts(path: Path | None) -> tuple[str, ...]:
    """Return the prompts of a UTF-8 file, one a line; blank lines do not count.

    Args:
        path: None for the bundled general set.

    Raises:
        PromptError: no such file, not UTF-8, or no prompt in it.
    """
    path = path or resources.recipes() / "prompts.txt"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{path}: not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}; "
            "save it as UTF-8"
        ) from error
    except OSError as error:
        raise PromptError(f"{path}: cannot be read ({error.strerror})") from error
    prompts = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not prompts:
        raise PromptError(f"{path}: empty, wanted one prompt a line")
    return prompts


def choose_device(text: str) -> torch.device:
    """Return the device that ``auto``, ``cpu`` or ``cuda[:N]`` names.

    Raises:
        ModelError: torch does not know it, or it is not on this machine.
    """
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ModelError(f"device {text!r}: unknown, wanted auto, cpu or cuda[:N]") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device {text!r}: torch sees {torch.cuda.device_count()} GPUs; pass --device cpu"
        )
    return device


def choose_dtype(model: Model, device: torch.device) -> torch.dtype:
    """Return float32 on the CPU, else the 16-bit dtype of the weights (float16 for float32)."""
    if device.type == "cpu":
        return torch.float32
    stored = {layer.weight.dtype for layer in list_layers(model.components[0])}
    return torch.bfloat16 if "BF16" in stored else torch.float16


def refuse_component(model: Model) -> None:
    """Refuse what cannot be run, before anything long begins.

    Raises:
        ModelError: MODEL is one component.
    """
    if not model.is_pipeline:
        raise ModelError(
            f"{model.path}: one component; calibration runs the whole pipeline, pass its directory"
        )


def load_pipeline(model: Model, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return the pipeline with one compute dtype, without a safety checker.

    Args:
        model: a pipeline.
        device: where to put it.
        dtype: of every component; None for ``choose_dtype``'s.

    Raises:
        ModelError: MODEL is one component, or diffusers cannot load it.
    """
    from diffusers import DiffusionPipeline

    refuse_component(model)
    extra: dict[str, Any] = {}
    if "safety_checker" in read_json(model.path / "model_index.json"):
        extra = {"safety_checker": None, "requires_safety_checker": False}
    dtype = dtype or choose_dtype(model, device)
    try:
        pipe = DiffusionPipeline.from_pretrained(
            str(model.path), torch_dtype=dtype, variant=model.components[0].variant, **extra
        )
    except (OSError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{model.path}: diffusers cannot load it: {reason}") from error
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


@dataclass(frozen=True)
class Batch:
    """Prompts that are denoised together."""

    prompts: tuple[str, ...]
    #: of each prompt's noise: its own, so that a batch size changes no statistics but rounding
    seeds: range


def split_batches(prompts: Sequence[str], settings: CalibrationRecipe) -> tuple[Batch, ...]:
    """Return the batches; prompt i has the noise seed ``settings.seed`` + i."""
    starts = range(0, len(prompts), settings.batch)
    parts = [tuple(prompts[start : start + settings.batch]) for start in starts]
    firsts = [settings.seed + start for start in starts]
    return tuple(
        Batch(part, range(first, first + len(part)))
        for part, first in zip(parts, firsts, strict=True)
    )


def run_batch(pipe: Any, batch: Batch, settings: CalibrationRecipe) -> Tensor:
    """Denoise a batch and return its final latents, a prompt along the first axis."""
    guidance = {} if settings.guidance is None else {"guidance_scale": settings.guidance}
    latents: Tensor = pipe(
        prompt=list(batch.prompts),
        num_inference_steps=settings.steps,
        generator=[torch.Generator("cpu").manual_seed(seed) for seed in batch.seeds],
        output_type="latent",
        **guidance,
    ).images
    return latents


def run_prompts(pipe: Any, prompts: Sequence[str], settings: CalibrationRecipe) -> None:
    """Denoise all prompts, in batches; the latents are thrown away."""
    for batch in split_batches(prompts, settings):
        run_batch(pipe, batch, settings)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep the bars and remarks of diffusers and transformers off the terminal."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    before = [(library.get_verbosity(), library.is_progress_bar_enabled()) for library in libraries]
    try:
        for library in libraries:
            library.set_verbosity_error()
            library.disable_progress_bar()
        with warnings.catch_warnings():
            # Deprecations between the libraries' versions are not the user's to act on.
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for library, (verbosity, bars) in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
            if bars:
                library.enable_progress_bar()
