"""The four tiles that stand under the verdict: size, pictures, speed and memory, kernels."""

from quantkit.eval.judging.evaluation_result import Report
from quantkit.eval.judging.noise_floor import FloorGap
from quantkit.eval.measuring.comparison import Comparison
from quantkit.eval.measuring.number_format import show, show_bytes, show_difference, show_interval
from quantkit.eval.pages.page import Tile

#: Backends whose times say nothing about a kernel's speed.
_SLOW_BY_NATURE = ("host", "reference")


def report_tiles(report: Report) -> tuple[Tile, ...]:
    """Return size, pictures, speed and kernels of one report."""
    return (
        _size(report),
        picture_tile(report.comparison, report.noise_floor, changed=_changed(report)),
        _speed(report),
        _kernels(report),
    )


def comparison_tiles(comparison: Comparison) -> tuple[Tile, ...]:
    """Return a tile for every metric of two folders, and one for their pictures."""
    scores = [
        Tile(score.metric.title, show(score.summary.mean, score.metric.unit),
             _notes(score.backbone, score.summary.interval and
                    f"95 % interval {show_interval(score.summary.interval)}"))
        for name, score in comparison.scores.items() if name in {"ssim", "lpips", "psnr"}
    ]  # fmt: skip
    if comparison.clip is not None:
        clip = comparison.clip
        scores.append(Tile("CLIP score change", show_difference(clip.change), (clip.backbone,)))
    return (Tile("Pictures", f"{len(comparison.names)} pairs"), *scores)


def picture_tile(
    comparison: Comparison, floors: tuple[FloorGap, ...] = (), *, changed: str = ""
) -> Tile:
    """Return how near the pictures are, and how near the original is to itself."""
    ssim, lpips = comparison.scores["ssim"], comparison.scores.get("lpips")
    worst = comparison.worst_first()[0]
    floor = next((g.floor.comparison for g in floors if g.floor.comparison is not None), None)
    return Tile(
        "Pictures",
        f"SSIM {show(ssim.summary.mean)}",
        _notes(
            f"worst {show(ssim.values[worst])}, of {len(comparison.names)}",
            changed,
            lpips and f"LPIPS {show(lpips.summary.mean)}",
            floor and f"noise floor: SSIM {show(floor.scores['ssim'].summary.mean)}",
        ),
    )


def _changed(report: Report) -> str:
    """Return how many pictures are what; empty when all are the same."""
    counts = {kind.value: count for kind, count in report.pictures.counts.items() if count}
    return "" if len(counts) == 1 else ", ".join(f"{n} {words}" for words, n in counts.items())


def size_share(report: Report) -> str:
    """Return the packed files' share of the original's."""
    return f"{100 * report.packed.nbytes / report.original.nbytes:.1f} %"


def _size(report: Report) -> Tile:
    verb = "quantized" if report.quantized_by else "packed"
    layers = f"{report.packing.packed} of {len(report.layers)} layers {verb}"
    return Tile(
        "Size",
        size_share(report),
        _notes(
            f"{show_bytes(report.original.nbytes)} -> {show_bytes(report.packed.nbytes)}",
            report.layers and layers,
        ),
    )


def _speed(report: Report) -> Tile:
    run, title = report.run, "Speed and memory"
    memory = _memory(report)
    if not report.quantized_by and set(report.kernels.by_backend) & set(_SLOW_BY_NATURE):
        backends = ", ".join(report.kernels.by_backend)
        return Tile(
            title, "Not measured", _notes(f"{backends}: no speed of a graphics card", memory)
        )
    before, after = (s / len(run.prompts) for s in (run.original_seconds, run.packed_seconds))
    return Tile(
        title,
        f"{before / after:.2f} times" if after else "-",
        _notes(f"{before:.3g} s -> {after:.3g} s a picture on {run.device}", memory),
    )


def _memory(report: Report) -> str:
    before, after = report.run.original_peak_bytes, report.run.packed_peak_bytes
    if before is None or after is None:
        return ""
    return f"peak memory {show_bytes(before)} -> {show_bytes(after)}"


def _kernels(report: Report) -> Tile:
    kernels = report.kernels
    if report.quantized_by:
        return Tile("Kernels", report.computed_by, ("quantized and computed it, not quantkit",))
    if not kernels.total:
        return Tile("Kernels", "none", ("no packed layer ran",))
    deviation = kernels.worst_deviation
    return Tile(
        "Kernels",
        report.computed_by,
        _notes(
            f"{kernels.total:,} calls",
            deviation is not None and f"largest deviation from reference {deviation:.3g}",
        ),
    )


def _notes(*found: object) -> tuple[str, ...]:
    return tuple(str(text) for text in found if text)
