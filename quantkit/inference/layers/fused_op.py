"""The choice of one operation for a module and the quantization of its output."""

from functools import lru_cache

import torch

from quantkit.device import choosing
from quantkit.device.archs import Arch
from quantkit.device.backends import Backend, forced


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_kernel(op: str, device: str, k: int) -> bool:
    """Tell whether a GPU's kernel computes an operation; constant in compiled graphs.

    What is forced is asked for in here: Dynamo before torch 2.12 cannot trace a ContextVar.
    """
    return _has_kernel(op, device, k, forced(), choosing.supposed())


@lru_cache(maxsize=1024)
def _has_kernel(op: str, device: str, k: int, asked: Backend | None, arch: Arch | None) -> bool:
    del asked, arch  # ``choose`` reads both by itself; here they are keys of the cache
    where = torch.device(device)
    return where.type == "cuda" and choosing.choose(op, where, k=k).backend is Backend.GPU
