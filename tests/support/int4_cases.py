"""Operands of products of int4 weights, and the int8 products that must give the same."""

from dataclasses import replace

import numpy as np
import torch

from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS


def int4_weights(rows, k, generator):
    """Return codes and scales of groups, with the extremes of both in the first rows."""
    w = torch.randint(256, (rows, k // 2), generator=generator).to(torch.uint8)
    group = torch.randint(1, 16, (rows, k // 32), generator=generator)
    group *= torch.randint(2, group.shape, generator=generator) * 2 - 1
    w[0], group[0] = 0, 15
    w[-1], group[-1] = 0xF0, -15
    return w, group.to(torch.int8).view(torch.uint8)


def decoded_by_numpy(w, group):
    """Return int8 codes, written from FORMAT's words: byte i of 16 has the codes i and i + 16."""
    values = np.empty((w.shape[0], w.shape[1] * 2), np.int8)
    for k in range(values.shape[1]):
        byte = w[:, k // 32 * 16 + k % 16].numpy()
        nibble = byte & 0xF if k % 32 < 16 else byte >> 4
        values[:, k] = (nibble.astype(np.int32) - 8) * group[:, k // 32].view(torch.int8).numpy()
    return torch.from_numpy(values).view(torch.uint8)


def twin_of(variant):
    """Return the int8 variant of the same scales, types and tile."""
    op = OPS[variant.op.name.replace("w4a8", "int8")]
    return Variant(op, tuple("int8" if word == "int4" else word for word in variant.words))


def with_int4(variant, case, generator):
    """Return a case of the int8 twin with other weights, and the case of ``variant`` with these."""
    rows, k = case.tensors["w"].shape
    w, group = int4_weights(rows, k, generator)
    twin = _changed(case, w=decoded_by_numpy(w, group))
    return twin, replace(_changed(case, w=w, w_group=group), variant=variant)


def _changed(case, **tensors):
    """Return a case with other tensors; of a gated one, in its product."""
    product = getattr(case, "product", None)
    return replace(case, product=product.changed(**tensors)) if product else case.changed(**tensors)
