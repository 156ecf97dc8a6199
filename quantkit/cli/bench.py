"""``quantkit kernels bench``: kernels against libraries, shape by shape."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.bench_tables import print_comparison, print_result
from quantkit.cli.console import print_json, progress_bar
from quantkit.storage.limits import MAX_COUNT

if TYPE_CHECKING:
    from quantkit.bench.compare import Comparison
    from quantkit.bench.kernels import Operation
    from quantkit.bench.result import Baseline, BenchResult


@click.command("bench")
@click.option(
    "--op", "ops", multiple=True, metavar="OP", help="Only this operation; may be repeated."
)
@click.option(
    "--shapes",
    default="auto",
    show_default=True,
    metavar="sdxl|flux|other|all|host|FILE",
    help="M x N x K: a group, or a .json ([[m, n, k], ...]) or .csv (m,n,k) file; auto: all on a "
    "GPU, host on a CPU.",
)
@click.option(
    "--against",
    type=click.Choice(("torch", "none")),
    default="none",
    show_default=True,
    help="torch: run what torch, cuSPARSELt and torchao have, too.",
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
def bench(
    ops: tuple[str, ...],
    shapes: str,
    against: str,
    device: str,
    repeats: int,
    seconds: float,
    save_baseline: Path | None,
    baseline: Path | None,
    threshold: float,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Check and time the kernels, and say how near they come to what the device can do.

    Every result is compared with float64 first; a wrong one is not timed, and the exit code is 1.
    """
    from quantkit.bench.result import save_result
    from quantkit.storage.files import write_or_keep
    from quantkit.storage.places import check_file

    if save_baseline:
        check_file(save_baseline, force=force)
    result, comparison = bench_kernels(
        ops,
        shapes,
        device,
        against_torch=against == "torch",
        rounds=(repeats, seconds),
        against_baseline=(baseline, threshold),
        quiet=quiet,
    )
    if save_baseline:
        write_or_keep(partial(save_result, result, force=force), save_baseline)
    _print(result, comparison, as_json=as_json)
    if result.wrong or not result.complete or (comparison and comparison.regressions):
        sys.exit(1)


def bench_kernels(
    ops: tuple[str, ...],
    shapes: str,
    device: str,
    *,
    against_torch: bool,
    rounds: tuple[int, float],
    against_baseline: tuple[Path | None, float],
    quiet: bool,
) -> "tuple[BenchResult, Comparison | None]":
    """Measure, and compare when a baseline is given.

    Args:
        ops: names of operations; empty for all.
        shapes: a group, a file, or auto.
        device: auto, cpu or cuda[:N].
        against_torch: run the libraries' contenders too.
        rounds: repeats at most, and seconds at most.
        against_baseline: its file, or None, and the threshold.
        quiet: no progress.

    Raises:
        ArtefactError: shapes or a baseline that cannot be used.
    """
    from quantkit.bench.compare import compare
    from quantkit.bench.kernels import run_bench
    from quantkit.bench.shapes import find_shapes
    from quantkit.bench.timing import Plan
    from quantkit.pipelines.running import choose_device

    chosen, place = _operations(ops), choose_device(device)
    if shapes == "auto":
        shapes = "host" if place.type == "cpu" else "all"
    table, before = find_shapes(shapes), _baseline(against_baseline[0], place)
    plan = Plan(warmup=3, repeats=rounds[0], seconds=rounds[1])
    with progress_bar(quiet=quiet) as progress:
        result = run_bench(
            table, chosen, place, plan, against_torch=against_torch, progress=progress
        )
    return result, compare(result, before, against_baseline[1]) if before else None


def _baseline(path: Path | None, device: object) -> "Baseline | None":
    """Return the baseline, refused before anything is measured when it is of another device."""
    if path is None:
        return None
    import torch

    from quantkit.bench.compare import check_device
    from quantkit.bench.machine import describe_machine
    from quantkit.bench.result import load_baseline

    assert isinstance(device, torch.device)
    found, machine = load_baseline(path), describe_machine(device)
    check_device(found, machine.device, machine.architecture)
    return found


def _operations(names: tuple[str, ...]) -> "tuple[Operation, ...]":
    from quantkit.bench.kernels import OPERATIONS

    for name in names:
        if name not in OPERATIONS:
            raise click.BadParameter(
                f"{name!r} is unknown, wanted one of {', '.join(OPERATIONS)}", param_hint="--op"
            )
    return tuple(o for o in OPERATIONS.values() if not names or o.name in names)


def _print(result: "BenchResult", comparison: "Comparison | None", *, as_json: bool) -> None:
    from quantkit.bench.compare import to_json as comparison_json
    from quantkit.bench.result import to_json

    if as_json:
        values = to_json(result)
        print_json({**values, "comparison": comparison and comparison_json(comparison)})
        return
    print_result(result)
    if comparison:
        print_comparison(comparison)
