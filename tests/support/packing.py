"""Small components with random weights, their calibration, and packing them."""

import json
from dataclasses import replace

import torch
from safetensors.torch import save_file

from quantkit.calibration.statistics.layer_statistics import (
    Calibration,
    CalibrationProvenance,
    LayerStatistics,
    per_column,
)
from quantkit.calibration.statistics.sampling import SAMPLE_ROWS
from quantkit.device.host.hashing import run_together
from quantkit.models.component_layers import list_layers
from quantkit.models.source import open_model
from quantkit.numerics.histogram import BINS
from quantkit.numerics.masks import TWO_OF_FOUR, choose_mask
from quantkit.numerics.packed_2to4 import pack_two_of_four, to_rows
from quantkit.packing.pack_model import pack
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
from quantkit.storage.digest import sha256_of

WEIGHTS = "diffusion_pytorch_model.safetensors"


def finish(job):
    """Return what a job of packing returns, hashing what it asks for."""
    return run_together([job])[0]


def component(folder, tensors):
    folder.mkdir(parents=True)
    config = {"_class_name": "UNet2DConditionModel", "sample_size": 8}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def small_tensors(dtype=torch.float16):
    torch.manual_seed(3)
    return {
        "conv_in.weight": torch.randn(16, 4, 3, 3).to(dtype),
        "a.conv.weight": torch.randn(24, 32, 3, 3).mul(0.02).to(dtype),
        "a.conv.bias": torch.randn(24).to(dtype),
        "a.point.weight": torch.randn(48, 64, 1, 1).mul(3).to(dtype),
        "a.fc.weight": torch.randn(40, 96).mul(0.1).to(dtype),
        "a.fc.bias": torch.randn(40).to(dtype),
        "a.norm.weight": torch.randn(96).to(dtype),
        "a.odd.weight": torch.randn(8, 20).to(dtype),
    }


def calibration_of(folder):
    """Random but deterministic statistics of every layer, in two buckets."""
    generator = torch.Generator().manual_seed(5)
    source = open_model(str(folder)).components[0]
    layers, digests = {}, {}
    for layer in list_layers(source):
        channel = torch.rand(2, layer.channels, generator=generator) + 0.1
        layers[layer.name] = LayerStatistics(
            amax=channel.amax(dim=1),
            histogram=torch.zeros(2, BINS, dtype=torch.float64),
            second_moment=channel.square() / 3,
            channel_amax=channel,
            count=torch.tensor([10, 30]),
            moving_amax=channel.amax(dim=1).double(),
            updates=torch.ones(2, dtype=torch.int64),
            mean=channel / 8,
            samples=torch.zeros(2, SAMPLE_ROWS, layer.k, dtype=torch.bfloat16),
            sample_priority=torch.zeros(2, SAMPLE_ROWS, dtype=torch.float64),
            sample_count=torch.zeros(2, dtype=torch.int64),
        )
        digests[layer.name] = sha256_of(layer.shard, layer.weight)
    provenance = CalibrationProvenance(
        {"": digests}, "t", 1, "", 2, None, 0, {"": [1, 1]}, {"torch": torch.__version__}
    )
    return Calibration({"": layers}, (500.0,), provenance)


def run(folder, output, recipe=None, *, calibration=None, masks=None, threads=1, force=False):
    return pack(
        open_model(str(folder)),
        Recipe.model_validate({"name": "t", **(recipe or {})}),
        output,
        calibration=calibration,
        masks=masks,
        threads=threads,
        force=force,
        progress=silent,
    )


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def expected(weight, fmt, granularity, *, sparse=False, factor=None):
    """What FORMAT.md says of a weight, in plain torch on the whole of it."""
    rows = to_rows(weight.float()).contiguous()
    mask = choose_mask(rows.abs(), TWO_OF_FOUR) if sparse else torch.ones_like(rows).bool()
    if factor is not None:
        rows = rows / per_column(factor, rows.shape[1] // len(factor))
    rows = torch.where(mask, rows, 0.0)
    groups = {"tensor": rows.reshape(1, -1), "channel": rows}.get(granularity)
    if groups is None:
        groups = rows.reshape(len(rows), -1, int(granularity.partition(":")[2]))
    amax = groups.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(amax > 0, amax / fmt.max, 1.0)
    values = (groups / scale).clamp(-fmt.max, fmt.max)
    values = values.round() if fmt.is_integer else values
    codes = values.to(fmt.torch_dtype).reshape(rows.shape)
    parts = {"weight_scale": scale.squeeze(-1)}
    if sparse:
        parts["weight"], parts["weight_meta"] = pack_two_of_four(codes.view(torch.uint8), mask)
    else:
        parts["weight"] = codes
    return parts


def with_samples(calibration, folder):
    """The calibration with means and samples, in the rows' layout of each layer."""
    generator = torch.Generator().manual_seed(7)
    table = {}
    for layer in list_layers(open_model(str(folder)).components[0]):
        old = calibration.layers[""][layer.name]
        mean = torch.randn(2, layer.channels, generator=generator)
        samples = torch.randn(2, SAMPLE_ROWS, layer.k, generator=generator) / 4
        samples += mean.repeat(1, layer.area).unsqueeze(1)
        table[layer.name] = replace(
            old,
            channel_amax=samples.abs().amax(dim=1).reshape(2, layer.area, -1).amax(dim=1),
            mean=mean,
            samples=samples.bfloat16(),
            sample_priority=torch.ones(2, SAMPLE_ROWS, dtype=torch.float64),
            sample_count=torch.full((2,), SAMPLE_ROWS),
        )
    return replace(calibration, layers={"": table})
