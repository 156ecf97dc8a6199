"""Profiles of a step: its kernels by torch's profiler, put in groups."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: How the names of this library's kernels and operators begin, and words for their formats.
_OURS, _WORDS = r"^(quantkit::)?", "fp8|int8"
#: Group -> what the names of its kernels (on a GPU) or operators (on a CPU) match. The first row
#: that matches counts; what torch.compile fused is named after all that is in it, so fused
#: kernels stand before the operators that they name.
GROUPS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        ("quantkit products", rf"{_OURS}((gemm|conv|geglu)_({_WORDS}|w4a8|w16)|project_)"),
        ("quantize", rf"{_OURS}quantize_({_WORDS})"),
        ("norms", rf"{_OURS}group_(norm|partials)"),
        (
            "attention",
            rf"{_OURS}(attention|(head|value|stream)_(codes|partials|factors)|joint_heads)",
        ),
        ("norms", r"^triton_.*norm|(layer|group)_?norm|rowwise_?moments|rms_?norm|welford"),
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
    """Milliseconds of one step by group."""

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
    expected = DeviceType.CUDA if on_gpu else DeviceType.CPU
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
    # torch.compile annotates its regions, which span kernels that are counted themselves.
    events = [
        event
        for event in profiler.events()
        if event.device_type == expected and not getattr(event, "is_user_annotation", False)
    ]
    spans = [(e.time_range.start, e.time_range.end) for e in events]
    shares = own_shares(spans) if on_gpu else [e.self_cpu_time_total for e in events]
    calls = Counter(event.name for event in events)
    times: dict[str, float] = {}
    for event, us in zip(events, shares, strict=True):
        times[event.name] = times.get(event.name, 0.0) + us / 1e3
    span = max(e for _, e in spans) - min(s for s, _ in spans) if spans else 0.0
    idle = max(0.0, span / 1e3 - sum(times.values()))
    longest = sorted(times, key=lambda name: -times[name])[:_LONGEST]
    kernels = tuple(KernelTime(name, calls[name], times[name]) for name in longest)
    return Profile({**_by_group(times), IDLE: idle}, kernels)


def own_shares(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return how long each kernel ran, less what it took under others that had started before.

    A kernel that waits for the one ahead of it seems to run meanwhile; the shares add up to the
    time in which any one ran.

    Args:
        spans: start and end of each.
    """
    shares, covered = [0.0] * len(spans), float("-inf")
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        start, end = spans[index]
        shares[index] = max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return shares


def _by_group(times: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, ms in times.items():
        group = group_of(name)
        found[group] = found.get(group, 0.0) + ms
    return dict(sorted(found.items(), key=lambda item: -item[1]))
