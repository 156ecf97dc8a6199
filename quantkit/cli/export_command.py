"""``quantkit export``: write a model for other programs."""

from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.command import Command
from quantkit.cli.console import echo, print_json, print_table, progress_bar
from quantkit.storage.sizes import tell_bytes

if TYPE_CHECKING:
    from quantkit.workflow.export import Export


@click.command(
    cls=Command, example="quantkit export sdxl-int8 --to comfyui-int8 -o sdxl-int8.safetensors"
)
@options.model
@click.option(
    "--to",
    required=True,
    metavar="TARGET",
    help="comfyui, comfyui-int8, comfyui-w4a8, sdnq, single-file, fp8r, compressed-tensors, "
    "gguf:Q8_0 or gguf:Q4_0.",
)
@options.output
@options.recipe_option(
    None, "What a 16-bit MODEL is quantized by; default: that named like the target, or fp8."
)
@options.calibration
@options.hessians
@click.option(
    "--requantize",
    is_flag=True,
    help="Convert what the target does not hold, and say what that costs each layer.",
)
@click.option(
    "--convolutions",
    is_flag=True,
    help="Of gguf: quantize convolutions, too. ComfyUI-GGUF reads them, diffusers refuses the "
    "file.",
)
@options.force
@options.dry_run
@options.quiet
@options.as_json
def export(quiet: bool, as_json: bool, **given: Any) -> None:
    """Export MODEL as a file or a directory that other programs read.

    MODEL is a 16-bit model, which is quantized on the way, or a packed directory, whose codes are
    taken over. What a target cannot hold is refused; --requantize converts it.

    \b
    comfyui             ComfyUI in FP8: one file, static input scales (needs --calibration)
    comfyui-int8        ComfyUI in int8, of rotated inputs: one file
    comfyui-w4a8        ComfyUI in 4 bits, of rotated inputs in int8: one file; of a 16-bit MODEL
    sdnq                diffusers with SDNQ: a directory, convolutions included
    fp8r                diffusers itself, from_single_file: one file
    gguf:Q8_0, :Q4_0    ComfyUI-GGUF and diffusers: one file
    single-file         16 bit in the layout of the model's authors: one file
    compressed-tensors  transformers, text encoders: a directory
    """  # noqa: D301  click wants the character itself before lines that it must not fill
    from quantkit.workflow.export import export

    with progress_bar(quiet=quiet) as progress:
        result = export(**given, progress=progress)
    written = not given["dry_run"]
    if as_json:
        print_json({"written": written, **result.to_json()})
    else:
        _print(result, f"written to {given['output']}" if written else "nothing written")


def _print(result: "Export", where: str) -> None:
    print_table("Tensors", ("type", "number"), sorted(result.types.items()))
    if result.copied:
        echo(f"As they were packed, not rounded again: {len(result.copied)} weights")
    for note in result.notes:
        echo(f"{note[0].upper()}{note[1:]}")
    if result.worst is not None and result.worst[0]:
        error, name = result.worst
        echo(f"Relative error of a weight: mean {result.mean:.4f}, largest {error:.4f}, {name}")
    echo(f"{result.architecture}: {tell_bytes(result.nbytes)}, {where}")
