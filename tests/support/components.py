"""Components of given weights."""

import torch
from safetensors.torch import save_file

from quantkit.models.source import open_model
from tests.support.headers import write_component


def component_with(path, weights, dtype=torch.float16):
    write_component(path, "UNet2DConditionModel", {})
    tensors = {f"{name}.weight": w.to(dtype).contiguous() for name, w in weights.items()}
    save_file(tensors, path / "diffusion_pytorch_model.safetensors")
    return open_model(str(path))
