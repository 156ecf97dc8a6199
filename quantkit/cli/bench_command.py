"""``quantkit kernels bench``: kernels against libraries, shape by shape."""

import sys
from typing import Any

import click

from quantkit.cli import options
from quantkit.cli.bench_tables import print_comparison, print_result
from quantkit.cli.command import Command
from quantkit.cli.console import print_json, progress_bar
from quantkit.storage.limits import MAX_COUNT


@click.command(
    "bench",
    cls=Command,
    example="quantkit kernels bench --op gemm_fp8 --shapes sdxl --against torch",
)
@click.option(
    "--op", "ops", multiple=True, metavar="OP", help="Only this operation; may be repeated."
)
@click.option(
    "--shapes",
    default="auto",
    show_default=True,
    metavar="sdxl|flux|sd15|sd3|other|all|host|FILE",
    help="A group, or a .json ([[m, n, k], ...]) or .csv (m,n,k) file, of attention batch, heads, "
    "queries, keys, head_size instead; auto: all on a GPU, host on a CPU.",
)
@click.option(
    "--against",
    "against_torch",
    callback=lambda _, __, value: value == "torch",
    type=click.Choice(("torch", "none")),
    default="none",
    show_default=True,
    help="torch: run what torch, cuSPARSELt, torchao, SageAttention and cuDNN have, too.",
)
@options.device
@click.option(
    "--repeats",
    type=click.IntRange(5, MAX_COUNT),
    default=100,
    show_default=True,
    help="Rounds at most.",
)
@click.option(
    "--seconds",
    type=options.FiniteRange(min=0),
    default=1.0,
    show_default=True,
    help="For the rounds of one operation on one shape, at most; 5 rounds at least.",
)
@click.option("--save-baseline", type=options.PATH, help="Write the figures to this file.")
@click.option(
    "--compare",
    "baseline",
    type=options.PATH,
    help="Compare with such a file, of the same device.",
)
@click.option(
    "--threshold",
    type=options.FiniteRange(min=1),
    default=1.10,
    show_default=True,
    help="Exit with 1 when a median of quantkit is more than this many times the baseline's.",
)
@options.force
@options.quiet
@options.as_json
def bench(quiet: bool, as_json: bool, **given: Any) -> None:
    """Check and time the kernels, and say how near they come to what the device can do.

    Every result is compared with its reference first. A wrong one is not timed; exit code 1.
    """
    from quantkit.workflow.bench import bench_kernels

    with progress_bar(quiet=quiet) as progress:
        found = bench_kernels(**given, progress=progress)
    if as_json:
        print_json(found.to_json())
    else:
        print_result(found.result)
        if found.comparison:
            print_comparison(found.comparison)
    if not found.passed:
        sys.exit(1)
