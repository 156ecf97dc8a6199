"""Loading a diffusers pipeline for calibration and running it over prompts, up to the latents."""

import re
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from quantkit import resources
from quantkit.errors import ModelError, PromptError, QuantkitError
from quantkit.models.component_layers import list_layers
from quantkit.models.source import Model
from quantkit.pipelines.batches import Batch, GrowingBatches, split_batches
from quantkit.pipelines.calling import Call, rehearse
from quantkit.pipelines.compute_dtype import usual_dtype
from quantkit.pipelines.own_inputs import OwnInputs
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.storage.inputfile import read_text, refuse_odd_files, split_lines
from quantkit.storage.jsonfile import read_json, short
from quantkit.storage.limits import MAX_COUNT

#: A million prompts of a few words; the largest lists of prompts have less.
_MAX_PROMPT_BYTES = 64 * 2**20
_DEVICE = re.compile(r"cpu|(cuda|hip)(:[0-9]{1,3})?")


def read_prompts(path: Path | None) -> tuple[str, ...]:
    """Return the prompts of a UTF-8 file, one a line; blank lines do not count.

    Args:
        path: None for the bundled general set.

    Raises:
        PromptError: no such file, not UTF-8, or no prompt in it.
    """
    path = path or resources.recipes() / "prompts.txt"
    text = read_text(path, _MAX_PROMPT_BYTES, error=PromptError)
    lines = [(number, line.strip()) for number, line in enumerate(split_lines(text), 1)]
    prompts = [(number, line) for number, line in lines if line]
    if not prompts:
        raise PromptError(f"{path}: empty, expected one prompt a line")
    if len(prompts) > MAX_COUNT:
        raise PromptError(f"{path}: {len(prompts)} prompts, expected at most {MAX_COUNT}")
    for number, line in prompts:
        # A tab is in many lists; other control characters mean that this is no list of texts.
        odd = next((c for c in line if c != "\t" and unicodedata.category(c) == "Cc"), None)
        if odd is not None:
            raise PromptError(
                f"{path}: line {number}: holds the control character U+{ord(odd):04X}, expected "
                "text; delete it, or save the file as plain text"
            )
    return tuple(line for _, line in prompts)


def choose_device(text: str) -> torch.device:
    """Return the device that ``auto``, ``cpu``, ``cuda[:N]`` or ``hip[:N]`` names.

    To torch, cards of AMD are cuda; hip is one of AMD's and nothing else.

    Raises:
        ModelError: torch does not know it, or it is not on this machine.
    """
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # torch knows meta and a dozen more that no pipeline runs on.
    if not _DEVICE.fullmatch(text):
        raise ModelError(f"device {text!r:.80}: unknown, expected auto, cpu, cuda[:N] or hip[:N]")
    if text.startswith("hip") and torch.version.hip is None:
        raise ModelError(
            f"device {text!r}: torch {torch.__version__} is not built for ROCm; install PyTorch "
            "for ROCm first, or choose cuda or cpu",
            fields=("device",),
        )
    device = torch.device(text.replace("hip", "cuda"))
    refuse_absent(device, text)
    return device


def refuse_absent(device: torch.device, text: str) -> None:
    """Refuse a GPU that torch does not see; ``text`` is how the user calls it.

    Raises:
        ModelError: with the number of those that it sees.
    """
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ModelError(
            f"device {text!r:.80}: torch sees {count or 'no'} GPU{'s' * (count != 1)}; choose cpu, "
            "or run 'quantkit doctor', which says why",
            fields=("device",),
        )


def choose_dtype(model: Model, device: torch.device) -> torch.dtype:
    """Return float32 on the CPU, else the 16-bit dtype of the weights (float16 for float32)."""
    stored = {layer.weight.dtype for layer in list_layers(model.components[0])}
    return usual_dtype(stored, device)


def refuse_component(model: Model) -> None:
    """Refuse what cannot be run, before anything long begins.

    Raises:
        ModelError: MODEL is one component.
    """
    if not model.is_pipeline:
        raise ModelError(
            f"{model.path}: a component alone, and calibration runs the whole pipeline; pass the "
            "pipeline's directory"
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
    refuse_component(model)
    dtype = dtype or choose_dtype(model, device)
    with loading_by_diffusers(model.path, cure="download it again"):
        return load_directory(model.path, device, dtype, variant=model.components[0].variant)


@contextmanager
def loading_by_diffusers(path: Path, *, cure: str) -> Iterator[None]:
    """Turn errors of diffusers, transformers or tokenizers into one line.

    Args:
        path: what is loaded.
        cure: what the user should do.

    Raises:
        ModelError: whatever it was: tokenizers raise bare exceptions.
    """
    try:
        yield
    except (QuantkitError, MemoryError):
        raise
    except Exception as error:
        raise ModelError(f"{path}: diffusers cannot load it: {short(error)}; {cure}") from error


def load_directory(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    variant: str | None = None,
    components: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Return the pipeline in a directory of any origin, without a safety checker.

    Args:
        path: of a diffusers pipeline.
        device: where to put it.
        dtype: of every component that is not quantized.
        variant: of the weights.
        components: loaded already, in place of those of the directory.

    Raises:
        ModelError: a file that would block. And what diffusers raises.
    """
    from diffusers import DiffusionPipeline

    extra: dict[str, Any] = dict(components)
    if "safety_checker" in read_json(path / "model_index.json"):
        extra |= {"safety_checker": None, "requires_safety_checker": False}
    refuse_odd_files(path)
    pipe = DiffusionPipeline.from_pretrained(
        str(path), torch_dtype=dtype, variant=variant, use_safetensors=True, **extra
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def run_batch(
    pipe: Any, batch: Batch, settings: CalibrationRecipe, inputs: OwnInputs | None = None
) -> Tensor:
    """Denoise a batch and return its final latents, a prompt along the first axis.

    Args:
        pipe: a pipeline.
        batch: its prompts.
        settings: how.
        inputs: as ``rehearse_prompts`` found.

    Raises:
        ModelError: the pipeline does not take these settings.
    """
    call = _call(batch.prompts, batch.seeds, settings)
    try:
        output = pipe(**replace(call, inputs=inputs).arguments(pipe))
    except ValueError as error:
        # A scheduler that was trained on fewer steps, say.
        raise ModelError(
            f"{type(pipe).__name__} cannot run {settings.steps} steps: {short(error)}"
        ) from error
    # Videos have frames.
    latents: Tensor = output.images if "images" in output else output.frames
    return latents


def rehearse_prompts(
    pipe: Any, prompts: Sequence[str], settings: CalibrationRecipe, *, denoises: bool = True
) -> OwnInputs | None:
    """Try what ``run_prompts`` is about to do, up to the denoiser's first answer.

    Args:
        pipe: a pipeline.
        prompts: of the run.
        settings: how.
        denoises: False tries what ``encode_prompts`` does.

    Returns:
        what its batches pass besides prompts; None: nothing.

    Raises:
        ModelError: the pipeline cannot be run so.
    """
    seeds = range(settings.seed, settings.seed + len(prompts))
    return rehearse(pipe, _call(prompts, seeds, settings), denoises=denoises)


def _call(prompts: Sequence[str], seeds: Sequence[int], settings: CalibrationRecipe) -> Call:
    return Call(tuple(prompts), tuple(seeds), settings.steps, settings.guidance)


def run_prompts(
    pipe: Any,
    prompts: Sequence[str],
    settings: CalibrationRecipe,
    begin: Callable[[Batch], None] = lambda _: None,
    inputs: OwnInputs | None = None,
) -> None:
    """Denoise all prompts, as many batches at once as there is room for; latents are thrown away.

    Args:
        pipe: a pipeline.
        prompts: texts.
        settings: how.
        begin: told of what runs next.
        inputs: as ``rehearse_prompts`` found.
    """
    growing = GrowingBatches(split_batches(prompts, settings), pipe.device)
    while growing:
        with growing.next() as batch:
            begin(batch)
            run_batch(pipe, batch, settings, inputs)


class _EncodedError(Exception):
    """The prompts are encoded, and denoising would begin."""


def encode_prompts(
    pipe: Any,
    denoisers: Sequence[str],
    prompts: Sequence[str],
    settings: CalibrationRecipe,
    inputs: OwnInputs | None = None,
) -> None:
    """Run the pipeline's text encoders on all prompts, in batches, as the pipeline runs them.

    Args:
        pipe: whose own call encodes; it is left where a denoiser would be called.
        denoisers: names of its components.
        prompts: texts.
        settings: batch and guidance, which decides if empty prompts are encoded, too.
        inputs: as ``rehearse_prompts`` found.
    """

    def leave(*_: Any) -> None:
        raise _EncodedError

    handles = [getattr(pipe, name).register_forward_pre_hook(leave) for name in denoisers]
    try:
        for batch in split_batches(prompts, settings):
            with suppress(_EncodedError):
                run_batch(pipe, batch, settings, inputs)
    finally:
        for handle in handles:
            handle.remove()


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
