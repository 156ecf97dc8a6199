"""Models and statistics that are the same to the bit everywhere: small integers over powers of two.

Sums of so few of them are exact, whatever their order, so neither a random generator nor a matrix
library of this machine has a say. Only second moments are factorised, in packing itself.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quantkit.calibration.moments.held_out_rows import HeldRows
from quantkit.calibration.moments.moment_files import HessianIndex, create_hessians
from quantkit.calibration.moments.moments import Moments
from quantkit.calibration.statistics.attention_statistics import AttentionStatistics
from quantkit.calibration.statistics.layer_statistics import (
    Calibration,
    CalibrationProvenance,
    LayerStatistics,
)
from quantkit.calibration.statistics.sampling import SAMPLE_ROWS
from quantkit.models.building import read_skeleton
from quantkit.models.component_layers import Layer, list_layers
from quantkit.models.source import Component, open_model
from quantkit.models.source_tensors import source_tensors
from quantkit.numerics.attention_formats import ATTENTION_FORMATS
from quantkit.numerics.histogram import count_bins
from quantkit.storage.digest import sha256_of
from tests.support.denoiser_classes import ROWS
from tests.support.denoisers import tiny_sd15, tiny_sdxl
from tests.support.pipelines import (
    _sd3_transformer,
    flux_transformer,
    tiny_sd15_pipeline,
    tiny_transformer_pipeline,
)

#: The largest size of ``integers``.
_MOST = 510
#: Rows that second moments are taken of, besides two per column, so that they have full rank.
_ROWS = 64
_KEYS = 1024


def integers(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return float64 integers about zero, 510 at most, nearly normal with a deviation of 148.

    Args:
        name: two names have different numbers.
        shape: of the result.
    """
    count = int(np.prod(shape))
    # The raw stream of a bit generator is fixed for all time; its distributions are not.
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(-(-count // 2))
    sums = raw.view(np.uint8).reshape(-1, 4).astype(np.int64).sum(axis=1)[:count] - _MOST
    return torch.from_numpy(sums).double().reshape(shape)


def fill(model: nn.Module, name: str = "") -> Any:
    """Give every parameter of a model such numbers, all of which float16 holds, and return it."""
    for key, parameter in model.named_parameters():
        parameter.data.copy_(_number(name + key, parameter))
    return model.half()


def _number(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype; scales of norms are about one."""
    if not tensor.is_floating_point():
        return tensor
    numbers = integers(name, tuple(tensor.shape)) / 8192
    if tensor.ndim == 1 and name.endswith("weight"):
        numbers = 1 + numbers / 4
    return numbers.to(tensor.dtype)


def _row(class_name: str) -> Any:
    import diffusers

    row = next(row for row in ROWS if row.class_name == class_name)
    return getattr(diffusers, row.class_name)(**row.config)


#: A denoiser of every family with recipes of its own, and two of none.
DENOISERS = {
    "sd15": tiny_sd15,
    "sdxl": tiny_sdxl,
    "sd3": _sd3_transformer,
    "flux": flux_transformer,
    "flux2": lambda: _row("Flux2Transformer2DModel"),
    "chroma": lambda: _row("ChromaTransformer2DModel"),
    "pixart": lambda: _row("PixArtTransformer2DModel"),
    "sana": lambda: _row("SanaTransformer2DModel"),
    "qwenimage": lambda: _row("QwenImageTransformer2DModel"),
    "zimage": lambda: _row("ZImageTransformer2DModel"),
    "wan": lambda: _row("WanTransformer3DModel"),
    "ltx": lambda: _row("LTXVideoTransformer3DModel"),
    "general-unet": lambda: _row("UNet2DModel"),
    "general-dit": lambda: _row("AuraFlowTransformer2DModel"),
}


#: Pipelines that calibration runs.
PIPELINES = {"sd15": tiny_sd15_pipeline, "sd3": tiny_transformer_pipeline}


def write_denoiser(name: str, folder: Path) -> Path:
    """Write a row of ``DENOISERS`` in float16, and return its folder."""
    fill(DENOISERS[name](), name).save_pretrained(folder)
    return folder


def write_pipeline(name: str, folder: Path) -> Path:
    """Write a row of ``PIPELINES`` with such numbers in all its models, and return its folder."""
    PIPELINES[name](folder)
    for file in sorted(folder.rglob("*.safetensors")):
        tensors = {
            key: _number(f"{file.parent.name} {key}", t) for key, t in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def make_calibration(folder: Path, buckets: int) -> Calibration:
    """Return statistics of every layer and attention module of a denoiser.

    Args:
        folder: of the component.
        buckets: of timesteps, evenly spread over 1000.
    """
    component = open_model(str(folder)).components[0]
    edges = tuple(1000.0 * i / buckets for i in range(1, buckets))
    layers = {layer.name: _statistics(layer, buckets) for layer in list_layers(component)}
    about = CalibrationProvenance(
        {"": dict(_digests(component))}, "golden", 2, "0" * 64, 2, None, 0, {"": [2] * buckets}, {}
    )
    return Calibration({"": layers}, edges, about, {"": _attention(component, buckets)})


def _rows_of(layer: Layer, count: int) -> Tensor:
    """Return what a layer reads, float64 (count, K): some channels much larger than the others."""
    size = 2.0 ** (integers(f"{layer.name} size", (layer.channels,)) / 150).round()
    middle = integers(f"{layer.name} middle", (layer.channels,)) / 1024
    rows = integers(f"{layer.name} rows", (count, layer.k)) / 512
    rows = rows * size.repeat(layer.area) + middle.repeat(layer.area)
    return rows.bfloat16().double()


def _statistics(layer: Layer, buckets: int) -> LayerStatistics:
    samples = _rows_of(layer, buckets * SAMPLE_ROWS).reshape(buckets, SAMPLE_ROWS, layer.k)
    # Later buckets see smaller inputs.
    samples = samples / torch.arange(1, buckets + 1).log2().floor().exp2().reshape(-1, 1, 1)
    values = samples.reshape(buckets, -1, layer.channels)
    largest = values.abs().amax(dim=1).float()
    count = values.shape[1]
    return LayerStatistics(
        amax=largest.amax(dim=1),
        histogram=torch.stack([count_bins(bucket.float()) for bucket in values]),
        second_moment=(values.square().sum(dim=1) / count).float(),
        channel_amax=largest,
        count=torch.full((buckets,), count),
        moving_amax=largest.amax(dim=1).double() / 2,
        updates=torch.full((buckets,), 2),
        mean=(values.sum(dim=1) / count).float(),
        samples=samples.bfloat16(),
        sample_priority=torch.arange(SAMPLE_ROWS, 0, -1).double().expand(buckets, -1).clone() / 64,
        sample_count=torch.full((buckets,), SAMPLE_ROWS),
    )


def _attention(component: Component, buckets: int) -> dict[str, AttentionStatistics]:
    skeleton = read_skeleton(
        component.path / "config.json", component.class_name, source_tensors(component)
    )
    return {name: _of_module(name, buckets) for name, why in skeleton.attention.items() if not why}


def _of_module(name: str, buckets: int, heads: int = 2, columns: int = 16) -> AttentionStatistics:
    def about(what: str) -> Tensor:
        return (integers(f"{name} {what}", (buckets, heads, columns)) / 512).float()

    def each(number: int) -> Tensor:
        return torch.full((buckets,), number)

    ranges = {
        f"{what}_{end}": about(f"{what} mean") + sign * (1 + about(f"{what} {end}").abs())
        for what in "kv"
        for end, sign in (("low", -1), ("high", 1))
    }
    means = {f"{what}_mean": about(f"{what} mean") for what in "qkv"}
    # Some modules lose much in the fastest format, others nothing.
    lost = integers(f"{name} lost", (len(ATTENTION_FORMATS), heads)).abs() / 2**18
    return AttentionStatistics(
        q_amax=means["q_mean"].abs().amax(dim=2) + 2,
        **ranges,
        **means,
        queries=each(_KEYS),
        keys=each(_KEYS),
        call_queries=each(_KEYS),
        call_keys=each(_KEYS),
        format_lost=lost,
        format_power=torch.ones(heads, dtype=torch.float64),
    )


def make_moments(folder: Path, output: Path) -> Path:
    """Write second moments of every layer of a denoiser, and return their directory."""
    component = open_model(str(folder)).components[0]
    digests = {"": dict(_digests(component))}
    index = HessianIndex(digests, "golden", 4, 2, "0" * 64, 2, None, 0, 1, "uniform", 1.0, {})
    found = create_hessians(output, index, force=False)
    for layer in list_layers(component):
        found.write("", layer.name, _moments(layer))
    return output


def _moments(layer: Layer) -> Moments:
    rows = _rows_of(layer, _ROWS + 2 * layer.k)
    held = HeldRows(rows[:_ROWS].bfloat16(), torch.ones(_ROWS))
    fitted = rows[_ROWS:]
    second = (fitted.T @ fitted / len(fitted)).float()
    mean = (fitted.sum(dim=0) / len(fitted)).float()
    return Moments(second, mean, len(fitted), held)


def _digests(component: Component) -> Iterator[tuple[str, str]]:
    for layer in list_layers(component):
        yield layer.name, sha256_of(layer.shard, layer.weight)
