"""Listing kernels, building them ahead of time, and the gates on builds."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.device.aot.check import Report, check_folder
from quantkit.device.aot.manifest import Manifest
from quantkit.device.aot.object_build import build
from quantkit.device.archs import ARCHS, Arch, find_arch
from quantkit.device.ops.op import Op, Variant, all_variants
from quantkit.device.ops.table import OPS, default_variants
from quantkit.device.tile_choice import variants_for
from quantkit.errors import InputError
from quantkit.progress import Progress, silent
from quantkit.recipe.load import did_you_mean

#: Names that a message lists.
_FEW = 24


@dataclass(frozen=True)
class KernelList:
    """The operations and the targets."""

    operations: tuple[Op, ...]
    targets: tuple[Arch, ...]

    def variants(self, op: Op) -> int:
        """Return how many combinations of formats, scales and types an operation has."""
        return sum(1 for _ in all_variants(op))

    def __repr__(self) -> str:
        """Return names."""
        ops, targets = (
            ", ".join(x.name for x in group) for group in (self.operations, self.targets)
        )
        return f"operations: {ops}\ntargets: {targets}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        operations = [
            {
                "name": op.name,
                "source": op.source,
                "formula": op.formula,
                "k_multiple": op.k_multiple,
                "axes": {axis.macro: list(axis.words) for axis in op.axes},
                "args": [argument.name for argument in op.args],
            }
            for op in self.operations
        ]
        return {"operations": operations, "targets": [arch.name for arch in self.targets]}


def list_kernels() -> KernelList:
    """Return the operations, what each computes, and the targets."""
    return KernelList(tuple(OPS.values()), tuple(ARCHS.values()))


def build_kernels(
    target: str,
    *,
    output: str | Path,
    ops: Sequence[str] = (),
    every: bool = False,
    compiler: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress = silent,
) -> Manifest | Any:
    """Compile kernels ahead of time: linked code objects and manifest.json.

    Args:
        target: as gfx1201, or gfx12-generic for all RDNA4 cards. No GPU is needed.
        output: the folder to make.
        ops: only these operations; empty: all.
        every: every combination of formats, scales, types and tiles, instead of e4m3fn in 16 bit.
        compiler: path of clang for AMD targets; None: the newest on PATH.
        force: replace an existing folder.
        dry_run: compile nothing, and return the kernels' names.
        progress: told of kernels done.

    Returns:
        how any program launches them.

    Raises:
        CompilerMissingError: no compiler for the target.
        InputError: an unknown target or operation, or an output that exists.
        KernelError: a kernel that does not compile.
    """
    variants = _select(target, ops, every=every)
    if dry_run:
        return tuple(variant.symbol for variant in variants)
    return build(target, Path(output), variants, compiler=compiler, force=force, progress=progress)


def check_kernels(folder: str | Path) -> Report:
    """Look for spills, too much LDS and missing matrix instructions in the objects themselves.

    Args:
        folder: what ``build_kernels`` wrote.

    Returns:
        every object's figures; ``passed`` says whether all gates hold.

    Raises:
        InputError: no such folder, or not what was built.
    """
    return check_folder(Path(folder))


def check_target(
    target: str,
    *,
    ops: Sequence[str] = (),
    every: bool = False,
    compiler: str | None = None,
    progress: Progress = silent,
) -> Report:
    """Build for a target in a temporary folder, and check that as ``check_kernels`` does.

    Args:
        target: as gfx1200.
        ops: only these operations; empty: all.
        every: every combination of formats, scales, types and tiles.
        compiler: path of clang for AMD targets; None: the newest on PATH.
        progress: told of kernels done.

    Returns:
        every object's figures.

    Raises:
        CompilerMissingError: no compiler for the target.
        InputError: an unknown target or operation.
        KernelError: a kernel that does not compile.
    """
    with tempfile.TemporaryDirectory(prefix="quantkit-") as scratch:
        output = Path(scratch) / target
        build_kernels(
            target, output=output, ops=ops, every=every, compiler=compiler, progress=progress
        )
        return check_folder(output)


def refuse_unknown(field: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a name that is not in a table.

    Args:
        field: what messages call it.
        names: those that were given.
        known: those that there are.

    Raises:
        InputError: naming the first.
    """
    for name in names:
        if name not in known:
            more = f" or {len(known) - _FEW} more" if len(known) > _FEW else ""
            raise InputError(
                f"{field} {name!r} is unknown, expected one of {', '.join(known[:_FEW])}{more}"
                f"{did_you_mean(name, known)}",
                fields=(field,),
            )


def _select(target: str, ops: Sequence[str], *, every: bool) -> tuple[Variant, ...]:
    refuse_unknown("target", [target], [a.name for a in ARCHS.values() if a.ahead_of_time])
    refuse_unknown("op", ops, list(OPS))
    chosen = [v for op in OPS.values() for v in all_variants(op)] if every else default_variants()
    return tuple(v for v in variants_for(find_arch(target), chosen) if not ops or v.op.name in ops)
