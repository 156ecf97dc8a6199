"""Measuring the error of every layer under every treatment."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.calibration.statistics.layer_statistics import load_calibration
from quantkit.progress import Progress, silent
from quantkit.recipe.recommended import DEFAULT
from quantkit.sensitivity import analyse
from quantkit.sensitivity.error_propagation import Gain, find_gains
from quantkit.sensitivity.measured_model import MeasuredModel
from quantkit.sensitivity.plot import check_plot_path, save_plot
from quantkit.sensitivity.sensitivity_file import Sensitivity, save_sensitivity, to_json
from quantkit.storage.digest import sha256_of_file
from quantkit.storage.files import write_or_keep
from quantkit.storage.places import check_file
from quantkit.workflow.arguments import (
    HessiansLike,
    ModelLike,
    PromptsLike,
    RecipeLike,
    as_path,
    as_prompts,
    opened,
    surgeon_of,
)

#: Layers that are run in the pipeline, at most.
MEASURED = 24


@dataclass(frozen=True, eq=False)
class MeasuredSensitivity:
    """A sensitivity, and where it was written."""

    sensitivity: Sensitivity
    #: None: nowhere
    output: Path | None

    @property
    def gains(self) -> dict[str, Gain]:
        """The gain from each layer's error to the final latents."""
        return find_gains(self.sensitivity.layers)

    def __repr__(self) -> str:
        """Return how much was measured, in two lines."""
        layers = self.sensitivity.layers
        treatments = {name for layer in layers for name in layer.outcomes}
        return (
            f"Sensitivity of {len(layers)} layers under {len(treatments)} treatments\n"
            f"written: {self.output or 'nothing'}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, every layer and treatment included."""
        written = None if self.output is None else str(self.output)
        return {"written": written, **to_json(self.sensitivity)}


def measure_sensitivity(
    model: ModelLike,
    *,
    calibration: str | Path,
    recipe: RecipeLike = DEFAULT,
    output: str | Path | None = None,
    hessians: HessiansLike | None = None,
    plot: str | Path | None = None,
    measure: int = MEASURED,
    prompts: PromptsLike | None = None,
    count: int | None = None,
    device: str = "auto",
    force: bool = False,
    progress: Progress = silent,
) -> MeasuredSensitivity:
    """Measure the error of every layer of a pipeline under every treatment.

    All layers are measured on the inputs that the calibration stored. Those whose treatment the
    recipe's budget would change if their error weighed twice or half as much are run in the
    pipeline, one at a time, for the error of the final latents.

    Args:
        model: a pipeline: its directory, a hub id, or opened.
        calibration: the file of the same model, with stored inputs; its checksum is recorded.
        recipe: how scales are chosen, and the budget whose edge is looked at.
        output: the JSON file to write; None: nothing is written.
        hessians: second moments of the model; None: no masks by SparseGPT are measured.
        plot: a drawing to write, as .svg, .png or .pdf.
        measure: most layers to run in the pipeline; 0 runs none.
        prompts: texts, or a file with one a line; None: the bundled set.
        count: use the first so many prompts; None: one batch.
        device: auto, cpu or cuda[:N].
        force: replace existing files.
        progress: told of layers done.

    Returns:
        the figures of every layer and treatment.

    Raises:
        InputError: a model, recipe, calibration or prompts that cannot be used, or a file that
            exists.
    """
    files = [path for path in (as_path(output), as_path(plot)) if path is not None]
    if plot is not None:
        check_plot_path(Path(plot))
    for path in files:
        check_file(path, force=force)
    source, chosen = opened(model, recipe)
    texts = as_prompts(prompts)[: count or chosen.calibration.batch]
    statistics = load_calibration(Path(calibration))
    subject = MeasuredModel.of(source, chosen, statistics, surgeon_of(hessians, device))

    def keep(found: Sensitivity, *, force: bool) -> None:
        if output is not None:
            write_or_keep(partial(save_sensitivity, found, force=force), Path(output))

    found = analyse.measure_sensitivity(
        subject,
        texts,
        measure=measure,
        device=device,
        calibration_digest=sha256_of_file(Path(calibration)),
        keep=partial(keep, force=force),
        progress=progress,
    )
    # What is replaced now is its own.
    keep(found, force=True)
    if plot is not None:
        write_or_keep(partial(save_plot, found, force=force), Path(plot))
    return MeasuredSensitivity(found, as_path(output))
