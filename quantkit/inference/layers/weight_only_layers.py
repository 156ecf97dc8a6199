"""Weight-only layers: kernels that read packed weights for few rows, torch's GEMM for more.

Few rows are bound by reading the weight's bytes. More rows, and inputs in float32, take a
dequantized weight and torch's GEMM, which decodes the weight once for all rows.
"""

import torch

from quantkit.device.ops.products.weight_only import BLOCKS, FORMATS, MOST_ROWS
from quantkit.numerics.granularity import PerGroup
from quantkit.numerics.scheme import Activation, Scheme

_DTYPES = (torch.float16, torch.bfloat16)

#: What of a layer that the operation takes it does not.
OTHERS = f"inputs of more than {MOST_ROWS} rows, or in float32, take a dequantized weight"


def why_dequantized(weight: tuple[int, ...], scheme: Scheme) -> str:
    """Return why a layer's weight is always dequantized; empty when few rows use it packed.

    Args:
        weight: shape of the dense weight.
        scheme: of the layer, whose inputs stay in 16 bit.
    """
    assert scheme.activation is Activation.NONE
    if len(weight) > 2:
        return "inputs stay in 16 bit, and no kernel takes windows of them"
    if scheme.sparsity is not None:
        return f"inputs stay in 16 bit, and no kernel multiplies them by {scheme.sparsity} weights"
    name = scheme.weight.name
    if name not in FORMATS:
        return f"inputs stay in 16 bit, and no kernel multiplies them by {name}"
    if isinstance(scheme.granularity, PerGroup) and name not in BLOCKS:
        return f"inputs stay in 16 bit, and no kernel takes {name} with a scale per group"
    return ""


def are_few(rows: int, dtype: torch.dtype) -> bool:
    """Return whether inputs are multiplied by weights as they are packed."""
    return rows <= MOST_ROWS and dtype in _DTYPES
