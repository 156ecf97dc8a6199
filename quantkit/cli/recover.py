"""``quantkit recover``: train a denoiser of fewer bits or weights on the dense one's answers."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, progress_bar
from quantkit.cli.reconstruction import reconstruct_and_write
from quantkit.cli.recovered import told, write_and_describe
from quantkit.cli.recovery_options import (
    METHODS,
    SAVE_EVERY,
    make_settings,
    masks_path,
    recovery_options,
    refuse_foreign,
    split_options,
)

if TYPE_CHECKING:
    from quantkit.models.source import Model
    from quantkit.recipe.schema import Recipe
    from quantkit.recovery.distill.progress import Point
    from quantkit.sparsity.maskfile import MaskSet
    from quantkit.sparsity.surgery import Surgeon


@click.command()
@options.model
@options.recipe
@click.option(
    "--masks",
    type=options.PATH,
    help="Masks of 'quantkit sparsify', which the training keeps; without them all weights stay.",
)
@options.output
@click.option(
    "--method",
    type=METHODS,
    default="distill",
    show_default=True,
    help="How: distill trains the denoiser on the dense one's own trajectories; reconstruct fits "
    "masked layers to them block by block, in a minute or a few on a CPU.",
)
@recovery_options()
@options.force
@options.dry_run
@options.quiet
@options.as_json
def recover(
    model: str,
    recipe: str,
    masks: Path | None,
    output: Path,
    method: str,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Train MODEL so that masks, or packing with the recipe, cost its pictures less.

    The denoiser is trained on what it answered in 16 bit along its own trajectories from noise:
    masked with --masks, and computing as packed with --quantize, or both. No data set is needed.
    OUTPUT is an ordinary 16-bit pipeline for 'quantkit pack'; with masks, those for it are a file
    beside it.
    """
    from quantkit.models.chosen import open_for
    from quantkit.sparsity.maskfile import load_masks

    source, chosen = open_for(model, recipe)
    mask_set = None if masks is None else load_masks(masks)
    mine, _ = split_options(given)
    refuse_foreign(method, mine)
    if dry_run:
        if method == "reconstruct":
            mine["quantize"] = False
        result: dict[str, Any] | None = describe(source, chosen, mask_set, mine)
    elif method == "reconstruct":
        result = reconstruct_and_write(
            source, chosen, mask_set, output, mine, force=force, quiet=quiet
        )
    else:
        result = recover_and_write(source, chosen, mask_set, output, mine, force=force, quiet=quiet)
    if result is None:
        return
    if as_json:
        print_json(result)
    elif dry_run:
        echo(f"{result['masked']} layers masked, {result['quantized']} quantized")
    else:
        echo(f"{output}: {told(result)}")


def describe(
    model: "Model", recipe: "Recipe", masks: "MaskSet | None", given: dict[str, Any]
) -> dict[str, Any]:
    """Return JSON values that say what would be trained.

    Raises:
        InputError: masks or a recipe that do not fit the model.
    """
    from quantkit.recovery.fakequant import plan_quants

    component = model.components[0]
    kept = {} if masks is None else masks.of(component)
    quantize = given.get("quantize", masks is None)
    quants = plan_quants(component, recipe, set(kept)) if quantize else {}
    return {"written": None, "masked": len(kept), "quantized": len(quants)}


def recover_and_write(
    model: "Model",
    recipe: "Recipe",
    masks: "MaskSet | None",
    output: Path,
    given: dict[str, Any],
    *,
    force: bool,
    quiet: bool,
) -> dict[str, Any] | None:
    """Train, write the pipeline and its masks, and return JSON values that say how it went.

    Args:
        model: the dense pipeline.
        recipe: what the result will be packed with; its calibration section says how pictures are
            sampled.
        masks: which weights are kept; None: all.
        output: the directory to make.
        given: the options of a recovery.
        force: replace existing outputs, and a saved training.
        quiet: no progress and no loss.

    Returns:
        None in all but the first of several processes, which write nothing.

    Raises:
        InputError: a model, masks, prompts or settings that cannot be used.
    """
    from quantkit.pipelines.running import choose_device, read_prompts
    from quantkit.recovery.distill.recover import Keeping, Task, ignore
    from quantkit.recovery.distill.recover import recover as train
    from quantkit.recovery.distill.saving import refuse_unfinished
    from quantkit.recovery.writing import refuse_outputs

    where = None if masks is None else masks_path(output, given)
    refuse_outputs(model, output, where, force=force)
    resume = given.get("resume", False)
    file = output.with_name(f"{output.name}.recovery.safetensors")
    refuse_unfinished(file, resume=resume, force=force)
    device = given.get("device", "auto")
    quantize = recipe if given.get("quantize", masks is None) else None
    settings = make_settings(recipe, given, on_cpu=choose_device(device).type == "cpu")
    task = Task(model, masks, quantize, read_prompts(given.get("prompts")), device)
    keeping = Keeping(file, given.get("save_every", SAVE_EVERY), resume)
    with progress_bar(quiet=quiet) as progress:
        watch = ignore if quiet else _print_point()
        recovered = train(task, settings, progress=progress, watch=watch, keeping=keeping)
    if not recovered.writes:
        return None
    result = write_and_describe(model, masks, recovered, output, where, force=force)
    file.unlink(missing_ok=True)
    return result


def update_and_write(
    model: "Model",
    masks: "MaskSet",
    surgeon: "Surgeon",
    output: Path,
    given: dict[str, Any],
    *,
    force: bool,
) -> dict[str, Any]:
    """Write the pipeline with updated weights, and its masks, and return JSON values about it.

    Args:
        model: the dense pipeline.
        masks: which weights are kept.
        surgeon: its second moments.
        output: the directory to make.
        given: the options of a recovery.
        force: replace existing outputs.

    Raises:
        InputError: a model, masks or moments that cannot be used.
    """
    from quantkit.recovery.distill.recover import Recovered, only_denoiser
    from quantkit.recovery.surgery import UpdatedTensors
    from quantkit.recovery.writing import write_recovered

    where = masks_path(output, given)
    component = only_denoiser(model)
    updated = UpdatedTensors(component, masks, surgeon)
    recovered = Recovered(component, updated, (), trajectories=0, aside=0.0)
    write_recovered(model, masks, recovered, output, where, force=force)
    return {"written": str(output), "masks": str(where), "tensors": len(updated)}


def _print_point() -> Callable[["Point"], None]:
    """Return a watcher that prints looks, and the loss at about every twentieth of the training."""
    due = 0.0

    def show(point: "Point") -> None:
        nonlocal due
        if point.fraction < due and point.look is None:
            return
        due = max(due, point.fraction + 0.05)
        seen = "" if point.look is None else f", {point.look.metric} {point.look.value:.4f}"
        text = f"step {point.step}: loss {point.loss:.5f}{seen}, {point.seconds:.0f} s"
        echo(text, err=True)

    return show
