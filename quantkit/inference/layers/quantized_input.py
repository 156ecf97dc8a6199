"""Quantized inputs: codes that attention passes to packed layers instead of 16 bit."""

from typing import NamedTuple

import torch
from torch import Tensor


class QuantizedInput(NamedTuple):
    """An input as codes, with the attributes of a tensor that diffusers' processors read."""

    #: uint8, (M, K)
    codes: Tensor
    #: float32, () or (1,) of static codes, (M,) of codes per token
    scale: Tensor
    #: of the dequantized input: (..., K)
    shape: torch.Size
    #: of the dequantized input, and of the layers' products
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.codes.device

    @property
    def is_cuda(self) -> bool:
        """True on a GPU."""
        return self.codes.is_cuda

    @property
    def requires_grad(self) -> bool:
        """False: codes have no gradient."""
        return False
