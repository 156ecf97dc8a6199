"""Time attention of streams on codes and in 16 bit, and what makes either, on a GPU.

``python docs/measure_streams.py``: from projections whose heads have norms and a rotation, or of
two streams, in one launch each: ``stream_codes_fp8`` and ``attention_fp8``; ``joint_heads`` and
torch's attention. Recorded graphs, medians of 9, L2 cold; and how far the results are apart.
"""

from collections.abc import Callable
from dataclasses import dataclass

import click
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantkit.bench.kernels.compiled_blocks import captured
from quantkit.bench.kernels.timing import Stopwatch, TimingPlan
from quantkit.device.ops.call import call
from quantkit.device.ops.table import OPS
from quantkit.numerics.attention_factors import HeadFactors, head_factors, measured_scales

PLAN = TimingPlan(warmup=2, repeats=9, seconds=1)
#: pictures, heads, tokens of the first stream and of the second, columns, norms, rotation
SHAPES = (
    (1, 24, 512, 4096, 128, True, True),  # FLUX
    (2, 24, 512, 4096, 128, True, True),
    (1, 24, 4608, 0, 128, True, True),
    (2, 24, 4608, 0, 128, True, True),
    (1, 24, 512, 1024, 128, True, True),
    (1, 24, 256, 768, 128, True, True),
    (1, 24, 128, 384, 128, True, True),
    (2, 38, 4096, 333, 64, True, False),  # SD 3.5 large
    (2, 24, 4096, 333, 64, True, False),  # and medium
    (2, 24, 4096, 0, 64, True, False),
    (2, 24, 4096, 333, 64, False, False),  # SD 3
    (2, 24, 1024, 333, 64, True, False),
    (2, 24, 1024, 0, 64, True, False),
    (1, 24, 256, 333, 64, True, False),
    (1, 24, 512, 0, 64, True, False),
)

Shape = tuple[int, int, int, int, int, bool, bool]


@dataclass(frozen=True)
class Streams:
    """Joined projections, and what is made of them."""

    shape: Shape
    operands: tuple[Tensor | None, ...]

    @classmethod
    def draw(cls, shape: Shape) -> "Streams":
        """Return normal projections, norms and angles."""
        b, h, t1, t2, d, normed, turned = shape
        width = 3 * h * d
        first, second = _normal(b, t1, width), _normal(b, t2, width) if t2 else None
        norms = [_normal(d) if normed and (i < 2 or t2) else None for i in range(4)]
        angle = torch.rand(t1 + t2, d, device="cuda") * 6.3
        turn = (angle.cos(), angle.sin()) if turned else (None, None)
        return cls(shape, (*[first] * 3, *[second] * 3, *norms, *turn))

    @property
    def options(self) -> tuple[object, ...]:
        """Columns of the projections, heads, and what is done to them."""
        _, h, _, _, d, _, turned = self.shape
        columns = tuple(h * d * i for i in range(3)) * 2
        return columns, h, d, 1e-6, "pairs" if turned else "none"

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values in 16 bit, (B, T, H, D)."""
        _, h, _, t2, d, *_ = self.shape
        q, k, v, *others = self.operands
        made = call(OPS["joint_heads"], q, k, v if t2 else None, *others, *self.options)
        if t2:
            return made[0], made[1], made[2]
        assert v is not None
        return made[0], made[1], v[..., 2 * h * d :].reshape(*v.shape[:2], h, d)

    def codes(self, factors: HeadFactors) -> tuple[Tensor, ...]:
        """Return them as codes."""
        made: tuple[Tensor, ...] = call(
            OPS["stream_codes_fp8"], *self.operands, *factors, *self.options
        )
        return made


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float16, device="cuda")


def calls_of(streams: Streams) -> dict[str, Callable[[], Tensor]]:
    """Return what is timed: both ways, and their parts; the first two return attention."""
    _, h, t1, t2, d, *_ = streams.shape
    given = streams.heads()
    q, k, v = (t.permute(2, 0, 1, 3).flatten(1, 2) for t in given)
    factors = head_factors(measured_scales(q, k, v), d, "e4m3fn")
    codes = streams.codes(factors)

    def attend(made: tuple[Tensor, ...]) -> Tensor:
        sizes = (t1 + t2, h, d, "e4m3fn", torch.float16)
        numbers = (None, None, factors.value_scale, factors.value_mean)
        y: Tensor = call(OPS["attention_fp8"], *made, *numbers, *sizes)
        return y

    def torchs(heads: tuple[Tensor, ...]) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in heads)
        return scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return {
        "on codes": lambda: attend(streams.codes(factors)),
        "torch's": lambda: torchs(streams.heads()),
        "codes": lambda: streams.codes(factors)[0],
        "kernel": lambda: attend(codes),
        "heads": lambda: streams.heads()[0],
        "cuDNN": lambda: torchs(given),
    }


def measure(shape: Shape) -> str:
    """Return medians in microseconds, and the error of attention on codes."""
    calls = calls_of(Streams.draw(shape))
    wanted, found = (calls[name]().float() for name in ("torch's", "on codes"))
    error = float((found - wanted).norm() / wanted.norm())
    device = torch.device("cuda")
    graphs = {name: captured(one, device) for name, one in calls.items()}
    watch = Stopwatch(device)
    watch.warm_up(graphs, PLAN.warmup)
    times = {n: s.summary().p50_us for n, s in watch.rounds(graphs, PLAN).items()}
    told = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
    ratio = times["torch's"] / times["on codes"]
    return f"{told}; {ratio:.2f} as fast, error {error:.4f}"


@torch.no_grad()
def main() -> None:
    """Print a line for each shape."""
    for shape in SHAPES:
        click.echo(f"{shape}: {measure(shape)}")


if __name__ == "__main__":
    main()
