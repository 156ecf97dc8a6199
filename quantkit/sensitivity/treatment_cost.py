"""Costs of a treatment: bytes in the packed format, and modelled time.

The model of the time is that of a roofline: a layer takes as long as its multiplications at the
peak rate of their format, or as long as reading its weight, whichever is more. Activations, launch
overheads and everything that is no Linear, Conv2d or attention are left out, so a modelled speed-up
is an upper bound, and its use is to rank layers.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from quantkit.calibration.statistics.attention_statistics import AttentionStatistics
from quantkit.checkpoint.spec import layer_tensors
from quantkit.models.component_layers import Layer
from quantkit.models.source import Component
from quantkit.pipelines.running import quiet_libraries
from quantkit.recipe.layer_recipes import WeightRecipe
from quantkit.sensitivity.treatments import AttentionTreatment, Treatment, scheme_of
from quantkit.storage.jsonfile import read_json


@dataclass(frozen=True)
class PeakRates:
    """Peak rates of a graphics card."""

    name: str
    #: multiplications and additions per second, each counted as one
    flops_16_bit: float
    flops_fp8: float
    flops_fp8_sparse: float
    #: bytes per second
    bandwidth: float


#: 64 compute units at 2.97 GHz; a compute unit does 1024, 2048 and 4096 operations a cycle.
#: Memory is 256 bit wide at 20 Gbit/s a pin. Source: AMD's data sheet of the RX 9070 XT, 2025.
RX_9070_XT = PeakRates(
    "Radeon RX 9070 XT",
    flops_16_bit=64 * 2.97e9 * 1024,
    flops_fp8=64 * 2.97e9 * 2048,
    flops_fp8_sparse=64 * 2.97e9 * 4096,
    bandwidth=256 / 8 * 20e9,
)


def packed_bytes(
    layer: Layer, treatment: Treatment, weight: WeightRecipe, edges: tuple[float, ...]
) -> int:
    """Return the bytes of a layer's weight, scales and metadata, without the bias.

    Args:
        layer: its weight.
        treatment: what becomes of it. A masked weight in 16 bit, which no packed checkpoint holds,
            counts as the half of its values that are kept and a nibble of positions per group.
        weight: granularity of the scales.
        edges: timesteps between static scales.
    """
    scheme = scheme_of(treatment, weight, edges)
    if scheme is not None:
        specs = layer_tensors(layer.name, scheme, layer.kind, layer.shape, bias_dtype=None)
        return sum(spec.nbytes for spec in specs)
    if treatment.method is None:
        return layer.weight.nbytes
    return layer.weight.nbytes // 2 + layer.n * layer.k // 8


def modelled_seconds(
    layer: Layer, treatment: Treatment, nbytes: int, rows: float, device: PeakRates = RX_9070_XT
) -> float:
    """Return the modelled seconds of a layer in one denoising step of one picture.

    Args:
        layer: N and K.
        treatment: decides the rate.
        nbytes: what ``packed_bytes`` says.
        rows: M, that one picture's step multiplies.
        device: peak rates.
    """
    rate = device.flops_16_bit
    if treatment.format is not None:
        rate = device.flops_fp8 if treatment.method is None else device.flops_fp8_sparse
    return max(2 * rows * layer.n * layer.k / rate, nbytes / device.bandwidth)


def attention_seconds(
    statistics: AttentionStatistics,
    treatment: AttentionTreatment | None,
    rows: float,
    device: PeakRates = RX_9070_XT,
) -> float:
    """Return the modelled seconds of an attention module in one denoising step of one picture.

    Products of queries and keys and of probabilities and values at peak rates, or reading and
    writing, whichever is more; on codes, q, k and v are read in 16 bit and written as codes first.

    Args:
        statistics: of the module, for heads, columns and keys.
        treatment: None: in 16 bit.
        rows: of q, that one picture's step has.
        device: peak rates.
    """
    calls = rows / max(int(statistics.call_queries.max()), 1)
    keys = int(statistics.call_keys.max())
    width = statistics.heads * statistics.columns
    work = 4 * rows * keys * width
    inputs, outputs = (rows + 2 * calls * keys) * width, rows * width
    if treatment is None:
        return max(work / device.flops_16_bit, 2 * (inputs + outputs) / device.bandwidth)
    # Values in 16 bit are written and read as such.
    wide = 0 if treatment.format.pv else 2 * calls * keys * width
    moved = (2 + 1 + 1) * inputs + 2 * outputs + wide
    return max(treatment.format.cost * work / device.flops_fp8, moved / device.bandwidth)


def strides_of(component: Component) -> dict[str, int]:
    """Return input positions per output position of every convolution, by module path."""
    import diffusers

    config = read_json(component.path / "config.json")
    build: Any = getattr(diffusers, component.class_name).from_config
    with quiet_libraries(), torch.device("meta"):
        model = build(config)
    return {
        name: prod(module.stride)
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d)
    }
