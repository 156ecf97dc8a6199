"""``quantkit export``: write a model's denoiser as a file for other programs."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from quantkit.workflow.export import GgufExport


@click.command()
@options.model
@click.option(
    "--to",
    required=True,
    metavar="gguf:Q8_0|gguf:Q4_0",
    help="What to write.",
)
@options.output
@click.option(
    "--convolutions",
    is_flag=True,
    help="Quantize convolutions, too: ComfyUI-GGUF reads them, diffusers refuses the file.",
)
@options.force
@options.dry_run
@options.quiet
@options.as_json
def export(
    model: str,
    to: str,
    output: Path,
    convolutions: bool,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Export the denoiser of MODEL to a file that other programs read.

    MODEL is a 16-bit model as everywhere, or a directory packed in q8_0 or q4_0, whose layers are
    written as they are. A .gguf file has the layout of the model's authors; vectors stay in 32
    bit, convolutions in 16.
    """
    from quantkit.workflow.export import export

    with progress_bar(quiet=quiet) as progress:
        result = export(
            model,
            to=to,
            output=output,
            convolutions=convolutions,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )
    if as_json:
        print_json({"written": not dry_run, **result.to_json()})
    else:
        _print(result, "nothing written" if dry_run else f"written to {output}")


def _print(result: "GgufExport", where: str) -> None:
    print_table("Tensors", ("type", "number"), sorted(result.types.items()))
    if result.copied:
        echo(f"As they were packed, not rounded again: {len(result.copied)} weights")
    if result.worst is not None:
        error, name = result.worst
        echo(f"Largest relative error of a weight: {error:.4f}, {name}")
    echo(f"{result.architecture}: {result.nbytes:,} bytes, {where}")
