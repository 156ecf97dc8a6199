"""The verdict in words, every sentence computed from the numbers beside it."""

from collections.abc import Sequence
from enum import Enum

from .comparison import ClipScores, Comparison
from .gates import Compression, Gate, passed
from .metrics import METRICS, Better
from .noise_floor import FloorGap
from .number_format import show, show_difference, show_signed
from .statistics import Summary

#: The metrics that decide whether packed pictures can be told from the floor's, of the first floor
#: and of the second: one paragraph must stay readable, and the table has them all.
DECIDING = (("ssim", "lpips"), ("ssim",))


class Standing(Enum):
    """Where a packed pipeline stands to a noise floor in one metric."""

    WORSE = "worse"
    BETTER = "better"
    #: the interval of the difference holds zero
    OPEN = "not told apart"
    #: fewer than two pairs, or no finite value
    UNKNOWN = "no interval"


def standing(metric: str, difference: Summary) -> Standing:
    """Return what the interval of packed - floor says about the metric."""
    interval = difference.interval
    if interval is None:
        return Standing.UNKNOWN
    if interval.holds(0.0):
        return Standing.OPEN
    higher = interval.low > 0.0
    return (
        Standing.BETTER if higher == (METRICS[metric].better is Better.HIGHER) else Standing.WORSE
    )


def write_verdict(
    gates: tuple[Gate, ...],
    compression: Compression,
    comparison: Comparison,
    gaps: tuple[FloorGap, ...],
) -> str:
    """Return the verdict: gates, noise floor, CLIP score, worst picture; one paragraph."""
    sentences = [
        judge_gates(gates, compression),
        *(
            describe_floor(comparison, gap, metrics)
            for gap, metrics in zip(gaps, DECIDING, strict=False)
        ),
        describe_clip(comparison.clip, len(comparison.names)),
        describe_worst(comparison, gaps),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def judge_gates(gates: tuple[Gate, ...], compression: Compression) -> str:
    """Return which gates hold, fail (and by how much), could turn, or were not measured."""
    failed = [f"{gate.title} is {show(gate.found, gate.unit)}, wanted {gate.wanted} "
              f"({show(_shortfall(gate), gate.unit)} off)"
              for gate in gates if gate.passed is False]  # fmt: skip
    missing = [gate.title for gate in gates if gate.passed is None]
    close = [gate.title for gate in gates if gate.settled is False]
    tail = f" More prompts could turn {' and '.join(close)}: the interval holds the limit." * bool(
        close
    )
    tail += f" Not measured: {', '.join(missing)}." if missing else ""
    if failed:
        return f"{compression.value} fails: {'; '.join(failed)}.{tail}"
    if not passed(gates):
        return f"{compression.value} was not judged.{tail}"
    held = ", ".join(f"{gate.title} {show(gate.found, gate.unit)} ({gate.wanted})"
                     for gate in gates if gate.passed)  # fmt: skip
    return f"{compression.value} passes: {held}.{tail}"


def describe_clip(clip: ClipScores | None, count: int) -> str:
    """Return how the CLIP score moves, and whether that is more than chance."""
    if clip is None or clip.change.mean is None:
        return ""
    share = "" if clip.loss.mean is None else f" ({show_signed(0.0 - clip.loss.mean, '%')})"
    start = (
        f"CLIP score [{clip.backbone}] goes from {show(clip.original.summary.mean)} to "
        f"{show(clip.packed.summary.mean)}: {show_difference(clip.change)} points{share}"
    )
    interval = clip.change.interval
    if interval is None:
        return f"{start}; one prompt gives no interval."
    if interval.holds(0.0):
        return f"{start}; the interval holds zero: {count} prompts show no change."
    direction = "less" if clip.change.mean < 0 else "more"
    return f"{start}; the interval excludes zero: the pictures follow their prompts {direction}."


def describe_worst(comparison: Comparison, gaps: tuple[FloorGap, ...]) -> str:
    """Return which picture has the lowest SSIM, and what the floor has there."""
    worst, ssim = comparison.worst_first()[0], comparison.scores["ssim"]
    if _identical(comparison):
        return "Every picture is identical to the original's."
    floors = [
        f"{show(gap.floor.comparison.scores['ssim'].values[worst])} with {gap.floor.title}"
        for gap in gaps
        if gap.floor.comparison is not None and not _identical(gap.floor.comparison)
    ]
    beside = f", where the original has {' and '.join(floors)}" if floors else ""
    prompt = f" ({comparison.prompts[worst]!r})" if comparison.prompts else ""
    return (
        f"The worst picture is {comparison.names[worst]}{prompt}: "
        f"SSIM {show(ssim.values[worst])}{beside}."
    )


def describe_floor(comparison: Comparison, gap: FloorGap, metrics: Sequence[str]) -> str:
    """Return whether the packed pictures can be told from the original's under one floor.

    Args:
        comparison: of the packed pipeline.
        gap: against which floor.
        metrics: those that decide; the ones that were not measured are passed over.
    """
    floor, count = gap.floor, len(comparison.names)
    if floor.comparison is None:
        return f"The noise floor of {floor.title} is missing: {floor.note}."
    if _identical(floor.comparison):
        return f"With {floor.title} the original gives the very same 8-bit pictures."
    found = {
        name: standing(name, gap.differences[name]) for name in metrics if name in gap.differences
    }
    worse = [name for name, place in found.items() if place is Standing.WORSE]
    if worse:
        numbers = _numbers(comparison, gap, worse)
        return f"It can be told apart from the original with {floor.title}: {numbers}."
    numbers = _numbers(comparison, gap, list(found))
    if Standing.UNKNOWN in found.values():
        return (
            f"{count} pictures are too few to say whether it can be told apart from the "
            f"original with {floor.title}: {numbers}."
        )
    if set(found.values()) == {Standing.BETTER}:
        return f"It is closer than the original with {floor.title}: {numbers}."
    return (
        f"Over {count} prompts it cannot be told apart from the original with {floor.title}: "
        f"{numbers}."
    )


def _numbers(comparison: Comparison, gap: FloorGap, metrics: Sequence[str]) -> str:
    assert gap.floor.comparison is not None
    return "; ".join(
        f"{METRICS[name].title} {show(comparison.scores[name].summary.mean)} against "
        f"{show(gap.floor.comparison.scores[name].summary.mean)}, a difference of "
        f"{show_difference(gap.differences[name])}"
        for name in metrics
    )


def _identical(comparison: Comparison) -> bool:
    return all(value == 0.0 for value in comparison.scores["mse"].values)


def _shortfall(gate: Gate) -> float | None:
    return None if gate.found is None else abs(gate.found - gate.limit)
