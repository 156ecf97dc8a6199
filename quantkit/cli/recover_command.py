"""``quantkit recover``: regain quality that masks or packing cost a denoiser's pictures."""

import sys
from pathlib import Path
from typing import Any

import click

from quantkit.cli import options
from quantkit.cli.command import Command
from quantkit.cli.console import (
    command_line,
    echo,
    print_error,
    print_json,
    print_verdict,
    progress_bar,
    say,
)
from quantkit.cli.recovery_options import masks_output, recovery_options, take_training


@click.command(
    cls=Command,
    example="quantkit recover sdxl -r int4 --packed sdxl-int4 -o sdxl-int4-trained",
    kept="{}.recovery.safetensors",
    left="{}.recovery.html",
)
@options.model
@options.recipe
@click.option(
    "--masks",
    type=options.PATH,
    callback=options.there,
    help="Masks of 'quantkit sparsify', which are kept. With --method obs the recipe's sparsity "
    "section chooses where they are missing.",
)
@click.option(
    "--packed",
    type=options.PATH,
    callback=options.directory,
    help="A directory of 'quantkit pack': its codes, scales, biases and norms are trained, and "
    "OUTPUT is packed as it is.",
)
@options.hessians
@options.output
@click.option(
    "--method",
    type=click.Choice(["distill", "obs"]),
    default="distill",
    show_default=True,
    help="distill trains the denoiser on the dense one's own trajectories. obs does not train: "
    "from --hessians it updates kept weights and biases so that they make up for the dropped "
    "weights.",
)
@masks_output
@options.prompts
@recovery_options
@options.device
@options.force
@options.dry_run
@options.quiet
@options.as_json
def recover(method: str, quiet: bool, as_json: bool, **given: Any) -> None:
    """Train MODEL so that masks, or packing, cost its pictures less.

    The denoiser is trained to repeat its own 16-bit outputs, along trajectories that start from
    noise. No data set is needed. With --masks OUTPUT is an ordinary 16-bit pipeline for 'quantkit
    pack', and its masks are a file next to it. With --packed the codes of a packed model are
    trained, and OUTPUT is packed. OUTPUT.recovery.html fills while distill trains: pictures and
    curves. Exits with 1 when the pictures are worse than before.
    """
    from quantkit.progress import unheard
    from quantkit.workflow.recover import recover
    from quantkit.workflow.recovery_result import Recovery, RecoveryPlan

    training = take_training(given)
    with progress_bar(quiet=quiet) as progress:
        found = recover(
            **given,
            method=method,
            training=training,
            commands=(command_line(),),
            progress=progress,
            tell=unheard if quiet else say,
        )
    if found is None:
        return
    if as_json:
        print_json(found.to_json())
    elif isinstance(found, RecoveryPlan):
        echo(*str(found).split("\n"))
    else:
        echo(*f"{given['output']}: {found}".split("\n"))
    if isinstance(found, Recovery) and found.change is not None and found.change.is_worse:
        _say_worse(given["output"], as_json=as_json)
        sys.exit(1)


def _say_worse(output: Path, *, as_json: bool) -> None:
    """Print in red that a training did harm, and what to do; on stderr beside JSON."""
    text = (
        f"{output}: the pictures are worse than before; train longer (--minutes, --steps), or with "
        "a smaller --rate"
    )
    if as_json:
        print_error(text)
    else:
        print_verdict(text, passed=False)
