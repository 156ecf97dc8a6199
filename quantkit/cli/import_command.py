"""``quantkit import``: a single file, or SDNQ's directory, as a 16-bit diffusers directory."""

from typing import Any

import click

from quantkit.cli import options
from quantkit.cli.command import Command
from quantkit.cli.console import echo, print_json, progress_bar


@click.command(
    "import",
    cls=Command,
    example="quantkit import fine-tune.safetensors --config sdxl -o fine-tune",
)
@click.argument("file", metavar="FILE", type=options.PATH)
@click.option(
    "--config",
    type=options.PATH,
    metavar="DIR|HUBID",
    help="The pipeline that FILE belongs to, or its denoiser's directory: what FILE lacks. "
    "Of SDNQ's directory leave it out.",
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
def import_(quiet: bool, as_json: bool, **given: Any) -> None:
    """Write FILE, .safetensors, .gguf or SDNQ's directory, as a 16-bit diffusers directory.

    FILE has the names of the model's authors, as Stable Diffusion, FLUX or Wan files have, or
    diffusers' names; in 16 bit, FP8 (ComfyUI's scaled, fp8r, plain), ComfyUI's int8, or GGUF.
    Codes are dequantized. VAE and text encoders are FILE's where it has them; the rest is
    --config's.

    Of a directory, a pipeline's or a component's, the components with codes of SDNQ are
    dequantized; the rest is copied.

    Other commands take a single FILE itself as MODEL, with the same --config.
    """
    from quantkit.workflow.single_file import import_file

    with progress_bar(quiet=quiet) as progress:
        result = import_file(**given, progress=progress)
    written = not given["dry_run"]
    if as_json:
        print_json({"written": written, **result.to_json()})
        return
    for note in result.notes:
        echo(f"{note[0].upper()}{note[1:]}")
    echo(f"{result}, {f'written to {result.output}' if written else 'nothing written'}")
