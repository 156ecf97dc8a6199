"""A survey of this machine: devices, compilers, and the backend of each operation."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit.device import cache
from quantkit.device.backends import Backend, is_free
from quantkit.device.choosing import Choice, choose
from quantkit.device.compilers import clang, host_compiler, objdump
from quantkit.device.gpu.devices import Device, device_name
from quantkit.device.gpu.kernel_choice import why_not_hopper
from quantkit.device.gpu.nvrtc import load_nvrtc
from quantkit.device.gpu.objects import cache_folder, object_folders
from quantkit.device.gpu.selftest import state_of
from quantkit.device.headline import Headline, headline
from quantkit.device.hopper import hopper_gemm as hopper
from quantkit.device.ops.table import OPS, find_op
from quantkit.errors import KernelError
from quantkit.storage.system import cores


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
    """The backend of an operation on this machine."""

    op: str
    device: str
    choice: Choice

    @property
    def backend(self) -> str:
        """The backend's name: attention without a kernel is torch's, in 16 bit."""
        no_kernel = self.choice.backend is Backend.REFERENCE
        is_attention = find_op(self.op).family.startswith("attention")
        return "torch" if no_kernel and is_attention and is_free() else self.choice.backend.value


@dataclass(frozen=True)
class Gpu:
    """A GPU, and whether kernels run on it."""

    device: str
    name: str
    #: gcnArchName, or sm_ and the compute capability
    architecture: str
    memory_gib: float
    #: row of ARCHS whose kernels run on it; empty when none does
    kernels: str
    #: the fastest formats, and what stays in 16 bit; empty when no kernels run
    formats: str
    #: driver and run-time compiler
    driver: str
    compiler: str
    #: seconds of the self-test, compiling included
    self_test_seconds: float
    #: objects of this GPU in the cache, and its folder; prebuilt folders, and why they do not match
    cached_objects: int
    cache: str
    prebuilt: tuple[str, ...]
    #: why no kernel runs on it; empty when they do
    problem: str


@dataclass(frozen=True)
class Survey:
    """The whole answer."""

    #: which GPU runs quantkit's kernels, or why none does
    headline: Headline
    torch_version: str
    devices: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    tools: tuple[Tool, ...]
    cache: Path
    cache_bytes: int
    #: bytes of builds beyond which the cache deletes the oldest
    cache_limit: int
    operations: tuple[OpChoice, ...]


def survey() -> Survey:
    """Look at the machine; compiles the host runtime and tests the GPUs if that was never done."""
    gpus = tuple(_describe_gpu(index) for index in range(torch.cuda.device_count()))
    kinds = ("cpu", *(gpu.device for gpu in gpus))
    folder = cache.cache_directory()
    return Survey(
        headline=headline(gpus),
        torch_version=torch.__version__,
        devices=(_describe_cpu(),),
        gpus=gpus,
        tools=_tools(),
        cache=folder,
        cache_bytes=cache.folder_bytes(folder),
        cache_limit=cache.cache_limit(),
        operations=tuple(_choose(op, kind) for kind in kinds for op in OPS),
    )


def _choose(op: str, kind: str) -> OpChoice:
    # Any K that every operation takes: the question is about the machine, not about a layer.
    return OpChoice(op, kind, choose(op, torch.device(kind), k=32))


def _describe_cpu() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu: {cores()} cores, {torch.get_num_threads()} torch threads, {capability}"


def _describe_gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    state = state_of(index)
    device = state.device
    found = _Objects("", "", "", 0, "", ()) if device is None else _objects_of(device)
    return Gpu(
        device=f"cuda:{index}",
        name=properties.name,
        architecture=device_name(properties),
        memory_gib=round(properties.total_memory / 2**30, 1),
        kernels=found.kernels,
        formats=device.arch.formats if device and not state.problem else "",
        driver=found.driver,
        compiler=found.compiler,
        self_test_seconds=state.seconds,
        cached_objects=found.cached,
        cache=found.cache,
        prebuilt=found.prebuilt,
        problem=state.problem,
    )


@dataclass(frozen=True)
class _Objects:
    """The source of a GPU's kernels."""

    kernels: str
    driver: str
    compiler: str
    cached: int
    cache: str
    prebuilt: tuple[str, ...]


def _objects_of(device: Device) -> _Objects:
    driver, target = device.driver, device.target
    prebuilt = tuple(
        folder.problem or f"{folder.path}: {len(folder.kernels)} kernels"
        for folder in object_folders(target)
    )
    kernels = _kernels_of(device)
    driver_text = f"{driver.name} {driver.version}: {driver.path}"
    if isinstance(driver.compiler, str):
        return _Objects(kernels, driver_text, driver.compiler, 0, "", prebuilt)
    compiler = f"{driver.compiler.name} {driver.compiler.version}: {driver.compiler.path}"
    folder = cache_folder(driver, target)
    cached = sum(1 for _ in folder.glob(f"*.{driver.suffix}"))
    return _Objects(kernels, driver_text, compiler, cached, str(folder), prebuilt)


def _kernels_of(device: Device) -> str:
    if device.arch.name != hopper.ARCHITECTURE:
        return f"{device.arch.name} policy, compiled for {device.target}"
    if why := why_not_hopper(device):
        return f"sm_89 policy (mma.sync), compiled for {device.target}: {why}"
    return f"wgmma and wgmma.sp, compiled for {device.target}"


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
        _find("clang >= 22", "kernels build for AMD", amd),
        _find("llvm-objdump", "kernels check for AMD", objdump),
        _find("NVRTC", "kernels on NVIDIA, kernels build for sm_89", nvidia),
    )


def _find(name: str, needed_for: str, find: Callable[[], str]) -> Tool:
    try:
        return Tool(name, needed_for, find(), "")
    except KernelError as error:
        return Tool(name, needed_for, "", str(error))
