"""Time group norms that write codes, on a GPU: ``python docs/measure_norms.py``.

Recorded graphs of 20 calls over operands of 400 MB and more, so that none is in the cache before
its norm; medians of 8. Bytes are counted as if each value were read once and each code written
once. Shares are of the rate of a copy of 512 MB, and of the time of a copy of as many bytes.
"""

from collections.abc import Callable
from statistics import median

import click
import torch
from torch import Tensor

from quantkit.device.ops import call
from quantkit.device.ops.table import OPS

#: pictures, pixels, channels: SDXL
PICTURES = (
    *((2, 128 * 128, 320), (2, 64 * 64, 640), (2, 32 * 32, 1280)),
    *((2, 128 * 128, 960), (2, 64 * 64, 1920)),
)
GROUPS, FORMAT = 32, "e4m3fn"
CALLS, ROUNDS, BYTES = 20, 8, 400e6

Make = Callable[[], tuple[Tensor, ...]]
Step = Callable[..., object]


def normal(*shape: int) -> Tensor:
    """Return normal numbers in float16, on the GPU."""
    return torch.randn(*shape, dtype=torch.float16, device="cuda")


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's


def microseconds(step: Step, make: Make) -> float:
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


def copy_time(total: int) -> float:
    """Return the microseconds of a copy that reads and writes so many bytes in all."""

    def make() -> tuple[Tensor, ...]:
        return torch.empty(2, total // 2, dtype=torch.uint8, device="cuda").unbind()

    return microseconds(lambda a, b: b.copy_(a), make)


@torch.no_grad()
def main() -> None:
    """Print a line for each shape."""
    rate, scale = 2**29 / copy_time(2**29), torch.tensor([0.02], device="cuda")
    click.echo(f"{torch.cuda.get_device_name()}: a copy moves {rate / 1e6:.2f} TB/s")

    def line(name: str, values: int, norm: Callable[..., object], make: Make) -> float:
        time = microseconds(norm, make)
        moved = 3 * values
        share, alike = moved / time / rate, copy_time(moved)
        click.echo(
            f"{name}: {time:.1f} us, {moved / time / 1e6:.2f} TB/s, {share:.0%}; a copy of as many "
            f"bytes {alike:.1f} us, {alike / time:.0%}"
        )
        return time

    for n, m, k in PICTURES:
        time = line(f"group norm {n}x{m}x{k}", n * m * k, *_pictures(n, m, k, scale))
        first = microseconds(_partials, _pictures(n, m, k, scale)[1])
        click.echo(f"  of them partials {first:.1f}, codes {time - first:.1f}")


def _partials(x: Tensor, added: Tensor, *_: Tensor) -> Tensor:
    found: Tensor = call.call(OPS["group_partials"], x, added, GROUPS)
    return found


def _pictures(n: int, m: int, k: int, scale: Tensor) -> tuple[Callable[..., object], Make]:
    def make() -> tuple[Tensor, ...]:
        return normal(n, m, k), normal(n, k), normal(k), normal(k)

    def norm(x: Tensor, added: Tensor, w: Tensor, b: Tensor) -> object:
        operands = (x, added, _partials(x, added), w, b, None, scale)
        return call.call(OPS["group_norm_codes_fp8"], *operands, 1e-5, "silu", FORMAT)

    return norm, make


if __name__ == "__main__":
    main()
