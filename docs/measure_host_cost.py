"""Time what a call of a packed layer costs the host: microseconds until it returns, on a GPU.

``python docs/measure_host_cost.py``; small layers, so that the device is never behind.
"""

import time
from statistics import median

import click
import torch
from torch import nn

from quantkit.inference.layers.modules import pack_module
from quantkit.numerics.formats import E4M3FN, INT8
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.scheme import Activation, Scheme

ROUNDS, CALLS = 20, 500
TOKENS, WIDTH = 128, 320
SCHEMES = {
    "FP8, static": Scheme(E4M3FN, PerChannel(), None, Activation.STATIC),
    "FP8, per token": Scheme(E4M3FN, PerChannel(), None, Activation.TOKEN),
    "int8, static": Scheme(INT8, PerChannel(), None, Activation.STATIC),
}


def microseconds(layer: nn.Module, x: torch.Tensor) -> float:
    """Return the median over rounds of what one of many calls takes."""
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            layer(x)
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    return median(found)


@torch.no_grad()
def main() -> None:
    """Print a line for each treatment, and one for the dense layer."""
    x = torch.randn(2, TOKENS // 2, WIDTH, dtype=torch.float16, device="cuda")
    dense = nn.Linear(WIDTH, WIDTH, dtype=torch.float16, device="cuda")
    layers = {n: pack_module("layer", scheme, dense, None) for n, scheme in SCHEMES.items()}
    for name, layer in {"float16": dense, **layers}.items():
        for part in layer.parameters():
            if part.dtype is torch.float32:
                part.fill_(1.0)
        layer(x)
        click.echo(f"{name}: {microseconds(layer, x):.1f} us")


if __name__ == "__main__":
    main()
