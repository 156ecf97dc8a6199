"""Building the rows of denoiser_classes, and asking the models."""

import inspect
from typing import Any

import torch

from tests.support.denoiser_classes import Row


def tiny_model(row: Row) -> Any:
    """Return a tiny model, whose tensors are all random: also those that are made as zeros."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(diffusers, row.class_name)(**row.config).eval()
        for name, parameter in model.named_parameters():
            if ".experts." in name and parameter.ndim == 3:
                # Left by its class to whoever loads it.
                parameter.data.normal_(std=0.1)
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model.requires_grad_(False)


def answer(row: Row, model: Any) -> torch.Tensor:
    """Return what a model makes of inputs that are always the same, in float32."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(7)
        inputs = {name: _made(value) for name, value in row.inputs.items()}
        found = model(**inputs, return_dict=False) if _says(model) else model(**inputs)
    while isinstance(found, list | tuple):
        found = found[0]
    return found.float()


def _says(model: Any) -> bool:
    return "return_dict" in inspect.signature(model.forward).parameters


def _made(value: Any) -> Any:
    if isinstance(value, tuple):
        return torch.randn(value)
    if isinstance(value, int | float):
        return torch.tensor([value])
    return value()
