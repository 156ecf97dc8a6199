"""What this machine has for quantkit: devices, compilers, and the back end of each operation."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit.device import cache
from quantkit.device.backends import Choice, choose
from quantkit.device.compilers import clang, host_compiler, objdump
from quantkit.device.nvrtc import load_nvrtc
from quantkit.device.ops import OPS
from quantkit.errors import KernelError


@dataclass(frozen=True)
class Tool:
    """A program or library that something needs."""

    name: str
    needed_for: str
    #: what was found; empty when missing
    found: str
    #: why it is missing and what to do; empty when found
    problem: str


@dataclass(frozen=True)
class OpChoice:
    """Where an operation would run."""

    op: str
    device: str
    choice: Choice


@dataclass(frozen=True)
class Survey:
    """The whole answer."""

    torch_version: str
    devices: tuple[str, ...]
    tools: tuple[Tool, ...]
    cache: Path
    cache_bytes: int
    operations: tuple[OpChoice, ...]


def survey() -> Survey:
    """Look at the machine; compiles the host runtime if that was never done."""
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    folder = cache.cache_directory()
    return Survey(
        torch_version=torch.__version__,
        devices=(_describe_cpu(), *_describe_gpus()),
        tools=_tools(),
        cache=folder,
        cache_bytes=sum(path.stat().st_size for path in folder.rglob("*.so")),
        operations=tuple(_choose(op, kind) for kind in kinds for op in OPS),
    )


def _choose(op: str, kind: str) -> OpChoice:
    # Any K that every operation takes: the question is about the machine, not about a layer.
    return OpChoice(op, kind, choose(op, torch.device(kind), k=32))


def _describe_cpu() -> str:
    cores = len(os.sched_getaffinity(0))
    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu: {cores} cores, {torch.get_num_threads()} torch threads, {capability}"


def _describe_gpus() -> tuple[str, ...]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        # gcnArchName, never the marketing name, says what an AMD card executes.
        arch = getattr(properties, "gcnArchName", "") or f"sm_{properties.major}{properties.minor}"
        gigabytes = properties.total_memory / 2**30
        found.append(f"cuda:{index}: {properties.name}, {arch}, {gigabytes:.0f} GiB")
    return tuple(found)


def _tools() -> tuple[Tool, ...]:
    def host() -> str:
        compiler = host_compiler()
        return f"{' '.join(compiler.command)}: {compiler.version}"

    def amd() -> str:
        compiler = clang()
        return f"{compiler.command[0]}: {compiler.version}"

    def nvidia() -> str:
        library = load_nvrtc()
        return f"NVRTC {library.version}: {library.path}"

    return (
        _find("C++ compiler", "host kernels", host),
        _find("clang >= 19", "kernels build for AMD", amd),
        _find("llvm-objdump", "kernels check for AMD", objdump),
        _find("NVRTC", "kernels build for sm_89", nvidia),
    )


def _find(name: str, needed_for: str, find: Callable[[], str]) -> Tool:
    try:
        return Tool(name, needed_for, find(), "")
    except KernelError as error:
        return Tool(name, needed_for, "", str(error))
