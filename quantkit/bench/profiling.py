"""Where the time of a step goes: torch's profiler, its kernels put in groups."""

import re
from collections.abc import Callable

import torch

#: Group -> what the names of its kernels (on a GPU) or operators (on a CPU) match. The first row
#: that matches counts; what torch.compile fused is named after all that is in it, so fused
#: kernels stand before the operators that they name.
GROUPS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        ("quantkit products", r"^(gemm|conv)_fp8|^quantkit::(gemm|conv)"),
        ("quantize", r"^quantize_fp8|^quantkit::quantize"),
        ("norms", r"^triton_.*norm|layer_norm|group_norm|rowwise_?moments|rms_?norm|welford"),
        ("elementwise and copies", r"^triton_(poi|red|per)"),
        ("attention", r"flash|fmha|attention|softmax"),
        ("convolutions", r"conv|fprop|winograd|nchwto|nhwcto"),
        ("library products", r"gemm|nvjet|cublas|cutlass|splitk|::(add|b|ba)?mm$|linear|scaled_mm"),
        ("elementwise and copies", r""),
    )
)
#: What is left of a step when no kernel runs.
IDLE = "device idle"


def group_of(name: str) -> str:
    """Return the group of a kernel or an operator."""
    return next(group for group, pattern in GROUPS if pattern.search(name))


def profile_step(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return milliseconds of one step by group, largest first, and of the device's idleness.

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
    found: dict[str, float] = {}
    first, last = float("inf"), 0.0
    for event in profiler.events():
        # torch.compile annotates its regions, which span kernels that are counted themselves.
        if event.device_type != wanted or getattr(event, "is_user_annotation", False):
            continue
        us = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        group = group_of(event.name)
        found[group] = found.get(group, 0.0) + us / 1e3
        first, last = min(first, event.time_range.start), max(last, event.time_range.end)
    idle = max(0.0, (last - first) / 1e3 - sum(found.values())) if found else 0.0
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return dict([*ordered, (IDLE, idle)])
