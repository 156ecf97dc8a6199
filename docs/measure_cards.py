"""What silicon reaches of what issue allows: other people's kernels, timed by others on Radeons.

``python docs/measure_cards.py`` prints what docs/notes/kernels.md sums up, from
docs/notes/results/radeon-kernels.json, and the range that quantkit/device/aot/silicon.py has.
``python docs/measure_cards.py FILE`` reads another file of that format, or what ``quantkit doctor
--bundle FILE`` wrote on a card: its times beside what quantkit/bench/estimate says, the shares that
belong into cards.py there, and the card's row of docs/guides/figures.md.

A file has two lists. A row of ``kernels`` counts what a wave executes: matrix instructions and all
others of a pass of its loop, how many of these have a quarter of the rate (``slow``), and what
stands outside of the loop. A row of ``times`` has a kernel, a card, milliseconds and their source;
its shape is M, N, K of a product, or pictures, heads, queries, keys and columns of attention.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

import click

from quantkit.bench.estimate.cards import CARDS, Card, Range, find_card
from quantkit.bench.estimate.estimated_kernels import Kernel
from quantkit.bench.estimate.groups import PRODUCTS
from quantkit.bench.estimate.kernel_cost import time_kernels
from quantkit.bench.kernels.kernel_shapes import Shape, shape_of
from quantkit.bench.kernels.matrix_product import Product
from quantkit.device.aot.silicon import OF_ISSUE
from quantkit.device.geometry import ceil_div
from quantkit.workflow.bench import ModelBenchSettings, estimate_model
from quantkit.workflow.bundle import SCHEMA

FILE = Path(__file__).parent / "notes" / "results" / "radeon-kernels.json"


@dataclass(frozen=True)
class Timed:
    """One time of one kernel."""

    kernel: str
    card: str
    shape: tuple[int, ...]
    #: of the card's matrix rate
    allowed: float
    reached: float

    @property
    def of_issue(self) -> float:
        """Share of what issue allows."""
        return self.reached / self.allowed


def read(path: Path) -> tuple[Timed, ...]:
    """Return the times of a file with what their kernels allow."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return tuple(_timed(content["kernels"][row["kernel"]], row) for row in content["times"])


def _timed(kernel: dict[str, Any], row: dict[str, Any]) -> Timed:
    shape = tuple(row["shape"])
    peak = find_card(row["card"]).tflops[kernel["precision"]] * 1e12
    reached = operations(shape) / (row["ms"] / 1e3) / peak / filled(kernel, shape)
    return Timed(row["kernel"], row["card"], shape, allowed(kernel, shape), reached)


def operations(shape: tuple[int, ...]) -> float:
    """Return multiplications and additions of a product or of attention."""
    if len(shape) == 3:
        return 2.0 * shape[0] * shape[1] * shape[2]
    b, h, queries, keys, columns = shape
    return 4.0 * b * h * queries * keys * columns


def filled(kernel: dict[str, Any], shape: tuple[int, ...]) -> float:
    """Return which share of its tiles a product fills."""
    if "tile" not in kernel:
        return 1.0
    (m, n, _), (tile_m, tile_n, _) = shape, kernel["tile"]
    rows, columns = ceil_div(m, tile_m) * tile_m, ceil_div(n, tile_n) * tile_n
    return float(m * n / (rows * columns))


def allowed(kernel: dict[str, Any], shape: tuple[int, ...]) -> float:
    """Return the share of the matrix rate that issue of a whole block allows."""
    passes = ceil_div(shape[2], kernel["tile"][2]) if "tile" in kernel else 1
    matrix = passes * kernel["matrix"] * kernel["matrix_cycles"]
    others = passes * (kernel["others"] + 3 * kernel["slow"]) + kernel["outside"]
    return float(matrix / (matrix + others))


def by_kernel(times: tuple[Timed, ...]) -> dict[str, list[float]]:
    """Return the shares of issue by kernel."""
    found = defaultdict[str, list[float]](list)
    for timed in times:
        found[timed.kernel].append(timed.of_issue)
    return found


def silicon(times: tuple[Timed, ...]) -> tuple[float, float]:
    """Return the quartiles of the kernels' medians."""
    low, _, high = quantiles(map(median, by_kernel(times).values()), n=4, method="inclusive")
    return round(low, 2), round(high, 2)


def left_out(times: tuple[Timed, ...]) -> Iterator[tuple[str, float, float]]:
    """Yield each kernel, its median share, and the error of what all others say of it."""
    medians = {name: median(shares) for name, shares in by_kernel(times).items()}
    for name, own in medians.items():
        others = geometric_mean(share for other, share in medians.items() if other != name)
        yield name, own, others / own - 1


@dataclass(frozen=True)
class OwnTime:
    """The time of one of quantkit's kernels on a card that a bundle is of."""

    op: str
    product: Product
    #: microseconds, measured and estimated: (optimistic, pessimistic)
    us: float
    estimated: Range
    #: of the peak: what estimates take, and what the time says
    table: Range
    share: float


def card_of(machine: dict[str, Any]) -> Card:
    """Return the card of a bundle: that of its longest name, or of its architecture."""
    device = machine["device"].casefold()
    named = [card for card in CARDS.values() if card.name.casefold() in device]
    if named:
        return max(named, key=lambda card: len(card.name))
    return find_card(machine["architecture"].partition(":")[0])


def own_times(kernels: dict[str, Any]) -> tuple[OwnTime, ...]:
    """Return the times of a bundle that say what the matrix unit reaches: of enough tokens."""
    card = card_of(kernels["machine"])
    timed = [row for row in kernels["rows"] if row["timing"]]
    return tuple(
        _own_time(row, card)
        for row in timed
        if row["shape"].get("m", 1024) >= 1024 and row["shape"].get("keys", 1024) >= 1024
    )


def _own_time(row: dict[str, Any], card: Card) -> OwnTime:
    product, us = _product(row), row["timing"]["p50_us"]
    kernel = Kernel(PRODUCTS, (row["op"],), (), (), product)
    (worst,), (best,) = (time_kernels((kernel,), card, side) for side in (0, 1))
    # What a time says of the share that it was estimated with, the start taken off.
    table, start = _table(product, card), card.efficiency.product_us[0]
    share = table[0] * (worst.us - start) / max(us - start, us / 10)
    return OwnTime(row["op"], product, us, (best.us, worst.us), table, share)


def _product(row: dict[str, Any]) -> Product:
    shape, op = shape_of(row["shape"]), row["op"]
    precision = "fp8" if "fp8" in op else "int8"
    if isinstance(shape, Shape):
        return Product("linear", precision, shape.m, shape.n, shape.k, sparse="sparse" in op)
    size = shape.head_size
    return Product.attention(
        shape.batch * shape.heads, shape.queries, shape.keys, size, size, precision
    )


def _table(product: Product, card: Card) -> Range:
    efficiency, precision = card.efficiency, product.precision
    if product.kind != "attention":
        return efficiency.products[product.kind, precision, product.sparse]
    rows = sorted((most, s) for (of, most), s in efficiency.attention.items() if of == precision)
    return next((share for most, share in rows if product.k // 2 <= most), rows[-1][1])


def refitted(times: tuple[OwnTime, ...]) -> dict[str, list[OwnTime]]:
    """Return the times of each operation."""
    found = defaultdict[str, list[OwnTime]](list)
    for timed in times:
        found[timed.op].append(timed)
    return found


def print_bundle(bundle: dict[str, Any]) -> None:
    """Print the times of a card beside the estimates, and what follows."""
    card, times = card_of(bundle["kernels"]["machine"]), own_times(bundle["kernels"])
    click.echo("| kernel | M x N x K | estimated us | measured us | share |\n|---|---|---|---|---|")
    for t in times:
        p, (low, high) = t.product, t.estimated
        shape = f"{p.count} x {p.m}x{p.n}x{p.k}"
        click.echo(f"| {t.op} | {shape} | {low:.0f} to {high:.0f} | {t.us:.0f} | {t.share:.2f} |")
    click.echo(f"\n| kernel | share of {card.name}'s peak | in cards.py | of what issue allows |")
    click.echo("|---|---|---|---|")
    fitted = refitted(times)
    for op, own in fitted.items():
        shares, (low, high) = [t.share for t in own], own[0].table
        of_issue = median(t.share / t.table[0] for t in own) * OF_ISSUE[0]
        told = "" if card.is_nvidia else f"{of_issue:.2f}"
        found = f"{min(shares):.2f} to {max(shares):.2f}"
        click.echo(f"| {op} | {found} | {low:.2f} to {high:.2f} | {told} |")
    steps = _steps(bundle["model"], card)
    click.echo(f"\n{row_of_figures(bundle, fitted, steps)}")


def _steps(model: dict[str, Any] | None, card: Card) -> dict[str, float]:
    """Print the steps beside their estimates, and return their milliseconds."""
    steps = {
        r["contender"]: r["timing"]["p50_us"] / 1e3
        for r in (model or {}).get("rows", [])
        if r["timing"]
    }
    if not steps:
        return {}
    settings = ModelBenchSettings(batch=2, size=128)
    estimated = estimate_model("sdxl", card=card.name, settings=settings, contenders=list(steps))
    click.echo("\n| step of SDXL | estimated ms | measured ms |\n|---|---|---|")
    for row in estimated.rows:
        told = f"{row.ms.low:.1f} to {row.ms.high:.1f}" if row.ms else row.reason
        click.echo(f"| {row.contender} | {told} | {steps[row.contender]:.1f} |")
    return steps


#: Columns of the table of cards in docs/guides/figures.md.
_COLUMNS = ("gemm_int8", "gemm_fp8", "gemm_w4a8", "gemm_int8_sparse", "gemm_fp8_sparse",
            "attention_int8", "attention_fp8")  # fmt: skip
_STEPS = ("f16-replayed", "int8-static-replayed", "fp8-static-replayed")


def row_of_figures(
    bundle: dict[str, Any], fitted: Mapping[str, Sequence[OwnTime]], steps: Mapping[str, float]
) -> str:
    """Return a card's row: medians of shares of the peak, then milliseconds of steps."""
    machine = bundle["kernels"]["machine"]
    shares = (
        f"{median(t.share for t in fitted[op]):.2f}" if op in fitted else "" for op in _COLUMNS
    )
    times = (f"{steps[name]:.1f}" if name in steps else "" for name in _STEPS)
    name = f"{machine['device']} ({machine['driver']})"
    return f"| {' | '.join((name, *shares, *times))} |"


def main() -> None:
    """Print the tables."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("schema") == SCHEMA:
        print_bundle(content)
    else:
        print_published(read(path))


def print_published(times: tuple[Timed, ...]) -> None:
    """Print the times of others' kernels, and what silicon reaches by them."""
    click.echo(
        "| kernel | card | shape | issue allows | reached | of it |\n|---|---|---|---|---|---|"
    )
    for timed in times:
        shape = "x".join(map(str, timed.shape))
        shares = (timed.allowed, timed.reached, timed.of_issue)
        cells = (timed.kernel, timed.card, shape, *(f"{share:.2f}" for share in shares))
        click.echo(f"| {' | '.join(cells)} |")
    click.echo(
        "\n| kernel | of what issue allows | told by the others | error |\n|---|---|---|---|"
    )
    for name, own, error in left_out(times):
        click.echo(f"| {name} | {own:.2f} | {own * (1 + error):.2f} | {error:+.0%} |")
    low, high = silicon(times)
    click.echo(f"\n{low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
