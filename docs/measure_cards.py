"""What silicon reaches of what issue allows: other people's kernels, timed by others on Radeons.

``python docs/measure_cards.py`` prints the tables of docs/notes/kernels.md from
docs/notes/results/radeon-kernels.json, and the range that quantkit/device/aot/silicon.py has.
``python docs/measure_cards.py FILE`` reads another file of that format.

A file has two lists. A row of ``kernels`` counts what a wave executes: matrix instructions and all
others of a pass of its loop, how many of these have a quarter of the rate (``slow``), and what
stands outside of the loop. A row of ``times`` has a kernel, a card, milliseconds and their source;
its shape is M, N, K of a product, or pictures, heads, queries, keys and columns of attention.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

import click

from quantkit.bench.estimate.cards import find_card
from quantkit.device.geometry import ceil_div

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


def main() -> None:
    """Print the tables."""
    times = read(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
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
