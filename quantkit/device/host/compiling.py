"""Compiling for the CPU of this machine with the system's C++ compiler, once and into the cache."""

import ctypes
import subprocess
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from quantkit.device import cache
from quantkit.device.compilers import cpu_identity, host_compiler
from quantkit.errors import KernelError
from quantkit.resources import kernel_sources

_FLAGS: tuple[str, ...] = (
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


def base_command() -> list[str]:
    """Return the compiler with the options that everything for the host is compiled with.

    Raises:
        CompilerMissingError: no C++ compiler.
    """
    sources = kernel_sources()
    includes = ("-I", str(sources / "include"), "-I", str(sources / "host"))
    return [*host_compiler().command, *_FLAGS, *includes]


def built(name: str, command: Callable[[Path], list[str]]) -> Path:
    """Return the file ``name`` of the cache, compiled where the cache lacks it.

    Args:
        name: of the file.
        command: the path to write -> what to run.

    Raises:
        CompilerMissingError: no C++ compiler.
        KernelError: the compiler failed; the text holds its command and log.
    """
    target = _folder() / name
    if cache.read_whole(target) is not None:
        return target
    with cache.building(target) as stage:
        if stage:
            _run(command(stage), name)
    return target


def open_library(name: str, command: Callable[[Path], list[str]]) -> ctypes.CDLL:
    """Return a shared library of the cache, opened; arguments as of ``built``.

    Raises:
        CompilerMissingError: no C++ compiler.
        KernelError: the compiler failed, or what it made does not load.
    """
    path = built(name, command)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        # Copied from another machine: build it again rather than fail for ever.
        path.unlink(missing_ok=True)
    try:
        return ctypes.CDLL(str(built(name, command)))
    except OSError as error:
        # A compiler for C links no C++ library; peft's BOFT sets CXX=gcc and may leave it so.
        compiler = " ".join(host_compiler().command)
        raise KernelError(
            f"{name}: what {compiler!r} built does not load: {error}; set CXX to a C++ compiler"
        ) from error


@lru_cache(maxsize=1)
def _folder() -> Path:
    compiler = host_compiler()
    return cache.build_folder(*compiler.command, compiler.version, *_FLAGS, cpu_identity())


def _run(command: list[str], what: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise KernelError(
            f"{what}: the host compiler failed with status {result.returncode}\n"
            f"{' '.join(command)}\n{result.stderr.strip()}"
        )
