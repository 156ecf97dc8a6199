"""``quantkit kernels``: the operations, their binaries, and the gates on them."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.command import Group
from quantkit.cli.console import echo, print_json, print_table, progress_bar
from quantkit.cli.kernel_tables import print_reports

if TYPE_CHECKING:
    from quantkit.device.aot.manifest import Manifest

_TARGETS = "gfx1201|gfx11-generic|sm_89|..."

only = click.option(
    "--op", "ops", multiple=True, metavar="OP", help="Only this operation; may be repeated."
)
every = click.option(
    "--all",
    "every",
    is_flag=True,
    help="Every combination of formats, scales, types and tiles, instead of e4m3fn in 16 bit.",
)


def _program(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value is not None and shutil.which(value) is None:
        raise click.BadParameter(f"{value!r:.80} is no program that runs.")
    return value


compiler = click.option(
    "--compiler",
    metavar="PATH",
    callback=_program,
    help="clang >= 22 for AMD targets; default: clang++-22 or newer on PATH, or ROCm's amdclang++.",
)


@click.group("kernels", cls=Group)
def kernels() -> None:
    """List, build and check the kernels."""


@kernels.command("list", example="quantkit kernels list")
@options.as_json
def list_command(as_json: bool) -> None:
    """List the operations, what each computes, and the targets."""
    from quantkit.workflow.kernels import list_kernels

    found = list_kernels()
    if as_json:
        print_json(found.to_json())
        return
    rows = [(op.name, found.variants(op), op.k_multiple, op.formula) for op in found.operations]
    print_table("Operations", ("operation", "variants", "K multiple of", "computes"), rows)
    targets = [(a.name, a.toolchain.value, a.description) for a in found.targets]
    print_table("Targets", ("target", "compiled by", "what it is"), targets)


@kernels.command("build", example="quantkit kernels build --target gfx1201 -o kernels-gfx1201")
@click.option("--target", required=True, metavar=_TARGETS, help="What to compile for.")
@options.output
@every
@only
@compiler
@options.force
@options.dry_run
@options.quiet
@options.as_json
def build_command(quiet: bool, as_json: bool, **given: Any) -> None:
    """Compile kernels ahead of time: linked code objects and manifest.json.

    The manifest tells any program how to launch them. No GPU is needed: AMD targets take clang 22
    or newer, sm_89 takes the NVRTC that torch brings along.
    """
    from quantkit.workflow.kernels import build_kernels

    with progress_bar(quiet=quiet) as progress:
        made: Any = build_kernels(**given, progress=progress)
    if given["dry_run"]:
        _print_plan(given["target"], given["output"], made, as_json=as_json)
    else:
        _print_manifest(made, given["output"], as_json=as_json)


@kernels.command("check", example="quantkit kernels check --target gfx1201 --op gemm_fp8")
@click.argument("folder", metavar="[DIR]", required=False, type=options.PATH)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar=_TARGETS,
    help="Build for this target in a temporary folder and check that; may be repeated.",
)
@every
@only
@compiler
@click.option("--bounds", is_flag=True, help="Show what issue allows, and the counts behind it.")
@options.quiet
@options.as_json
def check_command(
    folder: Path | None,
    targets: tuple[str, ...],
    bounds: bool,
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Fail on spills, on too much LDS, on matrix instructions that are missing or masked, on waits.

    Reads the objects themselves: a folder that 'kernels build' wrote, or a fresh build. For AMD
    targets it says which share of the matrix peak a kernel is expected to reach.
    Exit code 1 when an object has a problem.
    """
    from quantkit.workflow.kernels import check_kernels, check_target

    if (folder is None) == (not targets):
        raise click.UsageError("expected either DIR or --target")
    reports = [check_kernels(folder)] if folder else []
    for target in targets:
        with progress_bar(quiet=quiet) as progress:
            reports.append(check_target(target, **given, progress=progress))
    print_reports(reports, bounds=bounds, as_json=as_json)
    if not all(report.passed for report in reports):
        sys.exit(1)


def _print_plan(target: str, output: Path, names: tuple[str, ...], *, as_json: bool) -> None:
    if as_json:
        print_json({"target": target, "output": str(output), "kernels": names})
    else:
        echo(f"would compile {len(names)} kernels for {target} into {output}:")
        echo(*names)


def _print_manifest(manifest: "Manifest", output: Path, *, as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        print_json(asdict(manifest))
    else:
        count = len(manifest.kernels)
        echo(f"{output}: {count} kernels for {manifest.target}, {manifest.compiler}")
