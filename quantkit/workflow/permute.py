"""Moving input channels where the graph allows it at no cost, so that masks take less."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.calibration.statistics import Calibration
from quantkit.models.source import Model
from quantkit.pipelines.running import choose_device
from quantkit.progress import Progress, silent
from quantkit.recipe.schema import Recipe
from quantkit.recovery.permuted_model import (
    Outputs,
    only_component,
    refuse_permuted,
    write_permuted,
)
from quantkit.sparsity.channel_permutation import Permutation, choose_permutations
from quantkit.sparsity.choose import choose_masks
from quantkit.sparsity.maskfile import MaskSet, save_masks
from quantkit.workflow.inputs import (
    CalibrationLike,
    ModelLike,
    RecipeLike,
    as_calibration,
    as_path,
    opened,
    with_rule,
)
from quantkit.workflow.sparsify import masks_to_json


@dataclass(frozen=True, eq=False)
class Permuted:
    """What moved, what it gained, and where the permuted model was written."""

    permutations: tuple[Permutation, ...]
    #: of the permuted model; None: nothing was written
    masks: MaskSet | None
    #: where it is, or would have been
    outputs: Outputs

    @property
    def lost(self) -> tuple[float, float]:
        """What masks take of the moved layers' squared scores, before and after (means)."""
        count = max(1, len(self.permutations))
        before = sum(found.lost_before for found in self.permutations)
        after = sum(found.lost_after for found in self.permutations)
        return before / count, after / count

    def __repr__(self) -> str:
        """Return what was gained, and the files that were written."""
        before, after = self.lost
        gained = (
            f"{len(self.permutations)} permutations: masks take {after:.4f} instead of "
            f"{before:.4f} (mean)"
        )
        if self.masks is None:
            return f"{gained}\nwritten: nothing"
        files = (self.outputs.pipeline, self.outputs.masks, self.outputs.calibration)
        return f"{gained}\nwritten: {', '.join(str(file) for file in files if file is not None)}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        masks, kept = self.masks, self.outputs.calibration
        return {
            **({} if masks is None else masks_to_json(masks, self.outputs.masks)),
            "written": None if masks is None else str(self.outputs.pipeline),
            "masks": None if masks is None else str(self.outputs.masks),
            "calibration": None if masks is None or kept is None else str(kept),
            "permuted": [
                {
                    "producers": [layer.name for layer in found.coupling.producers],
                    "consumers": [layer.name for layer in found.coupling.consumers],
                    "lost_before": found.lost_before,
                    "lost_after": found.lost_after,
                }
                for found in self.permutations
            ],
        }


@dataclass(frozen=True, eq=False)
class _PermuteInputs:
    model: Model
    recipe: Recipe
    calibration: Calibration | None
    progress: Progress

    def masks(self) -> MaskSet:
        return choose_masks(self.model, self.recipe, self.calibration, progress=self.progress)

    def write(
        self, permutations: Sequence[Permutation], outputs: Outputs, *, force: bool
    ) -> MaskSet:
        """Write all outputs and return the masks."""
        permuted, fitting = write_permuted(
            self.model, permutations, self.calibration, outputs, force=force
        )
        masks = _PermuteInputs(permuted, self.recipe, fitting, self.progress).masks()
        save_masks(masks, outputs.masks, force=force)
        return masks


def permute(
    model: ModelLike,
    *,
    output: str | Path,
    recipe: RecipeLike | None = None,
    calibration: CalibrationLike | None = None,
    masks_output: str | Path | None = None,
    pattern: str | None = None,
    method: str | None = None,
    error_budget: float | None = None,
    device: str = "auto",
    seed: int = 0,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress = silent,
) -> Permuted:
    """Let input channels change places, and choose the masks of the model that this makes.

    The written model answers what it did; it is the model of whatever follows. Beside it are its
    masks, and the calibration that fits it where one was given.

    Args:
        model: a directory, a hub id, or opened; with one denoiser.
        output: the directory to make, a 16-bit model.
        recipe: whose sparsity section names the layers.
        calibration: statistics of the model; a copy that fits the permuted one is written beside.
        masks_output: the mask file; None: beside the output, ``OUTPUT.masks.safetensors``.
        pattern: as 2:4; None: the recipe's.
        method: magnitude or wanda; None: the recipe's.
        error_budget: mask only layers that lose at most this share of their output's power.
        device: auto, cpu or cuda[:N]: where orders are searched for.
        seed: of the search.
        force: replace existing outputs.
        dry_run: search, and write nothing.
        progress: told of layers done.

    Returns:
        what moved, what it gained, and the masks.

    Raises:
        InputError: a model, recipe or calibration that cannot be used, or an output that exists.
    """
    source, chosen = opened(model, recipe)
    chosen = with_rule(chosen, pattern=pattern, method=method, error_budget=error_budget)
    chosen.refuse_budget()
    only_component(source)
    outputs = _outputs(Path(output), as_path(masks_output), calibrated=calibration is not None)
    refuse_permuted(source, outputs, force=force)
    task = _PermuteInputs(source, chosen, as_calibration(calibration), progress)
    task.masks()  # what masks would be refused for shows before anything is written
    found = choose_permutations(
        source.components[0],
        chosen,
        task.calibration,
        device=choose_device(device),
        seed=seed,
        progress=progress,
    )
    masks = None if dry_run else task.write(found, outputs, force=force)
    return Permuted(found, masks, outputs)


def _outputs(output: Path, masks: Path | None, *, calibrated: bool) -> Outputs:
    beside = output.with_name(f"{output.name}.calibration.safetensors")
    masks = masks or output.with_name(f"{output.name}.masks.safetensors")
    return Outputs(output, masks, beside if calibrated else None)
