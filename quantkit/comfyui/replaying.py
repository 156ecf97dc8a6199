"""Replaying the steps of ComfyUI's denoisers: recorded once, launched again without Python.

ComfyUI calls a model module by module. That keeps a fast card waiting, and products stay apart from
the norms and activations between them; see ``quantkit.pipelines.replay``.
"""

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from quantkit.pipelines.replayed_step import Step

#: Names of one sampling, and its callbacks: no model reads them, and each would be a new step.
_LEFT_OUT = ("uuids", "callbacks")


class ReplayedForward:
    """The forward of a denoiser of ComfyUI, whose steps are replayed while it is on the card."""

    def __init__(self, denoiser: nn.Module, device: torch.device) -> None:
        """Record nothing yet.

        Args:
            denoiser: ComfyUI's.
            device: where ComfyUI computes it.
        """
        self._denoiser, self._device = denoiser, device
        self._step = Step(denoiser, device=device, obstacle=self._obstacle)
        self._own = denoiser.forward
        self._step.own = self._on_copies
        # Other nodes ask what a model takes.
        self.__signature__ = self._step.__signature__

    @property
    def replayed(self) -> Any:
        """Statistics of the model's steps."""
        return self._step.replayed

    def forget(self) -> None:
        """Free what was recorded: a weight is moved or patched."""
        self._step.forget()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the denoiser's forward returns."""
        options = kwargs.get("transformer_options", {})
        kept = {name: value for name, value in options.items() if name not in _LEFT_OUT}
        return self._step(*args, **{**kwargs, "transformer_options": kept})

    def _obstacle(self) -> str:
        for module in self._denoiser.modules():
            if getattr(module, "weight_function", None) or getattr(module, "bias_function", None):
                return "weights are patched for each product"
            if "forward" in vars(module) and module is not self._denoiser:
                # Put in its place for each sampling, so that each would have to be recorded.
                return "layers are called through those of Load LoRA (Bypass)"
        if any(parameter.device != self._device for parameter in self._denoiser.parameters()):
            return "weights are offloaded"
        return ""

    def _on_copies(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own forward on containers of its own: models write to those, and pop."""
        copies = pytree.tree_map(lambda leaf: leaf, (args, kwargs))
        return self._own(*copies[0], **copies[1])


def replay_steps(denoiser: nn.Module, device: torch.device) -> ReplayedForward:
    """Let a denoiser of ComfyUI replay its steps.

    Args:
        denoiser: ComfyUI's, as it was loaded.
        device: where ComfyUI computes it.
    """
    forward = ReplayedForward(denoiser, device)
    vars(denoiser)["forward"] = forward
    return forward
