"""Calling a pipeline with prompts and, where it takes them, generated inputs; trial calls."""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import ModelError, QuantkitError
from quantkit.models.attention_modules import denoisers_of
from quantkit.pipelines.own_inputs import OwnInputs, parameters_of, taken_by
from quantkit.storage.jsonfile import DAMAGE, short

_LOG = logging.getLogger(__name__)

#: Errors of pipelines that lack an input or cannot run it.
_REFUSALS = (*DAMAGE, RuntimeError, OSError, ImportError, AssertionError, MemoryError)
#: Pixels of a side where neither pipeline nor denoiser says.
_SIDE = 512
#: How many prompts a trial with inputs has: a list and one picture differ from two on.
_TRIED = 2
#: A picture's latents: (B, C, H, W).
_PICTURE_DIM = 4


@dataclass(frozen=True)
class Call:
    """One call of a pipeline."""

    prompts: tuple[str, ...]
    #: of each prompt's noise
    seeds: tuple[int, ...]
    steps: int
    #: None: the pipeline's own default
    guidance: float | None = None
    #: latent or np
    output: str = "latent"
    #: inputs that ``rehearse`` found; None: prompts alone
    inputs: OwnInputs | None = None

    def arguments(self, pipe: Any) -> dict[str, Any]:
        """Return the arguments of the pipeline's call."""
        guidance = {} if self.guidance is None else {"guidance_scale": self.guidance}
        inputs = {} if self.inputs is None else self.inputs.arguments(pipe, len(self.prompts))
        return {
            "prompt": list(self.prompts),
            "num_inference_steps": self.steps,
            # One generator a prompt, on the CPU: neither batch nor device changes the noise.
            "generator": [torch.Generator("cpu").manual_seed(seed) for seed in self.seeds],
            "output_type": self.output,
            **guidance,
            **inputs,
        }

    def first(self, count: int) -> "Call":
        """Return the call of the first prompts."""
        return replace(self, prompts=self.prompts[:count], seeds=self.seeds[:count])


def rehearse(pipe: Any, call: Call, *, denoises: bool = True) -> OwnInputs | None:
    """Try a call up to the denoiser's first answer, on the longest prompt.

    Args:
        pipe: a diffusers pipeline; nothing listens to it yet.
        call: of all prompts, with the steps and the guidance of the long run.
        denoises: False leaves the pipeline where the denoiser is asked.

    Returns:
        what later calls pass besides prompts, wherever the pipeline takes it; None: nothing.

    Raises:
        ModelError: the pipeline cannot be run so; the text names what it lacks.
    """
    _refuse_uncallable(pipe)
    call = _longest_first(pipe, call)
    trial, reasons = _Trial(pipe, denoises), list[BaseException]()
    for inputs in _ways(pipe):
        given = replace(call, inputs=inputs)
        found = trial.run(given)
        if isinstance(found, _Begun):
            if inputs is None:
                _warn(pipe, reasons)
            return trial.fitting(given, found)
        reasons.append(found)
    error = _telling(reasons)
    raise ModelError(_refusal(pipe, call, error)) from error


def fewest_steps(pipe: Any, call: Call, least: int) -> Call:
    """Return the call with so few steps, or as few above as the scheduler takes.

    Raises:
        ModelError: not even all steps can be run.
    """
    for steps in range(min(least, call.steps), call.steps):
        few = replace(call, steps=steps)
        if _runs(pipe, few):
            return few
    rehearse(pipe, call)
    return call


def step_range(pipe: Any, call: Call) -> tuple[int, int]:
    """Return the fewest and the most steps of schedules around that of a call.

    Half as many and twice as many, as far as the scheduler takes them; with one step, one.
    """
    if call.steps == 1:
        return 1, 1
    twice = replace(call, steps=2 * call.steps)
    most = twice if _runs(pipe, twice) else call
    return fewest_steps(pipe, call, max(2, call.steps // 2)).steps, most.steps


def _runs(pipe: Any, call: Call) -> bool:
    """Tell whether a call reaches the denoiser's first answer."""
    return isinstance(_Trial(pipe).run(call), _Begun)


def _longest_first(pipe: Any, call: Call) -> Call:
    """Return the call with the prompt that most is encoded of before all others."""
    longest = max(range(len(call.prompts)), key=lambda i: _tokens(pipe, call.prompts[i]))
    order = (longest, *(i for i in range(len(call.prompts)) if i != longest))
    return replace(call, prompts=tuple(call.prompts[i] for i in order))


def _tokens(pipe: Any, prompt: str) -> int:
    """Return how many tokens a prompt has for the tokenizer that makes most of it."""
    tokenizers = [
        part for name, part in getattr(pipe, "components", {}).items() if "tokenizer" in name
    ]
    counts = [len(tokenizer.tokenize(prompt)) for tokenizer in tokenizers
              if hasattr(tokenizer, "tokenize")]  # fmt: skip
    return max(counts, default=len(prompt))


def _ways(pipe: Any) -> tuple[OwnInputs | None, ...]:
    """Return the calls to try: one picture for all prompts, one for each, a prompt alone.

    Pipelines that edit pictures, and take prompts alone all the same, are calibrated on pictures.
    """
    if not taken_by(pipe):
        return (None,)
    side = _side(pipe)
    return OwnInputs(side, listed=False), OwnInputs(side, listed=True), None


def _side(pipe: Any) -> int:
    """Return how many pixels a side of the pipeline's own pictures has."""
    latent = getattr(pipe, "default_sample_size", None)
    latent = latent if type(latent) is int else _sample_size(pipe)
    return _SIDE if latent is None else latent * getattr(pipe, "vae_scale_factor", 8)


def _sample_size(pipe: Any) -> int | None:
    """Return the side of the latents that a denoiser was made for."""
    sizes = (getattr(model.config, "sample_size", None) for model in _denoisers(pipe))
    return next((size for size in sizes if type(size) is int), None)


@dataclass(frozen=True)
class _Begun:
    """The denoiser has answered once."""

    #: the larger side of what it read; None: no picture
    latent: int | None


class _BegunError(Exception):
    """Leaves the pipeline."""

    def __init__(self, begun: _Begun) -> None:
        self.begun = begun


@dataclass(frozen=True, eq=False)
class _Trial:
    """Runs calls until the denoiser has answered once, or is asked."""

    pipe: Any
    #: until it has answered
    denoises: bool = True

    def run(self, call: Call) -> _Begun | BaseException:
        """Run a call, or return what it raises.

        A list is tried of two lengths: as many pictures as there are prompts may be as many as
        there are ControlNets by chance.
        """
        inputs = call.inputs
        counts = (1,) if inputs is None else (_TRIED, 1) if inputs.listed else (_TRIED,)
        try:
            begun = [self._begin(call.first(count)) for count in counts]
        except (QuantkitError, torch.OutOfMemoryError):
            raise
        except _REFUSALS as error:
            return error
        return begun[0]

    def fitting(self, call: Call, begun: _Begun) -> OwnInputs | None:
        """Return the inputs with pictures that the denoiser reads at its own size.

        Those of an upscaler are as large as its latents.
        """
        inputs, own = call.inputs, _sample_size(self.pipe)
        if inputs is None or begun.latent is None or own is None or begun.latent <= own:
            return inputs
        smaller = replace(inputs, side=inputs.side * own // begun.latent)
        found = self.run(replace(call, inputs=smaller))
        return inputs if isinstance(found, BaseException) else smaller

    def _begin(self, call: Call) -> _Begun:
        with self._leaving():
            try:
                self.pipe(**call.arguments(self.pipe))
            except _BegunError as left:
                return left.begun
        return _Begun(None)

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *__: Any) -> None:
            read = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            shape = () if read is None else read.shape
            raise _BegunError(_Begun(max(shape[-2:]) if len(shape) == _PICTURE_DIM else None))

        models = _denoisers(self.pipe)
        if self.denoises:
            handles = [m.register_forward_hook(leave, with_kwargs=True) for m in models]
        else:
            handles = [m.register_forward_pre_hook(leave, with_kwargs=True) for m in models]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _denoisers(pipe: Any) -> list[nn.Module]:
    """Return the models that denoise; a ControlNet answers before them."""
    found = list(denoisers_of(pipe).values())
    others = [m for m in found if "controlnet_cond" not in inspect.signature(m.forward).parameters]
    return others or found


def _telling(reasons: list[BaseException]) -> BaseException:
    """Return the error of the call with most inputs: a prompt alone lacks the others."""
    return reasons[max(0, len(reasons) - 2)]


def _warn(pipe: Any, reasons: list[BaseException]) -> None:
    """Warn that a pipeline which also takes pictures runs on prompts alone."""
    if reasons:
        _LOG.warning(
            "%s: run on prompts alone, because it cannot be run with %s of quantkit's own: %s",
            type(pipe).__name__, ", ".join(taken_by(pipe)), short(_telling([*reasons, reasons[0]])),
        )  # fmt: skip


def _refusal(pipe: Any, call: Call, error: BaseException) -> str:
    given = ", ".join(taken_by(pipe))
    what = f"prompts and {given} of quantkit's own" if given else "a prompt alone"
    return (
        f"{type(pipe).__name__} cannot run {call.steps} steps on {what} ({call.prompts[0]!r:.60}): "
        f"{short(error)}; try it in diffusers with the same, give other prompts or steps, or pack "
        "it with a recipe that needs no calibration, as fp8"
    )


def _refuse_uncallable(pipe: Any) -> None:
    """Refuse pipelines that prompts and quantkit's generated inputs cannot run.

    Raises:
        ModelError: naming what it needs.
    """
    known = parameters_of(pipe)
    have = {*taken_by(pipe), "prompt"}
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
