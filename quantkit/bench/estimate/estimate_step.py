"""The estimate of a step: traced once per contender, its kernels timed on a card."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from quantkit.bench.estimate.cards import Card
from quantkit.bench.estimate.estimate_figures import (
    EstimateResult,
    EstimateRow,
    GroupEstimate,
    Span,
)
from quantkit.bench.estimate.estimated_kernels import Kernel, fused, separate, with_layout_copies
from quantkit.bench.estimate.groups import GROUPS, LAUNCHES
from quantkit.bench.estimate.kernel_cost import BOUNDS, Timed, time_kernels
from quantkit.bench.estimate.replayed_kernels import replayed
from quantkit.bench.estimate.shape_models import Traced, trace_contender
from quantkit.bench.estimate.tracing import Trace
from quantkit.bench.models.denoisers import Denoiser
from quantkit.bench.models.model_attention import why_attention_is_torchs, why_no_kernel
from quantkit.bench.models.model_contenders import ModelContender
from quantkit.bench.models.model_result import ModelBenchSettings
from quantkit.device.archs import Arch, arch_of_device
from quantkit.device.choosing import supposing
from quantkit.progress import Progress

#: Microseconds of the host for an operator that is asked for, and beyond that for one of
#: quantkit's: (pessimistic, optimistic). Their middles are those of SDXL module by module beside an
#: H200 in a virtual machine: 92 ms of 5354 operators, 151 of 6835 with 1472 of quantkit's.
_HOST_US, _OWN_US = (22.0, 12.0), (30.0, 14.0)


def estimate_step(
    denoiser: Denoiser,
    contenders: Sequence[ModelContender],
    settings: ModelBenchSettings,
    card: Card,
    progress: Progress,
) -> EstimateResult:
    """Return what a step of each contender should take; no card is needed.

    Args:
        denoiser: what to build, without weights.
        contenders: rows of MODEL_CONTENDERS.
        settings: batch, size, layout, projections, fewest keys of quantized attention.
        card: where.
        progress: told of contenders.

    Raises:
        ModelError: the config does not describe such a model, or its inputs are not known.
    """
    rows = list[EstimateRow]()
    for done, contender in enumerate(contenders):
        progress("estimate", done, len(contenders))
        rows.append(_estimate(denoiser, contender, settings, card))
    progress("estimate", len(contenders), len(contenders))
    return EstimateResult(card, denoiser, settings, tuple(rows))


def _estimate(
    denoiser: Denoiser, contender: ModelContender, settings: ModelBenchSettings, card: Card
) -> EstimateRow:
    arch = arch_of_device(card.device)
    if reason := _why_not(contender, arch):
        return EstimateRow(contender.name, reason)
    traced = trace_contender(denoiser, contender, settings, arch)
    if contender.attention and not traced.trace.has_quantized_attention:
        return EstimateRow(contender.name, why_attention_is_torchs(settings.min_keys))
    kernels = kernels_of(traced, settings, card)
    low, high = (time_kernels(kernels, card, side) for side in (1, 0))
    groups = (*_groups(low, high), _launches(kernels, card))
    device = sum((group.ms for group in groups), Span(0, 0))
    in_a_graph = contender.compiled or contender.replayed
    host = None if in_a_graph else _host(traced.trace)
    ms = device if host is None else Span(max(device.low, host.low), max(device.high, host.high))
    return EstimateRow(contender.name, "", ms, host, groups, traced.weight_bytes)


def _why_not(contender: ModelContender, arch: Arch) -> str:
    """Return why a contender is not estimated; empty when it is."""
    if contender.torchao:
        return "torchao's kernels are not traced"
    with supposing(arch):
        static = contender.variant is not None
        return why_no_kernel(contender.attention, torch.device("cuda"), static_scales=static)


def kernels_of(traced: Traced, settings: ModelBenchSettings, card: Card) -> tuple[Kernel, ...]:
    """Return the kernels of a contender's step, in their order."""
    kernels = tuple(_summed(kernel, traced.contender) for kernel in _kernels_of(traced))
    copies = card.is_nvidia and not settings.channels_last and not traced.contender.compiled
    return with_layout_copies(kernels) if copies else kernels


def _kernels_of(traced: Traced) -> tuple[Kernel, ...]:
    if traced.contender.compiled:
        return fused(traced.trace.calls)
    return separate(traced.trace.calls) if traced.program is None else replayed(traced.program)


def _summed(kernel: Kernel, contender: ModelContender) -> Kernel:
    """Return a kernel that sums as a contender asks for."""
    if kernel.product is None or not contender.fast:
        return kernel
    return replace(kernel, product=replace(kernel.product, fast=True))


def _groups(low: Sequence[Timed], high: Sequence[Timed]) -> list[GroupEstimate]:
    return [_group(name, low, high) for name in GROUPS if name != LAUNCHES]


def _group(name: str, low: Sequence[Timed], high: Sequence[Timed]) -> GroupEstimate:
    of_group = [(a, b) for a, b in zip(low, high, strict=True) if a.kernel.group == name]
    bounds = dict.fromkeys(BOUNDS, 0.0)
    for pair in of_group:
        for timed in pair:
            bounds[timed.bound] += timed.us / 2e3
    kernels = [timed.kernel for timed, _ in of_group]
    return GroupEstimate(
        name,
        len(kernels),
        sum(kernel.product.flops for kernel in kernels if kernel.product),
        sum(kernel.nbytes for kernel in kernels),
        Span(sum(a.us for a, _ in of_group) / 1e3, sum(b.us for _, b in of_group) / 1e3),
        {bound: ms for bound, ms in bounds.items() if ms},
    )


def _launches(kernels: Sequence[Kernel], card: Card) -> GroupEstimate:
    high, low = (len(kernels) * us / 1e3 for us in card.efficiency.gap_us)
    return GroupEstimate(LAUNCHES, len(kernels), 0.0, 0, Span(low, high), {})


def _host(trace: Trace) -> Span:
    own = sum(call.name.startswith("quantkit.") for call in trace.calls)
    high, low = (
        (trace.asked * every + own * more) / 1e3
        for every, more in zip(_HOST_US, _OWN_US, strict=True)
    )
    return Span(low, high)
