"""Times of kernels on a card: the largest of products, bytes and instructions, and their start."""

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.bench.estimate.cards import Card
from quantkit.bench.estimate.estimated_kernels import Kernel
from quantkit.bench.kernels.matrix_product import Product
from quantkit.device.geometry import ceil_div

MATRIX, MEMORY, VECTOR, LAUNCH = "matrix rate", "bandwidth", "vector rate", "launch"
BOUNDS = (MATRIX, MEMORY, VECTOR, LAUNCH)

#: Tiles that libraries and quantkit have between them, and what of the rate of the largest they
#: reach: the fewer products for a byte that is loaded, the less.
_TILES = ((256, 128, 1.0), (192, 192, 1.0), (128, 160, 1.0), (128, 128, 0.97), (64, 128, 0.8),
          (64, 64, 0.65), (16, 64, 0.25))  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """One kernel on a card."""

    kernel: Kernel
    #: microseconds, without the gap before it
    us: float
    #: of BOUNDS: what takes most of them
    bound: str


def time_kernels(kernels: Sequence[Kernel], card: Card, side: int) -> tuple[Timed, ...]:
    """Return the time of each kernel.

    Args:
        kernels: in the order in which they run.
        card: where.
        side: 0 for the pessimistic end of the card's ranges, 1 for the optimistic one.
    """
    cache = _Cache(card.cache_mb * 1e6)
    return tuple(_time(kernel, card, side, cache.read(kernel)) for kernel in kernels)


class _Cache:
    """The last-level cache: tensors written since less than its size went by."""

    def __init__(self, size: float) -> None:
        self._size = size
        self._moved = 0.0
        self._written: dict[int, float] = {}

    def read(self, kernel: Kernel) -> float:
        """Return the bytes of a kernel's reads that are held, and note what it moves."""
        held = sum(
            view.nbytes
            for view in kernel.reads
            if self._moved - self._written.get(view.storage, -self._size) < self._size
        )
        self._moved += kernel.nbytes
        self._written.update((view.storage, self._moved - view.nbytes) for view in kernel.writes)
        return held


def _time(kernel: Kernel, card: Card, side: int, held: float) -> Timed:
    efficiency = card.efficiency
    share = efficiency.scattered if kernel.scattered else efficiency.memory
    rate = card.gbs * share[side] * 1e3
    fresh = kernel.nbytes - held
    if kernel.twice and not side:
        # At best the second time is from a cache.
        fresh += sum(view.nbytes for view in kernel.reads)
    work = {
        MATRIX: _product_us(kernel.product, card, side) if kernel.product else 0.0,
        MEMORY: (fresh + held / efficiency.cache[side]) / rate,
        VECTOR: kernel.instructions / card.vector / 1e6,
    }
    start = _start_us(kernel, card, side)
    longest = max(work, key=lambda name: work[name])
    # How far loads and instructions of small kernels overlap is between all and nothing, and so it
    # is of products and the instructions behind them.
    behind = work[MATRIX] + work[VECTOR] if kernel.product else sum(work.values())
    busy = work[longest] if side else max(work[longest], behind)
    return Timed(kernel, start + busy, LAUNCH if start > busy else longest)


def _start_us(kernel: Kernel, card: Card, side: int) -> float:
    if kernel.product is not None:
        return card.efficiency.product_us[side]
    return (card.efficiency.summed_us if kernel.summed else card.efficiency.small_us)[side]


def _product_us(product: Product, card: Card, side: int) -> float:
    peak = card.tflops[product.precision] * 1e6 * (card.sparse if product.sparse else 1)
    if product.kind == "attention":
        return product.flops / (peak * _attention_share(product, card, side))
    share = _share(product, card, side)
    fixed = card.efficiency.fixed_k
    k = product.k + fixed.get((product.precision, product.sparse), fixed["fp8", product.sparse])
    rate = peak * share / card.units
    return min(_rounds_us(product, k, tile, rate, card.units) for tile in _TILES)


def _rounds_us(
    product: Product, k: float, tile: tuple[int, int, float], rate: float, units: int
) -> float:
    """Return the time of whole rounds of tiles: a unit that has none waits."""
    m, n, share = tile
    blocks = product.count * ceil_div(product.m, m) * ceil_div(product.n, n)
    return ceil_div(blocks, units) * 2.0 * m * n * k / (rate * share)


def _share(product: Product, card: Card, side: int) -> float:
    table = card.efficiency.products
    precision = "f16" if product.precision == "f32" else product.precision
    more = card.efficiency.fast.get((precision, product.sparse), 1.0) if product.fast else 1.0
    return more * table[product.kind, precision, product.sparse][side]


def _attention_share(product: Product, card: Card, side: int) -> float:
    columns = product.k // 2
    rows = sorted(
        (most, share)
        for (precision, most), share in card.efficiency.attention.items()
        if precision == product.precision
    )
    fits = [share for most, share in rows if columns <= most]
    return (fits or [rows[-1][1]])[0][side]
