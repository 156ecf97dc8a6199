"""Finding the compilers and tools of this machine. Nothing is compiled here."""

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from quantkit.errors import CompilerMissingError

#: The first clang that keeps matrix instructions out of masked branches (LLVM pull requests 165602,
#: 178314). GFX12 also needs the waits of device/hazards.py, which came with 20.
CLANG_MINIMUM = 22


@dataclass(frozen=True)
class Compiler:
    """A program that can be run, and what it says it is."""

    #: a list, since CXX may hold a wrapper and options ("ccache g++")
    command: tuple[str, ...]
    #: first line of ``--version``
    version: str


@lru_cache(maxsize=1)
def host_compiler() -> Compiler:
    """Return the system's C++ compiler: $CXX, else c++, g++, clang++.

    Raises:
        CompilerMissingError: there is none, or $CXX does not run.
    """
    chosen = os.environ.get("CXX", "").strip()
    candidates = [chosen] if chosen else ["c++", "g++", "clang++"]
    for candidate in candidates:
        if found := _probe(tuple(shlex.split(candidate))):
            return found
    what = f"CXX={chosen!r} does not run" if chosen else "none of c++, g++, clang++ is on PATH"
    raise CompilerMissingError(
        f"host kernels: {what}; install one (Debian: g++) or set CXX to a C++17 compiler"
    )


def clang(explicit: str | None = None) -> Compiler:
    """Return clang >= 22 for AMD targets: ``explicit``, else the first of these that is one.

    clang++-22 and newer, as Debian names them, clang++ and amdclang++ on PATH, and ROCm's own.

    Raises:
        CompilerMissingError: none is found, or what was named is older or no clang.
    """
    candidates = [explicit] if explicit else [*_numbered_clangs(), *_rocm_clangs()]
    seen = []
    for candidate in candidates:
        if found := _probe((candidate,)):
            if (_clang_major(found.version) or 0) >= CLANG_MINIMUM:
                return found
            seen.append(f"{candidate} is {found.version!r}")
        elif candidate in {explicit, "clang++", "amdclang++"}:
            seen.append(f"{candidate} does not run")
    raise CompilerMissingError(
        f"AMD targets: expected clang >= {CLANG_MINIMUM}, but {', '.join(seen)}; install clang-22 "
        "and lld-22 (Debian's names) or ROCm 7.2, or give a compiler's path",
        fields=("compiler",),
    )


def objdump(compiler: Compiler | None = None) -> str:
    """Return llvm-objdump, preferring the one beside ``compiler``.

    Raises:
        CompilerMissingError: there is none.
    """
    beside = []
    if compiler and (path := shutil.which(compiler.command[0])):
        beside = [str(Path(path).resolve().parent / "llvm-objdump")]
    for name in (*beside, *_numbered("llvm-objdump"), "llvm-objdump"):
        if path := shutil.which(name):
            return path
    raise CompilerMissingError(
        "kernels check: llvm-objdump is not on PATH; install llvm-22 (Debian's name)"
    )


@lru_cache(maxsize=1)
def cpu_identity() -> str:
    """Return what -march=native depends on: the machine and its instruction set flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    # One core stands for all: a kernel mask that differs between cores would break native anyway.
    expected = ("flags", "Features", "model name", "CPU part", "cpu family", "model\t")
    first = {line.partition(":")[0]: line for line in reversed(lines) if line.startswith(expected)}
    return "\n".join((platform.machine(), platform.processor(), *sorted(first.values())))


def _probe(command: tuple[str, ...]) -> Compiler | None:
    if not command or shutil.which(command[0]) is None:
        return None
    try:
        result = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if result.returncode:
        return None
    return Compiler(command, next(iter(result.stdout.splitlines()), ""))


def _numbered_clangs() -> list[str]:
    return [*_numbered("clang++"), "clang++"]


def _rocm_clangs() -> list[str]:
    roots = [os.environ.get("ROCM_PATH", "").strip(), "/opt/rocm", *_wheel_roots()]
    places = (str(Path(root) / "lib" / "llvm" / "bin" / "amdclang++") for root in roots if root)
    return ["amdclang++", *places]


def _wheel_roots() -> list[str]:
    """Return where AMD's Python wheels have ROCm; importing them would search for cards."""
    spec = importlib.util.find_spec("_rocm_sdk_core")
    return list((spec and spec.submodule_search_locations) or ())


def _numbered(program: str) -> list[str]:
    # Debian and Ubuntu name them by major version; 40 is years ahead of the newest.
    return [f"{program}-{major}" for major in range(CLANG_MINIMUM, 41)]


def _clang_major(version: str) -> int | None:
    match = re.search(r"clang version (\d+)", version)
    return int(match.group(1)) if match else None
