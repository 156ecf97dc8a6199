"""``quantkit sparsify``: choose the n:m masks of a model and store them."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, progress_bar
from quantkit.cli.mask_table import describe_masks, print_masks, with_rule
from quantkit.cli.permuting import choose_permuted, refuse_beside
from quantkit.cli.reconstruction import reconstruct_and_write
from quantkit.cli.recover import recover_and_write, update_and_write
from quantkit.cli.recovered import told, told_of_update
from quantkit.cli.recovery_options import (
    SPARSE_METHODS,
    masks_path,
    recovery_options,
    refuse_alone,
    refuse_foreign,
    split_options,
)

if TYPE_CHECKING:
    from quantkit.models.source import Model
    from quantkit.recipe.schema import Recipe
    from quantkit.sparsity.maskfile import MaskSet
    from quantkit.sparsity.surgery import Surgeon


@click.command()
@options.model
@options.recipe
@options.calibration
@options.hessians
@options.output
@click.option("--pattern", metavar="N:M", help="As 2:4 (or 4:2); default: the recipe's.")
@click.option(
    "--method",
    type=click.Choice(["magnitude", "wanda", "sparsegpt"]),
    help="How weights are ranked; wanda needs --calibration or --hessians, sparsegpt --hessians. "
    "Default: the recipe's.",
)
@click.option(
    "--budget",
    "error_budget",
    type=options.FiniteRange(min=0, min_open=True),
    help="Mask only layers that lose at most this share of their output's power.",
)
@click.option(
    "--recover",
    type=SPARSE_METHODS,
    help="distill: train the masked denoiser afterwards, as 'quantkit recover' does; reconstruct: "
    "fit it block by block, for a CPU too, from where obs ends if there are --hessians; obs: let "
    "the kept weights and biases make up for the dropped ones, from --hessians, without training. "
    "OUTPUT is then a 16-bit pipeline directory.",
)
@click.option(
    "--permute",
    is_flag=True,
    help="First let input channels change places where the graph allows it at no cost, so that "
    "masks take less. OUTPUT is then a 16-bit pipeline directory that answers the same; its masks, "
    "and the calibration that fits it, are files beside it.",
)
@recovery_options("With --recover: ")
@options.force
@options.dry_run
@options.quiet
@options.as_json
def sparsify(
    model: str,
    recipe: str,
    calibration: Path | None,
    hessians: Path | None,
    output: Path,
    permute: bool,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Choose which weights of MODEL are kept: n of every m along K, as 2 of 4.

    Layers follow the recipe's sparsity section, and a budget where one is set. The error is the
    share of a layer's output power that is lost if its input channels are independent, with their
    measured mean squares where a calibration is given.

    With --hessians the error is the output's own, correlations between channels included; with
    sparsegpt or --recover obs it is what remains when the kept weights made up for it.

    With --recover distill the masked denoiser is then trained on what the dense one answers along
    its own trajectories from noise, as 'quantkit recover' does. No data set is needed. OUTPUT is
    then an ordinary 16-bit pipeline with the zeros in place, its masks a file beside it.

    With --permute (and --device, --seed, --masks-output) the output is the MODEL of all that
    follows, a recovery for one.
    """
    mine, rule = split_options(given)
    how = rule.pop("recover")
    ruled = {name: value for name, value in rule.items() if value is not None}
    if permute:
        refuse_beside(how, hessians, mine)
        choose_permuted(
            model,
            recipe,
            output,
            calibration=calibration,
            rule=ruled,
            given=mine,
            force=force,
            dry_run=dry_run,
            quiet=quiet,
            as_json=as_json,
        )
        return
    if how is None:
        # Second moments are computed with somewhere, recovery or not.
        refuse_alone({n: v for n, v in mine.items() if n != "device" or hessians is None})
    else:
        refuse_foreign(how, mine)
    choose(
        model,
        recipe,
        output,
        calibration=calibration,
        hessians=hessians,
        device=mine.get("device", "auto"),
        rule=ruled,
        recovery=None if how is None else {**mine, "how": how},
        force=force,
        dry_run=dry_run,
        quiet=quiet,
        as_json=as_json,
    )


def choose(
    model: str,
    recipe: str,
    output: Path,
    *,
    calibration: Path | None,
    hessians: Path | None = None,
    device: str = "cpu",
    rule: dict[str, Any],
    recovery: dict[str, Any] | None = None,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Choose the masks, write the file and print every decision.

    Args:
        model: pipeline directory, component directory or hub id.
        recipe: a bundled name or a YAML file.
        output: the file to write; with a recovery, the pipeline directory.
        calibration: statistics of the same model.
        hessians: second moments of the same model.
        device: where they are computed with.
        rule: settings of the recipe's sparsity section to replace.
        recovery: options of a recovery; None stores the masks alone.
        force: replace an existing file.
        dry_run: decide and print, but write nothing.
        quiet: no progress.
        as_json: print JSON.
    """
    from quantkit.calibration.hessian import load_hessians
    from quantkit.calibration.statistics import load_calibration
    from quantkit.models.chosen import open_for
    from quantkit.pipelines.running import choose_device
    from quantkit.recovery.writing import refuse_outputs
    from quantkit.sparsity.choose import choose_masks
    from quantkit.sparsity.maskfile import save_masks
    from quantkit.sparsity.surgery import Surgeon
    from quantkit.storage.files import scratch_directory, write_or_keep
    from quantkit.storage.places import check_file, refuse_overlap

    if recovery is None:
        check_file(output, force=force)
    source, chosen = open_for(model, recipe)
    chosen = with_rule(chosen, rule)
    chosen.refuse_budget()
    if recovery is None:
        refuse_overlap(output, source.path)
    else:
        refuse_outputs(source, output, masks_path(output, recovery), force=force)
    statistics = load_calibration(calibration) if calibration else None
    how = None if recovery is None else recovery["how"]
    updated = how == "obs" or (how == "reconstruct" and hessians is not None)
    spooled = updated and hessians is not None and not dry_run
    trained: dict[str, Any] | None = None
    with scratch_directory(output) if spooled else nullcontext() as scratch:
        surgeon = None
        if hessians is not None:
            surgeon = Surgeon(load_hessians(hessians), choose_device(device), scratch)
        with progress_bar(quiet=quiet) as progress:
            masks = choose_masks(
                source, chosen, statistics, surgeon=surgeon, update=updated, progress=progress
            )
        if recovery is None or dry_run:
            if not dry_run:
                write_or_keep(partial(save_masks, masks, force=force), output)
        else:
            trained = _recover(
                (source, chosen, masks), output, recovery, surgeon=surgeon, force=force, quiet=quiet
            )
            if trained is None:
                return
    if as_json:
        values = describe_masks(masks, None if dry_run else output)
        print_json(values if trained is None else values | {"recovery": trained})
        return
    print_masks(masks, "nothing written" if dry_run else str(output))
    if trained is not None:
        echo(told_of_update(trained) if how == "obs" else told(trained))


def _recover(
    task: "tuple[Model, Recipe, MaskSet]",
    output: Path,
    recovery: dict[str, Any],
    *,
    surgeon: "Surgeon | None",
    force: bool,
    quiet: bool,
) -> dict[str, Any] | None:
    """Recover in the chosen way; None in a process that writes nothing."""
    model, recipe, masks = task
    if recovery["how"] == "obs":
        assert surgeon is not None
        return update_and_write(model, masks, surgeon, output, recovery, force=force)
    if recovery["how"] == "reconstruct":
        return reconstruct_and_write(
            model, recipe, masks, output, recovery, surgeon=surgeon, force=force, quiet=quiet
        )
    return recover_and_write(model, recipe, masks, output, recovery, force=force, quiet=quiet)
