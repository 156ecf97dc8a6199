"""Replaying the steps of denoisers: recorded once per shape, launched again without Python.

A denoiser that is called module by module keeps a fast GPU waiting for Python. Its first call with
arguments of new shapes runs eagerly and is then recorded into a CUDA or HIP graph; later ones copy
their tensors into the recorded ones and launch all kernels at once. Nothing is compiled. What the
graph cannot know (other weights, adapters, processors, hooks) is looked for at each call, while the
device is busy: a step that was launched of a model that had changed is thrown away, for it wrote to
memory of its own alone. What cannot be recorded runs eagerly, with its reason.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from quantkit.errors import InputError
from quantkit.models.attention_modules import denoisers_of
from quantkit.pipelines.observer import Observer
from quantkit.pipelines.replayed_step import Replayed, Step


@dataclass(frozen=True)
class Replaying:
    """The denoisers whose steps are replayed, by name."""

    steps: Mapping[str, Step]

    @property
    def denoisers(self) -> dict[str, Replayed]:
        """Statistics of each denoiser's steps so far."""
        return {name: step.replayed for name, step in self.steps.items()}

    def __str__(self) -> str:
        """Return a line per denoiser."""
        return "\n".join(f"{name}: {found}" for name, found in self.denoisers.items())


def replay(model: Any, *, enabled: bool = True) -> Replaying:
    """Replay the steps of a pipeline's denoisers, or of one denoiser, on CUDA and HIP devices.

    Args:
        model: a diffusers pipeline or a denoiser, packed or not.
        enabled: False gives their own forward back, and their recorded steps' memory.

    Returns:
        what becomes of their steps; it goes on counting.

    Raises:
        InputError: nothing that denoises.
    """
    parts = {"": model} if isinstance(model, nn.Module) else denoisers_of(model)
    if not parts:
        raise InputError(
            f"replay: {type(model).__name__} has no denoiser; pass a pipeline, its unet or its "
            "transformer"
        )
    for part in parts.values():
        _uninstall(part)
    if not enabled:
        return Replaying({})
    return Replaying({name or type(part).__name__: _install(part) for name, part in parts.items()})


@contextmanager
def observed(model: nn.Module, observer: Observer, hooks: AbstractSet[int]) -> Iterator[None]:
    """Replay a denoiser's steps within the body, with what observes them.

    Args:
        model: a denoiser.
        observer: takes something of every call.
        hooks: ids of its hooks.
    """
    _install(model, observer, hooks)
    try:
        yield
    finally:
        _uninstall(model)


@contextmanager
def replayed(model: Any) -> Iterator[None]:
    """Replay the steps of a pipeline's denoisers within the body, where they are not already."""
    parts = denoisers_of(model).values()
    own = [part for part in parts if not isinstance(vars(part).get("forward"), Step)]
    for part in own:
        _install(part)
    try:
        yield
    finally:
        for part in own:
            _uninstall(part)


def _install(
    model: nn.Module, observer: Observer | None = None, hooks: AbstractSet[int] = frozenset()
) -> Step:
    step = Step(model, observer, hooks)
    vars(model)["forward"] = step
    return step


def _uninstall(model: nn.Module) -> None:
    step = vars(model).get("forward")
    if not isinstance(step, Step):
        return
    del vars(model)["forward"]
    step.forget()
    if step.own is not None:
        vars(model)["forward"] = step.own
