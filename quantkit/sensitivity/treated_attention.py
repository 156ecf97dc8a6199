"""Attention under a treatment in plain PyTorch, and what that changes, in a running pipeline."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.calibration.attention_observer import attending
from quantkit.device.ops.attention import attention
from quantkit.models.attention import Attend, AttentionCall, Heads
from quantkit.numerics.attention import attention_codes
from quantkit.numerics.attention_scales import AttentionScales
from quantkit.sensitivity.treatments import ATTENTION_TREATMENTS

#: Rows of q of every picture and call that errors are measured on: as many as calibration looks at.
_ROWS = 32


def rounded_attention(
    heads: Heads,
    scale: float | None,
    qk_format: str,
    scales: AttentionScales | None,
    rows: Tensor | None = None,
) -> Tensor:
    """Return attention as the kernels compute it.

    Args:
        heads: (B, H, N, D).
        scale: of q k'; None: 1 / sqrt(D).
        qk_format: e4m3fn or int8.
        scales: static ones; None: of these very numbers.
        rows: of q, those that are wanted; None: all. Scales are those of all.

    Returns:
        (B, H, rows, D) float32.
    """
    _, count, keys, columns = heads.k.shape
    codes = attention_codes(
        *(t.flatten(0, 1) for t in heads), scale=scale, qk_format=qk_format, scales=scales
    )
    q, q_scale = codes.q, codes.q_scale
    if rows is not None:
        q, q_scale = q[:, rows], None if q_scale is None else q_scale[:, rows]
    y = attention(
        q, codes.k, codes.v, q_scale, codes.k_scale, codes.v_scale, codes.v_mean,
        keys, count, columns, qk_format, torch.float32, q.shape[2],
    )  # fmt: skip
    return y.transpose(1, 2)


def rounding(
    denoiser: nn.Module,
    formats: Mapping[str, str],
    scales: Mapping[str, AttentionScales | None],
) -> AbstractContextManager[None]:
    """Return the context in which attention modules compute on codes, calls with a mask aside.

    Args:
        denoiser: the module that the pipeline calls.
        formats: of queries and keys, by module path.
        scales: static ones, or None, of these modules and maybe others.
    """

    def attend(module: str, heads: Heads, call: AttentionCall) -> Tensor:
        y = rounded_attention(heads, call.scale, formats[module], scales[module])
        return y.to(heads.q.dtype)

    return _attending(denoiser, {name: partial(attend, name) for name in formats})


@dataclass(frozen=True, eq=False)
class AttentionErrors:
    """What treatments change in the outputs of attention modules, call after call."""

    #: of the modules to measure; None: of each call's own numbers
    scales: Mapping[str, AttentionScales | None]
    #: by module and treatment, [lost, total] power, float64
    _sums: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def listening(self, denoiser: nn.Module) -> AbstractContextManager[None]:
        """Return the context in which calls of modules are measured, and are what they were."""
        return _attending(denoiser, {name: partial(self._measure, name) for name in self.scales})

    def of(self, module: str) -> dict[str, float]:
        """Return sum |y - y'|^2 / sum |y|^2 over sampled rows of all calls, by treatment."""
        found = {}
        for name, sums in self._sums.get(module, {}).items():
            lost, total = sums.tolist()
            found[name] = lost / total if total else 0.0
        return found

    def _measure(self, module: str, heads: Heads, call: AttentionCall) -> None:
        queries = heads.q.shape[2]
        count = min(_ROWS, queries)
        rows = torch.arange(1, 2 * count, 2, device=heads.q.device) * queries // (2 * count)
        q, k, v = (t.detach().float() for t in heads)
        wanted = nn.functional.scaled_dot_product_attention(q[:, :, rows], k, v, scale=call.scale)
        by_treatment = self._sums.setdefault(module, {})
        for treatment in ATTENTION_TREATMENTS:
            found = rounded_attention(
                Heads(q, k, v), call.scale, treatment.qk, self.scales[module], rows
            )
            power = [(wanted - found).square(), wanted.square()]
            sums = torch.stack([p.sum(dtype=torch.float64) for p in power])
            before = by_treatment.get(treatment.name)
            by_treatment[treatment.name] = sums if before is None else before + sums


def _attending(denoiser: nn.Module, attends: Mapping[str, Attend]) -> AbstractContextManager[None]:
    modules = {name: denoiser.get_submodule(name) for name in attends}
    return attending(modules, attends)
