"""Denoisers of the model benchmark with their attention on codes, and why one has none."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quantkit.bench.kernels.compiled_blocks import with_shared_weights
from quantkit.calibration.observing.attention_observer import listening, observed_modules
from quantkit.checkpoint.packed_attention import CHILD, HeadShape
from quantkit.device.archs import OneLaunch
from quantkit.device.backends import Backend
from quantkit.device.choosing import choose, least_keys, why_on_request
from quantkit.device.log import KernelLog
from quantkit.device.ops.table import name_for
from quantkit.inference.attention import coded_projections
from quantkit.inference.attention.coded_attention import attention
from quantkit.inference.layers import head_scales
from quantkit.models.attention_modules import AttentionCall, Heads
from quantkit.numerics.attention_factors import COLUMNS, measured_scales
from quantkit.numerics.attention_scales import SHAPES, AttentionScales
from quantkit.numerics.formats import E4M3FN

#: Attention that ends in 16 bit, and in codes.
_FAMILIES = ("attention", "attention_codes")


def with_attention(
    model: nn.Module,
    qk_format: str,
    min_keys: int,
    run: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Return a copy, its weights shared, whose attention is on codes.

    Args:
        model: packed or not.
        qk_format: of queries and keys.
        min_keys: attention over fewer stays torch's.
        run: computes a step, from which modules get static scales; None: scales of each call.
    """
    copied = with_shared_weights(model)
    found = {} if run is None else _measured(copied, run)
    head_scales.install(copied, {n: HeadShape(s.heads, s.head_size) for n, s in found.items()})
    for name, scales in found.items():
        child: Any = copied.get_submodule(f"{name}.{CHILD}")
        for part in SHAPES:
            child.fill(part, getattr(scales, part))
    attention(copied, qk=qk_format, min_keys=min_keys)
    coded_projections.install(copied)
    return copied


def _measured(model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, AttentionScales]:
    """Return the scales of what each attention module multiplies in a step."""
    found: dict[str, AttentionScales] = {}

    def tell(name: str, heads: Heads, _: AttentionCall) -> None:
        found[name] = measured_scales(*(t.transpose(0, 1).flatten(1, 2) for t in heads))

    with listening(observed_modules(model), tell):
        run(model)
    return found


def why_no_kernel(qk_format: str, device: torch.device, *, static_scales: bool = False) -> str:
    """Return why attention is torch's here, so that nothing is timed twice.

    Args:
        qk_format: empty: nothing was asked for.
        device: where the model runs.
        static_scales: codes may be made in one launch.
    """
    if not qk_format:
        return ""
    op = name_for("attention", qk_format)
    choice = choose(op, device, k=COLUMNS)
    no_kernel = choice.backend is Backend.REFERENCE
    static = static_scales and qk_format == E4M3FN.name
    pays = static and any(least_keys(device, launch, COLUMNS) is not None for launch in OneLaunch)
    reason = choice.reason if no_kernel else "" if pays else why_on_request(op, device)
    return f"attention is torch's: {reason}" if reason else ""


def why_not_used(qk_format: str, min_keys: int, seen: KernelLog) -> str:
    """Return why a step ran no kernel of attention though there is one; empty when it did.

    Args:
        qk_format: empty: nothing was asked for.
        min_keys: attention over fewer stays torch's.
        seen: the calls of a step.
    """
    ran = {op for op, _, _ in seen.calls}
    if not qk_format or any(name_for(family, qk_format) in ran for family in _FAMILIES):
        return ""
    return why_attention_is_torchs(min_keys)


def why_attention_is_torchs(min_keys: int) -> str:
    """Return why a step ran no kernel of attention though there is one."""
    return (
        f"attention is torch's: no processor had {min_keys} keys or more without a mask "
        "('quantkit doctor')"
    )
