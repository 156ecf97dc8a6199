"""Time projections that end in attention's codes, and attention behind them, on a Hopper GPU.

``python docs/measure_projections.py [-o TIMES]``: one launch for queries, keys and values in every
tile, of dense weights and of 2:4 ones; beside it three products with float16 output, and one of all
three weights. Then projections and attention: on codes, and cuDNN's in float16 behind three
products. Medians of 15, L2 cold.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantkit.bench.kernels.compiled_blocks import captured
from quantkit.bench.kernels.timing import Stopwatch, TimingPlan
from quantkit.device.gpu.devices import find_device
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.hopper.hopper_gemm import Family, HopperKernel, Sums
from quantkit.device.hopper.hopper_projections import COSTS, TILES
from quantkit.device.ops.call import call
from quantkit.device.ops.table import OPS, name_for
from quantkit.numerics.attention_factors import padded
from quantkit.numerics.packed_2to4 import LEGAL_NIBBLES

PLAN = TimingPlan(warmup=2, repeats=15, seconds=2)
#: pictures, tokens, heads, columns of a head; K is heads times columns
SHAPES = (
    (2, 4096, 10, 64),
    (2, 1024, 20, 64),
    (2, 4096, 8, 40),
    (2, 1024, 8, 80),
    (2, 4096, 16, 72),
    (2, 16384, 10, 64),
    (2, 4096, 24, 64),
    (1, 4608, 24, 128),
    (2, 256, 20, 64),
    (2, 64, 20, 64),
)


@dataclass(frozen=True)
class Layers:
    """Three projections of one input, and an attention module's heads."""

    tokens: int
    heads: int
    fmt: str
    x: Tensor
    #: (3, N, K); of 2:4 ones (3, N, K / 2), and behind them positions
    weights: tuple[Tensor, ...]
    scale: Tensor
    bias: Tensor

    @classmethod
    def draw(cls, shape: tuple[int, int, int, int], fmt: str, *, sparse: bool = False) -> "Layers":
        """Return random codes whose products are of size 1 or so."""
        pictures, tokens, heads, d = shape
        n = heads * d
        x, weights = _codes((pictures * tokens, n), fmt), [_codes((3, n, n), fmt)]
        if sparse:
            legal = torch.tensor(LEGAL_NIBBLES, dtype=torch.uint8, device="cuda")
            nibbles = legal[torch.randint(len(legal), (3, n, n // 4), device="cuda")]
            kept = weights[0][..., ::2].contiguous()
            weights = [kept, nibbles[..., ::2] | nibbles[..., 1::2] << 4]
        size = 1 / (40**2 * n**0.5)
        scale = size * (0.5 + torch.rand(3, n, device="cuda"))
        bias = torch.randn(3, n, device="cuda") / 8
        return cls(tokens, heads, fmt, x, tuple(weights), scale, bias)

    @property
    def sizes(self) -> dict[str, int]:
        """M, N, K, and a head."""
        (m, k), n = self.x.shape, self.weights[0].shape[1]
        return {"m": m, "n": n, "k": k, "tokens": self.tokens, "d": n // self.heads}

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """Those of the joint operation."""
        stored = (part[i] for i in range(3) for part in self.weights)
        return (self.x, torch.ones(1, device="cuda"), *stored, self.scale, self.bias)

    @property
    def sparse(self) -> bool:
        """True of 2:4 weights."""
        return len(self.weights) > 1


def _codes(shape: tuple[int, ...], fmt: str) -> Tensor:
    numbers = (torch.randn(shape, device="cuda") * 40).clamp(-127, 127)
    return numbers.to(torch.int8 if fmt == "int8" else torch.float8_e4m3fn).view(torch.uint8)


def projecting(layers: Layers, name: str, sums: Sums) -> tuple[Callable[[], object], list[Tensor]]:
    """Return the launch of a tile, and what it writes."""
    kernel = HopperKernel(
        TILES[name], layers.sparse, Family.HEADS, accurate=sums is Sums.ACCURATE, io="f32",
        x_format=layers.fmt, w_format=layers.fmt, x_scale="tensor",
    )  # fmt: skip
    options = (layers.tokens, layers.heads, layers.fmt, layers.fmt)
    operands = layers.operands
    outputs = kernel.op.outputs(operands, options)
    prepared = Call(find_device(torch.cuda.current_device()), kernel, layers.sizes, outputs)
    made = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in outputs]
    return lambda: prepared.launch(*operands, *made), made


def products(layers: Layers) -> tuple[Callable[[], list[Tensor]], Callable[[], Tensor]]:
    """Return three products in float16, and one of all three weights."""
    op = OPS[name_for("gemm", layers.fmt, layers.fmt, sparse=layers.sparse)]
    x, one, *_ = layers.operands
    joined = [part.flatten(0, 1) for part in layers.weights]
    scale, bias = layers.scale.flatten(), layers.bias.half()
    end = (layers.fmt, layers.fmt, torch.float16)

    def three() -> list[Tensor]:
        each = zip(*layers.weights, layers.scale, bias, strict=True)
        return [call(op, x, one, *parts, *end) for parts in each]

    def together() -> Tensor:
        y: Tensor = call(op, x, one, *joined, scale, bias.flatten(), *end)
        return y

    return three, together


def modules(
    layers: Layers, project: Callable[[], object], made: list[Tensor]
) -> dict[str, Callable[[], object]]:
    """Return projections and attention, on codes and torch's, and attention alone."""
    d, tokens, heads = layers.sizes["d"], layers.tokens, layers.heads
    one, (three, together) = torch.ones(heads, padded(d), device="cuda"), products(layers)

    def attend() -> object:
        numbers = (tokens, heads, d, "e4m3fn", torch.float16)
        return call(OPS["attention_fp8"], *made, None, None, one, one, *numbers)

    def torchs(parts: list[Tensor]) -> object:
        q, k, v = (t.view(-1, tokens, heads, d).transpose(1, 2) for t in parts)
        return scaled_dot_product_attention(q, k, v)

    given = three()
    return {
        "on codes": lambda: (project(), attend()),
        "torch's": lambda: torchs(three()),
        "torch's, one product": lambda: torchs(list(together().chunk(3, dim=1))),
        "kernel": attend,
        "cuDNN": lambda: torchs(given),
    }


def times_of(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return medians in microseconds; graphs, so that the host is not measured."""
    device = torch.device("cuda")
    graphs = {name: captured(call, device) for name, call in calls.items()}  # type: ignore[arg-type]
    watch = Stopwatch(device)
    watch.warm_up(graphs, PLAN.warmup)
    found = watch.rounds(graphs, PLAN)
    return {name: round(samples.summary().p50_us, 1) for name, samples in found.items()}


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False))
@torch.no_grad()
def main(output: Path | None) -> None:
    """Print the times, and write those of tiles."""
    tiles: dict[str, dict[str, dict[str, float]]] = {}
    for shape in SHAPES:
        for sparse, sums in COSTS:
            layers = Layers.draw(shape, "int8" if sums is Sums.INT8 else "e4m3fn", sparse=sparse)
            kernels = {name: projecting(layers, name, sums) for name in COSTS[sparse, sums]}
            three, together = products(layers)
            calls = {name: project for name, (project, _) in kernels.items()}
            found = times_of({**calls, "three products": three, "one product": together})
            m, n, k = (layers.sizes[name] for name in "mnk")
            own = {name: found[name] for name in kernels}
            mode = f"{'sparse' if sparse else 'dense'} {sums.value}"
            tiles.setdefault(f"{m}x{n}x{k}", {})[mode] = own
            click.echo(f"{shape} {m}x{n}x{k} {mode}: {found}")
            if sums is Sums.ACCURATE:
                click.echo(
                    f"  {times_of(modules(layers, *kernels[min(own, key=lambda t: own[t])]))}"
                )
    if output is not None:
        output.write_text(json.dumps({"times": tiles}, indent=1))


if __name__ == "__main__":
    main()
