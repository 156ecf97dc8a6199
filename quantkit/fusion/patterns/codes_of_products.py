"""Products that end in codes: an activation, or GEGLU, and the next layer's quantization.

    gemm -> gelu or silu -> quantize        becomes  project_gelu
    gemm -> h, g -> h * gelu(g) -> quantize becomes  geglu

It pays because 16 bit of the widest tensors of a block are neither written nor read, where the
architecture's ``slow_ends`` do not say that a product and a row kernel take less time.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from quantkit.device.backends import Backend, sums_are_fast
from quantkit.device.choosing import choose, pays
from quantkit.device.ops.table import OPS, name_for
from quantkit.device.torch_operators import OVERLOADS
from quantkit.fusion.program import Call, Program, Value
from quantkit.fusion.simplify import without_unread
from quantkit.fusion.sources import Sources
from quantkit.numerics.formats import find_format

_ATEN = torch.ops.aten
#: Quantizations of static scales, by one operator for the formats of a kind.
QUANTIZE = {OVERLOADS[name_for("quantize_static", fmt)] for fmt in ("e4m3fn", "int8")}
_GEMMS = {OVERLOADS[op.name]: op for op in OPS.values() if op.family == "gemm"}


def end_products_in_codes(program: Program) -> Program:
    """Return a program whose products write the codes that the next ones read, where it pays."""
    chains = _Chains(Sources(program))
    calls = tuple(chains.rewritten(call) or call for call in program.calls)
    return without_unread(replace(program, calls=calls))


@dataclass(frozen=True, eq=False)
class _Chains:
    sources: Sources

    def rewritten(self, call: Call) -> Call | None:
        """Return the product that gives the codes of a quantization; None: there is none."""
        if call.operator not in QUANTIZE:
            return None
        x, smooth, scale, fmt = call.arguments
        last = self.sources.only_maker(x, call)
        if last is None:
            return None
        if last.operator is _ATEN.mul.Tensor and smooth is None:
            return self._gated(call, last, scale, fmt)
        return self._activated(call, last, (None, smooth, scale), fmt)

    def _activated(self, call: Call, last: Call, others: tuple[Any, ...], fmt: str) -> Call | None:
        word = _word(last)
        gemm = self.sources.only_maker(last.arguments[0], last) if word else None
        if gemm is None or not self._is_whole(last.arguments[0], gemm):
            return None
        return self._ended(call, gemm, "project_gelu", (*others, word), fmt)

    def _gated(self, call: Call, last: Call, scale: Value, fmt: str) -> Call | None:
        h, activated = last.arguments
        gelu = self.sources.only_maker(activated, last)
        if gelu is None or _word(gelu) != "gelu":
            return None
        g = gelu.arguments[0]
        gemm = self.sources.makers.get(self.sources.base(g))
        if (
            gemm is None
            or self.sources.base(h) != self.sources.base(g)
            or not self._are_halves(h, g, gemm)
        ):
            return None
        if {*self.sources.readers[self.sources.base(g)]} != {gelu, last}:
            return None
        return self._ended(call, gemm, "geglu", (scale,), fmt)

    def _ended(
        self, call: Call, gemm: Call, family: str, others: tuple[Any, ...], fmt: str
    ) -> Call | None:
        """Return a product with another end, where there is a kernel and it pays."""
        op = _GEMMS.get(gemm.operator)
        name = op.name.replace("gemm", family) if op else ""
        if op is None or name not in OVERLOADS:
            return None
        *operands, x_format, w_format, dtype = gemm.arguments
        layouts = self.sources.program.layouts
        x, w_scale = layouts[operands[0]], layouts[operands[-2]]
        same_kind = find_format(x_format).is_integer is find_format(fmt).is_integer
        if not same_kind or len(w_scale.shape) > 1 or dtype not in (torch.float16, torch.bfloat16):
            return None
        chosen = choose(name, x.device, k=x.shape[1]).backend
        if chosen is Backend.REFERENCE or not pays(name, x.device, fast=sums_are_fast()):
            return None
        arguments = (*operands, *others, x_format, w_format, fmt, dtype)
        return replace(call, operator=OVERLOADS[name], arguments=arguments, keywords={})

    def _is_whole(self, value: Value, gemm: Call) -> bool:
        """Tell whether a value is all of a product, row by row."""
        layouts = self.sources.program.layouts
        mine, whole = layouts[value], layouts[gemm.result]
        rows = mine.strides[-1] == 1 and mine.shape[-1] == whole.shape[-1]
        return rows and mine.numel == whole.numel and mine.offset == whole.offset

    def _are_halves(self, h: Value, g: Value, gemm: Call) -> bool:
        """Tell whether values are the left and the right columns of a product."""
        layouts = self.sources.program.layouts
        first, second, whole = layouts[h], layouts[g], layouts[gemm.result]
        half = whole.shape[-1] // 2
        return (
            first.shape == second.shape
            and first.strides == second.strides
            and first.shape[-1] == half
            and first.strides[-1] == 1
            and 2 * first.numel == whole.numel
            and (first.offset, second.offset) == (whole.offset, whole.offset + half)
        )


def _word(call: Call) -> str:
    """Return the activation that a call computes; empty: none of ours."""
    if call.operator is _ATEN.silu.default:
        return "silu"
    if call.operator is not _ATEN.gelu.default:
        return ""
    return {"none": "gelu", "tanh": "tanh"}[str(call.keywords.get("approximate", "none"))]
