"""``quantkit sparsify --permute``: move channels, then choose the masks of what that made."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.cli.console import echo, print_json, print_table, progress_bar
from quantkit.cli.mask_table import describe_masks, print_masks, with_rule
from quantkit.cli.recovery_options import masks_path, refuse_alone
from quantkit.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quantkit.calibration.statistics import Calibration
    from quantkit.models.source import Model
    from quantkit.progress import Progress
    from quantkit.recipe.schema import Recipe
    from quantkit.recovery.permuting import Outputs
    from quantkit.sparsity.maskfile import MaskSet
    from quantkit.sparsity.permute import Permutation

#: Options of a recovery that mean the same here.
_SHARED = frozenset({"device", "masks_output", "seed"})


def refuse_beside(how: str | None, hessians: Path | None, mine: dict[str, Any]) -> None:
    """Refuse what belongs to the permuted pipeline, and not to the step that makes it.

    Args:
        how: the recovery that was asked for.
        hessians: second moments that were given.
        mine: options of a recovery.

    Raises:
        RecipeError: naming the first.
    """
    for option, given in ((f"--recover {how}", how), ("--hessians", hessians)):
        if given is not None:
            raise RecipeError(
                f"--permute with {option}: permute first, then run sparsify on its output with "
                f"{option}{', taken from that output' if option == '--hessians' else ''}"
            )
    refuse_alone({name: value for name, value in mine.items() if name not in _SHARED})


def choose_permuted(
    model: str,
    recipe: str,
    output: Path,
    *,
    calibration: Path | None,
    rule: dict[str, Any],
    given: dict[str, Any],
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Permute the model, choose its masks, write both and print what was gained.

    Args:
        model: directory of a pipeline or component, or hub id; with one denoiser.
        recipe: a bundled name or a YAML file.
        output: the directory to make.
        calibration: statistics of the same model; what fits the permuted one is written too.
        rule: settings of the recipe's sparsity section to replace.
        given: device, seed and masks_output, where given.
        force: replace existing outputs.
        dry_run: search and print, but write nothing.
        quiet: no progress.
        as_json: print JSON.

    Raises:
        InputError: a model, a recipe or a calibration that cannot be used.
    """
    from quantkit.calibration.statistics import load_calibration
    from quantkit.models.chosen import open_for
    from quantkit.recovery.permuting import only_component, refuse_permuted
    from quantkit.sparsity.choose import choose_masks

    source, chosen = open_for(model, recipe)
    chosen = with_rule(chosen, rule)
    chosen.refuse_budget()
    only_component(source)
    outputs = _outputs(output, given, calibrated=calibration is not None)
    refuse_permuted(source, outputs, force=force)
    statistics = load_calibration(calibration) if calibration else None
    with progress_bar(quiet=quiet) as progress:
        # What masks would be refused for shows before anything is written.
        choose_masks(source, chosen, statistics, progress=progress)
        permutations = _permutations((source, chosen, statistics), given, progress)
        masks = None
        if not dry_run:
            masks = _write(
                (source, chosen, statistics), permutations, outputs, progress, force=force
            )
    if as_json:
        print_json(_described(permutations, masks, outputs))
        return
    _print(permutations)
    if masks is None:
        echo("nothing written")
        return
    print_masks(masks, str(outputs.masks))
    for path in (outputs.pipeline, outputs.calibration):
        if path is not None:
            echo(f"written to {path}")


def _outputs(output: Path, given: dict[str, Any], *, calibrated: bool) -> "Outputs":
    from quantkit.recovery.permuting import Outputs

    beside = output.with_name(f"{output.name}.calibration.safetensors")
    return Outputs(output, masks_path(output, given), beside if calibrated else None)


def _permutations(
    task: "tuple[Model, Recipe, Calibration | None]", given: dict[str, Any], progress: "Progress"
) -> "tuple[Permutation, ...]":
    from quantkit.pipelines.running import choose_device
    from quantkit.sparsity.permute import choose_permutations

    source, chosen, statistics = task
    return choose_permutations(
        source.components[0],
        chosen,
        statistics,
        device=choose_device(given.get("device", "auto")),
        seed=given.get("seed", 0),
        progress=progress,
    )


def _write(
    task: "tuple[Model, Recipe, Calibration | None]",
    permutations: "Sequence[Permutation]",
    outputs: "Outputs",
    progress: "Progress",
    *,
    force: bool,
) -> "MaskSet":
    """Write all outputs and return the masks."""
    from quantkit.recovery.permuting import write_permuted
    from quantkit.sparsity.choose import choose_masks
    from quantkit.sparsity.maskfile import save_masks

    source, chosen, statistics = task
    permuted, fitting = write_permuted(source, permutations, statistics, outputs, force=force)
    masks = choose_masks(permuted, chosen, fitting, progress=progress)
    save_masks(masks, outputs.masks, force=force)
    return masks


def _described(
    permutations: "Sequence[Permutation]", masks: "MaskSet | None", outputs: "Outputs"
) -> dict[str, Any]:
    """Return JSON values that say what moved, what it gained and where it was written."""
    values = {} if masks is None else describe_masks(masks, outputs.masks)
    kept = outputs.calibration
    return {
        **values,
        "written": None if masks is None else str(outputs.pipeline),
        "masks": None if masks is None else str(outputs.masks),
        "calibration": None if masks is None or kept is None else str(kept),
        "permuted": [
            {
                "producers": [layer.name for layer in permutation.coupling.producers],
                "consumers": [layer.name for layer in permutation.coupling.consumers],
                "lost_before": permutation.lost_before,
                "lost_after": permutation.lost_after,
            }
            for permutation in permutations
        ],
    }


def _print(permutations: "Sequence[Permutation]") -> None:
    rows = [
        (
            ", ".join(layer.name for layer in permutation.coupling.consumers),
            f"{permutation.lost_before:.4f}",
            f"{permutation.lost_after:.4f}",
        )
        for permutation in permutations
    ]
    count = max(1, len(rows))
    before = sum(permutation.lost_before for permutation in permutations) / count
    after = sum(permutation.lost_after for permutation in permutations) / count
    title = f"{len(rows)} permutations: masks take {after:.4f} instead of {before:.4f} (mean)"
    print_table(title, ("input channels of", "lost before", "after"), rows)
