"""``quantkit sparsify``: choose the n:m masks of a model and store them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import old_spellings, options
from quantkit.cli.console import command_line, echo, print_json, progress_bar, say
from quantkit.cli.mask_table import error_budget, mask_method, pattern, print_masks

if TYPE_CHECKING:
    from quantkit.workflow.recovery_result import Recovery
    from quantkit.workflow.sparsify import Sparsified


@click.command()
@options.model
@options.recipe
@options.calibration
@options.hessians
@options.output
@pattern
@mask_method
@error_budget
@click.option(
    "--update",
    is_flag=True,
    help="Report errors after an update of the kept weights, as 'quantkit recover --method obs' "
    "makes it; needs --hessians. With sparsegpt this is always so.",
)
@click.option(
    "--recover",
    type=click.Choice(["distill", "obs", "reconstruct"]),
    metavar="distill",
    help="Train the masked denoiser afterwards, as 'quantkit recover' does by default. OUTPUT is "
    "then a 16-bit pipeline directory.",
)
@click.option(
    "--device",
    metavar="auto|cpu|cuda[:N]",
    help="Where second moments are used and a recovery runs; default: auto.",
)
@options.force
@options.dry_run
@options.quiet
@options.as_json
@old_spellings.of_sparsify
def sparsify(
    model: str,
    recipe: str,
    calibration: Path | None,
    hessians: Path | None,
    output: Path,
    pattern: str | None,
    method: str | None,
    error_budget: float | None,
    update: bool,
    recover: str | None,
    device: str | None,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **old: Any,
) -> None:
    """Choose which weights of MODEL are kept: n of every m along K, as 2 of 4.

    The recipe's sparsity section selects the layers, and a budget leaves out those that lose more.
    The error is the share of a layer's output power that is lost. It is estimated for independent
    input channels, with their measured mean squares if a calibration is given.

    With --hessians the error is measured, including correlations between channels; with sparsegpt
    or --update it is the error after the update of the kept weights.

    OUTPUT is a mask file for 'quantkit pack --masks' and 'quantkit recover --masks'. With --recover
    distill the masked denoiser is also trained on the dense one's outputs: OUTPUT is then an
    ordinary 16-bit pipeline with the zeros in place, and its masks are a file beside it.
    """
    from quantkit.progress import unheard
    from quantkit.workflow.sparsify import sparsify
    from quantkit.workflow.sparsify_and_recover import sparsify_and_recover

    if update and recover:
        raise click.UsageError("--recover updates the weights anyway; drop --update, or --recover")
    spelled = old_spellings.Given.of(recover, hessians, device, old)
    for hint in spelled.hints():
        say(hint)
    if spelled.permute:
        spelled.refuse_beside_permute()
        old_spellings.permute_as_before(
            spelled,
            model,
            output=output,
            recipe=recipe,
            calibration=calibration,
            rule=(pattern, method, error_budget),
            force=force,
            dry_run=dry_run,
            quiet=quiet,
            as_json=as_json,
        )
        return
    if recover is None:
        spelled.refuse_alone()
        with progress_bar(quiet=quiet) as progress:
            found = sparsify(
                model,
                recipe=recipe,
                output=output,
                calibration=calibration,
                hessians=hessians,
                pattern=pattern,
                method=method,
                error_budget=error_budget,
                update=update,
                device="auto" if device is None else device,
                force=force,
                dry_run=dry_run,
                progress=progress,
            )
        _print(found, None, as_json=as_json)
        return
    with progress_bar(quiet=quiet) as progress:
        found, recovery = sparsify_and_recover(
            model,
            output=output,
            method=recover,
            recipe=recipe,
            calibration=calibration,
            hessians=hessians,
            pattern=pattern,
            mask_method=method,
            error_budget=error_budget,
            prompts=spelled.prompts,
            training=spelled.training,
            masks_output=spelled.masks_output,
            device="auto" if device is None else device,
            force=force,
            dry_run=dry_run,
            commands=(command_line(),),
            progress=progress,
            tell=unheard if quiet else say,
        )
    if recovery is not None or dry_run:
        _print(found, recovery, as_json=as_json)


def _print(found: "Sparsified", recovery: "Recovery | None", *, as_json: bool) -> None:
    if as_json:
        told = {} if recovery is None else {"recovery": recovery.to_json()}
        print_json(found.to_json() | told)
        return
    print_masks(found.masks, str(found.output or "nothing written"))
    if recovery is not None:
        echo(recovery)
