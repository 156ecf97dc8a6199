"""What a device can do at best: measured, else from its data sheet; and the floor that this sets.

The floor of an operation is the larger of two times: its multiplications at the peak rate of its
precision, and its bytes, each read or written once, at the rate of a large copy.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from quantkit.bench.kernels.kernel_shapes import AttentionShape, Shape
from quantkit.bench.kernels.timing import Call, Stopwatch, TimingPlan


class Precision(Enum):
    """What a contender multiplies, which decides its peak and its bytes."""

    F16 = "f16"
    F16_SPARSE = "f16 2:4"
    FP8 = "fp8"
    FP8_SPARSE = "fp8 2:4"
    INT8 = "int8"
    W4A8 = "int4 weights, int8"


#: Bytes per weight: 2:4 keeps half of the values and, per kept one, 2 bits of position in FP8
#: formats here and in cuSPARSELt's float16.
WEIGHT_BYTES = {
    Precision.F16: 2.0,
    Precision.F16_SPARSE: 1.125,
    Precision.FP8: 1.0,
    Precision.FP8_SPARSE: 0.625,
    Precision.INT8: 1.0,
    # Nibbles, and a byte for 32 of them.
    Precision.W4A8: 0.53125,
}
#: Peak as a multiple of another precision's: 2:4 instructions do twice the work.
_TWICE = {Precision.F16_SPARSE: Precision.F16, Precision.FP8_SPARSE: Precision.FP8}


@dataclass(frozen=True)
class Work:
    """What an operation cannot avoid."""

    #: multiplications and additions, dropped weights included
    flops: float
    #: operands and result, once each
    nbytes: float


@dataclass(frozen=True)
class Ceiling:
    """One limit of a device."""

    #: TFLOP/s or GB/s
    rate: float
    measured: bool
    #: what was run, or where the number is from
    source: str


@dataclass(frozen=True)
class Ceilings:
    """The limits of a device; None where neither a measurement nor a data sheet is at hand."""

    #: GB/s of a large copy, bytes read and written
    copy: Ceiling
    #: TFLOP/s by precision
    matmul: dict[Precision, Ceiling]

    def floor_us(self, work: Work, precision: Precision | None) -> float | None:
        """Return the least time; None when the peak of the precision is not known."""
        by_bytes = work.nbytes / self.copy.rate / 1e3
        if precision is None:
            return by_bytes
        peak = self.matmul.get(precision)
        return None if peak is None else max(by_bytes, work.flops / peak.rate / 1e6)


@dataclass(frozen=True)
class _Sheet:
    """A data sheet: dense TFLOP/s."""

    f16: float
    fp8: float
    source: str


#: By the name that torch gives; only for limits, never to choose a kernel.
_SHEETS = {
    "AMD Radeon RX 9070 XT": _Sheet(195, 389, "AMD's data sheet"),
    "AMD Radeon RX 9070": _Sheet(144, 289, "AMD's data sheet"),
    "AMD Radeon AI PRO R9700": _Sheet(191, 383, "AMD's data sheet"),
    "AMD Radeon RX 9060 XT": _Sheet(103, 205, "AMD's data sheet"),
    "NVIDIA GeForce RTX 4090": _Sheet(165.2, 330.3, "NVIDIA's Ada whitepaper, float32 sums"),
    "NVIDIA H100 80GB HBM3": _Sheet(989, 1979, "NVIDIA's H100 data sheet"),
    "NVIDIA H200": _Sheet(989, 1979, "NVIDIA's H200 data sheet"),
}

_PLAN = TimingPlan(warmup=2, repeats=15, seconds=1.0)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure the copy and the large matrix products of a device.

    FP8 is ``torch._scaled_mm``, fast, one scale per tensor; where it does not run, the data sheet's
    number stands in. On the CPU, whose kernels compute in float32, all products count as float32.
    """
    watch, on_gpu = Stopwatch(device), device.type == "cuda"
    copy = _measure_copy(watch, 2**29 if on_gpu else 2**24)
    side = 8192 if on_gpu else 512
    if not on_gpu:
        found = _measured(watch, _matmul(side, torch.float32, device), side, "float32 torch.mm")
        return Ceilings(copy, dict.fromkeys(Precision, found))
    matmul = {}
    f16 = _measured(watch, _matmul(side, torch.float16, device), side, "float16 torch.mm")
    matmul[Precision.F16] = f16
    try:
        call = _scaled(side, device)
        call()
        matmul[Precision.FP8] = _measured(watch, call, side, "torch._scaled_mm, fast, per tensor")
    except (RuntimeError, ValueError, AttributeError):
        sheet = _SHEETS.get(torch.cuda.get_device_name(device))
        if sheet is not None:
            matmul[Precision.FP8] = Ceiling(sheet.fp8, measured=False, source=sheet.source)
    for integer in (Precision.INT8, Precision.W4A8):
        # The units that multiply FP8 multiply int8 as fast, on all of these devices.
        if Precision.FP8 in matmul:
            matmul[integer] = matmul[Precision.FP8]
    for sparse, dense in _TWICE.items():
        if dense in matmul:
            known = matmul[dense]
            source = f"twice {dense.value}: {known.source}"
            matmul[sparse] = Ceiling(2 * known.rate, known.measured, source)
    return Ceilings(copy, matmul)


def gemm_work(shape: Shape, precision: Precision, *, x_bytes: float, y_bytes: float = 2.0) -> Work:
    """Return the work of a product.

    Args:
        x_bytes: bytes of one input value.
        y_bytes: bytes of the result by M N.
    """
    m, n, k = shape.m, shape.n, shape.k
    nbytes = m * k * x_bytes + n * k * WEIGHT_BYTES[precision] + m * n * y_bytes
    return Work(2.0 * m * n * k, nbytes)


def attention_work(shape: AttentionShape, *, x_bytes: float, y_bytes: float = 2.0) -> Work:
    """Return the work of attention: two products; its exponentials are not counted.

    Args:
        x_bytes: bytes of a value of q, k and v.
        y_bytes: of the result.
    """
    rows = shape.batch * shape.heads
    queries, keys = (rows * n * shape.head_size for n in (shape.queries, shape.keys))
    nbytes = (queries + 2 * keys) * x_bytes + queries * y_bytes
    return Work(4.0 * queries * shape.keys, nbytes)


def _measure_copy(watch: Stopwatch, count: int) -> Ceiling:
    source = torch.ones(count, dtype=torch.float16, device=watch.device)
    target = torch.empty_like(source)
    us = _p50(watch, lambda: target.copy_(source))
    megabytes = source.nbytes // 2**20
    return Ceiling(2 * source.nbytes / us / 1e3, measured=True, source=f"copy of {megabytes} MiB")


def _measured(watch: Stopwatch, call: Call, side: int, source: str) -> Ceiling:
    return Ceiling(
        2 * side**3 / _p50(watch, call) / 1e6, measured=True, source=f"{source}, {side}^3"
    )


def _p50(watch: Stopwatch, call: Call) -> float:
    calls = {"": call}
    watch.warm_up(calls, _PLAN.warmup)
    return watch.rounds(calls, _PLAN)[""].summary().p50_us


def _matmul(side: int, dtype: torch.dtype, device: torch.device) -> Call:
    # Random: zeros run faster than anything that occurs.
    x, w = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return lambda: x @ w.T


def _scaled(side: int, device: torch.device) -> Call:
    x, w = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)

    def call() -> object:
        return torch._scaled_mm(  # noqa: SLF001  torch's only FP8 product
            x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return call
