"""The choice of one operation for a module and the quantization of its output."""

from functools import lru_cache

import torch

from quantkit.device import choosing
from quantkit.device.archs import Arch
from quantkit.device.backends import Backend, forced, sums_are_fast
from quantkit.device.ops.table import find_op
from quantkit.fusion.trace import is_recording

#: Families of operations that a recorded step gets from patterns and row kernels.
_FUSED_LATER = frozenset({
    "layer_norm_codes", "sum_norm_codes", "gelu_codes", "project_gelu", "geglu", "gemm_residual",
})  # fmt: skip


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_kernel(op: str, device: str, k: int) -> bool:
    """Tell whether a GPU's kernel computes an operation; constant in compiled graphs.

    What is forced is asked for in here: Dynamo before torch 2.12 cannot trace a ContextVar.
    """
    if is_recording() and find_op(op).family in _FUSED_LATER:
        return False
    return _has_kernel(op, device, k, forced(), choosing.supposed())


@lru_cache(maxsize=1024)
def _has_kernel(op: str, device: str, k: int, asked: Backend | None, arch: Arch | None) -> bool:
    del asked, arch  # ``choose`` reads both by itself; here they are keys of the cache
    where = torch.device(device)
    return where.type == "cuda" and choosing.choose(op, where, k=k).backend is Backend.GPU


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def pays(op: str, device: str) -> bool:
    """Tell whether a product that writes codes pays; constant in compiled graphs."""
    return choosing.pays(op, torch.device(device), fast=sums_are_fast())
