"""Components of given weights, and statistics of given inputs."""

import torch
from safetensors.torch import save_file

from quantkit.calibration.statistics import LayerStatistics
from quantkit.models.source import open_model
from quantkit.numerics.histogram import count_bins
from tests.support.headers import write_component


def component_with(path, weights, dtype=torch.float16):
    write_component(path, "UNet2DConditionModel", {})
    tensors = {f"{name}.weight": w.to(dtype).contiguous() for name, w in weights.items()}
    save_file(tensors, path / "diffusion_pytorch_model.safetensors")
    return open_model(str(path))


def statistics_of(x):
    """Return the statistics of raw inputs (rows, C) as one bucket."""
    return LayerStatistics(
        amax=x.abs().amax().reshape(1),
        histogram=count_bins(x).reshape(1, -1),
        second_moment=x.square().mean(0, keepdim=True),
        channel_amax=x.abs().amax(0, keepdim=True),
        count=torch.tensor([len(x)]),
    )
