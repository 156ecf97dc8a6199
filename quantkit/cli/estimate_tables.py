"""Terminal tables of an estimate."""

from typing import TYPE_CHECKING

from quantkit.cli.console import echo, print_table

if TYPE_CHECKING:
    from quantkit.bench.estimate.estimate_figures import (
        EstimateResult,
        EstimateRow,
        GroupEstimate,
        Span,
    )


def print_estimate(result: "EstimateResult") -> None:
    """Print a row per contender, a row per group of its kernels, and contenders without any."""
    card, settings = result.card, result.settings
    echo(
        f"{card.name} ({card.device}): {card.tflops['f16']:g} TFLOP/s in float16, "
        f"{card.tflops['fp8']:g} in FP8, {card.gbs:g} GB/s ({card.source})"
    )
    title = (
        f"{result.denoiser.name}: {result.denoiser.class_name}, batch {settings.batch}, latents "
        f"{settings.size}x{settings.size}, an estimate, not a measurement"
    )
    rows = [row for row in result.rows if row.ms]
    columns = ("contender", "ms", "range", "host ms", "weights MB")
    print_table(title, columns, [_cells(row) for row in rows])
    parts = ("contender", "kernels", "ms", "range", "launches", "TFLOP", "GB", "bound by")
    groups = [(row.contender, *_group(group)) for row in rows for group in row.groups]
    print_table("where the milliseconds go", parts, groups)
    for row in result.rows:
        if row.reason:
            echo(f"{row.contender}: no estimate: {row.reason}")


def _cells(row: "EstimateRow") -> tuple[object, ...]:
    assert row.ms
    host = "" if row.host_ms is None else f"{row.host_ms.middle:.0f}"
    weights = "" if row.weight_bytes is None else f"{row.weight_bytes / 1e6:.0f}"
    return row.contender, *_span(row.ms), host, weights


def _group(group: "GroupEstimate") -> tuple[object, ...]:
    flops = f"{group.flops / 1e12:.2f}" if group.flops else ""
    moved = f"{group.nbytes / 1e9:.2f}" if group.nbytes else ""
    ordered = sorted(group.bounds.items(), key=lambda item: -item[1])
    whole = sum(group.bounds.values())
    bounds = ", ".join(f"{name} {ms / whole:.0%}" for name, ms in ordered if ms > 0.005 * whole)
    return group.group, *_span(group.ms), group.kernels, flops, moved, bounds


def _span(span: "Span") -> tuple[str, str]:
    return f"{span.middle:.2f}", f"{span.low:.1f} to {span.high:.1f}"
