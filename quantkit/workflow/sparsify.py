"""Choosing masks: which weights of a model are kept."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.progress import Progress, silent
from quantkit.sparsity.choose import choose_masks
from quantkit.sparsity.maskfile import MaskSet, save_masks
from quantkit.storage.files import write_or_keep
from quantkit.storage.places import check_file, refuse_overlap
from quantkit.workflow.arguments import (
    CalibrationLike,
    HessiansLike,
    ModelLike,
    RecipeLike,
    as_calibration,
    as_path,
    opened,
    surgeon_of,
    with_rule,
)


@dataclass(frozen=True, eq=False)
class Sparsified:
    """Masks, and where they were written."""

    masks: MaskSet
    #: None: nowhere
    output: Path | None

    @property
    def summary(self) -> str:
        """How many layers are masked, in a line."""
        decisions = self.masks.decisions
        chosen = [d.error for d in decisions if d.chosen and d.error is not None]
        mean = f", mean error {sum(chosen) / len(chosen):.4f}" if chosen else ""
        return (
            f"{self.masks.pattern} by {self.masks.method}: {len(chosen)} of {len(decisions)} "
            f"layers masked{mean}"
        )

    def __repr__(self) -> str:
        """Return how many layers are masked, in two lines."""
        return f"{self.summary}\nwritten: {self.output or 'nothing'}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, every layer's decision included."""
        return masks_to_json(self.masks, self.output)


def masks_to_json(masks: MaskSet, written: Path | None) -> dict[str, Any]:
    """Return JSON values that say what was decided, and where it was written if it was."""
    return {
        "written": None if written is None else str(written),
        "method": masks.method,
        "pattern": str(masks.pattern),
        "layers": [asdict(decision) for decision in masks.decisions],
    }


def sparsify(
    model: ModelLike,
    *,
    recipe: RecipeLike = "fp8",
    output: str | Path | None = None,
    calibration: CalibrationLike | None = None,
    hessians: HessiansLike | None = None,
    pattern: str | None = None,
    method: str | None = None,
    error_budget: float | None = None,
    update: bool = False,
    device: str = "auto",
    force: bool = False,
    dry_run: bool = False,
    progress: Progress = silent,
) -> Sparsified:
    """Choose which weights of a model are kept: n of every m along K, as 2 of 4.

    Args:
        model: a directory, a hub id, or opened.
        recipe: whose sparsity section names the layers.
        output: the mask file to write; None: nothing is written.
        calibration: statistics of the model; errors count its inputs' mean squares.
        hessians: second moments of the model; errors are then the outputs' own, correlations
            between channels included.
        pattern: as 2:4; None: the recipe's.
        method: magnitude, wanda (with a calibration or second moments) or sparsegpt (with second
            moments); None: the recipe's.
        error_budget: mask only layers that lose at most this share of their output's power.
        update: errors are those after the kept weights made up for the dropped ones, as ``recover``
            with method obs lets them; wants second moments. With sparsegpt they always are.
        device: auto, cpu or cuda[:N]: where second moments are computed with.
        force: replace an existing file.
        dry_run: decide, and write nothing.
        progress: told of layers done.

    Returns:
        the masks and every layer's decision.

    Raises:
        InputError: a model, recipe, calibration or second moments that cannot be used or do not
            belong together, or an output that exists.
    """
    path = as_path(output)
    if path is not None:
        check_file(path, force=force)
    source, chosen = opened(model, recipe)
    chosen = with_rule(chosen, pattern=pattern, method=method, error_budget=error_budget)
    chosen.refuse_budget()
    if path is not None:
        refuse_overlap(path, source.path)
    masks = choose_masks(
        source,
        chosen,
        as_calibration(calibration),
        surgeon=surgeon_of(hessians, device),
        update=update,
        progress=progress,
    )
    written = None if dry_run else path
    if written is not None:
        write_or_keep(partial(save_masks, masks, force=force), written)
    return Sparsified(masks, written)
