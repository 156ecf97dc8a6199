"""Giving queries and keys a basis whose first columns hold most of what attention multiplies."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.calibration.column_errors import errors_of_module
from quantkit.calibration.rotation import (
    LEAST_PROMPTS,
    Rotation,
    held_out_prompts,
    measure_rotation,
    plan_rotation,
)
from quantkit.calibration.statistics import Calibration
from quantkit.errors import ModelError
from quantkit.models.source import Component, Model
from quantkit.pipelines.running import choose_device, refuse_component
from quantkit.progress import Progress, silent
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.recovery.rotated_model import RotatedOutputs, refuse_other_weights, write_rotated
from quantkit.workflow.inputs import (
    CalibrationLike,
    ModelLike,
    PromptsLike,
    as_calibration,
    as_model,
    as_prompts,
)


@dataclass(frozen=True, eq=False)
class Rotated:
    """Which modules have a basis, what fewer columns lose there, and where it was written."""

    rotation: Rotation
    #: relative error of a module's output on the held-out prompts by treatment, as ``rank 32``
    errors: dict[str, dict[str, float]]
    #: of the written model
    calibration: Calibration
    outputs: RotatedOutputs

    def __repr__(self) -> str:
        """Return counts, and the files that were written."""
        return (
            f"{len(self.errors)} attention modules have another basis, "
            f"{len(self.rotation.left)} their own\n"
            f"written: {self.outputs.pipeline}, {self.outputs.calibration}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "written": str(self.outputs.pipeline),
            "calibration": str(self.outputs.calibration),
            "errors": self.errors,
            "left": dict(self.rotation.left),
        }


def rotate(
    model: ModelLike,
    *,
    calibration: CalibrationLike,
    output: str | Path,
    prompts: PromptsLike | None = None,
    count: int = LEAST_PROMPTS,
    batch: int = CalibrationRecipe.model_fields["batch"].default,
    device: str = "auto",
    force: bool = False,
    progress: Progress = silent,
) -> Rotated:
    """Give queries and keys another basis, and measure what attention loses with fewer columns.

    The written model answers what it did, up to rounding; it is the model of whatever follows.
    Beside it is the calibration that fits it, ``OUTPUT.calibration.safetensors``.

    Args:
        model: a pipeline: its directory, a hub id, or opened; with one denoiser.
        calibration: statistics of the model, which the basis is made from.
        output: the directory to make, a 16-bit pipeline.
        prompts: texts, or a file with one a line; None: the bundled set. Those that the
            calibration was taken from are left out where they come first.
        count: how many are drawn to measure errors, 32 or more.
        batch: prompts denoised at a time.
        device: auto, cpu or cuda[:N].
        force: replace existing outputs.
        progress: told of denoiser calls.

    Returns:
        modules, errors, and the calibration.

    Raises:
        InputError: a model or calibration that cannot be used, too few prompts, a model whose
            attention can have no basis, or an output that exists.
    """
    source, found = as_model(model), as_calibration(calibration)
    assert found is not None
    refuse_component(source)
    component = _only_component(source)
    target = Path(output)
    beside = target.with_name(f"{target.name}.calibration.safetensors")
    outputs = RotatedOutputs(target, beside)
    outputs.refuse(source, force=force)
    texts = held_out_prompts(as_prompts(prompts), found.metadata, count)
    choose_device(device)
    rotation = plan_rotation(component, found)
    refuse_other_weights(component, rotation, found)
    measured = measure_rotation(
        source, rotation, found, texts, batch=batch, device=device, progress=progress
    )
    fitting = write_rotated(source, rotation, found, measured, outputs, force=force)
    errors = {name: errors_of_module(s.errors() or {}) for name, s in measured.items()}
    return Rotated(rotation, errors, fitting, outputs)


def _only_component(model: Model) -> Component:
    if len(model.components) != 1:
        names = ", ".join(component.name for component in model.components)
        raise ModelError(
            f"{model.path}: found the denoisers {names}; pass the directory of one of them"
        )
    return model.components[0]
