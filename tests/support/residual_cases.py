"""Products that are added to something, and the same from the product alone, bit for bit."""

from dataclasses import replace

import torch

from quantkit.device.hopper.hopper_gemm import Residual
from quantkit.device.ops.op import Variant
from quantkit.device.ops.products.residual import SUFFIX
from quantkit.device.ops.table import OPS


def product_of(variant):
    """Return the variant of the product alone, in float32."""
    pairs = zip(variant.op.axes, variant.words, strict=True)
    words = {axis.macro: word for axis, word in pairs if axis.macro != "QK_RESIDUAL"}
    words["QK_IO"] = "f32"
    return Variant(OPS[variant.op.name.removesuffix(SUFFIX)], tuple(words.values()))


def alone(kernel):
    """Return Hopper's kernel of the product alone, in float32."""
    return replace(kernel, residual=Residual.NONE, io="f32")


def named(op, operands):
    """Return operands by the names of their arguments."""
    names = [a.name for a in op.args if a.is_pointer and not a.written]
    return dict(zip(names, operands, strict=True))


def gate_for(residual, pictures, generator):
    """Return a row for each of so many pictures."""
    shape = (pictures, residual.shape[-1])
    return torch.randn(shape, generator=generator).to(residual.dtype)


def summed(product, residual, gate):
    """Return what a product in float32 becomes, rounded once."""
    y = product.reshape(residual.shape)
    if gate is not None:
        y = y * gate.float().repeat_interleave(len(y) // len(gate), dim=0)
    return (y + residual.float()).to(residual.dtype)


def same_bits(found, wanted):
    """Tell whether two results are the same, NaN in the same places."""
    here = torch.equal(found.isnan(), wanted.isnan())
    return here and torch.equal(found.nan_to_num(0), wanted.nan_to_num(0))
