"""The machine of a measurement: device, driver, versions, clocks, kernels, commit."""

import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from quantkit import resources
from quantkit.device import cache
from quantkit.device.gpu.devices import device_name
from quantkit.device.gpu.selftest import state_of

_PACKAGES = ("quantkit", "torch", "triton", "torchao", "diffusers", "numpy")
_QUERY = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
#: Seconds that a program which only tells something may take.
_PATIENCE = 10


@dataclass(frozen=True)
class Machine:
    """Origin of figures. Only those of one ``device`` and ``architecture`` compare."""

    #: marketing name, or the CPU's
    device: str
    #: gcnArchName, sm_ and the compute capability, or the CPU's instruction set
    architecture: str
    #: row of ARCHS whose kernels run; empty when none does
    kernels: str
    #: of the GPU; empty for the CPU
    driver: str
    compiler: str
    #: why no kernel runs; empty when they do
    problem: str
    python: str
    #: package -> version, of those installed; cuda or hip among them
    versions: dict[str, str]
    #: SHA-256 over all kernel sources
    kernel_sources: str
    #: of quantkit's git checkout, with + when files differ from it; empty outside of one
    commit: str


def describe_machine(device: torch.device) -> Machine:
    """Return what is known of the machine and the device; tests the device when that is new."""
    common = (
        platform.python_version(),
        _versions(),
        cache.sources_digest(),
        _commit(resources.kernel_sources()),
    )
    if device.type != "cuda":
        return Machine(
            _cpu_name(), torch.backends.cpu.get_cpu_capability(), "host", "", "", "", *common
        )
    properties = torch.cuda.get_device_properties(device)
    state = state_of(device.index or 0)
    found = state.device
    driver = compiler = kernels = ""
    if found is not None:
        kernels = f"{found.arch.name}, compiled for {found.target}"
        driver = f"{found.driver.name} {found.driver.version}"
        compiler = (
            found.driver.compiler
            if isinstance(found.driver.compiler, str)
            else (f"{found.driver.compiler.name} {found.driver.compiler.version}")
        )
    name = device_name(properties)
    return Machine(properties.name, name, kernels, driver, compiler, state.problem, *common)


def read_clocks(device: torch.device) -> dict[str, str]:
    """Return driver, clocks in MHz, power limit in W and temperature now; empty where unknown.

    ``nvidia-smi`` says it for NVIDIA; for AMD torch asks amdsmi, when that is installed.
    """
    if device.type != "cuda":
        return {}
    if torch.version.hip:
        try:
            return {"clocks.sm": str(torch.cuda.clock_rate(device))}
        except (RuntimeError, ImportError, AttributeError):
            return {}
    # By the PCI address: nvidia-smi does not know CUDA_VISIBLE_DEVICES.
    found: Any = torch.cuda.get_device_properties(device)
    place = f"{found.pci_domain_id:08X}:{found.pci_bus_id:02X}:{found.pci_device_id:02X}.0"
    text = _output(
        "nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "-i", place
    )
    values = [value.strip() for value in text.split(",")]
    names = _QUERY.split(",")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def _versions() -> dict[str, str]:
    found = {name: text for name in _PACKAGES if (text := _version(name))}
    for name in ("cuda", "hip"):
        if value := getattr(torch.version, name, None):
            found[name] = value
    # The wheel's name lacks the build, as in 2.11.0+cu130.
    return {**found, "torch": torch.__version__}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit(folder: Path) -> str:
    """Return the commit of the checkout that ``folder`` is tracked in, else nothing."""
    head = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    tracked = _output("git", "-C", str(folder), "ls-files", "--", ".")
    if not head or not tracked:
        return ""
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return head + ("+" if changed else "")


def _output(*command: str) -> str:
    """Return what a program prints; nothing when it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
