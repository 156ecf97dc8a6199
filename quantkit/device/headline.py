"""A headline on this machine: the GPU that runs quantkit's kernels, or why none does.

Also the formats that are fastest on its GPUs, by their names alone: nothing is compiled or run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.device.archs import arch_of_device
from quantkit.device.gpu.devices import device_name
from quantkit.errors import KernelError

#: What PCI calls AMD.
_AMD = "0x1002"
_CARDS = Path("/sys/class/drm")
_CURE = "install PyTorch for ROCm before quantkit (docs/guides/install.md)"


@dataclass(frozen=True)
class Headline:
    """One line, and whether it is good news."""

    text: str
    fine: bool


def headline(gpus: Sequence[Any]) -> Headline:
    """Return what runs quantkit's kernels on this machine, or why no GPU does.

    Args:
        gpus: those that torch sees, as ``survey.Gpu``.
    """
    for gpu in gpus:
        if not gpu.problem:
            return Headline(f"{gpu.device}: {gpu.name} runs quantkit's kernels", fine=True)
    if gpus:
        gpu = gpus[0]
        return Headline(f"{gpu.device}: {gpu.name} runs no kernels: {gpu.problem}", fine=False)
    return Headline(f"no GPU: {_why_none()}", fine=False)


def formats_here() -> tuple[str, ...]:
    """Return a line for each GPU that torch sees: its fastest formats, or why it has no kernels."""
    return tuple(_formats_of(index) for index in range(torch.cuda.device_count()))


def _formats_of(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    name = device_name(properties)
    try:
        told = arch_of_device(name).formats
    except KernelError as error:
        told = str(error)
    return f"cuda:{index}: {properties.name}, {name}: {told}"


def _why_none() -> str:
    built = _built_for()
    if has_amd_card() and torch.version.hip is None:
        return f"there is an AMD card, and torch {torch.__version__} is built for {built}; {_CURE}"
    if built == "CPUs alone":
        return f"torch {torch.__version__} is built for CPUs alone; kernels run on the CPU"
    return (
        f"torch {torch.__version__} is built for {built} and sees no card; kernels run on the CPU"
    )


def _built_for() -> str:
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return "CPUs alone" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def has_amd_card() -> bool:
    """Return whether Linux knows a card of AMD's; False elsewhere."""
    vendors = _CARDS.glob("card*/device/vendor")
    return any(path.read_text(encoding="ascii").strip() == _AMD for path in vendors)
