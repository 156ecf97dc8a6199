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
    OPEN = "no clear difference"
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


def headline(gates: tuple[Gate, ...]) -> str:
    """Return on one line whether the gates hold, and what each found."""
    measured = [gate for gate in gates if gate.passed is not None]
    if not measured:
        return "NOT JUDGED: no gate was measured"
    failed = [gate for gate in measured if not gate.passed]
    told = ", ".join(
        f"{gate.title} {show(gate.found, gate.unit)} (wanted {gate.wanted})"
        for gate in failed or measured
    )
    return f"{'FAIL' if failed else 'PASS'}: {told}"


def judge_gates(gates: tuple[Gate, ...], compression: Compression) -> str:
    """Return which gates hold, fail (and by how much), could turn, or were not measured."""
    failed = [f"{gate.title} is {show(gate.found, gate.unit)}, wanted {gate.wanted} "
              f"({show(_shortfall(gate), gate.unit)} off)"
              for gate in gates if gate.passed is False]  # fmt: skip
    missing = [gate.title for gate in gates if gate.passed is None]
    close = [gate.title for gate in gates if gate.settled is False]
    tail = (
        f" More prompts could change the result of {' and '.join(close)}: "
        "the interval includes the limit."
    ) * bool(close)
    tail += f" Not measured: {', '.join(missing)}." if missing else ""
    what = f"{compression.value.capitalize()} weights"
    if failed:
        return f"{what} fail: {'; '.join(failed)}.{tail}"
    if not passed(gates):
        return f"{what} were not judged.{tail}"
    held = ", ".join(f"{gate.title} {show(gate.found, gate.unit)} ({gate.wanted})"
                     for gate in gates if gate.passed)  # fmt: skip
    return f"{what} pass: {held}.{tail}"


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
        return f"{start}; one prompt is too few for an interval."
    if interval.holds(0.0):
        return f"{start}; the interval includes zero: {count} prompts show no clear change."
    direction = "worse" if clip.change.mean < 0 else "better"
    return f"{start}; the interval excludes zero: the pictures match their prompts {direction}."


def describe_worst(comparison: Comparison, gaps: tuple[FloorGap, ...]) -> str:
    """Return which picture has the lowest SSIM, and what the floor has there."""
    worst, ssim = comparison.worst_first()[0], comparison.scores["ssim"]
    if _identical(comparison):
        return "Every picture is identical to the original's."
    floors = [
        f"{show(gap.floor.comparison.scores['ssim'].values[worst])} ({gap.floor.title})"
        for gap in gaps
        if gap.floor.comparison is not None and not _identical(gap.floor.comparison)
    ]
    beside = f", and the noise floor there {' and '.join(floors)}" if floors else ""
    prompt = f" ({comparison.prompts[worst]!r})" if comparison.prompts else ""
    return (
        f"The worst picture is {comparison.names[worst]}{prompt}: "
        f"SSIM {show(ssim.values[worst])}{beside}."
    )


def describe_floor(comparison: Comparison, gap: FloorGap, metrics: Sequence[str]) -> str:
    """Return whether packing moves the pictures more than one noise floor does.

    Args:
        comparison: of the packed pipeline.
        gap: against which floor.
        metrics: those that decide; the ones that were not measured are passed over.
    """
    floor, count = gap.floor, len(comparison.names)
    if floor.comparison is None:
        return f"The noise floor ({floor.title}) was not measured: {floor.note}."
    if _identical(floor.comparison):
        return f"The noise floor ({floor.title}) is zero: all 8-bit pictures stay the same."
    found = {
        name: standing(name, gap.differences[name]) for name in metrics if name in gap.differences
    }
    worse = [name for name, place in found.items() if place is Standing.WORSE]
    if worse:
        numbers = _numbers(comparison, gap, worse)
        return f"Packing moves the pictures more than the noise floor ({floor.title}): {numbers}."
    numbers = _numbers(comparison, gap, list(found))
    if Standing.UNKNOWN in found.values():
        return (
            f"{count} prompt{'s are' if count > 1 else ' is'} too few for a comparison with the "
            f"noise floor ({floor.title}): {numbers}."
        )
    if set(found.values()) == {Standing.BETTER}:
        return f"Packing moves the pictures less than the noise floor ({floor.title}): {numbers}."
    return (
        f"Over {count} prompts there is no clear difference from the noise floor "
        f"({floor.title}): {numbers}."
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
