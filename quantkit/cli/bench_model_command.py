"""``quantkit bench model``: one denoising step of a whole denoiser, packed and not."""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from quantkit.cli import options
from quantkit.cli.bench_tables import print_model_result
from quantkit.cli.command import Group
from quantkit.cli.console import print_json, progress_bar
from quantkit.cli.estimate_tables import print_estimate
from quantkit.storage.limits import MAX_COUNT, MAX_SIDE


@click.group("bench", cls=Group)
def bench() -> None:
    """Measure whole models; for single kernels see 'quantkit kernels bench'."""


@bench.command(
    "model",
    example="quantkit bench model --contenders f16-compiled --contenders fp8-static-replayed",
)
@click.option(
    "--config",
    default="sdxl",
    show_default=True,
    metavar="NAME|DIR",
    help="What to build, with random weights: a published denoiser (sdxl, flux, sd15, sd3, pixart, "
    "sana, flux2, chroma, qwenimage, zimage, wan, ltx), a directory's config.json, a hub id in the "
    "cache, or a denoiser class of diffusers.",
)
@click.option("--batch", type=options.COUNT, default=2, show_default=True, help="Latents.")
@click.option(
    "--size",
    type=click.IntRange(2, MAX_SIDE),
    default=128,
    show_default=True,
    help="Width and height of the latents; 128 is a picture of 1024.",
)
@click.option(
    "--contenders",
    multiple=True,
    metavar="NAME",
    help="Only this one; may be repeated. f16, torchao, torchao-int8, fp8, sparse (2:4 and FP8), "
    "int8 and w4a8 (int4 weights, int8 inputs), inputs per token; -static has calibrated scales, "
    "-linear leaves convolutions in 16 bit, -fast has fast sums, -replayed is launched as it was "
    "recorded, -compiled goes through torch.compile.",
)
@click.option(
    "--compile",
    "compile_blocks",
    callback=lambda _, __, value: value == "blocks",
    type=click.Choice(("whole", "blocks")),
    default="whole",
    show_default=True,
    help="blocks: each kind of block once, which compiles faster and fuses less.",
)
@click.option(
    "--graph",
    is_flag=True,
    help="Replay compiled contenders from a CUDA graph: no waiting for the host.",
)
@click.option(
    "--channels-last",
    is_flag=True,
    help="Keep pictures with channels last in memory, in every contender.",
)
@click.option(
    "--fuse-projections",
    is_flag=True,
    help="One product for queries, keys and values (fuse_qkv_projections), in every contender.",
)
@click.option(
    "--attention",
    callback=lambda _, __, value: tuple(dict.fromkeys(value)),
    type=click.Choice(("e4m3fn", "int8")),
    multiple=True,
    help="Each contender but torchao's also with attention on codes of this format, as "
    "NAME-int8-attention; may be repeated.",
)
@click.option(
    "--min-keys",
    type=options.COUNT,
    default=512,
    show_default=True,
    help="Attention over fewer keys stays torch's.",
)
@click.option(
    "--static-scales",
    is_flag=True,
    help="Attention's codes have static scales, from a step of the model itself, so that "
    "projections end in them; else those of each call.",
)
@options.device
@click.option(
    "--repeats",
    type=click.IntRange(5, MAX_COUNT),
    default=30,
    show_default=True,
    help="Rounds at most.",
)
@click.option(
    "--seconds",
    type=options.FiniteRange(min=0),
    default=20.0,
    show_default=True,
    help="For all rounds, at most; 5 rounds at least.",
)
@click.option(
    "--in-a-row",
    type=click.IntRange(2, MAX_COUNT),
    metavar="N",
    help="Also launch N steps one after another, as a pipeline does, and wait once: ms per step. "
    "Takes --seconds once more.",
)
@click.option(
    "--estimate",
    metavar="CARD",
    help="Measure nothing: say what a step should take on this card (gfx1201, gfx1101, sm_90 "
    "and so on, or a name as 'RX 9070'), and what bounds it.",
)
@click.option("--profile", is_flag=True, help="Say where the milliseconds go.")
@click.option(
    "--scratch",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Where to keep the files that are packed and loaded, for a while.",
)
@click.option("--save", type=options.PATH, help="Write the figures to this file.")
@options.force
@options.quiet
@options.as_json
def model_command(estimate: str | None, quiet: bool, as_json: bool, **given: Any) -> None:
    """Time one step of a denoiser in 16 bit, by torchao, and packed, in one run.

    Random weights are packed, saved and loaded as a user's are. Every output is checked first; exit
    code 1 when one is wrong.
    """
    from quantkit.workflow.bench import ModelBenchSettings, bench_model, estimate_model

    names = {field.name for field in fields(ModelBenchSettings)} & given.keys()
    settings = ModelBenchSettings(**{name: given.pop(name) for name in names})
    if estimate is not None:
        for name in ("device", "repeats", "seconds"):
            del given[name]
        with progress_bar(quiet=quiet) as progress:
            estimated = estimate_model(**given, card=estimate, settings=settings, progress=progress)
        if as_json:
            print_json(estimated.to_json())
        else:
            print_estimate(estimated)
        return
    with progress_bar(quiet=quiet) as progress:
        result = bench_model(**given, settings=settings, progress=progress)
    if as_json:
        print_json(result.to_json())
    else:
        print_model_result(result)
    if result.wrong:
        sys.exit(1)
