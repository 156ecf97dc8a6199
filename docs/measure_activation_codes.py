"""Time activations that write codes beside torch's and a quantize kernel, on a GPU.

``python docs/measure_activation_codes.py``: recorded graphs of 20 calls over operands of 400 MB and
more, medians of 8.
"""

from collections.abc import Callable
from statistics import median

import click
import torch
from torch import Tensor
from torch.nn import functional

from quantkit.device.ops import call
from quantkit.device.ops.table import OPS

CALLS, ROUNDS, BYTES = 20, 8, 400e6
#: rows and columns between the layers of networks: FLUX, SDXL's sizes, SD 3, SDXL's
NETWORKS = ((4608, 12288), (8192, 5120), (4096, 6144), (2048, 10240))
#: FLUX's single block: rows, columns of attention and of the network
SINGLE = (4608, 3072, 12288)

Step = Callable[..., object]


def normal(*shape: int) -> Tensor:
    """Return normal numbers in float16, on the GPU."""
    return torch.randn(*shape, dtype=torch.float16, device="cuda")


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's


def microseconds(step: Step, make: Callable[[], tuple[Tensor, ...]]) -> float:
    """Return what a call takes on operands that the cache does not hold."""
    size = sum(t.nbytes for t in make())
    operands = [make() for _ in range(max(2, int(BYTES / size)))]
    for few in operands[:2]:
        step(*few)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS):
            step(*operands[index % len(operands)])
    found = []
    for _ in range(ROUNDS):
        start, end = (_event() for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / CALLS * 1e3)
    return float(median(found))


@torch.no_grad()
def main() -> None:
    """Print a line for each shape."""
    scale = torch.tensor([0.02], device="cuda")

    def codes(x: Tensor) -> Tensor:
        made: Tensor = call.call(OPS["quantize_fp8_static"], x, None, scale, "e4m3fn")
        return made

    def activated(x: Tensor, beside: Tensor | None = None) -> object:
        op = OPS["gelu_codes_fp8"]
        return call.call(op, x, beside, None, scale, "tanh", "e4m3fn")

    def apart(x: Tensor) -> Tensor:
        return codes(functional.gelu(x, approximate="tanh"))

    for m, k in NETWORKS:

        def one(m: int = m, k: int = k) -> tuple[Tensor, ...]:
            return (normal(m, k),)

        times = [microseconds(step, one) for step in (activated, apart, torch.clone)]
        click.echo(
            "gelu {}x{}: {:.1f} us, gelu and quantize {:.1f}, copy {:.1f}".format(m, k, *times)
        )
    m, n, k = SINGLE

    def two() -> tuple[Tensor, ...]:
        return normal(m, k), normal(m, n)

    beside = microseconds(activated, two)
    joined = microseconds(lambda x, h: torch.cat((codes(h), apart(x)), dim=1), two)
    click.echo(f"single block {m}x({n}+{k}): {beside:.1f} us, apart {joined:.1f}")


if __name__ == "__main__":
    main()
