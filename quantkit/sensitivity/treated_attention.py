"""Attention under a treatment in plain PyTorch, and its error in a running pipeline."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.calibration.observing.attention_observer import attending
from quantkit.calibration.statistics.format_errors import lost_power, rounded_attention
from quantkit.models.attention_modules import Attend, AttentionCall, Heads
from quantkit.numerics.attention_formats import ATTENTION_FORMATS, AttentionFormat
from quantkit.numerics.attention_scales import AttentionScales
from quantkit.sensitivity.treatments import ATTENTION_TREATMENTS


def rounding(
    denoiser: nn.Module,
    formats: Mapping[str, AttentionFormat],
    scales: Mapping[str, AttentionScales | None],
) -> AbstractContextManager[None]:
    """Return the context in which attention modules compute on codes, except calls with a mask.

    Args:
        denoiser: the module that the pipeline calls.
        formats: by module path.
        scales: static ones, or None, of these modules and maybe others.
    """

    def attend(module: str, heads: Heads, call: AttentionCall) -> Tensor:
        y = rounded_attention(heads, call.scale, formats[module], scales[module])
        return y.to(heads.q.dtype)

    return _attending(denoiser, {name: partial(attend, name) for name in formats})


@dataclass(frozen=True, eq=False)
class AttentionErrors:
    """Output errors of attention modules under treatments, summed over calls."""

    #: of the modules to measure; None: of each call's own numbers
    scales: Mapping[str, AttentionScales | None]
    #: by module and treatment, [lost, total] power, float64
    _sums: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def listening(self, denoiser: nn.Module) -> AbstractContextManager[None]:
        """Return the context in which calls of modules are measured and not changed."""
        return _attending(denoiser, {name: partial(self._measure, name) for name in self.scales})

    def of(self, module: str) -> dict[str, float]:
        """Return sum |y - y'|^2 / sum |y|^2 over sampled rows of all calls, by treatment."""
        found = {}
        for name, sums in self._sums.get(module, {}).items():
            lost, total = sums.tolist()
            found[name] = lost / total if total else 0.0
        return found

    def _measure(self, module: str, heads: Heads, call: AttentionCall) -> None:
        lost, total = lost_power(heads, call.scale, ATTENTION_FORMATS, self.scales[module])
        by_treatment = self._sums.setdefault(module, {})
        for treatment, of_heads in zip(ATTENTION_TREATMENTS, lost, strict=True):
            sums = torch.stack([of_heads.sum(), total.sum()])
            before = by_treatment.get(treatment.name)
            by_treatment[treatment.name] = sums if before is None else before + sums


def _attending(denoiser: nn.Module, attends: Mapping[str, Attend]) -> AbstractContextManager[None]:
    modules = {name: denoiser.get_submodule(name) for name in attends}
    return attending(modules, attends)
