"""Time products that are added to something beside the product and torch's sum, on a GPU.

``python docs/measure_residual.py``: recorded graphs of 24 calls over four sets of operands, medians
of 12; float16, one scale for the inputs, one for each output.
"""

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import click
import torch
from torch import Tensor

from quantkit.device.ops import call
from quantkit.device.ops.table import OPS
from quantkit.numerics.conv_windows import Windows

CALLS, SETS, ROUNDS = 24, 4, 12
FP8 = ("e4m3fn", "e4m3fn")
#: tokens, outputs and length of the sums
MATRICES = ((8192, 640, 640), (2048, 1280, 1280), (2048, 1280, 5120), (8192, 640, 2560))
#: pictures, height and width, channels
PICTURES = ((2, 128, 320), (2, 32, 1280))
SAME = Windows((3, 3), padding=(1, 1, 1, 1)).numbers


class Operands(NamedTuple):
    """Of a product, and what it is added to."""

    product: tuple[Tensor, ...]
    residual: Tensor


def codes(*shape: int) -> Tensor:
    """Return FP8 codes of normal numbers, on the GPU."""
    numbers = torch.randn(*shape, device="cuda") / 2
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8)


def operands(x: Tensor, n: int, k: int) -> Operands:
    """Return random operands of N outputs over K."""
    x_scale, w_scale = (torch.ones(count, device="cuda") for count in (1, n))
    bias = torch.randn(n, device="cuda").half()
    residual = torch.randn(*x.shape[:-1], n, device="cuda").half()
    return Operands((x, x_scale, codes(n, k), w_scale, bias), residual)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's


def microseconds(step: Callable[[Operands], object], made: list[Operands]) -> float:
    """Return what a call takes."""
    for few in made:
        step(few)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS):
            step(made[index % len(made)])
    found = []
    for _ in range(ROUNDS):
        start, end = (_event() for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / CALLS * 1e3)
    return float(median(found))


def show(what: str, name: str, made: list[Operands], windows: tuple[object, ...] = ()) -> None:
    """Print a line: the product alone, torch's sum behind it, and one kernel."""
    how = (*windows, *FP8, torch.float16)

    def alone(given: Operands) -> Tensor:
        y: Tensor = call.call(OPS[name], *given.product, *how)
        return y

    def apart(given: Operands) -> Tensor:
        return given.residual + alone(given)

    def one(given: Operands) -> object:
        return call.call(OPS[f"{name}_residual"], *given.product, given.residual, *how)

    product, sum_, joined = (microseconds(step, made) for step in (alone, apart, one))
    click.echo(f"{what}: product {product:.1f} us, and torch's sum {sum_:.1f}, one {joined:.1f}")


@torch.no_grad()
def main() -> None:
    """Print a line for each shape."""
    for m, n, k in MATRICES:
        made = [operands(codes(m, k), n, k) for _ in range(SETS)]
        show(f"{m}x{n}x{k}", "gemm_fp8", made)
    for batch, side, channels in PICTURES:
        shape = (batch, side, side, channels)
        made = [operands(codes(*shape), channels, 9 * channels) for _ in range(SETS)]
        show(f"{batch}x{side}x{side}x{channels}", "conv_fp8", made, (SAME,))


if __name__ == "__main__":
    main()
