"""The cards of which a step can be estimated: one row each, with where its numbers are from.

A share is what of a peak kernels reach, as a range: (pessimistic, optimistic). What nobody has
measured says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quantkit.device.aot.silicon import OF_ISSUE
from quantkit.errors import InputError

#: (pessimistic, optimistic)
Range = tuple[float, float]


@dataclass(frozen=True)
class Efficiency:
    """Shares of a card's peaks that kernels reach."""

    #: (kind, precision, 2:4) of a product, attention's with columns of a head up to -> share
    products: Mapping[tuple[str, str, bool], Range]
    #: (precision, columns of a head up to) -> share
    attention: Mapping[tuple[str, int], Range]
    #: how many times as much under ``fast_sums``, by precision and 2:4; 1 where it is not named
    fast: Mapping[tuple[str, bool], float]
    #: summands by whose products the start and the end of a tile are as long, by precision
    fixed_k: Mapping[tuple[str, bool], float]
    #: of the bandwidth
    memory: Range
    #: of the bandwidth, where torch joins, repeats or copies what lies in pieces
    scattered: Range
    #: how much faster bytes are read that the last-level cache still holds
    cache: Range
    #: microseconds of a kernel before its work and after: products, elementwise, sums over rows
    product_us: Range
    small_us: Range
    summed_us: Range
    #: microseconds between two kernels of a replayed graph
    gap_us: Range


@dataclass(frozen=True)
class Card:
    """One card."""

    name: str
    #: gcnArchName, or sm_ and the compute capability
    device: str
    #: compute units or multiprocessors
    units: int
    #: dense TFLOP/s by precision
    tflops: Mapping[str, float]
    #: how many times as many of them with 2:4 weights
    sparse: float
    #: GB/s of memory
    gbs: float
    #: megabytes of the last-level cache
    cache_mb: float
    #: 10^12 instructions of a lane per second: lanes x clock
    vector: float
    efficiency: Efficiency
    source: str

    @property
    def is_nvidia(self) -> bool:
        """True where convolutions in 16 bit are cuDNN's."""
        return self.device.startswith("sm_")


def _of_issue(share: float) -> Range:
    """Return what silicon reaches of a share of the peak that issue allows."""
    low, high = OF_ISSUE
    return share * low, share * high


# Of the H200 and the H100. Products, also in 16 bit: the kernels of steps of SDXL and a quarter of
# FLUX on an H200 (docs/notes/results/h200-step-*.json, read by docs/measure_estimate.py), between
# those that run alone (docs/notes/results/h200-products.json: 0.63 to 0.74 of the peak of FP8, 0.34
# to 0.42 of 2:4, the end of a tile included) and what the K step of the best tile allows
# (device/hopper/hopper_choice.py: 0.76, 2:4 0.49, int8 0.85). int8's convolutions as FP8's. Fast
# sums: the same files. Attention: cuDNN's and FlashAttention-3's, 400 and 600 TFLOP/s of heads of
# 64 and 128 columns (arXiv 2407.08608, figure 5); on codes of 64 columns the step's 46 us; others
# assumed, from 16 bit's rate to the paper's in FP8. Scattered: torch.cat and copies of the same
# steps, 0.7 to 1.4 TB/s.
# Times of small kernels: those of an uncompiled SDXL on an H200, bytes at 4.2 TB/s taken
# off (docs/notes/results/h200-sdxl.json: 701 quantize 2.63 ms and 6.1 GB, 210 layer norms 1.87 ms
# and 2.5 GB); gap: its device idle by kernel, 1.0 us. Copy of 1 GB: 0.88 of the bandwidth.
_HOPPER = Efficiency(
    products={
        ("linear", "f16", False): (0.70, 0.84),
        ("linear", "fp8", False): (0.68, 0.79),
        ("linear", "fp8", True): (0.41, 0.50),
        ("linear", "int8", False): (0.72, 0.85),
        ("linear", "int8", True): (0.38, 0.46),
        ("conv", "f16", False): (0.62, 0.82),
        ("conv", "fp8", False): (0.53, 0.67),
        ("conv", "fp8", True): (0.33, 0.42),
        ("conv", "int8", False): (0.53, 0.70),
        ("conv", "int8", True): (0.32, 0.41),
    },
    attention={
        ("f16", 64): (0.38, 0.43),
        ("f16", 128): (0.55, 0.64),
        ("fp8", 64): (0.20, 0.28),
        ("fp8", 160): (0.28, 0.50),
        ("int8", 64): (0.20, 0.40),
        ("int8", 160): (0.28, 0.50),
    },
    fast={("fp8", False): 1.08, ("fp8", True): 1.2},
    fixed_k={("f16", False): 150, ("fp8", False): 400, ("fp8", True): 740},
    memory=(0.85, 0.90),
    scattered=(0.14, 0.30),
    cache=(1.0, 1.3),
    product_us=(2.5, 1.8),
    small_us=(2.2, 1.5),
    summed_us=(6.0, 4.5),
    gap_us=(1.3, 0.9),
)
# Ada: nobody has timed quantkit's kernels there. cuBLAS and FlashAttention-2 near their peak are
# common in public benchmarks; mma.sync reaches what is left of it in 64x64 and 128x128 tiles. That
# of attention on codes is assumed.
_ADA = Efficiency(
    products={
        ("linear", "f16", False): (0.75, 0.92),
        ("linear", "fp8", False): (0.45, 0.75),
        ("linear", "fp8", True): (0.30, 0.60),
        ("linear", "int8", False): (0.45, 0.75),
        ("linear", "int8", True): (0.30, 0.60),
        ("conv", "f16", False): (0.55, 0.80),
        ("conv", "fp8", False): (0.40, 0.70),
        ("conv", "fp8", True): (0.27, 0.55),
        ("conv", "int8", False): (0.40, 0.70),
        ("conv", "int8", True): (0.27, 0.55),
    },
    attention={
        ("f16", 64): (0.65, 0.85),
        ("f16", 128): (0.75, 0.92),
        ("fp8", 64): (0.30, 0.65),
        ("fp8", 160): (0.35, 0.70),
        ("int8", 64): (0.30, 0.65),
        ("int8", 160): (0.35, 0.70),
    },
    fast={},
    fixed_k={("f16", False): 150, ("fp8", False): 300, ("fp8", True): 600},
    memory=(0.85, 0.92),
    scattered=(0.5, 0.8),
    cache=(1.0, 2.5),
    product_us=(3.0, 2.0),
    small_us=(2.5, 1.5),
    summed_us=(5.0, 3.0),
    gap_us=(1.5, 0.9),
)
# RDNA4. Products and attention of codes: what issue allows the loops (`kernels check --bounds`:
# 0.87 dense, 0.77 with 2:4, convolutions 0.80 and 0.65; attention 0.54 and 0.63 of FP8, 0.45 and
# 0.59 of int8), of it what silicon reaches (aot/silicon.py). The ends of a tile are in fixed_k.
# 16 bit: hipBLASLt at 4096 to 16384, 113 to 133 of 195 TFLOP/s (rocm-libraries 10861); MIOpen's
# Winograd, 95 of 144 TFLOP/s on an RX 9070 (rocm-libraries 2567). Attention: torch's 79 TFLOP/s to
# Composable Kernel's 103 of heads of 64, 93 to 108 of 128 (rocm-libraries 5455). Times of small
# kernels, gaps, what torch's copies reach, and what 64 MB of Infinity Cache give: assumed.
_RDNA4 = Efficiency(
    products={
        ("linear", "f16", False): (0.58, 0.68),
        ("linear", "fp8", False): _of_issue(0.87),
        ("linear", "fp8", True): _of_issue(0.77),
        ("linear", "int8", False): _of_issue(0.87),
        ("linear", "int8", True): _of_issue(0.77),
        ("conv", "f16", False): (0.45, 0.70),
        ("conv", "fp8", False): _of_issue(0.80),
        ("conv", "fp8", True): _of_issue(0.65),
        ("conv", "int8", False): _of_issue(0.80),
        ("conv", "int8", True): _of_issue(0.65),
    },
    attention={
        ("f16", 64): (0.40, 0.53),
        ("f16", 128): (0.48, 0.55),
        ("fp8", 64): _of_issue(0.54),
        ("fp8", 160): _of_issue(0.63),
        ("int8", 64): _of_issue(0.45),
        ("int8", 160): _of_issue(0.59),
    },
    fast={},
    fixed_k={("f16", False): 150, ("fp8", False): 90, ("fp8", True): 165},
    memory=(0.78, 0.90),
    scattered=(0.25, 0.6),
    cache=(1.0, 2.5),
    product_us=(5.0, 2.5),
    small_us=(4.0, 2.0),
    summed_us=(8.0, 4.0),
    gap_us=(5.0, 1.5),
)
# RDNA3: the same from its own loops (FP8 widened to float16: 0.44 and 0.40, int8 0.94 and 0.76);
# 16 bit: 80 of 123 TFLOP/s on an RX 7900 XTX (SDNQ's table).
_RDNA3 = Efficiency(
    products={
        ("linear", "f16", False): (0.50, 0.66),
        ("linear", "fp8", False): _of_issue(0.44),
        ("linear", "fp8", True): _of_issue(0.40),
        ("linear", "int8", False): _of_issue(0.94),
        ("linear", "int8", True): _of_issue(0.76),
        ("conv", "f16", False): (0.30, 0.55),
        ("conv", "fp8", False): _of_issue(0.39),
        ("conv", "fp8", True): _of_issue(0.34),
        ("conv", "int8", False): _of_issue(0.92),
        ("conv", "int8", True): _of_issue(0.75),
    },
    attention={("f16", 64): (0.30, 0.45), ("f16", 128): (0.36, 0.55)},
    fast={},
    fixed_k={("f16", False): 150, ("fp8", False): 25, ("fp8", True): 20},
    memory=(0.78, 0.90),
    scattered=(0.25, 0.6),
    cache=(1.0, 2.5),
    product_us=(5.0, 2.5),
    small_us=(4.0, 2.0),
    summed_us=(8.0, 4.0),
    gap_us=(5.0, 1.5),
)

# RDNA2: the same from its loops of dot4 (0.89, 2:4 0.34). FP8 is torch's, from dequantized weights,
# in 16 bit, of which nobody's figures were at hand: RDNA3's shares.
_RDNA2 = replace(
    _RDNA3,
    products={
        ("linear", "f16", False): (0.50, 0.66),
        ("linear", "fp8", False): (0.45, 0.62),
        ("linear", "fp8", True): (0.45, 0.62),
        ("linear", "int8", False): _of_issue(0.89),
        ("linear", "int8", True): _of_issue(0.34),
        ("conv", "f16", False): (0.30, 0.55),
        ("conv", "fp8", False): (0.27, 0.52),
        ("conv", "fp8", True): (0.27, 0.52),
        ("conv", "int8", False): _of_issue(0.87),
        ("conv", "int8", True): _of_issue(0.33),
    },
)


def _rates(f16: float, fp8: float, f32: float, int8: float | None = None) -> dict[str, float]:
    """Return dense TFLOP/s; int8 has FP8's rate where it is not given."""
    return {"f16": f16, "fp8": fp8, "int8": int8 or fp8, "f32": f32}


#: The first row of a device stands for it.
CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card("RX 9070 XT", "gfx1201", 64, _rates(195, 389, 24), 2, 640, 64, 12.2, _RDNA4,
             "AMD's data sheet; lanes: 64 CUs x 64 at 2.97 GHz"),
        Card("RX 9070", "gfx1201", 56, _rates(144, 289, 18), 2, 640, 64, 9.0, _RDNA4,
             "AMD's data sheet; 56 CUs x 64 at 2.52 GHz"),
        Card("R9700", "gfx1201", 64, _rates(191, 383, 24), 2, 640, 64, 12.0, _RDNA4,
             "AMD's data sheet; 64 CUs x 64 at 2.92 GHz"),
        Card("RX 9060 XT", "gfx1200", 32, _rates(103, 205, 13), 2, 320, 32, 6.4, _RDNA4,
             "AMD's data sheet; 32 CUs x 64 at 3.13 GHz"),
        Card("RX 7900 XTX", "gfx1100", 96, _rates(123, 123, 30), 1, 960, 96, 15.4, _RDNA3,
             "AMD's data sheet; FP8 multiplied in float16, 2:4 as dense; 96 CUs x 64, 2.5 GHz"),
        Card("RX 7800 XT", "gfx1101", 60, _rates(74.6, 74.6, 18.7), 1, 624, 64, 9.3, _RDNA3,
             "AMD's data sheet; as above, 60 CUs x 64 at 2.43 GHz"),
        Card("RX 7700 XT", "gfx1101", 54, _rates(70.3, 70.3, 17.6), 1, 432, 48, 8.8, _RDNA3,
             "AMD's data sheet; 54 CUs x 64 at 2.54 GHz"),
        Card("RX 7600", "gfx1102", 32, _rates(43.5, 43.5, 10.9), 1, 288, 32, 5.4, _RDNA3,
             "AMD's data sheet; 32 CUs x 64 at 2.66 GHz"),
        Card("Radeon 780M", "gfx1103", 12, _rates(16.6, 16.6, 4.1), 1, 90, 2, 2.1, _RDNA3,
             "12 CUs x 64 at 2.7 GHz; two channels of DDR5-5600, no Infinity Cache"),
        Card("Radeon 890M", "gfx1150", 16, _rates(23.8, 23.8, 5.9), 1, 120, 2, 3.0, _RDNA3,
             "16 CUs x 64 at 2.9 GHz; 128 bits of LPDDR5X-7500"),
        Card("Radeon 8060S", "gfx1151", 40, _rates(59.4, 59.4, 14.8), 1, 256, 32, 7.4, _RDNA3,
             "AMD's data sheet; 40 CUs x 64 at 2.9 GHz; 256 bits of LPDDR5X-8000"),
        Card("Radeon 860M", "gfx1152", 8, _rates(12.3, 12.3, 3.1), 1, 120, 1, 1.5, _RDNA3,
             "8 CUs x 64 at 3.0 GHz; 128 bits of LPDDR5X-7500"),
        Card("Radeon 820M", "gfx1153", 2, _rates(2.9, 2.9, 0.7), 1, 90, 1, 0.4, _RDNA3,
             "2 CUs x 64 at 2.8 GHz; two channels of DDR5-5600"),
        Card("RX 6800 XT", "gfx1030", 72, _rates(41.5, 41.5, 20.7, 82.9), 1, 512, 128, 10.4, _RDNA2,
             "AMD's data sheet; int8 by dot4, twice 16 bit; 72 CUs x 64 at 2.25 GHz"),
        Card("RX 6900 XT", "gfx1030", 80, _rates(46.1, 46.1, 23.0, 92.2), 1, 512, 128, 11.5, _RDNA2,
             "AMD's data sheet; as above, 80 CUs x 64 at 2.25 GHz"),
        Card("RX 6700 XT", "gfx1031", 40, _rates(26.4, 26.4, 13.2, 52.9), 1, 384, 96, 6.6, _RDNA2,
             "AMD's data sheet; 40 CUs x 64 at 2.58 GHz"),
        Card("RX 6600", "gfx1032", 28, _rates(17.9, 17.9, 8.9, 35.7), 1, 224, 32, 4.5, _RDNA2,
             "AMD's data sheet; 28 CUs x 64 at 2.49 GHz"),
        Card("Steam Deck", "gfx1033", 8, _rates(3.3, 3.3, 1.6, 6.6), 1, 88, 1, 0.8, _RDNA2,
             "Valve's data sheet; 8 CUs x 64 at 1.6 GHz; 128 bits of LPDDR5-5500"),
        Card("RX 6500 XT", "gfx1034", 16, _rates(11.5, 11.5, 5.8, 23.1), 1, 144, 16, 2.9, _RDNA2,
             "AMD's data sheet; 16 CUs x 64 at 2.82 GHz"),
        Card("Radeon 680M", "gfx1035", 12, _rates(7.4, 7.4, 3.7, 14.7), 1, 77, 2, 1.8, _RDNA2,
             "12 CUs x 64 at 2.4 GHz; two channels of DDR5-4800"),
        Card("H200", "sm_90", 132, _rates(989, 1979, 60), 2, 4800, 50, 31.0, _HOPPER,
             "NVIDIA's data sheet; lanes: 132 x 128 at 1.83 GHz"),
        Card("H100", "sm_90", 132, _rates(989, 1979, 60), 2, 3350, 50, 31.0, _HOPPER,
             "NVIDIA's data sheet, SXM5; lanes: 132 x 128 at 1.83 GHz"),
        Card("RTX 4090", "sm_89", 128, _rates(165, 330, 80), 2, 1008, 72, 41.0, _ADA,
             "NVIDIA's Ada whitepaper, float32 sums; lanes: 128 x 128 at 2.52 GHz"),
    )
}  # fmt: skip


def find_card(text: str) -> Card:
    """Return the card of a name, or the first one of an architecture.

    Raises:
        InputError: there is none.
    """
    expected = text.strip().casefold()
    for card in CARDS.values():
        if expected in {card.name.casefold(), card.device}:
            return card
    raise InputError(
        f"card {text!r:.80}: unknown, expected one of {', '.join(CARDS)}, or an architecture of "
        "theirs, as gfx1201",
        fields=("estimate",),
    )
