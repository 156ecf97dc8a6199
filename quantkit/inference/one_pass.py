"""Whether one operation takes the place of a module and of quantizing what it gives."""

from functools import lru_cache

import torch

from quantkit.device import choosing
from quantkit.device.archs import Arch
from quantkit.device.backends import Backend


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_kernel(op: str, device: str, k: int, asked: Backend | None) -> bool:
    """Tell whether a kernel runs; ``asked`` is what ``choose`` finds for itself."""
    return _has_kernel(op, device, k, asked, choosing.supposed())


@lru_cache(maxsize=1024)
def _has_kernel(op: str, device: str, k: int, asked: Backend | None, arch: Arch | None) -> bool:
    del asked, arch
    where = torch.device(device)
    return where.type == "cuda" and choosing.choose(op, where, k=k).backend is Backend.GPU


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def pays(op: str, device: str, *, fast: bool) -> bool:
    """Tell whether a product that ends in codes pays; constant in compiled graphs."""
    return choosing.pays(op, torch.device(device), fast=fast)
