"""Building the rows of denoiser_classes, and asking the models."""

from typing import Any

import torch

from quantkit.bench.kernels.compiled_blocks import blocks_of
from quantkit.bench.models.denoiser_inputs import first_tensor, make_inputs
from quantkit.bench.models.denoisers import unwritten_as_nan
from quantkit.models.attention_modules import attention_modules
from tests.support.denoiser_classes import Row


def tiny_model(row: Row) -> Any:
    """Return a tiny model, whose tensors are all random: also those that are made as zeros."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with unwritten_as_nan():
            model = getattr(diffusers, row.class_name)(**row.config).eval()
        for parameter in model.parameters():
            if parameter.isnan().any():
                parameter.data.normal_(std=0.1)
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model.requires_grad_(False)


def answer(model: Any) -> torch.Tensor:
    """Return what a model makes of inputs that are always the same, in float32."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(7)
        return first_tensor(model(**make_inputs(model, 1, 8, torch.device("cpu")))).float()


def compile_a_block(model):
    """Compile the first block with attention into one graph: all of them take seconds."""
    torch._dynamo.reset()
    block = next(block for block in blocks_of(model).values() if any(attention_modules(block)))
    block.compile(fullgraph=True, backend="eager")
