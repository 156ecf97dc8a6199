"""Time attention on codes with dynamic scales, and its parts, against torch's, on a GPU.

``python docs/measure_dynamic_attention.py``: float16 heads as processors have them, rows of a
projection; torch's fastest kernel; attention on codes that are there; codes whose factors are
there; and all of a call: measuring, factors, codes, attention. Recorded graphs, medians, L2 cold,
in microseconds, and how far the results are apart. Takes less than a minute. It needs quantkit
installed, and nothing else of the repository.
"""

from collections.abc import Callable
from functools import partial

import click
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quantkit.bench.kernels.compiled_blocks import captured
from quantkit.bench.kernels.timing import Stopwatch, TimingPlan
from quantkit.device.backends import Backend, use
from quantkit.inference.attention.attention_call import AttentionSettings, attend
from quantkit.inference.attention.attention_ends import HeadProduct
from quantkit.inference.attention.attention_heads import (
    measured_factors,
    product_of_streams,
    stream_of,
)
from quantkit.models.attention_modules import AttentionCall, Heads
from quantkit.numerics.attention_factors import HeadFactors, score_factor

PLAN = TimingPlan(warmup=2, repeats=15, seconds=1)
#: pictures, heads, queries, keys, columns
SHAPES = (
    (2, 12, 1000, 1000, 64),
    (1, 30, 4128, 4128, 128),
    (2, 16, 1024, 77, 72),
    (2, 10, 4096, 4096, 64),
    (1, 24, 4608, 4608, 128),
)
BACKENDS = (
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
)  # fmt: skip
Shape = tuple[int, int, int, int, int]
_QK = "e4m3fn"


def draw(shape: Shape) -> Heads:
    """Return normal heads (B, H, N, D), whose tokens lie in rows; keys and values have means."""
    b, h, m, n, d = shape

    def normal(tokens: int, mean: float) -> Tensor:
        x = torch.randn(b, tokens, h, d, device="cuda") + mean * torch.randn(h, d, device="cuda")
        return x.half().transpose(1, 2)

    return Heads(normal(m, 0), normal(n, 1), normal(n, 1))


def of_torch(heads: Heads, backend: SDPBackend) -> Tensor:
    """Return torch's attention by one of its kernels."""
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(*heads)


def torchs(heads: Heads) -> dict[str, Callable[[], Tensor]]:
    """Return calls of torch's kernels that take the heads, by name."""
    found: dict[str, Callable[[], Tensor]] = {}
    for backend in BACKENDS:
        one = partial(of_torch, heads, backend)
        try:
            one()
        except RuntimeError:
            continue
        found[backend.name.lower().removesuffix("_attention")] = one
    return found


def ours(heads: Heads) -> dict[str, Callable[[], Tensor]]:
    """Return a call with dynamic scales and its parts; the first returns attention."""
    stream, rows = stream_of(heads)
    tau = score_factor(heads.q.shape[3])

    def measure() -> HeadFactors:
        return measured_factors(stream, rows, _QK, tau)

    def codes(factors: HeadFactors) -> HeadProduct:
        return product_of_streams([stream], rows, factors, _QK).of_pictures(heads.q.shape[1])

    def all_of_it() -> Tensor:
        y = attend(AttentionSettings(_QK, 1), heads, AttentionCall(None, ""))
        assert y is not None
        return y

    factors = measure()
    product = codes(factors)
    return {
        "dynamic": all_of_it,
        "measure": lambda: measure().key_mean,
        "codes": lambda: _first(codes(factors)),
        "kernel": product.wide,
    }


def _first(product: HeadProduct) -> Tensor:
    codes = product.operands[0]
    assert codes is not None
    return codes


def measure(shape: Shape) -> str:
    """Return a line of medians in microseconds."""
    heads = draw(shape)
    with use(Backend.GPU):
        theirs, mine = torchs(heads), ours(heads)
        wanted, found = next(iter(theirs.values()))().float(), mine["dynamic"]().float()
        device = torch.device("cuda")
        graphs = {name: captured(one, device) for name, one in {**theirs, **mine}.items()}
        watch = Stopwatch(device)
        watch.warm_up(graphs, PLAN.warmup)
        times = {n: s.summary().p50_us for n, s in watch.rounds(graphs, PLAN).items()}
    best = min(theirs, key=lambda name: times[name])
    spread = (wanted - heads.v.float().mean(2, keepdim=True)).norm()
    error = float((found - wanted).norm() / spread)
    parts = " + ".join(f"{name} {times[name]:.1f}" for name in ("measure", "codes", "kernel"))
    return (
        f"torch {times[best]:.1f} ({best}), dynamic {times['dynamic']:.1f} ({parts}), "
        f"{times['dynamic'] / times[best]:.2f} of torch's time, error {error:.4f}"
    )


@torch.no_grad()
def main() -> None:
    """Print a line for each shape."""
    if not torch.cuda.is_available():
        raise SystemExit("no GPU, expected one that torch.cuda finds")
    click.echo(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds")
    for shape in SHAPES:
        torch.manual_seed(0)
        click.echo(f"{'x'.join(map(str, shape))}: {measure(shape)}")


if __name__ == "__main__":
    main()
