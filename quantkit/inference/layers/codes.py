"""Codes as frozen parameters, so that offloading and parameter counts include them."""

from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import InputError


class Codes(nn.Parameter):
    """Codes, positions, factors or scales of a weight: moved as parameters, never trained or cast.

    Libraries offload parameters, not buffers. They also take the dtype of the first floating-point
    parameter for the model's, and cast all such: neither FP8 nor a scale must pass for one.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> "Codes":  # noqa: FBT001, FBT002, PYI034  torch's signature
        """Return codes over the memory of ``data``; ``requires_grad`` has to be False."""
        assert not requires_grad, "codes have no gradient"
        made: Codes = torch.Tensor._make_subclass(cls, data, False)  # noqa: SLF001  as nn.Parameter
        return made

    def requires_grad_(self, requires_grad: bool = True) -> "Codes":  # noqa: FBT001, FBT002  torch's signature
        """Return self, which is not trained.

        Raises:
            InputError: it is to be.
        """
        if requires_grad:
            raise InputError(
                "requires_grad: codes of a packed layer have no gradient, nor has a copy of it (an "
                "adapter's modules_to_save); leave the layer out, or take the 16-bit model"
            )
        return self

    def copy_(self, other: Tensor, non_blocking: bool = False) -> "Codes":  # noqa: FBT001, FBT002  as above
        """Take other codes, as ``load_state_dict`` does.

        Raises:
            InputError: these are no codes, or of another format.
        """
        if other.dtype is not self.dtype:
            raise InputError(
                f"copy_: {other.dtype} values for codes in {self.dtype}; load them into the 16-bit "
                "model and pack that, or into model.dequantize()"
            )
        super().copy_(other, non_blocking)
        return self

    def is_floating_point(self) -> bool:
        """Return False: FP8 is a code, and a scale belongs to codes."""
        return False

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as bytes: torch pickles no FP8."""
        flat = self.detach().reshape(-1)
        return _codes_of, (flat.view(torch.uint8), self.dtype, tuple(self.shape))


def _codes_of(bits: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Codes:
    return Codes(bits.view(dtype).reshape(shape))
