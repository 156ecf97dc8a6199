"""Where the time of a step goes: torch's profiler, its kernels put in groups."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

_PRODUCTS = "gemm|conv|geglu|project_gelu"
#: Group -> what the names of its kernels (on a GPU) or operators (on a CPU) match. The first row
#: that matches counts; what torch.compile fused is named after all that is in it, so fused
#: kernels stand before the operators that they name.
GROUPS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        ("quantkit products", rf"^({_PRODUCTS})_fp8|^quantkit::({_PRODUCTS})"),
        ("quantize", r"^(quantize|gelu_codes)_fp8|^quantkit::(quantize|gelu_codes)"),
        ("norms", r"^triton_.*norm|(layer|sum|group)_norm|rowwise_?moments|rms_?norm|welford"),
        ("elementwise and copies", r"^triton_(poi|red|per)"),
        ("attention", r"flash|fmha|attention|softmax"),
        ("convolutions", r"conv|fprop|winograd|nchwto|nhwcto"),
        ("library products", r"gemm|nvjet|cublas|cutlass|splitk|::(add|b|ba)?mm$|linear|scaled_mm"),
        ("elementwise and copies", r""),
    )
)
#: What is left of a step when no kernel runs.
IDLE = "device idle"
#: Kernels that a profile names.
_LONGEST = 40


def group_of(name: str) -> str:
    """Return the group of a kernel or an operator."""
    return next(group for group, pattern in GROUPS if pattern.search(name))


@dataclass(frozen=True)
class KernelTime:
    """One kernel, all its calls in a step."""

    name: str
    calls: int
    ms: float


@dataclass(frozen=True)
class Profile:
    """Where the milliseconds of one step go."""

    #: group -> milliseconds, largest first, and the device's idleness
    groups: dict[str, float]
    #: the longest ones
    kernels: tuple[KernelTime, ...]


def profile_step(step: Callable[[], object], device: torch.device) -> Profile:
    """Return the time of one step by group and by kernel.

    The profiler slows the host down, so that idleness is an upper bound.
    """
    from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its __all__
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
    calls: Counter[str] = Counter()
    times: dict[str, float] = {}
    first, last = float("inf"), 0.0
    for event in profiler.events():
        # torch.compile annotates its regions, which span kernels that are counted themselves.
        if event.device_type != wanted or getattr(event, "is_user_annotation", False):
            continue
        us = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        calls[event.name] += 1
        times[event.name] = times.get(event.name, 0.0) + us / 1e3
        first, last = min(first, event.time_range.start), max(last, event.time_range.end)
    idle = max(0.0, (last - first) / 1e3 - sum(times.values())) if times else 0.0
    longest = sorted(times, key=lambda name: -times[name])[:_LONGEST]
    kernels = tuple(KernelTime(name, calls[name], times[name]) for name in longest)
    return Profile({**_by_group(times), IDLE: idle}, kernels)


def _by_group(times: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, ms in times.items():
        group = group_of(name)
        found[group] = found.get(group, 0.0) + ms
    return dict(sorted(found.items(), key=lambda item: -item[1]))
