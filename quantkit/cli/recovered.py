"""Writing what a recovery made, and saying how it went."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.models.source import Model
    from quantkit.recovery.distill.recover import Recovered
    from quantkit.sparsity.maskfile import MaskSet


def write_and_describe(
    model: "Model",
    masks: "MaskSet | None",
    recovered: "Recovered",
    output: Path,
    where: Path | None,
    *,
    force: bool,
) -> dict[str, Any]:
    """Write the pipeline and its masks; return JSON values that say how the training went.

    Args:
        model: the dense pipeline.
        masks: which weights are kept; None: all.
        recovered: trained, with at least one point.
        output: the directory to make.
        where: the mask file to make; None exactly where there are no masks.
        force: replace existing outputs.

    Raises:
        InputError: an output that cannot be written, or weights that do not fit.
    """
    from quantkit.recovery.writing import write_recovered
    from quantkit.storage.files import write_or_keep

    def write(path: Path) -> None:
        beside = where if where is None or path == output else path.with_name(where.name)
        write_recovered(model, masks, recovered, path, beside, force=force)

    write_or_keep(write, output)
    first, last = recovered.points[0], recovered.points[-1]
    looks = [point.look for point in recovered.points if point.look]
    return {
        "written": str(output),
        "masks": None if where is None else str(where),
        "steps": last.step,
        "seconds": round(last.seconds, 1),
        "seconds_aside": round(recovered.aside, 1),
        "trajectories": recovered.trajectories,
        "first_loss": first.loss,
        "last_loss": last.loss,
        "looks": [{"metric": look.metric, "value": look.value} for look in looks],
    }


def told(result: dict[str, Any]) -> str:
    """Return a line about a recovery that was written."""
    looks = [f"{look['metric']} {look['value']:.4f}" for look in result["looks"]]
    seen = f"; {looks[0]} -> {looks[-1].split()[-1]}" if looks else ""
    masks = f"; masks: {result['masks']}" if result["masks"] else ""
    return (
        f"recovered in {result['steps']} steps, {result['seconds']:g} s and "
        f"{result['seconds_aside']:g} s aside: loss {result['first_loss']:.5f} -> "
        f"{result['last_loss']:.5f}{seen}{masks}"
    )


def told_of_update(result: dict[str, Any]) -> str:
    """Return a line about an update that was written."""
    return f"updated {result['tensors']} tensors; masks: {result['masks']}"
