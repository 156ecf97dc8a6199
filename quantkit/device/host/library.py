"""The host target: compile a variant with the system's C++ compiler on first use, then call it."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from quantkit.device.archs import HOST_LAYOUTS
from quantkit.device.geometry import compile_expression
from quantkit.device.host.compiling import base_command, built, open_library
from quantkit.device.ops.op import Variant
from quantkit.errors import KernelError
from quantkit.resources import kernel_sources
from quantkit.storage.system import cores

_ERROR_SIZE = 512
# Arguments travel as 8-byte slots, and a 4-byte number is read from the slot's first half.
assert sys.byteorder == "little"


@dataclass(frozen=True)
class HostFunction:
    """A compiled kernel, ready to be called from any thread."""

    _function: Callable[..., int]

    def run(self, grid: Sequence[int], values: Sequence[int | None], threads: int) -> None:
        """Run the kernel to its end.

        Args:
            grid: blocks along x, y and z.
            values: the arguments in order, addresses (None is null) and numbers alike.
            threads: operating-system threads to spread the blocks over.

        Raises:
            KernelError: the kernel reported one (a divergent barrier, no memory).
        """
        count, blocks = len(values), (ctypes.c_uint * 3)(*grid)
        slots = (ctypes.c_void_p * count)(*values)
        base = ctypes.addressof(slots)
        pointers = (ctypes.c_void_p * count)(*range(base, base + 8 * count, 8))
        error = ctypes.create_string_buffer(_ERROR_SIZE)
        if self._function(blocks, pointers, threads, error, _ERROR_SIZE):
            raise KernelError(error.value.decode(errors="replace"))


@dataclass(frozen=True)
class HostKernel:
    """A compiled variant."""

    variant: Variant
    _function: HostFunction
    _grid: Callable[[int, int, int], Sequence[int]]

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
        self._function.run(self._grid(m, n, k), values, threads)


def load(variant: Variant, layout: str = "gfx12") -> HostKernel:
    """Return the compiled variant, compiling it when the cache has none.

    Args:
        layout: whose fragments the matrix instruction has, one of HOST_LAYOUTS.

    Raises:
        CompilerMissingError: no C++ compiler.
        KernelError: the compiler failed; the text holds its command and log.
    """
    return _load(variant.symbol, variant, layout)


@lru_cache(maxsize=512)
def load_generated(symbol: str, text: str) -> HostFunction:
    """Return a kernel whose text was generated, compiled when the cache has none.

    Raises:
        CompilerMissingError: no C++ compiler.
        KernelError: the compiler failed; the text holds its command and log.
    """

    def command(stage: Path) -> list[str]:
        source = stage.with_suffix(".cpp")
        source.write_text(text, encoding="utf-8")
        runtime = ("-x", "none", str(_runtime_object()))
        return [*base_command(), "-shared", "-o", str(stage), str(source), *runtime]

    return _function_of(open_library(f"{symbol}.so", command), symbol)


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
        *base_command(),
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
    name = f"{variant.symbol}.{layout}.so"
    library = open_library(name, partial(compile_command, variant, layout))
    return HostKernel(variant, _function_of(library, symbol), _grid_function(variant))


def _function_of(library: ctypes.CDLL, symbol: str) -> HostFunction:
    function = getattr(library, f"{symbol}_launch")
    function.restype = ctypes.c_int
    function.argtypes = (
        ctypes.POINTER(ctypes.c_uint),
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
    )
    return HostFunction(function)


def _grid_function(variant: Variant) -> Callable[[int, int, int], Sequence[int]]:
    axes = [compile_expression(text) for text in variant.geometry.grid]

    @lru_cache(maxsize=1024)
    def grid(m: int, n: int, k: int) -> Sequence[int]:
        names = {"m": m, "n": n, "k": k}
        return tuple(axis(names) for axis in axes)

    return grid


def _library(variant: Variant, layout: str) -> Path:
    return built(f"{variant.symbol}.{layout}.so", partial(compile_command, variant, layout))


@lru_cache(maxsize=1)
def _runtime_object() -> Path:
    """Build the fibers and the block loop once: their standard headers cost more than a kernel."""
    source = str(kernel_sources() / "host" / "runtime.cpp")
    return built("runtime.o", lambda stage: [*base_command(), "-c", "-o", str(stage), source])
