"""Limits of a device, measured or from its data sheet, and the floor that they set to a time.

The floor of an operation is the larger of two times: its multiplications at the peak rate of its
precision, and its bytes, each read or written once, at the rate of a large copy.
"""

from dataclasses import dataclass

import torch

from quantkit.bench.kernels.timing import Call, Stopwatch, TimingPlan


@dataclass(frozen=True)
class Work:
    """The least work of an operation."""

    #: multiplications and additions, dropped weights included
    flops: float
    #: operands and result, once each
    nbytes: float
    #: of the multiplications, as f16 or fp8 2:4; empty where there are none
    precision: str = ""


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
    matmul: dict[str, Ceiling]

    def floor_us(self, work: Work) -> float | None:
        """Return the least time; None when the peak of the precision is not known."""
        by_bytes = work.nbytes / self.copy.rate / 1e3
        if not work.precision:
            return by_bytes
        peak = self.matmul.get(work.precision)
        return None if peak is None else max(by_bytes, work.flops / peak.rate / 1e6)


@dataclass(frozen=True)
class _Sheet:
    """A data sheet: dense TFLOP/s."""

    fp8: float
    source: str


#: By the name that torch gives; only for limits, never to choose a kernel.
_SHEETS = {
    "AMD Radeon RX 9070 XT": _Sheet(389, "AMD's data sheet"),
    "AMD Radeon RX 9070": _Sheet(289, "AMD's data sheet"),
    "AMD Radeon AI PRO R9700": _Sheet(383, "AMD's data sheet"),
    "AMD Radeon RX 9060 XT": _Sheet(205, "AMD's data sheet"),
    "NVIDIA GeForce RTX 4090": _Sheet(330.3, "NVIDIA's Ada whitepaper, float32 sums"),
    "NVIDIA H100 80GB HBM3": _Sheet(1979, "NVIDIA's H100 data sheet"),
    "NVIDIA H200": _Sheet(1979, "NVIDIA's H200 data sheet"),
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
        return Ceilings(copy, dict.fromkeys((*_UNITS, *map(_sparse, _UNITS)), found))
    f16 = _measured(watch, _matmul(side, torch.float16, device), side, "float16 torch.mm")
    fp8 = _fp8_peak(watch, side)
    # The units that multiply FP8 multiply int8 as fast, on all of these devices.
    dense = {"f16": f16} | ({} if fp8 is None else {"fp8": fp8, "int8": fp8})
    # 2:4 instructions do twice the work.
    sparse = {
        _sparse(name): Ceiling(2 * peak.rate, peak.measured, f"twice {name}: {peak.source}")
        for name, peak in dense.items()
    }
    return Ceilings(copy, dense | sparse)


_UNITS = ("f16", "fp8", "int8")


def _sparse(name: str) -> str:
    return f"{name} 2:4"


def _fp8_peak(watch: Stopwatch, side: int) -> Ceiling | None:
    try:
        call = _scaled(side, watch.device)
        call()
    except (RuntimeError, ValueError, AttributeError):
        sheet = _SHEETS.get(torch.cuda.get_device_name(watch.device))
        return None if sheet is None else Ceiling(sheet.fp8, measured=False, source=sheet.source)
    return _measured(watch, call, side, "torch._scaled_mm, fast, per tensor")


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
