"""Denoisers of the model benchmark with their attention on codes, and why one has none."""

import torch
from torch import nn

from quantkit.bench.compiling import with_shared_weights
from quantkit.device.backends import Backend
from quantkit.device.choosing import choose, why_on_request
from quantkit.device.log import KernelLog
from quantkit.device.ops.table import name_for
from quantkit.inference.attention import attention
from quantkit.numerics.attention import COLUMNS


def with_attention(model: nn.Module, qk_format: str, min_keys: int) -> nn.Module:
    """Return a copy, its weights shared, whose attention is on codes.

    Args:
        model: packed or not.
        qk_format: of queries and keys.
        min_keys: attention over fewer stays torch's.
    """
    copied = with_shared_weights(model)
    attention(copied, qk=qk_format, min_keys=min_keys)
    return copied


def why_no_kernel(qk_format: str, device: torch.device) -> str:
    """Return why attention is torch's here, so that nothing is timed twice.

    Args:
        qk_format: empty: nothing was asked for.
        device: where the model runs.
    """
    if not qk_format:
        return ""
    op = name_for("attention", qk_format)
    choice = choose(op, device, k=COLUMNS)
    no_kernel = choice.backend is Backend.REFERENCE
    reason = choice.reason if no_kernel else why_on_request(op, device)
    return f"attention is torch's: {reason}" if reason else ""


def why_not_used(qk_format: str, min_keys: int, seen: KernelLog) -> str:
    """Return why a step ran no kernel of attention though there is one; empty when it did.

    Args:
        qk_format: empty: nothing was asked for.
        min_keys: attention over fewer stays torch's.
        seen: the calls of a step.
    """
    if not qk_format or any(op == name_for("attention", qk_format) for op, _, _ in seen.calls):
        return ""
    return (
        f"attention is torch's: no known processor had {min_keys} keys or more without a mask "
        "('quantkit doctor')"
    )
