"""``quantkit import``: a single file as a diffusers directory."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, progress_bar

if TYPE_CHECKING:
    from quantkit.interchange.checkpoint_parts import Encoders


@click.command("import")
@click.argument("file", metavar="FILE", type=options.PATH)
@click.option(
    "--config",
    type=options.PATH,
    required=True,
    metavar="DIR|HUBID",
    help="The pipeline that FILE belongs to, or its denoiser's directory: what FILE lacks.",
)
@click.option(
    "--encoders",
    type=click.Choice(["file", "config"]),
    default="file",
    show_default=True,
    help="Whose VAE and text encoders are taken, where FILE has them.",
)
@options.output
@options.force
@options.dry_run
@options.quiet
@options.as_json
def import_(
    file: Path,
    config: Path,
    encoders: "Encoders",
    output: Path,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Write FILE, .safetensors or .gguf, as a 16-bit diffusers directory.

    FILE has the layout of Stable Diffusion 1.x, 2.x, XL, 3, 3.5 or FLUX.1 files, or diffusers'
    names; in 16 bit, FP8 (ComfyUI's scaled, fp8r, plain), ComfyUI's int8, or GGUF. Codes are
    dequantized. VAE and text encoders are FILE's where it has them; the rest is --config's.

    Other commands take FILE itself as MODEL, with the same --config.
    """
    from quantkit.workflow.single_file import import_file

    with progress_bar(quiet=quiet) as progress:
        result = import_file(
            file,
            config=config,
            output=output,
            encoders=encoders,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )
    if as_json:
        print_json({"written": not dry_run, **result.to_json()})
        return
    for note in result.notes:
        echo(f"{note[0].upper()}{note[1:]}")
    echo(f"{result}, {'nothing written' if dry_run else f'written to {output}'}")
