"""Digests of what compilers make of the kernels: instructions and constants, no names or notes.

A table per target holds a share of the variants, chosen by name: see ``SHARES``.
"""

import gzip
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from quantkit.device.aot.elf import read_sections
from quantkit.device.aot.object_build import build
from quantkit.device.archs import ARCHS, Toolchain
from quantkit.device.compilers import clang
from quantkit.device.gpu import nvrtc
from quantkit.device.hopper.hopper_attention import HopperAttention
from quantkit.device.hopper.hopper_gemm import ARCHITECTURE, HopperKernel
from quantkit.device.ops.op import Variant, all_variants
from quantkit.device.ops.table import OPS, default_variants
from quantkit.device.tile_choice import variants_for
from quantkit.storage.system import cores
from tests.device import (
    test_hopper,
    test_hopper_attention,
    test_hopper_conv,
    test_hopper_gated,
    test_hopper_projections,
)
from tests.golden.table import HERE, Table, differences
from tests.support.hopper_cases import compile_kernel

Kernel: TypeAlias = Variant | HopperKernel | HopperAttention

#: Of the variants that an inference program needs, and of all others: one of how many. Targets
#: share their sources, and gfx1200 has the instructions of gfx1201.
SHARES = {
    "gfx1201": (1, 16),
    "gfx1200": (16, 256),
    "gfx1100": (8, 64),
    "sm_89": (8, 64),
    ARCHITECTURE: (4, 4),
}
TARGETS = tuple(SHARES)
#: Bytes of AMD's kernel descriptor that say how far away the code is, which names in the file move.
_ENTRY = slice(16, 24)


def listed(target: str) -> dict[str, Kernel]:
    """Return the variants that the table of a target holds, by name."""
    of_usual, of_others = SHARES[target]
    usual = {variant.symbol for variant in default_variants()}
    return {
        kernel.symbol: kernel
        for kernel in _all_of(target)
        if _is_drawn(kernel.symbol, of_usual if kernel.symbol in usual else of_others)
    }


def _all_of(target: str) -> Sequence[Kernel]:
    if target == ARCHITECTURE:
        modules = (test_hopper, test_hopper_conv, test_hopper_gated, test_hopper_projections)
        return [*(k for module in modules for k in module.KERNELS), *test_hopper_attention.EVERY]
    every = tuple(variant for op in OPS.values() for variant in all_variants(op))
    return variants_for(ARCHS[target], every)


def compiler_of(target: str) -> str:
    """Return the version of what compiles for a target here.

    Raises:
        CompilerMissingError: there is none.
    """
    if ARCHS[target].toolchain is Toolchain.CLANG:
        return clang().version
    return f"NVRTC {nvrtc.load_nvrtc().version}"


def digests(target: str, kernels: Iterable[Kernel]) -> Iterator[tuple[str, str]]:
    """Compile variants, and yield their names and the digests of what came of them."""
    with ThreadPoolExecutor(max_workers=cores()) as pool:
        yield from pool.map(lambda k: (k.symbol, digest_of_object(_object(target, k))), kernels)


def _object(target: str, kernel: Kernel) -> bytes:
    if not isinstance(kernel, Variant):
        return compile_kernel(kernel)
    with tempfile.TemporaryDirectory() as folder:
        (built,) = build(target, Path(folder) / "objects", [kernel]).kernels
        return (Path(folder) / "objects" / built.file).read_bytes()


def digest_of_object(content: bytes) -> str:
    """Return 16 hex digits over the instructions and constants of an object.

    Args:
        content: an AMD code object or a cubin.
    """
    total = hashlib.sha256()
    for section in read_sections(content):
        kind = section.name.split(".")[1:2]
        if kind == ["rodata"]:
            total.update(_without_entry(section.content))
        elif kind == ["text"] or section.name.startswith(".nv.constant"):
            total.update(section.content)
    return total.hexdigest()[:16]


def _without_entry(descriptor: bytes) -> bytes:
    return descriptor[: _ENTRY.start] + descriptor[_ENTRY.stop :]


def path_of(target: str) -> Path:
    """Return where the table of a target is."""
    return HERE / f"text_{target}.json.gz"


def renew(target: str) -> str:
    """Return the command that writes the table of a target."""
    return f"python -m tests.golden kernels {target}"


def read(target: str) -> Table:
    """Return the table of a target."""
    return Table(**json.loads(gzip.decompress(path_of(target).read_bytes())))


def write(target: str, *, add: bool = False) -> None:
    """Compile what the table of a target holds, minutes of work, and write it.

    Args:
        target: of ``TARGETS``.
        add: keep the rows that are there; the table is written as it grows.
    """
    here = {"compiler": compiler_of(target)}
    rows = dict(read(target).rows) if add else {}
    assert not rows or read(target).made_with == here
    new = [kernel for symbol, kernel in listed(target).items() if symbol not in rows]
    for done, (symbol, digest) in enumerate(digests(target, new), 1):
        rows[symbol] = digest
        sys.stderr.write(f"\r{target}: {done} of {len(new)} ")
        if done % 100 == 0 or done == len(new):
            _store(target, Table(here, rows))
    sys.stderr.write("\n")


def changed(target: str, names: Iterable[str]) -> str:
    """Return which rows of a target's table changed, of variants by name; empty: none."""
    rows = read(target).rows
    known = {kernel.symbol: kernel for kernel in _all_of(target)}
    found = dict(digests(target, [known[name] for name in names if name in known]))
    return differences({name: rows[name] for name in names}, found, renew(target))


def _store(target: str, table: Table) -> None:
    ordered = {"made_with": table.made_with, "rows": dict(sorted(table.rows.items()))}
    text = json.dumps(ordered, indent=0)
    path_of(target).write_bytes(gzip.compress(text.encode(), mtime=0))


def _is_drawn(symbol: str, one_of: int) -> bool:
    """Return whether a variant is in the sample, whatever others there are."""
    return hashlib.sha256(symbol.encode()).digest()[0] % one_of == 0
