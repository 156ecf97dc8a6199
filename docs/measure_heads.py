"""Time what makes attention's heads and codes of projections, on a GPU.

``python docs/measure_heads.py``: recorded graphs of calls over operands of 160 MB and more, medians
of 7.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import click
import torch
from torch import Tensor

from quantkit.device.ops import call
from quantkit.device.ops.table import OPS
from quantkit.numerics.attention_factors import padded

ROUNDS, BYTES = 7, 160e6
#: pictures, heads, tokens of the first stream and of the second, columns; norm and rotation
HEADS = ((2, 24, 4608, 0, 128, True), (2, 24, 4096, 512, 128, True))
CODES = (
    (1, 24, 4608, 0, 128, True),
    (2, 10, 4096, 0, 64, False),
    (2, 20, 1024, 0, 64, False),
)

Case = tuple[int, int, int, int, int, bool]
Arguments = tuple[Any, ...]


def normal(*shape: int) -> Tensor:
    """Return normal numbers in float16, on the GPU."""
    return torch.randn(*shape, dtype=torch.float16, device="cuda")


def numbers(*shape: int) -> Tensor:
    """Return numbers from 1 to 10 in float32, on the GPU."""
    return torch.rand(*shape, device="cuda") * 9 + 1


def streams(case: Case, *, values: bool) -> tuple[Arguments, Arguments]:
    """Return joined projections with their norms and rotation, and the options."""
    b, h, t1, t2, d, normed = case
    width = h * d
    first = (normal(b, t1, 3 * width),) * 3
    second = (normal(b, t2, 3 * width),) * 3 if t2 else (None,) * 3
    first = first if values else (*first[:2], None)  # type: ignore[assignment]  # left where they are
    weights = [normal(d) if normed and (i < 2 or t2) else None for i in range(4)]
    angle = torch.rand(t1 + t2, d, device="cuda") * 6.3
    turn = (angle.cos(), angle.sin()) if normed else (None, None)
    options = ((0, width, 2 * width) * 2, h, d, 1e-6, "pairs" if normed else "none")
    return (*first, *second, *weights, *turn), options


def joint_heads(case: Case) -> Arguments:
    """Return arguments of the operation; of one stream, values stay where they are."""
    operands, options = streams(case, values=case[3] > 0)
    return *operands, *options


def stream_codes_fp8(case: Case) -> Arguments:
    """Return arguments of the operation."""
    operands, options = streams(case, values=True)
    h, width = case[1], padded(case[4])
    factors = (numbers(h, width), numbers(h), numbers(h), numbers(h, width), numbers(h, width))
    return *operands, *factors, *options


def head_codes_fp8(case: Case) -> Arguments:
    """Return arguments of the operation, on queries."""
    b, h, tokens, _, d, normed = case
    angle = torch.rand(tokens, d, device="cuda") * 6.3
    turn = (angle.cos(), angle.sin()) if normed else (None, None)
    weight = numbers(d) if normed else None
    made = (normal(b, tokens, h * d), None, weight, None, *turn, numbers(h, padded(d)), numbers(h))
    return *made, 0, 0, h, d, 1e-6, "pairs" if normed else "none"


def value_codes_fp8(case: Case) -> Arguments:
    """Return arguments of the operation."""
    b, h, tokens, _, d, _ = case
    factors = (numbers(h, padded(d)), numbers(h, padded(d)))
    return normal(b, tokens, h * d), None, *factors, 0, 0, h, d


def microseconds(name: str, make: Callable[[Case], Arguments], case: Case, size: float) -> float:
    """Return what a call takes on operands that the cache does not hold."""
    sets = [make(case) for _ in range(max(2, int(BYTES / size) + 1))]
    call.call(OPS[name], *sets[0])
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for arguments in sets * 3:
            kept.append(call.call(OPS[name], *arguments))
            del kept[: -len(sets)]
    graph.replay()
    found = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / (3 * len(sets)) * 1e3)
    return float(median(found))


@torch.no_grad()
def main() -> None:
    """Print a line for each operation and shape: time, and what is read and written in it."""
    timed = [(joint_heads, case, 8 if case[3] == 0 else 12) for case in HEADS]
    timed += [(stream_codes_fp8, case, 9) for case in CODES]
    timed += [(make, case, 3) for case in CODES[:2] for make in (head_codes_fp8, value_codes_fp8)]
    for make, case, by_element in timed:
        b, h, t1, t2, d, _ = case
        size = b * h * (t1 + t2) * d * by_element
        time = microseconds(make.__name__, make, case, size)
        click.echo(f"{make.__name__} {case}: {time:.1f} us, {size / time / 1e6:.2f} TB/s")


if __name__ == "__main__":
    main()
