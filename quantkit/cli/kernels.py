"""``quantkit kernels``: the operations, their binaries, and the gates on them."""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, print_table, progress_bar
from quantkit.cli.kernel_tables import print_reports

if TYPE_CHECKING:
    from quantkit.device.aot.check import Report
    from quantkit.device.aot.manifest import Manifest
    from quantkit.device.ops.table import Variant

_TARGETS = "gfx1200|gfx1201|gfx1100|sm_89"

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


@click.group("kernels")
def kernels() -> None:
    """List, build and check the kernels."""


@kernels.command("list")
@options.as_json
def list_command(as_json: bool) -> None:
    """List the operations, what each computes, and the targets."""
    list_kernels(as_json=as_json)


@kernels.command("build")
@click.option("--target", required=True, metavar=_TARGETS, help="What to compile for.")
@options.output
@every
@only
@compiler
@options.force
@options.dry_run
@options.quiet
@options.as_json
def build_command(
    target: str,
    output: Path,
    every: bool,
    ops: tuple[str, ...],
    compiler: str | None,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compile kernels ahead of time: linked code objects and manifest.json.

    The manifest tells any program how to launch them. No GPU is needed: AMD targets take clang 22
    or newer, sm_89 takes the NVRTC that torch brings along.
    """
    _known_target(target)
    variants = _select(target, every=every, ops=ops)
    if dry_run:
        names = [variant.symbol for variant in variants]
        _print_plan(target, output, names, as_json=as_json)
        return
    manifest = build_kernels(target, output, variants, compiler=compiler, force=force, quiet=quiet)
    _print_manifest(manifest, output, as_json=as_json)


@kernels.command("check")
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
@options.quiet
@options.as_json
def check_command(
    folder: Path | None,
    targets: tuple[str, ...],
    every: bool,
    ops: tuple[str, ...],
    compiler: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Fail on spills, on too much LDS, on matrix instructions that are missing or masked, on waits.

    Reads the objects themselves: a folder that 'kernels build' wrote, or a fresh build. For AMD
    targets it counts what the K loop issues, and says which share of the matrix peak that allows.
    Exit code 1 when an object has a problem.
    """
    if (folder is None) == (not targets):
        raise click.UsageError("wanted either DIR or --target")
    for target in targets:
        _known_target(target)
    reports = [check_kernels(folder)] if folder else []
    for target in targets:
        variants = _select(target, every=every, ops=ops)
        reports.append(check_target(target, variants, compiler=compiler, quiet=quiet))
    print_reports(reports, as_json=as_json)
    if not all(report.passed for report in reports):
        sys.exit(1)


def list_kernels(*, as_json: bool) -> None:
    """Print OPS and ARCHS."""
    from quantkit.device.archs import ARCHS
    from quantkit.device.ops.table import OPS, all_variants

    if as_json:
        print_json({"operations": [_op_json(op) for op in OPS.values()], "targets": list(ARCHS)})
        return
    rows = [
        (op.name, sum(1 for _ in all_variants(op)), op.k_multiple, op.formula)
        for op in OPS.values()
    ]
    print_table("Operations", ("operation", "variants", "K multiple of", "computes"), rows)
    targets = [(a.name, a.toolchain.value, a.description) for a in ARCHS.values()]
    print_table("Targets", ("target", "compiled by", "what it is"), targets)


def build_kernels(
    target: str,
    output: Path,
    variants: "tuple[Variant, ...]",
    *,
    compiler: str | None,
    force: bool,
    quiet: bool,
) -> "Manifest":
    """Build with a progress bar."""
    from quantkit.device.aot.build import build

    with progress_bar(quiet=quiet) as progress:
        return build(target, output, variants, compiler=compiler, force=force, progress=progress)


def check_kernels(folder: Path) -> "Report":
    """Check a folder."""
    from quantkit.device.aot.check import check_folder

    return check_folder(folder)


def check_target(
    target: str, variants: "tuple[Variant, ...]", *, compiler: str | None, quiet: bool
) -> "Report":
    """Build into a temporary folder and check that."""
    with tempfile.TemporaryDirectory(prefix="quantkit-") as scratch:
        output = Path(scratch) / target
        build_kernels(target, output, variants, compiler=compiler, force=False, quiet=quiet)
        return check_kernels(output)


def _known_target(target: str) -> None:
    from quantkit.device.archs import ARCHS

    known = [a.name for a in ARCHS.values() if a.ahead_of_time]
    if target not in known:
        raise click.BadParameter(
            f"{target!r} is unknown, wanted one of {', '.join(known)}", param_hint="--target"
        )


def _select(target: str, *, every: bool, ops: tuple[str, ...]) -> "tuple[Variant, ...]":
    from quantkit.device.archs import find_arch
    from quantkit.device.ops.table import OPS, all_variants, default_variants
    from quantkit.device.tiles import variants_for

    for name in ops:
        if name not in OPS:
            raise click.BadParameter(
                f"{name!r} is unknown, wanted one of {', '.join(OPS)}", param_hint="--op"
            )
    chosen = [v for op in OPS.values() for v in all_variants(op)] if every else default_variants()
    return tuple(v for v in variants_for(find_arch(target), chosen) if not ops or v.op.name in ops)


def _op_json(op: Any) -> dict[str, Any]:
    return {
        "name": op.name,
        "source": op.source,
        "formula": op.formula,
        "k_multiple": op.k_multiple,
        "axes": {axis.macro: list(axis.words) for axis in op.axes},
        "args": [argument.name for argument in op.args],
    }


def _print_plan(target: str, output: Path, names: list[str], *, as_json: bool) -> None:
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
