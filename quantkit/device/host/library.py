"""The host target: compile a variant with the system's C++ compiler on first use, then call it."""

import ctypes
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from quantkit.device import cache
from quantkit.device.archs import HOST_LAYOUTS
from quantkit.device.compilers import Compiler, cpu_identity, host_compiler
from quantkit.device.geometry import compile_expression
from quantkit.device.ops.op import Variant
from quantkit.errors import KernelError
from quantkit.resources import kernel_sources
from quantkit.storage.system import cores

_FLAGS = (
    "-x",
    "c++",
    "-O3",
    "-std=c++17",
    "-march=native",
    "-ffp-contract=off",
    "-fPIC",
    "-pthread",
    "-DQK_HOST=1",
)
_ERROR_SIZE = 512
# Arguments travel as 8-byte slots, and a 4-byte number is read from the slot's first half.
assert sys.byteorder == "little"


@dataclass(frozen=True)
class HostKernel:
    """A compiled variant, ready to be called from any thread."""

    variant: Variant
    _function: Callable[..., int]
    _grid: Callable[[int, int, int], ctypes.Array[ctypes.c_uint]]

    def launch(self, values: Sequence[int | None], m: int, n: int, k: int, threads: int) -> None:
        """Run the kernel to its end.

        Args:
            values: the arguments in order, addresses (None is null) and numbers alike.
            m: tokens; with n and k it gives the grid.
            n: outputs; ignored by operations that have none.
            k: length of the reduction axis.
            threads: operating-system threads to spread the blocks over.

        Raises:
            KernelError: the kernel reported one (a divergent barrier, no memory).
        """
        count = len(values)
        slots = (ctypes.c_void_p * count)(*values)
        base = ctypes.addressof(slots)
        pointers = (ctypes.c_void_p * count)(*range(base, base + 8 * count, 8))
        error = ctypes.create_string_buffer(_ERROR_SIZE)
        if self._function(self._grid(m, n, k), pointers, threads, error, _ERROR_SIZE):
            raise KernelError(error.value.decode(errors="replace"))


def load(variant: Variant, layout: str = "gfx12") -> HostKernel:
    """Return the compiled variant, compiling it when the cache has none.

    Args:
        layout: whose fragments the matrix instruction has, one of HOST_LAYOUTS.

    Raises:
        CompilerMissingError: no C++ compiler.
        KernelError: the compiler failed; the text holds its command and log.
    """
    return _load(variant.symbol, variant, layout)


def prebuild(variants: Sequence[Variant], layout: str = "gfx12") -> None:
    """Compile what the cache lacks of ``variants``, as many at a time as there are cores.

    Raises:
        CompilerMissingError, KernelError: as ``load``.
    """
    _runtime_object()
    with ThreadPoolExecutor(max_workers=cores()) as pool:
        for _ in pool.map(lambda variant: _library(variant, layout), variants):
            pass


@lru_cache(maxsize=1)
def why_unavailable() -> str:
    """Return why this machine cannot compile host kernels; empty when it can.

    The proof is the runtime that every kernel links, compiled once and cached.
    """
    try:
        _runtime_object()
    except KernelError as error:
        return str(error)
    return ""


def compile_command(variant: Variant, layout: str, output: Path) -> list[str]:
    """Return the command that builds ``variant`` to a shared library at ``output``."""
    sources = kernel_sources()
    return [
        *_base_command(host_compiler()),
        "-shared",
        f"-DQK_HOST_LAYOUT={HOST_LAYOUTS.index(layout)}",
        *variant.defines,
        "-o",
        str(output),
        str(sources / variant.op.source),
        "-x",
        "none",
        str(_runtime_object()),
    ]


@lru_cache(maxsize=512)
def _load(symbol: str, variant: Variant, layout: str) -> HostKernel:
    path = _library(variant, layout)
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        # Copied from another machine: build it again rather than fail for ever.
        path.unlink(missing_ok=True)
        library = ctypes.CDLL(str(_library(variant, layout)))
    function = getattr(library, f"{symbol}_launch")
    function.restype = ctypes.c_int
    function.argtypes = (
        ctypes.POINTER(ctypes.c_uint),
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
    )
    return HostKernel(variant, function, _grid_function(variant))


def _grid_function(variant: Variant) -> Callable[[int, int, int], ctypes.Array[ctypes.c_uint]]:
    axes = [compile_expression(text) for text in variant.geometry.grid]

    @lru_cache(maxsize=1024)
    def grid(m: int, n: int, k: int) -> ctypes.Array[ctypes.c_uint]:
        names = {"m": m, "n": n, "k": k}
        return (ctypes.c_uint * 3)(*(axis(names) for axis in axes))

    return grid


def _library(variant: Variant, layout: str) -> Path:
    target = _folder() / f"{variant.symbol}.{layout}.so"
    if cache.read_whole(target) is not None:
        return target
    with cache.building(target) as stage:
        if stage:
            _run(compile_command(variant, layout, stage), variant.symbol)
    return target


@lru_cache(maxsize=1)
def _runtime_object() -> Path:
    """Build the fibers and the block loop once: their standard headers cost more than a kernel."""
    target = _folder() / "runtime.o"
    if cache.read_whole(target) is None:
        source = kernel_sources() / "host" / "runtime.cpp"
        with cache.building(target) as stage:
            if stage:
                command = [*_base_command(host_compiler()), "-c", "-o", str(stage), str(source)]
                _run(command, "host runtime")
    return target


@lru_cache(maxsize=1)
def _folder() -> Path:
    compiler = host_compiler()
    return cache.build_folder(*compiler.command, compiler.version, *_FLAGS, cpu_identity())


def _base_command(compiler: Compiler) -> list[str]:
    sources = kernel_sources()
    includes = ("-I", str(sources / "include"), "-I", str(sources / "host"))
    return [*compiler.command, *_FLAGS, *includes]


def _run(command: list[str], what: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise KernelError(
            f"{what}: the host compiler failed with status {result.returncode}\n"
            f"{' '.join(command)}\n{result.stderr.strip()}"
        )
