"""Operands of gated products, and how codes are judged: the nearest of what sums may be."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.scales import cast
from tests.support.kernel_cases import GemmCase, gemm_case, launch, spacing

#: Error of a sum that GEGLU's kernels grant beside GEMM's: none, they have its loop.
SUMMED = OPS["gemm_fp8"].budget


def gate(h, g, dh, dg, scale):
    """Return h * gelu(g) / scale, and how far errors of h and g and the kernel's gelu move it.

    All float64. gelu rises by 1.13 at most; gelu.h says what it is off.
    """
    value = h * functional.gelu(g) / scale
    moved = functional.gelu(g).abs() * dh + 1.13 * dg * (h.abs() + dh)
    return value, moved / scale + 2e-4 * value.abs() + 1.3e-7 * h.abs() / scale


def check_nearest(codes, value, moved, fmt, *, others=0.03):
    """Check codes against values in float64.

    Args:
        codes: uint8.
        value: NaN where the code must be.
        moved: how far from ``value`` the number may be whose nearest code was taken.
        fmt: of the codes.
        others: share of codes that need not be the nearest of ``value`` itself.
    """
    fmt = FORMATS[fmt]
    found, missing = codes.view(fmt.torch_dtype).double(), value.isnan()
    # int8 has no NaN: the code that no number gets stands for it.
    assert torch.equal(found < -fmt.max if fmt.is_integer else found.isnan(), missing)
    found, value, moved = found[~missing], value[~missing].clamp(-fmt.max, fmt.max), moved[~missing]
    if fmt.is_integer:
        half = torch.full_like(value, 0.5)
    else:
        least = float(torch.finfo(fmt.torch_dtype).tiny)
        half = (value.abs() + moved).clamp(min=least) * 2.0 ** -(fmt.mantissa_bits + 1)
    assert bool(((found - value).abs() <= half + moved).all())
    nearest = cast(value.float(), fmt).double()
    wrong = (found != nearest).sum().item()
    assert wrong <= 1 + others * found.numel()


@dataclass(frozen=True)
class GatedCase:
    """Operands of one gated product."""

    variant: Variant
    #: the product before the gate, 2 N columns
    product: GemmCase
    y_scale: torch.Tensor

    @property
    def sizes(self):
        return {"m": self.product.m, "n": self.product.n // 2, "k": self.product.k}

    @property
    def shape(self):
        return self.product.m, self.product.n // 2

    @property
    def tensors(self):
        return {**self.product.tensors, "y_scale": self.y_scale}

    def run(self, layout, threads=2):
        y = torch.empty(self.shape, dtype=torch.uint8)
        tensors = {**self.tensors, "y": y}
        return launch(self.variant, layout, tensors, self.sizes, threads=threads)["y"]

    def check(self, codes):
        """Check codes (M, N)."""
        constant, factor = SUMMED.float32
        granted = (constant + factor * self.product.k**0.5) * spacing(
            self.product.sizes(), torch.float32
        )
        halves = (t.chunk(2, dim=1) for t in (self.product.exact(), granted))
        (h, g), (dh, dg) = halves
        value, moved = gate(h, g, dh, dg, self.y_scale.double())
        check_nearest(codes, value, moved, self.variant.word("QK_Y_FORMAT"))


def gated_case(variant, m, n, k, generator, *, bias=True):
    """Return random operands of a GEGLU variant: sums are about 2, and e4m3fn ends at 9."""
    words = (*variant.words[:5], variant.words[-1])
    plain = Variant(OPS[variant.op.name.replace("geglu", "gemm")], words)
    product = gemm_case(plain, m, 2 * n, k, generator, bias=bias)
    size = 2 / product.changed(bias=None).exact().square().mean().sqrt().clamp(min=1e-3)
    product = product.changed(w_scale=product.tensors["w_scale"] * size.float())
    return GatedCase(variant, product, torch.tensor([0.02]))
